# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The functions that DeepSpeed's engine calls in the lines that ``setup.py`` adds to it.

An engine with ZeRO-1 or ZeRO-2 whose configuration says ``compile.deepcompile`` compiles itself, so that no trainer
has to call ``engine.compile()``. All ranks must compile at the same time, so an engine compiles itself only in calls
that all ranks make.
"""

import contextlib
import inspect
import logging
import sys
import traceback
from typing import TYPE_CHECKING, Any, ContextManager, Dict, List, Optional, Tuple

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.utils import log_dist

from .zero12.messages import warn

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer


def zero_optimizer(engine: "DeepSpeedEngine", optimizer: torch.optim.Optimizer) -> "DeepSpeedZeroOptimizer":
    """Returns the ZeRO optimizer that an engine wraps around ``optimizer``.

    Raises:
        RuntimeError: if host memory could not be pinned for an offloaded optimizer. The message says how much.
        ValueError: if ``compile.memory_picture`` cannot be honoured.
    """
    if _asks_for_memory_picture(engine):
        # Before ZeRO-3 changes the process.
        _refuse_other_stages(engine)
    try:
        wrapped = engine._configure_zero_optimizer(optimizer)
    except RuntimeError as error:
        # The device may also run out of memory, outside of this function of the accelerator.
        code = getattr(get_accelerator().pin_memory, "__code__", None)
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code is code]
        tensor = frames[0].f_locals.get("tensor") if frames else None
        if not engine.is_deepcompile_enabled() or tensor is None or "out of memory" not in str(error):
            raise
        raise RuntimeError(
            f"zero_optimization.offload_optimizer: {tensor.nbytes / 2**30:.1f} GiB more of pinned host memory could "
            "not be had; use more ranks, or set offload_optimizer.pin_memory to false"
        ) from error
    if _asks_for_memory_picture(engine):
        _prepare_memory_picture(engine, wrapped)
    return wrapped


def awaits_its_user(engine: "DeepSpeedEngine") -> bool:
    """Whether an engine with DeepCompile is not compiled because its user has not called ``engine.compile()``."""
    if not engine.is_deepcompile_enabled() or engine.is_deepcompile_active() or engine.is_compiled:
        return False
    # An engine without an optimizer, such as that of a reference model, does not train: DeepCompile has no task there.
    return engine.optimizer is not None and not _compiles_itself(engine)


def around_forward(
    engine: "DeepSpeedEngine", inputs: Tuple, kwargs: Dict[str, Any]
) -> ContextManager[Tuple[Tuple, Dict[str, Any]]]:
    """Returns the context in which an engine calls its module. The context yields (inputs, kwargs) for that call.

    Before its first training forward, an engine compiles itself here. A forward in evaluation mode does not count as a
    training forward, because a rank may evaluate alone, even with gradients.

    Raises:
        ValueError: if DeepCompile cannot honour an option, as ``engine.compile()`` does.
    """
    if engine.is_deepcompile_enabled() and not engine.is_compiled and torch.is_grad_enabled():
        _prepare_training(engine)
    zero12 = getattr(engine.optimizer, "_zero12", None)
    around = zero12 and zero12.around_forward
    context = contextlib.nullcontext((inputs, kwargs)) if around is None else around(engine, inputs, kwargs)
    if _asks_for_memory_picture(engine) and torch.is_grad_enabled():
        return _recorded(engine, context)
    return context


def is_own_backward(engine: "DeepSpeedEngine") -> bool:
    """Called when a backward comes to an output of an engine. Returns whether it is a backward of this engine.

    A backward that a caller of ``engine.backward()`` runs is one, because all ranks call that function. Any other
    backward only passes through the engine unless its caller wants gradients of the engine's parameters: for example
    the backward of a generator through a frozen critic, or ``torch.autograd.grad()`` of inputs.

    Raises:
        RuntimeError: if the backward asks compiled code for second derivatives.
    """
    if not _is_attached(engine):
        return True
    from .zero12.native import reducer_module

    if torch.is_grad_enabled() and reducer_module().leads_to_compiled_code():
        raise RuntimeError(
            "create_graph=True asks for second derivatives, and code that DeepCompile has compiled has none; run this "
            "forward and its backward in `with torch.compiler.set_stance('force_eager'):`"
        )
    return engine._running_engine_backward or engine.optimizer._zero12.reducer.leads_to_parameters()


def comes_to_output(engine: "DeepSpeedEngine") -> None:
    """Called when a backward comes to an output of an engine, for each output. Announces the backward to the engine.

    DeepSpeed itself announces the first backward through the outputs of a forward only.
    """
    if _is_attached(engine) and not engine.optimizer._zero12.reducer.in_backward:
        engine._backward_prologue()


def after_step(engine: "DeepSpeedEngine") -> None:
    """Called on all ranks after an optimizer step. Writes to monitors, if the configuration asks for it.

    Also compiles an engine that no training forward has compiled.
    A forward does not compile the engine if the module was in evaluation mode, if the module was called without the
    engine, or if gradients were held before the forward.
    """
    if _asks_for_memory_picture(engine) and engine._memory_recorder is not None:
        engine._memory_recorder.after_step()
    if not engine.is_compiled and _is_due(engine):
        _compile(engine, "after its first step")
    elif _is_attached(engine) and engine.optimizer._zero12.monitors_memory:
        from .zero12.monitoring import write_memory

        write_memory(engine, engine.optimizer._zero12.reducer)


def note_compile(
    engine: "DeepSpeedEngine", backend: str, compile_kwargs: Dict[str, Any], schedule: Optional[List]
) -> None:
    """Called when ``engine.compile()`` begins. Warns if the engine is already compiled with other arguments."""
    arguments = backend, dict(compile_kwargs), schedule
    if not engine.is_compiled:
        engine._compile_arguments = arguments
        return
    default = inspect.signature(engine.compile).parameters["backend"].default
    asks = backend != default or compile_kwargs or schedule is not None
    if asks and arguments != engine._compile_arguments and _is_attached(engine):
        warn(
            "The arguments of engine.compile() have no effect, because the engine is compiled already, by itself or "
            "by an earlier call; call it before the first forward"
        )


def compile_module(engine: "DeepSpeedEngine", **compile_kwargs: Any) -> None:
    """Compiles the module as ``engine.module.compile(**compile_kwargs)`` does; ZeRO-1/2 add a ``CompilationLimit``."""
    if engine.is_deepcompile_active() and _is_attached(engine):
        engine.optimizer._zero12.limit.compile_module(engine.module, **compile_kwargs)
    else:
        engine.module.compile(**compile_kwargs)


def drop_gradients(engine: "DeepSpeedEngine") -> None:
    """Called by ``engine.zero_grad()``: drops reduced gradients too, which parameters no longer hold."""
    if _is_attached(engine):
        engine.optimizer.zero_grad()


def print_gradient_memory() -> None:
    """Called by ``see_memory_usage()``: prints what the gradients of all engines with a reducer take on this rank."""
    # Where no engine has a reducer, the module need not be loaded.
    loaded = sys.modules.get(f"{__package__}.zero12.optimizer")
    held = loaded.gradient_bytes() if loaded is not None else {}
    if held:
        # In the units of see_memory_usage().
        print("Gradients: " + ", ".join(f"{name} {value / 2**30:.2f} GB" for name, value in held.items()))


def at_end(engine: "DeepSpeedEngine") -> None:
    """Called when an engine is destroyed."""
    recorder = vars(engine).get("_memory_recorder")
    if recorder is not None:
        recorder.close()


def _asks_for_memory_picture(engine):
    # An engine without an optimizer, such as that of a reference model with the same configuration, has no steps.
    return engine._config.compile_config.memory_picture is not None and engine.basic_optimizer is not None


def _refuse_other_stages(engine):
    from .memory_picture.of_engine import refuse_other_stages

    refuse_other_stages(engine, "the optimizer of this stage")


def _prepare_memory_picture(engine, optimizer):
    from .memory_picture.of_engine import prepare

    engine._memory_recorder = prepare(engine, optimizer)


@torch.compiler.disable
def _recorded(engine, context):
    """Returns ``context``, the context of a training forward, with the recording of a step where that is due."""
    if "_memory_recorder" not in vars(engine):
        # The optimizer is not one of ZeRO, which is refused.
        _prepare_memory_picture(engine, engine.optimizer)
    recorder = engine._memory_recorder
    if recorder is not None:
        context = recorder.around_forward(context)
        if recorder.over:
            engine._memory_recorder = None
    return context


def _is_attached(engine):
    if not engine.is_deepcompile_enabled():
        return False
    # Imported here, so that training without DeepCompile does not wait for the import.
    from .zero12.optimizer import is_attached

    return is_attached(engine.optimizer)


def _compiles_itself(engine):
    return (
        engine.is_deepcompile_enabled()
        and engine.optimizer is not None
        and engine.zero_optimization_stage() in (1, 2)
        # The passes of AutoSP and AutoTP need inputs that the user prepares, so the user calls engine.compile().
        and not engine.uses_parallelization_pass_only()
    )


def _is_due(engine):
    if not _compiles_itself(engine) or getattr(engine, "_compile_arguments", None) is not None:
        # The caller called engine.compile() already. If that call raised and the caller goes on, the caller has
        # decided to train without DeepCompile.
        return False
    from .zero12.layout import holds_its_parameters
    from .zero12.options import has_gradients

    # Compiling would lose gradients that no step has used, so wait for a step. And leave parameters that a later
    # engine has taken over to that engine.
    return not has_gradients(engine) and holds_its_parameters(engine.optimizer)


# Otherwise a caller's torch.compile would trace this function, and the compiled module would become part of the
# caller's graph.
@torch.compiler.disable
def _prepare_training(engine):
    if not _is_due(engine):
        return
    if engine.module.training:
        _compile(engine, "before its first training forward")
        return
    # This forward may be training in evaluation mode. The engine would then compile itself after the step, which is
    # too late for an error: check the options now.
    from .zero12.options import refuse_options

    refuse_options(engine, get_accelerator().get_compile_backend())


def _compile(engine, when):
    backend = get_accelerator().get_compile_backend()
    log_dist(
        f"DeepCompile compiles the engine with backend '{backend}' {when}, because compile.deepcompile is true",
        ranks=[0],
        level=logging.INFO,
    )
    try:
        engine.compile(backend=backend)
    except BaseException:
        # The caller has not called engine.compile(), so the next training forward tries again and raises again.
        engine._compile_arguments = None
        raise

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Records one step of an engine, as ``compile.memory_picture`` asks, on the first and on the last rank.

Until that step begins, a :class:`Recorder` only counts steps. While the step runs, four methods of the engine and of
its optimizer are wrapped, on these objects alone. Afterwards the engine drops the recorder.
"""

import contextlib
import dataclasses
import datetime
import functools
import logging
import platform
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, ContextManager, Dict, Iterator, List, Optional, Tuple

import torch

import deepspeed
import deepspeed.comm as dist
from deepspeed.utils import logger

from ...zero_1_and_2.collectives import every_rank_raises
from ...zero_1_and_2.engine.state import state_of
from ...zero_1_and_2.messages import warn
from ...zero_1_and_2.parameter.carrier import mapped_memory
from . import data
from .record import Recording, Tensors, begins, ends, flattened, phase

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

OPTION = "compile.memory_picture"


# Functions that DeepSpeed's engine calls, in lines that setup.py adds to it -----------------------------------------


def refuse_others(engine: "DeepSpeedEngine") -> None:
    """Called when an engine begins, before anything is changed.

    Raises:
        ValueError: if the engine must record a step and will not have the optimizer of ZeRO stages 1 and 2.
    """
    # The engine of a reference model may have the same configuration, but makes no steps.
    if _option(engine) is None or engine.optimizer_name() is None:
        return
    stage = engine.zero_optimization_stage()
    if stage not in (1, 2):
        raise ValueError(
            f"{OPTION} records engines of ZeRO stage 1 and 2 only, and this engine has stage {stage}; leave {OPTION} "
            "out, or set zero_optimization.stage to 1 or 2"
        )
    accumulates_apart = engine.get_data_types() == (torch.bfloat16, torch.float32) and not engine.zero_cpu_offload()
    if stage == 1 and accumulates_apart:
        raise ValueError(
            f"{OPTION} records DeepSpeedZeroOptimizer only, and this engine will have BF16_Optimizer; leave {OPTION} "
            "out, or with bf16 in stage 1 leave grad_accum_dtype out"
        )


def prepare(engine: "DeepSpeedEngine") -> None:
    """Called when the optimizer is made. Gives the engine the recorder that its configuration asks for.

    Raises:
        ValueError: if a rank cannot write the files. The message says why, and what to do.
    """
    option = _option(engine)
    if option is None:
        return
    rank, world = dist.get_rank(), dist.get_world_size()
    # Only the first rank warns of a missing library.
    if rank == 0 and data.drawer() is None:
        warn(
            f"{OPTION}: {data.WITHOUT_LIBRARY}, now or before `python -m {__package__} FILE.json` draws what is only "
            "written meanwhile"
        )
    records = rank in (0, world - 1)
    with every_rank_raises("keep records of memory"):
        if records:
            try:
                Path(option.folder).mkdir(parents=True, exist_ok=True)
                # Try whether files can be written there.
                with tempfile.TemporaryFile(dir=option.folder):
                    pass
            except OSError as error:
                why_not = f"{option.folder} cannot be written on rank {rank} ({error.strerror or error})"
                raise ValueError(f"{OPTION}.folder: {why_not}; name another folder") from error
    if records:
        engine._memory_recorder = Recorder(engine, Path(option.folder), option.step)


def around_forward(engine: "DeepSpeedEngine", context: ContextManager[Tuple]) -> ContextManager[Tuple]:
    """Returns ``context``, the context of a forward. It also records the step if that is due."""
    if _option(engine) is None or not torch.is_grad_enabled():
        return context
    # As a decorator, disable() would import torch._dynamo with DeepSpeed, which takes a second.
    return torch.compiler.disable(_recorded)(engine, context)


def after_step(engine: "DeepSpeedEngine") -> None:
    """Called after a step of the optimizer."""
    recorder = _recorder(engine)
    if recorder is not None:
        recorder.after_step()


def at_end(engine: "DeepSpeedEngine") -> None:
    """Called when an engine is destroyed."""
    recorder = _recorder(engine)
    if recorder is not None:
        recorder.close()
        engine._memory_recorder = None


def _recorded(engine, context):
    recorder = _recorder(engine)
    return context if recorder is None else recorder.around_forward(context)


def _option(engine):
    return engine._config.compile_config.memory_picture


def _recorder(engine):
    """Returns the recorder of an engine, or None if this rank does not record, or no longer.

    An engine without an optimizer, such as that of a reference model with the same configuration, has no steps.
    """
    return vars(engine).get("_memory_recorder")


class Recorder:
    """Records one step of an engine on this rank.

    Args:
        step: the number of the engine's step to record, counted from 1. With DeepCompile, the count begins when the
            engine is compiled.
    """

    # Torch has one profiler at a time, so one engine at a time records.
    _busy: Optional["Recorder"] = None

    def __init__(self, engine: "DeepSpeedEngine", folder: Path, step: int):
        self._engine = weakref.ref(engine)
        self._folder, self._step = folder, step
        self._done = 0  # steps
        self._step_began = False  # by a training forward
        self._recording: Optional[Recording] = None
        self._unwrap = contextlib.ExitStack()
        self._backward_runs = False
        self._why_not = ""
        self.device = torch.device(deepspeed.accelerator.get_accelerator().current_device_name())
        # Python also calls this when the process ends: a trainer need not destroy its engine.
        self.close = weakref.finalize(engine, self._say_missed)

    def around_forward(self, around: ContextManager[Tuple]) -> ContextManager[Tuple]:
        """Returns ``around``, the context of a training forward. It also records the forward if that is due."""
        if self._recording is not None and self._backward_runs:
            # The last backward raised outside of engine.backward().
            self._end("an error in the backward")
            return around
        if self._recording is None and self._is_due() and not self._step_began:
            self._begin()
        self._step_began = True
        return self._recorded(around) if self._recording is not None else around

    def after_step(self) -> None:
        """Called after a step of the optimizer."""
        engine = self._engine()
        self._step_began = False
        if self._recording is not None:
            self._end("")
        elif engine.is_compiled or not engine.is_deepcompile_enabled():
            self._done += 1

    # The recording ------------------------------------------------------------------------------------------------

    def _is_due(self):
        engine = self._engine()
        return self._done >= self._step - 1 and (engine.is_compiled or not engine.is_deepcompile_enabled())

    def _begin(self):
        if Recorder._busy is not None:
            # The other engine ends its recording with its step: try again in the next step.
            return
        engine = self._engine()
        try:
            self._recording = Recording(self.device, tensors_of(engine), mapped_memory.nbytes)
        except RuntimeError as error:
            self._why_not = f"torch's profiler could not begin in step {self._done + 1} ({error})"
            return
        Recorder._busy = self
        for owner, name, wrapped in (
            (engine, "backward", self._ends_if_it_raises),
            (engine, "_backward_prologue", self._begins_backward),
            (engine, "_backward_epilogue", self._ends_backward),
            (engine.optimizer, "step", self._is_the_step),
        ):
            _wrap(self._unwrap, owner, name, wrapped)

    @contextlib.contextmanager
    def _recorded(self, around: ContextManager[Tuple]) -> Iterator[Tuple]:
        try:
            with phase("forward", self.device), around as call:
                yield call
        except BaseException as error:
            self._end(_said(error))
            raise

    def _ends_if_it_raises(self, method, *args, **kwargs):
        try:
            return method(*args, **kwargs)
        except BaseException as error:
            self._end(_said(error))
            raise

    def _begins_backward(self, method, *args, **kwargs):
        if self._recording is not None:
            self._backward_runs = True
            begins("backward")
        return method(*args, **kwargs)

    def _ends_backward(self, method, *args, **kwargs):
        result = method(*args, **kwargs)
        if self._recording is not None:
            self._backward_runs = False
            ends("backward", self.device)
        return result

    def _is_the_step(self, method, *args, **kwargs):
        def step():
            if self._recording is None:
                return method(*args, **kwargs)
            with phase("step", self.device):
                return method(*args, **kwargs)

        return self._ends_if_it_raises(step)

    def _end(self, raised):
        """Stops recording, and writes the files. Never raises: training goes on without a picture."""
        if self._recording is None:
            return
        engine, recording = self._engine(), self._recording
        self._recording = Recorder._busy = None
        self._unwrap.close()
        self.close.detach()
        engine._memory_recorder = None
        try:
            step = recording.stop({data.OPTIMIZER_STATES: tensors_of(engine)[data.OPTIMIZER_STATES]})
            step = dataclasses.replace(step.thinned(data.POINTS), raised=raised, about=self._about(engine))
            rank = step.about["rank"]
            file = data.write_step(step, self._folder, f"step{step.about['step']}-rank{rank}")
            written = [file]
            draws = data.drawer()
            if draws is not None:
                draws.draw(step, file.with_suffix(".png"))
                written = [file.with_suffix(".png"), file]
        except Exception as error:
            logger.warning(f"{OPTION}: the step's memory was recorded, but not all of it written: {_said(error)}")
            return
        names = ", ".join(str(path) for path in written)
        # Log a warning: DeepSpeed shows no lower level by default, and the user has asked for these files.
        logger.warning(f"{OPTION}: {data.headline(step)}; see {names}")

    def _about(self, engine) -> Dict[str, Any]:
        on_gpu = self.device.type != "cpu"
        about = {
            "model": type(engine.module).__name__,
            "rank": dist.get_rank(),
            "world": dist.get_world_size(),
            "device": torch.cuda.get_device_name(self.device) if on_gpu else "CPU",
            "step": self._done + 1,
            "stage": engine.zero_optimization_stage(),
            "deepcompile": engine.is_deepcompile_active(),
            "dtype": str(engine.optimizer.dtype).removeprefix("torch."),
            "accumulation": engine.gradient_accumulation_steps(),
            "micro_batch": engine.train_micro_batch_size_per_gpu(),
            "parameters": sum(parameter.numel() for parameter in engine.module.parameters()),
            "torch": torch.__version__,
            "deepspeed": deepspeed.__version__,
            "host": platform.node(),
            "date": datetime.datetime.now().isoformat(timespec="seconds"),
        }
        about["what"] = (
            f"step {about['step']} of {about['parameters'] / 1e6:,.1f} million parameters in {about['dtype']}, ZeRO-"
            f"{about['stage']} {'with' if about['deepcompile'] else 'without'} DeepCompile, micro-batch "
            f"{about['micro_batch']}, accumulation {about['accumulation']}; {about['device']}, torch {about['torch']}"
        )
        return about

    def _say_missed(self):
        """Called if no step was recorded, when the engine is destroyed or the process ends."""
        if self._recording is not None:
            Recorder._busy = None
            self._unwrap.close()
            recording, self._recording = self._recording, None
            with contextlib.suppress(RuntimeError):
                recording.drop()
            self._why_not = f"training ended within step {self._done + 1}, which was being recorded"
        why = self._why_not or f"training ended after {self._done} of the {self._step} steps that had to come"
        if logger.isEnabledFor(logging.WARNING):
            logger.warning(f"{OPTION}: no step was recorded, because {why}; set {OPTION}.step to an earlier one")


def _said(error):
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _wrap(undo: contextlib.ExitStack, owner: Any, name: str, wrapper: Callable) -> None:
    """Makes calls of ``owner.name(...)`` call ``wrapper(method, ...)`` until ``undo`` is closed."""
    before = vars(owner).get(name)
    object.__setattr__(owner, name, functools.partial(wrapper, getattr(owner, name)))
    # The owner of `undo` must not keep the engine alive.
    undo.callback(_restore, weakref.ref(owner), name, before)


def _restore(reference, name, before):
    owner = reference()
    if owner is None:
        return
    if before is None:
        del vars(owner)[name]
    else:
        vars(owner)[name] = before


def tensors_of(engine: "DeepSpeedEngine") -> Tensors:
    """Returns category -> the tensors of a ZeRO-1/2 engine that hold this category of memory between steps."""
    optimizer, module = engine.optimizer, engine.module
    states: List[Any] = [list(state.values()) for state in optimizer.optimizer.state.values()]
    targets: List[Any] = [group for group in optimizer.averaged_gradients.values() if isinstance(group, (list, tuple))]
    if optimizer.cpu_offload:
        # Gradients and new parameters pass through this memory, which stays allocated.
        targets += optimizer.param_buffer_of_bit16_for_cpu_offload_groups
    # Sharded parameters, frozen ones and remainders are in neither the module nor the flat tensors.
    shares = [*getattr(optimizer, "own_partitions", {}).values()]
    deepcompile = state_of(engine)
    shares += [share for part in (deepcompile.features if deepcompile else []) for share in part.shares]
    kept = [parameter.grad for parameter in module.parameters()]
    return {
        data.PARAMETERS: flattened([*optimizer.bit16_groups_flat, *module.parameters(), *module.buffers(), *shares]),
        data.OPTIMIZER_STATES: flattened([*optimizer.single_partition_of_fp32_groups, *states]),
        data.TARGETS: flattened(targets),
        data.WAITING: flattened(kept),
    }

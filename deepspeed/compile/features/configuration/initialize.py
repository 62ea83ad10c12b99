# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The checks of ``deepspeed.initialize()``. DeepSpeed's engine calls them in lines that ``edits.py`` adds to it."""

import contextlib
from typing import TYPE_CHECKING, Any, Optional

from torch.nn import Module

from deepspeed.accelerator import get_accelerator

from ...zero_1_and_2.feature import Request

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from deepspeed.runtime.engine import DeepSpeedEngine


def is_set_up_by_compile(engine: "DeepSpeedEngine") -> bool:
    """Whether ``engine.compile()`` sets an engine up for DeepCompile ZeRO-1/2."""
    return (
        engine.is_deepcompile_enabled()
        # Whether the engine will have an optimizer: the optimizer may not exist yet.
        and engine.optimizer_name() is not None
        and engine.zero_optimization_stage() in (1, 2)
        # The passes of AutoSP and AutoTP are DeepSpeed's own.
        and not engine.uses_parallelization_pass_only()
    )


def refuse_at_the_beginning(engine: "DeepSpeedEngine", module: Module, args: Any) -> None:
    """Called before anything is changed: checks the configuration, the module and the user's optimizer.

    The module is not on the device yet, its parameters have their own dtype, and the optimizer has these parameters.
    ``args``: those that ``deepspeed.initialize()`` was given, which may name the rank's device.

    Raises:
        ValueError: for the first option that cannot be honoured, as ``engine.compile()`` does. Also if ZeRO-3 under
            DeepCompile, which partitions the module and changes the process, has options that only ZeRO-1/2 have.
    """
    # An engine without an optimizer, such as that of a reference model, may have the configuration of one that trains.
    other_stage = engine.zero_optimization_stage() not in (1, 2) and engine.optimizer_name() is not None
    if engine.is_deepcompile_enabled() and other_stage:
        for name in engine._config.compile_config.set_for_zero_1_and_2():
            raise ValueError(
                f"compile.{name} goes with ZeRO-1 and ZeRO-2 only; leave it out, or set zero_optimization.stage to 1 "
                "or 2"
            )
    if is_set_up_by_compile(engine):
        # DeepSpeed does the same next. Ranks compare errors on the current device, and NCCL refuses the tensors of a
        # rank whose program has not set it.
        engine._set_distributed_vars(args)
        engine._set_client_model(module)
        _refuse(engine, ranks_of_one_model(engine))


def refuse_at_the_end(engine: "DeepSpeedEngine") -> None:
    """Called when an engine is complete: checks what needs the ZeRO-1/2 optimizer, such as sizes of partitions.

    Raises:
        ValueError: as at the beginning. The engine is then destroyed, so that the module can have another one.
    """
    if not is_set_up_by_compile(engine):
        return
    try:
        _refuse(engine, engine.seq_data_parallel_group)
    except Exception:
        for hook in (engine.module_forward_pre_hook, engine.module_forward_post_hook):
            hook.remove()
        # The user must see why the engine was refused, even if its end raises.
        with contextlib.suppress(Exception):
            engine.destroy()
        raise


def ranks_of_one_model(engine: "DeepSpeedEngine") -> "Optional[ProcessGroup]":
    """Returns the group of the ranks that have the same model; None for all ranks."""
    # DeepSpeed reads the caller's groups too, but later. The ranks of one sequence have the same model.
    for ask in ("get_sequence_data_parallel_group", "get_data_parallel_group"):
        if hasattr(engine.mpu, ask):
            return getattr(engine.mpu, ask)()
    return None


def _refuse(engine, group):
    """Raises, on all ranks of a group, the first problem that no argument of ``engine.compile()`` could mend."""
    # Import here: the compiler takes a second, and training without DeepCompile does not need it.
    from ...zero_1_and_2.collectives import every_rank_raises
    from ...zero_1_and_2.engine.options import problems_of, refusal

    request = Request(engine, get_accelerator().get_compile_backend(), compile_kwargs={})
    with every_rank_raises("make an engine", group):
        error = refusal(request, problems_of(request))
        if error is not None:
            raise error

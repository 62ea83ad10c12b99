# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The checks of ``deepspeed.initialize()``. DeepSpeed's engine calls them in lines that ``edits.py`` adds to it.

Models and optimizers that differ by rank are refused before anything is sent. Otherwise ranks send tensors of
different sizes. With gloo such processes die without a Python error, and NCCL may mix up tensors of different ranks.
"""

import contextlib
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple

import torch
from torch.nn import Module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import deepspeed
import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator

from ...zero_1_and_2.feature import Request

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from deepspeed.runtime.engine import DeepSpeedEngine

# Options of the section ``compile``, and of ``zero_optimization``, by which ranks send other messages.
_SENDING = (
    *("regional_compilation", "overlap_param_gather", "shard_parameters", "keep_gathered", "copy_engines"),
    *("optimizer_states", "store_param_remainders"),
)
_SENDING_OF_ZERO = ("stage", "reduce_bucket_size", "round_robin_gradients", "compute_grad_norm")
# Properties of a tensor or an option on a rank: name -> value.
Traits = Dict[str, str]


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
        _compare("configurations", _options(engine), ranks_of_one_model(engine))


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


# Models that differ by rank -------------------------------------------------------------------------------------


def refuse_other_models(engine: "DeepSpeedEngine") -> None:
    """Called when the module has its dtype, before any of its tensors is sent: refuses models that differ by rank.

    Raises:
        ValueError: on every rank, if a rank has other parameters, or with ``shard_parameters``, which sends buffers
            too, other buffers.
    """
    if is_set_up_by_compile(engine):
        sends_buffers = engine._config.compile_config.sharded is not None
        _compare("models", _traits(engine.module, sends_buffers), ranks_of_one_model(engine))


def refuse_other_optimizers(engine: "DeepSpeedEngine", optimizer: torch.optim.Optimizer) -> None:
    """Called before the ZeRO-1/2 optimizer is made, which may send the parameters of ``optimizer`` in their order.

    Raises:
        ValueError: on every rank, if a rank's optimizer has other parameters, or another order.
    """
    if not is_set_up_by_compile(engine):
        return
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    own = [
        (
            f"parameter {number} of group {index} of the optimizer",
            {"name": names.get(id(parameter), "none"), "shape": str(tuple(parameter.shape))},
        )
        for index, param_group in enumerate(optimizer.param_groups)
        for number, parameter in enumerate(param_group["params"])
    ]
    _compare("optimizers", own, engine.seq_data_parallel_group)


def _compare(what, own, group):
    # Import here, as in _refuse().
    from ...zero_1_and_2.collectives import every_rank_raises, of_first_rank

    first = dist.get_global_rank(group, 0) if group is not None else 0
    first_traits: List[Tuple[str, Traits]] = of_first_rank(own, f"{what} of all ranks", group)
    with every_rank_raises("make an engine", group):
        difference = _difference(dict(own), dict(first_traits), first)
        if difference:
            raise ValueError(f"the {what} of the ranks differ: {difference}; make the same {what} on every rank")


def _options(engine):
    """Lists what decides what ranks send, and in which order. A host may differ in other options."""
    of_compile, of_zero = engine._config.compile_config, engine._config.zero_config
    options = [(f"compile.{name}", getattr(of_compile, name, None)) for name in _SENDING]
    options += [(f"zero_optimization.{name}", getattr(of_zero, name)) for name in _SENDING_OF_ZERO]
    # Each rank may write its pictures elsewhere, and pin memory or not.
    options.append(("compile.memory_picture", getattr(of_compile, "memory_picture", None) is not None))
    options.append(("zero_optimization.offload_optimizer", engine.zero_cpu_offload()))
    installed = {"deepspeed": deepspeed.__version__, "torch": torch.__version__.partition("+")[0]}
    versions = [(f"the installed {name}", {"version": version}) for name, version in installed.items()]
    return [*versions, *((name, {"value": str(value)}) for name, value in options)]


def _traits(module, with_buffers):
    named = [("parameter", module.named_parameters(remove_duplicate=False))]
    if with_buffers:
        named.append(("buffer", module.named_buffers(remove_duplicate=False)))
    traits, first_name = [], {}
    for kind, tensors in named:
        for name, tensor in tensors:
            tie = first_name.setdefault(id(tensor), name)
            tensor_traits = {
                "shape": str(tuple(tensor.shape)),
                "dtype": str(tensor.dtype),
                "requires_grad": str(tensor.requires_grad),
                "class": type(tensor).__name__ if is_traceable_wrapper_subclass(tensor) else "a plain tensor",
                "memory": "of its own" if tie == name else f"of {tie}",
            }
            traits.append((f"{kind} {name}", tensor_traits))
    return traits


def _difference(own, first_traits, first):
    """Says the first difference, or nothing."""
    here, there = f"rank {dist.get_rank()}", f"rank {first}"
    for name in {**first_traits, **own}:
        if name not in own or name not in first_traits:
            has, lacks = (there, here) if name not in own else (here, there)
            return f"{name} is on {has} and not on {lacks}"
        for what, on_first in first_traits[name].items():
            if own[name][what] != on_first:
                return f"{what} of {name} is {on_first} on {there} and {own[name][what]} on {here}"
    if list(own) != list(first_traits):
        name, other = next(pair for pair in zip(own, first_traits) if pair[0] != pair[1])
        return f"{name} on {here} stands where {there} has {other}"
    return ""

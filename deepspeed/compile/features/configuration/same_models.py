# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Refuses models and optimizers that differ by rank, before anything is sent.

Otherwise ranks send tensors of different sizes. With gloo such processes die without a Python error, and NCCL may
mix up the tensors of different ranks.
"""

from typing import TYPE_CHECKING, Dict, List, Optional, Tuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import deepspeed.comm as dist

from .initialize import is_set_up_by_compile, ranks_of_one_model

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

# Properties of a tensor on a rank: name -> value.
Traits = Dict[str, str]


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
    # Import here, as in initialize.py.
    from ...zero_1_and_2.collectives import collective, every_rank_raises

    first = dist.get_global_rank(group, 0) if group is not None else 0
    first_traits: List[Optional[List[Tuple[str, Traits]]]] = [own if dist.get_rank() == first else None]
    with collective(f"learn whether the {what} of all ranks are the same"):
        torch.distributed.broadcast_object_list(first_traits, src=first, group=group)
    assert first_traits[0] is not None
    with every_rank_raises("make an engine", group):
        difference = _difference(dict(own), dict(first_traits[0]), first)
        if difference:
            raise ValueError(f"the {what} of the ranks differ: {difference}; make the same {what} on every rank")


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

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's Muon in an engine: its refusals, the updates of matrices, and the rule that steps them."""

import dataclasses
from typing import Iterator, List, Optional

import torch

from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ...zero_1_and_2.feature import Request, SetUpContext
from ...zero_1_and_2.layout import layouts_of
from ...zero_1_and_2.step.rule import Partition, Rule, Step, first_step
from .adam import is_scaled_by_autocast
from .muon import BATCH_NUMEL, Orthogonalizer, is_muon, matrices_of, norm_of_updates


def refusals(request: Request) -> Iterator[str]:
    """Yields a sentence for each reason why an engine cannot train with its Muon."""
    yield from _unsupported(request)
    if request.engine.optimizer is not None:
        yield from _unsupported_matrices(request.engine.optimizer)


def transform_of(context: SetUpContext) -> Optional[Orthogonalizer]:
    """Returns what orthogonalizes gradients of matrices, or None if there are none, as with another optimizer."""
    optimizer, matrices = context.optimizer, matrices_of(context.optimizer, context.layouts)
    if is_muon(optimizer.optimizer):
        # Free the memory of steps without DeepCompile: nothing is pending. Here, only steps that are taken change the
        # momentum, in place.
        optimizer._muon_pending_momentum.clear()
    batch_numel = min(BATCH_NUMEL, int(context.engine.zero_reduce_bucket_size()) // 2)
    return Orthogonalizer(matrices, batch_numel) if matrices else None


class StandIn:
    """The rule that gives other rules a partition whose optimizer treats each element by itself."""

    def __init__(self, others: List[Rule]):
        self._others = others

    def begin(self, partition: Partition) -> Optional[Step]:
        if partition.step_is_unpatched:
            optimizer, index = _stand_in(partition.optimizer, partition.index)
            partition = dataclasses.replace(partition, optimizer=optimizer, index=index)
        return first_step(self._others, partition)


def _stand_in(inner, index):
    """Returns an optimizer that steps a parameter group element by element, and the group's index there.

    This is the optimizer itself, unless it is DeepSpeed's Muon. Muon steps an update as SGD steps a gradient. Muon
    steps its other groups by an Adam, which this call makes share Muon's groups and states.
    """
    if not is_muon(inner):
        return inner, index
    groups = inner.param_groups
    if groups[index]["use_muon"]:
        names = ("params", "lr", "weight_decay")
        return torch.optim.SGD([{name: group[name] for name in names} for group in groups]), index
    adam = inner.aux_optimizer
    if adam is None:
        return inner, index
    # Share both again, as Muon's own step does: a load replaces them.
    adam.state, adam.param_groups = inner.state, [group for group in groups if not group["use_muon"]]
    return adam, sum(not group["use_muon"] for group in groups[:index])


def _unsupported(request):
    engine, inner = request.engine, request.optimizer
    if inner is None:
        # DeepSpeed or the user's function will make the optimizer.
        if engine.client_optimizer is not None or engine.optimizer_name() != "muon":
            return
    elif not is_muon(inner):
        # A class of another name that inherits from a Muon would be stepped as plain SGD, here as in DeepSpeed.
        if any("muon" in cls.__name__.lower() for cls in type(inner).__mro__):
            yield (
                f"optimizer {type(inner).__module__}.{type(inner).__name__} needs whole matrices, which it does not "
                'get from ZeRO; use DeepSpeed\'s own, "optimizer": {"type": "Muon"}'
            )
        return
    if engine.zero_cpu_offload():
        yield (
            "zero_optimization.offload_optimizer is not supported with Muon, whose updates are computed on the "
            "device; leave it out, or set compile.deepcompile to false"
        )
    if engine.zero_elastic_checkpoint():
        yield (
            "zero_optimization.elastic_checkpoint cuts Muon's momentum, which has whole matrices, at the wrong "
            "places; set it to false"
        )
    if is_scaled_by_autocast(engine):
        yield (
            "torch_autocast in fp16 divides Muon's updates, which no loss scale has multiplied, by the scale; set "
            "torch_autocast.dtype to bfloat16"
        )


def _unsupported_matrices(optimizer):
    """Yields a sentence for each parameter that is no matrix."""
    for group, matrices in matrices_of(optimizer, layouts_of(optimizer)).items():
        for matrix in matrices:
            name, shape, heads = matrix.name, matrix.size, matrix.heads
            if len(shape) < 2:
                yield f"parameter group {group} has use_muon, and its {name} is not a matrix; set it to false"
            elif heads is not None and (len(shape) != 2 or heads < 1 or shape[0] % heads):
                yield (
                    f"muon_num_heads={heads} of parameter {name} does not divide its shape {list(shape)} into heads; "
                    "set it to None"
                )


def warnings(optimizer: DeepSpeedZeroOptimizer) -> Iterator[str]:
    """Yields a sentence if clipping divides all of Muon's updates, and one if many ranks compute each of them.

    Both are so without DeepCompile too.
    """
    matrices_by_group = matrices_of(optimizer, layouts_of(optimizer))
    norm = norm_of_updates(matrices_by_group)
    if 0 < optimizer.clip_grad < norm:
        yield (
            f"gradient_clipping={optimizer.clip_grad} clips the norm of Muon's updates, about {norm:.0f} in every "
            f"step, so it divides all learning rates, Adam's too, by about {norm / optimizer.clip_grad:.0f}; set "
            "gradient_clipping to 0"
        )
    cut = [len(matrix.owners) for matrices in matrices_by_group.values() for matrix in matrices]
    owners, count = sum(cut), len(cut)
    if owners > 2 * count:
        yield (
            f"each of Muon's {count} matrices takes the time and the momentum's memory of {owners / count:.1f} ranks "
            "on average, because partitions are smaller than matrices; use fewer ranks, or AdamW, if that is too much"
        )

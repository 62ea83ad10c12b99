# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's Muon: turns the gradients of matrices into orthogonalized updates before their norm is taken.

An update overwrites its gradient. The rest of the step treats each element by itself, so other rules run it
(``muon_in_engine.py``).

Each matrix has owners, which compute its update: the ranks in whose partitions DeepSpeed would have a part of it. So
they keep the momentum that DeepSpeed's checkpoints have. Most matrices have one owner; the boundaries between n
partitions give at most n - 1 of them several, which all compute the update. In memory each rank has a shard of each
matrix (``layout.py``). So in rounds, each of a batch of matrices for each rank, ranks send owners the shards of
gradients, and owners send back those of updates.
"""

import itertools
import math
from typing import Dict, List, NamedTuple, Optional, Tuple

import torch

import deepspeed.comm as dist
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ...zero_1_and_2.collectives import collective
from ...zero_1_and_2.layout import Layout
from ..checkpoints.order import base_orders

MOMENTUM = "momentum_buffer"
# Elements of matrices of one shape that are orthogonalized together: 64 MiB in bf16, as large as a bucket.
# Newton-Schulz uses about four times as much memory, and its products are large enough for a GPU.
BATCH_NUMEL = 2**25
# Torch compiles an update again for wide, tall and square matrices, for one matrix and for several, and for each
# momentum and method. One rank may need more than torch's own limit of 8. Beyond the limit, updates run uncompiled.
COMPILATIONS = 64


class Matrix(NamedTuple):
    """A parameter that Muon orthogonalizes. Does not hold the parameter."""

    name: str
    size: torch.Size
    heads: Optional[int]  # number of heads, groups of rows that are orthogonalized by themselves, or None
    owners: List[int]  # the ranks that compute its update, ascending
    shards: List[Tuple[int, int]]  # of each rank: its first element in the matrix, and how many it has

    @property
    def numel(self) -> int:
        return self.size.numel()

    @property
    def shape(self) -> Tuple[int, int]:
        """Rows and columns of the matrix that is orthogonalized by itself: the whole parameter, or one head of it.

        As in DeepSpeed's function, the filters of a convolution in four dimensions are a matrix with a row for each
        output, and leading dimensions of other parameters number their matrices. DeepSpeed's function raises for
        filters, which it would scale by the ratio of their last two dimensions; here the ratio is that of the matrix.
        """
        size = self.size
        if self.heads is not None:
            return size[0] // self.heads, size[1]
        return (size[0], size[1:].numel()) if len(size) == 4 else (size[-2], size[-1])


def is_muon(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is DeepSpeed's own Muon. Does not import Muon's module, because that takes seconds."""
    cls = type(optimizer)
    return f"{cls.__module__}.{cls.__name__}" == "deepspeed.runtime.zero.muon.muon_optimizer.MuonWithAuxAdam"


def matrices_of(optimizer: DeepSpeedZeroOptimizer, layouts: List[Layout]) -> Dict[int, List[Matrix]]:
    """Returns the matrices of each parameter group that Muon orthogonalizes, by the group's index, in flat order.

    Empty if the optimizer is not DeepSpeed's Muon.
    """
    inner = optimizer.optimizer
    chosen = [index for index, group in enumerate(inner.param_groups) if is_muon(inner) and group["use_muon"]]
    if not chosen:
        return {}
    orders = base_orders(optimizer, layouts)
    return {group: list(_matrices(optimizer, orders[group])) for group in chosen}


def _matrices(optimizer, order):
    for first, place in zip(order.firsts, order.layout.places, strict=True):
        parameter = place.parameter
        owners = range(first // order.numel, (first + place.numel - 1) // order.numel + 1)
        pieces = [place.piece(rank) for rank in range(order.layout.world)]
        heads = getattr(parameter, "muon_num_heads", None)
        shards = [(piece.source_offset, piece.numel) for piece in pieces]
        yield Matrix(optimizer.param_names[parameter], parameter.shape, heads, [*owners], shards)


def norm_of_updates(matrices: Dict[int, List[Matrix]]) -> float:
    """Estimates the norm of the updates of all matrices: the singular values of an update are about 1.

    Muon multiplies the update of a matrix with more rows than columns by the root of the ratio.
    """
    total = 0.0
    for matrix in itertools.chain(*matrices.values()):
        rows, columns = matrix.shape
        total += matrix.numel / (rows * columns) * min(rows, columns) * max(1.0, rows / columns)
    return math.sqrt(total)


class Orthogonalizer:
    """Computes the updates of one engine's matrices. The public members are those of ``Transform`` in ``feature.py``.

    Args:
        batch_numel: elements of matrices to orthogonalize together. A larger matrix is orthogonalized by itself.
    """

    def __init__(self, matrices: Dict[int, List[Matrix]], batch_numel: int):
        self.matrices, self._batch_numel = matrices, batch_numel
        # Momentum has whole matrices, so it lies outside of the partition. A rank without matrices has none.
        self.groups = matrices.keys()

    @torch.no_grad()
    def run(self, optimizer: DeepSpeedZeroOptimizer) -> None:
        """Writes updates over the gradients in ``averaged_gradients``, and the new momentum. Called on every rank.

        Raises:
            DistBackendError: if ranks could not exchange the parts of matrices.
            RuntimeError: if a momentum was loaded that belongs to other partitions.
        """
        with torch.profiler.record_function("deepcompile::muon"):
            for group in self.groups:
                self._run(optimizer, group)

    def _run(self, optimizer, group):
        process_group, matrices = optimizer.real_dp_process_group[group], self.matrices[group]
        rank, world = dist.get_rank(process_group), dist.get_world_size(process_group)
        own = iter(optimizer.averaged_gradients[group].without_padding())
        gradients = {index: next(own).view(-1) for index, matrix in enumerate(matrices) if matrix.shards[rank][1]}
        like = optimizer.bit16_groups_flat[group].new_empty(0, dtype=optimizer.gradient_accumulation_dtype)
        batches = [self._batches(matrices, owner) for owner in range(world)]
        settings = optimizer.optimizer.param_groups[group]
        momentum = like
        if batches[rank]:
            numel = sum(matrices[index].numel for batch in batches[rank] for index in batch)
            momentum = _momentum(optimizer, group, numel, like)
        # Updates of matrices that another owner has not seen the gradient of yet.
        late: List[Tuple[torch.Tensor, torch.Tensor]] = []
        for number in range(max(map(len, batches))):
            of_ranks = [of_rank[number] if number < len(of_rank) else [] for of_rank in batches]
            numel = sum(matrices[index].numel for index in of_ranks[rank])
            self._run_round(process_group, matrices, of_ranks, gradients, momentum[:numel], settings, late)
            momentum = momentum[numel:]
        for target, update in late:
            target.copy_(update)

    def _run_round(self, process_group, matrices, of_ranks, gradients, momentum, settings, late):
        """Exchanges the gradients and the updates of one batch of each owner. What it has is freed before the next."""
        rank, world, like = dist.get_rank(process_group), len(of_ranks), momentum.new_empty(0)
        sent = [[gradients.get(index, like) for index in of_owner] for of_owner in of_ranks]
        awaited = [[matrices[index].shards[other] for index in of_ranks[rank]] for other in range(world)]
        received = _exchange(process_group, sent, [[numel for _, numel in part] for part in awaited], like)
        updates: List[List[torch.Tensor]] = [[] for _ in range(world)]
        if batch := of_ranks[rank]:
            memory = like.new_empty(len(batch), matrices[batch[0]].numel)
            places = [
                row.narrow(0, first, numel)
                for part in awaited
                for row, (first, numel) in zip(memory, part, strict=True)
            ]
            torch._foreach_copy_(places, received)
            # Free what came, whose memory Newton-Schulz may use.
            del received
            shape = (-1, *matrices[batch[0]].shape)
            updated = _update(memory.view(shape), momentum.view(shape), settings).reshape(memory.shape)
            pairs = [pair for pair in zip(updated, batch, strict=True) if matrices[pair[1]].owners[0] == rank]
            for other, part in enumerate(updates):
                part += [row.narrow(0, *matrices[index].shards[other]) for row, index in pairs]
        # The first owner of each matrix sends its update.
        senders = enumerate(of_ranks)
        updated_by = [[index for index in own if matrices[index].owners[0] == owner] for owner, own in senders]
        sizes = [[matrices[index].shards[rank][1] for index in of_owner] for of_owner in updated_by]
        received = _exchange(process_group, updates, sizes, like)
        for index, update in zip(itertools.chain(*updated_by), received, strict=True):
            target = gradients.get(index, like)
            if len(matrices[index].owners) > 1:
                # Not a view, which would keep all that came.
                late.append((target, update.clone()))
            else:
                target.copy_(update)

    def _batches(self, matrices: List[Matrix], owner: int) -> List[List[int]]:
        """Lists the indices of matrices that an owner orthogonalizes together: neighbours of one shape, whose momentum
        is contiguous. DeepSpeed sorts a group by shape, so all matrices of a shape are neighbours."""
        batches: List[List[int]] = []
        for index, matrix in enumerate(matrices):
            if owner not in matrix.owners:
                continue
            last = matrices[batches[-1][-1]] if batches else None
            limit = max(1, self._batch_numel // matrix.numel)
            if last is None or (last.numel, last.shape) != (matrix.numel, matrix.shape) or len(batches[-1]) >= limit:
                batches.append([])
            batches[-1].append(index)
        return batches


def _update(gradient, momentum, settings):
    """Returns the updates of a batch of matrices, and changes ``gradient`` and ``momentum``."""
    from deepspeed.runtime.zero.muon.original_muon import muon_update

    dynamo = torch._dynamo.config
    with dynamo.patch(recompile_limit=max(dynamo.recompile_limit, COMPILATIONS)):
        return muon_update(gradient, momentum, beta=settings["momentum"], ns_method=settings.get("ns_method", "gram"))


def _momentum(optimizer, group, numel, like):
    """Returns the momentum of this rank's matrices, 1-D: whole matrices in the order of the flat tensor.

    DeepSpeed keeps it like this without DeepCompile and in checkpoints. A load makes it fp32.
    """
    state = optimizer.optimizer.state[optimizer.single_partition_of_fp32_groups[group]]
    if MOMENTUM not in state:
        state[MOMENTUM] = torch.zeros(numel, dtype=like.dtype, device=like.device)
    elif state[MOMENTUM].numel() != numel:
        raise RuntimeError(
            f"the momentum of parameter group {group} has {state[MOMENTUM].numel()} elements and this rank's matrices "
            f"have {numel}, because its checkpoint is of other partitions; load one of as many ranks"
        )
    state[MOMENTUM] = state[MOMENTUM].to(like.dtype)
    return state[MOMENTUM]


def _exchange(process_group, sent, awaited, like):
    """Sends parts of matrices to other ranks. All ranks of the process group call it.

    Args:
        sent: for each rank, the parts that go to it, each 1-D.
        awaited: for each rank, the elements of each part that comes from it.
        like: an empty tensor of the dtype and on the device of gradients.

    Returns:
        the parts that have come, 1-D, in the order of ranks.
    """
    sizes = list(itertools.chain(*awaited))
    outgoing = torch.cat([like, *itertools.chain(*sent)])
    if len(sent) == 1:
        return list(outgoing.split(sizes))
    memory = like.new_empty(sum(sizes))
    with collective("exchange the parts of matrices"):
        dist.all_to_all_single(
            memory,
            outgoing,
            output_split_sizes=[sum(of_rank) for of_rank in awaited],
            input_split_sizes=[sum(part.numel() for part in of_rank) for of_rank in sent],
            group=process_group,
        )
    return list(memory.split(sizes))

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's Muon: turns the gradients of matrices into orthogonalized updates before their norm is taken.

An update overwrites its gradient. The rest of the step treats each element by itself, so other rules run it
(``stand_in.py``).

Every rank that owns a part of a matrix computes the update of the whole matrix, as DeepSpeed without DeepCompile does.
The boundaries between n partitions cut at most n - 1 matrices of a parameter group, whose owners send each other their
parts once. A single owner that computes such a matrix for the others would save each rank about one matrix, but would
have to send the update back in a second exchange that all owners wait for.
"""

import itertools
import math
from typing import TYPE_CHECKING, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch

import deepspeed.comm as dist

from ...zero_1_and_2.collectives import collective
from ...zero_1_and_2.layout import Layout

if TYPE_CHECKING:
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

MOMENTUM = "momentum_buffer"
# Elements of matrices of one shape that are orthogonalized together: 64 MiB in bf16, as large as a bucket.
# Newton-Schulz uses about four times as much memory, and its products are large enough for a GPU.
BATCH_NUMEL = 2**25
# Torch compiles an update again for wide, tall and square matrices, for one matrix and for several, and for each
# momentum and method. One rank may need more than torch's own limit of 8. Beyond the limit, updates run uncompiled.
COMPILATIONS = 64


class Part(NamedTuple):
    """The elements [first, last) of a matrix, which lie in the partition of rank ``owner``."""

    owner: int
    first: int
    last: int


class Matrix(NamedTuple):
    """A parameter that Muon orthogonalizes, and its parts in ascending order. Does not hold the parameter."""

    name: str
    size: torch.Size
    heads: Optional[int]  # number of heads, groups of rows that are orthogonalized by themselves, or None
    parts: List[Part]

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


def matrices_of(optimizer: "DeepSpeedZeroOptimizer", layouts: List[Layout]) -> Dict[int, List[Matrix]]:
    """Returns the matrices of each parameter group that Muon orthogonalizes, by the group's index, in flat order.

    Empty if the optimizer is not DeepSpeed's Muon.
    """
    inner = optimizer.optimizer
    chosen = [index for index, group in enumerate(inner.param_groups) if is_muon(inner) and group["use_muon"]]
    return {group: list(_matrices(optimizer, layouts[group])) for group in chosen}


def _matrices(optimizer, layout):
    for pieces in layout.by_parameter().values():
        parameter = pieces[0].parameter
        parts = [Part(piece.owner, piece.source_offset, piece.source_offset + piece.numel) for piece in pieces]
        heads = getattr(parameter, "muon_num_heads", None)
        yield Matrix(optimizer.param_names[parameter], parameter.shape, heads, parts)


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
    def run(self, optimizer: "DeepSpeedZeroOptimizer") -> None:
        """Writes updates over the gradients in ``averaged_gradients``, and the new momentum. Called on every rank.

        Raises:
            DistBackendError: if ranks could not exchange the parts of matrices.
            RuntimeError: if a momentum was loaded that belongs to other partitions.
        """
        with torch.profiler.record_function("deepcompile::muon"):
            for group in self.groups:
                self._run(optimizer, group)

    def _run(self, optimizer, group):
        process_group = optimizer.real_dp_process_group[group]
        rank = dist.get_rank(process_group)
        matrices = [matrix for matrix in self.matrices[group] if any(part.owner == rank for part in matrix.parts)]
        gradients = [view.view(-1) for view in optimizer.averaged_gradients[group].without_padding()]
        like = optimizer.bit16_groups_flat[group].new_empty(0, dtype=optimizer.gradient_accumulation_dtype)
        # All ranks of the process group exchange parts, or none.
        received = {}
        if any(len(matrix.parts) > 1 for matrix in self.matrices[group]):
            received = _exchange(process_group, matrices, gradients, like)
        if not matrices:
            return
        settings = optimizer.optimizer.param_groups[group]
        momentum = _momentum(optimizer, group, sum(matrix.numel for matrix in matrices), like)
        for batch in self._batches(matrices):
            numel = matrices[batch.start].numel
            momentum_of_batch, momentum = momentum[: len(batch) * numel], momentum[len(batch) * numel :]
            shape = (-1, *matrices[batch.start].shape)
            memory = like.new_empty(len(batch), numel)
            places, sources, targets, updates = [], [], [], []
            for row, index in zip(memory, batch, strict=True):
                for part in matrices[index].parts:
                    place = row[part.first : part.last]
                    is_own = part.owner == rank
                    places.append(place)
                    sources.append(gradients[index] if is_own else received.pop((index, part.owner)))
            torch._foreach_copy_(places, sources)
            # Free the received parts, whose memory Newton-Schulz may use.
            del sources
            update = _update(memory.view(shape), momentum_of_batch.view(shape), settings).reshape(len(batch), numel)
            for row, index in zip(update, batch, strict=True):
                (part,) = (part for part in matrices[index].parts if part.owner == rank)
                targets.append(gradients[index])
                updates.append(row[part.first : part.last])
            torch._foreach_copy_(targets, updates)

    def _batches(self, matrices: List[Matrix]) -> Iterator[range]:
        """Yields the indices of matrices to orthogonalize together: neighbours of one shape, whose momentum is
        contiguous. DeepSpeed sorts a group by shape, so all matrices of a shape are neighbours."""
        first = 0
        while first < len(matrices):
            limit = max(1, self._batch_numel // matrices[first].numel)
            kinds = [(matrix.numel, matrix.shape) for matrix in matrices[first : first + limit]]
            last = first + sum(1 for _ in itertools.takewhile(kinds[0].__eq__, kinds))
            yield range(first, last)
            first = last


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


def _exchange(process_group, matrices, gradients, like):
    """Sends this rank's part of each matrix to the matrix's other owners.

    Args:
        process_group: the parameter group's process group. All its ranks make this call.
        matrices: the matrices of which this rank owns a part.
        gradients: the gradient of this rank's part of each matrix, 1-D.
        like: an empty tensor of the dtype and on the device of gradients.

    Returns:
        (index in ``matrices``, owner) -> the gradient of that owner's part, 1-D.
    """
    rank, world = dist.get_rank(process_group), dist.get_world_size(process_group)
    sent: List[List[torch.Tensor]] = [[] for _ in range(world)]
    awaited: List[List[Tuple[int, Part]]] = [[] for _ in range(world)]
    for index, matrix in enumerate(matrices):
        for part in matrix.parts:
            if part.owner != rank:
                sent[part.owner].append(gradients[index])
                awaited[part.owner].append((index, part))
    in_order = list(itertools.chain(*awaited))
    sizes = [part.last - part.first for _, part in in_order]
    memory = like.new_empty(sum(sizes))
    with collective("exchange the parts of matrices that boundaries of partitions cut"):
        dist.all_to_all_single(
            memory,
            torch.cat([like, *itertools.chain(*sent)]),
            output_split_sizes=[sum(part.last - part.first for _, part in parts) for parts in awaited],
            input_split_sizes=[sum(part.numel() for part in parts) for parts in sent],
            group=process_group,
        )
    return {
        (index, part.owner): gradient for (index, part), gradient in zip(in_order, memory.split(sizes), strict=True)
    }

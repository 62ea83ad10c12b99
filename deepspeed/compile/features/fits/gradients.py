# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What a rank holds of its parameters, masters and moments, and of gradients while a backward runs.

The sizes are those of the engine: the layout cuts parameters (``gradient/layout.py``), and the native reducer itself
gets the gradients of a backward, as tensors without memory, over a process group of which only one rank is there. It
counts what it holds.
"""

import contextlib
import functools
import itertools
from types import SimpleNamespace
from typing import Any, Iterator, List, NamedTuple, Sequence

import torch
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from ...zero_1_and_2.engine.set_up import send_numel
from ...zero_1_and_2.gradient.layout import flat_layout, pieces
from ...zero_1_and_2.gradient.native import reducer_module
from ..ranges.partition_gradient import GATHERED_NUMEL, IN_PLACE_NUMEL
from .modes import Question

# DeepSpeed pads a flat tensor to a multiple of so many elements for each rank (``nccl_start_alignment_factor``).
ALIGNMENT = 2


def layout_of(parameters: Sequence[torch.Tensor], ranks: int) -> Any:
    """Returns what the layout and the gathers read of a ZeRO-1/2 optimizer of one parameter group."""
    ends = list(itertools.accumulate(parameter.numel() for parameter in parameters))
    return SimpleNamespace(
        round_robin_bit16_groups=[list(parameters)],
        round_robin_bit16_offsets=[[0, *ends][: len(parameters)]],
        partition_size=[-(-(ends[-1] if ends else 0) // (ranks * ALIGNMENT)) * ALIGNMENT],
    )


@contextlib.contextmanager
def one_of(ranks: int, rank: int = 0) -> Iterator[ProcessGroup]:
    """Context with a process group of so many ranks, of which only this process is there. It takes meta tensors."""
    from torch._C._distributed_c10d import FakeProcessGroup
    from torch.testing._internal.distributed.fake_pg import FakeStore

    group = ProcessGroup(FakeStore(), rank, ranks)
    fake = FakeProcessGroup._create_internal(rank, ranks)
    group._register_backend(torch.device("meta"), ProcessGroup.BackendType.CUSTOM, fake)
    yield group


@functools.lru_cache(maxsize=1)
def _have_streams_without_memory() -> torch.library.Library:
    """Has torch note nothing where a tensor without memory is used on a stream, which the reducer tells it."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("record_stream", lambda tensor, stream: None, "Meta")
    return library


class Sent(NamedTuple):
    """What a rank holds of gradients, in bytes.

    Attributes:
        before: before the backward at the boundary: of earlier micro-batches.
        arrived: after each gradient of that backward.
        bound: after the backward, and in the step.
    """

    before: int
    arrived: List[int]
    bound: int


class _Gradient(torch.autograd.Function):
    """Has a parameter get a gradient that the reducer copies, which counts as much as if the reducer kept it."""

    @staticmethod
    def forward(ctx, parameter):
        ctx.parameter = parameter
        return parameter.new_empty(())

    @staticmethod
    def backward(ctx, _):
        return ctx.parameter.detach().new_empty(()).expand(ctx.parameter.shape)


def send(
    parameters: Sequence[Parameter],
    arrivals: Sequence[int],
    ranks: int,
    rank: int,
    stage: int = 1,
    accumulation: int = 1,
    bucket: int = Question.bucket,
    overlap: bool = True,
    on_host: bool = False,
) -> Sent:
    """Gives the reducer of one rank the gradients of a step.

    Args:
        parameters: in the order of the flat tensor, on the meta device.
        arrivals: indices of parameters in the order in which their gradients arrive.
        ranks, rank: how many ranks share the parameters, and which of them this is.
        stage: of ZeRO.
        accumulation: micro-batches in a step.
        bucket: ``reduce_bucket_size``.
        overlap: whether buckets travel while the backward goes on.
        on_host: whether what has arrived lies in the host's memory, which does not count.
    """
    layout, meta = layout_of(parameters, ranks), torch.device("meta")
    _have_streams_without_memory()
    with one_of(ranks, rank) as process_group:
        reducer = reducer_module().Reducer(
            identity=-1,
            bucket_numel=bucket,
            send_numel=send_numel(ranks),
            overlap=overlap,
            synchronize_before=False,
            synchronize_after=False,
        )
        dtype = parameters[0].dtype
        # In the masters' dtype, targets lie in one flat tensor.
        flat = dtype == torch.float32
        group = reducer.add_group(process_group, layout.partition_size[0], dtype, meta, flat, None)
        # To begin with, the reducer expects gradients in the reverse of this order. After a step it expects the order
        # in which they arrived.
        last = {index: place for place, index in enumerate(arrivals)}
        offsets = [offset for _, offset in flat_layout(layout, 0)]
        for index in sorted(range(len(parameters)), key=lambda index: -last.get(index, len(arrivals))):
            reducer.register_parameter(group, str(index), parameters[index], dtype, offsets[index])
        for _ in range(accumulation - 1):
            reducer.begin_backward(stage == 2)
            for index in arrivals:
                _arrive(parameters[index])
            reducer.finish_backward(stage == 2, False)
        before = _held(reducer, on_host)
        reducer.begin_backward(True)
        arrived = []
        for index in arrivals:
            _arrive(parameters[index])
            arrived.append(_held(reducer, on_host))
        reducer.finish_backward(True, False)
        # What is left of a tied weight's second gradient would be sent when ranks have agreed on it.
        bound = 0 if on_host else reducer.counters()["bound"]
        reducer.close()
    for parameter in parameters:
        parameter.grad = None
    return Sent(before, arrived, bound)


def _arrive(parameter):
    torch.autograd.backward([_Gradient.apply(parameter)])


def _held(reducer, on_host):
    """Returns the bytes of gradients that a reducer holds on the device: bound, on their way or unreduced."""
    counters = reducer.counters()
    return counters["pending"] + counters["unreduced"] + (0 if on_host else counters["bound"])


def gathered_in_step(parameters: Sequence[torch.Tensor], ranks: int, rank: int) -> int:
    """Returns the bytes of the copy in which the update reads a rank's small gradients together."""
    owned = [piece for piece in pieces(layout_of(parameters, ranks), 0) if piece.owner == rank]
    small = [piece.numel for piece in owned if piece.numel < IN_PLACE_NUMEL]
    return min(sum(small), GATHERED_NUMEL) * parameters[0].element_size()

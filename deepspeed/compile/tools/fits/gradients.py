# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The memory of a rank's parameters, masters and moments, and of gradients while a backward runs.

The native reducer itself counts the gradients: it gets tensors without memory, over torch's fake process group.
"""

import contextlib
from typing import Iterator, List, NamedTuple, Optional, Sequence

import torch
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from ...zero_1_and_2.engine.set_up import send_numel
from ...zero_1_and_2.gradient.native import reducer_module
from ...zero_1_and_2.layout import Layout
from ...zero_1_and_2.step.partition_gradient import GATHERED_NUMEL, IN_PLACE_NUMEL
from .modes import Question


def layout_of(parameters: Sequence[Parameter], ranks: int, rank: int = 0) -> Layout:
    """Returns the layout of one parameter group with these parameters."""
    return Layout([(parameter, parameter.numel()) for parameter in parameters], ranks, rank)


@contextlib.contextmanager
def one_of(ranks: int, rank: int = 0) -> Iterator[ProcessGroup]:
    """Context with a process group of so many ranks without the other processes. It takes meta tensors."""
    from torch._C._distributed_c10d import FakeProcessGroup
    from torch.testing._internal.distributed.fake_pg import FakeStore

    group = ProcessGroup(FakeStore(), rank, ranks)
    fake = FakeProcessGroup._create_internal(rank, ranks)
    group._register_backend(torch.device("meta"), ProcessGroup.BackendType.CUSTOM, fake)
    # The reducer tells torch where a tensor is used on another stream. A tensor without memory needs no such note.
    # Torch takes one such function in a process, so it goes with the context.
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("record_stream", lambda tensor, stream: None, "Meta")
        yield group


class Sent(NamedTuple):
    """The gradients that a rank holds, in bytes."""

    before: int  # before the backward at the boundary: of earlier micro-batches
    arrived: List[int]  # after each gradient of that backward
    bound: int  # after the backward, and in the step


def send(
    parameters: Sequence[Parameter],
    arrivals: Sequence[int],
    ranks: int,
    stage: int = 1,
    accumulation: int = 1,
    bucket: int = Question.bucket,
    overlap: bool = True,
    on_host: bool = False,
    sent: Optional[torch.dtype] = None,
    rank: int = 0,
) -> Sent:
    """Returns the gradients of a step that one rank's reducer holds.

    Args:
        parameters: on the meta device, in the order of the flat tensor.
        arrivals: indices of parameters in the order in which their gradients arrive.
        ranks: how many ranks share the parameters.
        accumulation: micro-batches in a step.
        overlap: whether buckets travel while the backward goes on.
        on_host: whether arrived gradients lie in host memory, which does not count.
        sent: the dtype in which gradients are sent, if not the parameters'.
        rank: which of the ranks. The first has as much as any: the last ones have padding in its place.

    Raises:
        ValueError: if the native code cannot be built.
    """
    try:
        native = reducer_module()
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    layout, dtype = layout_of(parameters, ranks, rank), parameters[0].dtype

    def bound() -> int:
        return 0 if on_host else reducer.counters()["bound"]

    def held() -> int:
        # With padding, and with the shards that arrive beside the gradients on their way.
        counters = reducer.counters()
        return counters["bucket"] + counters["unreduced"] + bound()

    def arrive(index: int) -> int:
        # The reducer copies such a gradient, which counts as much as if it kept the gradient.
        torch.autograd.backward([parameters[index].sum()])
        return held()

    with one_of(ranks, rank) as process_group:
        reducer = native.Reducer(
            # No engine has this number.
            identity=-1,
            bucket_numel=bucket,
            send_numel=send_numel(ranks),
            overlap=overlap,
            synchronize_before=False,
            synchronize_after=False,
        )
        # In the masters' dtype, averaged gradients lie in one flat tensor.
        flat = dtype == torch.float32
        numel, meta = layout.partition_numel, torch.device("meta")
        group = reducer.add_group(process_group, ranks, numel, dtype, meta, flat, None)
        # A trained reducer expects gradients in the order in which they arrived. A new one expects the reverse of the
        # order in which parameters are registered.
        last = {index: place for place, index in enumerate(arrivals)}
        for index in sorted(range(len(parameters)), key=lambda index: -last.get(index, len(arrivals))):
            place = layout.places[index]
            reducer.register_parameter(group, str(index), place.parameter, sent or dtype, place.shard, place.offset)
        for _ in range(accumulation - 1):
            reducer.begin_backward(stage == 2)
            for index in arrivals:
                arrive(index)
            reducer.finish_backward(stage == 2, False)
        before = held()
        reducer.begin_backward(True)
        arrived = [arrive(index) for index in arrivals]
        # The rest of a tied weight's second gradient would be sent when ranks have agreed on it.
        reducer.finish_backward(True, False)
        found = Sent(before, arrived, bound())
        reducer.close()
    return found


def gathered_in_step(parameters: Sequence[Parameter], ranks: int) -> int:
    """Returns the bytes of the copy in which the update reads a rank's small gradients together."""
    owned = [piece.numel for piece in layout_of(parameters, ranks).own_pieces()]
    return min(sum(numel for numel in owned if numel < IN_PLACE_NUMEL), GATHERED_NUMEL) * parameters[0].element_size()

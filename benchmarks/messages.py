# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Lists what one training step sends on any number of ranks, without these ranks.

The code that trains decides: the native reducer gets a model's gradients as tensors without memory, over torch's fake
process group, and `runs()` cuts parameters for the overlapped gather. So the lists follow every change
of that code. Only one process is needed.
"""

import contextlib
import itertools
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import Parameter

from .workload import Shape, build_model

if TYPE_CHECKING:
    from deepspeed.compile.zero_1_and_2.parameter.runs import Run

# The layout of 0.19.8 pads a flat tensor to a multiple of this many elements for each rank.
ALIGNMENT = 2
OUTSIDE = 0


class Sizes(NamedTuple):
    """The parameters of a model, in its order, without memory."""

    parameters: list[Parameter]
    units: list[int]  # of each parameter: 0 outside of layers, otherwise 1 + the number of its layer
    work: list[int]  # of each parameter: for how many elements there are products to compute


class Sent(NamedTuple):
    """What one gradient did to the reducer's buckets."""

    work: int  # that the gradient takes, as in Sizes
    waited: bool  # whether the bucket in flight was waited for before the gradient was added
    bytes: int  # of the bucket that the gradient filled, or 0
    messages: int  # of that bucket


def sizes(shape: Shape) -> Sizes:
    """Returns the parameters of a Qwen3 of this shape, in bf16."""
    model = build_model(shape, torch.bfloat16, "meta", checkpoint=False)
    found = [re.match(r"model\.layers\.(\d+)\.", name) for name, _ in model.named_parameters()]
    work = [parameter.numel() for parameter in model.parameters()]
    # The first parameter is the embedding, whose rows are only looked up.
    work[0] = 0
    return Sizes(list(model.parameters()), [1 + int(match[1]) if match else OUTSIDE for match in found], work)


def partition_numel(model: Sizes, ranks: int) -> int:
    """Returns how many elements a rank owns."""
    total = sum(parameter.numel() for parameter in model.parameters)
    return -(-total // (ranks * ALIGNMENT)) * ALIGNMENT


def reductions(model: Sizes, ranks: int, bucket: int, send: int | None = None) -> list[Sent]:
    """Lists what the reducer does with each gradient of a backward, in the order in which gradients arrive.

    Gradients arrive in the reverse order of the parameters. What is sent after the last one is a bucket of an entry
    without a gradient.

    Args:
        model: its parameters.
        ranks: how many ranks share it.
        bucket: ``reduce_bucket_size``.
        send: with how many elements a bucket is sent, instead of what the engine chooses for so many ranks.
    """
    from deepspeed.compile.zero_1_and_2.engine.set_up import send_numel
    from deepspeed.compile.zero_1_and_2.gradient.native import reducer_module

    meta, sent = torch.device("meta"), []
    with _ranks(ranks) as process_group:
        reducer = reducer_module().Reducer(
            identity=-1,
            bucket_numel=bucket,
            send_numel=send or send_numel(ranks),
            overlap=True,
            synchronize_before=False,
            synchronize_after=False,
        )
        dtype = model.parameters[0].dtype
        group = reducer.add_group(process_group, partition_numel(model, ranks), dtype, meta, False, None)
        for number, (parameter, offset) in enumerate(zip(model.parameters, _offsets(model))):
            reducer.register_parameter(group, str(number), parameter, dtype, offset)
        reducer.begin_backward(True)
        filling = in_flight = buckets = messages = 0
        for parameter, work in [*zip(reversed(model.parameters), reversed(model.work)), (None, 0)]:
            if parameter is None:
                reducer.finish_backward(True, False)
            else:
                torch.autograd.backward([parameter.sum()])
                filling += parameter.nbytes
            after = reducer.counters()
            launched = after["buckets_sent"] > buckets
            # Before a bucket is sent, and sometimes before a gradient is added, the bucket in flight is waited for.
            waited = not launched and after["pending"] < filling + in_flight
            sent.append(Sent(work, waited, filling if launched else 0, after["messages_sent"] - messages))
            if launched:
                filling, in_flight = 0, filling
            elif waited:
                in_flight = 0
            buckets, messages = after["buckets_sent"], after["messages_sent"]
        reducer.close()
    return sent


def _offsets(model):
    ends = itertools.accumulate(parameter.numel() for parameter in model.parameters)
    return [0, *ends][:-1]


@contextlib.contextmanager
def _ranks(count: int) -> Iterator[dist.ProcessGroup]:
    """Context with a process group of so many ranks, of which only this process, the first rank, is there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    group = dist.group.WORLD
    fake = group._get_backend(torch.device("cpu"))
    group._register_backend(torch.device("meta"), dist.ProcessGroup.BackendType.CUSTOM, fake)
    try:
        yield group
    finally:
        dist.destroy_process_group()


def broadcasts(model: Sizes, ranks: int) -> "list[list[Run]]":
    """Lists what each broadcast of the overlapped gather sends, by unit in the order in which units are sent."""
    from deepspeed.compile.zero_1_and_2.parameter.runs import runs

    # What the layout reads of an optimizer.
    optimizer = SimpleNamespace(
        round_robin_bit16_groups=[model.parameters],
        round_robin_bit16_offsets=[_offsets(model)],
        partition_size=[partition_numel(model, ranks)],
    )
    members: list[list[Parameter]] = [[] for _ in range(1 + max(model.units))]
    for parameter, unit in zip(model.parameters, model.units):
        members[unit].append(parameter)
    return [runs(optimizer, unit) for unit in members]

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Lists what one training step sends on any number of ranks, without these ranks.

The code that trains decides: the native reducer gets a model's gradients as tensors without memory, over torch's fake
process group. Where parameters lie is that by which `deepspeed.compile.tools.fits` estimates memory. So the lists
follow every change of that code. Only one process is needed.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import Parameter

from .workload import Shape, build_model

if TYPE_CHECKING:
    from deepspeed.compile.zero_1_and_2.layout import Layout

# The number of the unit of the embedding and the final norm. The head is the last unit.
OUTSIDE = 0


class Sizes(NamedTuple):
    """The parameters of a model, in its order, without memory."""

    parameters: list[Parameter]
    units: list[int]  # of each parameter: the number of its unit, in the order in which the engine gathers them
    work: list[int]  # of each parameter: for how many elements there are products to compute


class Sent(NamedTuple):
    """What one gradient did to the reducer's buckets."""

    work: int  # that the gradient takes, as in Sizes
    waited: bool  # whether the bucket in flight was waited for before the gradient was added
    bytes: int  # of the bucket that the gradient filled, or 0
    messages: int  # of that bucket


def sizes(shape: Shape) -> Sizes:
    """Returns the parameters of a Qwen3 of this shape, in bf16."""
    from deepspeed.compile.features.overlap_gather.feature import units_in_order

    model = build_model(shape, torch.bfloat16, "meta", checkpoint=False)
    parameters = list(model.parameters())
    units = units_in_order(parameters, model, list(model.model.layers))
    unit_of = {id(parameter): number for number, unit in enumerate(units) for parameter in unit}
    work = [parameter.numel() for parameter in parameters]
    # The first parameter is the embedding, whose rows are only looked up.
    work[0] = 0
    return Sizes(parameters, [unit_of[id(parameter)] for parameter in parameters], work)


def layout(model: Sizes, ranks: int) -> "Layout":
    """Returns where the parameters lie in the flat tensor and the partitions of so many ranks."""
    from deepspeed.compile.tools.fits.gradients import layout_of

    return layout_of(model.parameters, ranks)


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
    from deepspeed.compile.tools.fits.gradients import one_of
    from deepspeed.compile.zero_1_and_2.engine.set_up import send_numel
    from deepspeed.compile.zero_1_and_2.gradient.native import reducer_module

    meta, sent, laid_out = torch.device("meta"), [], layout(model, ranks)
    with one_of(ranks) as process_group:
        reducer = reducer_module().Reducer(
            identity=-1,
            bucket_numel=bucket,
            send_numel=send or send_numel(ranks),
            overlap=True,
            synchronize_before=False,
            synchronize_after=False,
        )
        dtype = model.parameters[0].dtype
        group = reducer.add_group(process_group, ranks, laid_out.partition_numel, dtype, meta, False, None)
        for number, place in enumerate(laid_out.places):
            reducer.register_parameter(group, str(number), place.parameter, dtype, place.shard, place.offset)
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


def gathers(model: Sizes, ranks: int) -> list[list[int]]:
    """Lists the elements of each all-gather of the overlapped gather, with padding, by unit as they are sent."""
    return [_gathers(model, ranks, unit) for unit in _members(model)]


def sharded_gathers(model: Sizes, ranks: int) -> list[list[int]]:
    """The same for ``shard_parameters: "all"``: embedding, blocks, and head are a unit each.

    The final norm is in none: it is small, so it stays whole on every rank.
    """
    outside, *others = _members(model)
    embedding = [parameter for parameter in outside if parameter.dim() > 1]
    return [_gathers(model, ranks, unit) for unit in (embedding, *others)]


def _gathers(model, ranks, unit):
    from deepspeed.compile.zero_1_and_2.parameter.carrier import in_messages

    members = set(map(id, unit))
    places = [place for place in layout(model, ranks).places if id(place.parameter) in members]
    runs = [(place.first, ranks * place.shard) for place in places]
    return [sum(numel for _, numel in message) for message in in_messages(runs, ranks)]


def _members(model):
    members: list[list[Parameter]] = [[] for _ in range(1 + max(model.units))]
    for parameter, unit in zip(model.parameters, model.units):
        members[unit].append(parameter)
    return members

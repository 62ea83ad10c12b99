# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""A step reads what the caller has put into ``averaged_gradients``, as DeepSpeed's own step does."""

import dataclasses
import itertools
import re
from typing import List, NamedTuple, Optional, Tuple

import pytest
import torch
import torch.distributed as dist

from deepspeed.compile.zero_1_and_2 import gradient_counters
from deepspeed.utils import safe_get_full_fp32_param

from support.ids import vary
from support.lifetime import backward, start
from support.on_ranks import on_ranks
from support.training import (
    NOTHING,
    ROUNDING,
    Case,
    as_traced,
    held,
    ranges_of,
    relative_error,
    step_in_one_pass,
    updates_compiled_from,
)

# What a caller does between the last backward and the step. Each way scales the gradients of every second parameter.
# Without DeepCompile a partition has other parameters, or other parts of them, so a way goes by the parameter's number
# and not by the place in the list.


class Entries(NamedTuple):
    """Whose gradients the entries of ``averaged_gradients[group]`` are."""

    numbers: List[Optional[int]]  # of the parameters; None: padding
    alike: List[Tuple[int, int]]  # parameters to exchange: of equal shape, whose gradients one rank of DeepSpeed has

    def scale(self, index):
        number = self.numbers[index]
        return 1 if number is None else 1 - number % 2 / 2


def entries_of(optimizer, group, alike):
    places = {id(parameter): number for number, parameter in enumerate(optimizer.round_robin_bit16_groups[group])}
    numbers = [places[id(parameter)] for parameter in optimizer.params_in_partition[group]]
    padding = len(optimizer.averaged_gradients[group]) - len(numbers)
    return Entries(numbers + [None] * padding, alike)


def alike_in_partitions(optimizer, group):
    """Lists parameters of equal shape that DeepSpeed's own partitions have whole, of all ranks. All ranks call it."""
    views, parameters = optimizer.averaged_gradients[group], optimizer.round_robin_bit16_groups[group]
    whole = [
        (number, view.shape)
        for number, view in zip(entries_of(optimizer, group, []).numbers, views, strict=True)
        if number is not None and view.numel() == parameters[number].numel()
    ]
    pairs = [(one, other) for (one, shape), (other, same) in itertools.combinations(whole, 2) if shape == same]
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, pairs)
    return [pair for of_rank in of_ranks for pair in of_rank]


def marked_as(gradient, scaled):
    if hasattr(gradient, "_zero_padding"):
        # The norm of DeepSpeed's own step passes over tensors with this mark.
        scaled._zero_padding = gradient._zero_padding
    return scaled


def all_scaled(averaged, group, of):
    return [marked_as(gradient, gradient * of.scale(index)) for index, gradient in enumerate(averaged[group])]


def in_place(averaged, group, of):
    for index, gradient in enumerate(averaged[group]):
        gradient.mul_(of.scale(index))


def entries(averaged, group, of):
    for index, gradient in enumerate(averaged[group]):
        if of.scale(index) != 1:
            averaged[group][index] = marked_as(gradient, gradient * of.scale(index))


def slices(averaged, group, of):
    averaged[group][:] = all_scaled(averaged, group, of)


def lists(averaged, group, of):
    averaged[group] = all_scaled(averaged, group, of)


def data(averaged, group, of):
    for index, gradient in enumerate(averaged[group]):
        gradient.data = gradient.data * of.scale(index)


def other_layouts(averaged, group, of):
    """The new tensors are not contiguous, and have another dtype."""
    for index, gradient in enumerate(averaged[group]):
        scaled = gradient.float() * of.scale(index)
        averaged[group][index] = marked_as(gradient, torch.stack([scaled, torch.ones_like(scaled)], -1)[..., 0])


def exchanged(averaged, group, of):
    """Gradients of equal shape change places, too."""
    in_place(averaged, group, of)
    views = averaged[group]
    for one, other in of.alike:
        # A rank that has no elements of one has none of the other.
        if one in of.numbers:
            first, second = of.numbers.index(one), of.numbers.index(other)
            views[first], views[second] = views[second], views[first]


def from_behind(averaged, group, of):
    views = averaged[group]
    for index in range(-len(views), 0):
        views[index].mul_(of.scale(len(views) + index))


def by_methods(averaged, group, of):
    """Each gradient leaves the list and comes back."""
    views = averaged[group]
    for index in range(len(views)):
        gradient = views.pop(0)
        views.append(marked_as(gradient, gradient * of.scale(index)))


def by_torch(averaged, group, of):
    """Torch's functions read a list past its methods."""
    torch._foreach_mul_(averaged[group], [of.scale(index) for index in range(len(averaged[group]))])


def train(case, change, one_pass, alike):
    """Trains for four steps, and returns the master weights, and what was held after each step.

    ``alike``: of each parameter group, parameters to exchange. An engine without DeepCompile fills the list.
    """
    after = []
    # A partition is stepped in one pass from two rows on, of 16 elements each.
    least = 32 if one_pass else 2**30
    with ranges_of(48), updates_compiled_from(least, 32), as_traced(True):
        module, engine = start(case)
        optimizer = engine.optimizer
        if case.deepcompile:
            step_in_one_pass(engine)
        for step in range(4):
            backward(engine, step)
            if not alike:
                alike += [alike_in_partitions(optimizer, group) for group in range(case.groups)]
            for group in range(case.groups):
                change(optimizer.averaged_gradients, group, entries_of(optimizer, group, alike[group]))
            engine.step()
            after.append(held(gradient_counters(engine)) if case.deepcompile else NOTHING)
        # Without the part that links parameters with master weights, only the parameters say what these are.
        master = torch.Tensor.detach if case.dtype == "fp32" else safe_get_full_fp32_param
        ends = [master(parameter).clone() for parameter in module.parameters()]
        engine.destroy()
    return ends, after


def check_changed(case, change, one_pass=False):
    """Asserts that training comes to where DeepSpeed's own step does, and releases its gradients in each step."""
    without, alike = dataclasses.replace(case, deepcompile=False, offloaded=False), []
    expected, _ = train(without, change, False, alike)
    unchanged, _ = train(without, lambda *_: None, False, alike)
    assert all(alike)
    ends, after = train(case, change, one_pass, alike)
    difference = relative_error(expected, unchanged)
    assert difference > 1e-2, "what changes gradients changes little, so agreement shows nothing"
    # A rounding of a parameter changes the gradients that come after it.
    assert relative_error(ends, expected) < 2 * ROUNDING[case.dtype] * difference
    assert after == [NOTHING] * 4


WAYS = [in_place, entries, slices, lists, data, other_layouts, exchanged, from_behind, by_methods, by_torch]


@pytest.mark.follows("tensors; assign a tensor to an entry of the list", "is not a tensor of {} elements; assign one")
@pytest.mark.core
@vary("change", WAYS)
@vary("stage, groups, clipping", [(1, 1, 0.0), (2, 2, 0.05)])
@on_ranks(2)
def test_a_flat_partition(change, stage, groups, clipping):
    """A step that takes the flat partition would pass over gradients that the caller has put in its place."""
    check_changed(Case(model="RepeatedLayers", stage=stage, groups=groups, clipping=clipping), change)


@vary("change", WAYS)
@vary("one_pass, offloaded", [(False, False), (True, False), (True, True)])
@on_ranks(2)
def test_gradients_in_memory_of_their_own(change, one_pass, offloaded):
    """A step that reads gradients in place, or ranges of them, would read the memory that the caller has replaced."""
    case = Case(adam=one_pass, model="RepeatedLayers", dtype="bf16", offloaded=offloaded)
    check_changed(case, change, one_pass)


def of_another_size(averaged):
    averaged[0][0] = averaged[0][0].new_zeros(3)


def no_tensor(averaged):
    averaged[0][0] = None


def too_many(averaged):
    averaged[0].append(averaged[0][0])


def too_few(averaged):
    averaged[0] = averaged[0][1:]


def one_tensor(averaged):
    averaged[0] = averaged[0][0]


@pytest.mark.parametrize(
    "change, says",
    [
        (of_another_size, "averaged_gradients[0][0] is not a tensor of "),
        (no_tensor, "averaged_gradients[0][0] is not a tensor of "),
        (too_many, "averaged_gradients[0] is not a list of "),
        (too_few, "averaged_gradients[0] is not a list of "),
        (one_tensor, "averaged_gradients[0] is not a list of "),
    ],
)
@on_ranks(2)
def test_what_no_step_can_read(change, says):
    """A step would read beyond a tensor that is too small, or step half of the parameters before it raises."""
    ends = []
    for refused in (True, False):
        module, engine = start(Case(model="FillsPartition"))
        if refused:
            backward(engine)
            change(engine.optimizer.averaged_gradients)
            with pytest.raises(ValueError, match=re.escape(says)):
                engine.step()
            assert held(gradient_counters(engine)) == NOTHING
        backward(engine, 1)
        engine.step()
        ends.append([parameter.clone() for parameter in module.parameters()])
        engine.destroy()
    assert relative_error(*ends) == 0

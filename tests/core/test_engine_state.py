# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What an engine holds can be moved away and back, read and set."""

import contextlib
import gc
from typing import Dict, List, NamedTuple
from unittest import mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_update_full_grad_vectorized,
)

from support.checkpoints import (
    Compared,
    Plain,
    Run,
    assert_same,
    backward,
    compared,
    sequences,
    start,
    state,
    train,
)
from support.ids import vary
from support.training import BOUND, device, relative_error, total_error

# States moved away and back ----------------------------------------------------------------------------------------


INCLUDED = [
    None,
    [OffloadStateTypeEnum.lp_params],
    [OffloadStateTypeEnum.hp_params, OffloadStateTypeEnum.optim_states],
    [OffloadStateTypeEnum.lp_grads],
]


# ZeRO-1 and 2 have no other kind.
KINDS = [getattr(OffloadStateTypeEnum, name) for name in ("optim_states", "hp_params", "lp_params", "lp_grads")]


def move_away_and_back(engine, number):
    """Offloads and reloads states, others in each step. Meanwhile others use the memory that is free.

    Returns where a parameter was meanwhile.
    """
    # DeepSpeed collects garbage several times over, which takes long among all that a compiler keeps.
    with mock.patch.object(gc, "collect"):
        engine.offload_states(include=INCLUDED[number % len(INCLUDED)])
        meanwhile = next(engine.module.parameters()).data_ptr()
        flat = engine.optimizer.bit16_groups_flat
        others = [torch.full(each.shape, torch.nan, device=device()) for each in flat for _ in range(8)]
        engine.reload_states(non_blocking=number % 2 == 1)
        del others
    return meanwhile


class Moved(NamedTuple):
    """What training came to when states were moved away and back."""

    end: Compared  # against an engine whose states stay
    places: int  # of memory in which a parameter was


def train_with_states_moved(run, moment):
    """Trains one engine whose states stay and one whose do not."""
    _, engine = start(run)
    before = state(engine)
    train(engine, run, range(run.steps))
    expected = state(engine)
    engine.destroy()
    module, engine = start(run)
    places = set()
    for number in range(run.steps):
        for micro_step in range(run.accumulation):
            engine.backward(engine(sequences(run, number, micro_step)))
            last = micro_step == run.accumulation - 1
            if moment == "between backward and step" and last:
                places.add(move_away_and_back(engine, number))
            engine.step()
            if moment == ("between steps" if last else "between micro-batches"):
                places.add(move_away_and_back(engine, number))
            places.add(next(module.parameters()).data_ptr())
    actual = state(engine)
    engine.destroy()
    return Moved(compared(actual, expected, before), len(places))


@vary("moment", ["between steps", "between micro-batches", "between backward and step"])
@vary("stage, dtype, overlapped", [(1, "bf16", False), (2, "fp32", True)])
def test_states_moved_away_and_back(ranks, stage, dtype, overlapped, moment):
    """A step would read or write where parameters, masters or gradients were before they were moved."""
    run = Run(stage=stage, dtype=dtype, overlapped=overlapped, steps=4)
    for moved in ranks(2).run(train_with_states_moved, run, moment):
        assert moved.places > 1, "parameters stayed where they were"
        assert_same(moved.end, dtype)


@vary("moment", ["between steps", "between micro-batches", "between backward and step"])
def test_states_moved_away_and_back_with_offloading(ranks, moment):
    """States that are on the host already would be moved there once more, and come back to the wrong memory."""
    run = Run(stage=2, dtype="bf16", steps=4, offloaded=True)
    for moved in ranks(2).run(train_with_states_moved, run, moment):
        assert moved.places > 1, "parameters stayed where they were"
        assert_same(moved.end, "bf16")


def tensors_of(engine, kind):
    """Lists the tensors that hold one kind of an engine's states."""
    optimizer = engine.optimizer
    if kind is OffloadStateTypeEnum.lp_params:
        return list(optimizer.bit16_groups_flat)
    if kind is OffloadStateTypeEnum.hp_params:
        return list(optimizer.single_partition_of_fp32_groups)
    if kind is OffloadStateTypeEnum.lp_grads:
        return [view for views in optimizer.averaged_gradients.values() for view in views.without_padding()]
    # Counts of steps are on the host.
    states = [value for state in optimizer.optimizer.state.values() for value in state.values()]
    return [value for value in states if torch.is_tensor(value) and value.dim() > 0]


class Freed(NamedTuple):
    """What became of the memory of one kind of states."""

    size: int  # bytes
    kept: int  # how many of its storages were still in use when the states were offloaded
    freed: int  # bytes of the device that were free then; on CPU ``size``
    grown: int  # bytes of the device that were in use after reloading and not before; on CPU 0
    states: float  # difference between an optimizer's state that is read from the host, and what it was


def offload_one_kind(run, kind):
    """Offloads one kind of states between the backward and the step, and reloads it."""
    module, engine = start(run)
    train(engine, run, [0])
    backward(engine, run, 1)
    parameter = next(module.parameters())
    # What is read is on the host, so that it does not count as memory of the device.
    expected = safe_get_full_optimizer_state(parameter, "exp_avg").cpu()
    # By address. On CPU states would stay where they are: have each move make a copy, as if to another device.
    storages = {each.data_ptr(): each for each in (tensor.untyped_storage() for tensor in tensors_of(engine, kind))}
    size = sum(each.nbytes() for each in storages.values())
    weak = [StorageWeakRef(each) for each in storages.values()]
    del storages
    on_cpu = device().type == "cpu"
    in_use = (lambda: 0) if on_cpu else torch.cuda.memory_allocated
    copies = mock.patch.object(torch.Tensor, "to", lambda self, *_, **__: self.clone())
    before = in_use()
    with copies if on_cpu else contextlib.nullcontext():
        engine.offload_states(include=[kind])
        kept = sum(not each.expired() for each in weak)
        freed = size if on_cpu else before - in_use()
        found = expected
        if kind is OffloadStateTypeEnum.optim_states:
            found = safe_get_full_optimizer_state(parameter, "exp_avg").cpu()
        engine.reload_states()
    grown = in_use() - before
    engine.step()
    engine.destroy()
    return Freed(size, kept, freed, grown, float((found - expected).abs().max()))


@vary("kind", KINDS)
@vary("stage, dtype, overlapped", [(1, "bf16", True), (2, "fp32", False)])
def test_each_kind_of_states_is_freed(ranks, stage, dtype, overlapped, kind):
    """Something would hold the memory of states that are on the host, or lead a reader to values of the past."""
    for result in ranks(2).run(offload_one_kind, Run(stage=stage, dtype=dtype, overlapped=overlapped), kind):
        assert result.size > 0 and result.kept == 0 and result.states == 0, result
        # The allocator rounds what it hands out up to 512 bytes.
        assert result.freed >= result.size and result.grown <= 0, result


# Reading and setting -----------------------------------------------------------------------------------------------


def set_gradients(module, plain):
    for parameter, other in zip(module.parameters(), plain.module.parameters(), strict=True):
        gradient = safe_get_full_grad(parameter)
        safe_set_full_grad(parameter, gradient * 3 - 0.01)
        other.grad.mul_(3).sub_(0.01)


def set_gradients_vectorized(module, plain):
    safe_update_full_grad_vectorized(list(module.parameters()), lambda gradient, _: gradient * 3 - 0.01)
    for parameter in plain.module.parameters():
        parameter.grad.mul_(3).sub_(0.01)


def set_masters(module, plain):
    for parameter, other in zip(module.parameters(), plain.module.parameters(), strict=True):
        safe_set_full_fp32_param(parameter, safe_get_full_fp32_param(parameter) * 0.5 + 0.1)
        other.data.mul_(0.5).add_(0.1)


def set_optimizer_states(module, plain):
    for parameter, other in zip(module.parameters(), plain.module.parameters(), strict=True):
        for key in optimizer_keys(plain):
            safe_set_full_optimizer_state(parameter, safe_get_full_optimizer_state(parameter, key) * 2 + 0.01, key)
            plain.optimizer.state[other][key].mul_(2).add_(0.01)


def optimizer_keys(plain):
    return ["momentum_buffer"] if plain.run.optimizer == "SGD" else ["exp_avg", "exp_avg_sq"]


SETTERS = {
    setter.__name__: setter for setter in (set_gradients, set_gradients_vectorized, set_masters, set_optimizer_states)
}


def read_error(module, plain, gradients=False):
    """Largest relative error of what is read, against the plain loop's masters, optimizer states and gradients."""
    found, expected = [], []
    for parameter, other in zip(module.parameters(), plain.module.parameters(), strict=True):
        found.append(safe_get_full_fp32_param(parameter))
        expected.append(other)
        for key in optimizer_keys(plain):
            found.append(safe_get_full_optimizer_state(parameter, key))
            expected.append(plain.optimizer.state[other][key])
        if gradients:
            found.append(safe_get_full_grad(parameter))
            expected.append(other.grad)
    return relative_error(found, expected)


class Set(NamedTuple):
    """What came of setting the same in an engine and in a plain loop."""

    errors: Dict[str, float]  # of what is read, at each moment
    moved: float  # how far the step went from that of a plain loop in which nothing was set


def set_beside_plain_loop(run, setter, moment):
    """Sets the same in an engine and in a plain loop."""
    module, engine = start(run)
    plain, untouched = Plain(run), Plain(run)
    train(engine, run, range(2))
    plain.train(range(2))
    untouched.train(range(3))
    between_steps = moment == "between steps"
    if not between_steps:
        backward(engine, run, 2)
        plain.backward(2)
    errors = {"before": read_error(module, plain, gradients=not between_steps)}
    SETTERS[setter](module, plain)
    errors["set"] = read_error(module, plain, gradients=not between_steps)
    if between_steps:
        # What was set are the masters; the forward computes with the parameters.
        engine.optimizer.update_lp_params()
        backward(engine, run, 2)
        plain.backward(2)
    engine.step()
    plain.step()
    errors["after the step"] = read_error(module, plain)
    moved = total_error(plain.module.parameters(), untouched.module.parameters())
    train(engine, run, [3])
    plain.train([3])
    errors["after another step"] = read_error(module, plain)
    errors["parameters"] = relative_error(module.state_dict().values(), plain.module.state_dict().values())
    engine.destroy()
    return Set(errors, moved)


@pytest.mark.parametrize(
    "run",
    [
        Run(stage=1, clipping=0.1),
        Run(stage=2, optimizer="SGD", overlapped=True),
        Run(stage=2, clipping=0.1, offloaded=True),
    ],
    ids=["stage1-AdamW", "stage2-SGD-overlapped", "stage2-AdamW-offloaded"],
)
@vary(
    "setter, moment",
    [
        *((setter, "between backward and step") for setter in SETTERS),
        *((setter, "between steps") for setter in ("set_masters", "set_optimizer_states")),
    ],
)
def test_read_and_set_as_in_a_plain_loop(ranks, setter, moment, run):
    """What a caller sets would go to a copy that the step does not read, or to another parameter's elements."""
    for result in ranks(2).run(set_beside_plain_loop, run, setter, moment):
        assert result.moved > 1e-3, "what was set made no difference"
        assert max(result.errors.values()) < BOUND, result


class SetAll(NamedTuple):
    """What a step came to before which everything was set."""

    masters: float  # error
    states: float  # error of the optimizer states
    stale: List[str]  # names of parameters that are not what the masters round to


def set_all_between_backward_and_step(run):
    """Sets masters, optimizer states and gradients to numbers that bf16 can hold, in an engine and in a plain loop.

    So the step of either depends on what was set alone, whatever the engine computes in.
    """
    module, engine = start(run)
    plain = Plain(run)
    train(engine, run, [0])
    plain.train([0])
    backward(engine, run, 1)
    plain.backward(1)
    generator = torch.Generator().manual_seed(0)
    pairs = list(zip(module.parameters(), plain.module.parameters(), strict=True))
    for parameter, other in pairs:
        new = torch.rand(4, *other.shape, generator=generator).bfloat16().float().to(device())
        safe_set_full_fp32_param(parameter, new[0])
        other.data.copy_(new[0])
        for key, value in zip(optimizer_keys(plain), new[1:3]):
            safe_set_full_optimizer_state(parameter, value, key)
            plain.optimizer.state[other][key].copy_(value)
        safe_set_full_grad(parameter, new[3])
        other.grad.copy_(new[3])
    engine.step()
    plain.step()
    masters = [safe_get_full_fp32_param(parameter) for parameter, _ in pairs]
    states = [
        (safe_get_full_optimizer_state(parameter, key), plain.optimizer.state[other][key])
        for parameter, other in pairs
        for key in optimizer_keys(plain)
    ]
    written = module.state_dict()
    stale = [
        name
        for (name, _), master in zip(module.named_parameters(), masters, strict=True)
        if not torch.equal(written[name], master.to(written[name].dtype))
    ]
    engine.destroy()
    errors = relative_error(masters, plain.module.parameters()), relative_error(*zip(*states, strict=True))
    return SetAll(*errors, stale)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@vary("stage", [1, 2])
def test_a_step_takes_all_that_was_set(ranks, dtype, stage):
    """A step would overwrite masters that were set with what parameters round to, or leave parameters stale."""
    run = Run(stage=stage, dtype=dtype, clipping=0.1, schedule="OneCycleLR")
    for result in ranks(2).run(set_all_between_backward_and_step, run):
        assert result.masters < BOUND and result.states < BOUND
        assert result.stale == []

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Schedulers that were made before an engine, for an optimizer with parameter groups that are empty, stay right."""

import copy
import gc

import pytest
import torch
from torch.optim import lr_scheduler as torchs
from torch.optim.swa_utils import SWALR

import deepspeed
from deepspeed.compile.fixes.base.schedulers import forget_empty_groups
from deepspeed.runtime import lr_schedules as deepspeeds

from support.beside import warnings_logged
from support.ids import vary
from support.on_ranks import on_ranks
from support.training import BOUND, Case, batch, build, compile_backend, device, relative_error, train_plain

# How to make each scheduler for an optimizer. An entry of a list is for the parameter group of that place.
SCHEDULERS = {
    "LambdaLR": lambda optimizer, pick: torchs.LambdaLR(
        optimizer, pick([lambda step: 0.5**step, lambda step: 0.7**step, lambda step: 0.9**step])
    ),
    "MultiplicativeLR": lambda optimizer, pick: torchs.MultiplicativeLR(
        optimizer, pick([lambda step: 0.5, lambda step: 0.7, lambda step: 0.9])
    ),
    "StepLR": lambda optimizer, pick: torchs.StepLR(optimizer, 2),
    "CosineAnnealingLR": lambda optimizer, pick: torchs.CosineAnnealingLR(optimizer, 4),
    "SequentialLR": lambda optimizer, pick: torchs.SequentialLR(
        optimizer,
        [torchs.LinearLR(optimizer, total_iters=2), torchs.StepLR(optimizer, 1), torchs.ConstantLR(optimizer)],
        # As many milestones as groups stay.
        milestones=[2, 3],
    ),
    "ChainedScheduler": lambda optimizer, pick: torchs.ChainedScheduler(
        [torchs.ConstantLR(optimizer), torchs.ExponentialLR(optimizer, 0.5)], optimizer
    ),
    "ReduceLROnPlateau": lambda optimizer, pick: torchs.ReduceLROnPlateau(
        optimizer, patience=0, min_lr=pick([0.3, 0.02, 0.01])
    ),
    "CyclicLR": lambda optimizer, pick: torchs.CyclicLR(
        optimizer,
        pick([0.1, 0.2, 0.3]),
        pick([0.5, 0.6, 0.7]),
        step_size_up=3,
        base_momentum=pick([0.1, 0.2, 0.3]),
        max_momentum=pick([0.5, 0.6, 0.7]),
    ),
    "OneCycleLR": lambda optimizer, pick: torchs.OneCycleLR(optimizer, pick([0.1, 0.2, 0.3]), total_steps=9),
    "CosineAnnealingWarmRestarts": lambda optimizer, pick: torchs.CosineAnnealingWarmRestarts(optimizer, 3),
    "SWALR": lambda optimizer, pick: SWALR(optimizer, pick([0.1, 0.2, 0.3])),
    "LRRangeTest": lambda optimizer, pick: deepspeeds.LRRangeTest(optimizer, pick([0.1, 0.2, 0.3]), 2),
    "OneCycle": lambda optimizer, pick: deepspeeds.OneCycle(
        optimizer,
        pick([0.1, 0.2, 0.3]),
        pick([0.5, 0.7, 0.9]),
        cycle_first_step_size=3,
        cycle_min_mom=pick([0.1, 0.2, 0.3]),
        cycle_max_mom=pick([0.5, 0.7, 0.9]),
    ),
    "WarmupLR": lambda optimizer, pick: deepspeeds.WarmupLR(
        optimizer, pick([0.1, 0.2, 0.3]), pick([0.5, 0.7, 0.9]), warmup_num_steps=4
    ),
    "WarmupDecayLR": lambda optimizer, pick: deepspeeds.WarmupDecayLR(
        optimizer, 9, pick([0.1, 0.2, 0.3]), pick([0.5, 0.7, 0.9]), warmup_num_steps=4
    ),
    "WarmupCosineLR": lambda optimizer, pick: deepspeeds.WarmupCosineLR(optimizer, 9, warmup_num_steps=4),
}
FULL = [0, 2]  # the groups that are not empty


def make_optimizer(pick, kind):
    """Returns an optimizer of those of three groups that ``pick`` picks. The group in the middle is empty."""
    groups = [{"params": [torch.zeros(1)] * (place in FULL), "lr": 0.4 + 0.1 * place} for place in range(3)]
    if kind in ("OneCycle", "OneCycleLR"):
        # These two change the betas as well.
        return torch.optim.Adam(pick(groups))
    return torch.optim.SGD(pick(groups), momentum=0.5)


def settings(optimizer, scheduler):
    """Lists the settings of an optimizer's groups over some steps, and before them what the scheduler tells."""
    told = getattr(scheduler, "_last_lr", None)
    found = [] if told is None else [[{"lr": float(lr)} for lr in told]]
    for _ in range(6):
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, torchs.ReduceLROnPlateau) else []))
        found.append([{name: group[name] for name in group if name != "params"} for group in optimizer.param_groups])
    return found


@pytest.mark.quick
@vary("kind", SCHEDULERS)
def test_a_scheduler_forgets_empty_groups(kind):
    """A list that a scheduler keeps of the groups would still have an entry for one that is gone."""
    optimizer = make_optimizer(list, kind)
    scheduler = SCHEDULERS[kind](optimizer, list)
    of_another = torchs.StepLR(make_optimizer(list, "SGD"), 2)
    forget_empty_groups(optimizer, None)
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    without = make_optimizer(lambda entries: [entries[place] for place in FULL], kind)
    expected = settings(without, SCHEDULERS[kind](without, lambda entries: [entries[place] for place in FULL]))
    found = settings(optimizer, scheduler)
    assert found == expected
    assert any(first != second for first, second in found), "the case does not tell one group from another"
    assert len(of_another.base_lrs) == 3


def with_an_empty_group(module):
    """Returns an optimizer as trainers make it under LoRA: no parameter is free of weight decay."""
    groups = [{"params": [], "lr": 0.9}, {"params": [*module.parameters()], "lr": 0.2, "weight_decay": 0.1}]
    return torch.optim.SGD(groups)


def halved(optimizer):
    return torchs.LambdaLR(optimizer, [lambda step: 0.1**step, lambda step: 0.5**step])


@vary("is_given", [True, False])
@vary("stage", [1, 2])
@on_ranks(2)
def test_an_engine_trains_with_a_scheduler_made_before_it(stage, is_given):
    """The rate of a group would go to its neighbour when the engine leaves an empty one out."""
    # The engine is given the scheduler, or the caller keeps it, as Accelerate does.
    case = Case(model="FillsPartition", stage=stage)
    module = build(case)
    plain = copy.deepcopy(module)
    optimizer = with_an_empty_group(module)
    scheduler = halved(optimizer)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": case.stage},
        "zero_allow_untested_optimizer": True,
        "compile": {"deepcompile": case.deepcompile},
    }
    given = {}
    if is_given:
        given = {"lr_scheduler": scheduler}
        # As programs do that fork workers. Python then finds no object that is there. They stay frozen: what a rank
        # has frozen since it was started would make each later gc.collect() take ten times as long.
        gc.freeze()
    engine = deepspeed.initialize(model=module, optimizer=optimizer, config=config, **given)[0]
    of_plain = with_an_empty_group(plain)
    schedule_of_plain = halved(of_plain)
    rates = []
    with compile_backend(case.backend):
        for step in range(case.steps):
            engine.backward(engine(batch(step, 0, torch.distributed.get_rank(), 4).to(device())))
            engine.step()
            if not is_given:
                scheduler.step()
            train_plain(plain, of_plain, step)
            schedule_of_plain.step()
            rates.append(([group["lr"] for group in optimizer.param_groups], of_plain.param_groups[1]["lr"]))
    error = relative_error(module.parameters(), plain.parameters())
    assert engine.is_deepcompile_active()
    engine.destroy()
    assert error < BOUND, rates
    assert all(of_engine == [of_plain] for of_engine, of_plain in rates), rates


class OwnScheduler:
    """A scheduler of nobody's class, with a rate for each parameter group."""

    def __init__(self, optimizer):
        self.optimizer, self.rates = optimizer, [0.1, 0.2, 0.3]

    def step(self):
        for group, rate in zip(self.optimizer.param_groups, self.rates):
            group["lr"] = rate


class OwnLR(torchs.LRScheduler):
    """A scheduler of a user's class below torch's, which gives the third group a rate of its own."""

    def get_lr(self):
        return [rate / 2 if place == 2 else rate for place, rate in enumerate(self.base_lrs)]


class OwnWrapper:
    """Holds an optimizer and steps it, without a rate for each parameter group."""

    def __init__(self, optimizer):
        self.optimizer, self.losses = optimizer, []

    def step(self):
        self.optimizer.step()


@pytest.mark.quick
@vary("is_given", [True, False])
@vary("kind", [OwnScheduler, OwnLR, OwnWrapper, torchs.ExponentialLR, None])
def test_a_scheduler_of_an_unknown_class_is_warned_of(kind, is_given):
    """A user's own scheduler would give the groups each other's rates without a word."""
    optimizer = make_optimizer(list, "SGD")
    # The caller may have other objects, which hold other optimizers or are schedulers of these.
    of_another = OwnScheduler(make_optimizer(list, "SGD"))
    made = kind and (kind(optimizer, 0.5) if kind is torchs.ExponentialLR else kind(optimizer))
    given = made if is_given and kind is not OwnWrapper else None
    with warnings_logged() as warnings:
        forget_empty_groups(optimizer, given)
    assert of_another.rates == [0.1, 0.2, 0.3]
    assert len(warnings) == (kind in (OwnScheduler, OwnLR))
    assert all(f"the scheduler {kind.__name__} may give a group the rate of another" in text for text in warnings)


@pytest.mark.follows("leave empty groups out of the optimizer")
@pytest.mark.quick
def test_nothing_is_said_where_empty_groups_are_left_out():
    """The advice to leave empty groups out would not end the warning, nor keep the scheduler right."""
    optimizer = make_optimizer(lambda groups: [groups[place] for place in FULL], "SGD")
    own = OwnScheduler(optimizer)
    with warnings_logged() as warnings:
        forget_empty_groups(optimizer, own)
    own.step()
    assert not warnings
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]

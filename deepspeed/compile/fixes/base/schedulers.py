# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Corrects learning-rate schedulers that were made before the engine.

DeepSpeed removes parameter groups without parameters from an optimizer. Trainers make such groups: under LoRA, for
example, no parameter is free of weight decay. A scheduler that was made before pairs its lists with the groups by
position. With one group less, torch's schedulers raise (torch 2.10 and newer), and DeepSpeed's own ones give a group
the learning rate of another group (``docs/findings/deepspeed_empty_groups.py``).

To DeepSpeed: please keep empty parameter groups, or take their entries out of the scheduler's lists as well.
"""

import gc
import itertools
from typing import Any, Iterator

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from deepspeed.runtime import lr_schedules

from ...zero_1_and_2.messages import warn

_KINDS = (LRScheduler, *(getattr(lr_schedules, name) for name in lr_schedules.VALID_LR_SCHEDULES))
# The lists of these schedulers with an entry for each parameter group. Other lists may be as long by chance.
_LISTS = (
    *("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums"),
    # The lists of DeepSpeed's own schedulers.
    *("min_lr", "delta_lrs", "org_lrs", "min_moms", "max_moms"),
)


def forget_empty_groups(optimizer: Optimizer, given: Any) -> None:
    """Called right before DeepSpeed removes the empty parameter groups of an optimizer.

    Takes the entries of these groups out of the lists of each scheduler of the optimizer. Warns of schedulers whose
    class is neither torch's nor DeepSpeed's: such a class may know the groups by their places in a way of its own.

    Args:
        given: the scheduler that ``deepspeed.initialize()`` was given, or None.
    """
    kept = [bool(group["params"]) for group in optimizer.param_groups]
    if all(kept):
        return
    foreign = {}
    for scheduler in _schedulers_of(optimizer, given, len(kept)):
        for name in _LISTS if isinstance(scheduler, _KINDS) else ():
            entries = getattr(scheduler, name, None)
            if isinstance(entries, (list, tuple)) and len(entries) == len(kept):
                setattr(scheduler, name, list(itertools.compress(entries, kept)))
        if type(scheduler).__module__.partition(".")[0] not in ("torch", "deepspeed"):
            foreign[type(scheduler).__name__] = None
    if foreign:
        warn(
            f"DeepSpeed removes {kept.count(False)} of {len(kept)} parameter groups, because they have no parameters, "
            f"and the scheduler {', '.join(foreign)} may give a group the rate of another one after that; leave empty "
            "groups out of the optimizer"
        )


def _schedulers_of(optimizer: Optimizer, given: Any, groups: int) -> Iterator[Any]:
    # If the given object is callable, DeepSpeed calls it later to make a scheduler for the groups that are left.
    if given is not None and not callable(given) and not isinstance(given, _KINDS):
        yield given
    # The engine knows only the scheduler that deepspeed.initialize() was given. Accelerate passes none of torch's
    # schedulers, and a scheduler may contain others. No optimizer knows its schedulers, so search all objects of
    # Python, except those that gc.freeze() hides.
    for value in (given, *gc.get_objects()):
        if issubclass(type(value), _KINDS):
            if getattr(value, "optimizer", None) is optimizer:
                yield value
        elif hasattr(type(value), "step") and not issubclass(type(value), Optimizer):
            if _steps_rates(value, optimizer, groups):
                yield value


def _steps_rates(value, optimizer, groups):
    """Whether an object with a method ``step`` holds the optimizer, and a number or a function for each group."""
    attributes = getattr(value, "__dict__", {}).values()
    return any(attribute is optimizer for attribute in attributes) and any(
        isinstance(attribute, (list, tuple))
        and len(attribute) == groups
        and all(isinstance(entry, (int, float)) or callable(entry) for entry in attribute)
        for attribute in attributes
    )

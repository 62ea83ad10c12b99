# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Keeps learning-rate schedulers right that were made before the engine.

DeepSpeed removes parameter groups without parameters from an optimizer. Trainers make such groups: under LoRA, for
example, no parameter is free of weight decay. A scheduler that was made before pairs its lists with the groups by
position. With one group less, torch's schedulers raise (torch 2.10 and newer), and DeepSpeed's own ones give a group
the learning rate of another group.
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
    # Of DeepSpeed's own schedulers.
    *("min_lr", "delta_lrs", "org_lrs", "min_moms", "max_moms"),
)


def forget_empty_groups(optimizer: Optimizer, given: Any) -> None:
    """Called right before DeepSpeed removes the empty parameter groups of an optimizer.

    Takes the entries of these groups out of the lists of each scheduler of the optimizer. Warns of a scheduler of an
    unknown class that has such lists.

    Args:
        given: the scheduler that ``deepspeed.initialize()`` was given, or None.
    """
    kept = [bool(group["params"]) for group in optimizer.param_groups]
    if all(kept):
        return
    for scheduler in _schedulers_of(optimizer, given):
        for name in _LISTS:
            entries = getattr(scheduler, name, None)
            if isinstance(entries, (list, tuple)) and len(entries) == len(kept):
                setattr(scheduler, name, list(itertools.compress(entries, kept)))
    if given is None or isinstance(given, _KINDS):
        return
    lists = [
        name
        for name, value in getattr(given, "__dict__", {}).items()
        if isinstance(value, (list, tuple)) and len(value) == len(kept)
    ]
    if lists:
        warn(
            f"DeepSpeed removes {kept.count(False)} of {len(kept)} parameter groups, because they have no parameters, "
            f"and {', '.join(lists)} of the lr_scheduler {type(given).__name__} may have an entry for each, so that "
            "groups get each other's rates; leave empty groups out of the optimizer"
        )


def _schedulers_of(optimizer: Optimizer, given: Any) -> Iterator[Any]:
    # The engine knows only the scheduler that deepspeed.initialize() was given. Accelerate gives it none of torch's,
    # and a scheduler may be made of others. No optimizer knows its schedulers, so ask Python for all objects, which
    # are those that are not behind gc.freeze().
    for value in (given, *gc.get_objects()):
        if issubclass(type(value), _KINDS) and getattr(value, "optimizer", None) is optimizer:
            yield value

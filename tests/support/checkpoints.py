# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Runs whose engines are saved, loaded, exported, read and set, and plain loops beside them.

The functions run on every rank, in the processes of ``support.pool``.
"""

import contextlib
import dataclasses
import sys
from typing import List, NamedTuple, Optional
from unittest import mock

import torch
import torch.distributed as dist

from deepspeed.checkpoint import ds_to_universal
from deepspeed.runtime.lr_schedules import WarmupDecayLR

from support import lifetime
from support.models import VOCABULARY
from support.training import (
    OVERLAPPED,
    ROUNDING,
    Case,
    average_gradients,
    build,
    device,
    parameter_groups,
    total_error,
)

# On CPU the same steps give the same bits; on GPUs some kernels add in any order.
EXACT = not torch.cuda.is_available()

# Of a micro-batch, over all ranks: as many for each of two ranks as of three.
SEQUENCES = 6


@dataclasses.dataclass(frozen=True)
class Run(Case):
    """What to train, and how. Ranks share the sequences of a batch, so that their number changes only rounding.

    ``schedule`` of the learning rate: a key of SCHEDULES, or None. ``overlapped``: parameters are gathered under the
    next forward where there is DeepCompile. ``sharded``: so are all parameters of blocks over the ranks.
    """

    accumulation: int = 2
    optimizer: str = "AdamW"
    schedule: Optional[str] = None
    overlapped: bool = False
    sharded: bool = False


# Engines and plain loops ----------------------------------------------------------------------------------------

WARMUP_DECAY = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.02, "warmup_num_steps": 4, "total_num_steps": 12}


def halved_every_third_step(step):
    return 0.5 ** (step // 3)


# How to make each from an optimizer.
SCHEDULES = {
    "WarmupDecayLR": lambda optimizer: WarmupDecayLR(optimizer, **WARMUP_DECAY),
    "LambdaLR": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, halved_every_third_step),
    # Changes the betas too.
    "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.03, total_steps=250),
}


def make_optimizer(module, run):
    groups = parameter_groups(module, run.groups)
    if run.optimizer == "SGD":
        return torch.optim.SGD(groups, lr=0.2, momentum=0.5)
    # With a smaller eps, an element whose gradient is nothing but rounding would move as far as any other.
    return torch.optim.AdamW(groups, lr=0.02, eps=1e-4, weight_decay=0.1)


def start(run, seed=0):
    """Makes a module and its engine. Its schedule comes by one of the three ways there are."""
    module = build(run, seed)
    optimizer, schedule = make_optimizer(module, run), None
    config = {"train_micro_batch_size_per_gpu": SEQUENCES // dist.get_world_size(), **(run.config or {})}
    if run.dtype == "fp16":
        # No step that is compared raises the scale: there DeepSpeed divides gradients by the scale to come.
        config["fp16"] = {"loss_scale_window": 3, **config.get("fp16", {})}
    if run.overlapped and run.deepcompile:
        config["compile"] = {**OVERLAPPED["compile"], **config.get("compile", {})}
    if run.sharded and run.deepcompile:
        config["compile"] = {"shard_parameters": "all", **config.get("compile", {})}
    if run.schedule == "WarmupDecayLR":
        config["scheduler"] = {"type": run.schedule, "params": WARMUP_DECAY}
    elif run.schedule == "LambdaLR":
        schedule = SCHEDULES[run.schedule](optimizer)
    elif run.schedule:
        schedule = SCHEDULES[run.schedule]
    case = dataclasses.replace(run, config=config)
    return lifetime.start(case, module, optimizer=optimizer, lr_scheduler=schedule)


def whole(engine, run):
    """Returns a context in which this rank has all parameters."""
    if not run.sharded:
        return contextlib.nullcontext()
    from deepspeed.compile.features.shard_parameters import unsharded_parameters

    return unsharded_parameters(engine)


class Plain:
    """A plain loop beside an engine."""

    def __init__(self, run, seed=0):
        self.run, self.module = run, build(run, seed)
        self.optimizer = make_optimizer(self.module, run)
        self.schedule = SCHEDULES[run.schedule](self.optimizer) if run.schedule else None

    def backward(self, number):
        """Leaves the averaged gradients of a whole step in ``grad``."""
        for micro_step in range(self.run.accumulation):
            (self.module(sequences(self.run, number, micro_step)) / self.run.accumulation).backward()
        average_gradients(self.module)

    def step(self):
        if self.run.clipping:
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.run.clipping)
        self.optimizer.step()
        if self.schedule:
            self.schedule.step()
        self.optimizer.zero_grad()

    def train(self, numbers):
        for number in numbers:
            self.backward(number)
            self.step()


def sequences(run, number, micro_step):
    """This rank's part of a micro-batch."""
    length = 3 + (5 * number + micro_step) % 4 if run.vary_length else 4
    generator = torch.Generator().manual_seed(1000 * number + 100 * micro_step)
    ids = torch.randint(0, VOCABULARY, (SEQUENCES, length), generator=generator)
    return ids.chunk(dist.get_world_size())[dist.get_rank()].to(device())


def backward(engine, run, number):
    """Runs the backwards of a step, and all of the step but for the optimizer's."""
    for micro_step in range(run.accumulation):
        engine.backward(engine(sequences(run, number, micro_step)))
        if micro_step < run.accumulation - 1:
            engine.step()


def train(engine, run, numbers):
    for number in numbers:
        backward(engine, run, number)
        engine.step()


def state(engine):
    """All that a checkpoint has to keep of this rank's engine: clones of tensors, and numbers, by name.

    Elements of partitions are in the order of DeepSpeed's checkpoints. All ranks call this.
    """
    optimizer = engine.optimizer
    seen = {f"parameter {name}": value.clone() for name, value in engine.module.state_dict().items()}
    for index, (group, master) in enumerate(
        zip(optimizer.param_groups, optimizer.single_partition_of_fp32_groups, strict=True)
    ):
        seen[f"master {index}"] = in_base_order(optimizer, index, master.detach())
        for key, value in optimizer.state[master].items():
            seen[f"{key} {index}"] = in_base_order(optimizer, index, torch.as_tensor(value))
        for key in ("lr", "betas", "momentum"):
            if key in group:
                seen[f"{key} {index}"] = torch.tensor(group[key], dtype=torch.float64)
    for name in ("global_steps", "skipped_steps", "global_samples"):
        seen[name] = torch.tensor(getattr(engine, name))
    seen["loss scale"] = torch.tensor(float(optimizer.loss_scale))
    return seen


def in_base_order(optimizer, group, values):
    """A copy of values, in the order of DeepSpeed's checkpoints if there is one for each element of the partition."""
    orders = getattr(optimizer, "base_orders", None)
    if orders is None or values.shape != optimizer.single_partition_of_fp32_groups[group].shape:
        return values.clone()
    return orders[group].to_base(values, values.device)


def differing(actual, expected):
    """Names of what is not bitwise the same, or not on the same device."""

    def same(name):
        if name not in actual or name not in expected or actual[name].device != expected[name].device:
            return False
        return torch.equal(actual[name], expected[name])

    return [name for name in sorted({*actual, *expected}) if not same(name)]


def to_universal(source, target):
    """Makes a universal checkpoint in the folder ``target`` of the one in ``source``, as DeepSpeed's command does."""
    arguments = ["ds_to_universal.py", "--input_folder", source, "--output_folder", target]
    arguments += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    with mock.patch.object(sys, "argv", arguments):
        ds_to_universal.main(ds_to_universal.parse_arguments())


class Compared(NamedTuple):
    """What two trainings came to."""

    differing: List[str]  # names of what is not bitwise the same
    error: float  # of the parameters and masters
    moved: float  # how far these went in the last steps


def compared(actual, expected, before):
    """Compares two states that began as ``before``."""
    actual_ones, expected_ones, ones_before = (
        [value for name, value in sorted(seen.items()) if name.startswith(("parameter", "master"))]
        for seen in (actual, expected, before)
    )
    error, moved = total_error(actual_ones, expected_ones), total_error(expected_ones, ones_before)
    return Compared(differing(actual, expected), error, moved)


def assert_same(result, dtype):
    """That two trainings came to the same: bitwise where they can, else but for rounding."""
    assert result.moved > 1e-2, "the last steps changed little, so agreement shows nothing"
    assert result.error < ROUNDING[dtype] * result.moved
    if EXACT:
        assert result.differing == []

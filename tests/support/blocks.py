# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Training of models whose blocks are graphs of their own, beside a plain loop."""

from typing import Any, Dict, List, NamedTuple

import torch.distributed as dist

from deepspeed.compile.zero12 import gradient_counters, reset_gradient_counters

from support.training import batch, make_engine, make_optimizer, relative_error, train_plain

REGIONAL = {"compile": {"regional_compilation": True}}


def train_beside(engine, plain, optimizer, steps):
    """Trains both; returns the counters of each step's backward."""
    seen, rank = [], dist.get_rank()
    for step in steps:
        reset_gradient_counters(engine)
        engine.backward(engine(batch(step, 0, rank, 4)))
        seen.append(gradient_counters(engine))
        engine.step()
        train_plain(plain, optimizer, step)
    return seen


class TrainedInBlocks(NamedTuple):
    counters: List[Dict[str, Any]]  # of each step's backward
    error: float  # of the parameters


def train_and_destroy(module, plain, case, steps):
    """Makes an engine of ``module``, trains it beside ``plain`` and destroys it."""
    engine = make_engine(module, case)
    counters = train_beside(engine, plain, make_optimizer(plain, case), range(steps))
    error = relative_error(module.parameters(), plain.parameters())
    engine.destroy()
    return TrainedInBlocks(counters, error)

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Options of ``zero_optimization`` that decide what a checkpoint holds and what is loaded from it."""

import dataclasses
from typing import NamedTuple

import pytest
import torch

from support.checkpoints import in_base_order
from support.ids import vary
from support.options import SMALL
from support.training import ROUNDING, Case, batch, build, make_engine, total_error


class Loaded(NamedTuple):
    error: float  # of the master parameters that an engine with DeepCompile loaded, against those that were saved
    error_without: float  # of those that an engine without DeepCompile loaded
    continued: float  # difference of the two engines' master parameters after one more step


def load_with_and_without_deepcompile(folder, case):
    """Saves with DeepCompile, loads into an engine with and one without it, and trains both for one more step."""

    def masters(engine):
        found = enumerate(engine.optimizer.single_partition_of_fp32_groups)
        return [in_base_order(engine.optimizer, group, master.detach()) for group, master in found]

    rank = torch.distributed.get_rank()
    torch._dynamo.reset()
    engine = make_engine(build(case), case)
    for step in range(2):
        engine.backward(engine(batch(step, 0, rank, 4)))
        engine.step()
    # Without it, which optimizers with a fused step keep there, DeepSpeed does not load elastic states.
    engine.optimizer.param_groups[0]["step"] = 2
    engine.save_checkpoint(folder, tag="saved")
    saved = masters(engine)
    engine.destroy()
    loaded, continued = [], []
    for deepcompile in (True, False):
        module = build(case, seed=1)
        engine = make_engine(module, dataclasses.replace(case, deepcompile=deepcompile))
        engine.load_checkpoint(folder, tag="saved")
        loaded.append(masters(engine))
        engine.backward(engine(batch(2, 0, rank, 4)))
        engine.step()
        continued.append(masters(engine))
        engine.destroy()
    return Loaded(*(total_error(masters, saved) for masters in loaded), total_error(*continued))


@pytest.mark.options("zero_optimization.load_from_fp32_weights", "zero_optimization.elastic_checkpoint")
@pytest.mark.table
@vary(
    "options, exact",
    [({}, True), ({"elastic_checkpoint": True}, True), ({"load_from_fp32_weights": False}, False)],
    expects="exact",
)
@vary("stage", [1, 2])
def test_loading(ranks, tmp_path, stage, options, exact):
    """An option would choose what is loaded with DeepCompile otherwise than without it."""
    case = Case(model=SMALL, stage=stage, dtype="bf16", config={"zero_optimization": options})
    for loaded in ranks(2).run(load_with_and_without_deepcompile, str(tmp_path), case):
        assert loaded.error == loaded.error_without
        assert (loaded.error == 0) == exact
        assert loaded.continued < ROUNDING["bf16"]

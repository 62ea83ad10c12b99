# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Options of ``zero_optimization`` that decide what a checkpoint holds and what is loaded from it."""

import dataclasses

import pytest
import torch

from support.checkpoints import in_base_order
from support.ids import vary
from support.on_ranks import on_ranks
from support.options import SMALL
from support.training import ROUNDING, Case, batch, build, make_engine, total_error


@pytest.mark.options("zero_optimization.load_from_fp32_weights", "zero_optimization.elastic_checkpoint")
@pytest.mark.table
@vary(
    "options, exact",
    [({}, True), ({"elastic_checkpoint": True}, True), ({"load_from_fp32_weights": False}, False)],
    expects="exact",
)
@vary("stage", [1, 2])
@on_ranks(2)
def test_loading(tmp_path, stage, options, exact):
    """An option would choose what is loaded with DeepCompile otherwise than without it."""

    def masters(engine):
        found = enumerate(engine.optimizer.single_partition_of_fp32_groups)
        return [in_base_order(engine.optimizer, group, master.detach()) for group, master in found]

    rank = torch.distributed.get_rank()
    case = Case(model=SMALL, stage=stage, dtype="bf16", config={"zero_optimization": options})
    engine = make_engine(build(case), case)
    for step in range(2):
        engine.backward(engine(batch(step, 0, rank, 4)))
        engine.step()
    # Without it, which optimizers with a fused step keep there, DeepSpeed does not load elastic states.
    engine.optimizer.param_groups[0]["step"] = 2
    engine.save_checkpoint(tmp_path, tag="saved")
    saved = masters(engine)
    engine.destroy()
    loaded, continued = [], []
    for deepcompile in (True, False):
        module = build(case, seed=1)
        engine = make_engine(module, dataclasses.replace(case, deepcompile=deepcompile))
        engine.load_checkpoint(tmp_path, tag="saved")
        loaded.append(masters(engine))
        engine.backward(engine(batch(2, 0, rank, 4)))
        engine.step()
        continued.append(masters(engine))
        engine.destroy()
    error, without = (total_error(masters, saved) for masters in loaded)
    assert error == without and (error == 0) == exact
    # After one more step.
    assert total_error(*continued) < ROUNDING["bf16"]

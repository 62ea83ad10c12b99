# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""In bf16 and fp16, training comes as close to fp32 as ZeRO without DeepCompile does."""

import dataclasses

from support.ids import vary
from support.training import NOTHING, Case, train_beside_fp32, train_beside_plain_loop, train_under_default_dtypes


@vary("backend", ["eager", "inductor"])
@vary("dtype", ["bf16", "fp16"])
@vary("accumulation", [1, 3])
@vary("stage", [1, 2])
def test_as_close_to_fp32_as_eager_zero(ranks, backend, dtype, stage, accumulation):
    case = Case(backend=backend, dtype=dtype, stage=stage, accumulation=accumulation, steps=6)
    for compiled, eager in ranks(2).run(train_beside_fp32, case):
        assert compiled["skipped"] == eager["skipped"] == 0
        # Both are off by rounding, in different orders of summation, so neither is always the closer one.
        assert compiled["error"] < 1.5 * eager["error"]
        assert eager["error"] < 0.1 * compiled["moved"]
        assert compiled["held"] == NOTHING


@vary("accumulation", [1, 3])
@vary("stage", [1, 2])
def test_an_overflow_skips_the_step_and_releases(ranks, stage, accumulation):
    # A loss scale of 2^24 overflows fp16 until the scaler has halved it often enough.
    config = {"fp16": {"initial_scale_power": 24, "hysteresis": 1, "consecutive_hysteresis": False}}
    case = Case(dtype="fp16", stage=stage, accumulation=accumulation, steps=14, config=config)
    for compiled, eager in ranks(2).run(train_beside_fp32, case):
        assert 0 < compiled["skipped"] == eager["skipped"] < case.steps
        assert compiled["scale"] == eager["scale"]
        assert compiled["held after a skipped step"] == NOTHING
        assert compiled["error"] < 1.5 * eager["error"] < compiled["moved"]


def test_communication_in_fp32_under_bf16(ranks):
    case = Case(dtype="bf16", config={"communication_data_type": "fp32"}, steps=6)
    for compiled, eager in ranks(2).run(train_beside_fp32, case):
        assert compiled["error"] < 1.5 * eager["error"]


def test_fp32_accumulation_under_bf16_in_stage_2(ranks):
    case = Case(dtype="bf16", stage=2, accumulation=3, config={"data_types": {"grad_accum_dtype": "fp32"}}, steps=6)
    for compiled, eager in ranks(2).run(train_beside_fp32, case):
        assert compiled["error"] < 1.5 * eager["error"]


def test_autocast(ranks):
    case = Case(config={"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, steps=4)
    for result in ranks(2).run(train_beside_plain_loop, case):
        # Linear layers run, and their gradients travel, in bf16.
        assert result.error < 0.02
        assert result.held[-1] == NOTHING


@vary("dtype", ["fp32", "bf16", "fp16"])
@vary("stage", [1, 2])
def test_a_default_dtype_that_was_left_on(ranks, dtype, stage):
    # Neither bf16 nor fp16 holds the inverse of this scale. Of FewParameters one rank owns padding only.
    scaled = Case(model="FillsPartition", steps=2, config={"fp16": {"loss_scale": 1000}} if dtype == "fp16" else None)
    clipped = Case(model="FewParameters", steps=2, clipping=0.05)
    cases = [dataclasses.replace(case, dtype=dtype, stage=stage) for case in (scaled, clipped)]
    for results in ranks(2).run(train_under_default_dtypes, cases, ["bfloat16", "float16", "float64"]):
        for as_ever, under in results:
            assert under == [as_ever] * len(under)
            assert dtype != "fp32" or as_ever.error < 1e-5
            assert as_ever.moved > 0

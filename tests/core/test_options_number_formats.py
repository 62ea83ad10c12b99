# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Options of number formats: training comes to where DeepSpeed comes without DeepCompile, up to rounding."""

import dataclasses
from typing import Optional

import pytest
import torch
import torch.distributed as dist

from deepspeed.compile.zero_1_and_2 import gradient_counters
from deepspeed.utils import safe_get_full_fp32_param

from support.beside import warnings_logged
from support.ids import vary
from support.on_ranks import on_ranks
from support.options import SMALL
from support.training import NOTHING, ROUNDING, Case, batch, build, held, make_engine, total_error

SMALL_NUMEL = 96  # of each parameter of SMALL


def divide_by_the_scale_of_the_backward(optimizer):
    """DeepSpeed's own step divides by the scale of the next backward, which is another one where the scale grows."""
    update, unscale, scaler = optimizer._update_scale, optimizer.unscale_and_clip_grads, optimizer.loss_scaler
    before = []

    def updated(overflow):
        before[:] = [scaler.cur_scale]
        update(overflow)

    def unscaled(*args):
        after, scaler.cur_scale = scaler.cur_scale, *before
        unscale(*args)
        scaler.cur_scale = after

    optimizer._update_scale, optimizer.unscale_and_clip_grads = updated, unscaled


@dataclasses.dataclass(frozen=True)
class Format:
    """A choice of number formats. Sizes are in bytes of an element."""

    coarsest: str
    case: Case
    sent: tuple  # of the gradients of each of SMALL's parameters on their way
    kept: int  # of the target
    stages: tuple = (1, 2)
    spoil: Optional[int] = None  # the index of the step whose loss is infinite on rank 0


def bf16(**options):
    return Case(dtype="bf16", config={"bf16": options})


def fp16(**options):
    return Case(dtype="fp16", config={"fp16": options})


def autocast(dtype, **options):
    return Case(config={"torch_autocast": {"enabled": True, "dtype": dtype, **options}})


def accumulated(dtype, in_dtype):
    return Case(dtype=dtype, config={"data_types": {"grad_accum_dtype": in_dtype}})


def communicated(dtype, in_dtype):
    return Case(dtype=dtype, config={"communication_data_type": in_dtype})


SCALE = {
    "initial_scale_power": 17,
    "hysteresis": 2,
    "consecutive_hysteresis": True,
    "loss_scale_window": 2,
    "min_loss_scale": 4,
}
DATA_TYPES = {"param_dtype": "bf16", "buffer_dtype": "fp32", "keep_in_fp32_modules": []}
FORMATS = {
    "fp32-communicated-in-fp16": Format("fp16", communicated("fp32", "fp16"), (2, 2), 4),
    "fp32-communicated-in-bf16": Format("bf16", communicated("fp32", "bf16"), (2, 2), 4),
    "fp32-accumulated-in-bf16": Format("bf16", accumulated("fp32", "bf16"), (4, 4), 2),
    "bf16": Format("bf16", bf16(), (2, 2), 2),
    "bf16-communicated-in-fp32": Format("bf16", communicated("bf16", "fp32"), (4, 4), 2),
    "bf16-accumulated-in-fp32": Format("bf16", accumulated("bf16", "fp32"), (2, 2), 4, stages=(2,)),
    "bf16-states": Format("bf16", bf16(bf16_master_weights_and_grads=True, bf16_optimizer_states=True), (2, 2), 2),
    "bf16-immediate_grad_update": Format("bf16", bf16(immediate_grad_update=True), (2, 2), 2),
    "bf16-check_grad_overflow": Format("bf16", bf16(), (2, 2), 2, spoil=1),
    "bf16-no-check_grad_overflow": Format("bf16", bf16(check_grad_overflow=False), (2, 2), 2, spoil=1),
    "fp16-static-scale": Format("fp16", fp16(loss_scale=64), (2, 2), 2),
    "fp16-dynamic-scale": Format("fp16", dataclasses.replace(fp16(**SCALE), steps=6), (2, 2), 2),
    "fp16-accumulated-in-fp32": Format("fp16", accumulated("fp16", "fp32"), (2, 2), 4),
    "param-and-buffer-dtype": Format("bf16", Case(dtype="bf16", config={"data_types": DATA_TYPES}), (2, 2), 2),
    "autocast-bf16": Format("bf16", autocast("bfloat16"), (4, 2), 4),
    "autocast-fp16": Format("fp16", autocast("float16"), (4, 2), 4),
    "autocast-safe-modules": Format(
        "bf16", autocast("bfloat16", lower_precision_safe_modules=["torch.nn.Embedding"]), (2, 4), 4
    ),
}


@pytest.mark.options(
    "compile.deepcompile",
    "bf16.enabled",
    "bf16.bf16_optimizer_states",
    "bf16.check_grad_overflow",
    "bf16.bf16_master_weights_and_grads",
    "bf16.immediate_grad_update",
    "fp16.initial_scale_power",
    "fp16.loss_scale_window",
    "fp16.hysteresis",
    "fp16.consecutive_hysteresis",
    "fp16.min_loss_scale",
    "fp16.enabled",
    "fp16.loss_scale",
    "fp16.auto_cast",
    "data_types.grad_accum_dtype",
    "gradient_clipping",
    "data_types.param_dtype",
    "data_types.buffer_dtype",
    "data_types.keep_in_fp32_modules",
    "communication_data_type",
    "torch_autocast",
)
@vary("name, stage", [(name, stage) for name, how in FORMATS.items() for stage in how.stages])
@on_ranks(2)
def test_formats(name, stage):
    """A gradient would be sent, kept or rounded in another format than asked for, or other steps would be skipped."""
    how, rank = FORMATS[name], dist.get_rank()
    # One bucket, so that all gradients are on their way at the same time.
    case = dataclasses.replace(how.case, model=SMALL, stage=stage, accumulation=2, bucket=10**6)
    trained, skipped, scales, lines = [], [], [], []
    for deepcompile in (True, False):
        torch._dynamo.reset()
        module = build(case)
        engine = make_engine(module, dataclasses.replace(case, deepcompile=deepcompile))
        if not deepcompile and case.dtype == "fp16" and engine.optimizer.dynamic_loss_scale:
            divide_by_the_scale_of_the_backward(engine.optimizer)
        try:
            for step in range(case.steps):
                with warnings_logged() as texts:
                    for micro_step in range(case.accumulation):
                        loss = engine(batch(step, micro_step, rank, 4))
                        engine.backward(loss * float("inf") if (step, rank) == (how.spoil, 0) else loss)
                        engine.step()
                skipped.append(engine.skipped_steps)
                scales.append(engine.optimizer.loss_scale)
                lines.append(sum("Skipping step" in text for text in texts))
            trained.append([safe_get_full_fp32_param(parameter).clone() for parameter in module.parameters()])
            if deepcompile:
                counters = gradient_counters(engine)
        finally:
            engine.destroy()
    assert counters["peak_pending"] == SMALL_NUMEL * sum(how.sent)
    assert counters["peak_bound"] == SMALL_NUMEL * how.kept
    assert held(counters) == NOTHING
    # With DeepCompile, and then without.
    for told in (skipped, scales, lines):
        assert told[: case.steps] == told[case.steps :]
    finite = [all(bool(p.isfinite().all()) for p in parameters) for parameters in trained]
    if name == "bf16-no-check_grad_overflow":
        assert skipped[: case.steps] == [0, 0, 0] and finite == [False, False]
        return
    assert finite == [True, True]
    moved = total_error(trained[0], build(case).parameters())
    assert moved > 1e-2
    # Both ways round gradients at the same places, but sum micro-batches and ranks in one order or another, and
    # where DeepSpeed stores a sum in the parameters' format, it is here in the format asked for. So parameters
    # differ by one rounding of the coarsest format involved.
    assert total_error(*trained) < ROUNDING[how.coarsest] * moved
    if name in ("bf16-check_grad_overflow", "fp16-dynamic-scale"):
        assert 0 < skipped[-1] < case.steps, "the case shows nothing of skipped steps"
    if name == "bf16-check_grad_overflow":
        assert lines[: case.steps] == [0, 1 if rank == 0 else 0, 0]
    if name == "fp16-dynamic-scale":
        assert len(set(scales)) > 2, "the case shows nothing of the scale's ups and downs"

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""An engine whose Adam steps in one pass trains as one without it, releases gradients, and sends parameters early."""

import contextlib
import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deepspeed.compile.features.update import adam
from deepspeed.compile.features.update.adam import AdamStep, OnePassAdam
from deepspeed.compile.features.update.own_ranges import OwnRanges
from deepspeed.compile.zero_1_and_2 import wait_for_parameters
from deepspeed.compile.zero_1_and_2.parameter.gather import AllGather
from deepspeed.compile.zero_1_and_2.step.partition_gradient import ALIGN_NUMEL
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from support.ids import vary
from support.lifetime import backward, start, take_elsewhere, take_steps
from support.on_ranks import on_ranks
from support.training import (
    OVERLAPPED,
    ROUNDING,
    Case,
    as_traced,
    device,
    ranges_of,
    relative_error,
    step_in_one_pass,
    updates_compiled_from,
)


@vary(
    "varied",
    [
        {"accumulation": 2},
        {"model": "OddSizes", "groups": 2, "clipping": 0.05, "stage": 2},
        {"dtype": "bf16", "clipping": 0.1},
        {"groups": 2, "model": "AlignedBlocksWithin", "config": OVERLAPPED},
        {"dtype": "fp16"},
        # The first steps overflow.
        {"dtype": "fp16", "config": {"fp16": {"enabled": True, "initial_scale_power": 18, "hysteresis": 1}}},
        {"between": "load", "groups": 2},
        {"between": "offload", "clipping": 0.05},
        {"offloaded": True, "stage": 2, "dtype": "bf16"},
        {"offloaded": True, "accumulation": 2, "clipping": 0.05},
        {"dtype": "bf16", "stage": 2, "config": {"data_types": {"grad_accum_dtype": "fp32"}}},
    ],
)
# A C++ compiler takes long, so on a CPU most run as they are traced.
@vary("world, traced", [(1, True)], slow=[(2, False)])
@on_ranks("world")
def test_an_engine_steps_in_one_pass(tmp_path, world, traced, varied):
    """A step that kept states, for example those before a load, would step these still."""
    between = varied.get("between")
    case = Case(
        adam=True, **{"model": "RepeatedLayers", **{name: varied[name] for name in varied if name != "between"}}
    )
    traced = traced and device().type == "cpu"
    run, ranges, weights, states = AdamStep.run, [], [], []
    with mock.patch.object(AdamStep, "run", lambda self, *args: ranges.append(1) or run(self, *args)):
        # In one pass, and in ranges.
        for least in (2 * ALIGN_NUMEL, 2**30):
            with updates_compiled_from(least, 32), ranges_of(48), as_traced(traced):
                module, engine = start(case)
                step_in_one_pass(engine)
                # DeepSpeed has no fp32 values of a frozen parameter, or of one without elements.
                trained = [
                    parameter for parameter in module.parameters() if parameter.requires_grad and parameter.numel()
                ]
                begin = [parameter.float().clone() for parameter in trained]
                for step in range(5 * case.accumulation):
                    if between == "load" and step == 3:
                        engine.save_checkpoint(tmp_path, tag=str(least))
                        engine.load_checkpoint(tmp_path, tag=str(least))
                    elif between == "offload" and step == 3:
                        engine.offload_states()
                        take_elsewhere(engine)
                        engine.reload_states()
                    take_steps(engine, first=step)
                weights.append([safe_get_full_fp32_param(parameter).clone() for parameter in trained])
                states.append([safe_get_full_optimizer_state(parameter, "exp_avg").clone() for parameter in trained])
                engine.destroy()
    # The kernel steps all ranges at once, but for what a gather sends first. Most steps in fp16 overflow.
    assert len(ranges) > (10 if device().type == "cpu" else 0)
    moved = relative_error(weights[1], begin)
    # A rounding of a master weight, of which each step has one, may round a parameter otherwise.
    assert relative_error(*weights) < ROUNDING[case.dtype] * moved + 5 * 2**-24 and moved > 1e-3
    assert relative_error(*states) < 4 * ROUNDING[case.dtype]


@pytest.mark.options("compile_kwargs.disable", "TORCH_COMPILE_DISABLE=1")
@on_ranks(1)
def test_one_pass_with_inductor():
    """Who asked torch not to compile would wait for a compiler all the same."""

    def rules(backend, **compile_kwargs):
        engine = start(Case("FillsPartition", backend=backend, compile_kwargs=compile_kwargs)).engine
        found = [type(rule) for rule in engine.optimizer._deepcompile.rules]
        engine.destroy()
        return found

    assert rules("inductor") == [OnePassAdam, OwnRanges]
    assert rules("eager") == rules("inductor", disable=True) == [OwnRanges]
    # What the variable TORCH_COMPILE_DISABLE does before torch is imported.
    with torch._dynamo.config.patch(disable=True):
        assert rules("inductor") == [OwnRanges]


def order_of_a_step(case, fails_on=None):
    """Returns what a step does, in order: "stepped" for each range, "first" and "rest" when units are sent.

    Args:
        case: what to train for three steps.
        fails_on: the rank that cannot compile the pass, or None.
    """
    from deepspeed.compile.features.overlap_gather.feature import OverlapGather

    done, gather = [], OverlapGather if case.config == OVERLAPPED else AllGather

    def noted(name, cls, method):
        function = getattr(cls, method)
        return mock.patch.object(cls, method, lambda *args: done.append(name) or function(*args))

    with (
        noted("stepped", AdamStep, "run"),
        noted("first", gather, "start_first"),
        noted("rest", gather, "start"),
        updates_compiled_from(2 * ALIGN_NUMEL, 32),
        as_traced(device().type == "cpu"),
        raising_on(fails_on),
    ):
        module, engine = start(case)
        step_in_one_pass(engine)
        for step in range(3):
            backward(engine, step)
            done.clear()
            engine.step()
        wait_for_parameters(engine)
        total = sum(parameter.double().sum().item() for parameter in module.parameters())
        engine.destroy()
    return done, total


@vary("model", ["BlocksWithin", "AlignedBlocksWithin"])
@vary("groups", [1, 2])
def test_what_a_forward_needs_first_is_sent_first(ranks, model, groups):
    """The forward would wait for the parameters outside of blocks until the blocks are stepped."""
    case = Case(adam=True, dtype="bf16", model=model, groups=groups, config=OVERLAPPED)
    (first, total), (second, other) = ranks(2).run(order_of_a_step, case)
    assert total == other
    for done in (first, second):
        assert done.count("first") == 1 and done[-1] == "rest", done
        assert "stepped" in done[done.index("first") :], "all was stepped before anything was sent"
        # Each rank has a part of them: embedding and head.
        assert "stepped" in done[: done.index("first")]


def raising_on(rank):
    if rank != dist.get_rank():
        return contextlib.nullcontext()
    return mock.patch.object(
        adam, "kernel" if device().type == "cuda" else "compile_step", side_effect=RuntimeError("no compiler")
    )


def test_one_rank_cannot_compile_the_pass(ranks):
    """Ranks that agreed on an order by what they had compiled would wait for each other."""
    case = Case(adam=True, dtype="bf16", model="BlocksWithin", config=OVERLAPPED)
    (first, total), (second, other) = ranks(2).run(order_of_a_step, case, fails_on=1)
    assert "stepped" in first and "stepped" not in second
    assert total == other
    assert total == pytest.approx(ranks(2).run(order_of_a_step, case)[0][1], rel=1e-3)


def test_an_all_gather_waits_for_all_ranges(ranks):
    """Where all parameters are gathered at once, those would be sent that are not stepped yet."""
    at_once = {"compile": {"overlap_param_gather": False}}
    case = Case(adam=True, dtype="bf16", model="BlocksWithin", config=at_once)
    overlapped = dataclasses.replace(case, config=OVERLAPPED)
    for (done, total), (_, same) in zip(
        ranks(2).run(order_of_a_step, case), ranks(2).run(order_of_a_step, overlapped), strict=True
    ):
        # There is nothing to send first.
        assert done[0] == "first" and done.index("rest") == 1 + done.count("stepped") > 1, done
        assert total == same

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Options that have no effect: ``engine.compile()`` warns of each, and training is as without it."""

import dataclasses
import inspect
import types

import pytest
import torch
import torch.distributed as dist

from deepspeed import comm
from deepspeed.compile import init_z1_and_2, init_z3
from deepspeed.compile.config import CompileConfig
from deepspeed.compile.zero_1_and_2 import gradient_counters
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.config import get_zero_config

from support.beside import Beside, check, warnings_logged
from support.ids import vary
from support.models import BlocksWithin
from support.on_ranks import on_ranks
from support.options import ALSO_WARNED, OFFLOADS, SMALL, train_and_collect_warnings
from support.training import BOUND, Case, batch


def only_in_stage_3(section, **options):
    return {
        f"{section}.{name}": f"{section}.{name}={value} has no effect in this stage, only in stage 3"
        for name, value in options.items()
    }


ONLY_IN_STAGE_3 = {
    "zero_optimization": {
        "zero_quantized_weights": True,
        "zero_quantized_nontrainable_weights": True,
        "zero_quantized_gradients": True,
        "zero_hpz_partition_size": 2,
    },
    "compile": {
        "free_activation": True,
        "offload_activation": True,
        "offload_opt_states": True,
        "offload_parameters": True,
        "symmetric_memory": True,
        "sync_before_allgather": True,
        "sync_after_allgather": True,
        "keep_int_input_tensors": False,
        "keep_all_input_tensors": True,
    },
}
# What is said of each, by the name under which docs/reference/options.md has it. All are given at once.
WARNED = {
    **only_in_stage_3("zero_optimization", **ONLY_IN_STAGE_3["zero_optimization"]),
    **only_in_stage_3("compile", **ONLY_IN_STAGE_3["compile"]),
    "zero_optimization.offload_param": OFFLOADS.format("offload_param"),
    "compile.passes": "compile.passes holds 'z3', which has no effect in this stage",
    "gradient_predivide_factor": "gradient_predivide_factor=2.0 has no effect, because gradients are divided by the "
    "number of ranks before they are summed",
    "flops_profiler": "flops_profiler.enabled=true has no effect, because compiled code does not call the functions "
    "that the flops profiler counts; profile with compile.deepcompile set to false",
    "comms_logger": "comms_logger.enabled=true has no effect on the reductions of gradients, which the log leaves "
    "out; use torch.profiler for those",
    "compile_kwargs.name": "compile_kwargs['name'] has no effect, because only torch's own backend uses it",
}
WITHOUT_EFFECT = Case(
    model=SMALL,
    accumulation=2,
    config={
        "zero_optimization": {
            **ONLY_IN_STAGE_3["zero_optimization"],
            "offload_param": {"device": "cpu"},
            # DeepSpeed itself declines gradient_predivide_factor in stage 2 otherwise.
            "reduce_scatter": False,
        },
        "compile": {**ONLY_IN_STAGE_3["compile"], "passes": ["z1", "z3"]},
        "gradient_predivide_factor": 2.0,
        "flops_profiler": {"enabled": True, "profile_step": 1},
        "comms_logger": {"enabled": True},
        # The engine does something around the forward then.
        "memory_breakdown": True,
    },
    compile_kwargs={"name": "region"} if "name" in inspect.signature(torch.compile).parameters else None,
)


@vary("stage", [1, 2])
def test_warned(ranks, stage):
    """An option without an effect would be ignored in silence, or every rank would warn of it."""
    expected = dict(WARNED)
    if WITHOUT_EFFECT.compile_kwargs is None:
        del expected["compile_kwargs.name"]
    results = ranks(2).run(train_and_collect_warnings, dataclasses.replace(WITHOUT_EFFECT, stage=stage))
    for rank, result in enumerate(results):
        assert result.trained.error < BOUND < result.trained.moved
        assert not result.profiled
        assert sorted(result.warnings) == sorted((str(stage), says) for says in expected.values() if rank == 0)


@pytest.mark.follows("profile with compile.deepcompile set to false")
def test_a_profile_without_compiling(ranks):
    """The profiler would count nothing without DeepCompile either, as the warning of it advises."""
    case = Case(
        model=SMALL, steps=2, deepcompile=False, config={"flops_profiler": {"enabled": True, "profile_step": 1}}
    )
    (result,) = ranks(1).run(train_and_collect_warnings, case)
    assert result.trained.error < BOUND and result.profiled and result.warnings == []


def test_warned_in_another_word(ranks):
    """The deprecated name of an option would be ignored in silence."""
    case = Case(model=SMALL, steps=1, config={"zero_optimization": {"cpu_offload_param": True}})
    (result,) = ranks(1).run(train_and_collect_warnings, case)
    assert result.trained.error < BOUND
    assert result.warnings == [("1", ALSO_WARNED["zero_optimization.cpu_offload_param"])]


BOTH = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


@pytest.mark.quick
@vary(
    "stage, section, offloads",
    [
        (1, True, False),
        (2, BOTH, False),
        (2, {**BOTH, "offload_param": None}, False),
        (3, {**BOTH, "offload_param": None}, False),
        (3, {**BOTH, "offload_optimizer": None}, False),
        (3, BOTH, True),
    ],
    expects="offloads",
)
def test_offloads_of_both(monkeypatch, stage, section, offloads):
    """An offload of None would raise, or stages 1 and 2 warn of an option that DeepSpeed itself has set."""
    monkeypatch.setattr(init_z1_and_2, "init_z1_and_2", lambda *_, **__: None)
    monkeypatch.setattr(init_z3, "init_z3", lambda *_, **__: None)
    config = {"zero_optimization": {**section, "stage": stage} if isinstance(section, dict) else section}
    settings = types.SimpleNamespace(zero_config=get_zero_config(config), compile_config=CompileConfig())
    # A path, in place of a dict.
    for given in (config, "runs/zero_optimization.json"):
        engine = types.SimpleNamespace(config=given, _config=settings, zero_optimization_stage=lambda: stage)
        DeepSpeedEngine.get_deepcompile_backend(engine, "eager", {}, None)
        assert settings.compile_config.offload_parameters is offloads


@pytest.mark.follows("use torch.profiler for those")
@on_ranks(2)
def test_a_profile_of_reductions():
    """The profiler that the warning advises would leave reductions out too, or training would be another with it."""
    # Copy engines reduce without collectives.
    config = {"comms_logger": {"enabled": True}, "compile": {"copy_engines": False}}
    try:
        with warnings_logged() as texts:
            pair = Beside(BlocksWithin(), Case(config=config))
        pair.step(batch(0, 0, dist.get_rank(), 4))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            pair.step(batch(1, 0, dist.get_rank(), 4))
        profiled = sum(event.name == "c10d::_reduce_scatter_base_" for event in profile.events())
        assert profiled == gradient_counters(pair.engine)["messages_sent"] > 0
        check([pair.end()])
    finally:
        # DeepSpeed has one logger of communication for all engines.
        comm.comm.comms_logger.enabled = False
    advised = [text.partition("; ")[2] for text in texts if "comms_logger" in text]
    assert advised == (["use torch.profiler for those"] if dist.get_rank() == 0 else [])

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Arguments of ``engine.compile()`` that reach torch."""

import inspect
from typing import Any, Dict, List, NamedTuple

import pytest
import torch

from support.beside import warnings_logged
from support.ids import vary
from support.options import SMALL, prepare, train_both_stages, train_prepared
from support.training import BOUND, Case, Trained, train_beside_plain_loop

# Not every torch has it.
ISOLATED = {name: True for name in inspect.signature(torch.compile).parameters if name == "isolate_recompiles"}


@vary(
    "kwargs, varied, from_graphs",
    [
        ({"dynamic": True}, {"vary_length": True}, True),
        ({"dynamic": False}, {"vary_length": True}, True),
        ({"fullgraph": True, "mode": "default", "options": None, "backend": "ignored", **ISOLATED}, {}, True),
        # Code that the compiler is kept from is trained by autograd's way.
        ({"disable": True}, {}, False),
        ({"dynamic": False, "recompile_limit": 1}, {"vary_length": True}, None),
    ],
    expects="from_graphs",
)
def test_compile_kwargs(ranks, kwargs, varied, from_graphs):
    unknown = set(kwargs) - {*inspect.signature(torch.compile).parameters}
    if unknown:
        pytest.skip(f"torch.compile of torch {torch.__version__} has no {', '.join(unknown)}")
    for result in train_both_stages(ranks, compile_kwargs=kwargs, steps=3, **varied):
        counters = result.counters
        assert counters["from_graphs"] + counters["from_autograd"] == 2 * 3 * 2
        if from_graphs is None:
            assert counters["from_graphs"] > 0 and counters["from_autograd"] > 0
        else:
            assert counters["from_autograd" if from_graphs else "from_graphs"] == 0


class WithPatches(NamedTuple):
    trained: Trained
    patches: List[Dict[str, Any]]  # the options that the code generator got for each graph, by name


def train_and_collect_patches(case, seen):
    """Trains beside a plain loop and collects those of the code generator's options that ``seen`` names."""
    from torch._inductor import compile_fx

    patches, real = [], compile_fx.compile_fx

    def record(*args, config_patches=None, **kwargs):
        # It calls itself once the options are in force.
        if config_patches is not None:
            patches.append({name: config_patches.get(name) for name in seen})
        return real(*args, config_patches=config_patches, **kwargs)

    compile_fx.compile_fx = record
    try:
        return WithPatches(train_beside_plain_loop(case), patches)
    finally:
        compile_fx.compile_fx = real


@vary(
    "kwargs, expected",
    [
        ({"mode": "max-autotune-no-cudagraphs"}, {"max_autotune": True, "coordinate_descent_tuning": True}),
        (
            {"options": {"epilogue_fusion": False, "max_fusion_size": 1}},
            {"epilogue_fusion": False, "max_fusion_size": 1},
        ),
    ],
    expects="expected",
)
def test_inductor_gets(ranks, kwargs, expected):
    case = Case(model=SMALL, backend="inductor", steps=2, accumulation=2, compile_kwargs=kwargs)
    for result in ranks(2).run(train_and_collect_patches, case, list(expected)):
        assert result.trained.error < BOUND
        assert result.patches and all(got == expected for got in result.patches)


class WithTheDefaultSchedule(NamedTuple):
    error: float  # of the parameters, against a plain loop's
    warnings: List[str]  # of DeepSpeed in engine.compile()


def compile_with_the_default_schedule(stage):
    from deepspeed.compile.passes import zero_1_and_2_compile as passes

    case = Case(model=SMALL, stage=stage)
    module, engine = prepare(case)
    schedule = [[0, [passes.add_z2_reduce if stage == 2 else passes.add_z1_reduce]]]
    with warnings_logged() as warnings:
        engine.compile(backend="eager", schedule=schedule, compiled_autograd_enabled=True)
    return WithTheDefaultSchedule(train_prepared(case, module, engine), warnings)


def test_schedule_and_compiled_autograd(ranks):
    for stage in (1, 2):
        for result in ranks(2).run(compile_with_the_default_schedule, stage):
            assert result.error < BOUND
            assert any("disabling compiled autograd" in message for message in result.warnings)

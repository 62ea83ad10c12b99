# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Arguments of ``engine.compile()`` that reach torch."""

import inspect
from unittest import mock

import pytest
import torch
from torch._inductor import compile_fx

from deepspeed.compile.passes import zero_1_and_2_compile as passes

from support.beside import warnings_logged
from support.ids import vary
from support.on_ranks import on_ranks
from support.options import SMALL, outcome, prepare, train_both_stages, train_prepared
from support.training import BOUND, Case, batch, build, make_engine

# Not every torch has it.
ISOLATED = {name: True for name in inspect.signature(torch.compile).parameters if name == "isolate_recompiles"}


@pytest.mark.options(
    "compile_kwargs.dynamic",
    "compile_kwargs.fullgraph",
    "compile_kwargs.recompile_limit",
    "compile_kwargs.disable",
    "TORCH_COMPILE_DISABLE=1",
    "compile_kwargs.isolate_recompiles",
    "compile_kwargs.shapes_spec",
    "compile_kwargs.dynamic_shapes",
    "compile_kwargs.backend",
)
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
    """An argument of torch.compile would be dropped, or graphs would no longer reduce with it."""
    unknown = set(kwargs) - {*inspect.signature(torch.compile).parameters}
    if unknown:
        pytest.skip(f"torch.compile of torch {torch.__version__} has no {', '.join(unknown)}")
    for result in train_both_stages(ranks, world=1, compile_kwargs=kwargs, steps=3, **varied):
        counters = result.counters
        assert counters["from_graphs"] + counters["from_autograd"] == 2 * 3 * 2
        if from_graphs is None:
            assert counters["from_graphs"] > 0 and counters["from_autograd"] > 0
        else:
            assert counters["from_autograd" if from_graphs else "from_graphs"] == 0


@pytest.mark.options("backend", "compile_kwargs.mode", "compile_kwargs.options")
@vary(
    "kwargs, expected",
    [
        ({"mode": "max-autotune-no-cudagraphs"}, {"max_autotune": True, "coordinate_descent_tuning": True}),
        (
            {"options": {"epilogue_fusion": False, "max_fusion_size": 1}},
            {"epilogue_fusion": False, "max_fusion_size": 1},
        ),
        ({"options": {"epilogue-fusion": False}}, {"epilogue_fusion": False, "epilogue-fusion": None}),
    ],
    expects="expected",
)
@on_ranks(1)
def test_inductor_gets(kwargs, expected):
    """A mode or an option of Inductor would be lost on the way through our backend."""
    case, found = Case(model=SMALL, backend="inductor", compile_kwargs=kwargs), []

    def record(*_, config_patches=None, **__):
        found.append({name: config_patches.get(name) for name in expected})
        raise RuntimeError("no code is generated")

    with mock.patch.object(compile_fx, "compile_fx", record):
        engine = make_engine(build(case), case)
        outcome(engine, batch(0, 0, 0, 4))
        engine.destroy()
    # One graph.
    assert found == [expected]


@pytest.mark.options("schedule", "compiled_autograd_enabled")
@vary("stage", [1, 2])
@on_ranks(1)
def test_schedule_and_compiled_autograd(stage):
    """A schedule that says what happens anyway would be refused, or compiled autograd would trace the reductions."""
    case = Case(model=SMALL, stage=stage)
    module, engine = prepare(case)
    schedule = [[0, [passes.add_z2_reduce if stage == 2 else passes.add_z1_reduce]]]
    with warnings_logged() as warnings:
        engine.compile(backend="eager", schedule=schedule, compiled_autograd_enabled=True)
    assert train_prepared(case, module, engine) < BOUND
    assert any("disabling compiled autograd" in message for message in warnings)

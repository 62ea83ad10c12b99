# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""``compile.deepcompile`` alone makes an engine train under DeepCompile; nobody has to call ``engine.compile()``."""

import dataclasses
import functools
import gc
import inspect
import logging
import weakref

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.compile.zero_1_and_2 import gradient_counters, reset_gradient_counters

from support.beside import Beside, logged, warnings_logged
from support.ids import vary
from support.on_ranks import on_ranks
from support.options import SMALL, outcome, prepare
from support.training import (
    BOUND,
    Case,
    batch,
    build,
    compile_backend,
    device,
    engine_by_configuration,
    held,
    make_engine,
)

ITSELF = "DeepCompile compiles the engine with backend 'eager'"
BECAUSE = "compile.deepcompile is true"
TOO_LATE = "The arguments of engine.compile() have no effect"


class Loop(Beside):
    """An engine whose ``compile()`` the caller does not call, beside a plain loop.

    Attributes:
        compiled: whether the engine was compiled, in each micro-batch.
    """

    def __init__(self, case):
        config = {**(case.config or {}), "compile": {"deepcompile": True, **(case.config or {}).get("compile", {})}}
        # make_engine() calls engine.compile() where the case asks for DeepCompile; the sections of config come last.
        super().__init__(build(case), dataclasses.replace(case, config=config, deepcompile=False))
        self.compiled = []

    def micro_batch(self, step, micro_step, call=None):
        ids = batch(step, micro_step, dist.get_rank(), 4)
        if self.engine.is_compiled:
            reset_gradient_counters(self.engine)
        self.engine.backward((call or self.engine)(ids))
        self.compiled.append(self.engine.is_compiled)
        self.from_graphs.append(gradient_counters(self.engine)["from_graphs"] if self.engine.is_compiled else 0)
        self.engine.step()
        (self.plain(ids) / self.case.accumulation).backward()

    def step(self, step, call=None):
        for micro_step in range(self.case.accumulation):
            self.micro_batch(step, micro_step, call)
        self.step_plain()

    def end(self):
        """Destroys the engine; returns the parameters' error."""
        assert sum(held(gradient_counters(self.engine)).values()) == 0
        return super().end().error


def trained(case, before=None, during=None):
    """Trains an engine that compiles itself as a plain loop does. Returns the loop, and what was logged and warned of.

    Args:
        before: called with the loop before the first step.
        during: called by a micro-batch with the loop and the ids, in place of the engine.
    """
    with logged(logging.INFO) as texts, warnings_logged() as warnings, compile_backend("eager"):
        loop = Loop(case)
        if before is not None:
            before(loop)
        call = functools.partial(during, loop) if during is not None else None
        for step in range(3):
            loop.step(step, call)
        assert loop.end() < BOUND
    assert not said(texts, "engine.compile() has not been called")
    return loop, texts, warnings


def said(texts, beginning):
    return [text for text in texts if beginning in text]


def rank_0_evaluates(loop):
    """With and without gradients, before any training."""
    loop.engine.eval()
    if dist.get_rank() == 0:
        ids = batch(9, 0, 0, 4)
        loop.engine(ids)
        with torch.no_grad():
            loop.engine(ids)
    loop.engine.train()
    dist.barrier()
    assert not loop.engine.is_compiled


@pytest.mark.options("compile.deepcompile")
@pytest.mark.follows("for DeepCompile set zero_optimization.stage to 1 or 2")
@vary("stage, accumulation", [(1, 1), (1, 2), (2, 1), (2, 2)])
@on_ranks(2)
def test_before_the_first_training_forward(stage, accumulation):
    """An engine would compile itself in an evaluation, where only one rank is, or after its first training step."""
    loop, texts, warnings = trained(Case("BlocksWithin", stage, accumulation), rank_0_evaluates)
    assert all(loop.compiled) and all(loop.from_graphs)
    # One line, on one rank, and no warning.
    lines = said(texts, ITSELF)
    assert len(lines) == (dist.get_rank() == 0)
    assert all(line.endswith("before its first training forward, because " + BECAUSE) for line in lines)
    assert not said(warnings, "DeepCompile compiles")


@pytest.mark.follows("if that is not meant, call engine.train() first")
@on_ranks(1)
def test_a_module_trained_in_evaluation_mode():
    """A module that stays in evaluation mode would be trained uncompiled for ever."""
    loop, texts, warnings = trained(Case(), lambda loop: loop.engine.eval())
    assert loop.compiled == [False, True, True]
    assert loop.from_graphs[0] == 0 and all(loop.from_graphs[1:])
    assert len(said(texts, "after its first step, because " + BECAUSE)) == 1
    assert len(said(warnings, "trains in evaluation mode, without dropout")) == 1


@on_ranks(1)
def test_a_module_that_is_called_without_its_engine():
    """An engine whose caller calls the module would never compile itself."""
    loop, _, _ = trained(Case(accumulation=2), during=lambda loop, ids: loop.module(ids))
    assert loop.compiled == [False, False, True, True, True, True]


def with_gradients_already(loop):
    """The first micro-batch of a step goes to the module by itself."""
    loop.micro_batch(5, 0, loop.module)
    loop.micro_batch(5, 1)
    loop.step_plain()


@on_ranks(1)
def test_an_engine_that_holds_gradients_waits_for_the_step():
    """Compiling between micro-batches would drop the gradients that DeepSpeed holds of the first."""
    loop, _, _ = trained(Case(accumulation=2), with_gradients_already)
    assert loop.compiled == [False, False, True, True, True, True, True, True]
    assert all(loop.from_graphs[2:])


@on_ranks(1)
def test_the_callers_compile_wins():
    """An engine that its caller has compiled would compile itself again, and ignore the caller's arguments."""
    arguments = {"backend": "eager", "compile_kwargs": {"dynamic": False}}
    loop, texts, warnings = trained(Case(), lambda loop: loop.engine.compile(**arguments))
    assert all(loop.compiled) and all(loop.from_graphs)
    assert not said(texts, ITSELF) and not said(warnings, TOO_LATE)


def compiled_too_late(loop):
    loop.step(5)
    loop.engine.compile()
    loop.engine.compile(backend="inductor", compile_kwargs={"dynamic": False})


@on_ranks(2)
def test_a_compile_that_comes_too_late_is_told():
    """Arguments that come too late would be ignored in silence, or arguments that say nothing be warned of."""
    _, _, warnings = trained(Case("BlocksWithin"), compiled_too_late)
    assert len(said(warnings, TOO_LATE)) == (1 if dist.get_rank() == 0 else 0)


@pytest.mark.quick
@on_ranks(1)
def test_refused_as_by_compile():
    """A refusal would come once, and later forwards train with an engine that is half set up."""
    loop, raised = Loop(Case()), []
    # Torch asks for CUDA graphs since the engine was made, which deepspeed.initialize() cannot know.
    with torch._inductor.config.patch("triton.cudagraphs", True):
        for training in (True, True, False, None):
            call = loop.engine if training is not None else lambda _: loop.engine.compile()
            loop.module.train(training is not False)
            try:
                call(batch(0, 0, dist.get_rank(), 4))
            except ValueError as error:
                raised.append(str(error))
    assert len(raised) == 4 and len(set(raised)) == 1
    assert raised[0].startswith("DeepCompile with ZeRO stage 1: CUDA graphs")
    assert not loop.engine.is_compiled and type(loop.engine.optimizer).__name__ == "DeepSpeedZeroOptimizer"
    with torch.no_grad():
        assert float(loop.engine.eval() or loop.engine(batch(0, 0, 0, 4))) > 0
    loop.engine.destroy()


@vary("stage", [0, 3])
@on_ranks(2)
def test_other_engines_are_left_to_the_base(stage):
    """An engine without an optimizer would be compiled or told of, or one of ZeRO-3 not be told as by the base."""
    # DeepSpeed says it once in a process.
    deepspeed.utils.logging._log_dist_once_cached.cache_clear()
    torch._dynamo.reset()
    module = torch.nn.Linear(4, 1).to(device())
    engine = engine_by_configuration(module, True, zero_optimization={"stage": stage})
    with logged(logging.INFO) as texts:
        engine(torch.ones(2, 4, device=device()))
    assert not engine.is_compiled
    engine.destroy()
    assert bool(said(texts, "engine.compile() has not been called")) == (stage == 3 and dist.get_rank() == 0)
    assert texts == [] or stage == 3


@vary(
    "stage, says",
    [
        (0, "leaves engine.compile() plain torch.compile; for DeepCompile set zero_optimization.stage to 1 or 2"),
        (3, "begins when engine.compile() is called"),
    ],
)
@on_ranks(2)
def test_what_the_key_does_in_other_stages(stage, says):
    """A user who has set the key would train without DeepCompile, and nothing say so."""
    module = torch.nn.Linear(4, 1).to(device())
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    engine = engine_by_configuration(module, True, zero_optimization={"stage": stage}, optimizer=sgd)
    with logged(logging.INFO) as texts:
        for _ in range(2):
            engine(torch.ones(2, 4, device=device()))
        if stage == 0:
            engine.compile(backend="eager")
    engine.destroy()
    lines = said(texts, "compile.deepcompile")
    assert len(lines) == (dist.get_rank() == 0)
    assert all(f"compile.deepcompile=true with ZeRO stage {stage}" in line and says in line for line in lines)


@on_ranks(1)
def test_a_destroyed_engine_is_not_held():
    """What an engine registers to compile itself would hold the engine, and its parameters, for ever."""
    with compile_backend("eager"):
        loop = Loop(Case())
        loop.step(0)
    loop.engine.destroy()
    reference = weakref.ref(loop.engine)
    del loop
    gc.collect()
    assert reference() is None


@on_ranks(1)
def test_a_function_that_its_caller_compiles():
    """An engine would compile itself while Dynamo traces the function around it."""
    with compile_backend("eager"):
        loop = Loop(Case())
        call = torch.compile(lambda ids: loop.engine(ids) * 1.0, backend="eager")
        for step in range(2):
            loop.step(step, call)
    assert loop.end() < BOUND and loop.from_graphs[-1] > 0


@on_ranks(1)
def test_an_engine_whose_parameters_a_later_one_has_is_left_alone():
    """An earlier engine of a module would compile itself, and take the parameters from the later one."""
    with compile_backend("eager"):
        loop = Loop(Case())
        earlier, loop.engine = loop.engine, make_engine(loop.module, loop.case)
        loop.step(0)
        earlier(batch(0, 0, dist.get_rank(), 4))
        loop.step(1)
        assert (earlier.is_compiled, loop.engine.is_compiled) == (False, True)
        assert loop.end() < BOUND
        earlier.destroy()


def compiled_by_autosp():
    """Returns what AutoSP leaves of the arguments of engine.compile(), the caller's and those by default."""
    case, given = Case(model=SMALL, config={"compile": {"passes": ["autosp"]}}), {}
    for arguments in ({"compile_kwargs": given}, {}):
        engine = prepare(case).engine
        # A second time in a process it raises, behind what is looked at here.
        outcome(engine.compile, backend="eager", **arguments)
        engine.destroy()
    return given, inspect.signature(engine.compile).parameters["compile_kwargs"].default


def test_arguments_that_another_engine_has(ranks):
    """AutoSP would write ``fullgraph`` into what later engines of the process take for their user's arguments."""
    try:
        assert ranks(1).run(compiled_by_autosp) == [({}, {})]
    finally:
        # AutoSP replaces functions of torch's compiler.
        ranks(1).stop()


def compiled_with(compile_kwargs):
    module, engine = prepare(Case(model=SMALL))
    said = outcome(engine.compile, backend="eager", compile_kwargs=compile_kwargs)
    engine.destroy()
    return said


@pytest.mark.follows("is not a dict of arguments of torch.compile; pass one, or leave it out")
@on_ranks(1)
def test_arguments_that_are_no_dict():
    """The error would be Python's, about the length of a sequence, and None, as for torch.compile, be one too."""
    sentence = "compile_kwargs='mode' is not a dict of arguments of torch.compile; pass one, or leave it out"
    assert compiled_with("mode") == f"ValueError: {sentence}"
    assert compiled_with(None) is None


def in_evaluation_mode(loop):
    loop.engine.eval()


def in_evaluation_mode_later(loop):
    loop.step(5)
    loop.engine.eval()


def compiled_by_caller_in_evaluation_mode(loop):
    loop.engine.compile(backend="eager", compile_kwargs={"dynamic": False})
    loop.engine.eval()


@pytest.mark.options("compile.deepcompile")
@vary(
    "sharded, before",
    [
        ("all", in_evaluation_mode),
        (None, compiled_by_caller_in_evaluation_mode),
        (None, in_evaluation_mode_later),
    ],
)
@on_ranks(1)
def test_evaluation_mode_in_a_compiled_engine(sharded, before):
    """An engine that is compiled before its first step would train without dropout, and nothing say so."""
    case = Case("BlocksWithin", config={"compile": {"shard_parameters": sharded}} if sharded else None)
    loop, _, warnings = trained(case, before)
    assert all(loop.compiled)
    assert len(said(warnings, "trains in evaluation mode, without dropout")) == 1

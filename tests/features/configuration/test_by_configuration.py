# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""``compile.deepcompile`` alone makes an engine train under DeepCompile; nobody has to call ``engine.compile()``."""

import dataclasses
import functools
import gc
import inspect
import logging
import weakref
from typing import List, NamedTuple

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.compile.zero_1_and_2 import gradient_counters, reset_gradient_counters

from support.beside import Beside, logged, warnings_logged
from support.ids import vary
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


class Found(NamedTuple):
    error: float  # of the parameters
    compiled: List[bool]  # whether the engine was, in each micro-batch
    from_graphs: List[int]  # how many gradients graphs reduced in each micro-batch
    texts: List[str]  # what DeepSpeed logged
    warnings: List[str]  # those of the texts that are warnings


def trains(case, before=None, during=None, steps=3):
    """Trains an engine that compiles itself.

    Args:
        before: called with the loop before the first step.
        during: called by a micro-batch with the loop and the ids, in place of the engine.
    """
    with logged(logging.INFO) as texts, warnings_logged() as warnings, compile_backend("eager"):
        loop = Loop(case)
        if before is not None:
            before(loop)
        call = functools.partial(during, loop) if during is not None else None
        for step in range(steps):
            loop.step(step, call)
        return Found(loop.end(), loop.compiled, loop.from_graphs, texts, warnings)


def trained(ranks, case, *how, world=1, **kwargs):
    """Returns what was found on each rank, after comparing its parameters with those of a plain loop."""
    results = ranks(world).run(trains, case, *how, **kwargs)
    for found in results:
        assert found.error < BOUND
        assert not [text for text in found.texts if "engine.compile() has not been called" in text]
    return results


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
def test_before_the_first_training_forward(ranks, stage, accumulation):
    """An engine would compile itself in an evaluation, where only one rank is, or after its first training step."""
    case = Case("BlocksWithin", stage, accumulation)
    results = trained(ranks, case, rank_0_evaluates, world=2)
    for rank, found in enumerate(results):
        assert all(found.compiled) and all(found.from_graphs)
        # One line, on one rank, and no warning.
        (line, *rest) = said(found.texts, ITSELF) if rank == 0 else [None]
        assert not rest and (rank != 0 or line.endswith("before its first training forward, because " + BECAUSE))
        assert not said(found.warnings, "DeepCompile compiles")


def in_evaluation_mode(loop):
    loop.engine.eval()


@pytest.mark.follows("if that is not meant, call engine.train() first")
def test_a_module_trained_in_evaluation_mode(ranks):
    """A module that stays in evaluation mode would be trained uncompiled for ever."""
    (found,) = trained(ranks, Case(), in_evaluation_mode)
    assert found.compiled == [False, True, True]
    assert found.from_graphs[0] == 0 and all(found.from_graphs[1:])
    assert len(said(found.texts, "after its first step, because " + BECAUSE)) == 1
    assert len(said(found.warnings, "trains in evaluation mode, without dropout")) == 1


def of_the_module(loop, ids):
    return loop.module(ids)


def test_a_module_that_is_called_without_its_engine(ranks):
    """An engine whose caller calls the module would never compile itself."""
    (found,) = trained(ranks, Case(accumulation=2), during=of_the_module)
    assert found.compiled == [False, False, True, True, True, True]


def with_gradients_already(loop):
    """The first micro-batch of a step goes to the module by itself."""
    loop.micro_batch(5, 0, loop.module)
    loop.micro_batch(5, 1)
    loop.step_plain()


def test_an_engine_that_holds_gradients_waits_for_the_step(ranks):
    """Compiling between micro-batches would drop the gradients that DeepSpeed holds of the first."""
    (found,) = trained(ranks, Case(accumulation=2), with_gradients_already)
    assert found.compiled == [False, False, True, True, True, True, True, True]
    assert all(found.from_graphs[2:])


def compiled_by_caller(loop):
    loop.engine.compile(backend="eager", compile_kwargs={"dynamic": False})


def test_the_callers_compile_wins(ranks):
    """An engine that its caller has compiled would compile itself again, and ignore the caller's arguments."""
    (found,) = trained(ranks, Case(), compiled_by_caller)
    assert all(found.compiled) and all(found.from_graphs)
    assert not said(found.texts, ITSELF) and not said(found.warnings, TOO_LATE)


def compiled_too_late(loop):
    loop.step(5)
    loop.engine.compile()
    loop.engine.compile(backend="inductor", compile_kwargs={"dynamic": False})


def test_a_compile_that_comes_too_late_is_told(ranks):
    """Arguments that come too late would be ignored in silence, or arguments that say nothing be warned of."""
    for rank, found in enumerate(trained(ranks, Case("BlocksWithin"), compiled_too_late, world=2)):
        assert len(said(found.warnings, TOO_LATE)) == (1 if rank == 0 else 0)


class Refused(NamedTuple):
    said: List[str]  # what forwards with gradients and engine.compile() raised
    compiled: bool  # whether the engine is, afterwards
    optimizer: str  # the name of its class
    loss: float  # of an evaluation


def refused(case):
    """Calls an engine that may not compile itself, in training and in evaluation, and ``engine.compile()``.

    Torch asks for CUDA graphs since the engine was made, which deepspeed.initialize() cannot know.
    """
    loop = Loop(case)
    said = []
    with torch._inductor.config.patch("triton.cudagraphs", True):
        for training in (True, True, False, None):
            call = loop.engine if training is not None else lambda _: loop.engine.compile()
            loop.module.train(training is not False)
            try:
                call(batch(0, 0, dist.get_rank(), 4))
            except ValueError as error:
                said.append(str(error))
    compiled, optimizer = loop.engine.is_compiled, type(loop.engine.optimizer).__name__
    with torch.no_grad():
        evaluated = float(loop.engine.eval() or loop.engine(batch(0, 0, 0, 4)))
    loop.engine.destroy()
    return Refused(said, compiled, optimizer, evaluated)


@pytest.mark.quick
def test_refused_as_by_compile(ranks):
    """A refusal would come once, and later forwards train with an engine that is half set up."""
    (result,) = ranks(1).run(refused, Case())
    sentence = "DeepCompile with ZeRO stage 1: CUDA graphs"
    assert len(result.said) == 4 and len(set(result.said)) == 1 and result.said[0].startswith(sentence)
    assert not result.compiled and result.optimizer == "DeepSpeedZeroOptimizer" and result.loss > 0


class Told(NamedTuple):
    texts: List[str]  # that an engine logged in a forward that could train it
    compiled: bool


def told_in_a_forward(stage):
    """Calls an engine that does not compile itself, in a forward that could train it.

    Its stage is 3, or 0 without an optimizer: DeepSpeed takes no other without one.
    """
    # DeepSpeed says it once in a process.
    deepspeed.utils.logging._log_dist_once_cached.cache_clear()
    torch._dynamo.reset()
    module = torch.nn.Linear(4, 1).to(device())
    engine = engine_by_configuration(module, True, zero_optimization={"stage": stage})
    with logged(logging.INFO) as texts:
        engine(torch.ones(2, 4, device=device()))
    result = Told(texts, engine.is_compiled)
    engine.destroy()
    return result


@vary("stage", [0, 3])
def test_other_engines_are_left_to_the_base(ranks, stage):
    """An engine without an optimizer would be compiled or told of, or one of ZeRO-3 not be told as by the base."""
    for rank, (texts, compiled) in enumerate(ranks(2).run(told_in_a_forward, stage)):
        assert not compiled
        assert bool(said(texts, "engine.compile() has not been called")) == (stage == 3 and rank == 0)
        assert texts == [] or stage == 3


def told_of_the_key(stage):
    """Returns what is told of the key ``deepcompile`` in two forwards and ``engine.compile()``."""
    module = torch.nn.Linear(4, 1).to(device())
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    engine = engine_by_configuration(module, True, zero_optimization={"stage": stage}, optimizer=sgd)
    with logged(logging.INFO) as texts:
        for _ in range(2):
            engine(torch.ones(2, 4, device=device()))
        if stage == 0:
            engine.compile(backend="eager")
    engine.destroy()
    return [text for text in texts if "compile.deepcompile" in text]


@vary(
    "stage, says",
    [
        (0, "leaves engine.compile() plain torch.compile; for DeepCompile set zero_optimization.stage to 1 or 2"),
        (3, "begins when engine.compile() is called"),
    ],
)
def test_what_the_key_does_in_other_stages(ranks, stage, says):
    """A user who has set the key would train without DeepCompile, and nothing say so."""
    first, other = ranks(2).run(told_of_the_key, stage)
    (line,) = first
    assert f"compile.deepcompile=true with ZeRO stage {stage}" in line and says in line
    assert not other


def gone_when_destroyed(case):
    """Whether nothing holds an engine that compiled itself, once it is destroyed."""
    with compile_backend("eager"):
        loop = Loop(case)
        loop.step(0)
    loop.engine.destroy()
    reference = weakref.ref(loop.engine)
    del loop
    gc.collect()
    return reference() is None


def test_a_destroyed_engine_is_not_held(ranks):
    """What an engine registers to compile itself would hold the engine, and its parameters, for ever."""
    assert ranks(1).run(gone_when_destroyed, Case()) == [True]


class TracedByTheCaller(NamedTuple):
    error: float  # of the parameters
    from_graphs: int  # gradients of the last step that graphs reduced


def traced_by_the_caller(case):
    """Trains where the caller compiles its own function around the engine."""
    with compile_backend("eager"):
        loop = Loop(case)
        call = torch.compile(lambda ids: loop.engine(ids) * 1.0, backend="eager")
        for step in range(2):
            loop.step(step, call)
    return TracedByTheCaller(loop.end(), loop.from_graphs[-1])


def test_a_function_that_its_caller_compiles(ranks):
    """An engine would compile itself while Dynamo traces the function around it."""
    ((error, from_graphs),) = ranks(1).run(traced_by_the_caller, Case())
    assert error < BOUND and from_graphs > 0


class TwoEngines(NamedTuple):
    earlier_compiled: bool
    later_compiled: bool
    error: float  # of the parameters


def of_parameters_that_were_taken(case):
    """Makes two engines for one module, of which the first was never compiled, and trains the later one."""
    with compile_backend("eager"):
        loop = Loop(case)
        earlier, loop.engine = loop.engine, make_engine(loop.module, loop.case)
        loop.step(0)
        earlier(batch(0, 0, dist.get_rank(), 4))
        loop.step(1)
        compiled = earlier.is_compiled, loop.engine.is_compiled
        error = loop.end()
        earlier.destroy()
    return TwoEngines(*compiled, error)


def test_an_engine_whose_parameters_a_later_one_has_is_left_alone(ranks):
    """An earlier engine of a module would compile itself, and take the parameters from the later one."""
    (result,) = ranks(1).run(of_parameters_that_were_taken, Case())
    assert (result.earlier_compiled, result.later_compiled) == (False, True) and result.error < BOUND


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
def test_arguments_that_are_no_dict(ranks):
    """The error would be Python's, about the length of a sequence, and None, as for torch.compile, be one too."""
    (said,) = ranks(1).run(compiled_with, "mode")
    sentence = "compile_kwargs='mode' is not a dict of arguments of torch.compile; pass one, or leave it out"
    assert said == f"ValueError: {sentence}"
    assert ranks(1).run(compiled_with, None) == [None]


def in_evaluation_mode_later(loop):
    loop.step(5)
    loop.engine.eval()


def compiled_by_caller_in_evaluation_mode(loop):
    compiled_by_caller(loop)
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
def test_evaluation_mode_in_a_compiled_engine(ranks, sharded, before):
    """An engine that is compiled before its first step would train without dropout, and nothing say so."""
    case = Case("BlocksWithin", config={"compile": {"shard_parameters": sharded}} if sharded else None)
    (found,) = trained(ranks, case, before)
    assert all(found.compiled)
    assert len(said(found.warnings, "trains in evaluation mode, without dropout")) == 1

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Engines that compile themselves, because their configuration says so."""

import dataclasses
import functools
import gc
import logging
import time
import weakref

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed.compile.zero12 import gradient_counters, reset_gradient_counters

from support.beside import Beside, logged, warnings_logged
from support.models import qwen3_config
from support.training import batch, build, compile_backend, device, engine_by_configuration, held, make_engine


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
        self.plain_step()

    def end(self):
        """Destroys the engine; returns the parameters' error."""
        assert sum(held(gradient_counters(self.engine)).values()) == 0
        return super().end()["error"]


class Memory(torch.nn.Module):
    """Reads the keys and values that its language model keeps of the first half of the tokens with the second."""

    def __init__(self, checkpointed):
        super().__init__()
        self.lm, self.checkpointed = language_model(2, 32, None), checkpointed

    def forward(self, ids):
        first, second = ids.chunk(2, dim=1)
        if self.checkpointed:
            # What is computed again in the backward must be what was computed before.
            hidden = checkpoint(lambda ids: self.lm.model(input_ids=ids).last_hidden_state, ids, use_reentrant=False)
            return hidden.square().mean()
        kept = self.lm(input_ids=first).past_key_values
        return self.lm(input_ids=second, labels=second, past_key_values=kept).loss


def with_memory(checkpointed):
    """Returns the losses of three steps of a ``Memory`` without DeepCompile and with it."""
    losses = []
    for deepcompile in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = Memory(checkpointed).to(device()).train()
        with compile_backend("eager"):
            engine = engine_by_configuration(module, deepcompile)
            for _ in range(3):
                loss = engine(torch.arange(24, device=device()).view(2, 12))
                engine.backward(loss)
                engine.step()
                losses.append(float(loss.detach()))
        engine.destroy()
    return losses[:3], losses[3:]


def traced_by_the_caller(case):
    """Returns the error of the parameters, and how many gradients graphs reduced, where the caller compiles its own
    function around the engine."""
    with compile_backend("eager"):
        loop = Loop(case)
        call = torch.compile(lambda ids: loop.engine(ids) * 1.0, backend="eager")
        for step in range(2):
            loop.step(step, call)
    return loop.end(), loop.from_graphs[-1]


def of_parameters_that_were_taken(case):
    """Two engines for one module, of which the first was never compiled: returns whether each is, at the end."""
    with compile_backend("eager"):
        loop = Loop(case)
        earlier, loop.engine = loop.engine, make_engine(loop.module, loop.case)
        loop.step(0)
        earlier(batch(0, 0, dist.get_rank(), 4))
        loop.step(1)
        compiled = earlier.is_compiled, loop.engine.is_compiled
        error = loop.end()
        earlier.destroy()
    return compiled, error


def trains(case, before=None, during=None, steps=3):
    """Trains. Returns the parameters' error; for each micro-batch whether the engine was compiled, and how many
    gradients came from graphs; and the texts that DeepSpeed logged, and those that it warned of.

    Args:
        before: name of a function of this module that is called with the loop before the first step.
        during: name of one that a micro-batch calls in place of the engine.
    """
    with logged(logging.INFO) as texts, warnings_logged() as warnings, compile_backend("eager"):
        loop = Loop(case)
        if before is not None:
            globals()[before](loop)
        call = functools.partial(globals()[during], loop) if during is not None else None
        for step in range(steps):
            loop.step(step, call)
        return loop.end(), loop.compiled, loop.from_graphs, texts, warnings


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


def in_evaluation_mode(loop):
    loop.engine.eval()


def compiled_by_caller(loop):
    loop.engine.compile(backend="eager", compile_kwargs={"dynamic": False})


def compiled_too_late(loop):
    loop.step(5)
    loop.engine.compile()
    loop.engine.compile(backend="inductor", compile_kwargs={"dynamic": False})


def with_gradients_already(loop):
    """The first micro-batch of a step goes to the module by itself."""
    loop.micro_batch(5, 0, loop.module)
    loop.micro_batch(5, 1)
    loop.plain_step()


def of_the_module(loop, ids):
    return loop.module(ids)


def refused(case):
    """Returns what forwards with gradients and ``engine.compile()`` raise, and the engine's state."""
    loop = Loop(case)
    said = []
    for training in (True, True, False, None):
        call = loop.engine if training is not None else lambda _: loop.engine.compile()
        loop.module.train(training is not False)
        try:
            call(batch(0, 0, dist.get_rank(), 4))
        except ValueError as error:
            said.append(str(error))
    state = loop.engine.is_compiled, type(loop.engine.optimizer).__name__
    with torch.no_grad():
        evaluated = float(loop.engine.eval() or loop.engine(batch(0, 0, 0, 4)))
    loop.engine.destroy()
    return said, state, evaluated


def told_in_a_forward(stage):
    """Returns what an engine logs in a forward that could train it, and whether it is compiled.

    Its stage is 3, or 0 without an optimizer: DeepSpeed takes no other without one.
    """
    # DeepSpeed says it once in a process.
    deepspeed.utils.logging._log_dist_once_cached.cache_clear()
    torch._dynamo.reset()
    linear = torch.nn.functional.linear
    module = torch.nn.Linear(4, 1).to(device())
    engine = engine_by_configuration(module, True, zero_optimization={"stage": stage})
    with logged(logging.INFO) as texts:
        engine(torch.ones(2, 4, device=device()))
    result = texts, engine.is_compiled
    engine.destroy()
    # ZeRO-3 leaves one of its own, which torch 2.11 compiles wrongly, with or without DeepSpeed.
    torch.nn.functional.linear = linear
    return result


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


# The cache of keys and values of transformers ------------------------------------------------------------------


def language_model(layers, width, use_cache):
    from transformers import Qwen3ForCausalLM

    more = {} if use_cache is None else {"use_cache": use_cache}
    config = qwen3_config(64, layers, width, intermediate_size=3 * width, **more)
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).to(device()).train()


def first_step(use_cache, layers=6, width=32, backend="eager", asked=None):
    """Trains a language model for one step, beside which it evaluates and generates.

    Returns a dict: the graphs that were compiled for the step, its seconds and loss, whether the outputs hold a cache
    in training and in evaluation, ``use_cache`` of the configuration afterwards, the text generated.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    module = language_model(layers, width, use_cache)
    engine = engine_by_configuration(module, True)
    ids = torch.arange(24, device=device()).view(2, 12)
    with compile_backend(backend):
        began = time.perf_counter()
        output = engine(input_ids=ids, labels=ids, **(asked or {}))
        engine.backward(output.loss)
        engine.step()
        if ids.is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    engine.eval()
    with torch.no_grad():
        evaluated = engine(input_ids=ids)
    result = {
        "graphs": graphs,
        "seconds": seconds,
        "loss": float(output.loss.detach()),
        "cache in training": output.past_key_values is not None,
        "cache in evaluation": evaluated.past_key_values is not None,
        "use_cache": module.config.use_cache,
        "generated": module.generate(ids, max_new_tokens=4, do_sample=False).tolist(),
    }
    engine.destroy()
    return result

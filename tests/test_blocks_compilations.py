# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Regional compilation: how often blocks are compiled, what is in their graphs, and what becomes of them."""

import copy
from typing import List, NamedTuple, Optional

import pytest
import torch
import torch.distributed as dist

from deepspeed.compile.zero12.graph import backend as reduce_backend

from support.blocks import REGIONAL, train_beside
from support.ids import vary
from support.models import Block, Model
from support.training import BOUND, Case, batch, build, device, make_engine, make_optimizer, relative_error, step_plain


class NamedBlock(Block):
    """Its forward reads what differs in every layer."""

    def forward(self, x):
        return super().forward(x) if self.name else x


class NamedBlocks(Model):
    block = NamedBlock

    def __init__(self, depth):
        super().__init__(depth=depth)
        for index, block in enumerate(self.blocks):
            block.name = f"layer {index}"


class Differing(NamedTuple):
    raised: Optional[str]  # by one of the steps
    error: Optional[float]  # of the parameters, if none raised


def layers_that_differ(limit, alike=False, fails=False):
    """Trains a model of 12 layers with ``limit`` for torch's limit of compilations."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Model(depth=12) if alike else NamedBlocks(12)
    module = module.to(device())
    plain = copy.deepcopy(module)
    with torch._dynamo.config.patch(recompile_limit=limit, fail_on_recompile_limit_hit=fails):
        engine = make_engine(module, Case(config=REGIONAL))
        optimizer = make_optimizer(plain, Case())
        try:
            for step in range(3):
                # Unlike layers differ from each other and from themselves in other steps.
                for number, block in enumerate(module.blocks):
                    block.name = "layer" if alike else f"layer {number} in step {step}"
                train_beside(engine, plain, optimizer, [step])
            return Differing(None, relative_error(module.parameters(), plain.parameters()))
        except Exception as error:
            return Differing(str(error), None)
        finally:
            engine.destroy()


def test_layers_that_differ_are_compiled_each(ranks):
    # 36 graphs of 12 layers, where torch would stop at 8.
    assert max(trained.error for trained in ranks(2).run(layers_that_differ, 8)) < BOUND


def test_layers_that_are_too_different(ranks):
    # Of 36 graphs 24 may be made: then all go on uncompiled.
    assert max(trained.error for trained in ranks(2).run(layers_that_differ, 2)) < BOUND
    for trained in ranks(2).run(layers_that_differ, 2, fails=True):
        assert "compiled one frame more than 24 times" in trained.raised
        assert "raise torch._dynamo.config.recompile_limit before engine.compile()" in trained.raised
    # Layers that are alike need one compilation.
    assert max(trained.error for trained in ranks(2).run(layers_that_differ, 1, alike=True)) < BOUND


def resets(case):
    """Error of the parameters when torch forgets what it has compiled before every step."""
    module = build(case)
    plain = copy.deepcopy(module)
    engine = make_engine(module, case)
    optimizer = make_optimizer(plain, case)
    with torch._dynamo.config.patch(recompile_limit=2):
        for step in range(4):
            torch._dynamo.reset()
            train_beside(engine, plain, optimizer, [step])
    error = relative_error(module.parameters(), plain.parameters())
    engine.destroy()
    return error


def test_compilations_before_a_reset_do_not_count(ranks):
    assert max(ranks(2).run(resets, Case(config=REGIONAL))) < BOUND


class Destroyed(NamedTuple):
    unchanged: bool  # whether the modules have the classes and attributes that they had before the engine was made
    error_of_copy: float  # of the gradients of a copy of the module, made in the engine's life
    error: float  # of the parameters


def train_and_copy(case):
    """Trains an engine and a copy of its module."""

    def seen(of):
        return [(type(part), sorted(vars(part)), len(part._forward_pre_hooks)) for part in of.modules()]

    torch._dynamo.reset()
    module = build(case)
    plain = copy.deepcopy(module)
    before = seen(module)
    engine = make_engine(module, case)
    train_beside(engine, plain, make_optimizer(plain, case), range(2))
    ids = batch(7, 0, dist.get_rank(), 4)
    # No engine knows its parameters.
    duplicate = copy.deepcopy(module)
    duplicate(ids).backward()
    plain(ids).backward()
    copied = relative_error(*([parameter.grad for parameter in each.parameters()] for each in (duplicate, plain)))
    error = relative_error(module.parameters(), plain.parameters())
    engine.destroy()
    return Destroyed(before == seen(module), error_of_copy=copied, error=error)


def test_destroy_and_copies(ranks):
    for seen in ranks(2).run(train_and_copy, Case(config=REGIONAL)):
        assert seen.unchanged
        assert seen.error_of_copy < BOUND
        assert seen.error < BOUND


class Attention(NamedTuple):
    layers: int
    masks: List[str]  # of the attentions that were traced
    error: float  # of the parameters


def attention_of_qwen3(checkpoint):
    """Trains a Qwen3 and records what its attentions are given for masks when they are traced."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch._dynamo.reset()
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    config = Qwen3Config(num_hidden_layers=3, vocab_size=64, use_cache=False, attn_implementation="sdpa", **sizes)
    module = Qwen3ForCausalLM(config).to(device()).train()
    if checkpoint:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    plain = copy.deepcopy(module)
    case = Case(config=REGIONAL)
    masks, run = [], reduce_backend._run_as_traced

    def recording(gm, *args):
        attention = torch.nn.functional.scaled_dot_product_attention
        masks.extend(str(node.kwargs["attn_mask"]) for node in gm.graph.nodes if node.target is attention)
        return run(gm, *args)

    reduce_backend._run_as_traced = recording
    try:
        engine = make_engine(module, case)
        optimizer = make_optimizer(plain, case)
        for step in range(2):
            ids = batch(step, 0, dist.get_rank(), 8)
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
            plain(input_ids=ids, labels=ids).loss.backward()
            step_plain(plain, optimizer)
    finally:
        reduce_backend._run_as_traced = run
    error = relative_error(module.parameters(), plain.parameters())
    engine.destroy()
    return Attention(config.num_hidden_layers, masks, error)


@vary("checkpoint", [False, True])
def test_attention_stays_on_its_causal_path(ranks, checkpoint):
    pytest.importorskip("transformers", reason="the model is one of transformers': requirements/demo.txt")
    for seen in ranks(2).run(attention_of_qwen3, checkpoint):
        # One graph, traced once, in which attention is told "causal" rather than given a mask. Checkpointing is around
        # it, not in it, where it would be a graph within the graph.
        assert (seen.layers, seen.masks) == (3, ["None"])
        assert seen.error < BOUND

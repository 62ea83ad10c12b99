# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Regional compilation: how often blocks are compiled, what is in their graphs, and what becomes of them."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deepspeed.compile.zero_1_and_2.graph import backend

from support.beside import Beside, check
from support.ids import vary
from support.models import Block, LossOfIds, Model, qwen3_config
from support.on_ranks import on_ranks
from support.training import REGIONAL, Case, batch, build


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


def layers_that_differ(limit, alike=False):
    """Trains a model of two layers with ``limit`` for torch's limit of compilations; returns what came of it.

    Reaching the limit raises, and what was raised is returned as text.
    """
    with torch._dynamo.config.patch(recompile_limit=limit, fail_on_recompile_limit_hit=True):
        pair = Beside(NamedBlocks(depth=2), Case(config=REGIONAL))
        try:
            for step in range(3):
                # Unlike layers differ from each other and from themselves in other steps.
                for number, block in enumerate(pair.module.blocks):
                    block.name = "layer" if alike else f"layer {number} in step {step}"
                pair.step(batch(step, 0, dist.get_rank(), 4))
        except Exception as error:
            pair.engine.destroy()
            return str(error)
        return pair.end()


# Six graphs of two layers are made where torch would stop at three. Layers that are alike need one.
@pytest.mark.options("compile.regional_compilation")
@pytest.mark.follows("raise {} before engine.compile()")
@vary("limit, alike", [(3, False), (1, True)])
def test_layers_are_compiled_as_often_as_they_differ(ranks, limit, alike):
    """Graphs of all layers would count against a limit that torch means for one, or each layer be compiled anew."""
    check(ranks(1).run(layers_that_differ, limit, alike))


@pytest.mark.options("compile.regional_compilation")
def test_layers_that_are_too_different(ranks):
    """The message would not say after how many compilations, and of what, training stopped."""
    (raised,) = ranks(1).run(layers_that_differ, 2)
    assert (
        "compiled one frame more than 4 times: a frame of NamedBlock, because this guard of Dynamo failed: " in raised
    )
    assert ".name == 'layer " in raised
    assert "raise torch._dynamo.config.recompile_limit before engine.compile()" in raised


@pytest.mark.options("compile.regional_compilation")
@on_ranks(1)
def test_frozen_layers_that_differ():
    """Compilations of frozen layers would use up torch's own limit, and layers that train would run uncompiled."""
    model = NamedBlocks(depth=5)
    for block in model.blocks[:3]:
        block.requires_grad_(False)
    with torch._dynamo.config.patch(recompile_limit=2):
        pair = Beside(model, Case(config=REGIONAL))
        for step in range(2):
            pair.step(batch(step, 0, dist.get_rank(), 4))
    (result,) = check([pair.end()])
    # Six gradients of each of two layers.
    assert min(result.from_graphs) >= 12, result.from_graphs


@on_ranks(1)
def test_compilations_before_a_reset_do_not_count():
    """An engine would go on uncompiled because compilations of graphs that are gone use up its limit."""
    case = Case(config=REGIONAL)
    with torch._dynamo.config.patch(recompile_limit=1):
        pair = Beside(build(case), case)
        # Three blocks have a limit of three compilations together.
        for step in range(5):
            torch._dynamo.reset()
            pair.step(batch(step, 0, dist.get_rank(), 4))
    (result,) = check([pair.end()])
    assert result.from_graphs == [18] * 5


@vary("checkpoint", [False, True])
@on_ranks(1)
def test_attention_stays_on_its_causal_path(checkpoint):
    """A graph that serves all layers would give attention a mask, which it computes with slower kernels."""
    pytest.importorskip("transformers", reason="the model is one of transformers': requirements/demo.txt")
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    config = qwen3_config(64, use_cache=False, attn_implementation="sdpa")
    model = Qwen3ForCausalLM(config).train()
    if checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    masks, run = [], backend.run_as_traced

    def recording(gm, *args):
        attention = torch.nn.functional.scaled_dot_product_attention
        masks.extend(str(node.kwargs["attn_mask"]) for node in gm.graph.nodes if node.target is attention)
        return run(gm, *args)

    with mock.patch.object(backend, "run_as_traced", recording):
        pair = Beside(LossOfIds(model), Case(config=REGIONAL))
        for step in range(2):
            pair.step(batch(step, 0, dist.get_rank(), 8))
    # One graph of both layers, traced once, in which attention is told "causal" rather than given a mask.
    # Checkpointing is around it, not in it, where it would be a graph within the graph.
    assert masks == ["None"]
    check([pair.end()])

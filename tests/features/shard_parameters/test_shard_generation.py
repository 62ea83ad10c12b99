# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Ranks whose texts end at different lengths generate with sharded parameters."""

import contextlib
import copy
import pickle
import types

import pytest
import torch
import torch.distributed as dist

from deepspeed.compile.features.shard_parameters import unsharded_parameters
from deepspeed.compile.features.shard_parameters.generation import synchronize_generation

from support.ids import vary
from support.models import VOCABULARY, qwen3_config
from support.on_ranks import on_ranks
from support.training import Case, batch, device, make_engine

PROMPT, MOST = 3, 6  # tokens


def make(shards):
    """Returns a language model and its engine. With "frozen" only norms are trained."""
    from transformers import Qwen3ForCausalLM

    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Qwen3ForCausalLM(qwen3_config(VOCABULARY)).to(device())
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(shards == "all" or "norm" in name)
    config = {"compile": {"regional_compilation": True, "shard_parameters": shards}}
    return module, make_engine(module, Case(adam=True, config=config))


def generate(model, end=None, **more):
    """Returns the tokens that follow a prompt. ``end``: the token that ends them."""
    prompt = batch(1, 0, 0, PROMPT)[:1]
    text = model.generate(prompt, max_new_tokens=MOST, do_sample=False, eos_token_id=end, pad_token_id=0, **more)
    return text[0, PROMPT:].tolist()


@pytest.mark.options("compile.shard_parameters")
@vary("shards", ["all", "frozen"])
@on_ranks(2, timeout=100)
def test_texts_of_different_lengths(shards):
    """A rank whose text has ended would go on, and gather other blocks than a rank that still generates."""
    pytest.importorskip("transformers")
    module, engine = make(shards)
    with unsharded_parameters(engine):
        longest = generate(module)
        # The first rank's text ends earlier.
        end = longest[1] if dist.get_rank() == 0 else None
        alone = generate(module, end)
        copied = copy.deepcopy(module)
        pickled = pickle.dumps(copy.deepcopy(module))
    # As by default, and as a trainer chooses that looks for ZeRO-3.
    found = [generate(module, end), generate(module, end, synced_gpus=False)]
    with unsharded_parameters(engine):
        engine.destroy()
    of_copies = []
    if dist.get_rank() == 0:
        # No other rank generates here.
        for model in (copied, pickle.loads(pickled), copy.deepcopy(copied)):
            torch.nn.init.zeros_(model.lm_head.weight)
            of_copies.append(generate(model))
        found.append(generate(module, end))
    assert "generate" not in vars(module) and b"deepspeed" not in pickled
    assert len(alone) == (MOST if dist.get_rank() else 2)
    assert found == [alone] * (2 if dist.get_rank() else 3)
    # The copies have weights of zeros.
    assert of_copies == [[0] * MOST] * (0 if dist.get_rank() else 3)


class Generating(torch.nn.Module):
    """Stands for a model of transformers. Returns whether it waits for other ranks."""

    def generate(self, ids, synced_gpus=None):
        return synced_gpus


class Around(torch.nn.Module):
    """Has the attributes of the model within, as modules of peft have."""

    def __init__(self):
        super().__init__()
        self.within = Generating()

    def __getattr__(self, name):
        modules = vars(self)["_modules"]
        return modules[name] if name in modules else getattr(modules["within"], name)


class OfOthers(torch.nn.Module):
    """Its ``generate()`` does not know what other ranks do."""

    def generate(self, ids):
        return "its own"


@pytest.mark.options("compile.shard_parameters")
@pytest.mark.slow
@on_ranks(3)
def test_which_models_wait_for_others():
    """A model would wait for ranks that share no parameters with its own, or not wait where it must."""
    rank, found = dist.get_rank(), []
    everyone, pair, alone = dist.group.WORLD, dist.new_group([0, 1]), [dist.new_group([member]) for member in range(3)]
    groups = [(everyone, False), (everyone, True), (pair if rank < 2 else alone[2], False), (alone[rank], False)]
    for group, are_whole in groups:
        around, others, replaced = Around(), OfOthers(), Generating()
        replaced.generate = lambda ids: "replaced"
        module = torch.nn.ModuleList([torch.nn.Linear(1, 1), around, others, replaced])
        with contextlib.ExitStack() as undo:
            synchronize_generation(module, types.SimpleNamespace(are_fixed=are_whole), group, undo)
            found.append([around.generate(1), around.generate(1, synced_gpus=False), "generate" in vars(around)])
            assert others.generate(1) == "its own" and replaced.generate(1) == "replaced"
        assert around.generate(1) is None and replaced.generate(1) == "replaced"
    left = [None, False, False]
    assert found == [[True, True, False], left, left, left]

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Training forwards of transformers' models keep no cache of keys and values, unless the model reads it."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from support.by_configuration import first_step, language_model
from support.ids import vary
from support.training import compile_backend, device, engine_by_configuration


@pytest.fixture(scope="module")
def first_steps(ranks):
    pytest.importorskip("transformers")
    results = {use_cache: ranks(2).run(first_step, use_cache) for use_cache in (True, None, False)}
    return {**results, "asked for": ranks(2).run(first_step, None, asked={"use_cache": True})}


def test_training_forwards_keep_no_cache(first_steps):
    for with_cache, default, without, asked_for in zip(*first_steps.values(), strict=True):
        for each in (with_cache, default):
            assert each.graphs <= without.graphs and each.loss == without.loss
            assert not each.cache_in_training and each.cache_in_evaluation and each.use_cache is True
            assert each.generated == without.generated
        assert without.use_cache is False and not without.cache_in_evaluation
        # The test could not fail if the cache cost no graphs.
        assert asked_for.cache_in_training and asked_for.graphs > without.graphs


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


@vary("checkpointed", [False, True])
def test_a_cache_that_a_model_reads_stays(ranks, checkpointed):
    pytest.importorskip("transformers")
    for off, on in ranks(2).run(with_memory, checkpointed):
        assert on == pytest.approx(off, rel=1e-5) and off[-1] < off[0]

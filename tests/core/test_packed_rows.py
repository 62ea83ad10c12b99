# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Rows of different lengths packed into one, told apart by ``position_ids``, under each attention of transformers."""

import pytest
import torch
import torch.distributed as dist

from support.ids import vary
from support.on_ranks import on_ranks
from support.training import BOUND, compile_backend, device, engine_by_configuration, total_error

VOCABULARY = 96
# Of the rows that a rank packs in each step, so that ranks and steps differ in their number and lengths.
LENGTHS = (((9, 4, 7), (5, 6)), ((3, 12), (8, 8, 2)), ((9, 4, 7), (20,)))


def packed(step, rank):
    """What transformers' padding-free collators make: one row, whose positions begin anew, and no attention mask."""
    lengths = LENGTHS[step][rank]
    ids = torch.randint(0, VOCABULARY, (1, sum(lengths)), generator=torch.Generator().manual_seed(10 * step + rank))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    # The first token of a row follows nothing.
    batch = {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}
    return {name: tensor.to(device()) for name, tensor in batch.items()}


def train(attention, stage, deepcompile):
    """Returns the losses and the parameters after three steps."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch._dynamo.reset()
    torch.manual_seed(0)
    sizes = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16, use_cache=False)
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, attn_implementation=attention)).to(device()).train()
    engine = engine_by_configuration(model, deepcompile, lr=0.2, momentum=0.5, zero_optimization={"stage": stage})
    losses = []
    for step in range(len(LENGTHS)):
        loss = engine(**packed(step, dist.get_rank())).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    parameters = [parameter.detach().clone() for parameter in model.parameters()]
    engine.destroy()
    return losses, parameters


@vary(
    "world, attention, stage, backend",
    [
        (1, "sdpa", 2, "eager"),
        (2, "sdpa", 1, "inductor"),
        (2, "flex_attention", 2, "eager"),
        (2, "eager", 2, "eager"),
    ],
)
@pytest.mark.slow
@on_ranks("world")
def test_packed_rows(world, attention, stage, backend):
    """A graph that was compiled for the lengths of the first rows would let later rows attend to each other."""
    pytest.importorskip("transformers")
    if attention == "flex_attention" and not torch.cuda.is_available():
        pytest.skip("torch's FlexAttention has no backward on CPU")
    with compile_backend(backend):
        (off, parameters), (on, compiled) = (train(attention, stage, deepcompile) for deepcompile in (False, True))
    assert total_error(compiled, parameters) < BOUND
    assert on == pytest.approx(off, rel=1e-4)

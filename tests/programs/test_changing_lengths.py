# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Batches of changing lengths compile nothing anew after the first few, of which two are of each kind.

A kind has one row or several, and a mask or none. Its second batch, of another length, makes its sizes symbols.
"""

import random

import pytest
import torch
import torch.distributed as dist

from support.ids import vary
from support.models import VOCABULARY, BlocksWithin, qwen3_config
from support.training import compile_backend, device, engine_by_configuration

SLOW = pytest.mark.slow
KEPT = {"regional_compilation": True}
SHARDED = {"regional_compilation": True, "shard_parameters": "all"}
# Batches after which nothing is compiled; batches in all, and where code is generated.
FIRST, BATCHES, MANY = 6, 20, 200


def sizes(step, generator):
    """Returns the rows of a batch and their length."""
    rows = (1, 3, 2, 1, 3, 2)[step] if step < FIRST else generator.randint(1, 5)
    return rows, generator.randint(3, 60)


def ids_alone(step, generator):
    return {"ids": torch.randint(0, VOCABULARY, sizes(step, generator))}


def padded(step, generator):
    """Rows of which none is padded, or some are in every second batch that has several."""
    rows, length = sizes(step, generator)
    lengths = [generator.randint(2, length) if row and step % 2 else length for row in range(rows)]
    ids = torch.randint(0, VOCABULARY, (rows, length))
    mask = torch.arange(length)[None] < torch.tensor(lengths)[:, None]
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


def packed(step, generator):
    """One row of one text, or of several, as transformers' padding-free collators make it."""
    texts = 1 + step % 3 if step < FIRST else generator.randint(1, 5)
    lengths = [generator.randint(2, 30) for _ in range(texts)]
    ids = torch.randint(0, VOCABULARY, (1, sum(lengths)))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    return {
        "input_ids": ids,
        "position_ids": positions,
        "labels": ids.masked_fill(positions == 0, -100),
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def qwen3():
    from transformers import Qwen3ForCausalLM

    return Qwen3ForCausalLM(qwen3_config(VOCABULARY))


def checkpointed_qwen3():
    model = qwen3()
    model.gradient_checkpointing_enable()
    return model


def train(make, batches, options, backend="eager", count=BATCHES):
    """Returns how many graphs there were after each of ``count`` batches."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make().to(device()).train()
    generator, counts, stats = random.Random(dist.get_rank()), [], torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    with compile_backend(backend):
        engine = engine_by_configuration(model, True, compile=options)
        for step in range(count):
            batch = {
                name: value.to(device()) if isinstance(value, torch.Tensor) else value
                for name, value in batches(step, generator).items()
            }
            output = engine(**batch)
            engine.backward(output if isinstance(output, torch.Tensor) else output.loss)
            engine.step()
            counts.append(stats["unique_graphs"] - before)
        engine.destroy()
    return counts


@vary(
    "make, batches, options",
    [(BlocksWithin, ids_alone, KEPT)],
    slow=[
        (BlocksWithin, ids_alone, {"regional_compilation": False}),
        (qwen3, padded, KEPT),
        (qwen3, packed, SHARDED),
        (checkpointed_qwen3, packed, KEPT),
        (checkpointed_qwen3, padded, SHARDED),
    ],
)
def test_later_lengths_compile_nothing(ranks, make, batches, options):
    """Each new length, number of rows or number of texts would be compiled, which takes longer than a step."""
    if batches is not ids_alone:
        pytest.importorskip("transformers", reason="pip install -r requirements/front_doors.txt")
    for counts in ranks(2 if options == SHARDED else 1).run(train, make, batches, options):
        assert counts[0] > 0 and counts[FIRST - 1] == counts[-1], counts


@SLOW
@vary("batches, options", [(packed, KEPT), (padded, SHARDED)])
def test_many_lengths_compile_nothing(ranks, batches, options):
    """Inductor would generate code for a length that divides by 16, or that is long, and such lengths come late."""
    pytest.importorskip("transformers", reason="pip install -r requirements/front_doors.txt")
    for counts in ranks(2 if options == SHARDED else 1).run(train, qwen3, batches, options, "inductor", MANY):
        assert counts[0] > 0 and counts[FIRST - 1] == counts[-1], counts
        print(f"{counts[-1]} graphs in {MANY} batches, {counts[FIRST - 1]} of them in the first {FIRST}")

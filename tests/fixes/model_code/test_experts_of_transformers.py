# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Transformers' layers of experts, in each implementation of theirs."""

import itertools

import pytest
import torch
import torch.distributed as dist

from deepspeed.compile.fixes.model_code.eager_experts import EAGER, advice

from support.architectures import ARCHITECTURES
from support.beside import warnings_logged
from support.ids import vary
from support.on_ranks import on_ranks
from support.training import compile_backend, device, engine_by_configuration

ADVICE = 'call model.set_experts_implementation("grouped_mm")'
NAMES = ("Mixtral", "Qwen3Moe", "Qwen3Next", "GptOss", "DeepseekV3", "Glm4Moe", "Olmoe")
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
# Torch's own aot_eager cannot run this one.
BACKENDS = {"Qwen3Next": "inductor"}
# Its experts have one implementation.
WITH_ONE = "Llama4Text"
STEPS = 4


def train(name, implementation, deepcompile):
    """Returns losses, and after each step how many graphs there were and for how many reasons Dynamo left one.

    Tokens differ from step to step and from rank to rank. In the last step all are alike, so most experts have none.
    """
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    torch.manual_seed(0)
    model = ARCHITECTURES[name].make().to(device()).train()
    if implementation is not None:
        model.set_experts_implementation(implementation)
    with warnings_logged() as said:
        engine = engine_by_configuration(model, deepcompile, lr=0.2, momentum=0.5)
        losses, compiled = [], []
        for step in range(STEPS):
            batch = ARCHITECTURES[name].batch(100 * step + dist.get_rank(), 2)
            if step == STEPS - 1:
                batch.update({key: torch.full_like(batch[key], 3) for key in ("input_ids", "labels")})
            loss = engine(**{key: value.to(device()) for key, value in batch.items()}).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
            # Code around blocks is not compiled on purpose, so what calls a block is left each time.
            breaks = [reason for reason in counters["graph_break"] if "torch.compiler.disable()" not in reason]
            compiled.append((counters["stats"]["unique_graphs"], len(breaks)))
    engine.destroy()
    return losses, compiled, sum(ADVICE in line for line in said)


@pytest.mark.slow
@vary("name, implementation", [(WITH_ONE, None), *itertools.product(NAMES, IMPLEMENTATIONS)])
@on_ranks(2)
def test_each_implementation_trains_as_without_deepcompile(name, implementation):
    """A routing that is compiled in trains with the first batch's, and an expert without tokens has no gradient.

    The advice is given where it is needed: where Dynamo leaves a graph for each loop over experts.
    """
    pytest.importorskip("transformers", reason="pip install -r requirements/demo.txt")
    with compile_backend(BACKENDS.get(name, "eager")):
        off, on = (train(name, implementation, deepcompile) for deepcompile in (False, True))
    losses, compiled, advised = on
    assert losses == pytest.approx(off[0], abs=1e-5)
    if implementation != "eager":
        # A loop over experts takes one token otherwise than several. Torch 2.11 compiles once more, a whole model
        # whose layers differ.
        again = compiled[-1][0] - compiled[0][0]
        assert again <= (name == "DeepseekV3" and torch.__version__ < "2.13"), "another routing was compiled anew"
        assert compiled[-1][1] == 0, "Dynamo left a block"
    # The first rank warns.
    assert dist.get_rank() > 0 or advised == (implementation == "eager")


@pytest.mark.quick
@pytest.mark.follows("call model.set_experts_implementation")
def test_advice():
    """Who took the slow implementation, perhaps from an older configuration, would not learn of the fast one."""
    pytest.importorskip("transformers", reason="pip install -r requirements/demo.txt")
    model = ARCHITECTURES["Qwen3Moe"].make()
    model.set_experts_implementation("eager")
    assert [*advice(model)] == [EAGER.format(2)]
    model.set_experts_implementation("grouped_mm")
    assert not [*advice(model)] and not [*advice(ARCHITECTURES["Qwen3"].make())]

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Transformers' layers of experts, in each implementation of theirs."""

import types

import pytest
import torch
import torch.distributed as dist

from deepspeed.compile.fixes.model_code.experts_of_transformers import ADVICE, advice

from support.architectures import ARCHITECTURES
from support.beside import warnings_logged
from support.ids import vary
from support.on_ranks import on_ranks
from support.training import compile_backend, device, engine_by_configuration

REMEDY = 'call model.set_experts_implementation("grouped_mm")'
NAMES = ("Mixtral", "Qwen3Moe", "Qwen3Next", "GptOss", "DeepseekV3", "Glm4Moe", "Olmoe")
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
# Torch's own aot_eager cannot run this one.
BACKENDS = {"Qwen3Next": "inductor"}
# Its experts have one implementation.
WITH_ONE = "Llama4Text"
CASES = [
    *((name, implementation, BACKENDS.get(name, "eager")) for name in NAMES for implementation in IMPLEMENTATIONS),
    (WITH_ONE, None, "eager"),
    # All have trained with Inductor. These take little time, and differ in the kernels that they call.
    ("Olmoe", "grouped_mm", "inductor"),
    ("Mixtral", "batched_mm", "inductor"),
]
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
    return losses, compiled, sum(REMEDY in line for line in said)


@pytest.mark.slow
@vary("name, implementation, backend", CASES)
@on_ranks(2)
def test_each_implementation_trains_as_without_deepcompile(name, implementation, backend):
    """A routing that is compiled in trains with the first batch's, and an expert without tokens has no gradient.

    The advice is given where it is needed: where Dynamo leaves a graph for each loop over experts.
    """
    pytest.importorskip("transformers", reason="pip install -r requirements/demo.txt")
    with compile_backend(backend):
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
@vary("implementation", ["eager", "deepgemm"])
def test_advice(implementation):
    """Who took the slow implementation, or the one that trains no experts, would not learn of the fast one."""
    pytest.importorskip("transformers", reason="pip install -r requirements/demo.txt")
    model = ARCHITECTURES["Qwen3Moe"].make()
    model.set_experts_implementation(implementation)
    assert [*advice(model)] == [ADVICE[implementation].format(2)]
    model.set_experts_implementation("grouped_mm")
    assert not [*advice(model)] and not [*advice(ARCHITECTURES["Qwen3"].make())]


def test_deepgemm_trains_no_experts(monkeypatch):
    """The advice against it would be wrong once transformers gives it a backward."""
    deepgemm = pytest.importorskip("transformers.integrations.deepgemm")

    @torch.no_grad()
    def multiply(tokens, weights, out, experts, use_psum_layout):
        """Does what the kernel does, of which autograd knows nothing."""
        for index, weight in enumerate(weights):
            out[experts == index] = tokens[experts == index] @ weight.T

    kernels = types.SimpleNamespace(grouped_bf16_matmul_nt=multiply, m_alignment=4)
    monkeypatch.setattr(deepgemm, "_DEEPGEMM", kernels)
    monkeypatch.setattr(deepgemm, "is_sm100", lambda: False)
    model = ARCHITECTURES["Mixtral"].make().bfloat16().train()
    batch, losses = ARCHITECTURES["Mixtral"].batch(0, 2), []
    for implementation in ("grouped_mm", "deepgemm"):
        model.zero_grad()
        model.set_experts_implementation(implementation)
        losses.append(model(**batch).loss)
        losses[-1].backward()
        experts = [parameter for name, parameter in model.named_parameters() if ".experts." in name]
        assert {parameter.grad is None for parameter in experts} == {implementation == "deepgemm"}
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-2)

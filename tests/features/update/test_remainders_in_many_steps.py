# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Many steps of the demo's model with master weights as remainders, beside an engine that has them in fp32."""

import copy
from typing import List, NamedTuple

import pytest
import torch
import torch.distributed as dist

from deepspeed.compile.features.update.every_step import EveryStepAdam
from deepspeed.utils import safe_get_full_fp32_param

from support.training import Case, device, make_engine

STEPS, VOCABULARY, LENGTH = 1000, 256, 32
# Each byte follows from the bytes before, so the loss falls far within the steps.
TEXT = bytes((7 * place * place + place) % 61 for place in range(4096))


class Model(torch.nn.Module):
    """A Qwen3 as the demo's, with fewer and narrower layers. ``forward(ids)`` returns its loss."""

    def __init__(self):
        from transformers import Qwen3Config, Qwen3ForCausalLM

        super().__init__()
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
        sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
        self.model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, tie_word_embeddings=True, use_cache=False))

    def forward(self, ids):
        return self.model(input_ids=ids, labels=ids).loss


class Seen(NamedTuple):
    losses: List[List[float]]  # of each engine, on this rank
    masters_differ: int  # elements, at the end
    others: int  # elements of parameters that were not those of the other engine, in all steps
    units: int  # how far those were apart at most, in units in the last place
    untied: int  # how many of these were elsewhere than at ties


def ids_of(step):
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    starts = torch.randint(0, len(TEXT) - LENGTH, (4,), generator=generator).tolist()
    return torch.tensor([list(TEXT[start : start + LENGTH]) for start in starts], device=device())


def bits(parameter):
    return parameter.detach().view(torch.int16).int()


def train_beside(steps, same_parameters):
    """``same_parameters``: after each step the engine with fp32 master weights gets the other's parameters."""
    modules, engines = [Model().to(device())], []
    modules.append(copy.deepcopy(modules[0]))
    for module, remainders in zip(modules, (True, False)):
        options = {"compile": {"store_param_remainders": remainders}}
        case = Case(stage=2, dtype="bf16", clipping=1.0, bucket=50_000, config=options)
        optimizer = torch.optim.AdamW(module.parameters(), lr=2e-3)
        engines.append(make_engine(module, case, optimizer=optimizer))
    # Torch steps small partitions, and makes the first step, with other roundings.
    engines[1].optimizer._deepcompile.rules = [EveryStepAdam()]
    pairs = list(zip(*(module.parameters() for module in modules)))
    losses, others, units, untied = ([], []), 0, 0, 0
    for step in range(steps):
        for index, engine in enumerate(engines):
            loss = engine(ids_of(step))
            engine.backward(loss)
            engine.step()
            losses[index].append(float(loss.detach()))
        if same_parameters:
            for one, other in pairs:
                apart = (bits(one) - bits(other)).abs()
                others, units = others + int(apart.count_nonzero()), max(units, int(apart.max()))
                if apart.any():
                    lower = safe_get_full_fp32_param(other).view(torch.int32) & 0xFFFF
                    untied += int((apart.bool() & (lower != 0x8000)).sum())
                other.data.copy_(one.data)
    masters = [[safe_get_full_fp32_param(parameter).clone() for parameter in side] for side in zip(*pairs)]
    differ = sum(int((one.view(torch.int32) != other.view(torch.int32)).sum()) for one, other in zip(*masters))
    seen = Seen(list(losses), differ, others, units, untied)
    for engine in engines:
        engine.destroy()
    return seen


def mean_of_last(losses):
    return sum(losses[-100:]) / 100


@pytest.mark.slow
@pytest.mark.parametrize("same_parameters", [True, False])
def test_many_steps(ranks, capsys, same_parameters):
    """A remainder that is wrong for one of its 65536 values would end a training elsewhere."""
    pytest.importorskip("transformers", reason="the model is one of transformers': requirements/demo.txt")
    results = ranks(2).run(train_beside, STEPS, same_parameters, timeout=1800)
    for seen in results:
        with_remainders, without = seen.losses
        assert without[0] > 2 * mean_of_last(without)
        if same_parameters:
            assert seen.others > 0 and seen.units == 1 and seen.untied == 0
            assert seen.masters_differ == 0 and with_remainders == without
        else:
            assert abs(mean_of_last(with_remainders) - mean_of_last(without)) < 0.02 * without[0]
            apart = max(abs(one - other) for one, other in zip(with_remainders, without, strict=True))
            with capsys.disabled():
                print(
                    f"\nlosses of {STEPS} steps are {apart:.4f} apart at most; the last 100 are on average "
                    f"{mean_of_last(with_remainders):.4f} with remainders and {mean_of_last(without):.4f} without"
                )

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of states that cannot be cut, such as quantized ones."""

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.compile.features.checkpoints.in_base_order import LOST
from deepspeed.utils import safe_get_full_fp32_param

from support.beside import warnings_logged
from support.on_ranks import on_ranks
from support.optimizers import Momentum, Uncut
from support.training import device, small_shards


def make(deepcompile=True):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(13, 40), torch.nn.Tanh(), torch.nn.Linear(40, 7)).to(device())
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1},
        "compile": {"deepcompile": deepcompile},
    }
    engine = deepspeed.initialize(model=module, optimizer=Momentum(module.parameters()), config=config)[0]
    if deepcompile:
        with small_shards(config):
            engine.compile(backend="eager")
    else:
        # DeepSpeed itself links no parameter with such a state.
        engine.optimizer._lazy_init_hp_params_optimizer_state = lambda: None
    return engine


def train(engine, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        engine.backward(engine(torch.randn(2, 13, generator=generator).to(device())).square().mean())
        engine.step()


def values(engine):
    return [safe_get_full_fp32_param(parameter).clone() for parameter in engine.module.parameters()]


@on_ranks(2)
def test_saved_and_resumed(tmp_path):
    """A save would cut them, and raise; or a load would read them in another order."""
    engine = make()
    train(engine, range(3))
    engine.save_checkpoint(tmp_path)
    train(engine, range(3, 5))
    expected = values(engine)
    engine.destroy()
    engine = make()
    engine.load_checkpoint(tmp_path)
    train(engine, range(3, 5))
    (state,) = engine.optimizer.optimizer.state.values()
    assert sorted(state) == ["count", "momentum"] and type(state["momentum"]) is Uncut
    assert all(torch.equal(*both) for both in zip(values(engine), expected, strict=True))


@pytest.mark.follows("begin anew: they cannot be cut")
@on_ranks(2)
def test_loaded_from_another_order(tmp_path):
    """Momentum of other elements would be added to each element."""
    engine = make(deepcompile=False)
    train(engine, range(2))
    engine.save_checkpoint(tmp_path)
    expected = values(engine)
    engine.destroy()
    engine = make()
    train(engine, range(1))
    with warnings_logged() as said:
        engine.load_checkpoint(tmp_path)
    assert dist.get_rank() or len([text for text in said if LOST.format(0) in text]) == 1
    assert all(torch.equal(*both) for both in zip(values(engine), expected, strict=True))
    train(engine, range(2, 3))
    (state,) = engine.optimizer.optimizer.state.values()
    assert state["count"].unique().tolist() == [1.0]

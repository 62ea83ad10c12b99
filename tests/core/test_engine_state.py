# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What an engine holds can be moved away and back."""

import contextlib
import gc
from unittest import mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from deepspeed.compile.zero_1_and_2.parameter.carrier import mapped_memory
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils import safe_get_full_optimizer_state

from support.checkpoints import Run, assert_same, backward, compared, sequences, start, state, train
from support.ids import vary
from support.lifetime import alive_soon
from support.on_ranks import on_ranks
from support.training import device

INCLUDED = [
    None,
    [OffloadStateTypeEnum.lp_params],
    [OffloadStateTypeEnum.hp_params, OffloadStateTypeEnum.optim_states],
    [OffloadStateTypeEnum.lp_grads],
]


# ZeRO-1 and 2 have no other kind.
KINDS = [getattr(OffloadStateTypeEnum, name) for name in ("optim_states", "hp_params", "lp_params", "lp_grads")]


def move_away_and_back(engine, number):
    """Offloads and reloads states, others in each step. Meanwhile others use the memory that is free.

    Returns where a parameter was meanwhile.
    """
    # DeepSpeed collects garbage several times over, which takes long among all that a compiler keeps.
    with mock.patch.object(gc, "collect"):
        engine.offload_states(include=INCLUDED[number % len(INCLUDED)])
        meanwhile = next(engine.module.parameters()).data_ptr()
        flat = engine.optimizer.bit16_groups_flat
        others = [torch.full(flat_tensor.shape, torch.nan, device=device()) for flat_tensor in flat for _ in range(8)]
        engine.reload_states(non_blocking=number % 2 == 1)
        del others
    return meanwhile


@pytest.mark.table
@vary("moment", ["between steps", "between micro-batches", "between backward and step"])
@vary(
    "varied",
    [
        {"stage": 1, "dtype": "bf16"},
        {"stage": 2, "dtype": "fp32", "overlapped": True},
        # On the host already.
        {"stage": 2, "dtype": "bf16", "offloaded": True},
    ],
)
@on_ranks(2)
def test_states_moved_away_and_back(varied, moment):
    """A step would read or write where parameters, masters or gradients were before they were moved."""
    run = Run(**varied, steps=4)
    _, engine = start(run)
    before = state(engine)
    train(engine, run, range(run.steps))
    expected = state(engine)
    engine.destroy()
    module, engine = start(run)
    places = set()
    for number in range(run.steps):
        for micro_step in range(run.accumulation):
            engine.backward(engine(sequences(run, number, micro_step)))
            last = micro_step == run.accumulation - 1
            if moment == "between backward and step" and last:
                places.add(move_away_and_back(engine, number))
            engine.step()
            if moment == ("between steps" if last else "between micro-batches"):
                places.add(move_away_and_back(engine, number))
            places.add(next(module.parameters()).data_ptr())
    actual = state(engine)
    engine.destroy()
    assert len(places) > 1, "parameters stayed where they were"
    assert_same(compared(actual, expected, before), run.dtype)


def tensors_of(engine, kind):
    """Lists the tensors that hold one kind of an engine's states."""
    optimizer = engine.optimizer
    if kind is OffloadStateTypeEnum.lp_params:
        return list(optimizer.bit16_groups_flat)
    if kind is OffloadStateTypeEnum.hp_params:
        return list(optimizer.single_partition_of_fp32_groups)
    if kind is OffloadStateTypeEnum.lp_grads:
        return [view for views in optimizer.averaged_gradients.values() for view in views.without_padding()]
    # Counts of steps are on the host.
    states = [value for state in optimizer.optimizer.state.values() for value in state.values()]
    return [value for value in states if torch.is_tensor(value) and value.dim() > 0]


@vary("kind", KINDS)
@vary("stage, dtype, overlapped", [(1, "bf16", True), (2, "fp32", False)])
@on_ranks(2)
def test_each_kind_of_states_is_freed(stage, dtype, overlapped, kind):
    """Something would hold the memory of states that are on the host, or lead a reader to values of the past."""
    run = Run(stage=stage, dtype=dtype, overlapped=overlapped)
    module, engine = start(run)
    train(engine, run, [0])
    backward(engine, run, 1)
    parameter = next(module.parameters())
    # What is read is on the host, so that it does not count as memory of the device.
    expected = safe_get_full_optimizer_state(parameter, "exp_avg").cpu()
    # By address. On CPU states would stay where they are: have each move make a copy, as if to another device.
    storages = {
        storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors_of(engine, kind))
    }
    size = sum(storage.nbytes() for storage in storages.values())
    weak = [StorageWeakRef(storage) for storage in storages.values()]
    del storages
    on_cpu = device().type == "cpu"
    in_use = (lambda: 0) if on_cpu else (lambda: torch.cuda.memory_allocated() + mapped_memory.nbytes)
    copies = mock.patch.object(torch.Tensor, "to", lambda self, *_, **__: self.clone())
    before = in_use()
    with copies if on_cpu else contextlib.nullcontext():
        engine.offload_states(include=[kind])
        kept = alive_soon(weak)
        freed = size if on_cpu else before - in_use()
        found = expected
        if kind is OffloadStateTypeEnum.optim_states:
            found = safe_get_full_optimizer_state(parameter, "exp_avg").cpu()
        engine.reload_states()
    grown = in_use() - before
    engine.step()
    engine.destroy()
    assert size > 0 and kept == 0
    # The allocator rounds what it hands out up to 512 bytes.
    assert freed >= size and grown <= 0
    assert torch.equal(found, expected)

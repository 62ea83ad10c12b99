# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What goes on around an engine with DeepSpeed's own Muon: schedulers, autocast, states moved, memory, conversions."""

import gc

import pytest
import torch
import torch.distributed as dist

from deepspeed.compile.zero_1_and_2 import wait_for_parameters
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils import safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from support.checkpoints import to_universal
from support.ids import vary
from support.lifetime import least_allocated_bytes, take_elsewhere
from support.muon import Training, check, momenta, seen, start, train, train_beside
from support.on_ranks import gathered, on_ranks
from support.options import outcome
from support.training import device, relative_error

SMALL = 100  # elements, of which a tensor does not count


@vary("schedule", ["WarmupLR", "LambdaLR"])
def test_both_learning_rates_follow_a_scheduler(ranks, schedule):
    """The optimizers that step in Muon's place have groups of their own, which a scheduler does not know."""
    training = Training(schedule=schedule, one_pass=schedule == "LambdaLR")
    for result in check(ranks(1).run(train_beside, training)):
        assert result.rates == result.rates_of_base
        of_muon, of_adam = zip(*result.rates[1:6], strict=True)
        assert len({*of_muon, *of_adam}) == 10, "the rates do not change, or not by themselves"


def test_autocast_in_bf16(ranks):
    """Matrices whose gradients are sent in bf16 and kept in fp32 could be cut by the elements of the other format."""
    autocast = {"enabled": True, "dtype": "bfloat16"}
    # Parameters are in fp32, and gradients of linear layers are sent in bf16.
    training = Training(config={"torch_autocast": autocast}, stage=2)
    for result in ranks(2).run(train_beside, training):
        assert result.moved > 1e-2
        assert result.parameters < 2**-8, result
        assert max(result.owners) > 1


# States moved away and back ----------------------------------------------------------------------------------------


@on_ranks(2)
def test_states_moved_away_and_back():
    """A step that kept the momentum it once found would read memory that others have by now."""
    training = Training(stage=2)
    module, engine = start(training, deepcompile=True)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    train(engine, training, range(4))
    expected = seen(module, engine)
    assert relative_error(module.parameters(), before) > 1e-2
    engine.destroy()
    module, engine = start(training, deepcompile=True)
    moves = 0
    for step in range(4):
        train(engine, training, [step])
        engine.offload_states(include=[OffloadStateTypeEnum.optim_states] if step % 2 else None)
        there = momenta(engine)
        take_elsewhere(engine)
        moves += sum(old.data_ptr() != new.data_ptr() for old, new in zip(there, momenta(engine), strict=True))
        engine.reload_states(non_blocking=step % 2 == 1)
    actual = seen(module, engine)
    number = len(momenta(engine))
    assert any(gathered(number))
    # Each step has moved each momentum of this rank to other memory.
    assert moves == 4 * number
    engine.destroy()
    assert [relative_error(*pair) for pair in zip(actual, expected, strict=True)] == [0.0, 0.0, 0.0]


# Memory ------------------------------------------------------------------------------------------------------------


def _storages():
    """Returns the place of the memory of each tensor that is no small one -> its bytes."""
    tensors = [value for value in gc.get_objects() if type(value) in (torch.Tensor, torch.nn.Parameter)]
    memory = [tensor.untyped_storage() for tensor in tensors if tensor.numel() > SMALL]
    return {storage.data_ptr(): storage.nbytes() for storage in memory}


@pytest.mark.options("optimizer")
@vary("world, depth", [(2, 1), pytest.param(3, 3, marks=pytest.mark.slow)])
@on_ranks("world")
def test_only_states_stay_between_steps(world, depth):
    """The memory of whole matrices, or of what ranks exchange, would be as large as the momentum."""
    training = Training(model="Wide", depth=depth, stage=2, bucket=10**6)
    module, engine = start(training, deepcompile=True)
    gc.collect()
    before = _storages()
    train(engine, training, [0])
    allocated = least_allocated_bytes(device().type == "cuda")
    train(engine, training, [1, 2])
    # On a CPU, small parameters lie where they arrive together until somebody waits for them.
    wait_for_parameters(engine)
    gc.collect()
    allocated = least_allocated_bytes(device().type == "cuda") - allocated
    new = sum(size for place, size in _storages().items() if place not in before)
    states = [value for state in engine.optimizer.optimizer.state.values() for value in state.values()]
    sizes = [state.nbytes for state in states if isinstance(state, torch.Tensor) and state.numel() > SMALL]
    momentum = sum(buffer.nbytes for buffer in momenta(engine))
    engine.destroy()
    assert momentum > 10**6
    assert new == sum(sizes)
    # What a C heap comes and goes by is small against it.
    assert allocated < 0.1 * momentum


# Checkpoints for other ranks ---------------------------------------------------------------------------------------


def save(training, folder):
    """Saves a checkpoint. Returns what making a universal one of it raises, and the error of exported weights."""
    module, engine = start(training, deepcompile=True)
    train(engine, training, range(2))
    engine.save_checkpoint(folder, tag="saved")
    dist.barrier()
    said = outcome(to_universal, f"{folder}/saved", f"{folder}/{dist.get_rank()}")
    exported = get_fp32_state_dict_from_zero_checkpoint(folder, tag="saved")
    error = relative_error([exported[name] for name, _ in module.named_parameters()], module.cpu().parameters())
    engine.destroy()
    return said, error


def load(training, folder):
    _, engine = start(training, deepcompile=True)
    said = outcome(engine.load_checkpoint, folder, tag="saved")
    engine.destroy()
    return said


@pytest.mark.options("optimizer")
def test_checkpoints_are_for_as_many_ranks(ranks, tmp_path):
    """Momentum lies in whole matrices, which another number of ranks would read as a partition of others."""
    training = Training()
    for said, error in ranks(2).run(save, training, str(tmp_path)):
        assert said == "KeyError: 'exp_avg'", said
        assert error == 0.0
    for said in ranks(1).run(load, training, str(tmp_path)):
        assert "DP world size of 2 but the current world size is 1" in said


@on_ranks(2)
def test_states_are_read_where_a_rank_has_no_matrix(tmp_path):
    """A rank without momentum would link no states of Adam either, and others would wait for it when one is read."""
    training = Training(model="OneSmallMatrix")
    module, engine = start(training, deepcompile=True)
    train(engine, training, range(2))
    expected = safe_get_full_optimizer_state(module.embedding.weight, "exp_avg").clone()
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    module, engine = start(training, deepcompile=True, seed=1)
    engine.load_checkpoint(tmp_path)
    assert torch.equal(safe_get_full_optimizer_state(module.embedding.weight, "exp_avg"), expected)
    assert bool(momenta(engine)) == (dist.get_rank() == 0)
    engine.destroy()

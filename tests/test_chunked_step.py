# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""A flat partition stepped in chunks is what it is stepped whole."""

import copy
import tempfile
from typing import List, NamedTuple

import pytest
import torch
import torch.distributed as dist

from deepspeed.compile.zero12 import chunked_step
from deepspeed.compile.zero12.chunked_step import Chunks, may_step_in_chunks
from deepspeed.compile.zero12.master_gradient import MasterGradient
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from support.ids import vary
from support.lifetime import backward, start, targets_at_calls
from support.optimizers import OPTIMIZERS, Views
from support.training import Case, chunks_of, relative_error

NUMEL = 50


class Gradients(NamedTuple):
    views: Views
    flat: torch.Tensor  # the same, with the padding


def draw_gradients(seed):
    """Draws gradients with padding in front of them, between them and behind them."""
    torch.manual_seed(seed)
    flat, runs = torch.zeros(NUMEL), [(2, 5), (7, 20), (30, 1), (33, 14)]
    for offset, numel in runs:
        flat[offset : offset + numel] = torch.randn(numel).bfloat16().float()
    return Gradients(Views({offset: flat[offset : offset + numel].bfloat16() for offset, numel in runs}), flat)


@pytest.mark.quick
@vary("chunk", [1, 3, 7, 32, 50, 100])
@pytest.mark.parametrize("factor", [None, 1 / 3], ids=["unscaled", "scaled"])
def test_gradient(chunk, factor):
    given, flat = draw_gradients(0)
    gradient = MasterGradient(given, factor and torch.tensor([factor]), torch.empty(0), torch.bfloat16)
    assert not given
    taken = [gradient.take(first, min(first + chunk, NUMEL)).clone() for first in range(0, NUMEL, chunk)]
    assert torch.equal(torch.cat(taken), flat if factor is None else flat * torch.tensor([factor]))
    assert not gradient._rest, "gradients are held longer than they are needed"


@pytest.mark.quick
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_chunks_step_as_the_whole(name):
    torch.manual_seed(0)
    whole = torch.nn.Parameter(torch.randn(NUMEL))
    chunked = copy.deepcopy(whole)
    expected, optimizer = OPTIMIZERS[name]([whole]), OPTIMIZERS[name]([chunked])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    expected_scheduler = torch.optim.lr_scheduler.StepLR(expected, 2, 0.5)
    stepped, new = [], torch.empty(NUMEL)
    for step in range(6):
        given, flat = draw_gradients(step)
        whole.grad = flat
        expected.step()
        assert may_step_in_chunks(optimizer, chunked)
        stepped.clear()
        with chunks_of(7):
            gradient = MasterGradient(given, None, chunked.data, torch.bfloat16)
            chunks = Chunks(
                *(optimizer, 0, gradient, lambda *span: new[slice(*span)], lambda *span: stepped.append(span))
            )
            chunks.step_rest()
        assert torch.equal(new, chunked)
        assert stepped == [(first, min(first + 7, NUMEL)) for first in range(0, NUMEL, 7)]
        scheduler.step()
        expected_scheduler.step()
    # A fused kernel rounds otherwise where a vector of elements is cut short.
    closeness = {"rtol": 1e-6 if name == "AdamW fused" else 0, "atol": 0}
    torch.testing.assert_close(chunked, whole, **closeness)
    assert list(optimizer.state) == [chunked] * len(expected.state) and len(optimizer.param_groups) == 1
    ours, theirs = optimizer.state_dict(), expected.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    torch.testing.assert_close(ours["state"], theirs["state"], **closeness)


def test_what_must_be_stepped_whole():
    parameter = torch.nn.Parameter(torch.ones(4))

    class Own(torch.optim.AdamW):
        pass

    def stepped(cls):
        optimizer = cls([parameter], lr=0.1)
        parameter.grad = torch.ones(4)
        optimizer.step()
        return optimizer

    assert may_step_in_chunks(stepped(torch.optim.AdamW), parameter)
    # A class that nobody has looked at may use the whole parameter, for example its norm.
    assert not may_step_in_chunks(stepped(Own), parameter)
    assert not may_step_in_chunks(stepped(torch.optim.Adafactor), parameter)
    counted = stepped(torch.optim.AdamW)
    counted.step = lambda step=counted.step: step()
    assert not may_step_in_chunks(counted, parameter)
    # As a checkpoint from before there was momentum has it.
    without = stepped(torch.optim.SGD)
    without.state[parameter]["momentum_buffer"] = None
    assert not may_step_in_chunks(without, parameter)
    hooked = stepped(torch.optim.AdamW)
    hooked.register_step_post_hook(lambda *_: None)
    assert not may_step_in_chunks(hooked, parameter)


class Stepped(NamedTuple):
    """How an engine was stepped whose chunks are small."""

    pieces: List[int]  # of the fp32 gradient, in each step
    error: float  # beside an engine that steps whole


def chunks_of_a_step(case):
    """Trains for three steps with chunks of 50 elements, and again with chunks of the default size."""
    trained, calls = [], []
    take = MasterGradient.take

    def taken(self, first, last):
        calls.append((numel, step))
        return take(self, first, last)

    MasterGradient.take = taken
    for numel in (50, chunked_step.CHUNK_NUMEL):
        with chunks_of(numel):
            module, engine = start(case)
            for step in range(3):
                backward(engine, step)
                engine.step()
            trained.append([safe_get_full_fp32_param(parameter).clone() for parameter in module.parameters()])
            engine.destroy()
    MasterGradient.take = take
    return Stepped([calls.count((50, step)) for step in range(3)], relative_error(*trained))


@pytest.mark.quick
def test_an_engine_steps_in_chunks(ranks):
    """bf16 gradients are scaled into one chunk of fp32 after the other, and a parameter may lie in several."""
    for chunks in ranks(2).run(chunks_of_a_step, Case(dtype="bf16", clipping=0.1)):
        assert chunks.pieces[0] > 5 and chunks.pieces == 3 * chunks.pieces[:1]
        assert chunks.error == 0


def gradients_within_a_step(case):
    """Returns how many targets exist each time that a chunk of the fp32 gradient is made."""
    with chunks_of(50):
        return targets_at_calls(MasterGradient, "take", start(case).engine, steps=2)


def test_a_gradient_is_released_after_its_last_chunk(ranks):
    for counts in ranks(2).run(gradients_within_a_step, Case(dtype="bf16", model="RepeatedLayers")):
        assert counts == sorted(counts, reverse=True)
        assert counts[0] > 5 and counts[-1] <= 2


def chunks_of_a_loaded_state(case):
    """Trains 2 steps, saves, and trains 2 more, there and in a new engine that loads; the largest difference."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    seen = []
    with chunks_of(50):
        for loads in (False, True):
            module, engine = start(case)
            if loads:
                engine.load_checkpoint(folder[0], tag="two")
            for step in range(2 if loads else 0, 4):
                if step == 2 and not loads:
                    engine.save_checkpoint(folder[0], tag="two")
                backward(engine, step)
                engine.step()
            seen.append(
                [
                    read(parameter).clone()
                    for parameter in module.parameters()
                    for read in (
                        safe_get_full_fp32_param,
                        lambda parameter: safe_get_full_optimizer_state(parameter, "momentum_buffer"),
                    )
                ]
            )
            engine.destroy()
    return relative_error(*seen)


def test_a_loaded_state_is_stepped_in_chunks(ranks):
    assert ranks(2).run(chunks_of_a_loaded_state, Case(dtype="bf16")) == [0, 0]

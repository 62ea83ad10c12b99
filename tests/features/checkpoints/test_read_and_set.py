# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Masters, optimizer states and gradients of a parameter can be read and set through what links it with them."""

import pytest
import torch

from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_update_full_grad_vectorized,
)

from support.checkpoints import Plain, Run, backward, start, train
from support.ids import vary
from support.on_ranks import on_ranks
from support.training import BOUND, device, relative_error, total_error


def set_gradients(module, plain):
    for parameter, other in zip(module.parameters(), plain.module.parameters(), strict=True):
        gradient = safe_get_full_grad(parameter)
        safe_set_full_grad(parameter, gradient * 3 - 0.01)
        other.grad.mul_(3).sub_(0.01)


def set_gradients_vectorized(module, plain):
    safe_update_full_grad_vectorized(list(module.parameters()), lambda gradient, _: gradient * 3 - 0.01)
    for parameter in plain.module.parameters():
        parameter.grad.mul_(3).sub_(0.01)


def set_masters(module, plain):
    for parameter, other in zip(module.parameters(), plain.module.parameters(), strict=True):
        safe_set_full_fp32_param(parameter, safe_get_full_fp32_param(parameter) * 0.5 + 0.1)
        other.data.mul_(0.5).add_(0.1)


def set_optimizer_states(module, plain):
    for parameter, other in zip(module.parameters(), plain.module.parameters(), strict=True):
        for key in optimizer_keys(plain):
            safe_set_full_optimizer_state(parameter, safe_get_full_optimizer_state(parameter, key) * 2 + 0.01, key)
            plain.optimizer.state[other][key].mul_(2).add_(0.01)


def optimizer_keys(plain):
    return ["momentum_buffer"] if plain.run.optimizer == "SGD" else ["exp_avg", "exp_avg_sq"]


SETTERS = {
    setter.__name__: setter for setter in (set_gradients, set_gradients_vectorized, set_masters, set_optimizer_states)
}


def read_error(module, plain, gradients=False):
    """Largest relative error of what is read, against the plain loop's masters, optimizer states and gradients."""
    found, expected = [], []
    for parameter, other in zip(module.parameters(), plain.module.parameters(), strict=True):
        found.append(safe_get_full_fp32_param(parameter))
        expected.append(other)
        for key in optimizer_keys(plain):
            found.append(safe_get_full_optimizer_state(parameter, key))
            expected.append(plain.optimizer.state[other][key])
        if gradients:
            found.append(safe_get_full_grad(parameter))
            expected.append(other.grad)
    return relative_error(found, expected)


@pytest.mark.parametrize(
    "run",
    [
        Run(stage=1, clipping=0.1),
        Run(stage=2, optimizer="SGD", overlapped=True),
        Run(stage=2, clipping=0.1, offloaded=True),
    ],
    ids=["stage1-AdamW", "stage2-SGD-overlapped", "stage2-AdamW-offloaded"],
)
@vary(
    "setter, moment",
    [
        *((setter, "between backward and step") for setter in SETTERS),
        *((setter, "between steps") for setter in ("set_masters", "set_optimizer_states")),
    ],
)
@on_ranks(2)
def test_read_and_set_as_in_a_plain_loop(setter, moment, run):
    """What a caller sets would go to a copy that the step does not read, or to another parameter's elements."""
    module, engine = start(run)
    plain, untouched = Plain(run), Plain(run)
    train(engine, run, range(2))
    plain.train(range(2))
    untouched.train(range(3))
    between_steps = moment == "between steps"
    if not between_steps:
        backward(engine, run, 2)
        plain.backward(2)
    assert read_error(module, plain, gradients=not between_steps) < BOUND
    SETTERS[setter](module, plain)
    assert read_error(module, plain, gradients=not between_steps) < BOUND
    if between_steps:
        # What was set are the masters; the forward computes with the parameters.
        engine.optimizer.update_lp_params()
        backward(engine, run, 2)
        plain.backward(2)
    engine.step()
    plain.step()
    assert read_error(module, plain) < BOUND
    moved = total_error(plain.module.parameters(), untouched.module.parameters())
    assert moved > 1e-3, "what was set made no difference"
    train(engine, run, [3])
    plain.train([3])
    assert read_error(module, plain) < BOUND
    assert relative_error(module.state_dict().values(), plain.module.state_dict().values()) < BOUND
    engine.destroy()


@on_ranks(2)
def test_states_of_groups_that_are_stepped_whole():
    """Parameters would be linked when the first group has states, and those of later groups with none."""
    run = Run(groups=2)
    module, engine = start(run)
    plain = Plain(run)
    # Because of a hook, the optimizer itself steps each group at once.
    engine.optimizer.optimizer.register_step_post_hook(lambda *_: None)
    train(engine, run, [0])
    plain.train([0])
    assert read_error(module, plain) < BOUND
    engine.destroy()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@vary("stage", [1, 2])
@on_ranks(2)
def test_a_step_takes_all_that_was_set(dtype, stage):
    """A step would overwrite masters that were set with what parameters round to, or leave parameters stale."""
    run = Run(stage=stage, dtype=dtype, clipping=0.1, schedule="OneCycleLR")
    module, engine = start(run)
    plain = Plain(run)
    train(engine, run, [0])
    plain.train([0])
    backward(engine, run, 1)
    plain.backward(1)
    generator = torch.Generator().manual_seed(0)
    pairs = list(zip(module.parameters(), plain.module.parameters(), strict=True))
    # Numbers that bf16 can hold: the step depends on what was set alone, whatever the engine computes in.
    for parameter, other in pairs:
        new = torch.rand(4, *other.shape, generator=generator).bfloat16().float().to(device())
        safe_set_full_fp32_param(parameter, new[0])
        other.data.copy_(new[0])
        for key, value in zip(optimizer_keys(plain), new[1:3]):
            safe_set_full_optimizer_state(parameter, value, key)
            plain.optimizer.state[other][key].copy_(value)
        safe_set_full_grad(parameter, new[3])
        other.grad.copy_(new[3])
    engine.step()
    plain.step()
    masters = [safe_get_full_fp32_param(parameter) for parameter, _ in pairs]
    states = [
        (safe_get_full_optimizer_state(parameter, key), plain.optimizer.state[other][key])
        for parameter, other in pairs
        for key in optimizer_keys(plain)
    ]
    written = module.state_dict()
    stale = [
        name
        for (name, _), master in zip(module.named_parameters(), masters, strict=True)
        if not torch.equal(written[name], master.to(written[name].dtype))
    ]
    engine.destroy()
    # Parameters that are not what the masters round to.
    assert stale == []
    assert relative_error(masters, plain.module.parameters()) < BOUND
    assert relative_error(*zip(*states, strict=True)) < BOUND

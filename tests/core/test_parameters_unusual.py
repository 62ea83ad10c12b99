# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Unusual parameters: those that are trained, and those that are refused (complex ones, those made of others)."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deepspeed.compile.zero_1_and_2 import gradient_counters
from deepspeed.compile.zero_1_and_2.gradient.native import reducer_module

from support import training
from support.beside import Beside, check
from support.ids import vary
from support.models import BlocksWithin, CheckpointedReentrant, OddSizes, RepeatedLayers
from support.on_ranks import on_ranks
from support.options import outcome
from support.subclasses import Scaled
from support.training import (
    BOUND,
    REGIONAL,
    Case,
    batch,
    compile_backend,
    device,
    engine_by_configuration,
    relative_error,
)


class Unusual(torch.nn.Module):
    """A convolution and a linear layer."""

    def __init__(self):
        super().__init__()
        self.convolution, self.linear = torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(4, 6)
        self.shift = 0.0

    def forward(self, images):
        return self.linear(self.convolution(images).mean((2, 3)) + self.shift).square().mean()


@vary("stage", [1, 2])
@on_ranks(2)
def test_not_contiguous(stage):
    """DeepSpeed's broadcast would end initialize() with "self.stride(-1) must be 1 to view Float as Byte"."""
    module = Unusual().to(memory_format=torch.channels_last)
    module.linear.weight = torch.nn.Parameter(torch.randn(4, 6).t())
    # Each rank begins with its own. The first rank's must come to all.
    shift = torch.full((1,), float(dist.get_rank()), device=device()).expand(4)
    module.shift = torch.nn.Parameter(shift, requires_grad=False)
    assert not any(value.is_contiguous() for value in (module.convolution.weight, module.linear.weight, module.shift))
    beside = Beside(module, Case(stage=stage))
    beside.plain.shift.data.zero_()
    for _ in range(2):
        beside.step(torch.randn(2, 3, 5, 5, device=device()))
    assert module.shift.stride() == (0,) and module.shift.eq(0).all()
    check([beside.end()])


# The layers share the graph of the one that is compiled first, which with reentrant checkpoints is the last.
@vary(
    "make, regional, index",
    [(CheckpointedReentrant, True, 0), (BlocksWithin, True, 2)],
    slow=[(RepeatedLayers, False, 2)],
)
@on_ranks(2)
def test_one_that_the_optimizer_lacks_in_one_of_several_layers(make, regional, index):
    """The graph of a layer whose parameters are all registered would be called for this layer, and refuse."""

    def norm(module):
        return getattr(module, "body", module).blocks[index].norm.weight

    def groups(module, count):
        return [{"params": [parameter for parameter in module.parameters() if parameter is not norm(module)]}]

    with mock.patch.object(training, "parameter_groups", groups):
        beside = Beside(make(), Case(config=REGIONAL if regional else None))
    errors, weights = [], [norm(beside.module), norm(beside.plain)]
    for step in range(2):
        ids = batch(step, 0, dist.get_rank(), 4)
        beside.engine.backward(beside.engine(ids))
        beside.plain(ids).backward()
        errors.append(relative_error(*([weight.grad] for weight in weights)))
        beside.engine.step()
        beside.step_plain()
        for weight in weights:
            weight.grad = None
    check([beside.end()])
    # Nobody averages the gradients of the one.
    assert max(errors) < BOUND


def compile_complex():
    module = Unusual()
    module.phase = torch.nn.Parameter(torch.randn(2, dtype=torch.complex64))
    return outcome(engine_by_configuration, module.to(device()), True)


class Turning(torch.nn.Module):
    """Has a real parameter that it takes for a complex one, as the refusal advises."""

    def __init__(self):
        super().__init__()
        self.phase = torch.nn.Parameter(torch.randn(5, 2))

    def forward(self, images):
        return torch.view_as_real(images * torch.view_as_complex(self.phase)).tanh().mean()


def train_viewed_as_complex():
    beside = Beside(Turning(), Case())
    for _ in range(2):
        beside.step(torch.randn(2, 5, device=device()))
    return beside.end()


@pytest.mark.follows("make it real, with a last dimension of two")
def test_complex(ranks):
    """The master weights, which are fp32, would lose the imaginary part, and training would go on."""
    (raised,) = ranks(1).run(compile_complex)
    assert "parameter phase is complex" in raised and "torch.view_as_complex()" in raised
    check(ranks(2).run(train_viewed_as_complex))


@pytest.mark.follows("which no step of ZeRO-1 and ZeRO-2 changes; set its requires_grad to false")
@on_ranks(1)
def test_a_parameter_made_of_others():
    """DeepSpeed gives such a parameter memory in its flat tensor, which no forward reads: it would stay as it was."""
    module, images = torch.nn.Linear(4, 3).to(device()), torch.ones(2, 4, device=device())
    module.weight = torch.nn.Parameter(Scaled.of(module.weight.detach()))
    assert outcome(engine_by_configuration, module, True) == (
        "ValueError: DeepCompile with ZeRO stage 1: parameter weight is trained and made of other tensors (Scaled), "
        "which no step of ZeRO-1 and ZeRO-2 changes; set its requires_grad to false, or make it a plain tensor"
    )
    trains = []
    for make in (lambda weight: weight.requires_grad_(False), lambda weight: torch.nn.Parameter(weight.detach() + 0)):
        module.weight = make(module.weight)
        before = [parameter.detach() + 0 for parameter in module.parameters()]
        engine = engine_by_configuration(module, True)
        with compile_backend("eager"):
            engine.backward(engine(images).square().mean())
        engine.step()
        after = [parameter.detach() + 0 for parameter in module.parameters()]
        trains.append([not torch.equal(*pair) for pair in zip(before, after, strict=True)])
        engine.destroy()
    assert trains == [[False, True], [True, True]]


@pytest.mark.sanitized
@on_ranks(1)
def test_without_elements():
    """A single rank would bind a gradient where the first piece of its parameter lies, and there is no piece."""
    beside = Beside(OddSizes(), Case())
    empty = beside.module.empty
    for step in range(2):
        # By hand.
        empty.grad = torch.zeros_like(empty)
        beside.step(batch(step, 0, dist.get_rank(), 4))
    # All but the one that DeepSpeed gives no optimizer.
    assert gradient_counters(beside.engine)["registered"] == len([*beside.module.parameters()]) - 1
    check([beside.end()])
    # Somebody registers such a parameter all the same.
    arguments = {"identity": 0, "bucket_numel": 8, "send_numel": 8, "overlap": True}
    reducer = reducer_module().Reducer(**arguments, synchronize_before=False, synchronize_after=False)
    group = reducer.add_group(dist.group.WORLD, dist.get_world_size(), 8, torch.float32, device(), False, None)
    with pytest.raises(ValueError, match="^parameter 'empty' has no elements, so nobody owns its gradient$"):
        reducer.register_parameter(group, "empty", empty, torch.float32, 0, 0)
    reducer.close()

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Models that differ by rank are refused by name before anything is sent."""

import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from support.beside import Beside
from support.ids import vary
from support.on_ranks import on_ranks
from support.options import outcome
from support.parameter_gather import Around
from support.training import BOUND, Case, batch, compile_backend, device, engine_by_configuration, make_engine


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.last.weight = self.first.weight
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (self.last(x) * self.scale).square().mean()


def other_dtype(module):
    module.layers[1].weight = nn.Parameter(module.layers[1].weight.to(torch.bfloat16))


def other_shape(module):
    module.layers[1] = nn.Linear(9, 8)


def another_parameter(module):
    module.layers[1].extra = nn.Parameter(torch.ones(2))


def one_frozen(module):
    module.layers[1].weight.requires_grad_(False)


def tie_lost(module):
    module.last.weight = nn.Parameter(module.last.weight.detach().clone())


def other_order(module):
    layer = module.layers[1]
    weight = layer.weight
    del layer.weight
    layer.weight = weight


def other_buffer(module):
    module.scale = module.scale.double()


# What differs on one rank -> how -> what is said there.
DIFFERENCES = {
    "shape": (other_shape, "shape of parameter layers.1.weight is (8, 8) on rank 0 and (8, 9) on rank 1"),
    "name": (another_parameter, "parameter layers.1.extra is on rank 1 and not on rank 0"),
    "frozen": (one_frozen, "requires_grad of parameter layers.1.weight is True on rank 0 and False on rank 1"),
    "tie": (tie_lost, "memory of parameter last.weight is of first.weight on rank 0 and of its own on rank 1"),
    "order": (other_order, "parameter layers.1.bias on rank 1 stands where rank 0 has parameter layers.1.weight"),
}


def check(said, difference):
    if dist.get_rank():
        assert f"the models of the ranks differ: {difference}; make the same models on every rank" in said
    else:
        assert "rank 1 could not make an engine, so no rank goes on" in said and difference in said


@pytest.mark.follows("make the same {} on every rank")
@vary("what", [*DIFFERENCES])
@on_ranks(2, timeout=120)
def test_models_that_differ(what):
    """Gloo would end a rank without an error of Python, and NCCL take bytes of one tensor for another one's."""
    differs, difference = DIFFERENCES[what]
    module = Model()
    if dist.get_rank():
        differs(module)
    said = outcome(engine_by_configuration, module.to(device()), True)
    # As the message advises.
    engine_by_configuration(Model().to(device()), True).destroy()
    check(said, difference)


# Such as the command lines of trainers that load a model on one rank alone make.
META = {
    "dtype": (
        other_dtype,
        "dtype of parameter layers.1.weight is torch.float32 on rank 0 and torch.bfloat16 on rank 1",
    ),
    "buffer": (other_buffer, "dtype of buffer scale is torch.float32 on rank 0 and torch.float64 on rank 1"),
    "tie": DIFFERENCES["tie"],
}


@vary("what", [*META])
@on_ranks(2, timeout=120)
def test_models_that_differ_where_one_has_no_values(what):
    """Values would be sent to tensors of other sizes."""
    differs, difference = META[what]
    # The first rank has the model on the host, and the other one another model on the meta device.
    with torch.device("meta" if dist.get_rank() else "cpu"):
        module = Model()
    if dist.get_rank():
        differs(module)
    section = {"regional_compilation": ["Linear"], "shard_parameters": "all"}
    check(outcome(make_engine, module, Case(config={"compile": section})), difference)


@vary("shards", [False, True])
@on_ranks(2, timeout=120)
def test_optimizers_that_differ(shards):
    """Partitions would hold other parameters on each rank, and a rank would step, or cut, another one's values."""
    # The other rank's optimizer has the parameters in another order.
    module = Model()
    parameters = [*module.parameters()][:: -1 if dist.get_rank() else 1]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    section = {"regional_compilation": ["Linear"], "shard_parameters": "all"} if shards else {}
    with compile_backend("eager"):
        said = outcome(make_engine, module, Case(config={"compile": section}), optimizer=optimizer)
    difference = (
        "name of parameter 0 of group 0 of the optimizer is first.weight on rank 0 and layers.1.bias on rank 1"
    )
    wanted = f"the optimizers of the ranks differ: {difference}" if dist.get_rank() else difference
    assert wanted in said


@pytest.mark.quick
@on_ranks(2)
def test_buffers_that_nobody_sends_may_differ():
    """Without sharding nobody sends buffers, so ranks may have their own."""
    module = Model()
    if dist.get_rank():
        other_buffer(module)
    engine_by_configuration(module.to(device()), True).destroy()


@pytest.mark.follows("make the same {} on every rank")
@on_ranks(2, timeout=120)
def test_configurations_that_differ():
    """Ranks would send different messages: one gathers parameters by blocks, or compares errors of its pictures."""
    picture = {"memory_picture": {"folder": "nowhere"}} if dist.get_rank() else {}
    said = outcome(make_engine, Model().to(device()), Case(config={"compile": picture}))
    assert "value of compile.memory_picture is False on rank 0 and True on rank 1" in said
    assert "make the same configurations on every rank" in said
    # A host may not have been updated.
    with mock.patch("deepspeed.__version__", f"0.19.8+zerograd.1.g{dist.get_rank()}"):
        said = outcome(make_engine, Model().to(device()), Case())
    assert "version of the installed deepspeed is 0.19.8+zerograd.1.g0 on rank 0 and 0.19.8+zerograd.1.g1 on" in said
    # What no message depends on may differ.
    config = {"compile": {"debug_log": dist.get_rank() == 0}}
    make_engine(Model().to(device()), Case(config=config)).destroy()


@pytest.mark.follows("or set compile.overlap_param_gather to false")
@on_ranks(2, timeout=120)
def test_forwards_that_differ():
    """One rank would gather all parameters at once and the other block by block, and mix up their messages."""
    for overlaps in (None, False):
        module = Around()
        if dist.get_rank() == 0:
            block = module.body.blocks[0]
            block.forward = functools.partial(type(block).forward, block)
        config = {"compile": {"overlap_param_gather": overlaps}}
        if overlaps is None:
            said = outcome(make_engine, module.to(device()), Case(config=config))
            assert "this rank gathers parameters in another order than the first rank" in said
            assert "set compile.overlap_param_gather to false" in said
            continue
        # As the message advises.
        pair = Beside(module, Case(config=config))
        pair.step(batch(0, 0, dist.get_rank(), 4))
        pair.step(batch(1, 0, dist.get_rank(), 4))
        assert pair.end().error < BOUND

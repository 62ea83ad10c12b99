# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""A model that starts on the host is cut there: it trains to the same bits, and no device ever has it whole."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepspeed.accelerator import get_accelerator
from deepspeed.compile.features.shard_parameters import feature, from_host
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from support.checkpoints import in_base_order
from support.frozen import MODELS, Body, Tied, freeze
from support.graph_cache import shapes_no_graph
from support.ids import vary
from support.models import VOCABULARY, Block, Stack
from support.on_ranks import on_ranks
from support.options import outcome
from support.sharded import SHARDED, end, parameters_at_rest, same, section
from support.training import Case, batch, compile_backend, device, engine_by_configuration, make_engine, make_optimizer

SLOW = pytest.mark.slow


class BufferedBody(Body):
    """Has a buffer that no state dict has, as rotary embeddings have, and tensors without elements."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 12), persistent=False)
        self.register_buffer("nothing", torch.empty(0, 2))
        self.blocks[0].nothing = nn.Parameter(torch.empty(3, 0))

    def forward(self, ids, skip=False):
        x = self.embedding(ids)
        return self.run(x * self.scale.to(x.dtype), skip)


class Buffered(Tied):
    of_body = BufferedBody


@contextlib.contextmanager
def on_the_host(little_memory=False, but_first=False):
    """Within it, a CPU counts as a device, where no parameter is yet; and as one that has no room for flat tensors.

    ``but_first``: whether the first rank's parameters are on the device already.
    """
    memory = (lambda *_: 0) if little_memory else get_accelerator().available_memory
    is_elsewhere = not (but_first and dist.get_rank() == 0)
    with (
        mock.patch.object(from_host, "is_elsewhere", shapes_no_graph(lambda *_: is_elsewhere)),
        mock.patch.object(get_accelerator(), "available_memory", memory),
        compile_backend("eager"),
    ):
        yield


def build(model, start, trained):
    """Returns a model. Where it starts on the host, only the first rank has the values with which it will train."""
    torch._dynamo.reset()
    rank = dist.get_rank()
    torch.manual_seed(0 if start == "device" else rank)
    with torch.device("meta") if start in ("meta", "others on meta") and rank else contextlib.nullcontext():
        module = {**MODELS, "buffered": Buffered}[model]()
    freeze(module, trained)
    is_on_device = start == "device" or (start == "others on meta" and rank == 0)
    return module.to(device()) if is_on_device else module


def train(model, start, trained="all", shard="all", left_out=0, again="", **case):
    """Trains two steps; returns losses, masters, parameters and buffers. ``again``: from a checkpoint there."""
    module = build(model, start, trained)
    config = section(shard, deepcompile=True)
    # Nobody compiles an engine that is to load first.
    case = Case(config=config | case.pop("config", {}), **{"adam": True, "deepcompile": not again, **case})
    optimizer = make_optimizer(module, case)
    for group in optimizer.param_groups:
        group["params"] = group["params"][left_out:]
    of_host = on_the_host(start == "little memory", start == "others on meta")
    with contextlib.nullcontext() if start == "device" else of_host:
        engine = make_engine(module, case, optimizer=optimizer)
    if again:
        engine.load_checkpoint(again, tag="one")
    results = []
    for step in range(2):
        for micro_step in range(engine.gradient_accumulation_steps()):
            with compile_backend("eager"):
                loss = engine(batch(step, micro_step, dist.get_rank(), 4))
            engine.backward(loss)
            engine.step()
            results.append(loss.detach())
    at_rest = parameters_at_rest(module)
    masters = enumerate(engine.optimizer.single_partition_of_fp32_groups)
    results += [in_base_order(engine.optimizer, group, master.detach()) for group, master in masters]
    return [*results, *end(engine, module), *module.buffers()], at_rest


def compare(model, start, **more):
    (first, at_rest), (second, also_at_rest) = train(model, start, **more), train(model, "device", **more)
    assert same(first, second) and at_rest == also_at_rest > 0


@pytest.mark.options("compile.shard_parameters")
@pytest.mark.follows("load the model on the host before deepspeed.initialize(), which cuts it there")
@vary("model", ["buffered"], slow=["reentrant", "itself"])
@vary("start", ["host", "meta", "little memory", "others on meta"])
@vary(
    "case",
    [
        {"stage": 2, "dtype": "bf16", "groups": 2},
        {"stage": 1, "accumulation": 2, "trained": "alike", "left_out": 2},
    ],
    slow=[
        {"stage": 1, "accumulation": 2, "trained": "some", "left_out": 2},
        {"stage": 2, "dtype": "bf16", "offloaded": True},
        {"stage": 2, "dtype": "fp16", "adam": False},
        {"stage": 2, "config": {"zero_optimization": {"round_robin_gradients": True}}},
    ],
)
@on_ranks(2)
def test_it_trains_as_from_the_device(model, start, case):
    """A rank would train what its own host has, or what memory held before, or a parameter that nobody brought."""
    compare(model, start, **case)


@SLOW
@vary("world", [3, 4])
@on_ranks("world")
def test_several_owners(world):
    """A parameter of several owners would lack what others own."""
    compare("buffered", "host", stage=2)


@on_ranks(1)
def test_a_single_rank():
    """A single rank, which has nobody to gather from, would have parameters of no number."""
    first, second = (train("buffered", start)[0] for start in ("host", "device"))
    assert same(first, second)


@SLOW
@vary("start", ["meta", "host", "others on meta"])
@on_ranks(2)
def test_frozen_parameters(start):
    """With "frozen", adapters and frozen parameters of ranks on meta would stay without values."""
    compare("buffered", start, trained="some", shard="frozen")


@on_ranks(2)
def test_a_checkpoint_before_the_first_forward(tmp_path):
    """A checkpoint that is loaded before anything was sharded would be lost with the parameters of the host."""
    module = build("buffered", "device", "all")
    engine = make_engine(module, Case(config=SHARDED, adam=True))
    engine.save_checkpoint(str(tmp_path), tag="one")
    end(engine)
    compare("buffered", "meta", again=str(tmp_path))


@pytest.mark.options("compile.shard_parameters")
@vary("everywhere", [False, True])
@vary("shards", ["all", "frozen"])
@on_ranks(2)
def test_values_that_no_rank_has(everywhere, shards):
    """Ranks that have values would wait for the first, which has raised, until their time is up.

    Or parameters without values would be sharded, and trained with whatever memory holds.
    """
    with torch.device("meta") if everywhere or dist.get_rank() == 0 else contextlib.nullcontext():
        module = MODELS["plain"]()
    said = outcome(make_engine, module, Case(config=section(shards)))
    says = "is on the meta device, so compile.shard_parameters has no values to shard; load the model on the"
    assert f"parameter body.embedding.weight {says}" in said


class WithoutTensors(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Identity() for _ in range(2))

    def forward(self, x):
        return self.blocks[1](self.blocks[0](x))


@on_ranks(2)
def test_a_module_without_tensors():
    """The error would be one of a tensor's shape, where DeepSpeed says what the optimizer lacks."""
    said, module = [], WithoutTensors()
    for shards in ("all", "frozen", None):
        section = {"regional_compilation": ["Identity"], "shard_parameters": shards}
        config = {"compile": section, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
        said.append(outcome(make_engine, module, Case(config=config), model_parameters=module.parameters()))
    assert said == ["ValueError: optimizer got an empty parameter list"] * 3


# Memory ------------------------------------------------------------------------------------------------------------


class Deep(Stack):
    """Its blocks are small beside the whole, and so is what is around them."""

    def __init__(self):
        super().__init__(lambda: Block(24), 16, 24, VOCABULARY)

    def forward(self, ids):
        return F.linear(super().forward(ids), self.embedding.weight).square().mean()


class Watch(TorchDispatchMode):
    """Finds the most bytes that storages have at a time, but for those in ``beside``."""

    def __init__(self, beside):
        super().__init__()
        # Kept, so that no other storage gets the address of one of them.
        self._beside = {tensor.untyped_storage()._cdata: tensor for tensor in beside}
        self._known, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                storage = leaf.untyped_storage()
                if storage._cdata not in self._beside:
                    self._known[storage._cdata] = StorageWeakRef(storage)
        total = 0
        for address, reference in list(self._known.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._known[address]
            else:
                total += storage.nbytes()
        self.peak = max(self.peak, total)
        return result


@pytest.mark.options("compile.shard_parameters")
@on_ranks(2)
def test_the_peak_of_the_set_up():
    """A whole copy, a second copy of the partition, or gradients of zeros would be beside partition and masters."""
    module = Deep().bfloat16()
    numel = sum(parameter.numel() for parameter in module.parameters())
    block = sum(parameter.nbytes for parameter in module.layers[0].parameters())
    # On a CPU, these are what the host has, and the rest is what a device would have.
    with on_the_host(), Watch([parameter.detach() for parameter in module.parameters()]) as watch:
        engine = make_engine(module, Case(config=SHARDED, adam=True, dtype="bf16", stage=2))
        peak = watch.peak
    outside = feature.sharded_blocks(engine).outside
    outside = 0 if outside is None else outside.memory.nbytes
    partition = sum(master.numel() for master in engine.optimizer.single_partition_of_fp32_groups)
    assert partition <= 0.51 * numel
    end(engine)
    most = 6 * partition + outside + 2 * block
    assert 0.9 * most < peak <= most


class ReplacedOptimizer(DeepSpeedZeroOptimizer):
    """What a program puts in the place of DeepSpeed's."""


@on_ranks(1)
def test_a_program_replaces_the_optimizer():
    """The engine would make DeepSpeed's own, although it shards no parameters."""
    with mock.patch("deepspeed.runtime.engine.DeepSpeedZeroOptimizer", ReplacedOptimizer):
        engine = engine_by_configuration(nn.Linear(2, 2), deepcompile=False)
    assert isinstance(engine.optimizer, ReplacedOptimizer)
    engine.destroy()

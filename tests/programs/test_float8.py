# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Linear layers that torchao converted multiply in float8. Under DeepCompile they train as they do without it.

GPUs with float8 run torchao's kernels. Elsewhere torchao emulates them: it multiplies the same float8 numbers in fp32.
"""

import copy
import dataclasses
import importlib.util
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.torch_version import TorchVersion

from deepspeed.compile.features.activation_budget import feature as split_file
from deepspeed.compile.features.shard_parameters import unsharded_parameters
from deepspeed.compile.features.shard_parameters.feature import sharded_blocks
from deepspeed.compile.zero_1_and_2 import gradient_counters, reset_gradient_counters, wait_for_parameters
from deepspeed.utils import safe_get_full_fp32_param

from support.beside import Beside, warnings_logged
from support.checkpoints import EXACT
from support.ids import vary
from support.models import VOCABULARY, BlocksWithin, Model, qwen3_config
from support.on_ranks import on_ranks
from support.training import (
    BOUND,
    OVERLAPPED,
    Case,
    batch,
    default_dtype,
    device,
    make_engine,
    make_optimizer,
    relative_error,
    step_plain,
    total_error,
)

# Not imported here: torchao takes seconds, and prints which of its files for GPUs it cannot load.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="pip install -r requirements/front_doors.txt"
)

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
# Kernels for float8 multiply matrices whose sides are multiples of 16. A batch has two rows.
WIDTH, LENGTH = 32, 8
# How far parameters may be from those of another training, relative to the distance that they have moved, where the
# two round differently. A rounding of the last bit may round a float8 number, which has 2 or 3 bits, the other way.
CLOSE = 0.15
CHUNKED = {"compile": {"chunked_loss": True}}
SHARDED = {"compile": {"shard_parameters": "all"}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}


class OwnModel(BlocksWithin):
    @property
    def blocks(self):
        return self.body.blocks


class OneGraph(Model):
    """Compiled as a whole, because its own forward calls the blocks."""


class Qwen3(nn.Module):
    """A small Qwen3 of transformers; ``forward(ids)`` returns the loss of predicting the ids."""

    def __init__(self, width):
        transformers = pytest.importorskip("transformers")
        super().__init__()
        self.model = transformers.Qwen3ForCausalLM(qwen3_config(VOCABULARY, width=width, use_cache=False))

    @property
    def blocks(self):
        return self.model.get_decoder().layers

    def forward(self, ids):
        return self.model(input_ids=ids, labels=ids).loss


class CheckpointedQwen3(Qwen3):
    def __init__(self, width):
        super().__init__(width)
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


class AdaptedQwen3(Qwen3):
    """With LoRA adapters, which are too narrow for float8, beside frozen layers in float8."""

    def __init__(self, width):
        peft = pytest.importorskip("peft")
        super().__init__(width)
        self.model = peft.get_peft_model(self.model, peft.LoraConfig(r=4, target_modules="all-linear"))

    @property
    def blocks(self):
        return self.model.base_model.model.model.layers


MODELS = {cls.__name__: cls for cls in (OwnModel, OneGraph, Qwen3, CheckpointedQwen3, AdaptedQwen3)}


def build(model):
    torch.manual_seed(0)
    with default_dtype(torch.float32):
        return MODELS[model](width=WIDTH).to(device())


def no_head_nor_adapter(module, name):
    return "head" not in name and "lora" not in name


def everything(module, name):
    return True


def convert(module, recipe, which=no_head_nor_adapter, **options):
    """Converts the linear layers of which ``which(module, name)`` is true; ``options`` of torchao's configuration."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # Kernels multiply matrices whose sides are multiples of 16, and the number of tokens that the models know is none.
    has_kernels = (
        torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9) and which is not everything
    )
    options = {"emulate": not has_kernels, **options}
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), **options)
    return convert_to_float8_training(module, config=config, module_filter_fn=which)


def trained_in(module):
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def masters(module):
    return [safe_get_full_fp32_param(parameter) for parameter in trained_in(module).values()]


def train_batch(engine, ids):
    """Trains an engine on a micro-batch; returns the loss."""
    loss = engine(ids)
    engine.backward(loss)
    engine.step()
    return loss.item()


def check_parameters(module, engine, before):
    """Asserts that the parameters are those that the model had before it was converted, within the flat tensors.

    Sharded ones lie elsewhere.
    """
    flat, is_sharded = engine.optimizer.bit16_groups_flat, sharded_blocks(engine) is not None
    storages = {tensor.untyped_storage().data_ptr() for tensor in flat}
    with unsharded_parameters(engine):
        for name, parameter in trained_in(module).items():
            assert parameter is before[name] and type(parameter) is nn.Parameter and parameter.dtype == flat[0].dtype
            assert is_sharded or parameter.untyped_storage().data_ptr() in storages
            assert torch.equal(parameter, safe_get_full_fp32_param(parameter).to(parameter.dtype))


def rounds_alike(case):
    """Whether the engines and the plain loop of a case compute the same bits, but for sums in another order."""
    return EXACT and case.backend == "eager" and case.dtype == "fp32" and case.config in (None, OVERLAPPED)


def check(model, recipe, case, which=no_head_nor_adapter):
    """Trains with DeepCompile, beside an engine without it, and beside a plain loop in fp32 with compiled blocks.

    Returns what the engine with DeepCompile warned of.
    """
    torch._dynamo.reset()
    module = build(model)
    before = dict(module.named_parameters())
    convert(module, recipe, which)
    without, plain, initial = (copy.deepcopy(module) for _ in range(3))
    for block in plain.blocks:
        block.compile(backend="aot_eager" if case.backend == "eager" else case.backend)
    config = {section: options for section, options in (case.config or {}).items() if section != "compile"}
    uncompiled = make_engine(without, dataclasses.replace(case, deepcompile=False, config=config))
    optimizer = make_optimizer(plain, case)
    losses, rank = [], dist.get_rank()
    with warnings_logged() as warnings:
        engine = make_engine(module, case)
        for step in range(case.steps):
            for micro_step in range(case.accumulation):
                ids = batch(step, micro_step, rank, LENGTH)
                reset_gradient_counters(engine)
                losses.append([train_batch(engine, ids), train_batch(uncompiled, ids)])
                loss = plain(ids)
                (loss / case.accumulation).backward()
                losses[-1].append(loss.item())
            step_plain(plain, optimizer)
            ways = (engine, uncompiled, plain)
            for way in ways:
                way.eval()
            with torch.no_grad():
                losses.append([way(ids).item() for way in ways])
            for way in ways:
                way.train()
    wait_for_parameters(engine)
    check_parameters(module, engine, before)
    converted = [layer for layer in module.modules() if type(layer).__name__ == "Float8Linear"]
    assert converted
    # Of the last backward.
    from_graphs = gradient_counters(engine)["from_graphs"]
    of_converted = sum(parameter.requires_grad for layer in converted for parameter in layer.parameters())
    trained, distance = masters(module), relative_error if rounds_alike(case) else total_error
    error, error_of_plain = distance(trained, masters(without)), distance(trained, trained_in(plain).values())
    moved = total_error(trained, trained_in(initial).values())
    engine.destroy()
    uncompiled.destroy()
    assert moved > 1e-2, "the parameters hardly changed, so agreement shows nothing"
    bound = BOUND if rounds_alike(case) else CLOSE * moved
    assert max(error, error_of_plain) < bound, (error, error_of_plain, moved)
    # With sharded parameters even sums are those of the engine without DeepCompile.
    assert case.config != SHARDED or not EXACT or error < BOUND
    for loss, *others in losses:
        assert others == pytest.approx([loss] * len(others), rel=1e-2)
    assert from_graphs >= max(of_converted, 1)
    return warnings


@pytest.mark.table
@vary(
    "world, recipe, model, stage, accumulation, varied",
    [(1, "tensorwise", "OwnModel", 1, 1, {"steps": 2})],
    expects="world",
    slow=[
        (2, "tensorwise", "OwnModel", 1, 3, {}),
        (2, "rowwise", "OneGraph", 2, 1, {}),
        (2, "rowwise_with_gw_hp", "Qwen3", 1, 2, {"config": OVERLAPPED}),
        (2, "rowwise", "CheckpointedQwen3", 2, 2, {}),
        (2, "rowwise", "CheckpointedQwen3", 2, 1, {"config": SHARDED}),
        (2, "tensorwise", "AdaptedQwen3", 1, 2, {"config": SHARDED}),
        (2, "tensorwise", "CheckpointedQwen3", 1, 1, {"dtype": "bf16"}),
        (2, "tensorwise", "AdaptedQwen3", 1, 2, {}),
        (2, "rowwise", "Qwen3", 1, 1, {"config": AUTOCAST}),
        (2, "tensorwise", "Qwen3", 2, 1, {"backend": "inductor"}),
        (2, "rowwise", "OwnModel", 1, 2, {"backend": "inductor", "dtype": "bf16"}),
    ],
)
@on_ranks("world")
def test_trains_as_without_deepcompile(world, recipe, model, stage, accumulation, varied):
    """A weight in float8 would be taken for a parameter, or its gradient be reduced in float8 and not in its own."""
    case = Case(stage=stage, accumulation=accumulation, adam=model == "AdaptedQwen3", **varied)
    check(model, recipe, case)


# A small model, and one of transformers.
BOTH = ["OwnModel", pytest.param("Qwen3", marks=pytest.mark.slow)]


@vary("model", BOTH)
@vary("which", [no_head_nor_adapter, everything])
@on_ranks(1)
def test_loss_in_chunks_where_the_head_is_left_out(which, model):
    """A head that multiplies in float8 would be computed in chunks, which multiply in full precision."""
    warnings = check(model, "tensorwise", Case(config=CHUNKED), which)
    # A head in float8 is not computed in chunks, and a warning says so.
    assert any("chunked" in text for text in warnings) == (which is everything), warnings


@vary("recipe", RECIPES)
@vary("model", ["OneGraph"], slow=["Qwen3"])
@on_ranks(1)
def test_forward_keeps_no_copy_of_a_weight(model, recipe):
    """A copy of a weight in float8, which is smaller, would be kept for the backward though the weight stays too."""
    if recipe != "tensorwise" and not torch.cuda.is_available() and TorchVersion(torch.__version__) < "2.13":
        pytest.skip("torch before 2.13 multiplies in float8 on a CPU with one scale for a tensor only")
    kept, split = [], split_file.split_joint

    def recording(*args, **kwargs):
        forward, backward = split(*args, **kwargs)
        values = [node.meta.get("val") for node in backward.graph.find_nodes(op="placeholder")]
        kept.extend(list(value.shape) for value in values if getattr(value, "dtype", None) == torch.float8_e4m3fn)
        return forward, backward

    engine = make_engine(convert(build(model), recipe, emulate=False), Case(model, dtype="bf16"))
    with mock.patch.object(split_file, "split_joint", recording):
        train_batch(engine, batch(0, 0, dist.get_rank(), 8 * LENGTH))
    engine.destroy()
    # Of float8 tensors, of graphs with kernels for float8.
    assert all(2 * 8 * LENGTH in shape for shape in kept), kept
    assert bool(kept) == (recipe != "rowwise_with_gw_hp")


@vary("recipe, dtype", [("tensorwise", "fp32"), ("rowwise", "bf16"), ("rowwise_with_gw_hp", "fp32")])
@vary("model", BOTH)
@vary("stage", [1, 2])
@on_ranks(1)
def test_resumes(tmp_path, stage, model, recipe, dtype):
    """A checkpoint would have weights in float8, or be one that only a model with converted layers can load."""
    case, folder = Case(stage=stage, dtype=dtype, adam=True), str(tmp_path)

    def start():
        torch._dynamo.reset()
        return make_engine(convert(build(model), recipe), case)

    def go_on(engine):
        losses = [train_batch(engine, batch(step, 0, dist.get_rank(), LENGTH)) for step in range(2, 4)]
        engine.destroy()
        return losses

    engine = start()
    for step in range(2):
        train_batch(engine, batch(step, 0, dist.get_rank(), LENGTH))
    engine.save_checkpoint(folder, tag="saved")
    ways = [go_on(engine)]
    for resumed in (start(), make_engine(build(model), case)):
        resumed.load_checkpoint(folder, tag="saved")
        ways.append(go_on(resumed))
    # The same engine, a new one, and one whose layers are not converted.
    going_on, resumed, without = ways
    assert resumed == (going_on if EXACT else pytest.approx(going_on, rel=1e-2))
    # A checkpoint does not say that layers multiply in float8.
    assert without == pytest.approx(going_on, rel=2e-2)


@vary("model", BOTH)
@vary("step_of_conversion", [0, 2])
@on_ranks(1)
def test_converted_when_the_engine_is_there(step_of_conversion, model):
    """The graph of a layer that was not yet converted would go on to run, or the new layer's gradient be lost."""
    pair = Beside(build(model), Case())
    for step in range(3):
        if step == step_of_conversion:
            convert(pair.module, "tensorwise")
            convert(pair.plain, "tensorwise")
        pair.step(batch(step, 0, dist.get_rank(), LENGTH))
    assert pair.end().total_error < (BOUND if EXACT else CLOSE)

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's own Muon, beside DeepSpeed without DeepCompile."""

import contextlib
import dataclasses
import logging
from typing import Dict, List, NamedTuple, Set
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.compile.zero12 import gradient_counters, wait_for_parameters
from deepspeed.compile.zero12.update import make_rules
from deepspeed.compile.zero12.update.groups import StepOfGroups
from deepspeed.compile.zero12.update.muon import MOMENTUM, norm_of_updates
from deepspeed.runtime import torch_autocast

from support.beside import logged
from support.ids import vary
from support.models import VOCABULARY
from support.options import outcome
from support.training import (
    BOUND,
    NOTHING,
    ROUNDING,
    as_recorded,
    device,
    held,
    low_precision,
    relative_error,
    total_error,
    updates_compiled_from,
)

# With a small eps, an element whose gradient is nothing but rounding would move as far as any other.
MUON = {"muon_lr": 0.02, "adam_lr": 0.01, "eps": 0.1, "weight_decay": 0.1, "momentum": 0.9}
OVERLAPPED = {"regional_compilation": True, "overlap_param_gather": True}


@dataclasses.dataclass(frozen=True)
class Training:
    """What to train, and how."""

    stage: int = 1
    accumulation: int = 1
    dtype: str = "fp32"
    clipping: float = 0.0
    method: str = "gram"
    depth: int = 3
    convolution: bool = False
    per_head: bool = False
    bucket: int = 150
    steps: int = 10
    overlapped: bool = False
    aligned: bool = False  # whether there is padding between parameters, which come in round robin order
    recorded: bool = False  # whether recorded updates step partitions of any size


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width // 2)
        self.up = nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x):
        h = self.norm(x)
        h = torch.tanh(self.q_proj(h)) * torch.cat([self.k_proj(h)] * 2, dim=-1)
        return x + self.down(F.gelu(self.up(h)))


class Body(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return x


class Matrices(nn.Module):
    """Wide, tall and square matrices, of which DeepSpeed leaves embedding and head to Adam."""

    def __init__(self, depth, convolution, width=12):
        super().__init__()
        self.config = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": width // 4}
        self.config = type("Config", (), self.config)()
        self.body = Body(width, depth)
        self.convolution = nn.Conv2d(width, width, (3, 1), padding=(1, 0)) if convolution else None
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.body(ids)
        if self.convolution is not None:
            x = x + self.convolution(x.transpose(1, 2).unsqueeze(-1)).squeeze(-1).transpose(1, 2)
        return F.cross_entropy(self.lm_head(x).flatten(0, 1), ids.flatten())


def build(training, seed=0):
    torch.manual_seed(seed)
    return Matrices(training.depth, training.convolution).to(device())


@contextlib.contextmanager
def products_in_fp32():
    """Within it Newton-Schulz computes in fp32: in fp16 and bf16, products of a batch and of a matrix round apart."""
    accelerator = get_accelerator()
    with (
        mock.patch.object(accelerator, "is_fp16_supported", lambda: False),
        mock.patch.object(accelerator, "is_bf16_supported", lambda: False),
    ):
        yield


def start(training, deepcompile, seed=0):
    """Returns a model and its engine."""
    torch._dynamo.reset()
    module = build(training, seed)
    params = {**MUON, "ns_method": training.method, "per_head_muon": training.per_head}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": training.accumulation,
        "gradient_clipping": training.clipping,
        "steps_per_print": 10**9,
        "optimizer": {"type": "Muon", "params": params},
        "zero_optimization": {
            "stage": training.stage,
            "reduce_bucket_size": training.bucket,
            "parameter_alignment": training.aligned,
            "round_robin_gradients": training.aligned,
        },
        "compile": {"deepcompile": deepcompile, **(OVERLAPPED if training.overlapped and deepcompile else {})},
        **low_precision(training.dtype, loss_scale_window=100),
    }
    engine = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)[0]
    if deepcompile:
        engine.compile(backend="eager")
        engine.optimizer._zero12.rules = make_rules(compiles=training.recorded)
    return module, engine


def train(engine, training, steps):
    with products_in_fp32():
        for step in steps:
            for micro_step in range(training.accumulation):
                seed = 1000 * step + 100 * micro_step + dist.get_rank()
                generator = torch.Generator().manual_seed(seed)
                ids = torch.randint(0, VOCABULARY, (2, 5), generator=generator).to(device())
                engine.backward(engine(ids))
                engine.step()


def momenta(engine):
    """Returns the momentum of each parameter group that has one, of this rank."""
    inner = engine.optimizer.optimizer
    states = [inner.state[master] for master in engine.optimizer.single_partition_of_fp32_groups]
    return [state[MOMENTUM].clone() for state in states if MOMENTUM in state]


def seen(module, engine):
    """Returns parameters, master weights and momentum of this rank."""
    if engine.optimizer.__class__.__name__.startswith("StepLocal"):
        wait_for_parameters(engine)
    masters = [master.detach().clone() for master in engine.optimizer.single_partition_of_fp32_groups]
    return [each.detach().float().clone() for each in module.parameters()], masters, momenta(engine)


class Beside(NamedTuple):
    """A training beside DeepSpeed without DeepCompile."""

    parameters: float  # relative errors
    momentum: float
    norm: float  # of the last step
    moved: float  # how far parameters went
    held: Dict[str, int]  # of gradients, after the last step
    owners: List[int]  # of each matrix
    steps: Set[str]  # the kinds of steps that partitions take


def train_beside(training):
    with updates_compiled_from(16), as_recorded(training.recorded):
        return _train_beside(training)


def _train_beside(training):
    ends, norms = [], []
    for deepcompile in (False, True):
        module, engine = start(training, deepcompile)
        train(engine, training, range(training.steps))
        ends.append(seen(module, engine))
        norms.append(float(engine.get_global_grad_norm()))
        if deepcompile:
            after = held(gradient_counters(engine))
            matrices = engine.optimizer._zero12.orthogonalizer.matrices
            steps = StepOfGroups(engine.optimizer, [None] * len(engine.optimizer.bit16_groups))._steps
            owners = [len(matrix.parts) for group in matrices.values() for matrix in group]
        engine.destroy()
    (expected, _, momentum), (actual, _, own_momentum) = ends
    before = [each.detach().float() for each in build(training).parameters()]
    # A bias that is near zero is nothing but rounding in low precision.
    error = relative_error if training.dtype == "fp32" else total_error
    return Beside(
        error(actual, expected),
        error(own_momentum, momentum),
        abs(norms[1] / norms[0] - 1),
        relative_error(actual, before),
        after,
        owners,
        {type(step).__name__ for step in steps},
    )


def check(results, dtype="fp32"):
    for result in results:
        assert result.moved > 1e-2, result
        assert result.parameters < ROUNDING[dtype], result
        assert result.momentum < 10 * ROUNDING[dtype], result
        assert result.norm < 10 * ROUNDING[dtype], result
        assert result.held == NOTHING
    return results


@vary(
    "world, varied",
    [
        (2, {"stage": 2, "accumulation": 2, "clipping": 1.0}),
        (3, {"stage": 1, "method": "standard", "overlapped": True}),
        (4, {"stage": 2, "depth": 1}),
        (2, {"stage": 1, "aligned": True}),
        (2, {"stage": 1, "accumulation": 2, "bucket": 10**6}),
        (2, {"stage": 2, "per_head": True, "bucket": 2000}),
        (3, {"stage": 2, "clipping": 1.0, "dtype": "bf16", "recorded": True}),
        (2, {"stage": 1, "dtype": "fp16", "clipping": 1.0}),
    ],
)
def test_it_trains_as_without_deepcompile(ranks, world, varied):
    training = Training(**varied)
    results = check(ranks(world).run(train_beside, training), training.dtype)
    assert results[0].steps == {"CompiledStep" if training.recorded else "OwnStep"}
    assert max(results[0].owners) > 1, "no boundary cuts a matrix"
    if training.depth == 1:
        assert max(results[0].owners) > 2, "no matrix lies in three partitions"


# Overflow and checkpoints --------------------------------------------------------------------------------------------


def overflow(training):
    """Returns whether a step that overflows was skipped, and the errors of what it must leave as it was."""
    module, engine = start(training, deepcompile=True)
    train(engine, training, range(2))
    before = seen(module, engine)
    ids = torch.zeros((2, 5), dtype=torch.int64, device=device())
    # Only a gradient of Adam's: Muon's own function passes over a matrix whose gradient is not finite.
    engine.backward(engine(ids) + (module.lm_head.weight * torch.inf).sum())
    engine.step()
    skipped, after = engine.skipped_steps, seen(module, engine)
    engine.destroy()
    return skipped, [relative_error(*each) for each in zip(after, before, strict=True)]


def test_an_overflow_leaves_momentum_as_it_is(ranks):
    for skipped, errors in ranks(2).run(overflow, Training(dtype="fp16", stage=2)):
        assert skipped == 1
        assert errors == [0.0, 0.0, 0.0]


def save_and_load(training, folder, saves):
    """An engine with DeepCompile, or without, saves; one of the other kind loads, and both go on.

    Returns the errors of what was loaded, and of what came of it, and how far masters went.
    """
    module, engine = start(training, deepcompile=saves)
    train(engine, training, range(3))
    engine.save_checkpoint(folder)
    saved = seen(module, engine)
    train(engine, training, range(3, 6))
    expected = seen(module, engine)
    engine.destroy()
    module, engine = start(training, deepcompile=not saves, seed=1)
    engine.load_checkpoint(folder)
    loaded = seen(module, engine)
    train(engine, training, range(3, 6))
    actual = seen(module, engine)
    engine.destroy()
    return (
        [relative_error(*each) for each in zip(loaded, saved, strict=True)],
        [relative_error(*each) for each in zip(actual, expected, strict=True)],
        relative_error(expected[1], saved[1]),
    )


@vary("saves", ["DeepCompile", "DeepSpeed"])
def test_checkpoints_go_both_ways(ranks, tmp_path, saves):
    results = ranks(3).run(save_and_load, Training(stage=2), str(tmp_path), saves == "DeepCompile")
    for loaded, ends, moved in results:
        assert loaded == [0.0, 0.0, 0.0]
        assert moved > 1e-2
        assert max(ends) < 10 * BOUND, ends


# What is said of it --------------------------------------------------------------------------------------------------


def norm_and_warnings(training):
    """Returns the norm of the last step, about which it should be, and what ``engine.compile()`` warned of."""
    with logged(logging.WARNING) as texts:
        _, engine = start(training, deepcompile=True)
    train(engine, training, range(2))
    about = norm_of_updates(engine.optimizer._zero12.orthogonalizer.matrices)
    norm = float(engine.get_global_grad_norm())
    engine.destroy()
    return norm, about, [text for text in texts if "clipping" in text]


@vary("clipping, warned", [(1.0, True), (1000.0, False)], expects="warned")
def test_clipping_is_told_with_its_number(ranks, clipping, warned):
    """Of a model with a convolution too, which DeepSpeed without DeepCompile cannot train."""
    training = Training(convolution=True, clipping=clipping)
    for rank, (norm, about, texts) in enumerate(ranks(2).run(norm_and_warnings, training)):
        assert abs(norm / about - 1) < 0.2, (norm, about)
        assert len(texts) == (warned and rank == 0)
        assert not texts or f"about {about:.0f} in every step" in texts[0] and "gradient_clipping to 0" in texts[0]


def refused():
    """Returns what engines with Muon raise that cannot train."""

    def raised(module, optimizer=None, **config):
        zero = {"stage": 1, **config.pop("zero_optimization", {})}
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, **config}
        config["compile"] = {"deepcompile": True}
        if optimizer is None:
            config["optimizer"] = {"type": "Muon", "params": {"lr": 0.01}}
        # DeepSpeed keeps it for the life of the process.
        torch_autocast.TORCH_AUTOCAST_INITIALIZED, torch_autocast.TORCH_AUTOCAST_DTYPE = False, None
        arguments = {"model": module, "model_parameters": module.parameters(), "optimizer": optimizer}
        engine = deepspeed.initialize(**arguments, config=config)[0]
        said = outcome(engine.compile, backend="eager")
        engine.destroy()
        return said

    def layers():
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device())

    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    module = layers()
    groups = [{"params": list(module.parameters()), "use_muon": True}]
    return {
        "bias": raised(module, MuonWithAuxAdam(groups)),
        "owners": raised(nn.Linear(4, 4, bias=False).to(device())),
        "elastic": raised(layers(), zero_optimization={"elastic_checkpoint": True}),
        "offload": raised(layers(), zero_optimization={"offload_optimizer": {"device": "cpu"}}),
        "autocast": raised(layers(), torch_autocast={"enabled": True, "dtype": "float16"}),
    }


def test_refused_with_muon(ranks):
    for said in ranks(3).run(refused):
        for name, part in {
            "bias": "use_muon, and its parameter 0.bias is no matrix",
            "owners": "each of Muon's 1 matrices would be orthogonalized on 3.0 ranks on average",
            "elastic": "zero_optimization.elastic_checkpoint cuts Muon's momentum",
            "offload": "zero_optimization.offload_optimizer is not supported with Muon",
            "autocast": "set torch_autocast.dtype to bfloat16",
        }.items():
            assert said[name] and said[name].startswith("ValueError: DeepCompile with ZeRO stage 1"), said
            assert part in said[name], said

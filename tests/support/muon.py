# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Trainings with DeepSpeed's own Muon, beside DeepSpeed without DeepCompile.

Runs in the processes of ``support.pool``.
"""

import contextlib
import dataclasses
from typing import Dict, List, NamedTuple, Set
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from deepspeed.accelerator import get_accelerator
from deepspeed.compile.features.update.muon import MOMENTUM
from deepspeed.compile.zero_1_and_2 import gradient_counters, wait_for_parameters
from deepspeed.compile.zero_1_and_2.step.partitions import StepOfGroups

from support import lifetime
from support.checkpoints import in_base_order
from support.models import VOCABULARY, Stack
from support.training import (
    NOTHING,
    OVERLAPPED,
    ROUNDING,
    Case,
    as_traced,
    device,
    held,
    relative_error,
    step_in_one_pass,
    total_error,
    updates_compiled_from,
)

# With a small eps, an element whose gradient is nothing but rounding would move as far as any other.
MUON = {"muon_lr": 0.02, "adam_lr": 0.01, "eps": 0.1, "weight_decay": 0.1, "momentum": 0.9}


@dataclasses.dataclass(frozen=True)
class Training(Case):
    """What to train, and how. Of one block, a boundary between two partitions cuts a matrix."""

    model: str = "Matrices"  # a key of MODELS
    steps: int = 6
    method: str = "gram"
    depth: int = 1
    convolution: bool = False
    per_head: bool = False
    overlapped: bool = False
    aligned: bool = False  # whether there is padding between parameters, which come in round robin order
    one_pass: bool = False  # whether Adam steps partitions of any size in one pass
    compiled: bool = False  # whether Newton-Schulz is compiled, which takes long
    torch_adam: bool = False  # torch's AdamW for the other parameters, instead of Muon's own
    base_model: str = ""  # the model that DeepSpeed trains without DeepCompile, if that is another one
    optimizer: str = ""  # "grouped": of parameter groups, or "made": made by the caller, who tags no parameter
    schedule: str = ""  # "WarmupLR" of the configuration, or "LambdaLR" of torch


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


class Matrices(nn.Module):
    """Wide, tall and square matrices, of which DeepSpeed leaves embedding and head to Adam."""

    def __init__(self, depth, convolution, width=12):
        super().__init__()
        self.config = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": width // 4}
        self.config = type("Config", (), self.config)()
        self.body = Stack(lambda: Block(width), depth, width, VOCABULARY)
        self.convolution = nn.Conv2d(width, width, (3, 1), padding=(1, 0)) if convolution else None
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.body(ids)
        if self.convolution is not None:
            x = x + self.convolution(x.transpose(1, 2).unsqueeze(-1)).squeeze(-1).transpose(1, 2)
        return F.cross_entropy(self.lm_head(x).flatten(0, 1), ids.flatten())


class Frozen(Matrices):
    """Some matrices and an embedding are frozen."""

    def __init__(self, depth, convolution):
        super().__init__(depth, convolution)
        for module in (self.body.embedding, self.body.layers[0].up, self.body.layers[-1].q_proj):
            module.requires_grad_(False)


class Tied(Matrices):
    """Embedding and head are one parameter."""

    def __init__(self, depth, convolution):
        super().__init__(depth, convolution)
        self.lm_head.weight = self.body.embedding.weight


class Slim(Matrices):
    """Has a matrix of one row, one of one column, and one without rows."""

    def __init__(self, depth, convolution, width=12):
        super().__init__(depth, convolution, width)
        self.body.layers.append(nn.Sequential(nn.Linear(width, 1), nn.Tanh(), nn.Linear(1, width)))
        self.nothing = nn.Parameter(torch.zeros(0, width))


class Filters(nn.Module):
    """A convolution along the sequence whose filters have 3, 4 or, as a matrix, 2 dimensions."""

    def __init__(self, dims, width):
        super().__init__()
        shape = {2: (width, 3 * width), 3: (width, width, 3), 4: (width, width, 3, 1)}[dims]
        self.filters = nn.Parameter(torch.randn(shape) / width)

    def forward(self, x):
        return x + F.conv1d(x.mT, self.filters.view(len(self.filters), -1, 3), padding=1).mT


class WithFilters(Matrices):
    def __init__(self, depth, convolution, dims, width=12):
        super().__init__(depth, convolution, width)
        self.body.layers.append(Filters(dims, width))


class OnlyMatrices(nn.Module):
    """Nothing is left to Adam."""

    def __init__(self, width=12):
        super().__init__()
        self.first, self.last = (nn.Linear(*sizes, bias=False) for sizes in ((VOCABULARY, width), (width, VOCABULARY)))

    def forward(self, ids):
        x = self.first(F.one_hot(ids, VOCABULARY).float())
        return F.cross_entropy(self.last(torch.tanh(x)).flatten(0, 1), ids.flatten())


class OneMatrix(OnlyMatrices):
    """The partitions of more than two ranks are smaller than its matrix."""

    def __init__(self):
        super().__init__()
        self.first.requires_grad_(False)


class NoMatrices(nn.Module):
    """Nothing is left to Muon."""

    def __init__(self, width=12):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, width), nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY)

    def forward(self, ids):
        return F.cross_entropy(self.lm_head(self.norm(self.embedding(ids))).flatten(0, 1), ids.flatten())


class OneSmallMatrix(NoMatrices):
    """The matrix lies in the first rank's partition, so that others have none."""

    def __init__(self, width=12):
        super().__init__(width)
        self.scale = nn.Linear(2, 1, bias=False)

    def forward(self, ids):
        return super().forward(ids) * (1 + self.scale.weight.square().sum())


MODELS = {
    **{model.__name__: model for model in (Matrices, Frozen, Tied, Slim)},
    "Wide": lambda *sizes: Matrices(*sizes, width=288),
    "Filters2": lambda *sizes: WithFilters(*sizes, dims=2),
    "Filters3": lambda *sizes: WithFilters(*sizes, dims=3),
    "Filters4": lambda *sizes: WithFilters(*sizes, dims=4),
    **{
        model.__name__: lambda *_, model=model: model()
        for model in (OnlyMatrices, OneMatrix, NoMatrices, OneSmallMatrix)
    },
}
# What a scheduler makes of the learning rates of the groups of matrices and of others.
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": [0.04, 0.01], "warmup_num_steps": 8}}
FACTORS = [lambda step: 0.8**step, lambda step: 1 + 0.2 * step]


def build(training, seed=0):
    torch.manual_seed(seed)
    return MODELS[training.model](training.depth, training.convolution).to(device())


def grouped(module):
    """Returns two parameter groups of a caller, with settings of their own. Each has matrices and other parameters."""
    parameters = dict(module.named_parameters())
    last = {name: parameters.pop(name) for name in list(parameters) if "layers.0" in name or "head" in name}
    return [{"params": [*parameters.values()], "lr": 0.005, "weight_decay": 0.0}, {"params": [*last.values()]}]


def made(module, tagged):
    """Returns Muon as a caller makes it, who need not know of the tags at parameters by which DeepSpeed goes."""
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    parts: Dict[bool, List[nn.Parameter]] = {True: [], False: []}
    for name, parameter in module.named_parameters():
        use_muon = parameter.dim() > 1 and "embedding" not in name and "head" not in name
        parts[use_muon].append(parameter)
        if tagged:
            parameter.use_muon = use_muon
    of_adam = {"params": parts[False], "use_muon": False, "lr": 0.01, "eps": 0.1}
    return MuonWithAuxAdam([of_adam, {"params": parts[True], "use_muon": True, "lr": 0.02}])


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
    if training.base_model and not deepcompile:
        training = dataclasses.replace(training, model=training.base_model)
    module = build(training, seed)
    arguments = {"model_parameters": grouped(module) if training.optimizer == "grouped" else module.parameters()}
    config = {
        "zero_optimization": {"parameter_alignment": training.aligned, "round_robin_gradients": training.aligned},
        **(OVERLAPPED if training.overlapped and deepcompile else {}),
        **(training.config or {}),
    }
    if training.optimizer == "made":
        arguments = {"optimizer": made(module, tagged=not deepcompile)}
    else:
        params = {"ns_method": training.method, "per_head_muon": training.per_head, "torch_adam": training.torch_adam}
        config["optimizer"] = {"type": "Muon", "params": {**MUON, **params}}
    if training.schedule == "WarmupLR":
        config["scheduler"] = WARMUP
    elif training.schedule:
        arguments["lr_scheduler"] = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, FACTORS)
    case = dataclasses.replace(training, config=config, deepcompile=deepcompile)
    engine = lifetime.start(case, module, **arguments).engine
    if deepcompile and training.one_pass:
        step_in_one_pass(engine)
    return module, engine


def step(engine, training, ids):
    """Trains on a micro-batch."""
    loss = engine(ids)
    # DeepSpeed without DeepCompile updates matrices behind the backward.
    with contextlib.nullcontext() if training.compiled else torch.compiler.set_stance("force_eager"):
        engine.backward(loss)
        engine.step()


def train(engine, training, steps):
    """Trains, and returns the learning rates of the parameter groups after each step."""
    rates = []
    with products_in_fp32():
        for number in steps:
            for micro_step in range(training.accumulation):
                seed = 1000 * number + 100 * micro_step + dist.get_rank()
                generator = torch.Generator().manual_seed(seed)
                step(engine, training, torch.randint(0, VOCABULARY, (2, 5), generator=generator).to(device()))
            rates.append([group["lr"] for group in engine.optimizer.param_groups])
    return rates


def momenta(engine):
    """Returns the momentum of each parameter group that has one, of this rank."""
    inner = engine.optimizer.optimizer
    states = [inner.state[master] for master in engine.optimizer.single_partition_of_fp32_groups]
    return [state[MOMENTUM] for state in states if MOMENTUM in state]


def seen(module, engine):
    """Returns parameters, master weights and momentum of this rank."""
    if engine.optimizer.__class__.__name__.startswith("StepLocal"):
        wait_for_parameters(engine)
    found = enumerate(engine.optimizer.single_partition_of_fp32_groups)
    masters = [in_base_order(engine.optimizer, group, master.detach()) for group, master in found]
    # As vectors, because the base's model may have another shape for them.
    return (
        [parameter.detach().float().flatten().clone() for parameter in module.parameters()],
        masters,
        [momentum.clone() for momentum in momenta(engine)],
    )


class Beside(NamedTuple):
    """A training beside DeepSpeed without DeepCompile."""

    parameters: float  # relative errors
    momentum: float
    norm: float  # of the last step
    moved: float  # how far parameters went
    held: Dict[str, int]  # of gradients, after the last step
    owners: List[int]  # of each matrix
    steps: Set[str]  # the kinds of steps that partitions take
    rates: List[List[float]]  # learning rates of the groups after each step
    rates_of_base: List[List[float]]


def train_beside(training):
    with updates_compiled_from(16), as_traced(training.one_pass):
        return _train_beside(training)


def _train_beside(training):
    ends, norms, rates = [], [], []
    for deepcompile in (False, True):
        module, engine = start(training, deepcompile)
        rates.append(train(engine, training, range(training.steps)))
        ends.append(seen(module, engine))
        if training.schedule == "LambdaLR":
            assert engine.optimizer.optimizer._opt_called, "the scheduler was not told of the steps, and would warn"
        norms.append(float(engine.get_global_grad_norm()))
        if deepcompile:
            after = held(gradient_counters(engine))
            transform = engine.optimizer._deepcompile.transform
            matrices = {} if transform is None else transform.matrices
            steps = StepOfGroups(engine.optimizer, [None] * len(engine.optimizer.bit16_groups))._steps
            owners = [len(matrix.owners) for group in matrices.values() for matrix in group]
        engine.destroy()
    (expected, _, momentum), (actual, _, own_momentum) = ends
    before = [parameter.detach().float().flatten() for parameter in build(training).parameters()]
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
        rates[1],
        rates[0],
    )


def check(results, dtype="fp32"):
    for result in results:
        assert result.moved > 1e-2, result
        assert result.parameters < ROUNDING[dtype], result
        assert result.momentum < 10 * ROUNDING[dtype], result
        assert result.norm < 10 * ROUNDING[dtype], result
        assert result.held == NOTHING
    return results

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Random small models under random options, described by data, and how the ranks train them beside a plain loop."""

import contextlib
import copy
import dataclasses
from typing import Optional, Tuple

import torch
import torch._functorch.config
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from deepspeed.compile.gradient_partition import gradient_counters
from deepspeed.compile.parameter_gather import wait_for_parameters
from deepspeed.utils import safe_get_full_fp32_param

from support.faults import Injected, in_backward, raise_injected, strike
from support.models import VOCABULARY, Block, double
from support.training import (
    Case,
    average_gradients,
    batch,
    device,
    held,
    make_engine,
    make_optimizer,
    parameter_groups,
    relative_error,
    total_error,
)

# How it is said which micro-batches belong to a step.
STEPS = ("counted", "boundary", "no_sync", "coalesce_grad_reduction")
EVALUATIONS = (None, "no_grad", "inference_mode", "in training mode", "with gradients")
KINDS = ("linear", "block", "norm", "gain", "empty", "scalar", "sum of two")


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a model's body; it maps [batch, length, width] to the same.

    Attributes:
        kind: one of ``KINDS``.
        repeats: how many modules of the kind, in a ModuleList, one after the other.
        like: None, or which of the pieces before lends its modules, counted from 0 and modulo their number.
        compiled: whether the compiler may look into it.
        breaks: whether the graph breaks behind each module.
        checkpointed: None, or whether activations are checkpointed reentrantly.
        skipped: whether it is left out in odd steps.
        frozen: whether its first parameter is.
        hooked: whether a hook doubles its last parameter's gradient.
    """

    kind: str = "linear"
    repeats: int = 1
    like: Optional[int] = None
    compiled: bool = True
    breaks: bool = False
    checkpointed: Optional[bool] = None
    skipped: bool = False
    frozen: bool = False
    hooked: bool = False


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A model and how it is trained; ``docs/options.md`` has the options.

    Attributes:
        lengths: of the sequences, in turn.
        evaluates: how the model is called between micro-batches: one of ``EVALUATIONS``.
        losses: how many a micro-batch has, with a backward each.
        together: whether they have one backward.
        twice: whether each backward is run two times.
        says: who says which micro-batches belong to a step: DeepSpeed ("counted"), or its caller by one of ``STEPS``.
        raises: whether the second step's last micro-batch raises in its backward, and the step begins anew.
    """

    pieces: Tuple[Piece, ...] = (Piece(),)
    width: int = 4
    tied: bool = False
    unused: bool = False
    body_within: bool = False
    stage: int = 1
    accumulation: int = 1
    backend: str = "eager"
    bucket: int = 150
    groups: int = 1
    clipping: float = 0.0
    round_robin: bool = False
    overlap_comm: bool = True
    regional: Optional[bool] = None
    overlap_gather: bool = False
    lengths: Tuple[int, ...] = (4,)
    evaluates: Optional[str] = None
    direct: bool = False
    losses: int = 1
    together: bool = False
    twice: bool = False
    dtype: str = "fp32"
    says: str = "counted"
    raises: bool = False
    steps: int = 3


class Gain(nn.Module):
    """Multiplies by a parameter of the given shape and adds the sum of its elements."""

    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))

    def forward(self, x):
        return x * self.weight if self.weight.numel() else x + self.weight.sum()


class SumOfTwo(nn.Module):
    """Two parameters with one gradient between them."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x + (self.first + self.second)


MAKE = {
    "linear": lambda width: nn.Linear(width, width),
    "block": Block,
    "norm": nn.LayerNorm,
    "gain": Gain,
    "empty": lambda width: Gain(0, 3),
    "scalar": lambda width: Gain(1),
    "sum of two": SumOfTwo,
}


class Body(nn.Module):
    """The embedding and the pieces of a recipe."""

    def __init__(self, recipe):
        super().__init__()
        self.recipe = recipe
        self.embedding = nn.Embedding(VOCABULARY, recipe.width)
        # Aliases are pieces too, so that their parameters are registered once.
        self.lists = nn.ModuleList()
        for index, piece in enumerate(recipe.pieces):
            if piece.like is not None and index > 0:
                self.lists.append(self.lists[piece.like % index])
                continue
            modules = nn.ModuleList(MAKE[piece.kind](recipe.width) for _ in range(piece.repeats))
            if piece.frozen:
                next(modules.parameters()).requires_grad_(False)
            self.lists.append(modules)

    def forward(self, ids, skip=False):
        x = self.embedding(ids)
        for piece, modules in zip(self.recipe.pieces, self.lists):
            if skip and piece.skipped:
                continue
            for module in modules:
                run = self.in_graph if piece.compiled else self.eagerly
                x = run(piece, module, x)
                if piece.breaks:
                    torch._dynamo.graph_break()
        return self.strike(x) if self.recipe.raises else x

    @torch.compiler.disable
    def strike(self, x):
        return strike(x)

    def in_graph(self, piece, module, x):
        if piece.checkpointed is None:
            return torch.tanh(x + module(x))
        return torch.tanh(x + checkpoint(module, x, use_reentrant=piece.checkpointed))

    @torch.compiler.disable
    def eagerly(self, piece, module, x):
        return self.in_graph(piece, module, x)


class FromRecipe(nn.Module):
    """``forward(ids)`` returns the loss of predicting the ids."""

    def __init__(self, recipe):
        super().__init__()
        self.body = Body(recipe)
        self.head = nn.Linear(recipe.width, VOCABULARY, bias=False)
        if recipe.tied:
            self.head.weight = self.body.embedding.weight
        if recipe.unused:
            self.unused = nn.Parameter(torch.ones(5))

    def forward(self, ids, skip=False):
        return F.cross_entropy(self.head(self.body(ids, skip)).flatten(0, 1), ids.flatten())


class OneModule(FromRecipe):
    """The same, but the pieces are called by the model itself."""

    def forward(self, ids, skip=False):
        x = Body.forward(self.body, ids, skip)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def build(recipe):
    torch.manual_seed(0)
    return (FromRecipe if recipe.body_within else OneModule)(recipe).to(device())


def add_hooks(module):
    """Tensor hooks are not copied with a module."""
    for piece, modules in zip(module.body.recipe.pieces, module.body.lists):
        last = [parameter for parameter in modules.parameters() if parameter.requires_grad][-1:]
        if piece.hooked and piece.like is None and last:
            last[0].register_hook(double)


def as_case(recipe, module, deepcompile):
    # DeepSpeed takes no parameter group without elements.
    groups = parameter_groups(module, recipe.groups)
    have_elements = all(any(parameter.numel() for parameter in group["params"]) for group in groups)
    compile_options = {} if recipe.regional is None else {"regional_compilation": recipe.regional}
    if recipe.overlap_gather:
        compile_options["overlap_param_gather"] = True
    return Case(
        stage=recipe.stage,
        accumulation=recipe.accumulation,
        backend=recipe.backend,
        bucket=recipe.bucket,
        groups=recipe.groups if have_elements else 1,
        clipping=recipe.clipping,
        dtype=recipe.dtype,
        deepcompile=deepcompile,
        config={
            "zero_optimization": {
                "round_robin_gradients": recipe.round_robin,
                "overlap_comm": recipe.overlap_comm,
            },
            "compile": compile_options,
        },
    )


def train(recipe, deepcompile=True):
    """Trains both; returns errors of the parameters, how far they moved, and what was held after steps.

    Without DeepCompile nothing is made to raise.
    """
    torch._dynamo.reset()
    # A backward whose graph gives its buffers away cannot run twice.
    torch._functorch.config.donated_buffer = not recipe.twice
    module, rank = build(recipe), dist.get_rank()
    case = as_case(recipe, module, deepcompile)
    if recipe.dtype != "fp32":
        # The engine begins with rounded parameters, and so shall the plain loop.
        module.to({"bf16": torch.bfloat16, "fp16": torch.float16}[recipe.dtype]).float()
    before, plain = copy.deepcopy(module), copy.deepcopy(module)
    add_hooks(module)
    add_hooks(plain)
    engine = make_engine(module, case)
    optimizer = make_optimizer(plain, case)
    after_steps = []
    try:
        for step in range(recipe.steps):
            length = recipe.lengths[(step + rank) % len(recipe.lengths)]
            micro_batches = [batch(step, micro_step, rank, length) for micro_step in range(recipe.accumulation)]
            if recipe.raises and step == 1 and deepcompile:
                _raise(recipe, engine, step, micro_batches)
            _step(recipe, engine, step, micro_batches)
            for ids in micro_batches:
                for each in _inputs(recipe, ids):
                    (plain(each, step % 2 == 1) / recipe.losses / recipe.accumulation).backward()
            average_gradients(plain)
            if recipe.clipping:
                trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
                torch.nn.utils.clip_grad_norm_(trained, recipe.clipping)
            optimizer.step()
            optimizer.zero_grad()
            if deepcompile:
                after_steps.append(sum(held(gradient_counters(engine)).values()))
        wait_for_parameters(engine)
        actual, expected = list(module.parameters()), list(plain.parameters())
        if recipe.dtype != "fp32":
            # Frozen and empty ones have no master.
            has_master = [each.requires_grad and each.numel() > 0 for each in actual]
            actual = [safe_get_full_fp32_param(each) if has else each for each, has in zip(actual, has_master)]
        return {
            "error": relative_error(actual, expected),
            "total error": total_error(actual, expected),
            "moved": relative_error(module.parameters(), before.parameters()),
            "total moved": total_error(plain.parameters(), before.parameters()),
            "held": after_steps,
        }
    finally:
        torch._functorch.config.donated_buffer = True
        engine.destroy()


def _step(recipe, engine, step, micro_batches):
    if recipe.says == "coalesce_grad_reduction":
        with engine.coalesce_grad_reduction():
            for ids in micro_batches:
                _micro_batch(recipe, engine, step, ids)
    else:
        for index, ids in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            if recipe.says != "counted":
                engine.set_gradient_accumulation_boundary(last)
            with engine.no_sync() if recipe.says == "no_sync" and not last else contextlib.nullcontext():
                _micro_batch(recipe, engine, step, ids)
            if recipe.says == "counted" or (recipe.says == "boundary" and not last):
                engine.step()
    if recipe.says != "counted":
        engine.set_gradient_accumulation_boundary(True)
        engine.step()


def _raise(recipe, engine, step, micro_batches):
    """The micro-batches of a step, of which the last raises: the step begins anew."""
    for ids in micro_batches[:-1]:
        _micro_batch(recipe, engine, step, ids)
        engine.step()
    in_backward.happen = raise_injected
    try:
        _micro_batch(recipe, engine, step, micro_batches[-1])
    except Injected:
        return
    raise AssertionError("nothing was raised")


def _inputs(recipe, ids):
    """What is input for each loss of a micro-batch."""
    return [ids.roll(number, 1) for number in range(recipe.losses)]


def _micro_batch(recipe, engine, step, ids):
    losses = []
    for each in _inputs(recipe, ids):
        losses.append(engine(each, step % 2 == 1) / recipe.losses)
        if not recipe.together:
            _backward(recipe, engine, losses.pop())
    if losses:
        _backward(recipe, engine, sum(losses))
    if recipe.evaluates is not None:
        _evaluate(recipe, engine, ids)


def _backward(recipe, engine, loss):
    loss = loss / 2 if recipe.twice else loss
    for retain_graph in [True, False] if recipe.twice else [False]:
        if recipe.direct:
            loss = engine.scale(loss) if recipe.dtype == "fp16" else loss
            loss.backward(retain_graph=retain_graph)
        else:
            engine.backward(loss, retain_graph=retain_graph)


def _evaluate(recipe, engine, ids):
    if recipe.evaluates != "in training mode":
        engine.eval()
    mode = {"inference_mode": torch.inference_mode, "with gradients": torch.enable_grad}
    with mode.get(recipe.evaluates, torch.no_grad)():
        engine(ids)
    engine.train()

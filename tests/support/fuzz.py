# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""How the ranks train a random model under random options, which ``recipes.py`` describes, beside a plain loop."""

import contextlib
import copy
import dataclasses
from typing import List

import torch
import torch._functorch.config
import torch._inductor.config
import torch.distributed as dist

from deepspeed.compile.zero12 import gradient_counters, wait_for_parameters
from deepspeed.utils import safe_get_full_fp32_param

from support.faults import Injected, in_backward, raise_injected
from support.recipes import add_hooks, build
from support.training import (
    Case,
    average_gradients,
    batch,
    held,
    make_engine,
    make_optimizer,
    parameter_groups,
    relative_error,
    total_error,
)

# How a micro-batch's gradients are dropped.
DROPS = {
    "engine": lambda engine: engine.zero_grad(),
    "optimizer": lambda engine: engine.optimizer.zero_grad(),
    "module": lambda engine: engine.module.zero_grad(),
    "by hand": lambda engine: [setattr(parameter, "grad", None) for parameter in engine.module.parameters()],
}


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
    plain_loop = _PlainLoop(recipe, plain, make_optimizer(plain, case))
    after_steps = []
    try:
        # Generated code shall draw the random numbers that torch draws.
        with torch._inductor.config.patch(fallback_random=True):
            for step in range(recipe.steps):
                micro_batches = [_micro_batch_of(recipe, step, index) for index in range(recipe.accumulation)]
                if recipe.alone and step == 0 and recipe.evaluates is not None and rank == 0:
                    _evaluate(recipe, engine, micro_batches[0])
                if recipe.raises and step == 1 and deepcompile:
                    _raise(recipe, engine, micro_batches)
                if recipe.drops is not None and step == recipe.steps - 1:
                    _drop(recipe, engine, micro_batches[0])
                _step(recipe, engine, micro_batches)
                plain_loop.step(micro_batches)
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


@dataclasses.dataclass
class MicroBatch:
    """What a rank is given; ``inputs`` has the ids for each loss."""

    step: int
    index: int
    ids: torch.Tensor
    inputs: List[torch.Tensor]

    def forward(self, model, number):
        """Returns the loss of that number, from the random numbers that it has in whichever loop."""
        torch.manual_seed(((self.step * 10 + self.index) * 10 + number) * 10 + dist.get_rank())
        return model(self.inputs[number], self.step % 2 == 1) / len(self.inputs)


def _micro_batch_of(recipe, step, index):
    rank = dist.get_rank()
    ids = batch(step, index, rank, recipe.lengths[(step + rank) % len(recipe.lengths)])
    if recipe.uneven and step % 2 == 1 and rank == 0:
        ids = ids[:1]
    return MicroBatch(step, index, ids, [ids.roll(number, 1) for number in range(recipe.losses)])


class _PlainLoop:
    def __init__(self, recipe, module, optimizer):
        self.recipe, self.module, self.optimizer = recipe, module, optimizer
        self.trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.masters = [parameter.detach().clone() for parameter in self.trained]

    def step(self, micro_batches):
        for micro_batch in micro_batches:
            for number in range(self.recipe.losses):
                (micro_batch.forward(self.module, number) / self.recipe.accumulation).backward()
            if self.recipe.clips and micro_batch is not micro_batches[-1]:
                clip_own(self.trained)
        average_gradients(self.module)
        if self.recipe.clipping:
            torch.nn.utils.clip_grad_norm_(self.trained, self.recipe.clipping)
        # What a forward changed in parameters is gone, because the optimizer has its own copy of each.
        for parameter, master in zip(self.trained, self.masters, strict=True):
            parameter.data.copy_(master)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.masters = [parameter.detach().clone() for parameter in self.trained]


def clip_own(parameters):
    torch.nn.utils.clip_grad_norm_(parameters, 0.05)


def _step(recipe, engine, micro_batches):
    if recipe.says == "coalesce_grad_reduction":
        with engine.coalesce_grad_reduction():
            for micro_batch in micro_batches:
                _run(recipe, engine, micro_batch)
    else:
        for micro_batch in micro_batches:
            last = micro_batch is micro_batches[-1]
            if recipe.says != "counted":
                engine.set_gradient_accumulation_boundary(last)
            with engine.no_sync() if recipe.says == "no_sync" and not last else contextlib.nullcontext():
                _run(recipe, engine, micro_batch)
            if recipe.says == "counted" or (recipe.says == "boundary" and not last):
                engine.step()
            if recipe.clips and not last:
                clip_own(engine.module.parameters())
    if recipe.says != "counted":
        engine.set_gradient_accumulation_boundary(True)
        engine.step()


def _raise(recipe, engine, micro_batches):
    """The micro-batches of a step, of which the last raises: the step begins anew."""
    for micro_batch in micro_batches[:-1]:
        _run(recipe, engine, micro_batch)
        engine.step()
    in_backward.happen = raise_injected
    try:
        _run(recipe, engine, micro_batches[-1])
    except Injected:
        return
    raise AssertionError("nothing was raised")


def _drop(recipe, engine, micro_batch):
    """A micro-batch that is not counted and whose gradients are dropped."""
    if recipe.says != "counted":
        engine.set_gradient_accumulation_boundary(recipe.accumulation == 1)
    with engine.no_sync() if recipe.says == "no_sync" else contextlib.nullcontext():
        _run(recipe, engine, micro_batch)
    DROPS[recipe.drops](engine)


def _run(recipe, engine, micro_batch):
    # Where DeepSpeed counts, a forward behind a backward at the boundary begins the step anew.
    waiting, forwards_first = [], recipe.together or recipe.says == "counted"
    for number in range(recipe.losses):
        waiting.append(micro_batch.forward(engine, number))
        if not forwards_first:
            _backward(recipe, engine, waiting.pop())
    for loss in [sum(waiting)] if recipe.together else waiting:
        _backward(recipe, engine, loss)
    if recipe.evaluates is not None and (not recipe.alone or dist.get_rank() == 0):
        _evaluate(recipe, engine, micro_batch)


def _backward(recipe, engine, loss):
    loss = loss / 2 if recipe.twice else loss
    for retain_graph in [True, False] if recipe.twice else [False]:
        if recipe.direct:
            loss = engine.scale(loss) if recipe.dtype == "fp16" else loss
            loss.backward(retain_graph=retain_graph)
        else:
            engine.backward(loss, retain_graph=retain_graph)


def _evaluate(recipe, engine, micro_batch):
    if recipe.evaluates != "in training mode":
        engine.eval()
    mode = {"inference_mode": torch.inference_mode, "with gradients": torch.enable_grad}
    with mode.get(recipe.evaluates, torch.no_grad)():
        engine(micro_batch.ids)
    engine.train()

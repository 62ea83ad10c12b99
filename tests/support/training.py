# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Trains a model under DeepCompile and in a plain loop that averages gradients over ranks, side by side.

Runs in the processes of ``support.pool``.
"""

import contextlib
import copy
import dataclasses
import math
import sys
from typing import Any, Dict, List, NamedTuple, Optional
from unittest import mock

import torch
import torch.distributed as dist
from torch._inductor import compile_fx

import deepspeed
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from deepspeed.compile.parts import NAMES
from deepspeed.compile.zero_1_and_2 import gradient_counters, wait_for_parameters
from deepspeed.compile.zero_1_and_2.engine import state
from deepspeed.runtime import torch_autocast

from support.models import CASES, OTHER_CASES, VOCABULARY

# Bounds the relative error of parameters, gradients and losses between an engine and a plain loop after a few steps in
# fp32, where only sums in another order round otherwise. ``check_trained`` asserts that training moved the parameters
# a hundred times as far, so a gradient that is lost or added twice exceeds the bound.
BOUND = 1e-5
# What one rounding of a format makes of the distance that parameters have moved, by the name of the format.
ROUNDING = {"fp32": BOUND, "bf16": 2**-8, "fp16": 2**-11}
# Each block is a graph of its own.
REGIONAL = {"compile": {"regional_compilation": True}}
# Parameters are gathered while the next forward runs.
OVERLAPPED = {"compile": {"regional_compilation": True, "overlap_param_gather": True}}


@dataclasses.dataclass(frozen=True)
class Case:
    """What to train, and how."""

    model: str = "OneGraph"
    stage: int = 1
    accumulation: int = 1
    backend: str = "eager"
    steps: int = 3
    dtype: str = "fp32"
    bucket: int = 150  # elements
    clipping: float = 0.0
    groups: int = 1
    adam: bool = False  # AdamW instead of SGD
    eps: float = 0.1  # of AdamW
    offloaded: bool = False  # whether the optimizer is on the host
    skip_on_odd_steps: bool = False
    vary_length: bool = False
    evaluate_between: bool = False
    config: Optional[Dict[str, Any]] = None
    compile_kwargs: Optional[Dict[str, Any]] = None
    deepcompile: bool = True


def device():
    return torch.device(get_accelerator().current_device_name())


@contextlib.contextmanager
def default_dtype(dtype):
    """Within it tensors that are made without a dtype get this one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build(case, seed=0):
    torch.manual_seed(seed)
    with default_dtype(torch.float32):
        return {**CASES, **OTHER_CASES}[case.model]().to(device())


def parameter_groups(module, count):
    """Splits trainable parameters into groups; every ``count``-th goes to the same one."""
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return [{"params": trainable[first::count]} for first in range(count)]


def make_optimizer(module, case):
    groups = parameter_groups(module, case.groups)
    if case.adam:
        # With a small eps, a gradient that is rounding alone would move a parameter as far as any other.
        return torch.optim.AdamW(groups, lr=0.02, eps=case.eps, weight_decay=0.1)
    return torch.optim.SGD(groups, lr=0.2, momentum=0.5)


def low_precision(dtype, loss_scale_window):
    """Returns the section of ``ds_config`` for a dtype, as a dict; empty for fp32."""
    if dtype == "fp16":
        # DeepSpeed declines fp16 on CPUs without instructions for it; torch computes it there all the same.
        get_accelerator().is_fp16_supported = lambda: True
        return {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": loss_scale_window}}
    return {"bf16": {"enabled": True}} if dtype == "bf16" else {}


def offload(config):
    """Makes a configuration keep the optimizer on the host, also one that is not DeepSpeed's own."""
    config["zero_optimization"].setdefault("offload_optimizer", {"device": "cpu"})
    config["zero_force_ds_cpu_optimizer"] = False


def forget_autocast():
    """DeepSpeed keeps an engine's autocast section for the life of the process, and processes serve many tests."""
    torch_autocast.TORCH_AUTOCAST_INITIALIZED, torch_autocast.TORCH_AUTOCAST_DTYPE = False, None


def make_engine(module, case, **arguments):
    """Returns an engine, compiled if the case asks for that.

    ``arguments`` of ``deepspeed.initialize()``, if not only the case's optimizer.
    """
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": case.clipping,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": case.stage, "reduce_bucket_size": case.bucket},
        "compile": {"deepcompile": case.deepcompile},
    }
    config.update(low_precision(case.dtype, loss_scale_window=4))
    for section, options in (case.config or {}).items():
        config[section] = {**config.get(section, {}), **options} if isinstance(options, dict) else options
    if case.offloaded:
        offload(config)
    forget_autocast()
    arguments = arguments or {"optimizer": make_optimizer(module, case)}
    with small_shards(config):
        engine = deepspeed.initialize(model=module, config=config, **arguments)[0]
        if case.deepcompile:
            engine.compile(backend=case.backend, compile_kwargs=dict(case.compile_kwargs or {}))
    return engine


@contextlib.contextmanager
def small_shards(config):
    """Within it engines cut small parameters too, of which otherwise the first rank would have all elements.

    A block of 8-bit states needs larger shards: an engine that has or loads these names the option.
    """
    # Without this fork, as in tests of the base, there is no layout.
    layout = sys.modules.get("deepspeed.compile.zero_1_and_2.layout")
    if layout is None or "optimizer_states" in config.get("compile", {}):
        yield
        return
    with mock.patch.object(layout, "SHARD_MULTIPLE", 16):
        yield


class Started(NamedTuple):
    """A module and its engine, which has not trained yet."""

    module: torch.nn.Module
    engine: DeepSpeedEngine


class Pair(NamedTuple):
    """An engine and a plain loop that begin with the same parameters."""

    module: torch.nn.Module
    engine: DeepSpeedEngine
    plain: torch.nn.Module
    optimizer: torch.optim.Optimizer  # of the plain loop


@contextlib.contextmanager
def ranges_of(numel):
    """Within it an optimizer is stepped in ranges of so many elements, on any device."""
    # The core's tests run where this part was removed.
    if "features.update" not in NAMES:
        yield
        return
    from deepspeed.compile.features.update import own_ranges

    with mock.patch.multiple(own_ranges, RANGE_NUMEL=numel, RANGE_NUMEL_ON_HOST=numel):
        yield


@contextlib.contextmanager
def updates_compiled_from(numel, large=2**22):
    """Within it, Adam steps partitions of so many elements in one pass, which reads ``large`` gradients in place."""
    # The core's tests run where this part was removed.
    if "features.update" not in NAMES:
        yield
        return
    from deepspeed.compile.features.update import adam
    from deepspeed.compile.zero_1_and_2.step import partition_gradient, partitions

    with (
        mock.patch.object(adam, "LEAST_NUMEL", numel),
        mock.patch.object(partition_gradient, "IN_PLACE_NUMEL", large),
        mock.patch.object(partitions, "SMALL_NUMEL", numel),
    ):
        yield


def step_in_one_pass(engine):
    """Makes an engine step Adam as with the backend "inductor", which would take long to compile the model."""
    if "features.update" not in NAMES:
        return
    from deepspeed.compile.features.update.feature import Update

    deepcompile = engine.optimizer._deepcompile
    deepcompile.find(Update).in_one_pass = True
    # Called through its module, where a test may have other rules.
    deepcompile.rules = state.rules_of(deepcompile.features)


def as_traced(runs):
    """Within it, a compiled pass runs as it was traced, without Inductor, if ``runs``."""
    if not runs:
        return contextlib.nullcontext()
    # So does what an optimizer itself compiles.
    return mock.patch.object(compile_fx, "compile_fx", lambda graph, *_, **__: graph)


@contextlib.contextmanager
def compile_backend(name):
    """Within it this is the backend with which engines compile themselves."""
    accelerator = get_accelerator()
    before = accelerator.get_compile_backend()
    accelerator.set_compile_backend(name)
    try:
        yield
    finally:
        accelerator.set_compile_backend(before)


def engine_by_configuration(module, deepcompile, lr=0.1, momentum=0.0, **more):
    """Returns an engine whose ``compile()`` nobody has called. ``more`` are sections of its configuration."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1},
        **more,
        "compile": {"deepcompile": deepcompile, **more.get("compile", {})},
    }
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=lr, momentum=momentum)
    # DeepSpeed takes no other stage without an optimizer.
    optimizer = None if config["zero_optimization"]["stage"] == 0 else optimizer
    return deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]


def batch(step, micro_step, rank, length):
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro_step + rank)
    return torch.randint(0, VOCABULARY, (2, length), generator=generator).to(device())


def average_gradients(module):
    """What data parallelism means: the mean over ranks; an unused parameter counts as zero."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            # NCCL takes contiguous tensors alone.
            gradient = parameter.grad.contiguous()
            dist.all_reduce(gradient)
            parameter.grad = gradient / dist.get_world_size()


def step_plain(plain, optimizer, clipping=0.0):
    """A plain loop's step: the optimizer gets the mean of the ranks' gradients, which are then dropped."""
    average_gradients(plain)
    if clipping:
        torch.nn.utils.clip_grad_norm_(
            [parameter for parameter in plain.parameters() if parameter.requires_grad], clipping
        )
    optimizer.step()
    optimizer.zero_grad()


def train_plain(plain, optimizer, step, accumulation=1):
    """Trains a plain loop for one step, on this rank's micro-batches of it."""
    for micro_step in range(accumulation):
        (plain(batch(step, micro_step, dist.get_rank(), 4)) / accumulation).backward()
    step_plain(plain, optimizer)


def relative_error(actual, expected):
    """Largest ||a - e|| / ||e|| over pairs of tensors; where e is zero, ||a||."""
    worst = 0.0
    for a, e in zip(actual, expected, strict=True):
        difference = (a.detach().double() - e.detach().double()).norm()
        norm = e.detach().double().norm()
        error = float(difference / norm) if norm > 0 else float(difference)
        # max() would pass over a NaN.
        worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


def total_error(actual, expected):
    """||a - e|| / ||e|| over all tensors together: rounding is large in a tensor that is near zero itself."""
    pairs = [(a.detach().double(), e.detach().double()) for a, e in zip(actual, expected, strict=True)]
    return float(sum((a - e).square().sum() for a, e in pairs).sqrt() / sum(e.square().sum() for _, e in pairs).sqrt())


# What held() returns when an engine holds no gradient memory.
NOTHING = {"bound": 0, "on_host": 0, "pending": 0, "bucket": 0, "unreduced": 0}


def held(counters):
    """What of the counters must be zero between steps."""
    return {name: counters[name] for name in NOTHING}


@dataclasses.dataclass(frozen=True)
class Trained:
    """What came of a case that was trained beside a plain loop.

    Attributes:
        error: the largest relative error of a parameter, against the plain loop's.
        moved: how far training moved the parameters, computed as ``error`` against the initial ones.
        held: what was held after each step. Empty without DeepCompile.
        counters: of the last backward. Empty without DeepCompile.
        loss: of the last micro-batch.
    """

    error: float
    moved: float
    held: List[Dict[str, int]]
    counters: Dict[str, Any]
    loss: float


def check_trained(results, bound=BOUND):
    """Asserts that each of ``results`` trained as the plain loop and released its gradients; returns the results."""
    for result in results:
        assert result.error < bound, result
        assert result.moved > 1e-3, "the parameters hardly changed, so agreement shows nothing"
        assert all(after == NOTHING for after in result.held), result.held
    return results


def train_beside_plain_loop(case):
    """Trains the engine of a case and a plain loop; returns what came of it as :class:`Trained`."""
    torch._dynamo.reset()
    rank = dist.get_rank()
    module = build(case)
    plain = copy.deepcopy(module)
    engine = make_engine(module, case)
    plain_optimizer = make_optimizer(plain, case)
    held_after_steps, counters = [], {}
    for step in range(case.steps):
        length = 4 + (step + rank) % 3 if case.vary_length else 4
        skip = case.skip_on_odd_steps and step % 2 == 1
        for micro_step in range(case.accumulation):
            ids = batch(step, micro_step, rank, length)
            loss = engine(ids, skip)
            engine.backward(loss)
            if case.deepcompile:
                counters = gradient_counters(engine)
            engine.step()
            (plain(ids, skip) / case.accumulation).backward()
            if case.evaluate_between:
                engine.eval()
                with torch.no_grad():
                    engine(ids)
                engine.train()
        step_plain(plain, plain_optimizer, case.clipping)
        if case.deepcompile:
            held_after_steps.append(held(gradient_counters(engine)))
    if case.deepcompile:
        wait_for_parameters(engine)
    trained = [p.detach().clone() for p in module.parameters()]
    result = Trained(
        error=relative_error(trained, plain.parameters()),
        moved=relative_error(trained, build(case).parameters()),
        held=held_after_steps,
        counters=counters,
        loss=float(loss.detach()),
    )
    engine.destroy()
    return result

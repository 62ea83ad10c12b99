# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What the tests of options share: a small model, and engines that are trained beside a plain loop."""

import contextlib
import copy
import dataclasses
import io
import logging
import re
from typing import List, NamedTuple, Tuple

import torch

from deepspeed.compile.zero_1_and_2 import wait_for_parameters

from support.beside import logged
from support.training import (
    BOUND,
    ROUNDING,
    Case,
    Started,
    Trained,
    batch,
    build,
    check_trained,
    make_engine,
    make_optimizer,
    relative_error,
    step_plain,
    train_beside_plain_loop,
)

# Two parameters, quickly compiled. What options do to gradients does not depend on more; layouts have their own tests.
SMALL = "FillsPartition"
# The relative error that is left where parameters are compared in their own format: twice that format's rounding.
TWICE_ROUNDED = {"fp32": BOUND, "bf16": 2 * ROUNDING["bf16"], "fp16": 2 * ROUNDING["fp16"]}
OFFLOADS = "zero_optimization.{} has no effect in this stage, only in stage 3"
# What is said of options that have a test of their own, or of the same option in another word.
ALSO_WARNED = {
    "zero_optimization.cpu_offload_param": OFFLOADS.format("cpu_offload_param"),
    "zero_optimization.ignore_unused_parameters": "zero_optimization.ignore_unused_parameters=False has no effect, "
    "because a parameter without a gradient is stepped on zeros",
}
MONITORS = {
    "without a monitor": "compile.monitor_memory=True has no effect without a monitor; enable tensorboard, "
    "csv_monitor, wandb or comet",
    "without steps": "compile.monitor_memory=True has no effect without steps_per_print; set steps_per_print",
}
# Found when a graph is compiled; tests/features/loss/test_chunked_loss.py has a model that is warned of.
ALSO_WARNED["compile.chunked_loss"] = (
    "compile.chunked_loss=True has no effect on a loss of this model, because its cross_entropy has weights, "
    "smoothed labels, or a loss for each token; it is computed in one piece"
)
# tests/features/activation_budget/test_activation_budget.py
ALSO_WARNED["compile.activation_memory_budget"] = (
    "compile.activation_memory_budget=0.5 has no effect, because torch.compile is switched off by "
    "compile_kwargs['disable'] or TORCH_COMPILE_DISABLE"
)
# tests/features/shard_parameters/test_shard_frozen.py
ALSO_WARNED["compile.shard_parameters"] = (
    "compile.shard_parameters has no effect, because no block has such parameters of its own"
)
# tests/features/update/test_muon.py, on three ranks
ALSO_WARNED["optimizer"] = (
    "each of Muon's 1 matrices takes the time and the momentum's memory of 3.0 ranks on average, because partitions "
    "are smaller than matrices; use fewer ranks, or AdamW, if that is too much"
)
ALSO_WARNED["compile.monitor_memory"] = MONITORS["without a monitor"]


def train_each_beside_plain_loop(cases):
    """Trains one case after the other; returns the results in their order."""
    return [train_beside_plain_loop(case) for case in cases]


def train_both_stages(ranks, world=2, **varied):
    """Results by stage of rank 0, after comparing every rank's parameters with the plain loop's."""
    cases = [Case(**{"model": SMALL, "steps": 2, "accumulation": 2, "stage": stage, **varied}) for stage in (1, 2)]
    results = ranks(world).run(train_each_beside_plain_loop, cases)
    for of_rank in results:
        check_trained(of_rank)
    return results[0]


class WithOutput(NamedTuple):
    trained: Trained
    output: str  # the lines that DeepSpeed logged or printed meanwhile


def train_and_collect_output(case):
    """Trains a case beside a plain loop. Collects warnings, and with ``log_level: info`` whatever DeepSpeed says."""
    level = logging.INFO if (case.config or {}).get("log_level") == "info" else logging.WARNING
    with logged(level) as texts, contextlib.redirect_stdout(io.StringIO()) as printed:
        result = train_beside_plain_loop(case)
    return WithOutput(result, "\n".join([*texts, printed.getvalue()]))


def prepare(case, module=None, **arguments):
    """Makes a module, unless one is given, and its engine, on which engine.compile() has not been called.

    ``arguments`` of ``deepspeed.initialize()``, if not only the case's optimizer.
    """
    torch._dynamo.reset()
    config = {"compile": {}, **(case.config or {})}
    config["compile"] = {"deepcompile": True, **config["compile"]}
    module = build(case) if module is None else module
    case = dataclasses.replace(case, config=config, deepcompile=False)
    return Started(module, make_engine(module, case, **arguments))


def train_prepared(case, module, engine):
    """Trains for two steps; returns the error of the parameters against a plain loop. Destroys the engine."""
    plain, rank = copy.deepcopy(module), torch.distributed.get_rank()
    plain_optimizer = make_optimizer(plain, case)
    for step in range(2):
        ids = batch(step, 0, rank, 4)
        engine.backward(engine(ids))
        engine.step()
        plain(ids).backward()
        step_plain(plain, plain_optimizer)
    wait_for_parameters(engine)
    error = relative_error(module.parameters(), plain.parameters())
    engine.destroy()
    return error


class WithWarnings(NamedTuple):
    trained: Trained
    warnings: List[Tuple[str, str]]  # the stage and the sentence of each that is about an option
    profiled: bool  # whether the flops profiler ran


def train_and_collect_warnings(case):
    """Trains a case beside a plain loop, and looks for warnings in what DeepSpeed logged."""
    from deepspeed import comm

    try:
        trained, output = train_and_collect_output(case)
    finally:
        # DeepSpeed has one logger of communication for all engines.
        comm.comm.comms_logger.enabled = False
    warnings = re.findall(r"DeepCompile with ZeRO stage (\d): (.+)", output)
    return WithWarnings(trained, warnings, "Profile Summary" in output)


def set_up_state(module, engine):
    """What ``engine.compile()`` changes of a module and of an optimizer."""
    modules = [
        (type(submodule), submodule._compiled_call_impl, len(submodule._forward_pre_hooks))
        for submodule in module.modules()
    ]
    optimizer = engine.optimizer
    return modules, type(optimizer), hasattr(optimizer, "_deepcompile"), len(optimizer._grad_acc_hooks)


def outcome(function, *args, **kwargs):
    """What a call raised, as text; None if it returned."""
    try:
        function(*args, **kwargs)
    except Exception as exception:
        return f"{type(exception).__name__}: {exception}"
    return None


def compiled_outcome(make, *args, **kwargs):
    """What making an engine or compiling it raised, as text; None if nothing did. ``make`` returns the engine."""

    def make_and_compile():
        engine = make(*args, **kwargs)
        try:
            engine.compile(backend="eager")
        finally:
            engine.destroy()

    return outcome(make_and_compile)

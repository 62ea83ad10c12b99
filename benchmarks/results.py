# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What a result holds, what stands where there is none, and how to read figures from results."""

from collections.abc import Iterable
from typing import Any, TypedDict, TypeGuard

from . import flops
from .recorder import data

PHASES = ("forward", "backward", "step")


class RankResult(TypedDict):
    """The figures of one rank. Times are in seconds, memory is in bytes.

    Attributes:
        setup_s: for building the model and wrapping it in the system.
        setup_peak: the most of the device that was allocated meanwhile. None on a CPU.
        first_step_s: the first step, which compiles.
        step_s: the median of the steps that count.
        phases_s: "forward", "backward" or "step" -> the median of its seconds in the steps that count, of all
            micro-batches. "step" is the norm, the optimizer and what of the gather is not overlapped.
        compilation_s: torch's name of a part of compilation -> its seconds. Some parts contain others.
        phases: "forward", "backward" or "step" -> {"after": allocated at its end, "peak": the most allocated in it,
            "active": the peak with what other streams still read}. On a CPU, without "active", parameters, optimizer
            states and what the step adds to them.
        reserved: the most that the CUDA allocator held of the device up to the last step whose time is taken. None on
            a CPU.
        outside: what the device had given then beside the allocator: for the CUDA context, the code of kernels, and
            NCCL; where ranks share a GPU, also the memory of the others. None on a CPU.
        most_gradients: the most bytes of gradients at any time of one step; None in a brief run.
        counters: phase -> what this fork's ``gradient_counters()`` says at its end. Empty for other systems.
        host: the most memory of the host that the process has had, while it set up and trained.
    """

    setup_s: float
    setup_peak: int | None
    first_step_s: float
    step_s: float
    phases_s: dict[str, float]
    compilation_s: dict[str, float]
    phases: dict[str, dict[str, int]]
    reserved: int | None
    outside: int | None
    most_gradients: int | None
    counters: dict[str, dict[str, int]]
    host: int


class Result(TypedDict):
    """The result of one run, as it is written to JSON. Times are in seconds; a step is as long as on its slowest rank.

    Attributes:
        run: the fields of ``settings.Settings``.
        environment: the host, its devices, and versions.
        parameters: the number of the model's parameters.
        flops_per_token: the floating-point operations of forward and backward, by the formula in flops.py.
        first_step_s: the first step, which compiles.
        step_s: the median of the steps that count.
        steps_s: every step.
        losses: every step's loss, the mean over the ranks and over the micro-batches.
        ranks: every rank's figures, in rank order.
        timelines: number of a rank, the first and the last one -> the fields of
            ``data.StepMemory`` of this fork's ``deepspeed.compile.tools.memory_picture``.
    """

    run: dict[str, Any]
    environment: dict[str, Any]
    parameters: int
    flops_per_token: int
    first_step_s: float
    step_s: float
    steps_s: list[float]
    losses: list[float]
    ranks: list[RankResult]
    timelines: dict[str, dict[str, Any]]


class NoResult(TypedDict):
    """Stands for the result of a system that was not measured.

    Attributes:
        why: the reason, as a part of a sentence.
        failed: whether that is a failure. Something that cannot be measured on this machine is none.
    """

    why: str
    failed: bool


def no_result(why: str, failed: bool = False) -> NoResult:
    """Returns what stands for a result that there is not."""
    return {"why": why, "failed": failed}


def is_measured(result: Result | NoResult) -> TypeGuard[Result]:
    """Whether this is the result of a run, rather than the reason why there is none."""
    return "why" not in result


def share_gpus(result: Result) -> bool:
    """Whether several ranks shared a GPU, so that times mean nothing."""
    where = result["environment"]
    return bool(where.get("gpus")) and where["gpus"] < where["world"]


def allocated_in(step: data.StepMemory, phase: str) -> dict[str, int]:
    """Returns how many bytes are allocated "after" the last micro-batch's ``phase``, and at the "peak" in it."""
    begin, end = step.phases[phase][-1]
    before = [bytes for bytes, second in zip(step.sums(), step.seconds) if second <= end]
    return {"after": before[-1], "peak": step.peak(begin, end).bytes}


def tokens_a_second(result: Result) -> float:
    """Returns the tokens of a second that each rank trains."""
    run = result["run"]
    return run["micro_batch"] * run["seq"] * run["accumulation"] / result["step_s"]


def mfu(result: Result) -> float | None:
    """Returns which part of its GPU's peak a rank uses, see flops.py; None where the peak is not known."""
    operations, where = result.get("flops_per_token"), result["environment"]
    return operations and flops.mfu(operations * tokens_a_second(result), where["device"], result["run"]["dtype"])


def highest(result: Result, *path: str) -> float | None:
    """Returns the highest of all ranks' figures at ``path``, or None if a rank has no such figure.

    Args:
        result: of a run.
        path: keys that lead to the figure from a rank's figures.
    """
    figures = []
    for figure in result["ranks"]:
        for name in path:
            figure = figure.get(name) if figure else None
        figures.append(figure)
    return None if any(figure is None for figure in figures) else max(figures)


def unit_of(results: Iterable[Result]) -> tuple[int, str]:
    """Returns a unit that suits the memory of all ``results``: its number of bytes, and its name."""
    most = max(highest(result, "phases", phase, "peak") for result in results for phase in PHASES)
    return (2**30, "GiB") if most >= 2**30 else (2**20, "MiB")


def headline(result: Result, with_kept: bool = True) -> str:
    """Returns what was trained, on what and when, for a title; ``with_kept``: and whether layers were checkpointed."""
    run, where = result["run"], result["environment"]
    parts = [run["shape"], *([f"{run['layers']} layers"] if run["layers"] else []), _devices(result)]
    parts += [f"sequence {run['seq']}", f"micro-batch {run['micro_batch']}"]
    parts += [f"accumulation {run['accumulation']}"] if run["accumulation"] > 1 else []
    parts += [f"float8 {run['float8']}"] if run.get("float8") else []
    if with_kept:
        parts.append("every layer checkpointed" if run["checkpoint"] else "no checkpointing")
    return ", ".join([*parts, where["date"]])


def _devices(result: Result) -> str:
    """Returns how many of which devices there were."""
    where = result["environment"]
    if share_gpus(result):
        return f"{where['world']} ranks that share {where['gpus']} x {where['device']}"
    return f"{where['world']} x {where['device']}"


def describe(result: Result) -> str:
    """Returns one line that describes the training and the machine."""
    run, where = result["run"], result["environment"]
    layers = f", {run['layers']} layers" if run["layers"] else ""
    nccl = f", NCCL {where['nccl']}" if where["nccl"] else ""
    adam = "on the host" if run.get("offload") else run["adam"]
    kept = ", every layer checkpointed" if run["checkpoint"] else ", no checkpointing"
    if run.get("inputs_on_host"):
        kept += f", inputs on the host by {run['inputs_on_host']}"
    for name in ("mlp", "loss"):
        if run.get(f"{name}_tiles"):
            kept += f", {name} in {run[f'{name}_tiles']} tiles"
    if run.get("activation_budget") is not None:
        kept += f", activation budget {run['activation_budget']:g}"
    if run.get("float8"):
        kept += f", float8 {run['float8']} by torchao {where['torchao']}"
    if run.get("shard"):
        kept += f", {run['shard']} parameters of blocks sharded"
    if run.get("keep") is not None:
        kept += f", {run['keep']} blocks kept whole"
    if run.get("model_on", "device") != "device":
        kept += ", from the host" + (" of the first rank" if run["model_on"] == "meta" else "")
    adam = f"with {run['states']} states" if run.get("states") else adam
    adam += ", masters as remainders" if run.get("remainders") else ""
    return (
        f"{run['shape']}{layers}, {result['parameters'] / 1e6:,.1f} million parameters in {run['dtype']}; "
        f"{_devices(result)}; sequence {run['seq']}, micro-batch {run['micro_batch']}, accumulation "
        f"{run['accumulation']}{kept}, ZeRO-{run['stage']}, bucket {run['bucket']:,}, AdamW {adam}; "
        f"steps {run['warm']} to {run['steps'] - 1} timed; torch {where['torch']}{nccl}, "
        f"transformers {where['transformers']}; {where['host']}, {where['date']}"
    )

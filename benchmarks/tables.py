# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Tables of one run and of several side by side.

From the root of the repository::

    python -m benchmarks.tables FILE...    a line for each run, from what benchmarks.measure --json has written, and
                                           one for each time of benchmarks.parts --json

Of runs that train the same, the first one's losses are subtracted from those of the others.
"""

import json
import statistics
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from . import flops
from .results import (
    PHASES,
    NoResult,
    Result,
    describe,
    highest,
    is_measured,
    mfu,
    share_gpus,
    tokens_a_second,
    unit_of,
)

# What a figure is, which decides how it is written.
SECONDS, RATE, SHARE, BYTES, LOSS = "s", "a second", "%", "bytes", "loss"
OF_TIME = (SECONDS, RATE, SHARE)


class Row(NamedTuple):
    """A row of a table.

    Attributes:
        name: without a unit.
        read: reads the figure from a result. Memory is the highest of all ranks. None: the result has no such figure.
        kind: what the figure is, SECONDS for example.
    """

    name: str
    read: Callable[[Result], float | None]
    kind: str


def _timed(result: Result) -> list[float]:
    """Returns the seconds of the steps that count."""
    return result["steps_s"][result["run"]["warm"] :]


def _counted(phase: str, *names: str) -> Callable[[Result], int | None]:
    """Returns a function that reads each rank's sum of the counters at the end of a phase, and returns the highest."""

    def read(result):
        counters = [rank["counters"].get(phase) for rank in result["ranks"]]
        return max(sum(of_rank[name] for name in names) for of_rank in counters) if all(counters) else None

    return read


ROWS = [
    Row("step, median", lambda r: r["step_s"], SECONDS),
    Row("step, fastest", lambda r: min(_timed(r)), SECONDS),
    Row("step, slowest", lambda r: max(_timed(r)), SECONDS),
    Row("tokens/s", tokens_a_second, RATE),
    Row("MFU", mfu, SHARE),
    Row("first step", lambda r: r["first_step_s"], SECONDS),
    Row("forward", lambda r: highest(r, "phases_s", "forward"), SECONDS),
    Row("backward", lambda r: highest(r, "phases_s", "backward"), SECONDS),
    Row("norm, optimizer and gather", lambda r: highest(r, "phases_s", "step"), SECONDS),
    Row("peak of the set-up", lambda r: highest(r, "setup_peak"), BYTES),
    Row("after the forward", lambda r: highest(r, "phases", "forward", "after"), BYTES),
    Row("peak of the forward", lambda r: highest(r, "phases", "forward", "peak"), BYTES),
    Row("peak of the backward", lambda r: highest(r, "phases", "backward", "peak"), BYTES),
    Row("after the backward", lambda r: highest(r, "phases", "backward", "after"), BYTES),
    Row("peak of the step", lambda r: highest(r, "phases", "step", "peak"), BYTES),
    Row("at rest", lambda r: highest(r, "phases", "step", "after"), BYTES),
    Row("reserved", lambda r: highest(r, "reserved"), BYTES),
    Row("beside the allocator", lambda r: None if share_gpus(r) else highest(r, "outside"), BYTES),
    Row("most of the host's", lambda r: highest(r, "host"), BYTES),
    Row("most gradients", lambda r: highest(r, "most_gradients"), BYTES),
    Row("counted: most pending", _counted("backward", "peak_pending"), BYTES),
    Row("counted: most in buckets", _counted("backward", "peak_bucket"), BYTES),
    Row("counted: bound after the backward", _counted("backward", "bound"), BYTES),
    Row("counted: held after the step", _counted("step", "bound", "pending", "bucket", "unreduced"), BYTES),
    Row("loss of the first step", lambda r: r["losses"][0], LOSS),
    Row("loss of the last step", lambda r: r["losses"][-1], LOSS),
]


def _system(result: Result) -> str:
    """Returns which system was measured: its name among ``settings.SYSTEMS``, and of DeepSpeed the version."""
    name, version = result["run"]["system"], result["environment"]["deepspeed"]
    return f"{name}, deepspeed {version}" if name in ("deepcompile", "zero") else name


def _rows(results: Iterable[Result]) -> list[Row]:
    """Returns the rows of a table: those of times only where each rank had a GPU of its own."""
    shared = any(map(share_gpus, results))
    return [row for row in ROWS if row.kind not in OF_TIME or not shared]


def _write(figure: float | None, kind: str, unit: tuple[int, str]) -> str:
    """Returns a figure as a table shows it; ``unit`` is the one for bytes, see :func:`unit_of`."""
    if figure is None:
        return "-"
    if kind == LOSS:
        return f"{figure:.5f}"
    if kind == RATE:
        return f"{figure:,.0f}"
    if kind == SHARE:
        return f"{figure:.1%}"
    if kind == BYTES:
        return f"{figure / unit[0]:.3f}" if figure else "0"
    return f"{figure:.4f}" if figure < 10 else f"{figure:.1f}"


def _name(row: Row, unit: tuple[int, str]) -> str:
    """Returns the row's name with its unit."""
    units = {SECONDS: ", s", RATE: " of each rank", BYTES: f", {unit[1]}"}
    return row.name + units.get(row.kind, "")


def _meaning_of_memory(result: Result) -> str:
    """Returns the sentences below a table that say what its memory is."""
    what = "allocated"
    if result["environment"]["device"] == "CPU":
        what = (
            "parameters, optimizer states, and what the step allocated and was not seen to free (what gloo's threads "
            "free is not seen)"
        )
    return (
        f"Memory: {what}, the highest of any rank. Gradients: from when they are handed over until they are freed, "
        "with the buckets, partitions and fp32 copies made for them."
    )


def _meaning_of_speed(result: Result) -> str:
    """Returns the sentences below a table that say what its tokens a second and its MFU are."""
    where, run = result["environment"], result["run"]
    most = flops.peak(where["device"], run["dtype"])
    if share_gpus(result) or "flops_per_token" not in result:
        return ""
    tokens = "Tokens/s: of a rank, which has a GPU of its own; micro-batch x accumulation x sequence / median step."
    if most is None:
        return f"{tokens} No MFU: the peak of {where['device']} in {run['dtype']} is not known.\n"
    operations = f"{flops.FORMULA}{' (4 N where frozen)' if run['lora'] else ''}"
    return (
        f"{tokens} MFU: a token takes {operations} = {result['flops_per_token'] / 1e9:.2f} GFLOP (N: elements of "
        "linear layers and head; L layers of H heads with Q elements; T: sequence; causal attention counts whole, "
        f"what is computed again does not count); the peak is {most / 1e12:.1f} TFLOP/s, dense bf16, of NVIDIA's data "
        f"sheet for {where['device']} (SXM).\n"
    )


def speed(result: Result) -> str:
    """Returns one line: the time of a step, tokens a second, and MFU."""
    if share_gpus(result):
        return "measured, with GPUs that ranks share"
    part = mfu(result)
    used = f", MFU {part:.1%}" if part else ""
    return f"{result['step_s']:.4f} s/step, {tokens_a_second(result):,.0f} tokens/s of each rank{used}"


def print_run(result: Result) -> None:
    """Prints one run's figures: those of the slowest rank, or the highest of any, and beside it each rank's."""
    unit = unit_of([result])
    print(f"\n{describe(result)}\n{_system(result)}")
    ranks = [f"rank {index}" for index in range(len(result["ranks"]))]
    print(f"  {'':38}{'all ranks':>11}" + "".join(f"{rank:>11}" for rank in ranks))
    for row in _rows([result]):
        figure = row.read(result)
        if figure is None:
            continue
        # All ranks together have a fastest and a slowest step and losses; a rank alone has none of these figures.
        alone = [] if row.kind == LOSS or row.name in ("step, fastest", "step, slowest") else result["ranks"]
        figures = [figure, *(row.read({**result, **rank, "ranks": [rank]}) for rank in alone)]
        print(f"  {_name(row, unit):38}" + "".join(f"{_write(figure, row.kind, unit):>11}" for figure in figures))
    print(_meaning_of_speed(result) + _meaning_of_memory(result), flush=True)


def markdown(results: Mapping[str, Result | NoResult], beside: Collection[str]) -> str:
    """Returns a table of results side by side, as Markdown.

    Args:
        results: name of a system -> its result, or why there is none. At least one system must have a result.
        beside: names of systems. For each that was measured, a column divides the first system's figures by its own.
    """
    measured = {name: result for name, result in results.items() if is_measured(result)}
    unit = unit_of(measured.values())
    first, *_ = results
    ratios = [name for name in beside if name in measured and name != first and first in measured]
    lines = [
        describe(next(iter(measured.values()))),
        "",
        "| | " + " | ".join([*measured, *(f"{first} / {name}" for name in ratios)]) + " |",
        "| --- |" + " --- |" * (len(measured) + len(ratios)),
        "| system | " + " | ".join(map(_system, measured.values())) + " |" * (1 + len(ratios)),
    ]
    for row in _rows(measured.values()):
        figures = {column: row.read(result) for column, result in measured.items()}
        if all(figure is None for figure in figures.values()):
            continue
        cells = [_write(figure, row.kind, unit) for figure in figures.values()]
        for other in ratios:
            known = row.kind != LOSS and figures[first] is not None and figures[other]
            cells.append(f"{figures[first] / figures[other]:.3f}" if known else "")
        lines.append(f"| {_name(row, unit)} | " + " | ".join(cells) + " |")
    lines += ["", _meaning_of_speed(next(iter(measured.values()))) + _meaning_of_memory(next(iter(measured.values())))]
    lines += [f"\nNot measured: {name}, {of['why']}" for name, of in results.items() if not is_measured(of)]
    return "\n".join(lines) + "\n"


# What runs must have in common so that their losses can be compared.
SAME = (
    "shape",
    "layers",
    "dtype",
    "seq",
    "micro_batch",
    "accumulation",
    "lora",
    "optimizer",
    "learning_rate",
    "steps",
)


def short(results: Mapping[str, Result]) -> str:
    """Returns a table with a line for each result, as Markdown.

    Args:
        results: name of a run -> its result.
    """
    unit, first = unit_of(results.values()), {}
    heads = ("run", "system", "step, s", "tokens/s of each rank", "MFU", f"peak, {unit[1]}", "last loss")
    heads += ("losses less those of", "on average", "at most, either way")
    lines = ["| " + " | ".join(heads) + " |", "| --- |" + " --- |" * (len(heads) - 1)]
    for name, result in results.items():
        trained = (result["environment"]["world"], *(result["run"][field] for field in SAME))
        other = first.setdefault(trained, name)
        timed = not share_gpus(result)
        peak = max(highest(result, "phases", phase, "peak") or 0 for phase in PHASES)
        cells = [
            name,
            _system(result),
            _write(result["step_s"] if timed else None, SECONDS, unit),
            _write(tokens_a_second(result) if timed else None, RATE, unit),
            _write(mfu(result) if timed else None, SHARE, unit),
            _write(peak, BYTES, unit),
            _write(result["losses"][-1], LOSS, unit),
        ]
        apart = [b - a for a, b in zip(results[other]["losses"], result["losses"])]
        differences = [other, f"{statistics.fmean(apart):+.2e}", f"{max(map(abs, apart)):.2e}"]
        lines.append("| " + " | ".join(cells + (differences if other != name else ["", "", ""])) + " |")
    return "\n".join(lines)


def main(files: list[str]) -> None:
    if not files:
        raise SystemExit(
            "usage: python -m benchmarks.tables FILE..., of benchmarks.measure or benchmarks.parts --json"
        )
    results, lines = {}, ["| part | ms | of its floor |", "| --- | --- | --- |"]
    for file in map(Path, files):
        if not file.is_file():
            print(f"{file} is missing: its run has failed, or has not ended.")
            continue
        content = json.loads(file.read_text())
        if "run" in content:
            results[file.stem] = content
            continue
        for name, times in content.items():
            part = f"{times['ms'] / times['floor_ms']:.3f} of {times['floor_ms']:.2f} ms" if times["floor_ms"] else ""
            lines.append(f"| {file.stem}: {name} | {times['ms']:.2f} | {part} |")
    print("".join(f"{name}: {describe(result)}\n" for name, result in results.items()))
    print("".join(dict.fromkeys(map(_meaning_of_speed, results.values()))))
    if len(lines) > 2:
        print("\n".join(lines) + "\n")
    if results:
        print(short(results))


if __name__ == "__main__":
    main(sys.argv[1:])

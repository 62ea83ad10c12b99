# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Draws what benchmarks.compare measured: memory through one step, and losses. Compares runs of benchmarks.measure.

From the root of the repository::

    python -m benchmarks.pictures FOLDER    reads FOLDER/results.json and writes pictures beside it
    python -m benchmarks.pictures losses PICTURE FILE...      the losses of runs, from what --json has written
    python -m benchmarks.pictures frontier PICTURE FILE...    time of a step against memory of activations
    python -m benchmarks.pictures demo PICTURE FILE...        the losses of demos, from what their --json has written

A run of all commands but the first has the name of its file.
"""

import itertools
import json
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from .recorder import data, panel_drawer
from .results import Result, describe, highest, is_measured, unit_of

draw_png = panel_drawer()

LINE = "#30475e"
MEAN_OF = 20  # steps, of whose losses draw_demos() draws the mean
COLOURS = ("#d1495b", "#30475e", "#edae49", "#66a182", "#8d6a9f", "#2e86ab")


def _write(figure: Figure, title: str, file: Path) -> None:
    """Puts the title above the panels of a figure, and writes the figure."""
    for panel in figure.axes:
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=8, wrap=True)
    figure.savefig(file, dpi=150)


def _timeline(result: Result, which: int) -> data.StepMemory:
    """Returns the memory of a step of one of the ranks that were recorded, 0 for the first and -1 for the last."""
    rank = sorted(result["timelines"], key=int)[which]
    try:
        return data.StepMemory(**{**result["timelines"][rank], "about": {"rank": rank}})
    except TypeError as error:
        raise SystemExit("these results are of an older benchmark; measure again") from error


def draw_memory(results: Mapping[str, Result], which: int, title: str, file: Path) -> None:
    """Draws allocated memory through one step, a panel for each result, all with the same scale of bytes.

    Args:
        results: name of a system -> its result.
        which: of the ranks that have a timeline, 0 for the first and -1 for the last.
        title: above the panels.
        file: to write.
    """
    unit, name = unit_of(results.values())
    figure = Figure(figsize=(1.5 + 4 * len(results), 4.2), layout="constrained")
    panels = figure.subplots(1, len(results), sharey=True, squeeze=False)[0]
    steps = {system: _timeline(result, which) for system, result in results.items()}
    for panel, (system, step) in zip(panels, steps.items()):
        draw_png.draw_panel(panel, step, (unit, name))
        gradients = max(step.sums(data.OF_GRADIENTS)) / unit
        panel.set_title(
            f"{system}, rank {step.about['rank']}: at most {step.peak().bytes / unit:.2f} {name},\n{gradients:.2f} of "
            "gradients",
            size=9,
        )
        panel.set_xlabel("s, on the host, under the profiler")
    panels[0].set_ylabel(name)
    panels[0].set_ylim(0, 1.28 * max(step.peak().bytes for step in steps.values()) / unit)
    shown = data.categories_of(*steps.values())
    patches = [Patch(color=data.COLOURS[category], label=category) for category in shown]
    figure.legend(handles=patches, frameon=False, fontsize=8, ncols=len(shown), loc="outside lower center")
    _write(figure, title, file)


def draw_losses(results: Mapping[str, Result], title: str, file: Path) -> None:
    """Draws the losses of all results, and below them the difference of each result to the first one.

    Args:
        results: name of a system -> its result.
        title: above the curves.
        file: to write.
    """
    figure = Figure(figsize=(8, 6), layout="constrained")
    curves, apart = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    first = next(iter(results.values()))["losses"]
    for colour, (system, result) in zip(itertools.cycle(COLOURS), results.items()):
        steps = range(1, len(result["losses"]) + 1)
        # The other curves often lie on the first one, which is thicker so that it shows below them.
        width = 3.0 if result["losses"] is first else 0.8
        curves.plot(steps, result["losses"], color=colour, linewidth=width, label=system)
        if result["losses"] is not first:
            apart.plot(steps, [b - a for a, b in zip(first, result["losses"])], color=colour, linewidth=0.7)
    curves.set_ylabel("loss, mean over ranks")
    apart.set_ylabel("less the first")
    apart.axhline(0, color=LINE, linewidth=0.5)
    apart.set_xlabel("step")
    curves.legend(frameon=False)
    _write(figure, title, file)


def draw_frontier(results: Mapping[str, Result], title: str, file: Path) -> None:
    """Draws the time of a step against the memory that activations hold after the forward, a point for each result.

    Args:
        results: name of a run -> its result, measured on GPUs.
        title: above the points.
        file: to write.
    """
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    panel = figure.subplots()
    for name, result in results.items():
        kept = highest(result, "phases", "forward", "after") - highest(result, "phases", "step", "after")
        point, above = (kept / 2**30, 1e3 * result["step_s"]), result["run"]["checkpoint"]
        panel.scatter(*point, color=COLOURS[0 if above else 1])
        panel.annotate(name, point, xytext=(6, 6 if above else -12), textcoords="offset points", fontsize=8)
    panel.set_xlabel("activations after the forward, GiB")
    panel.set_ylabel("step, ms")
    panel.margins(x=0.15, y=0.12)
    _write(figure, title, file)


def draw_demos(demos: Mapping[str, Mapping], file: Path) -> None:
    """Draws the losses of runs of the demo with DeepCompile on, and as thick lines means over ``MEAN_OF`` steps.

    Args:
        demos: name of a run -> what ``examples/demo/train_qwen3.py --json`` has written.
        file: to write.
    """
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    panel = figure.subplots()
    for colour, (name, demo) in zip(itertools.cycle(COLOURS), demos.items()):
        losses = demo["on"]["losses"]
        steps, last = range(1, len(losses) + 1), statistics.mean(losses[-MEAN_OF:])
        means = [statistics.mean(losses[max(0, step - MEAN_OF // 2) : step + MEAN_OF // 2]) for step in steps]
        panel.plot(steps, losses, color=colour, linewidth=0.6, alpha=0.4)
        panel.plot(steps, means, color=colour, linewidth=2.2)
        at = {"xytext": (6, -3), "textcoords": "offset points", "color": colour}
        panel.annotate(f"{name}: {last:.2f}", (len(losses), last), **at)
    panel.set_xlabel("step")
    panel.set_ylabel("loss, mean over ranks")
    panel.set_ylim(bottom=0)
    config, of_first = (next(iter(demos.values()))[key] for key in ("config", "on"))
    _write(
        figure,
        f"The demo's Qwen3, {of_first['parameters'] / 1e6:.1f} million parameters in {config['dtype']}, "
        f"ZeRO-{config['stage']}. Thick lines: means of {MEAN_OF} steps. Numbers: of the last {MEAN_OF}.",
        file,
    )


def draw(folder: Path) -> list[Path]:
    """Draws everything in ``folder``/results.json; returns the files written."""
    files = []
    for case, of_case in json.loads((folder / "results.json").read_text()).items():
        results = {name: result for name, result in of_case.items() if is_measured(result)}
        results = {name: result for name, result in results.items() if not name.endswith(" again")}
        if not results:
            continue
        title = describe(next(iter(results.values())))
        for name, which in (("first", 0), ("last", -1)):
            files.append(folder / f"memory-{case}-{name}-rank.png")
            draw_memory(results, which, title, files[-1])
        files.append(folder / f"losses-{case}.png")
        draw_losses(results, title, files[-1])
    return files


def main(arguments: list[str]) -> None:
    kinds = {"losses": draw_losses, "frontier": draw_frontier}
    results = {Path(name).stem: json.loads(Path(name).read_text()) for name in arguments[2:]}
    if results and arguments[0] == "demo":
        draw_demos(results, Path(arguments[1]))
    elif results and arguments[0] in kinds:
        title = describe(next(iter(results.values())), with_kept=arguments[0] != "frontier")
        kinds[arguments[0]](results, title, Path(arguments[1]))
    elif len(arguments) == 1 and (Path(arguments[0]) / "results.json").is_file():
        print("\n".join(map(str, draw(Path(arguments[0])))))
    else:
        raise SystemExit(
            "usage: python -m benchmarks.pictures FOLDER, where benchmarks.compare has left results.json; or losses, "
            "frontier or demo in place of FOLDER, the picture to write, and files of benchmarks.measure --json, or "
            "for demo of examples/demo/train_qwen3.py --json"
        )


if __name__ == "__main__":
    main(sys.argv[1:])

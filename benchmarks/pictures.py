# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Draws what benchmarks.compare measured: memory through one step, and losses. Compares runs of benchmarks.measure.

From the root of the repository::

    python -m benchmarks.pictures FOLDER    reads FOLDER/results.json and writes pictures beside it
    python -m benchmarks.pictures losses PICTURE FILE...      the losses of runs, from what --json has written
    python -m benchmarks.pictures frontier PICTURE FILE...    time of a step against memory of activations

A run of all commands but the first has the name of its file.
"""

import dataclasses
import itertools
import json
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from .recorder import data, panel_drawer
from .results import Result, headline, highest, is_measured, share_gpus, unit_of

draw_png = panel_drawer()

LINE = "#30475e"
COLOURS = ("#d1495b", "#30475e", "#edae49", "#66a182", "#8d6a9f", "#2e86ab")
# A page may show a picture 400 pixels wide. A point of text is about a pixel there, so text has 8 points or more.
WIDTH, DPI = 5.4, 200  # inches, and pixels of an inch
TEXT, SMALL = 9, 8  # points
LETTERS = 68  # of a title, in a line


def _figure(height: float) -> Figure:
    return Figure(figsize=(WIDTH, height), layout="constrained")


def _write(figure: Figure, title: str, file: Path) -> None:
    """Puts the title above the panels of a figure, and writes the figure."""
    for panel in figure.axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=SMALL)
    figure.suptitle("\n".join(textwrap.wrap(title, LETTERS)), fontsize=TEXT)
    figure.savefig(file, dpi=DPI)


def _timeline(result: Result, which: int) -> data.StepMemory:
    """Returns the memory of a step of one of the ranks that were recorded, 0 for the first and -1 for the last."""
    rank = sorted(result["timelines"], key=int)[which]
    try:
        return data.StepMemory(**{**result["timelines"][rank], "about": {"rank": rank}})
    except TypeError as error:
        raise SystemExit("these results are of an older benchmark; measure again") from error


def _at_speed(step: data.StepMemory, seconds: float) -> data.StepMemory:
    """Returns a step that was recorded, as if it had taken so long: the profiler slows the systems unequally."""
    factor = seconds / (step.seconds[-1] or 1.0)
    phases = {name: [(factor * begin, factor * end) for begin, end in spans] for name, spans in step.phases.items()}
    return dataclasses.replace(step, seconds=[factor * second for second in step.seconds], phases=phases)


def draw_memory(results: Mapping[str, Result], which: int, title: str, file: Path) -> None:
    """Draws allocated memory through one step, results below each other on one axis of time and one scale of bytes.

    Where times were measured, each step is as long as its median without the profiler.

    Args:
        results: name of a system -> its result.
        which: of the ranks that have a timeline, 0 for the first and -1 for the last.
        title: above the panels.
        file: to write.
    """
    unit = unit_of(results.values())
    steps = {system: _timeline(result, which) for system, result in results.items()}
    are_timed = not any(map(share_gpus, results.values()))
    if are_timed:
        steps = {system: _at_speed(step, results[system]["step_s"]) for system, step in steps.items()}
    figure = _figure(1.1 + 1.55 * len(results))
    panels = figure.subplots(len(results), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    ends = max(step.seconds[-1] for step in steps.values()) or 1.0
    for panel, (system, step) in zip(panels, steps.items()):
        draw_png.draw_panel(panel, step, unit, ends)
        took = f": {results[system]['step_s']:.3f} s a step" if are_timed else ""
        panel.set_title(f"{system}{took}", loc="left", size=TEXT, weight="bold")
        panel.set_ylabel(unit[1], size=SMALL)
    panels[0].set_ylim(0, 1.6 * max(step.peak().bytes for step in steps.values()) / unit[0])
    scaled = "seconds on the host; recorded under torch's profiler, and scaled to a step without it"
    panels[-1].set_xlabel(scaled if are_timed else draw_png.SECONDS, size=SMALL)
    shown = data.categories_of(*steps.values())
    patches = [Patch(color=data.COLOURS[category], label=category) for category in shown]
    figure.legend(handles=patches, frameon=False, fontsize=SMALL, ncols=3, loc="outside lower center")
    rank = next(iter(steps.values())).about["rank"]
    _write(figure, f"Memory of rank {rank} in one step: {title}", file)


def draw_losses(results: Mapping[str, Result], title: str, file: Path) -> None:
    """Draws the losses of all results, and below them the difference of each result to the first one.

    Args:
        results: name of a system -> its result.
        title: above the curves.
        file: to write.
    """
    figure = _figure(4.2)
    curves, apart = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    name, first = next((name, result["losses"]) for name, result in results.items())
    for colour, (system, result) in zip(itertools.cycle(COLOURS), results.items()):
        steps = range(1, len(result["losses"]) + 1)
        # The other curves often lie on the first one, which is thicker so that it shows below them.
        width = 3.0 if result["losses"] is first else 0.8
        curves.plot(steps, result["losses"], color=colour, linewidth=width, label=system)
        if result["losses"] is not first:
            apart.plot(steps, [b - a for a, b in zip(first, result["losses"])], color=colour, linewidth=0.7)
    curves.set_ylabel("loss, mean over ranks", size=SMALL)
    apart.set_ylabel(f"less that of\n{textwrap.shorten(name, 20)}", size=SMALL)
    apart.axhline(0, color=LINE, linewidth=0.5)
    apart.set_xlabel("step", size=SMALL)
    curves.legend(frameon=False, fontsize=SMALL)
    _write(figure, title, file)


def draw_frontier(results: Mapping[str, Result], title: str, file: Path) -> None:
    """Draws the time of a step against the memory that activations hold after the forward, a point for each result.

    Args:
        results: name of a run -> its result, measured on GPUs.
        title: above the points.
        file: to write.
    """
    figure = _figure(3.6)
    panel = figure.subplots()
    for name, result in results.items():
        kept = highest(result, "phases", "forward", "after") - highest(result, "phases", "step", "after")
        point, above = (kept / 2**30, 1e3 * result["step_s"]), result["run"]["checkpoint"]
        panel.scatter(*point, color=COLOURS[0 if above else 1])
        panel.annotate(name, point, xytext=(6, 6 if above else -12), textcoords="offset points", fontsize=SMALL)
    panel.set_xlabel("activations after the forward, GiB", size=SMALL)
    panel.set_ylabel("step, ms", size=SMALL)
    panel.margins(x=0.2, y=0.12)
    _write(figure, title, file)


def draw(folder: Path) -> list[Path]:
    """Draws everything in ``folder``/results.json; returns the files written."""
    files = []
    for case, of_case in json.loads((folder / "results.json").read_text()).items():
        results = {name: result for name, result in of_case.items() if is_measured(result)}
        results = {name: result for name, result in results.items() if not name.endswith(" again")}
        if not results:
            continue
        title = headline(next(iter(results.values())))
        for name, which in (("first", 0), ("last", -1)):
            files.append(folder / f"memory-{case}-{name}-rank.png")
            draw_memory(results, which, title, files[-1])
        files.append(folder / f"losses-{case}.png")
        draw_losses(results, title, files[-1])
    return files


def main(arguments: list[str]) -> None:
    kinds = {"losses": draw_losses, "frontier": draw_frontier}
    results = {Path(name).stem: json.loads(Path(name).read_text()) for name in arguments[2:]}
    if results and arguments[0] in kinds:
        title = headline(next(iter(results.values())), with_kept=arguments[0] != "frontier")
        kinds[arguments[0]](results, title, Path(arguments[1]))
    elif len(arguments) == 1 and (Path(arguments[0]) / "results.json").is_file():
        print("\n".join(map(str, draw(Path(arguments[0])))))
    else:
        raise SystemExit(
            "usage: python -m benchmarks.pictures FOLDER, where benchmarks.compare has left results.json; or losses "
            "or frontier in place of FOLDER, the picture to write, and files of benchmarks.measure --json"
        )


if __name__ == "__main__":
    main(sys.argv[1:])

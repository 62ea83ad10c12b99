# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Draws a step, or two over each other, with matplotlib, without changing matplotlib's global state."""

import textwrap
from pathlib import Path
from typing import List, Optional, Tuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .data import (
    COLOURS,
    COLOURS_OF_TWO,
    INK,
    NAMED_PHASES,
    PHASES,
    StepMemory,
    categories_of,
    headline,
    subtitle,
    unit_for,
    written,
)

# Pages and reports show a picture about 400 pixels wide. A point of text is about a pixel there.
WIDTH, DPI = 5.4, 200  # inches, and pixels of an inch
SMALL = 8  # points
WIDEST_NAME = 0.13  # width of a phase's name, as a part of the panel's width
ROWS = 2  # rows of names of phases
SECONDS = "seconds on the host, while torch's profiler recorded the step"


def draw(step: StepMemory, file: Path) -> None:
    """Draws a step as a PNG file."""
    peak = step.peak()
    unit = unit_for(peak.bytes)
    figure = Figure(figsize=(WIDTH, 5.2), layout="constrained")
    panel = figure.subplots()
    draw_panel(panel, step, unit)
    panel.set_ylabel(f"memory in {unit[1]}", size=SMALL)
    panel.set_xlabel(SECONDS, size=SMALL)
    handles, names = panel.get_legend_handles_labels()
    labels = [f"{name}: {written(peak.held[name], unit)}" for name in names]
    figure.legend(
        handles[::-1],
        labels[::-1],
        title="made of, at the peak",
        title_fontsize=SMALL,
        fontsize=SMALL,
        ncols=2,
        loc="outside lower left",
        frameon=False,
        alignment="left",
    )
    title = "\n".join(textwrap.wrap(headline(step), 62))
    figure.suptitle(title, x=0.01, ha="left", size=10, weight="bold")
    panel.set_title("\n".join(textwrap.wrap(subtitle(step), 84)), loc="left", size=SMALL, color=INK, pad=8)
    figure.savefig(file, dpi=DPI)


def draw_panel(panel: Axes, step: StepMemory, unit: Tuple[int, str], end: Optional[float] = None) -> None:
    """Draws a step's categories, phases and peak into a panel. The labels of its legend are the categories.

    Args:
        unit: the unit of memory: its number of bytes, and its name.
        end: the end of the time axis, in seconds. None: the step's end.
    """
    below = [0.0] * len(step.seconds)
    for name in categories_of(step):
        above = [low + held / unit[0] for low, held in zip(below, step.held[name])]
        panel.fill_between(step.seconds, below, above, step="post", color=COLOURS[name], linewidth=0, label=name)
        below = above
    panel.step(step.seconds, below, where="post", color=INK, linewidth=0.8)
    peak = step.peak()
    panel.set_ylim(0, 1.28 * peak.bytes / unit[0] or 1.0)
    last = end or step.seconds[-1] or 1.0
    panel.set_xlim(0, last)
    _mark_phases(panel, step, last)
    panel.plot([peak.second], [peak.bytes / unit[0]], marker="o", color=INK, markersize=5, clip_on=False)
    panel.annotate(
        f"peak: {written(peak.bytes, unit)}",
        (peak.second, peak.bytes / unit[0]),
        (0, 7),
        textcoords="offset points",
        ha="left" if peak.second < 0.2 * last else "right" if peak.second > 0.8 * last else "center",
        weight="bold",
        size=SMALL,
    )
    panel.tick_params(labelsize=SMALL)
    panel.xaxis.set_major_locator(MaxNLocator(6))
    panel.spines[["top", "right"]].set_visible(False)


def _mark_phases(panel: Axes, step: StepMemory, last: float) -> None:
    spans = sorted((*span, name) for name in PHASES for span in step.phases.get(name, ()))
    row, before = 0, -last
    for begin, end, name in spans:
        if name in ("backward", "gather"):
            panel.axvspan(begin, end, color="#eeeeee", linewidth=0, zorder=0)
        panel.axvline(begin, color=INK, linewidth=0.7, linestyle=":")
        if len(spans) <= NAMED_PHASES:
            # A phase may be shorter than its name, so a name may go below the previous one. If no row has room, the
            # phase has no name.
            row = row + 1 if begin - before < WIDEST_NAME * last else 0
            if row >= ROWS:
                row = ROWS - 1
                continue
            before = begin
            late = begin > (1 - WIDEST_NAME) * last
            panel.annotate(
                f"{name} " if late else f" {name}",
                (begin, 1),
                (0, -1 - row * (SMALL + 1)),
                xycoords=panel.get_xaxis_transform(),
                textcoords="offset points",
                ha="right" if late else "left",
                va="top",
                size=SMALL,
                color=INK,
            )


def draw_two(one: StepMemory, other: StepMemory, names: List[str], file: Path) -> None:
    """Draws two steps over each other as a PNG file: the sums, and below them each category by itself."""
    steps = (one, other)
    unit = unit_for(max(step.peak().bytes for step in steps))
    categories = categories_of(*steps)
    figure = Figure(figsize=(10, 3.6 + 1.25 * len(categories)), layout="constrained")
    panels = figure.subplots(1 + len(categories), 1, sharex=True, height_ratios=[3] + [1] * len(categories))
    for step, name, colour in zip(steps, names, COLOURS_OF_TWO):
        line = {"where": "post", "color": colour, "linewidth": 1.3, "linestyle": "-" if step is one else "--"}
        peak = step.peak()
        sums = [held / unit[0] for held in step.sums()]
        panels[0].step(step.seconds, sums, label=f"{name}: {headline(step)}", **line)
        panels[0].plot([peak.second], [peak.bytes / unit[0]], marker="o", color=colour, markersize=5)
        for panel, category in zip(panels[1:], categories):
            panel.step(step.seconds, [held / unit[0] for held in step.held[category]], **line)
    panels[0].set_ylabel(f"all memory, {unit[1]}")
    panels[0].legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1.0), fontsize=9)
    for panel, category in zip(panels[1:], categories):
        most = " | ".join(written(max(step.held[category]), unit) for step in steps)
        panel.set_title(f"{category}, at most {most}", loc="left", size=8, color=INK, pad=2)
        panel.yaxis.set_major_locator(MaxNLocator(2))
        panel.set_ylabel(unit[1], size=8)
    for panel in panels:
        panel.set_ylim(bottom=0)
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlim(0, max(step.seconds[-1] for step in steps) or 1.0)
    panels[-1].set_xlabel(SECONDS)
    figure.savefig(file, dpi=110)

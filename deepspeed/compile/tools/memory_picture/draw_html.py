# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Draws a step, or two over each other, as a self-contained page. Plotly draws, zooms and shows values."""

import html
from pathlib import Path
from typing import List

from plotly.graph_objects import Figure, Scatter
from plotly.subplots import make_subplots

from .data import (
    COLOURS,
    COLOURS_OF_TWO,
    INK,
    NAMED_PHASES,
    PHASES,
    StepMemory,
    categories_of,
    headline,
    made_of,
    subtitle,
    unit_for,
    written,
)

SECONDS = "seconds on the host, under the profiler"
# Without the second line, a phone would draw the page for a desk and make it small.
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title></head><body style="margin: 0.8em; font-family: sans-serif; font-size: 14px; color: #333333">
<h1 style="font-size: 1.3em">{title}</h1>{paragraphs}{figure}</body></html>
"""


def draw(step: StepMemory, file: Path) -> None:
    """Draws a step as an HTML page."""
    peak = step.peak()
    size, unit = unit_for(peak.bytes)
    figure = Figure()
    for name in categories_of(step):
        figure.add_trace(
            Scatter(
                x=step.seconds,
                y=[held / size for held in step.held[name]],
                name=name,
                stackgroup="memory",
                line={"shape": "hv", "width": 0, "color": COLOURS[name]},
                fillcolor=COLOURS[name],
                hovertemplate=f"%{{y:.3f}} {unit}",
            )
        )
    figure.add_trace(
        Scatter(
            x=step.seconds,
            y=[held / size for held in step.sums()],
            name="all",
            line={"shape": "hv", "width": 1, "color": INK},
            hovertemplate=f"%{{y:.3f}} {unit}",
        )
    )
    _mark_phases(figure, step)
    figure.add_annotation(
        x=peak.second,
        y=peak.bytes / size,
        text=f"<b>peak: {written(peak.bytes, (size, unit))}</b>",
        ax=0,
        ay=-24,
        bgcolor="rgba(255,255,255,0.8)",
    )
    figure.update_layout(legend={"orientation": "h", "y": -0.14, "yanchor": "top"}, height=640)
    figure.update_xaxes(title=SECONDS, range=[0, step.seconds[-1] or 1.0])
    figure.update_yaxes(title=f"memory in {unit}", range=[0, 1.2 * peak.bytes / size or 1.0])
    made = ", ".join(f"{name} {written(held, (size, unit))}" for name, held in made_of(peak))
    _write(figure, headline(step), [f"The peak is made of: {made}.", subtitle(step)], file)


def draw_two(one: StepMemory, other: StepMemory, names: List[str], file: Path) -> None:
    """Draws two steps over each other as an HTML page: the sums, and below them each category by itself."""
    steps = (one, other)
    size, unit = unit_for(max(step.peak().bytes for step in steps))
    categories = categories_of(*steps)
    rows = 1 + len(categories)
    most = [" | ".join(written(max(step.held[name]), (size, unit)) for step in steps) for name in categories]
    titles = ["all memory", *(f"{name}, at most {of_both}" for name, of_both in zip(categories, most))]
    figure = make_subplots(
        rows=rows,
        cols=1,
        shared_xaxes=True,
        row_heights=[3] + [1] * len(categories),
        vertical_spacing=0.25 / rows,
        subplot_titles=titles,
    )
    for step, name, colour, dash in zip(steps, names, COLOURS_OF_TWO, ("solid", "dash")):
        line = {"shape": "hv", "width": 1.5, "color": colour, "dash": dash}
        for row, values in enumerate([step.sums(), *(step.held[category] for category in categories)], start=1):
            figure.add_trace(
                Scatter(
                    x=step.seconds,
                    y=[held / size for held in values],
                    name=html.escape(name),
                    legendgroup=name,
                    showlegend=row == 1,
                    line=line,
                    hovertemplate=f"%{{y:.3f}} {unit}",
                ),
                row=row,
                col=1,
            )
    figure.update_layout(
        legend={"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom"},
        height=480 + 125 * len(categories),
    )
    for annotation in figure.layout.annotations:
        # The titles of the panels, at their left end.
        annotation.update(x=0, xanchor="left", font={"size": 12})
    figure.update_yaxes(title=unit, rangemode="tozero")
    figure.update_xaxes(title=SECONDS, row=rows, col=1)
    told = [
        f"{line} line, {name}: {headline(step)}; {subtitle(step)}"
        for line, step, name in zip(("Solid blue", "Dashed orange"), steps, names)
    ]
    _write(figure, "Memory of two steps", told, file)


def _mark_phases(figure: Figure, step: StepMemory) -> None:
    spans = sorted((*span, name) for name in PHASES for span in step.phases.get(name, ()))
    for index, (begin, end, name) in enumerate(spans):
        if name in ("backward", "gather"):
            figure.add_vrect(x0=begin, x1=end, fillcolor="#eeeeee", line_width=0, layer="below")
        figure.add_vline(x=begin, line={"color": INK, "width": 1, "dash": "dot"})
        if len(spans) <= NAMED_PHASES:
            late = begin > 0.85 * step.seconds[-1]
            figure.add_annotation(
                x=begin,
                y=1.0 - 0.045 * (index % 4),
                yref="paper",
                xanchor="right" if late else "left",
                yanchor="top",
                text=name,
                showarrow=False,
                font={"size": 11},
            )


def _write(figure: Figure, title: str, paragraphs: List[str], file: Path) -> None:
    figure.update_layout(
        template="plotly_white",
        hovermode="x unified",
        font={"color": INK},
        margin={"l": 60, "r": 15, "t": 50, "b": 90},
    )
    drawn = figure.to_html(full_html=False, include_plotlyjs=True, config={"responsive": True, "displaylogo": False})
    told = "".join(f"<p>{html.escape(text)}</p>" for text in paragraphs)
    file.write_text(PAGE.format(title=html.escape(title), paragraphs=told, figure=drawn))

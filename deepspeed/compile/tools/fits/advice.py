# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The command's text: which mode to take, the modes beside it, or all modes."""

import textwrap
from typing import List, Optional, Sequence

from .estimate import GIB, RESERVED, Answer, Row, most_gpus

COLUMNS = 80
# Rows, the recommended one among them, and without that of the configuration.
FEW = 5
# The section of a configuration for a dtype.
WRITTEN = {"bfloat16": '"bf16": {"enabled": true}', "float16": '"fp16": {"enabled": true}'}


def recommended(answer: Answer) -> Optional[Row]:
    """Returns the fastest mode of this fork that fits, with the fewest options; a tight one if no other fits."""
    for verdict in ("yes", "tight"):
        rows = [row for row in answer.rows if row.mode.system == "fork" and answer.verdict(row) == verdict]
        if rows:
            # States in 8 bits change the numbers of a training, and other options do not.
            return min(rows, key=lambda row: (row.mode.pace, row.mode.options, row.mode.eight_bit, row.peak))
    return None


def few_rows(answer: Answer) -> List[Row]:
    """Lists the row of the configuration, the recommended one, those that save memory for their time, and FSDP2's."""
    advised = recommended(answer)
    shown = [answer.first] if advised is None or answer.has_config else []
    if advised is not None and advised not in shown:
        shown.append(advised)
    of_fsdp2 = [row for row in answer.rows if row.mode.system == "fsdp2"]
    fitting = [row for row in of_fsdp2 if answer.verdict(row) in ("yes", "tight")]
    # By default FSDP2 reshards.
    of_fsdp2 = [row for row in fitting if row.mode.reshard] or fitting or of_fsdp2[-1:]
    room = FEW + answer.has_config - bool(of_fsdp2)
    for row in _that_save(answer, shown):
        if len(shown) < room:
            shown.append(row)
    return sorted([*shown, *of_fsdp2[:1]], key=answer.rows.index)


def _that_save(answer, shown):
    """Lists this fork's rows in order of time, each with a lower peak than all that are as fast."""
    lowest, rows = min((row.peak for row in shown), default=0), []
    for row in answer.rows:
        if row.mode.system == "fork" and row not in shown and row.peak < lowest:
            lowest = row.peak
            rows.append(row)
    return rows


def text_of(answer: Answer, model: str, shows_all: bool) -> List[str]:
    """Returns the lines that the command prints. ``shows_all``: all modes, with the lines to write for each."""
    asked = answer.question
    trains = "" if answer.trained == answer.elements else f", of which {answer.trained / 1e9:.3f} are trained"
    rows = "images" if asked.sequence is None else f"x {asked.sequence} tokens without padding"
    shared = f", shared by {asked.sequence_ranks} GPUs" if asked.sequence_ranks > 1 else ""
    batch = f"micro-batch {asked.micro_batch} {rows}{shared}, {asked.accumulation} for a step"
    dtype = str(asked.dtype).rpartition(".")[2]
    lines = [
        *_wrapped(f"{model} ({answer.model}): {answer.elements / 1e9:.3f} billion parameters{trains}."),
        *_wrapped(f"{_gpus(answer)}, {dtype}, {batch}."),
        "",
        *_advice(answer, dtype),
        "",
        *_table(answer, answer.rows if shows_all else few_rows(answer), shows_all),
        "",
    ]
    shown = answer.first if answer.has_config else recommended(answer) or answer.first
    made_of = ", ".join(f"{name} {count / GIB:.2f}" for name, count in shown.parts.items() if count / GIB >= 0.005)
    peak = "The peak of" if shown.forward is not None else "Without activations,"
    peak = f'{peak} "{shown.mode.name}" on rank {shown.rank}, {shown.peak / GIB:.2f} GiB: {made_of}.'
    notes = [peak, *answer.notes]
    if shown.on_host:
        notes.append(f"Inputs of layers take {shown.on_host / GIB:.1f} GiB of the host's memory for each GPU, pinned.")
    if shown.mode.eight_bit:
        notes.append("8-bit states round Adam's moments; --all shows modes without them.")
    notes.append(
        '"time" is that of a step as a multiple of plain ZeRO-1\'s, measured with Qwen3-8B on 2 H200s, and not with '
        "this model."
    )
    if asked.gpus > 2:
        notes.append("On 4 H200s FSDP2 with whole parameters took 1.04 times as long as this fork.")
    left_out = ", ".join(f"{name} {count:.2f}" for name, count in answer.left_out.items())
    notes.append(
        f"Off the {asked.memory:g} GB, which a GPU shows as GiB, go {left_out} (measured on 1 and 2 H200s). Beyond "
        f"the peak torch reserved up to {answer.reserved(shown.mode):.0%} of it, and of FSDP2's "
        f'{RESERVED["fsdp2"]:.0%}: what leaves less is "tight".'
    )
    if not shows_all:
        notes.append("--all prints every mode, with the lines to write for each.")
    return lines + [line for note in notes for line in _wrapped(note)]


def _gpus(answer):
    asked = answer.question
    return f"{asked.gpus} GPU{'s' if asked.gpus > 1 else ''} of {asked.memory:g} GB"


def _advice(answer, dtype):
    """Lists the lines that say which mode to take, why, and what to write for it."""
    row = recommended(answer)
    if row is not None:
        how = "fits" if answer.verdict(row) == "yes" else "may fit"
        said = f"It is the fastest mode that {how}, with {answer.spare(row):.1f} GiB to spare. Write:"
        written = [*row.lines, *([WRITTEN[dtype]] if dtype in WRITTEN else [])]
        written = [part for line in written for part in _wrapped(line, "    ")]
        return [*_wrapped(f"Recommended: {row.mode.name}. {said}"), *written]
    if any(row.forward is None for row in answer.rows):
        return _wrapped("Recommended: no mode, because activations are unknown. The reason stands below the table.")
    said = f"Nothing fits on {_gpus(answer)}."
    if answer.enough is None:
        tried = f"Nor does anything on up to {most_gpus(answer.question)}"
        return _wrapped(f"{said} {tried}: take shorter sequences, or GPUs with more memory.")
    gpus, enough = answer.enough
    return _wrapped(f"{said} On {gpus}, {enough.mode.name} fits.")


def _table(answer: Answer, rows: Sequence[Row], shows_all: bool) -> List[str]:
    cells = [("mode, GiB", *(("at rest",) if shows_all else ()), "peak", "fits", "time")]
    for row in rows:
        spare, is_known = answer.spare(row), row.forward is not None
        verdict = answer.verdict(row)
        if is_known:
            verdict += f", {abs(spare):.1f} {'left' if spare >= 0 else 'too much'}"
        peak = f"{row.peak / GIB:.1f}" if is_known else f"above {row.peak / GIB:.1f}"
        pace = f"{row.mode.pace:.1f} x" if row.mode.pace else ""
        at_rest = (f"{row.at_rest / GIB:.1f}",) if shows_all else ()
        cells.append((row.mode.name, *at_rest, peak, verdict, pace))
    if shows_all:
        written = ["the lines to write", *(", ".join(row.lines) for row in rows)]
        cells = [(*cell, lines) for cell, lines in zip(cells, written)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return ["  ".join(text.ljust(width) for text, width in zip(cell, widths)).rstrip() for cell in cells]


def _wrapped(text, indent=""):
    # A line of a configuration goes on further to the right.
    further = indent + indent[:2]
    return textwrap.wrap(
        text, COLUMNS, initial_indent=indent, subsequent_indent=further, break_long_words=False, break_on_hyphens=False
    )

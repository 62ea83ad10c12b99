# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Tells whether a model fits on GPUs, in which mode, and what the peak is made of."""

import argparse
import json
import sys
from typing import Any, Dict, List, Optional

PROGRAM = "python -m deepspeed.compile.features.fits"


def parser() -> argparse.ArgumentParser:
    """Returns the command's parser of arguments."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__)
    parser.add_argument(
        "--model", required=True, help="a name of the hub, a folder, a config.json, or module:function that makes it"
    )
    parser.add_argument("--gpus", type=int, default=1, help="how many train it. Default: 1")
    parser.add_argument("--memory", type=float, default=80, help="of each GPU, GiB. Default: 80")
    parser.add_argument("--sequence", type=int, default=4096, help="tokens. Default: 4096")
    parser.add_argument("--micro-batch", type=int, help="sequences. Default: 1, or what --config says")
    parser.add_argument("--accumulation", type=int, help="micro-batches. Default: 1, or what --config says")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank, and freeze the rest")
    parser.add_argument("--config", metavar="FILE", help="a ds_config.json, which becomes a line of the table")
    parser.add_argument("--checkpoint", action="store_true", help="with --config: every layer is checkpointed")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, in bytes; - prints them alone")
    return parser


def main(arguments: Optional[List[str]] = None) -> int:
    """Runs the command; returns its exit status."""
    parse = parser()
    options = parse.parse_args(arguments)
    for name in ("gpus", "sequence", "micro_batch", "accumulation", "lora"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parse.error(f"--{name.replace('_', '-')} must be at least 1")
    config = None
    if options.config is not None:
        try:
            with open(options.config) as file:
                config = json.load(file)
        except (OSError, ValueError) as error:
            parse.error(f"--config {options.config} cannot be read: {error}")
    elif options.checkpoint:
        parse.error("--checkpoint goes with --config")
    # After the arguments, because torch takes seconds.
    from . import fits, sources

    def of_config(name: str, given: Optional[int]) -> int:
        value = (config or {}).get(name, 1)
        return given or (value if isinstance(value, int) else 1)

    try:
        make_model, make_batch = sources.named(options.model)
        answer = fits(
            make_model,
            options.gpus,
            options.memory,
            options.sequence,
            of_config("train_micro_batch_size_per_gpu", options.micro_batch),
            of_config("gradient_accumulation_steps", options.accumulation),
            options.lora,
            make_batch,
            config,
            options.checkpoint,
            say=lambda sentence: print(f"... {sentence}", file=sys.stderr, flush=True),
        )
    except ValueError as error:
        parse.error(str(error))
    if options.json is not None:
        text = json.dumps(as_json(answer), indent=1)
        if options.json == "-":
            print(text)
            return 0
        with open(options.json, "w") as file:
            file.write(text + "\n")
    print("\n".join(table(answer, options.model)))
    return 0


def as_json(answer: Any) -> Dict[str, Any]:
    """Returns an answer as what JSON has."""
    rows = [
        {**row._asdict(), "mode": row.mode.name, "line": row.mode.lines, "spare_gib": round(answer.spare(row), 3)}
        for row in answer.rows
    ]
    return {**answer._asdict(), "rows": rows}


def table(answer: Any, model: str) -> List[str]:
    """Returns the lines that the command prints."""
    from .reckon import GIB, MARGIN, RESERVED

    trains = "" if answer.trained == answer.elements else f", of which {answer.trained / 1e9:.3f} are trained"
    batch = f"{answer.micro_batch} x {answer.sequence} tokens"
    lines = [
        f"{model} ({answer.model}): {answer.elements / 1e9:.3f} billion parameters{trains}.",
        f"{answer.gpus} GPUs of {answer.memory:g} GiB, micro-batch {batch}, {answer.accumulation} for a step. GiB:",
        "",
    ]
    head = ("mode", "at rest", "peak", "in", "fits", "the line to write")
    cells = [head]
    for row in answer.rows:
        spare = answer.spare(row)
        verdict = f"yes, {spare:.1f} left" if spare >= 0 else f"no, {-spare:.1f} too much"
        phase = row.phase if row.forward is not None else "at least"
        cells.append(
            (row.mode.name, f"{row.at_rest / GIB:.1f}", f"{row.peak / GIB:.1f}", phase, verdict, row.mode.lines)
        )
    widths = [max(len(cell[column]) for cell in cells) for column in range(len(head) - 1)]
    for cell in cells:
        lines.append("  ".join([each.ljust(width) for each, width in zip(cell, widths)] + [cell[-1]]).rstrip())
    first = next((row for row in answer.rows if answer.spare(row) >= 0), None)
    shown = first or min(answer.rows, key=lambda row: row.peak)
    made_of = ", ".join(f"{name} {count / GIB:.2f}" for name, count in shown.parts.items() if count / GIB >= 0.005)
    lines += ["", f'The peak of "{shown.mode.name}" on rank {shown.rank}: {made_of}.']
    lines += answer.notes
    least, most = RESERVED
    lines.append(
        f"Left out: the CUDA context, NCCL, and fragmentation. torch reserved {least:g} to {most:g} GiB more than the "
        f'peak where that was measured (docs/performance.md); "fits" leaves {MARGIN:g} for all of it.'
    )
    return lines


if __name__ == "__main__":
    sys.exit(main())

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Estimates whether a model fits on GPUs, in which mode, and what the peak is made of."""

import argparse
import json
import sys
from typing import Any, Dict, List, Optional

PROGRAM = "python -m deepspeed.compile.fits"
# The section of a configuration for a dtype.
WRITTEN = {"bfloat16": '"bf16": {"enabled": true}', "float16": '"fp16": {"enabled": true}'}


def parser() -> argparse.ArgumentParser:
    """Returns the command's parser of arguments."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__)
    parser.add_argument(
        "--model", required=True, help="a name of the hub, a folder, a config.json, or module:function that makes it"
    )
    parser.add_argument("--gpus", type=int, default=1, help="how many train it. Default: 1")
    parser.add_argument("--memory", type=float, default=80, help="of each GPU, GB as it is sold. Default: 80")
    parser.add_argument("--sequence", type=int, help="tokens. Default: 4096, or as many as the model has positions")
    parser.add_argument("--micro-batch", type=int, help="sequences. Default: 1, or what --config says")
    parser.add_argument("--accumulation", type=int, help="micro-batches. Default: 1, or what --config says")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank, and freeze the rest")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help="Default: bf16, or what --config says")
    parser.add_argument("--config", metavar="FILE", help="a ds_config.json, which becomes a line of the table")
    parser.add_argument("--checkpoint", action="store_true", help="with --config: every layer is checkpointed")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too, in bytes")
    return parser


def main(arguments: Optional[List[str]] = None) -> int:
    """Runs the command; returns its exit status."""
    parse = parser()
    options = parse.parse_args(arguments)
    config = None
    if options.config is not None:
        try:
            with open(options.config) as file:
                config = json.load(file)
        except (OSError, ValueError) as error:
            parse.error(f"--config {options.config} cannot be read: {error}")
        if not isinstance(config, dict):
            parse.error(f"--config {options.config} has no sections; name a file as DeepSpeed reads it")
    elif options.checkpoint:
        parse.error("--checkpoint goes with --config")
    if options.json is not None:
        try:
            # Now, and not when all is estimated. What is there stays until then.
            with open(options.json, "a"):
                pass
        except OSError as error:
            parse.error(f"--json {options.json} cannot be written: {error}; name a file in a folder that there is")
    # After the arguments, because torch takes seconds.
    import torch

    from . import fits, sources

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, None: None}
    names = ("gpus", "memory", "sequence", "micro_batch", "accumulation", "lora")
    try:
        answer = fits(
            sources.named(options.model),
            config,
            options.checkpoint,
            say=lambda sentence: print(f"... {sentence}", file=sys.stderr, flush=True),
            dtype=dtypes[options.dtype],
            **{name: getattr(options, name) for name in names},
        )
    except ValueError as error:
        parse.error(str(error))
    if options.json is not None:
        with open(options.json, "w") as file:
            file.write(json.dumps(as_json(answer), indent=1) + "\n")
    print("\n".join(table(answer, options.model)))
    return 0


def as_json(answer: Any) -> Dict[str, Any]:
    """Returns an answer as what JSON has."""
    rows = [
        {
            **row._asdict(),
            "mode": row.mode.name,
            "fits": answer.verdict(row),
            "spare_gib": round(answer.spare(row), 3),
        }
        for row in answer.rows
    ]
    names = ("gpus", "memory", "sequence", "micro_batch", "accumulation", "lora")
    asked = {**{name: getattr(answer.question, name) for name in names}, "dtype": str(answer.question.dtype)}
    known = {"model": answer.model, "elements": answer.elements, "trained": answer.trained}
    return {**known, **asked, "rows": rows, "left_out_gib": answer.left_out, "notes": answer.notes}


def table(answer: Any, model: str) -> List[str]:
    """Returns the lines that the command prints."""
    from .estimate import GIB, RESERVED

    asked = answer.question
    trains = "" if answer.trained == answer.elements else f", of which {answer.trained / 1e9:.3f} are trained"
    rows = "images" if asked.sequence is None else f"x {asked.sequence} tokens without padding"
    batch = f"{asked.micro_batch} {rows}, {asked.accumulation} for a step"
    dtype = str(asked.dtype).rpartition(".")[2]
    lines = [
        f"{model} ({answer.model}): {answer.elements / 1e9:.3f} billion parameters{trains}.",
        f"{asked.gpus} GPU{'s' if asked.gpus > 1 else ''} of {asked.memory:g} GB, {dtype}, micro-batch {batch}. GiB:",
        "",
    ]
    head = ("mode", "at rest", "peak", "in", "fits", "time", "the lines to write")
    cells = [head]
    for row in answer.rows:
        spare = answer.spare(row)
        is_known = row.forward is not None
        verdict = answer.verdict(row) + (
            f", {abs(spare):.1f} {'left' if spare >= 0 else 'too much'}" if is_known else ""
        )
        phase = row.phase if is_known else "at least"
        pace = f"{row.mode.pace:.1f} x" if row.mode.pace else ""
        peaks = (f"{row.at_rest / GIB:.1f}", f"{row.peak / GIB:.1f}")
        cells.append((row.mode.name, *peaks, phase, verdict, pace, row.line))
    widths = [max(len(cell[column]) for cell in cells) for column in range(len(head) - 1)]
    for cell in cells:
        lines.append("  ".join([text.ljust(width) for text, width in zip(cell, widths)] + [cell[-1]]).rstrip())
    shown = answer.first
    made_of = ", ".join(f"{name} {count / GIB:.2f}" for name, count in shown.parts.items() if count / GIB >= 0.005)
    lines += ["", f'The peak of "{shown.mode.name}" on rank {shown.rank}: {made_of}.']
    lines += answer.notes
    if dtype in WRITTEN:
        lines.append(f"With every line of DeepSpeed goes {WRITTEN[dtype]}.")
    lines.append(
        '"time" is that of a step as a multiple of plain ZeRO-1\'s: of Qwen3-8B on 2 H200s (docs/performance.md), and '
        "not of this model."
    )
    left_out = ", ".join(f"{name} {count:.2f}" for name, count in answer.left_out.items())
    lines.append(
        f"Off the {asked.memory:g} go {left_out} (measured on 1 and 2 H200s). Beyond the peak torch reserved up to "
        f"{RESERVED['fork']:.0%} of it, and of FSDP2's {RESERVED['fsdp2']:.0%} (docs/performance.md): what leaves "
        'less is "tight".'
    )
    return lines


if __name__ == "__main__":
    sys.exit(main())

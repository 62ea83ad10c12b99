# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Estimates whether a model fits on GPUs, in which mode, and what the peak is made of."""

import argparse
import json
import sys
from typing import Any, Dict, List, Optional

PROGRAM = "python -m deepspeed.compile.fits"
# Arguments that are fields of ``modes.Question``.
ASKED = (
    *("gpus", "memory", "sequence", "micro_batch", "accumulation", "lora"),
    *("inputs_on_host", "mlp_tiles", "loss_tiles", "seconds"),
)


def parser() -> argparse.ArgumentParser:
    """Returns the command's parser of arguments."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__)
    parser.add_argument(
        "--model", required=True, help="a name of the hub, a folder, a config.json, or module:function that makes it"
    )
    parser.add_argument("--gpus", type=int, default=1, help="how many train it. Default: 1")
    parser.add_argument("--memory", type=float, default=80, help="of each GPU, GB as it is sold. Default: 80")
    parser.add_argument("--sequence", type=int, help="tokens in a sequence. Default: 4096, or what the model has")
    parser.add_argument("--micro-batch", type=int, help="sequences on each GPU. Default: 1, or what --config says")
    parser.add_argument("--accumulation", type=int, help="micro-batches in a step. Default: 1, or what --config says")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank, and freeze the rest")
    parser.add_argument(
        "--inputs-on-host", action="store_true", help="of checkpointed layers, by DeepSpeed or transformers"
    )
    parser.add_argument("--mlp-tiles", type=int, metavar="N", help="DeepSpeed's TiledMLP cuts each MLP into N tiles")
    parser.add_argument(
        "--loss-tiles",
        type=int,
        metavar="N",
        help="DeepSpeed's sequence_tiled_compute cuts head and loss into N",
    )
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help="Default: bf16, or what --config says")
    parser.add_argument("--config", metavar="FILE", help="a ds_config.json, which becomes a line of the table")
    parser.add_argument("--checkpoint", action="store_true", help="with --config: every layer is checkpointed")
    parser.add_argument(
        "--seconds", type=float, default=300, help="for tracing the model; then print what is known. Default: 300"
    )
    parser.add_argument("--all", action="store_true", help="print every mode, with the lines to write for each")
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

    from . import sources
    from .advice import text_of
    from .estimate import fits

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, None: None}
    try:
        answer = fits(
            sources.named(options.model),
            config,
            options.checkpoint,
            say=lambda sentence: print(f"... {sentence}", file=sys.stderr, flush=True),
            dtype=dtypes[options.dtype],
            **{name: getattr(options, name) for name in ASKED},
        )
    except ValueError as error:
        parse.error(str(error))
    if options.json is not None:
        with open(options.json, "w") as file:
            file.write(json.dumps(as_json(answer), indent=1) + "\n")
    print("\n".join(text_of(answer, options.model, options.all)))
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
    asked = {name: getattr(answer.question, name) for name in (*ASKED, "sequence_ranks")}
    asked["dtype"] = str(answer.question.dtype)
    known = {"model": answer.model, "elements": answer.elements, "trained": answer.trained}
    return {**known, **asked, "rows": rows, "left_out_gib": answer.left_out, "notes": answer.notes}


if __name__ == "__main__":
    sys.exit(main())

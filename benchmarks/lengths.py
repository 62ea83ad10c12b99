# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Measures long sequences on one GPU: this fork, DeepCompile off with the same pieces, and FSDP2 with torch's.

From the root of the repository::

    python -m benchmarks.lengths --out OUT           eight minutes on an H200; all rows with --seconds 1060
    python -m benchmarks.lengths --tiny --out OUT    the same rows, small, on a CPU

All rows checkpoint every layer of a Qwen3-8B, and keep the layers' inputs on the host. "Off" and "fork, tiles" also
have MLPs in tiles, and "off" its loss: these are the pieces of DeepSpeed's ALST. "Fork" has its loss in chunks, but in
tiles where it says so, at the longest length, and with all layers of 131,072 tokens, and FSDP2 in tiles that it
checkpoints. To compare systems 8 or 6 of 36 layers are trained, with AdamW's states in fp32; all 36 with states in 8
bits and remainders; and 2 at the longest length. Each run starts in a process of its own, so that one that fails loses
one row, and no run starts whose estimate exceeds what is left of ``--seconds``.

What a step should take, before it was measured. A layer has 192.9 million elements, of which the MLP has 151.0. With
checkpointing an element takes 8 operations a token, and in a tiled MLP 10, because a tile's forward runs three times.
Causal attention takes ``2 * 4096 * T`` operations a token in a forward and 2.5 times that in a backward, so 4.5 times
in a checkpointed layer. The head takes 6 operations for each of 622.3 million elements, in tiles 8. At 640 TFLOP/s in
products and 500 in attention these are, in seconds without what reads memory:

=========  ======  ====================  ========================
tokens     layers  a step, MLPs whole    a step, MLPs in tiles
=========  ======  ====================  ========================
32,768     8       1.5                   1.6
32,768     36      5.9                   6.4
131,072    6       10.3                  10.6
262,144    2       12.9                  13.7, loss in tiles too
=========  ======  ====================  ========================
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from . import processes
from .devices import visible_gpus
from .results import PHASES, NoResult, Result, highest, is_measured, mfu, no_result, tokens_a_second

GIB = 2**30
TILE = 4096  # tokens in a tile, as many as the model is wide, which is ALST's rule
# Compiles the native code, so that no run waits for it.
BUILD = "from deepspeed.compile.zero_1_and_2.gradient.native import reducer_module; reducer_module()"
COMMON = "--shape qwen3-8b --adam fused --checkpoint --brief"


class Row(NamedTuple):
    """A run.

    Attributes:
        name: of the system, with its pieces.
        seq, layers: tokens, and layers of the model.
        steps: of which the first two compile: the update in one pass begins with the second.
        seconds: what the run is expected to take, its start included.
        arguments: more arguments of benchmarks.measure.
        mlp, loss: whether these are in tiles.
    """

    name: str
    seq: int
    layers: int
    steps: int
    seconds: int
    arguments: str
    mlp: bool = False
    loss: bool = False

    def all_arguments(self, tiny: bool) -> list[str]:
        """Returns the arguments of benchmarks.measure; ``tiny``: for a small model and short sequences."""
        seq, tile = (self.seq // 256, TILE // 256) if tiny else (self.seq, TILE)
        given = f"{COMMON} --seq {seq} --layers {self.layers} --steps {self.steps} --warm 2 {self.arguments}"
        given += f" --mlp-tiles {seq // tile}" if self.mlp else ""
        given += f" --loss-tiles {seq // tile}" if self.loss else ""
        return given.replace("qwen3-8b", "tiny").split() if tiny else given.split()


DEEPSPEEDS = "--inputs-on-host deepspeed"
FORK, OFF = f"--system deepcompile {DEEPSPEEDS}", f"--system zero {DEEPSPEEDS}"
FSDP2 = "--system fsdp2-resharded --inputs-on-host torch"
K32, K128, K256 = 32_768, 131_072, 262_144
# The most important ones first.
ROWS = (
    Row("FSDP2", K32, 8, 4, 45, FSDP2, loss=True),
    Row("fork", K32, 8, 4, 40, FORK),
    Row("fork, tiles", K32, 8, 4, 40, FORK, mlp=True),
    Row("off", K32, 8, 4, 35, OFF, mlp=True, loss=True),
    Row("fork, tiles", K128, 6, 3, 60, FORK, mlp=True),
    Row("off", K128, 6, 3, 60, OFF, mlp=True, loss=True),
    Row("FSDP2", K128, 6, 3, 65, FSDP2, loss=True),
    Row("fork", K32, 36, 3, 60, f"{FORK} --states 8bit --remainders"),
    Row("fork, tiles", K256, 2, 3, 90, FORK, mlp=True, loss=True),
    Row("fork", K128, 6, 3, 60, FORK),
    Row("off", K256, 2, 3, 70, OFF, mlp=True, loss=True),
    Row("fork, loss in tiles", K128, 6, 3, 60, FORK, loss=True),
    Row("fork, loss in tiles", K32, 8, 4, 40, FORK, loss=True),
    Row("FSDP2", K256, 2, 3, 90, FSDP2, loss=True),
    Row("fork, tiles", K128, 36, 3, 230, f"{FORK} --states 8bit --remainders", mlp=True, loss=True),
    Row("fork, loss in tiles", K256, 2, 3, 75, FORK, loss=True),
)


def _peak(result: Result) -> float:
    """Returns the most bytes that were allocated in the step whose memory was read."""
    return max(highest(result, "phases", phase, "peak") or 0 for phase in PHASES)


def table(found: dict[Row, Result | NoResult]) -> str:
    """Returns the table of all rows, and of ratios between systems that trained the same, as Markdown."""
    heads = "tokens | layers | system | step, s | tokens/s | MFU | first step, s | peak, GiB | with copies | reserved"
    lines = [f"| {heads} | at rest | host | loss |", f"|{' --- |' * 13}"]
    for row, result in found.items():
        if not is_measured(result):
            lines.append(f"| {row.seq} | {row.layers} | {row.name} | {result['why']} |{' |' * 9}")
            continue
        active = [highest(result, "phases", phase, "active") for phase in PHASES]
        memory = [_peak(result), max(active) if all(active) else None, highest(result, "reserved")]
        memory += [highest(result, "phases", "step", "after"), highest(result, "host")]
        used = mfu(result)
        cells = [str(row.seq), str(row.layers), row.name, f"{result['step_s']:.3f}", f"{tokens_a_second(result):,.0f}"]
        cells += [f"{used:.1%}" if used else "-", f"{result['first_step_s']:.1f}"]
        cells += ["-" if figure is None else f"{figure / GIB:.3f}" for figure in memory]
        lines.append(f"| {' | '.join([*cells, format(result['losses'][-1], '.4f')])} |")
    lines += ["", "| tokens | layers | | time | peak |", "| --- | --- | --- | --- | --- |"]
    measured = {row: result for row, result in found.items() if is_measured(result)}
    for row, result in measured.items():
        for other, of_other in measured.items():
            same = (row.seq, row.layers) == (other.seq, other.layers)
            if same and row.name.startswith("fork") and not other.name.startswith("fork"):
                ratios = result["step_s"] / of_other["step_s"], _peak(result) / _peak(of_other)
                named = f"{row.seq} | {row.layers} | {row.name} / {other.name}"
                lines.append(f"| {named} | {ratios[0]:.3f} | {ratios[1]:.3f} |")
    return "\n".join(lines)


def _require(is_built):
    if not is_built:
        sys.exit("The fork's native code could not be built; OUT/lengths.log says why")


def main() -> int:
    """Measures, and prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lengths", description=__doc__.splitlines()[0])
    parser.add_argument("--out", metavar="DIR", default="lengths", help="for lengths.jsonl, .log and .md")
    parser.add_argument("--seconds", type=float, default=480, help="for all runs")
    parser.add_argument("--only", nargs="+", type=int, metavar="N", help=f"rows by number, 0 to {len(ROWS) - 1}")
    parser.add_argument("--tiny", action="store_true", help="small models and sequences, to try the command")
    options = parser.parse_args()
    processes.end_on_signals()
    out, began = Path(options.out), time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    gpus = visible_gpus()[:1]
    found: dict[Row, Result | NoResult] = {}
    with tempfile.TemporaryDirectory(prefix="benchmark-caches-") as name, open(out / "lengths.log", "w") as log:
        caches = Path(name)
        extensions = Path(os.environ.get("TORCH_EXTENSIONS_DIR", caches / "extensions"))
        environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(extensions.resolve())}
        # Beside the first run, which does not need it.
        building = subprocess.Popen(
            [sys.executable, "-c", BUILD], cwd=name, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        for number, row in enumerate(ROWS):
            if options.only and number not in options.only:
                continue
            if row.name != "FSDP2":
                _require(building.wait() == 0)
            left = options.seconds - (time.monotonic() - began)
            if left < row.seconds and not options.tiny:
                found[row] = no_result(f"not run, {left:.0f} s were left")
                continue
            started = time.monotonic()
            of_row = caches / "row.log"
            # A row that hangs takes twice its estimate at most.
            limit = max(2 * row.seconds, 120) if options.tiny else min(2 * row.seconds, left)
            result = processes.run(
                row.all_arguments(options.tiny), gpus, 1, None, caches / "compiled", extensions, limit, of_row, False
            )
            took = time.monotonic() - started
            log.write(f"\n==== {row} took {took:.0f} s\n{of_row.read_text()}")
            log.flush()
            found[row] = result
            with open(out / "lengths.jsonl", "a") as lines:
                lines.write(json.dumps({"row": row._asdict(), "took_s": round(took, 1), "result": result}) + "\n")
            said = f"{result['step_s']:.3f} s a step" if is_measured(result) else result["why"]
            print(f"{row.seq} tokens, {row.layers} layers, {row.name}: {said}; {took:.0f} s in all", flush=True)
            if not is_measured(result):
                print("    " + "\n    ".join(of_row.read_text().strip().splitlines()[-4:]), flush=True)
            (out / "lengths.md").write_text(table(found) + "\n")
        building.wait()
    print("\n" + table(found))
    return int(not any(map(is_measured, found.values())))


if __name__ == "__main__":
    sys.exit(main())

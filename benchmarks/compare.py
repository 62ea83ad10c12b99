# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Measures this fork, the DeepSpeed it is built from, and PyTorch's FSDP2 one after the other on one host.

From the root of the repository::

    python -m benchmarks.compare                                        tiny on a CPU, Qwen3-8B on GPUs
    python -m benchmarks.compare --base /tmp/base --cases plain checkpoint -- --adam fused      all systems
    python -m benchmarks.compare --base /tmp/base --cases plain checkpoint --out results -- --layers 8 --steps 16
    python -m benchmarks.compare --base /tmp/base --systems fork "base without DeepCompile" DDP -- \\
        --shape deep --stage 2 --seq 16

Arguments after `--` go to benchmarks.measure. `--base` is a folder with an unchanged DeepSpeed, made by
`pip install --no-deps --target /tmp/base deepspeed==0.19.8`. The results are written as results.json and results.md
after each run, so a run that fails, or a command that is ended, loses no other run's result. benchmarks.pictures draws
them.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from . import processes
from .devices import visible_gpus
from .results import NoResult, Result, is_measured, no_result
from .tables import markdown, speed

# Arguments of benchmarks.measure for each case, for each system, and for each kind of machine.
CASES = {
    "plain": [],
    "checkpoint": ["--checkpoint"],
    "accumulation": ["--accumulation", "4"],
    "offload": ["--offload"],
}
FORK, NOT_OVERLAPPED, ONE_GRAPH = "fork", "fork, not overlapped", "fork as one graph"
REMAINDERS = "fork, remainders"
BASE, ZERO = "base", "fork without DeepCompile"
KEPT, RESHARDED, FP32_REDUCE = "FSDP2, kept", "FSDP2, resharded", "FSDP2, resharded, fp32 reduce"
FLOAT8_GATHERED = "FSDP2, kept, float8 gathered"
BASE_ZERO, DDP = "base without DeepCompile", "DDP"
FROZEN_SHARDED, ZERO3 = "fork, frozen sharded", "ZeRO-3 without DeepCompile"
SHARDED, SHARDED_REMAINDERS = "fork, sharded", "fork, sharded, remainders"
COLUMNS = {
    FORK: ["--system", "deepcompile"],
    NOT_OVERLAPPED: ["--system", "deepcompile", "--no-overlap-gather"],
    REMAINDERS: ["--system", "deepcompile", "--remainders"],
    ONE_GRAPH: ["--system", "deepcompile", "--one-graph"],
    BASE: ["--system", "deepcompile"],
    ZERO: ["--system", "zero"],
    KEPT: ["--system", "fsdp2-kept"],
    RESHARDED: ["--system", "fsdp2-resharded"],
    FP32_REDUCE: ["--system", "fsdp2-fp32-reduce"],
    FLOAT8_GATHERED: ["--system", "fsdp2-kept", "--float8-gather"],
    BASE_ZERO: ["--system", "zero"],
    DDP: ["--system", "ddp"],
    SHARDED: ["--system", "deepcompile", "--shard", "all"],
    SHARDED_REMAINDERS: ["--system", "deepcompile", "--shard", "all", "--remainders"],
    FROZEN_SHARDED: ["--system", "deepcompile", "--shard", "frozen"],
    ZERO3: ["--system", "zero", "--stage", "3"],
}
# What is measured where no system is named.
DEFAULT = (FORK, REMAINDERS, SHARDED, SHARDED_REMAINDERS, KEPT, RESHARDED, FP32_REDUCE, BASE)
OF_BASE, OF_TORCH = (BASE, BASE_ZERO), (KEPT, RESHARDED, FP32_REDUCE, FLOAT8_GATHERED, DDP)
ON_CPU = "--shape tiny --dtype fp32 --seq 64 --bucket 200000 --steps 12 --warm 4".split()
ON_GPUS = "--shape qwen3-8b".split()
WITH_REMAINDERS = (REMAINDERS, SHARDED_REMAINDERS)
# These arguments follow from the system, or belong to benchmarks.measure alone.
NOT_FOR_ALL = {
    *(
        "--system",
        "--one-graph",
        "--overlap-gather",
        "--no-overlap-gather",
        "--chunked-loss",
        "--activation-budget",
        "--float8-gather",
    ),
    *("--shard", "--remainders"),
    *("--json", "--trace"),
}


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Returns the options of this command, and the arguments for benchmarks.measure."""
    arguments = sys.argv[1:]
    rest = []
    if "--" in arguments:
        rest = arguments[arguments.index("--") + 1 :]
        arguments = arguments[: arguments.index("--")]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description=__doc__.splitlines()[0],
        epilog="Arguments after -- go to benchmarks.measure, see python -m benchmarks.measure --help.",
    )
    parser.add_argument("--base", metavar="DIR", help="folder with an unchanged DeepSpeed")
    parser.add_argument("--systems", nargs="+", choices=COLUMNS, help="which to measure; default: those that can be")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["plain"])
    parser.add_argument(
        "--processes",
        type=int,
        help="ranks; default: one for each GPU, or two on a CPU. More ranks than GPUs share these: memory is that of "
        "as many GPUs, and times are left out",
    )
    parser.add_argument("--again", action="store_true", help="start each system a second time, from torch's caches")
    parser.add_argument("--limit", type=float, default=1800, help="seconds after which a run is ended")
    parser.add_argument("--out", metavar="DIR", default="benchmark-results")
    options = parser.parse_args(arguments)
    if options.base and not (Path(options.base) / "deepspeed").is_dir():
        parser.error(f"--base {options.base} has no deepspeed in it; pip install --no-deps --target puts one there")
    chosen = {argument.partition("=")[0] for argument in rest} & NOT_FOR_ALL
    if chosen:
        parser.error(f"{sorted(chosen)[0]} is chosen for each system here; use --systems, or benchmarks.measure alone")
    if options.processes is not None and options.processes < 1:
        parser.error("--processes must be at least 1")
    return options, rest


def default_systems(case: str, gpus: list[str], rest: list[str]) -> list[str]:
    """Lists the systems to measure in a case where none is named."""
    systems = list(DEFAULT)
    # On GPUs the base with its DeepCompile is the peer, where that works.
    systems += [ZERO] if not gpus or case == "offload" else []
    # The recipe of float8 for which FSDP2 can gather weights in float8.
    systems += [FLOAT8_GATHERED] if "tensorwise" in rest else []
    return systems + ([FROZEN_SHARDED, ZERO3] if "--lora" in rest else [])


def reason_against(
    system: str, case: str, gpus: list[str], rest: list[str], options: argparse.Namespace
) -> str | None:
    """Returns why a system cannot be measured in a case, or None if it can."""
    if system in OF_BASE and not options.base:
        return "--base was not given"
    if system in (SHARDED, SHARDED_REMAINDERS) and (options.processes or len(gpus)) == 1:
        return "one rank has nothing to shard"
    if system == BASE and not gpus:
        return "its DeepCompile needs GPUs"
    if system == BASE and case == "accumulation":
        return "its DeepCompile aborts with accumulation in ZeRO-1"
    if system == BASE and case == "offload":
        return "its DeepCompile takes no optimizer on the host"
    if system in WITH_REMAINDERS and case == "offload":
        return "masters on the host are not kept as remainders"
    if system in WITH_REMAINDERS and ("fp32" in rest or (not gpus and "bf16" not in rest)):
        return "parameters in fp32 have no remainders; give -- --dtype bf16"
    if system in OF_TORCH and case == "offload" and not gpus:
        return "its CPUOffloadPolicy needs GPUs"
    return None


def checked(system: str, result: Result | NoResult) -> Result | NoResult:
    """Returns ``result``, or a failure if the run took this fork for the base or another DeepSpeed for this fork."""
    if not is_measured(result) or system in OF_TORCH or result["environment"]["fork"] == (system not in OF_BASE):
        return result
    version = result["environment"]["deepspeed"]
    if system in OF_BASE:
        return no_result(f"--base holds this fork ({version}); give a folder with an unchanged DeepSpeed", failed=True)
    why = f"deepspeed {version} of this environment is not this fork; pip install it, and mind PYTHONPATH"
    return no_result(why, failed=True)


def _slug(name: str) -> str:
    return name.replace(",", "").replace(" ", "-")


def measure_all(options: argparse.Namespace, rest: list[str], out: Path) -> dict[str, dict[str, Result | NoResult]]:
    """Measures every system in every case, and prints and writes the results after each run.

    Args:
        options: of this command.
        rest: arguments for benchmarks.measure.
        out: an existing folder for results.json and for what the runs print.

    Returns:
        case -> name of the system -> its result, or why there is none.
    """
    gpus = visible_gpus()
    ranks = options.processes or len(gpus) or 2
    results = {case: {} for case in options.cases}
    with tempfile.TemporaryDirectory(prefix="benchmark-caches-") as caches:
        for case in options.cases:
            for system in options.systems or default_systems(case, gpus, rest):
                reason = reason_against(system, case, gpus, rest, options)
                if reason:
                    results[case][system] = no_result(reason)
                    continue
                arguments = [*COLUMNS[system], *(ON_GPUS if gpus else ON_CPU), *CASES[case], *rest]
                site = options.base if system in OF_BASE else None
                compiled = Path(caches) / f"{case}-{_slug(system)}"
                # One DeepSpeed must not load native code that was compiled for another.
                extensions = Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path(caches) / "extensions"))
                extensions = extensions / "of-base" if site else extensions
                for name in (system, f"{system} again")[: 1 + options.again]:
                    print(f"{case}: {name} ...", flush=True)
                    began = time.perf_counter()
                    log = out / f"{case}-{_slug(name)}.log"
                    result = processes.run(arguments, gpus, ranks, site, compiled, extensions, options.limit, log)
                    result = results[case][name] = checked(system, result)
                    told = speed(result) if is_measured(result) else result["why"]
                    print(f"  {told} ({time.perf_counter() - began:.0f} s in all)", flush=True)
                    write(results, out)
    write(results, out)
    return results


def write(results: dict[str, dict[str, Result | NoResult]], out: Path) -> str:
    """Writes the results so far as results.json and results.md; returns the latter's text."""
    (out / "results.json").write_text(json.dumps(results) + "\n")
    tables = []
    for case, of_case in results.items():
        if any(map(is_measured, of_case.values())):
            tables.append(f"## {case}\n\n{markdown(of_case, beside=(BASE, ZERO, *OF_TORCH, BASE_ZERO))}")
        else:
            tables.append(f"## {case}\n\n" + "\n".join(f"{name}: {of['why']}" for name, of in of_case.items()) + "\n")
    table = "\n".join(tables)
    (out / "results.md").write_text(table)
    return table


def main() -> int:
    """Measures, writes and draws; returns the exit status."""
    options, rest = parse_arguments()
    processes.end_on_signals()
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    results = measure_all(options, rest, out)
    print("\n" + write(results, out))
    try:
        from .pictures import draw
    except ImportError:
        print(f"No pictures without matplotlib; later: python -m benchmarks.pictures {out}")
    else:
        files = draw(out)
        print("Pictures: " + (", ".join(map(str, files)) or "none"))
    everything = [result for of_case in results.values() for result in of_case.values()]
    # A system that cannot be measured here does not make the command fail, as long as another one was measured.
    return 1 if any(result.get("failed") for result in everything) or not any(map(is_measured, everything)) else 0


if __name__ == "__main__":
    sys.exit(main())

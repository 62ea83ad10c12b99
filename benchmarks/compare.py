# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Measures this fork, the DeepSpeed it is built from, and PyTorch's FSDP2 one after the other on one host.

    python benchmarks/compare.py                                        tiny on a CPU, Qwen3-8B on GPUs
    python benchmarks/compare.py --base /tmp/base --cases plain checkpoint --out results -- --layers 8 --steps 16

What stands behind `--` goes to train.py. `--base` is a folder with an unchanged DeepSpeed, made by
`pip install --no-deps --target /tmp/base deepspeed==0.19.8`. Results are written as results.json and results.md, and
drawn by pictures.py.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import launch
from report import is_measured, markdown

CASES = {
    "plain": [],
    "checkpoint": ["--checkpoint"],
    "accumulation": ["--accumulation", "4"],
}
FORK, OVERLAPPED, ONE_GRAPH = "fork", "fork, gather overlapped", "fork as one graph"
BASE, ZERO, FSDP2 = "base", "fork without DeepCompile", "FSDP2"
# What each is to train.py.
SYSTEMS = {
    FORK: ["--system", "deepcompile"],
    OVERLAPPED: ["--system", "deepcompile", "--overlap-gather"],
    ONE_GRAPH: ["--system", "deepcompile", "--one-graph"],
    BASE: ["--system", "deepcompile"],
    ZERO: ["--system", "zero"],
    FSDP2: ["--system", "fsdp2"],
}
ON_CPU = "--shape tiny --dtype fp32 --seq 64 --bucket 200000 --steps 12 --warm 4".split()
ON_GPUS = "--shape qwen3-8b".split()


def parse_arguments():
    arguments = sys.argv[1:]
    rest = []
    if "--" in arguments:
        rest = arguments[arguments.index("--") + 1 :]
        arguments = arguments[: arguments.index("--")]
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="Arguments behind -- go to train.py, see train.py --help."
    )
    parser.add_argument("--base", metavar="DIR", help="folder with an unchanged DeepSpeed")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, help="which to measure; default: those that can be")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["plain"])
    parser.add_argument("--processes", type=int, help="default: one for each GPU, or two on a CPU")
    parser.add_argument("--again", action="store_true", help="start each system a second time, from torch's caches")
    parser.add_argument("--limit", type=float, default=1800, help="seconds after which a run is ended")
    parser.add_argument("--out", metavar="DIR", default="benchmark-results")
    options = parser.parse_args(arguments)
    if options.base and not (Path(options.base) / "deepspeed").is_dir():
        parser.error(f"--base {options.base} has no deepspeed in it; pip install --no-deps --target puts one there")
    ours = {"--system", "--one-graph", "--overlap-gather", "--json", "--trace"}
    chosen = {argument.partition("=")[0] for argument in rest} & ours
    if chosen:
        parser.error(f"{sorted(chosen)[0]} is chosen for each system here; use --systems, or train.py alone")
    if options.processes is not None and options.processes < 1:
        parser.error("--processes must be at least 1")
    return options, rest


def reason_against(system, case, gpus, options):
    """Says why a system cannot be measured, or None."""
    if system == BASE and not options.base:
        return "--base was not given"
    if system == BASE and not gpus:
        return "its DeepCompile needs GPUs"
    if system == BASE and case == "accumulation":
        return "its DeepCompile aborts with accumulation in ZeRO-1"
    return None


def checked(system, result):
    """Returns a result, or none if it is not of the DeepSpeed that its name says."""
    if not is_measured(result) or system == FSDP2 or result["environment"]["fork"] == (system != BASE):
        return result
    version = result["environment"]["deepspeed"]
    if system == BASE:
        return launch.none(f"--base holds this fork ({version}); give a folder with an unchanged DeepSpeed", True)
    why = f"deepspeed {version} of this environment is not this fork; pip install it, and mind PYTHONPATH"
    return launch.none(why, failed=True)


def _slug(name):
    return name.replace(",", "").replace(" ", "-")


def measure(options, rest, out):
    """Returns case -> system -> result, or what stands for it, after telling of each run."""
    gpus = launch.devices()
    processes = options.processes or len(gpus) or 2
    systems = options.systems or [name for name in SYSTEMS if name != ZERO or not gpus]
    results = {case: {} for case in options.cases}
    with tempfile.TemporaryDirectory(prefix="benchmark-caches-") as caches:
        for case in options.cases:
            for system in systems:
                reason = reason_against(system, case, gpus, options)
                if reason:
                    results[case][system] = launch.none(reason)
                    continue
                arguments = [*SYSTEMS[system], *(ON_GPUS if gpus else ON_CPU), *CASES[case], *rest]
                site = options.base if system == BASE else None
                compiled = Path(caches) / f"{case}-{_slug(system)}"
                # Native code of one DeepSpeed must not be taken for another's.
                extensions = Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path(caches) / "extensions"))
                extensions = extensions / "of-base" if site else extensions
                for name in (system, f"{system} again")[: 1 + options.again]:
                    print(f"{case}: {name} ...", flush=True)
                    began = time.perf_counter()
                    log = out / f"{case}-{_slug(name)}.log"
                    result = launch.run(arguments, gpus, processes, site, compiled, extensions, options.limit, log)
                    result = results[case][name] = checked(system, result)
                    told = f"{result['step_s']:.4f} s/step" if is_measured(result) else result["why"]
                    print(f"  {told} ({time.perf_counter() - began:.0f} s in all)", flush=True)
                    (out / "results.json").write_text(json.dumps(results) + "\n")
    (out / "results.json").write_text(json.dumps(results) + "\n")
    return results


def main():
    options, rest = parse_arguments()
    launch.end_on_signals()
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    results = measure(options, rest, out)
    tables = []
    for case, of_case in results.items():
        if any(map(is_measured, of_case.values())):
            tables.append(f"## {case}\n\n{markdown(of_case, beside=(BASE, ZERO, FSDP2))}")
        else:
            tables.append(f"## {case}\n\n" + "\n".join(f"{name}: {of['why']}" for name, of in of_case.items()) + "\n")
    table = "\n".join(tables)
    (out / "results.md").write_text(table)
    print("\n" + table)
    try:
        from pictures import draw
    except ImportError:
        print(f"No pictures without matplotlib; later: python {launch.TRAIN.with_name('pictures.py')} {out}")
    else:
        files = draw(out)
        print("Pictures: " + (", ".join(map(str, files)) or "none"))
    everything = [result for of_case in results.values() for result in of_case.values()]
    # What cannot be measured here is no failure of what was.
    return 1 if any(result.get("failed") for result in everything) or not any(map(is_measured, everything)) else 0


if __name__ == "__main__":
    sys.exit(main())

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
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
CASES = {
    "plain": [],
    "checkpoint": ["--checkpoint"],
    "accumulation": ["--accumulation", "4"],
}
FORK, REGIONAL, BASE, ZERO, FSDP2 = "fork", "fork by regions", "base", "fork without DeepCompile", "FSDP2"
# What each is to train.py.
SYSTEMS = {
    FORK: ["--system", "deepcompile"],
    REGIONAL: ["--system", "deepcompile", "--regional"],
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
        parser.error(
            f"--base {options.base} has no deepspeed in it: pip install --no-deps --target {options.base} ..."
        )
    return options, rest


def gpu_count():
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def reason_against(system, case, gpus, options):
    """Says why a system cannot be measured, or None."""
    if system == BASE and not options.base:
        return "--base was not given"
    if system == BASE and not gpus:
        return "its DeepCompile needs GPUs"
    if system == BASE and case == "accumulation":
        return "its DeepCompile aborts with accumulation in ZeRO-1"
    return None


def run(system, arguments, processes, gpus, caches, options, log):
    """Measures one system in processes of its own; returns its result, or a sentence that says what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(caches),
            "TRITON_CACHE_DIR": str(caches / "triton"),
        }
        if system == BASE:
            paths = [str(Path(options.base).resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
            environment["PYTHONPATH"] = os.pathsep.join(paths)
            # Native code of one DeepSpeed must not be taken for another's.
            environment["TORCH_EXTENSIONS_DIR"] = str(Path(tempfile.gettempdir()) / "benchmark-base-extensions")
        if not gpus:
            environment |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(processes)]
        command += [str(HERE / "train.py"), *SYSTEMS[system], "--json", str(file), *arguments]
        with open(log, "w") as output:
            # A session of its own, so that the end of a run that takes too long reaches all of its processes.
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(options.limit)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                return f"not done after {options.limit:.0f} s, see {log}"
        if status or not file.exists():
            return f"ended with exit status {status}, see {log}"
        return json.loads(file.read_text())


def measure(options, rest):
    """Returns case -> system -> result or reason, after telling of each run."""
    gpus = gpu_count()
    processes = options.processes or gpus or 2
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    systems = options.systems or [name for name in SYSTEMS if name != ZERO or not gpus]
    results = {}
    with tempfile.TemporaryDirectory(prefix="benchmark-caches-") as caches:
        for case in options.cases:
            results[case] = {}
            for system in systems:
                reason = reason_against(system, case, gpus, options)
                if reason:
                    results[case][system] = reason
                    continue
                arguments = [*(ON_GPUS if gpus else ON_CPU), *CASES[case], *rest]
                for name in (system, f"{system} again")[: 1 + options.again]:
                    print(f"{case}: {name} ...", flush=True)
                    began = time.perf_counter()
                    log = out / f"{case}-{name.replace(' ', '-')}.log"
                    store = Path(caches) / f"{case}-{system.replace(' ', '-')}"
                    result = run(system, arguments, processes, gpus, store, options, log)
                    results[case][name] = result
                    told = result if isinstance(result, str) else f"{result['step_s']:.4f} s/step"
                    print(f"  {told} ({time.perf_counter() - began:.0f} s in all)", flush=True)
                    (out / "results.json").write_text(json.dumps(results) + "\n")
    return results


def main():
    options, rest = parse_arguments()
    from report import markdown

    results = measure(options, rest)
    tables = []
    for case, of_case in results.items():
        if any(isinstance(result, dict) for result in of_case.values()):
            tables.append(f"## {case}\n\n{markdown(of_case, beside=(BASE, ZERO, FSDP2))}")
        else:
            tables.append(f"## {case}\n\n" + "\n".join(f"{name}: {why}" for name, why in of_case.items()) + "\n")
    table = "\n".join(tables)
    (Path(options.out) / "results.md").write_text(table)
    print("\n" + table)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print(f"No pictures without matplotlib; later: python {HERE / 'pictures.py'} {options.out}")
    else:
        from pictures import draw

        print("Pictures: " + ", ".join(str(file) for file in draw(Path(options.out))))
    measured = [result for of_case in results.values() for result in of_case.values() if isinstance(result, dict)]
    return 0 if measured else 1


if __name__ == "__main__":
    sys.exit(main())

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The benchmark measures what it says: gradients apart from all else, all systems on the same training."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"

# Stands for DeepSpeed's launcher: instead of starting ranks, it writes what a rank would find as the result.
LAUNCHER = """
import importlib.util, json, sys
import deepspeed

arguments = sys.argv[1:]
module = arguments[arguments.index("--module") + 1]
found = {"deepspeed": deepspeed.__file__, "module": module, "file": importlib.util.find_spec(module).origin}
with open(arguments[arguments.index("--json") + 1], "w") as file:
    json.dump(found, file)
"""


@pytest.fixture(scope="module")
def package():
    """Imports the package of benchmarks, and returns ``package(name)``, which imports a module of it.

    The checkout does not come into this process's sys.path, where its folder deepspeed/ could hide the installed one.
    """
    file, search = BENCHMARKS / "__init__.py", [str(BENCHMARKS)]
    spec = importlib.util.spec_from_file_location("benchmarks", file, submodule_search_locations=search)
    sys.modules["benchmarks"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield lambda name: importlib.import_module(f"benchmarks.{name}")
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def timeline(package):
    return package("timeline")


def compare(*arguments):
    """Runs benchmarks.compare on the CPU, as a shell in the repository's root would; returns the finished process."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.compare", *arguments],
        cwd=ROOT,
        env={**environment, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_timeline_sets_gradients_apart(timeline):
    layer = torch.nn.Linear(256, 1024, bias=False)
    x = torch.randn(8, 256)
    weight_bytes, output_bytes = layer.weight.nbytes, 8 * 1024 * 4

    def step():
        with timeline.phase("forward"):
            y = layer(x)
        with timeline.phase("backward"):
            y.backward(torch.ones_like(y))
            target = torch.empty(weight_bytes, dtype=torch.uint8)  # as for a flat partition
        with timeline.phase("step"):
            scratch = torch.empty(weight_bytes, dtype=torch.uint8)
            copy = layer.weight.grad.to(torch.float64)  # as an optimizer's
            del scratch, target, copy
            layer.weight.grad = None

    line = timeline.record(step, "cpu")
    # Tensors of a few elements come and go beside these.
    slack = 4096
    forward, backward, optimizer = (line.allocated_in(name) for name in timeline.PHASES)
    assert 0 <= forward["after"] - output_bytes < slack
    assert 2 * weight_bytes <= backward["after"] - forward["after"] < 2 * weight_bytes + 2 * output_bytes + slack
    assert 3 * weight_bytes - slack <= optimizer["peak"] - backward["after"] < 3 * weight_bytes + slack
    assert 4 * weight_bytes <= line.most_gradients() < 4 * weight_bytes + 2 * output_bytes + slack
    in_forward = [held for held, second in zip(line.gradients, line.seconds) if second < line.phases["backward"][0][0]]
    assert max(in_forward) == 0 and line.gradients[-1] < 2 * output_bytes + slack
    thinned = line.thinned(4)
    assert len(thinned.seconds) < len(line.seconds)
    assert max(thinned.allocated) == max(line.allocated) and thinned.most_gradients() == line.most_gradients()


def test_timeline_follows_memory_that_is_freed_unseen(timeline):
    memory = timeline._Memory({512: 40})
    memory.change(64, 100, False)
    memory.give_away(64)
    memory.give_away(64)
    memory.give_away(128)  # allocated before the recording
    assert (memory.held, memory.of_gradients) == (100, 140)
    memory.change(64, 30, False)
    assert (memory.held, memory.of_gradients) == (30, 40)
    memory.change(64, -30, False)
    memory.change(256, -7, False)
    assert (memory.held, memory.of_gradients) == (0, 40)
    memory.change(512, -40, False)
    assert (memory.held, memory.of_gradients) == (0, 0)


@pytest.mark.parametrize("safe_path", ["", "1"], ids=["plain_path", "safe_path"])
@pytest.mark.parametrize("named_by", ["site", "environment"])
def test_ranks_find_the_package_and_the_deepspeed_that_is_named(package, monkeypatch, tmp_path, named_by, safe_path):
    for folder, launcher in (("named", LAUNCHER), ("current", "raise SystemExit(3)")):
        (tmp_path / folder / "deepspeed" / "launcher").mkdir(parents=True)
        (tmp_path / folder / "deepspeed" / "__init__.py").touch()
        (tmp_path / folder / "deepspeed" / "launcher" / "runner.py").write_text(launcher)
    # The current folder has a folder deepspeed/, as the checkout has, and the checkout may be on PYTHONPATH.
    monkeypatch.chdir(tmp_path / "current")
    searched = [str(ROOT)] if named_by == "site" else [str(ROOT), "../named"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(searched))
    monkeypatch.setenv("PYTHONSAFEPATH", safe_path)
    site = "../named" if named_by == "site" else None
    log = tmp_path / "log"
    found = package("processes").run([], [], 2, site, tmp_path / "caches", tmp_path / "extensions", 60, log)
    assert "deepspeed" in found, log.read_text()
    assert Path(found["deepspeed"]) == tmp_path / "named" / "deepspeed" / "__init__.py"
    assert found["module"] == "benchmarks.measure"
    assert Path(found["file"]).name == "measure.py"
    assert not (tmp_path / "current" / "benchmarks").exists()


@pytest.mark.slow
def test_systems_train_alike(tmp_path):
    pytest.importorskip("transformers", reason="the benchmark needs transformers: requirements/benchmarks.txt")
    pytest.importorskip("matplotlib", reason="its pictures need matplotlib: requirements/benchmarks.txt")
    systems = ["fork", "fork as one graph", "base", "FSDP2"]
    options = ["--systems", *systems, "--cases", "accumulation", "--limit", "200", "--out", str(tmp_path)]
    finished = compare(*options, "--", "--backend", "eager", "--layers", "2", "--steps", "3", "--warm", "1")
    assert finished.returncode == 0, finished.stdout
    results = json.loads((tmp_path / "results.json").read_text())["accumulation"]
    assert results["base"] == {"why": "--base was not given", "failed": False}
    fork = results["fork"]
    assert len(fork["losses"]) == 3
    for other in ("fork as one graph", "FSDP2"):
        assert fork["losses"] == pytest.approx(results[other]["losses"], rel=1e-5)
    bucket, whole = 4 * fork["run"]["bucket"], 4 * fork["parameters"]
    for rank in fork["ranks"]:
        assert rank["counters"]["step"]["bound"] == 0
        assert rank["counters"]["backward"]["bound"] >= whole / 2
        # Between the micro-batches of ZeRO-1 a rank keeps every gradient.
        assert whole <= rank["most_gradients"] < 2.5 * whole + 2 * bucket
        assert rank["phases"]["forward"]["after"] < rank["phases"]["backward"]["peak"]
    assert set(fork["timelines"]) == {"0", "1"}
    for rank, line in fork["timelines"].items():
        end_of_backward = line["phases"]["backward"][-1][1]
        held = [held for held, second in zip(line["gradients"], line["seconds"]) if second <= end_of_backward][-1]
        # What the profiler sees is what the reducer counts. It does not see what gloo's threads free of what was sent.
        assert 0 <= held - fork["ranks"][int(rank)]["counters"]["backward"]["bound"] <= whole
    table = (tmp_path / "results.md").read_text()
    for rank in fork["ranks"]:
        assert 0 < rank["step_s"] and 0 < rank["first_step_s"]
    for row in ("step, median, s", "peak of the backward, MiB", "counted: most pending, MiB", "Not measured: base"):
        assert row in table and row in finished.stdout
    for picture in ("memory-accumulation-first-rank", "memory-accumulation-last-rank", "losses-accumulation"):
        assert (tmp_path / f"{picture}.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--base", "/nowhere"], "--base /nowhere has no deepspeed in it"),
        (["--systems", "fork", "--", "--steps", "1"], "--warm must be at least 1 and less than --steps"),
        (["--systems", "fork", "--", "--seq", "0"], "--seq must be at least 1"),
        (["--", "--system", "fsdp2"], "--system is chosen for each system here"),
        (["--systems", "base"], "base: --base was not given"),
    ],
)
def test_the_benchmark_refuses_in_a_sentence(tmp_path, arguments, sentence):
    finished = compare("--out", str(tmp_path), *arguments)
    assert finished.returncode != 0
    logs = "".join(log.read_text() for log in tmp_path.glob("*.log"))
    assert sentence in finished.stdout + logs
    assert "Traceback" not in finished.stdout + logs

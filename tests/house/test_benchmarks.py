# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The benchmark measures what it says: gradients apart from all else, all systems on the same training."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.pool import free_port

PROGRAM = pytest.mark.program("benchmarks", "requirements/benchmarks.txt")

ROOT = Path(__file__).resolve().parents[2]
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


def test_figures_of_a_step_on_the_host(package, monkeypatch):
    """A part would be timed that does not step the partition, or its time be divided by another number."""
    host, numel, timed = package("host"), 1000, []

    def seconds(part, repetitions):
        timed.append(part)
        part()
        return 1e-6 * len(timed)

    steps = []
    monkeypatch.setattr(host, "seconds", seconds)
    monkeypatch.setattr(host, "step_partition", lambda adam, updates, *_: steps.append(updates is not None))
    monkeypatch.setattr(host.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr("deepspeed.ops.adam.DeepSpeedCPUAdam", torch.optim.SGD)
    figures = dict(host.measure(numel, 3))
    assert steps == [False, True]
    assert [round(figure, 6) for figure in figures.values()] == [1, 2, 3, 4, 2 * 28 / 4]


@PROGRAM
def test_parts_of_a_step_on_the_host(tmp_path):
    # Not from the repository's root, whose folder deepspeed/ has only a part of the package.
    (tmp_path / "benchmarks").symlink_to(BENCHMARKS)
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    printed = subprocess.run(
        [sys.executable, "-m", "benchmarks.host", "--numel", "5000", "--repetitions", "1"],
        cwd=tmp_path,
        env={**environment, **alone, "MASTER_PORT": str(free_port()), "DS_ACCELERATOR": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    figures = dict(re.findall(r"^(norm|ranges|Adam|host memory)[^\n]* ([\d.]+)$", printed, re.MULTILINE))
    assert list(figures) == ["norm", "ranges", "Adam", "host memory"], printed
    # Seven numbers of four bytes for each element, to the last digit printed.
    assert float(figures["host memory"]) == pytest.approx(28 / float(figures["Adam"]), rel=0.01, abs=6e-4)


@PROGRAM
def test_parts_of_a_step_on_one_device(tmp_path):
    pytest.importorskip("transformers", reason="the benchmark needs transformers: requirements/benchmarks.txt")
    (tmp_path / "benchmarks").symlink_to(BENCHMARKS)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    printed = subprocess.run(
        [sys.executable, *"-m benchmarks.parts --shape tiny --layers 1 --seq 32 --repetitions 1".split()],
        cwd=tmp_path,
        # Blocks and losses run as they are: a C++ compiler takes long.
        env={**environment, "DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    ).stdout
    figures = re.findall(r"^(AdamW|norm|loss|model)[^\n]*? ([\d.]+) ms", printed, re.MULTILINE)
    assert [name for name, _ in figures] == ["AdamW"] * 5 + ["norm"] + ["loss"] * 5 + ["model"], printed
    assert all(float(figure) > 0 for _, figure in figures)
    assert "cannot compile" not in printed


def test_recorder_sets_gradients_apart(package):
    """Memory of gradients would count as another's, or another's as theirs.

    It is that of a plain loop, in which no reducer marks what memory is for.
    """
    recorder, results = package("recorder"), package("results")
    data, record, cpu = recorder.data, recorder.record, torch.device("cpu")
    layer = torch.nn.Linear(256, 1024, bias=False)
    x = torch.randn(8, 256)
    weight_bytes, output_bytes = layer.weight.nbytes, 8 * 1024 * 4

    def step():
        with record.phase("forward", cpu):
            y = layer(x)
        with record.phase("backward", cpu):
            y.backward(torch.ones_like(y))
            target = torch.empty(weight_bytes, dtype=torch.uint8)  # as for a flat partition
        with record.phase("step", cpu):
            scratch = torch.empty(weight_bytes, dtype=torch.uint8)
            copy = layer.weight.grad.to(torch.float64)  # as an optimizer's
            del scratch, target, copy
            layer.weight.grad = None

    recording = record.Recording(cpu, {data.PARAMETERS: [layer.weight]})
    step()
    line = recording.stop({})
    # Tensors of a few elements come and go beside these.
    slack = 4096
    forward, backward, optimizer = (results.allocated_in(line, name) for name in results.PHASES)
    assert 0 <= forward["after"] - weight_bytes - output_bytes < slack
    assert 2 * weight_bytes <= backward["after"] - forward["after"] < 2 * weight_bytes + 2 * output_bytes + slack
    assert 3 * weight_bytes - slack <= optimizer["peak"] - backward["after"] < 3 * weight_bytes + slack
    assert set(line.held[data.PARAMETERS]) == {weight_bytes}
    assert 0 <= max(line.held[data.ACTIVATIONS]) - output_bytes < slack
    assert 0 <= max(line.held[data.COPIES]) - 2 * weight_bytes < slack
    assert 2 * weight_bytes <= max(line.held[data.TARGETS]) < 2 * weight_bytes + 2 * output_bytes + slack
    gradients = line.sums(data.OF_GRADIENTS)
    assert 4 * weight_bytes <= max(gradients) < 4 * weight_bytes + 2 * output_bytes + slack
    in_forward = [held for held, second in zip(gradients, line.seconds) if second < line.phases["backward"][0][0]]
    assert max(in_forward) == 0 and gradients[-1] < 2 * output_bytes + slack


@pytest.mark.parametrize("safe_path", ["", "1"], ids=["plain_path", "safe_path"])
@pytest.mark.parametrize("named_by", ["site", "environment"])
def test_ranks_find_the_package_and_the_deepspeed_that_is_named(package, monkeypatch, tmp_path, named_by, safe_path):
    """The benchmark would measure another DeepSpeed than the one it names."""
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


# Stands for the launcher of ranks that compile native code until they are ended.
COMPILES = """
import os, pathlib, time

folder = pathlib.Path(os.environ["TORCH_EXTENSIONS_DIR"], "compiled")
folder.mkdir()
descriptor = os.open(folder / "lock", os.O_CREAT | os.O_EXCL)
print("compiles", flush=True)
time.sleep(600)
"""


def test_locks_of_a_run_that_was_ended(package, tmp_path):
    """The next run would wait for ever for native code that an ended one was compiling."""
    launchers, extensions, log = tmp_path / "deepspeed" / "launcher", tmp_path / "extensions", tmp_path / "log"
    launchers.mkdir(parents=True)
    (launchers.parent / "__init__.py").touch()
    (launchers / "runner.py").write_text(COMPILES)
    of_others = extensions / "others" / "lock"
    of_others.parent.mkdir(parents=True)
    of_others.touch()
    found = package("processes").run([], [], 1, str(tmp_path), tmp_path / "caches", extensions, 3, log)
    assert "not done after 3 s" in found["why"] and log.read_text() == "compiles\n"
    # DeepSpeed's next build would wait for the first one forever. The second one's owner may still compile.
    assert sorted(extensions.glob("*/lock")) == [of_others]


def test_pictures_show_every_system(package, monkeypatch):
    """A picture would leave out a system for which no colour is left."""
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: requirements/benchmarks.txt")
    pictures, figures = package("pictures"), []
    monkeypatch.setattr(pictures, "_write", lambda figure, *_: figures.append(figure))
    names = [str(number) for number in range(1 + len(pictures.COLOURS))]
    pictures.draw_losses({name: {"losses": [2.0, 1.0]} for name in names}, "", Path())
    on = {"losses": [2.0, 1.0], "parameters": 1}
    pictures.draw_demos({name: {"on": on, "config": {"dtype": "fp32", "stage": 1}} for name in names}, Path())
    assert [len(figure.axes[0].lines) for figure in figures] == [len(names), 2 * len(names)]


@PROGRAM
def test_systems_train_alike(package, tmp_path):
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
    (tmp_path / "fork.json").write_text(json.dumps(fork))
    for kind in ("losses", "frontier"):
        picture = tmp_path / f"{kind}.png"
        draw = [sys.executable, "-m", "benchmarks.pictures", kind, picture, tmp_path / "fork.json"]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
        assert subprocess.run(draw, cwd=ROOT, env=environment).returncode == 0 and picture.stat().st_size > 5000
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
        last = max(index for index, second in enumerate(line["seconds"]) if second <= end_of_backward)
        held = sum(line["held"][name][last] for name in ("gradient targets", "gradients on their way"))
        # What the profiler sees is what the reducer counts. It does not see what gloo's threads free of what was sent.
        assert 0 <= held - fork["ranks"][int(rank)]["counters"]["backward"]["bound"] <= whole
    table = (tmp_path / "results.md").read_text()
    for rank in fork["ranks"]:
        assert 0 < rank["step_s"] and 0 < rank["first_step_s"]
        assert 0 < min(rank["phases_s"].values()) and 0.5 < sum(rank["phases_s"].values()) / rank["step_s"] < 1.5
    for row in ("step, median, s", "peak of the backward, MiB", "counted: most pending, MiB", "Not measured: base"):
        assert row in table and row in finished.stdout
    # Where ranks share GPUs, times mean nothing.
    for gpus in (1, 2):
        shared = {**fork, "environment": {**fork["environment"], "gpus": gpus}}
        assert ("step, median" in package("tables").markdown({"fork": shared}, [])) == (gpus == 2)
    for picture in ("memory-accumulation-first-rank", "memory-accumulation-last-rank", "losses-accumulation"):
        assert (tmp_path / f"{picture}.png").read_bytes()[:4] == b"\x89PNG"


@PROGRAM
def test_systems_train_alike_in_float8(tmp_path):
    pytest.importorskip("torchao", reason="float8 needs torchao: requirements/benchmarks.txt")
    options = ["--systems", "fork", "FSDP2, float8 gathered", "--cases", "checkpoint", "--out", str(tmp_path)]
    settings = "--backend eager --layers 1 --steps 3 --warm 1 --float8 tensorwise"
    finished = compare(*options, "--limit", "400", "--", *settings.split())
    assert finished.returncode == 0, finished.stdout
    assert "every layer checkpointed, float8 tensorwise by torchao" in finished.stdout
    fork, gathered = json.loads((tmp_path / "results.json").read_text())["checkpoint"].values()
    # A rounding of the last bit may round a float8 number the other way.
    assert fork["losses"] == pytest.approx(gathered["losses"], rel=1e-3)


def test_float8_is_for_the_layers_of_blocks(package):
    """The head would be multiplied in float8 too, which nobody trains, or parameters would be replaced."""
    pytest.importorskip("torchao", reason="float8 needs torchao: requirements/benchmarks.txt")
    workload = package("workload")
    model = workload.build_model(workload.SHAPES["tiny"], torch.float32, "cpu", checkpoint=False)
    parameters = list(model.parameters())
    workload.multiply_in_float8(model, "rowwise", gathered=False)
    assert all(now is before for now, before in zip(model.parameters(), parameters, strict=True))
    layers = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    converted = {name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"}
    assert layers - converted == {"lm_head"}
    assert type(model.lm_head) is torch.nn.Linear


def test_what_is_gathered_in_float8_is_kept_in_fp32(package):
    """Master weights of the compared system would be rounded, which makes its steps cheaper than ours."""
    pytest.importorskip("torchao", reason="float8 needs torchao: requirements/benchmarks.txt")
    workload = package("workload")
    model = workload.build_model(workload.SHAPES["tiny"], torch.bfloat16, "cpu", checkpoint=False)
    workload.multiply_in_float8(model, "tensorwise", gathered=True)
    weight = model.model.layers[0].mlp.up_proj.weight
    # The wrapper says what it was told. AdamW steps the tensor in it.
    assert weight.dtype == weight._tensor.dtype == torch.float32


@PROGRAM
@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--base", "/nowhere"], "--base /nowhere has no deepspeed in it"),
        # What a rank refuses ends the command. The other sentences of ranks are tested below, without processes.
        (["--systems", "fork", "--processes", "1", "--", "--seq", "0"], "--seq must be at least 1"),
        (["--", "--activation-budget", "0.5"], "--activation-budget is chosen for each system here"),
        (["--", "--system", "fsdp2"], "--system is chosen for each system here"),
        (["--", "--float8-gather"], "--float8-gather is chosen for each system here"),
        (["--systems", "base"], "base: --base was not given"),
    ],
)
def test_the_benchmark_refuses_in_a_sentence(tmp_path, arguments, sentence):
    finished = compare("--out", str(tmp_path), *arguments)
    assert finished.returncode != 0
    logs = "".join(log.read_text() for log in tmp_path.glob("*.log"))
    assert sentence in finished.stdout + logs
    assert "Traceback" not in finished.stdout + logs


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--system", "deepcompile", "--steps", "1"], "--warm must be at least 1 and less than --steps"),
        (
            ["--system", "fsdp2", "--float8-gather", "--float8", "rowwise"],
            "--float8-gather goes with --system fsdp2 and --float8 tensorwise",
        ),
        (["--system", "fsdp2", "--activation-budget", "0"], "--activation-budget goes with --system deepcompile"),
        (["--system", "deepcompile", "--activation-budget", "1.5"], "--activation-budget must be from 0 to 1"),
    ],
)
def test_a_run_refuses_in_a_sentence(package, monkeypatch, capsys, arguments, sentence):
    """A run would measure something else than what its arguments ask for."""
    monkeypatch.setattr(sys, "argv", ["measure", *arguments])
    with pytest.raises(SystemExit):
        package("settings").parse_command_line("")
    assert sentence in capsys.readouterr().err


def test_a_run_within_a_budget_for_activations(package, monkeypatch):
    """A budget of 0 would be taken for none, and the run would keep all activations."""
    monkeypatch.setattr(sys, "argv", ["measure", "--activation-budget", "0"])
    monkeypatch.setenv("RANK", "0")
    given = {}
    monkeypatch.setattr("deepspeed.initialize", lambda **arguments: given.update(arguments) or [None])
    settings = dataclasses.replace(package("settings").parse_command_line("").settings, system="zero")
    package("systems").DeepSpeed(settings, torch.nn.Linear(1, 1))
    assert given["config"]["compile"] == {"deepcompile": False, "activation_memory_budget": 0}

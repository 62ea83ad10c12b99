# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The demo and the programs of the pages run under DeepSpeed's launcher, and the demo prints its table."""

import json
import re
from pathlib import Path

import pytest

from support.documentation import blocks
from support.programs import ON_CPU, launch

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "demo" / "train_qwen3.py"


def run(script, *arguments, processes=2, folder=ROOT / "tests", **environment):
    """Runs a script in processes on CPU, in a folder and with an environment, and returns the finished launcher."""
    launcher = ("--quiet", "--num_accelerators", processes)
    return launch([*launcher, script, *arguments], folder, **ON_CPU, **environment)


@pytest.mark.program("examples/demo")
def test_trains_alike_and_holds_no_gradients_between_steps(tmp_path):
    pytest.importorskip("transformers", reason="the demo needs transformers: pip install -r requirements/demo.txt")
    file = tmp_path / "results.json"
    shape = ["--layers", "1", "--hidden", "128", "--seq", "32"]
    files = ["--json", str(file), "--pictures", str(tmp_path)]
    finished = run(DEMO, "--steps", "3", "--backend", "eager", *shape, *files)
    assert finished.returncode == 0, finished.stdout
    rows = ("DeepCompile off", "first step", "later steps (median)", "loss of the last step", "after the step")
    for row in (*rows, "A CPU shows"):
        assert row in finished.stdout, finished.stdout

    results = json.loads(file.read_text())
    off, on = results["off"], results["on"]
    assert len(on["losses"]) == 3
    assert on["losses"] == pytest.approx(off["losses"], rel=1e-5)
    assert on["losses"][-1] < on["losses"][0] - 0.1, "the model hardly learned, so agreement shows nothing"

    for name in ("off", "on"):
        assert {f"step3-rank{rank}.json" for rank in range(2)} <= {path.name for path in (tmp_path / name).iterdir()}

    held = on["gradient_bytes"]
    assert held["after compile"] == 0
    assert held["after the step"] == 0
    # The partition of one of two ranks is at least half of the gradients.
    whole = 4 * off["parameters"]
    assert whole / 2 <= held["after the backward"] < whole
    assert off["gradient_bytes"]["peak of the backward"] >= whole


@pytest.mark.program("examples/demo")
def test_trains_with_muon(tmp_path):
    pytest.importorskip("transformers", reason="the demo needs transformers: pip install -r requirements/demo.txt")
    file = tmp_path / "Muon.json"
    shape = ["--layers", "1", "--hidden", "128", "--seq", "32"]
    arguments = ["--steps", "3", "--backend", "eager", "--optimizer", "muon", *shape, "--json", str(file)]
    # To compile Newton-Schulz for each shape of a matrix takes a minute.
    finished = run(DEMO, *arguments, TORCH_COMPILE_DISABLE="1")
    assert finished.returncode == 0, finished.stdout
    assert "gradient_clipping" not in finished.stdout
    results = json.loads(file.read_text())
    assert results["config"]["optimizer"] == "muon"
    assert results["on"]["losses"] == pytest.approx(results["off"]["losses"], rel=1e-4)


@pytest.mark.program("examples/demo")
def test_the_demo_refuses_in_a_sentence():
    finished = run(DEMO, "--steps", "2", processes=1)
    assert finished.returncode != 0
    assert "--steps must be at least 3" in finished.stdout
    assert "Traceback" not in finished.stdout, finished.stdout


# Behind the training of the page's program.
TELL = """
import json, pathlib
from deepspeed.compile.zero_1_and_2 import gradient_counters

file = pathlib.Path(__file__).with_name(f"rank{torch.distributed.get_rank()}.json")
told = {"ranks": torch.distributed.get_world_size(), "steps": engine.global_steps, **gradient_counters(engine)}
file.write_text(json.dumps(told))
engine.destroy()
"""


@pytest.mark.launcher
def test_program_of_the_docs_runs(tmp_path):
    """The page's command would train without DeepCompile, save nothing, or its ranks would not find each other.

    The files are those that the page shows by name, and the program also writes what its ranks have counted.
    """
    page = [block for block in blocks() if block.where.startswith("docs/start/first_run.md")]
    files = {block.file: block for block in page if block.file}
    assert files.keys() == {"train.py", "ds_config.json"}
    for name, block in files.items():
        (tmp_path / name).write_text(block.text.replace("\nengine.destroy()\n", TELL))
    # The page's program draws its data anew each time, and the last batch of one run in many is a hard one.
    program = tmp_path / "train.py"
    program.write_text("import torch\n\ntorch.manual_seed(0)\n" + program.read_text())
    (command,) = [block.text.split() for block in page if "train.py" in block.text and block.language == "sh"]
    arguments = command[command.index("train.py") + 1 :]
    arguments = [str(tmp_path / argument) if argument in files else argument for argument in arguments]
    finished = run(tmp_path / "train.py", *arguments, folder=tmp_path)
    assert finished.returncode == 0, finished.stdout
    losses = [float(loss) for loss in re.findall(r"micro-batch \d+: loss ([\d.]+)", finished.stdout)]
    assert len(losses) == 5 and losses[-1] < losses[0] - 0.2
    assert (tmp_path / "checkpoints" / "latest").read_text() == "global_step25"
    for file in (tmp_path / "rank0.json", tmp_path / "rank1.json"):
        told = json.loads(file.read_text())
        # 100 micro-batches, 4 of them to a step; 4 parameters, all of whose gradients compiled graphs reduce.
        assert (told["ranks"], told["steps"], told["bound"]) == (2, 25, 0)
        assert (told["from_graphs"], told["from_autograd"]) == (400, 0)

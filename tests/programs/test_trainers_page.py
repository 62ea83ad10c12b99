# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The whole programs of docs/start/trainers.md, and Lightning's of examples/, train in two processes on CPU."""

import re
import runpy
import shutil
import sys

import pytest

from support import programs
from support.documentation import ROOT, blocks
from support.pool import free_port, remove_buffers

pytestmark = pytest.mark.program(
    *("docs/start/trainers.md", "examples/lightning_fit.py", "examples/tiny.py", "requirements/front_doors.txt")
)

PAGE = "docs/start/trainers.md"
ON_CPU = {
    "accelerated.py": {
        "Accelerator()": 'Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])',
        "import Accelerator": "import Accelerator, InitProcessGroupKwargs",
    },
    # Its strategy and DeepSpeed ask the device for its number.
    "lightning_fit.py": {
        'DeepSpeedStrategy(config=CONFIG), devices="auto",': "OnCPU("
        'config=CONFIG, parallel_devices=[torch.device("cpu", 0)]), num_nodes=2,',
        "class Module": "class OnCPU(DeepSpeedStrategy):\n"
        "    def setup_environment(self):\n        super(DeepSpeedStrategy, self).setup_environment()\n\n"
        "# Each rank is a host, because Lightning gives each rank of a host a device of its own.\nimport os\n"
        'os.environ.update(NODE_RANK=os.environ["RANK"], LOCAL_RANK="0")\n\n\nclass Module',
    },
}
PACKAGES = {"lightning_fit.py": "lightning"}


def run(program, folder):
    """Runs the page's command for a program, with two processes on CPU. Lightning's processes must be there."""
    commands = [line.split() for block in page() if block.language == "sh" for line in block.text.splitlines()]
    shown = next((words for words in commands if words[-1] == program), ["deepspeed", "--num_gpus", "8", program])
    launcher, *arguments = shown[:-1]
    variables = {"HF_HUB_OFFLINE": "1", **programs.ON_CPU}
    if launcher == "deepspeed":
        assert arguments == ["--num_gpus", "8"]
        return programs.launch(["--num_accelerators", 2, program], folder, **variables)
    assert launcher == "accelerate"
    port = free_port()
    ranks = ["--num_processes", 2, "--main_process_port", port]
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", *arguments, *ranks, program]
    finished = programs.run_program(command, folder, **variables)
    remove_buffers(port)
    return finished


def page():
    """Lists the page's blocks."""
    return [block for block in blocks() if block.where.startswith(PAGE)]


@pytest.mark.parametrize("program", ON_CPU)
def test_a_program_trains(tmp_path, program):
    """The page would show a program or a configuration that does not train as it stands."""
    for package in ("transformers", "accelerate", PACKAGES.get(program, "transformers")):
        pytest.importorskip(package, reason="pip install -r requirements/front_doors.txt")
    model = runpy.run_path(str(ROOT / "examples" / "tiny.py"))["tiny_model"]()
    shutil.copytree(model, tmp_path / "model")
    files = {block.file: block.text for block in page() if block.file}
    files["lightning_fit.py"] = (ROOT / "examples" / "lightning_fit.py").read_text()
    for name, text in files.items():
        for shown, on_cpu in ON_CPU.get(name, {}).items():
            assert shown in text, f"{name} no longer has {shown}"
            text = text.replace(shown, on_cpu, 1)
        # The learning rate is for a trained model.
        text = text.replace("Qwen/Qwen3-0.6B", str(tmp_path / "model")).replace("1e-4", "1e-2")
        (tmp_path / name).write_text(text)
    finished = run(program, tmp_path)
    assert finished.returncode == 0, finished.stdout
    losses = [float(loss) for loss in re.findall(r"(?<!_)loss'?:? '?([\d.]+)", finished.stdout)]
    assert len(losses) >= 8 and losses[-1] < losses[0] - 0.2, finished.stdout
    assert "DeepCompile is compiling 2 blocks of class Qwen3DecoderLayer" in finished.stdout

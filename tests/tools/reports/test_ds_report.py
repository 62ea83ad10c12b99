# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``ds_report`` says of the fork, run as a user runs it."""

import itertools
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed import git_version_info
from deepspeed.accelerator import get_accelerator
from deepspeed.compile.tools.reports import ds_report
from deepspeed.compile.tools.reports.tested_torch import TESTED, listed, untried
from deepspeed.compile.zero_1_and_2.engine.options import OLDEST_TORCH
from deepspeed.compile.zero_1_and_2.gradient.native import reducer_module
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.ops.op_builder.dc import DeepCompileBuilder

from support.native import look_built
from support.on_ranks import on_ranks
from support.parameter_gather import Around
from support.training import batch, compile_backend, engine_by_configuration

ROOT = Path(__file__).resolve().parents[3]


def reported(folder, extensions):
    """Returns name -> value of each line of the report, run in ``folder`` with this folder of native code."""
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(extensions)}
    command = [shutil.which("ds_report"), "--hide_operator_status"]
    output = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=True).stdout
    return dict(re.findall(r"(?m)^([\w' ()/:?-]+?) \.{2,} (.*)$", output))


@pytest.mark.program("deepspeed/compile/tools/reports", "deepspeed/ops/op_builder", "setup.py")
@pytest.mark.skipif(not shutil.which("ds_report"), reason="the folder of ds_report is not in PATH")
def test_the_report_describes_the_fork(tmp_path, monkeypatch):
    lines = reported(tmp_path, extensions=tmp_path)
    assert lines["fork"].startswith(f"{deepspeed.__version__}, DeepSpeed 0.19.8 with another DeepCompile")
    assert lines["fork: will it fit?"].startswith("python -m deepspeed.compile.fits --model ")
    assert lines["fork's native code (dc)"].startswith("not built; the first training builds it")
    release = ".".join(torch.__version__.split(".")[:2])
    device = get_accelerator().device_name()
    tested = "was" if release in TESTED[device] else "was not"
    assert f"; the installed {release} {tested} tested on " in lines["fork's torch"]
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    look_built()
    assert reported(tmp_path, extensions=tmp_path)["fork's native code (dc)"] == f"built, for {device}"


def test_native_code_that_is_not_current_is_not_called_built(tmp_path, monkeypatch):
    """The report would call native code built that the next training compiles, because something else has changed."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    look_built()
    assert DeepCompileBuilder().is_built()
    monkeypatch.setenv("CXX", "c++ -O1")
    assert not DeepCompileBuilder().is_built()


@pytest.mark.follows("; name one in TORCH_EXTENSIONS_DIR")
def test_what_a_build_lacks_is_named(tmp_path, monkeypatch):
    """The report would promise that the first training builds the native code, on a machine that cannot."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    lacks = dict(ds_report.report())["fork's native code (dc)"]
    assert lacks.startswith("cannot be built; this machine lacks a folder for native code that it can write ([Errno ")
    assert str(tmp_path / "file") in lacks and lacks.endswith("; name one in TORCH_EXTENSIONS_DIR)")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert dict(ds_report.report())["fork's native code (dc)"].startswith("not built; the first training builds it")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert dict(ds_report.report())["fork's native code (dc)"].startswith(
        "cannot be built; this machine lacks a C++ compiler (there is no no-such-compiler; `apt-get install g++`"
    )


def test_native_code_of_an_installation_with_another_torch(monkeypatch):
    """The report would call native code built that DeepSpeed refuses to load, because torch was upgraded."""
    release = ".".join(torch.__version__.split(".")[:2])
    monkeypatch.setitem(git_version_info.installed_ops, "dc", True)
    monkeypatch.setattr(git_version_info, "accelerator_name", get_accelerator()._name)
    # Another test may have loaded the code.
    monkeypatch.setattr(OpBuilder, "_loaded_ops", {})
    said = []
    for installed in (release, "2.9"):
        monkeypatch.setitem(git_version_info.torch_info, "version", installed)
        said.append(dict(ds_report.report())["fork's native code (dc)"])
    lacks = f"an installation with torch {release}: it has native code for torch 2.9"
    assert said == [f"built, for {get_accelerator().device_name()}", f"cannot be built; this machine lacks {lacks}"]
    with pytest.raises(RuntimeError, match=f"this machine lacks {re.escape(lacks)}$"):
        reducer_module.__wrapped__()


def on_device():
    return "GPUs" if get_accelerator().device_name() == "cuda" else "CPU"


def test_a_torch_that_was_not_tested_is_named(monkeypatch):
    """The report would take a torch for tested that only looks like one that is."""
    monkeypatch.setattr(torch, "__version__", "2.12.1+cpu")
    assert dict(ds_report.report())["fork's torch"].endswith(f"; the installed 2.12 was not tested on {on_device()}")


@pytest.mark.parametrize(
    "version, device, warns",
    [
        ("2.11.1+cu130", "cuda", 0),
        ("2.12.0a0+git", "cuda", 1),
        ("2.15.1+cpu", "cpu", 0),
        ("2.16.0.dev20270101", "cpu", 1),
        ("3.0.0", "cpu", 1),
        ("3.0.0", "xpu", 0),
    ],
)
def test_a_newer_torch_is_warned_of(version, device, warns):
    """Training would begin with a torch that was tested on CPU alone, or not at all, and nothing would say so."""
    assert len([*untried(version, device)]) == warns


def losses_with(deepcompile):
    torch._dynamo.reset()
    torch.manual_seed(0)
    engine = engine_by_configuration(Around(), deepcompile)
    losses = []
    with compile_backend("eager"):
        for step in range(3):
            loss = engine(batch(step, 0, dist.get_rank(), 4))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    engine.destroy()
    return losses


@pytest.mark.follows("compare the first losses with those of a run with compile.deepcompile set to false")
@on_ranks(2)
def test_losses_of_an_untried_torch_can_be_compared():
    """The advice would not tell a torch that trains from one that does not, because losses differ in any case."""
    off, on = (losses_with(deepcompile) for deepcompile in (False, True))
    assert on == pytest.approx(off, rel=1e-5)


def test_the_releases_of_torch_are_those_of_the_documentation():
    """A release would be added to a page, to the Makefile or to the report alone."""
    cpu, gpus = (listed(TESTED[device]) for device in ("cpu", "cuda"))
    pages = {
        "README.md": f"Tests run on CPU with torch {cpu}, and on up to 4 H100s or H200s of one host with torch {gpus}",
        "docs/start/install.md": f"Tests ran with torch {gpus} on GPUs and with {cpu} on CPU ",
        "docs/internals/verification.md": f"and any torch but {gpus}.",
    }
    texts = {page: " ".join((ROOT / page).read_text().split()) for page in (*pages, "docs/start/going_back.md")}
    for page, sentence in pages.items():
        assert sentence in texts[page], page
    for page in ("README.md", "docs/start/install.md", "docs/start/going_back.md"):
        assert re.findall(r"torch (?:must be )?(\d\S*) or newer", texts[page]) == [OLDEST_TORCH], page
    page = (ROOT / "docs/internals/verification.md").read_text()
    assert {*re.findall(r"torch (2\.\d+)\b", page)} == {*itertools.chain(*TESTED.values())}
    (default,) = re.findall(r"(?m)^TORCH \?= torch==(\d+\.\d+)\.\d+$", (ROOT / "Makefile").read_text())
    # Those with which the fork is installed and tested by default.
    assert {OLDEST_TORCH, default} <= {*TESTED["cpu"]}


@pytest.mark.skipif(not shutil.which("git"), reason="there is no git")
def test_the_commit_is_that_of_now(tmp_path, monkeypatch):
    """The report of links to a checkout would name the commit at which they were made, whatever came since."""

    def git(*arguments):
        command = ["git", "-C", str(tmp_path), "-c", "user.name=one", "-c", "user.email=one@localhost", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    copied, linked = tmp_path / "copied.py", tmp_path / "linked.py"
    copied.touch()
    linked.symlink_to(copied)
    for _ in range(2):
        git("commit", "--allow-empty", "--message", "one more")
        monkeypatch.setattr(ds_report, "__file__", str(linked))
        assert ds_report.commit() == git("rev-parse", "--short", "HEAD")
    # An environment within the checkout that the wheel was not built from.
    monkeypatch.setattr(ds_report, "__file__", str(copied))
    monkeypatch.setattr(deepspeed, "__git_hash__", "that of the wheel")
    assert ds_report.commit() == "that of the wheel"

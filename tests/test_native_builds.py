# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Builds of the native code by several processes, some of which are killed."""

import os
import platform
import signal
import subprocess
import sys
import threading
import time

import pytest

from deepspeed.ops.op_builder import build_lock

from support.beside import warnings_logged

PROGRAM = pytest.mark.program("deepspeed/ops/op_builder")

LONGEST = 60  # seconds
BUILD = """
from deepspeed.ops.op_builder import build_lock, dc
build_lock.SILENT_SECONDS = 0.5
print("begins", flush=True)
dc.DeepCompileBuilder().load_reducer()
"""


class Build:
    """A process that builds the native code with the compiler ``cxx``, in a folder for ``TORCH_EXTENSIONS_DIR``."""

    def __init__(self, folder, cxx):
        self.lock, self.printed = folder / "dc" / "lock", folder / f"{cxx.name}.log"
        environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(folder), "CXX": str(cxx)}
        with open(self.printed, "w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", BUILD],
                env=environment,
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for(self, happened):
        """Waits until ``happened()``, as long as the process runs."""
        until = time.monotonic() + LONGEST
        while not happened():
            assert self.process.poll() is None and time.monotonic() < until, self.text()
            time.sleep(0.05)

    def text(self):
        return self.printed.read_text()

    def kill(self):
        """Ends the process and its children at once, as a job's end does."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def start(tmp_path):
    """Returns ``start(compiler)``, which starts a build with a compiler of this text, or with a missing one."""
    builds = []

    def begin(compiler=None):
        cxx = tmp_path / f"compiler{len(builds)}"
        if compiler is not None:
            cxx.write_text(f"#!/bin/sh\n{compiler}\n")
            cxx.chmod(0o700)
        builds.append(Build(tmp_path, cxx))
        return builds[-1]

    yield begin
    for build in builds:
        build.kill()


@pytest.mark.quick
def test_the_lock_of_a_process_that_was_ended_is_removed(tmp_path):
    """Every later training would wait for a process that is no more, until somebody removes the file."""
    lock, owner = tmp_path / "lock", tmp_path / "owner"
    with build_lock.alone_in(tmp_path):
        ended = owner.read_text()
    owner.write_text(ended)
    lock.touch()
    with warnings_logged() as warnings, build_lock.alone_in(tmp_path):
        assert not lock.exists()
    assert [f"has removed {lock}: process {os.getpid()} on host" in warning for warning in warnings] == [True]
    assert owner.read_text() == ""


def test_the_lock_of_another_host_is_waited_for(tmp_path, monkeypatch):
    """A build on another host, whose process may be alive, would be disturbed."""
    lock = tmp_path / "lock"
    (tmp_path / "owner").write_text("elsewhere\nanother-boot\n7")
    lock.touch()
    monkeypatch.setattr(build_lock, "SILENT_SECONDS", 0)
    threading.Timer(0.5, lock.unlink).start()
    began = time.monotonic()
    with warnings_logged() as warnings, build_lock.alone_in(tmp_path):
        assert time.monotonic() - began >= 0.5
    assert [f"waits for process 7 on host elsewhere to remove {lock}" in warning for warning in warnings] == [True]


@PROGRAM
def test_a_build_that_was_killed_is_taken_over(start):
    first = start("sleep 600")
    first.wait_for(first.lock.exists)
    second = start()
    waits = f"DeepCompile waits for process {first.process.pid} on host {platform.node()}, which builds native code in"
    second.wait_for(lambda: waits in second.text())
    first.kill()
    # The compiler is not there, so the build ends soon.
    assert second.process.wait(LONGEST) == 1
    assert f"DeepCompile has removed {first.lock}: process {first.process.pid} on host" in second.text()
    assert "Error building extension 'dc'" in second.text()
    assert not first.lock.exists() and (first.lock.parent / "owner").read_text() == ""


@PROGRAM
@pytest.mark.parametrize("owner", ["", "elsewhere\nanother-boot\n7"], ids=["nobody", "another-host"])
def test_a_lock_of_others_is_named(start, tmp_path, owner):
    """Its owner may be alive: a process of DeepSpeed as released, or one on another host."""
    (tmp_path / "dc").mkdir()
    (tmp_path / "dc" / "owner").write_text(owner)
    (tmp_path / "dc" / "lock").touch()
    build = start()
    whom = "process 7 on host elsewhere" if owner else "a process"
    build.wait_for(lambda: f"DeepCompile waits for {whom} to remove {build.lock}" in build.text())
    build.lock.unlink()
    assert build.process.wait(LONGEST) == 1
    assert build.text().count("DeepCompile waits for") == 1 and "Error building extension 'dc'" in build.text()

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Builds of the native code by several processes, some of which are killed."""

import errno
import fcntl
import os
import platform
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from deepspeed.compile.zero_1_and_2.gradient.native import reducer_module
from deepspeed.ops.op_builder import build_folder
from deepspeed.ops.op_builder.dc import DeepCompileBuilder

PROGRAM = pytest.mark.program("deepspeed/ops/op_builder")

LONGEST = 400  # seconds
# The builder of the fork's own native code, and one of DeepSpeed's own.
BUILDERS = {
    "dc": "dc.DeepCompileBuilder().jit_load()",
    "deepspeed_shm_comm": "cpu.comm.ShareMemCommBuilder().jit_load()",
}
BUILD = """
import deepspeed.ops.op_builder.cpu.comm
from deepspeed.ops.op_builder import build_folder, cpu, dc
build_folder.SILENT_SECONDS = 0.5
print("begins", flush=True)
%s
"""


class Build:
    """A process that builds native code with the compiler ``cxx``, in a folder for ``TORCH_EXTENSIONS_DIR``."""

    def __init__(self, name, folder, cxx, number):
        self._folder, self._name, self.printed = folder, name, folder / f"{number}.log"
        self._runs = cxx.with_suffix(".runs")
        environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(folder), "CXX": str(cxx)}
        with open(self.printed, "w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", BUILD % BUILDERS[name]],
                env=environment,
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def locks(self):
        """Lists torch's own locks, once a compiler runs: torch gives its lock back where none can be started."""
        return list(self._folder.glob(f"{self._name}-*/*/lock")) if self._runs.exists() else []

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
    """Returns ``start(name, compiler)``, which starts a build with a compiler of this text."""
    builds, cxx = [], tmp_path / "compiler"

    def begin(name, compiler):
        cxx.unlink(missing_ok=True)
        # All of one size, as a compiler of one version has.
        cxx.write_text(f'#!/bin/sh\ntouch "$0.runs"\n{compiler:40}\n')
        cxx.chmod(0o700)
        builds.append(Build(name, tmp_path, cxx, len(builds)))
        return builds[-1]

    yield begin
    for build in builds:
        build.kill()


@PROGRAM
@pytest.mark.parametrize("name", BUILDERS)
def test_a_build_that_was_killed_is_taken_over(start, name):
    """Every later training would wait without a word, until somebody removes the lock that torch leaves."""
    first = start(name, "sleep 600")
    first.wait_for(first.locks)
    (lock,) = first.locks()
    second = start(name, '[ "$1" = --version ]')
    waits = f"waits for another process, which builds native code in {lock.parent.parent}"
    second.wait_for(lambda: waits in second.text())
    first.kill()
    assert lock.exists()
    # The compiler fails, so the build ends soon.
    assert second.process.wait(LONGEST) == 1
    assert f"Error building extension '{name}'" in second.text()
    assert second.text().count("waits for another process") == 1


@pytest.mark.quick
@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK], ids=errno.errorcode.get)
def test_a_file_system_without_locks(monkeypatch, tmp_path, error):
    """A build would wait for ever for a lock that nobody holds, or leave one that outlives a killed host."""
    with monkeypatch.context() as without:
        without.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(error, os.strerror(error))))
        with build_folder._alone_in(tmp_path):
            pass
    with open(tmp_path / "building") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.slow
def test_a_system_without_locks(tmp_path):
    """On Windows, which has no module fcntl, DeepSpeed could not be imported."""
    command = f"""
import pathlib, sys
sys.modules["fcntl"] = None
from deepspeed.ops.op_builder import build_folder
with build_folder._alone_in(pathlib.Path({str(tmp_path)!r})):
    print("builds")
"""
    ran = subprocess.run([sys.executable, "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert "builds" in ran.stdout, ran.stderr


SOURCE = """
#include "answer.h"
#include <torch/extension.h>
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.attr("answer") = ANSWER; }
"""


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """Returns ``environment(name, answer)``, which makes the sources of a module, and the arguments of its build."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "shared"))

    def make(name, answer):
        root = tmp_path / name
        (root / "csrc").mkdir(parents=True)
        (root / "csrc" / "answer.cpp").write_text(SOURCE)
        (root / "csrc" / "answer.h").write_text(f"#define ANSWER {answer}\n")
        monkeypatch.setattr(build_folder, "ROOT", root)
        return {"name": "answer", "sources": [f"{root}/csrc/answer.cpp"], "extra_include_paths": [f"{root}/csrc"]}

    return make


@pytest.mark.quick
def test_a_folder_is_of_all_that_a_build_depends_on(environment, monkeypatch, tmp_path):
    """Environments that share a folder would build in turn what is the same, or load what was built of other code."""
    folder = build_folder.folder_of(**environment("first", 42))
    arguments = environment("second", 42)
    (tmp_path / "second" / "csrc" / "of_others.h").write_text("// Nothing of this module includes it.")
    assert build_folder.folder_of(**arguments) == folder
    others = [build_folder.folder_of(**environment("third", 43))]
    arguments = environment("fourth", 42)
    os.utime(arguments["sources"][0], (0, 0))
    assert build_folder.folder_of(**arguments) == folder
    others.append(build_folder.folder_of(**arguments, extra_cflags=["-O3"]))
    with monkeypatch.context() as changed:
        changed.setenv("CXX", "another-compiler")
        others.append(build_folder.folder_of(**arguments))
    with monkeypatch.context() as changed:
        changed.setattr(platform, "libc_ver", lambda: ("glibc", "2.2"))
        others.append(build_folder.folder_of(**arguments))
    kernels = {**arguments, "sources": [f"{tmp_path}/fourth/csrc/kernels.cu"]}
    others.append(build_folder.folder_of(**kernels))
    # An image with the tools of CUDA sets the first two, and code without kernels depends on none.
    for variable in ("CUDA_HOME", "TORCH_CUDA_ARCH_LIST", "PYTORCH_ROCM_ARCH"):
        monkeypatch.setenv(variable, "another")
        assert build_folder.folder_of(**arguments) == folder, variable
        others.append(build_folder.folder_of(**kernels))
    monkeypatch.setattr(torch, "__version__", "another")
    others.append(build_folder.folder_of(**arguments))
    assert len({folder, *others}) == 1 + len(others)


@pytest.fixture
def compilers(monkeypatch, tmp_path):
    """Puts a folder of compilers into PATH; returns ``install(version)``, which puts one of this version there."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()

    def install(version):
        compiler = tmp_path / "bin" / "c++"
        compiler.unlink(missing_ok=True)
        if version is not None:
            compiler.write_text(f"#!/bin/sh\necho {version}\n")
            compiler.chmod(0o700)

    return install


@pytest.mark.quick
def test_a_folder_is_of_the_compiler(environment, compilers, monkeypatch):
    """A machine with an older C++ library would load what another machine's newer compiler has built."""
    arguments = environment("first", 42)
    folders = []
    for version in ("12.2", "13.2.1", "12.2"):
        compilers(version)
        folders.append(build_folder.folder_of(**arguments))
    assert folders[0] == folders[2] != folders[1]
    # A machine without a compiler can only load what others have built.
    compilers(None)
    assert build_folder.folder_of(**arguments) not in folders
    (folders[1] / "built").write_text("answer")
    (folders[1] / f"answer{torch.utils.cpp_extension.LIB_EXT}").touch()
    assert build_folder.folder_of(**arguments) == folders[1]
    monkeypatch.setenv("CXX", "another-compiler")
    monkeypatch.setenv("CC", "another-compiler")
    assert build_folder.folder_of(**arguments) == folders[1]


@pytest.mark.quick
def test_a_folder_is_of_the_processor(environment, monkeypatch):
    """A machine would crash in code that one with the same home directory has built for another processor."""
    arguments = environment("first", 42)
    native = {**arguments, "extra_cflags": ["-march=native"]}
    folder, of_processor = build_folder.folder_of(**arguments), build_folder.folder_of(**native)
    assert re.search(r"(?m)^(flags|Features|isa|cpu)\s*:", build_folder._processor()) or not os.path.exists(
        "/proc/cpuinfo"
    )
    monkeypatch.setattr(build_folder, "_processor", lambda: "another")
    assert build_folder.folder_of(**arguments) == folder and build_folder.folder_of(**native) != of_processor


@PROGRAM
def test_environments_share_what_they_build(environment, monkeypatch):
    """Each environment would compile native code anew at nearly every start, for a minute or two."""
    for name in ("first", "second"):
        assert build_folder.load(**environment(name, 42)).answer == 42
        # Nothing is compiled from now on.
        monkeypatch.setenv("PATH", "")
        monkeypatch.setattr(torch.utils.cpp_extension, "load", None)


PLAIN = """
#include <Python.h>
#define INIT_OF(name) PyInit_##name
#define INIT(name) INIT_OF(name)
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "answer"};
PyMODINIT_FUNC INIT(TORCH_EXTENSION_NAME)(void) {
    PyObject* made = PyModule_Create(&module);
    PyModule_AddIntConstant(made, "answer", %d);
    return made;
}
"""


def test_code_of_others_that_changes(environment, monkeypatch, tmp_path):
    """A builder of another package would go on with the native code that was built before its source changed."""
    arguments = environment("of_others", 0)
    monkeypatch.setattr(build_folder, "ROOT", tmp_path / "of_deepspeed")
    (source,) = arguments["sources"]
    for answer in (42, 43):
        Path(source).write_text(PLAIN % answer)
        assert build_folder.load(**arguments).answer == answer


@pytest.mark.quick
def test_code_of_others_is_told_apart(environment, monkeypatch):
    """DeepSpeed's own builders would start ninja each time, because they name the headers of CUDA."""
    arguments = environment("any", 0)
    sources, (headers,) = arguments["sources"], arguments["extra_include_paths"]
    monkeypatch.setattr(torch.utils.cpp_extension, "CUDA_HOME", "/opt/cuda")
    assert not build_folder._has_files_of_others(sources, [headers, "/opt/cuda/include"])
    assert build_folder._has_files_of_others(sources, [headers, "/opt/cutlass/include"])
    assert build_folder._has_files_of_others([*sources, "/opt/any.cpp"], [headers])


@pytest.mark.quick
def test_the_cause_is_in_the_sentence(monkeypatch):
    """A rank's error would say that the output above says why, where the output of that rank is not shown."""
    monkeypatch.setattr(DeepCompileBuilder, "is_built", lambda self: True)
    monkeypatch.setattr(DeepCompileBuilder, "load_reducer", mock.Mock(side_effect=RuntimeError("no space is left")))
    with pytest.raises(RuntimeError, match="^DeepCompile could not build its native code: no space is left$"):
        reducer_module.__wrapped__()


@pytest.mark.quick
def test_code_of_deepspeed_without_a_compiler(monkeypatch, tmp_path):
    """A first training on a CPU, for which DeepSpeed builds code of its own, would end in ninja's log."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    (tmp_path / "any.cpp").touch()
    with pytest.raises(RuntimeError) as raised:
        build_folder.load("any", [str(tmp_path / "any.cpp")], [])
    assert str(raised.value) == (
        "DeepSpeed cannot build any, because this machine lacks a C++ compiler (there is no no-such-compiler; "
        "`apt-get install g++`, or name one in CXX)"
    )

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Shows that the tests see faults: plants each fault of ``support/planted.py`` in a copy of the installed package.

    python tests/planted_faults.py                                  # all faults; make faults runs this
    python tests/planted_faults.py "lost bucket" "stale guard"      # some faults
    python tests/planted_faults.py --tests ../other/tests           # the same faults, seen by other tests

For each fault it runs the named files of tests until one fails, with the cases of ``make test``, and prints which test
failed first. It ends with exit status 1 if no test has seen some fault. Native code is compiled anew for a fault in
native code, which takes about a minute, and is kept in the folder of ``--work``.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest

from support.planted import CPP, FAULTS

TESTS = Path(__file__).resolve().parent
OF_CHECKOUT = TESTS.parent
# Of a process whose orphans become children of this process, so that it can end them and count their CPU-seconds.
PR_SET_CHILD_SUBREAPER = 36
BUILD = """
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.torch import build_shm_op
from deepspeed.compile.zero_1_and_2.gradient.native import reducer_module
build_shm_op()
reducer_module()
for name in ("CPUAdamBuilder", "FusedAdamBuilder"):
    get_accelerator().create_op_builder(name).load()
"""


class Copy:
    """A copy of the installed package, in which faults are planted, with its native builds.

    The folder is the same in each run, because torch builds native code anew for sources in another folder.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        (self._original,) = map(Path, importlib.util.find_spec("deepspeed").submodule_search_locations)
        self.package = folder / "package" / "deepspeed"
        shutil.rmtree(self.package, ignore_errors=True)
        # With the times of the files, which say whether bytecode is current.
        shutil.copytree(self._original, self.package)
        # Builds of earlier runs may not be those of this package. Where they are, building again takes seconds.
        for mark in folder.glob("built-*"):
            mark.unlink()

    @contextlib.contextmanager
    def planted(self, fault):
        """Context in which a file of the copy is broken."""
        file, original = self.package / fault.file, self._original / fault.file
        file.write_text(fault.broken(self._original))
        try:
            yield
        finally:
            shutil.copy2(original, file)

    def environment(self):
        """Returns variables with which all processes import the copy. Builds its native code unless that is built."""
        native = self.package / CPP
        files = sorted([*native.glob("*"), *native.with_name("includes").glob("deepcompile*")])
        content = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
        extensions, built = self._folder / "torch_extensions", self._folder / f"built-{content}"
        extensions.mkdir(exist_ok=True)
        own = {
            "PYTHONPATH": self.package.parent,
            "TORCH_EXTENSIONS_DIR": extensions,
            "TORCHINDUCTOR_CACHE_DIR": self._folder / "inductor",
        }
        environment = {**os.environ, **{name: str(value) for name, value in own.items()}}
        if not built.exists():
            subprocess.run([sys.executable, "-c", BUILD], env=environment, check=True, stdout=subprocess.DEVNULL)
            built.touch()
        return environment

    def run(self, folder, tests, limit):
        """Runs tests of a folder, files or single ones, in their order, until a test fails.

        Returns:
            How it ended, the test that ended it, and what that test said: "passed"; "failed"; or "hung", if a test
            took longer than ``limit`` seconds.
        """
        report, log = self._folder / "report.xml", self._folder / "pytest.log"
        report.unlink(missing_ok=True)
        environment = self.environment()
        command = ["pytest", "-x", "--fewer-cases", "-o", f"timeout={limit}"]
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command, f"--junit-xml={report}", *(f"{folder}/{test}" for test in tests)],
                cwd=folder.parent,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                # Its own limit ends a test, but not one that never comes back from native code.
                status = process.wait(timeout=5 * limit)
            except subprocess.TimeoutExpired:
                return "hung", tests[0], "or a later file"
            finally:
                _end_children()
        if status == pytest.ExitCode.OK:
            return "passed", "all tests", ""
        if status != pytest.ExitCode.TESTS_FAILED:
            raise SystemExit(f"pytest ended with status {status}, and not because a test failed:\n{log.read_text()}")
        return _first_failure(report)


def _end_children():
    children = psutil.Process().children(recursive=True)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children)


def _first_failure(report):
    for case in ElementTree.parse(report).iter("testcase"):
        for kind in ("failure", "error"):
            if (found := case.find(kind)) is not None:
                message = found.get("message", "")
                how = "hung" if "Timeout (" in message else "failed"
                # The classname is the path within the folder's parent, with dots.
                test = f"{'/'.join(case.get('classname').split('.')[1:])}.py::{case.get('name')}"
                return how, test, " ".join(message.split())[:200]
    raise SystemExit(f"pytest says that a test failed, and {report} has none")


def _cpu_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", metavar="FAULT", help="the name of a fault; all by default")
    parser.add_argument("--tests", type=Path, default=TESTS, help="the folder of the tests that shall see the faults")
    parser.add_argument("--work", type=Path, default=OF_CHECKOUT / "build" / "faults", help="the folder of the copy")
    parser.add_argument("--limit", type=int, default=300, help="seconds after which a test has not ended")
    arguments = parser.parse_args()
    for name in arguments.faults:
        if name not in FAULTS:
            parser.error(f"there is no fault {name!r}; there are: {', '.join(FAULTS)}")
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    copy = Copy(arguments.work.resolve())
    # These tests hold ranks to importing the copy.
    how, test, message = copy.run(TESTS, ["house/test_planted_faults.py"], arguments.limit)
    if how != "passed":
        raise SystemExit(f"without a fault: {test} {how}: {message}")
    folder, unseen, failed = arguments.tests.resolve(), [], []
    for name in arguments.faults or FAULTS:
        fault, began, spent = FAULTS[name], time.monotonic(), _cpu_seconds()
        files = [file for file in fault.tests if (folder / file).is_file()]
        if not files:
            raise SystemExit(f"{arguments.tests} has none of the files that should see the fault {name!r}")
        try:
            with copy.planted(fault):
                how, test, message = copy.run(folder, files, arguments.limit)
        except ValueError as error:
            raise SystemExit(f"the fault {name!r} cannot be planted: {error}") from None
        seen = how == "failed" or how == "hung" and fault.hangs
        if not seen:
            unseen.append(name)
        elif how == "failed" and test not in failed:
            failed.append(test)
        seconds = f"{time.monotonic() - began:.0f} s, {_cpu_seconds() - spent:.0f} CPU-s"
        print(f"{'seen' if seen else 'NOT SEEN'}: {name} ({seconds}): {test} {how} {message}", flush=True)
    # A test that fails in any case has seen nothing.
    how, test, message = copy.run(folder, failed, arguments.limit) if failed else ("passed", "", "")
    if how != "passed":
        raise SystemExit(f"without a fault: {test} {how}: {message}")
    if unseen:
        raise SystemExit(f"{len(unseen)} faults were not seen: {', '.join(unseen)}")


if __name__ == "__main__":
    main()

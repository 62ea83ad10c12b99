# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Each optional part can be removed: the package is composed without its folder, and the core's tests pass."""

import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from house.test_architecture import needs

from deepspeed.compile.parts import NAMES

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
SOURCES = ("NOTICE", "csrc", "deepspeed", "pyproject.toml", "requirements", "setup.py")
COMPILE = Path("deepspeed", "compile")
ARCHIVES = Path(os.environ.get("DS_BASE_ARCHIVE_DIR") or ROOT / "build" / "archive")
# Seconds that the core's tests may take without a part, so that tests that hang end. They took 26 with two cores that
# other work shared, and 60 beside two other processes of tests (2026-11-28); a busier machine takes any time.
MOST_SECONDS = 900
# Written by the base's setup.py when the package is installed.
BUILT = "git_version_info_installed.py"


def folder_of(name):
    return COMPILE / name.replace(".", "/")


def removed_with(name):
    """Returns a part's name and those of all parts that need it."""
    found = {name}
    while more := {other for other in NAMES if found.intersection(needs(other))} - found:
        found |= more
    return found


def compose_without(names, folder):
    """Composes the package without some parts. Returns the folder that has it."""
    source = folder / "source"
    source.mkdir()
    for path in SOURCES:
        copy = shutil.copytree if (ROOT / path).is_dir() else shutil.copy2
        copy(ROOT / path, source / path)
    for name in names:
        shutil.rmtree(source / folder_of(name))
    tuple_of_names = source / COMPILE / "parts.py"
    text = tuple_of_names.read_text()
    for name in names:
        text, count = re.subn(rf'(?m)^    "{re.escape(name)}",\n', "", text)
        assert count == 1, f"{name} has no line of its own in NAMES"
    tuple_of_names.write_text(text)
    setup = runpy.run_path(str(source / "setup.py"))
    version, _ = setup["read_pin"]()
    setup["compose"](ARCHIVES / f"deepspeed-{version}.tar.gz", version, folder / "tree", False)
    (installed,) = importlib.util.find_spec("deepspeed").submodule_search_locations
    # By itself: beside the package, DeepSpeed would find other copies of csrc, and compile native code of these anew.
    package = folder / "site" / "deepspeed"
    package.parent.mkdir()
    (folder / "tree" / "deepspeed").rename(package)
    shutil.copy2(Path(installed, BUILT), package / BUILT)
    return package.parent


def test_parts_stand_behind_those_that_they_need():
    """A part would look for one that is not made yet, and do without it."""
    for index, name in enumerate(NAMES):
        assert set(needs(name)) <= set(NAMES[:index]), name


def test_parts_that_cut_graphs_stand_behind_others():
    """Such a part would be asked first, and others not told of graphs that it makes in place of a frame's."""
    sources = {name: ROOT / folder_of(name) / "feature.py" for name in NAMES}
    texts = {name: path.read_text() for name, path in sources.items() if path.is_file()}
    around = [name for name, text in texts.items() if "def around_compile(" in text]
    cut = [name for name in around if "frame.compile_graph(" in texts[name]]
    assert cut and len(around) > len(cut) and around[-len(cut) :] == cut


# The two that take the most others with them. Parts of the rest try all.
LARGEST = sorted(NAMES, key=lambda name: -len(removed_with(name)))[:2]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in LARGEST else pytest.mark.slow) for name in NAMES]
)
@pytest.mark.launcher
def test_the_core_does_without(name, tmp_path):
    """The core would need a part without saying so, and nobody could remove the part."""
    package = compose_without(removed_with(name), tmp_path)
    files = [str(path) for path in TESTS.rglob("test_*.py") if "\n@pytest.mark.core\n" in path.read_text()]
    environment = {**os.environ, "PYTHONPATH": str(package)}
    command = [sys.executable, "-c", "import deepspeed; print(deepspeed.__file__)"]
    printed = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout
    assert printed.split("\n")[-2].startswith(str(package))
    command = [shutil.which("pytest"), "-q", "-m", "core", "--fewer-cases", "-p", "no:cacheprovider", *files]
    returncode, output = run_within(MOST_SECONDS, command, cwd=TESTS, env=environment)
    assert returncode == 0, output


def run_within(seconds, command, **where):
    """Runs a command, and ends it after so many seconds. Returns its status, None if it was ended, and its output."""
    with tempfile.TemporaryFile("w+") as output:
        try:
            returncode = subprocess.run(command, stdout=output, stderr=output, timeout=seconds, **where).returncode
        except subprocess.TimeoutExpired:
            returncode = None
        output.seek(0)
        return returncode, f"{output.read()}\n{'' if returncode is not None else f'not at its end in {seconds:.0f} s'}"


def test_a_run_that_takes_too_long_is_ended():
    """Trying all parts would take hours, or for ever where the core waits for a part that is gone."""
    program = "import time; print('began', flush=True); time.sleep({})"
    began = time.monotonic()
    returncode, output = run_within(2, [sys.executable, "-S", "-c", program.format(600)])
    assert returncode is None and "began" in output and "not at its end in 2 s" in output
    assert time.monotonic() - began < 60
    assert run_within(60, [sys.executable, "-S", "-c", program.format(0)]) == (0, "began\n\n")

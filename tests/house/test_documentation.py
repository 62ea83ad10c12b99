# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Blocks of code in the README and in ``docs/`` run, or are parsed by what would run them; links lead somewhere.

Blocks with the name of a file are in ``test_demo.py`` and ``test_trainers_page.py``, drawings in ``test_site.py``.
"""

import contextlib
import inspect
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from deepspeed.launcher import runner
from deepspeed.runtime import constants
from deepspeed.runtime.config import DeepSpeedConfig

from support.documentation import PAGES, ROOT, blocks, commands, documented, links, tokens
from support.parameter_gather import Around
from support.training import batch, compile_backend, engine_by_configuration

# What a block of Python may quote: the tests run all of these.
SOURCES = [path.read_text() for folder in ("examples", "deepspeed") for path in sorted((ROOT / folder).rglob("*.py"))]


def of(language):
    """Lists the blocks in a language."""
    return [block for block in blocks() if block.language == language]


@pytest.mark.quick
def test_every_block_says_what_it_is():
    """A block in another language would be tested by nothing."""
    kinds = {"python", "json", "sh", "mermaid", "text", "yaml"}
    assert [block.where for block in blocks() if block.language not in kinds] == []


@pytest.mark.quick
@pytest.mark.parametrize("block", of("text"), ids=str)
def test_what_a_command_prints(block):
    """A page would show an answer of ``fits`` as it printed it once."""
    from deepspeed.compile.tools.fits.advice import COLUMNS, text_of
    from deepspeed.compile.tools.fits.modes import MODES

    lines = block.text.splitlines()
    assert max(map(len, lines)) <= COLUMNS
    head = next(line for line in lines if line.startswith("mode"))
    assert all(
        f'"{title.strip()}"' in inspect.getsource(sys.modules[text_of.__module__])
        for title in head.split("  ")
        if title.strip()
    )
    rows = lines[lines.index(head) + 1 :]
    names = [row.split("  ")[0] for row in rows]
    assert names and set(names) <= {mode.name for mode in MODES}
    assert lines[0].startswith("Recommended: ") and any(lines[0].startswith(f"Recommended: {name}.") for name in names)


@pytest.mark.quick
@pytest.mark.parametrize("block", of("json"), ids=str)
def test_configuration(block):
    """A page would show a configuration that DeepSpeed refuses, or a section that it does not know.

    A block may also show a part of a configuration.
    """
    config = json.loads(block.text if block.text.startswith("{") else f"{{{block.text}}}")
    # Of a section that it does not know DeepSpeed says nothing.
    assert config.keys() <= {*map(str, vars(constants).values()), *(name.partition(".")[0] for name in documented())}
    DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, **without_auto(config)})


def without_auto(config):
    """Returns a configuration without the values that trainers of transformers fill in."""
    return {
        name: without_auto(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if value != "auto"
    }


def run_beside_an_engine(quoted):
    """Runs blocks, one after the other, behind a step of ``engine``."""
    engine = engine_by_configuration(Around(), True, compile={"deepcompile": True, "overlap_param_gather": True})
    with compile_backend("eager"):
        engine.backward(engine(batch(0, 0, dist.get_rank(), 4)))
        engine.step()
        for block in quoted:
            exec(compile(block.text, block.where, "exec"), {"engine": engine})
    engine.destroy()


def test_python(ranks):
    """A page would show Python that raises.

    A block quotes a file that tests run, or runs after a step of ``engine``.
    """
    own = [
        block for block in of("python") if block.file is None and not any(block.text in source for source in SOURCES)
    ]
    without = [block.where for block in own if not re.search(r"\bengine\b", block.text)]
    assert own and without == [], "these neither quote a file that runs nor do anything with an engine"
    ranks(2).run(run_beside_an_engine, own)


def settings_of_torch():
    """Yields (page, lines of Python) for each sentence that tells the reader to set something of torch."""
    for page in PAGES:
        for token in tokens(page):
            codes = [child.content for child in token.children or () if child.type == "code_inline"]
            lines = [code for code in codes if re.fullmatch(r"import torch\S*|torch\.[\w.]+ = \w+", code)]
            if any(" = " in line for line in lines):
                yield str(page.relative_to(ROOT)), lines


@pytest.mark.slow
@pytest.mark.parametrize("page, lines", list(settings_of_torch()), ids=str)
def test_settings_of_torch(page, lines):
    """A page would name a setting of a module that `import deepspeed` does not import, so that it raises."""
    asserted = [f"assert {line.replace(' = ', ' is ')}" for line in lines if " = " in line]
    program = "\n".join(["import torch", "import deepspeed", *lines, *asserted])
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.quick
def test_settings_of_torch_are_found():
    """The test above would run nothing."""
    found = [line for _, lines in settings_of_torch() for line in lines]
    assert "torch._functorch.config.donated_buffer = False" in found


@pytest.mark.parametrize("block", of("sh"), ids=str)
def test_commands(block, tmp_path, monkeypatch):
    """A page would show a command whose program no longer takes an argument, or that names a file which is gone."""
    for words in commands(block.text):
        program, *arguments = words
        assert program in CHECKS, f"no check for {program}"
        CHECKS[program](arguments, tmp_path, monkeypatch)


def check_make(arguments, tmp_path, monkeypatch):
    """The target is there, and each variable is one of the Makefile's."""
    makefile = (ROOT / "Makefile").read_text()
    assert shutil.which("make"), "make is needed (on Debian: apt-get install make)"
    printed = subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert printed.returncode == 0, printed.stderr
    for name, equals, value in (argument.partition("=") for argument in arguments):
        assert not equals or re.search(rf"^{name} \?=", makefile, re.MULTILINE), f"the Makefile reads no {name}"
        if name == "BENCH_ARGS":
            check_benchmark("compare", shlex.split(value), tmp_path, monkeypatch)


BENCHMARKS = {f"benchmarks.{name}": name for name in ("collectives", "compare", "fits", "measure", "parts", "scale")}


def check_benchmark(module, arguments, tmp_path, monkeypatch):
    """The module's own parser takes the arguments."""
    # Behind all else, so that the repository's deepspeed/ does not hide the installed package.
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])
    from benchmarks import collectives, compare, fits, parts, scale, settings

    parsers = {"collectives": collectives, "fits": fits, "parts": parts, "scale": scale}
    if module in parsers:
        parsers[module].parser().parse_args(arguments)
        return
    (tmp_path / "deepspeed").mkdir(exist_ok=True)
    monkeypatch.setenv("RANK", "0")
    arguments = [str(tmp_path) if argument == "DIR" else argument for argument in arguments]
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    if module == "compare":
        _, arguments = compare.parse_arguments()
        monkeypatch.setattr(sys, "argv", ["measure", *arguments])
    settings.parse_command_line("")


def check_python(arguments, tmp_path, monkeypatch):
    if arguments[:2] == ["-m", "deepspeed.compile.memory_picture"]:
        check_memory_picture(arguments[2:], monkeypatch)
    elif arguments[:2] == ["-m", "deepspeed.compile.fits"]:
        from deepspeed.compile.tools.fits import __main__ as fits

        fits.parser().parse_args(arguments[2:])
    elif arguments[:2] == ["-m", "deepspeed.checkpoint.ds_to_universal"]:
        from deepspeed.checkpoint import ds_to_universal

        monkeypatch.setattr(sys, "argv", arguments[1:])
        ds_to_universal.parse_arguments()
    elif arguments[:2] == ["-m", "deepspeed.utils.zero_to_fp32"]:
        assert len(arguments) == 4, "it takes the folder of checkpoints and that of the weights"
    elif arguments[:2] == ["-m", "benchmarks.tables"]:
        assert arguments[2:], "it takes files"
    else:
        assert arguments[0] == "-m" and arguments[1] in BENCHMARKS, "no check for this use of python"
        check_benchmark(BENCHMARKS[arguments[1]], arguments[2:], tmp_path, monkeypatch)


def check_memory_picture(arguments, monkeypatch):
    """The command takes the arguments, two of which are files. It has nothing to read or to draw here."""
    from deepspeed.compile.tools.memory_picture import __main__ as command

    read = []
    monkeypatch.setattr(command, "read", read.append)
    monkeypatch.setattr(command, "headline", str)
    monkeypatch.setattr(command.data, "drawer", lambda: SimpleNamespace(draw_two=lambda *_: None))
    assert command.main(arguments) == 0
    assert len(read) == 2


def check_deepspeed(arguments, tmp_path, monkeypatch):
    """The launcher takes its arguments, and the program is there and takes the others."""
    launched = runner.parse_args(arguments)
    if launched.module:
        assert launched.user_script in BENCHMARKS, "no check for this module"
        check_benchmark(BENCHMARKS[launched.user_script], launched.user_args, tmp_path, monkeypatch)
    else:
        path = ROOT / launched.user_script
        assert launched.user_script in {block.file for block in blocks()} or path.is_file()
        given = {argument for argument in launched.user_args if argument.startswith("--")}
        assert all(f'("{argument}"' in path.read_text() for argument in given), f"{path.name} takes none of {given}"


# In a process of its own, because pip takes away what setuptools has put in the place of distutils.
PARSE_FOR_PIP = """
import json, sys
from pip._internal.commands import create_command
options, packages = create_command(sys.argv[1]).parse_args(sys.argv[2:])
print(json.dumps([*packages, *getattr(options, "requirements", []), *getattr(options, "editables", [])]))
"""


def check_pip(arguments, tmp_path, monkeypatch):
    """pip takes the options, and what it is to install is there."""
    assert arguments[0] in ("install", "uninstall"), "no check for this command of pip"
    parsed = subprocess.run([sys.executable, "-c", PARSE_FOR_PIP, *arguments], capture_output=True, text=True)
    assert parsed.returncode == 0, parsed.stderr
    names = json.loads(parsed.stdout)
    if arguments[0] == "uninstall":
        assert names == ["deepspeed"]
        return
    requirements = "".join(path.read_text() for path in (ROOT / "requirements").glob("*.txt")).split()
    for name in names:
        assert (ROOT / name).exists() or name in requirements, f"{name} is neither a file nor a requirement"


# What a run of pytest within another one would take from it.
WITHOUT = [word for plugin in ("cacheprovider", "faulthandler", "rerunfailures") for word in ("-p", f"no:{plugin}")]


def check_pytest(arguments, tmp_path, monkeypatch):
    """At least one test is collected. A file that is read soon stands for the folder."""
    arguments = ["tests/house/test_shared_gpus.py" if argument == "tests" else argument for argument in arguments]
    monkeypatch.chdir(ROOT)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        # In this process, which has imported torch.
        assert pytest.main([*WITHOUT, "--collect-only", *arguments]) == 0, printed.getvalue()[-2000:]


def check_source(arguments, tmp_path, monkeypatch):
    """``make`` makes the environment that is activated."""
    environment = str(Path(arguments[0]).parents[1])
    # Another TORCH, with which these tests may have been started, has another environment.
    for name in ("TORCH", "MAKEFLAGS"):
        monkeypatch.delenv(name, raising=False)
    printed = subprocess.run(["make", "-n", "lint"], cwd=ROOT, capture_output=True, text=True).stdout
    assert f"{environment}/bin/" in printed


def check_accelerate(arguments, tmp_path, monkeypatch):
    """The launcher takes its arguments, and the configuration and the program are on a page."""
    launch = pytest.importorskip("accelerate.commands.launch", reason="pip install -r requirements/front_doors.txt")
    assert arguments[0] == "launch", "no check for this command"
    launched = launch.launch_command_parser().parse_args(arguments[1:])
    assert {launched.config_file, launched.training_script} <= {block.file for block in blocks()}


def check_export(arguments, tmp_path, monkeypatch):
    """The Makefile sets or takes away the same variable."""
    assert arguments[0].partition("=")[0] in (ROOT / "Makefile").read_text()


def check_ds_report(arguments, tmp_path, monkeypatch):
    """The command takes no arguments that a page needs."""
    assert not arguments


CHECKS = {
    "accelerate": check_accelerate,
    "deepspeed": check_deepspeed,
    "ds_report": check_ds_report,
    "export": check_export,
    "make": check_make,
    "pip": check_pip,
    "pytest": check_pytest,
    "python": check_python,
    "source": check_source,
}


@pytest.mark.quick
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    """A page would link to a file that has moved. Links to headings are checked where the site is built."""
    assert [link for link in links(page) if not (page.parent / link.partition("#")[0]).exists()] == []


@pytest.mark.quick
def test_the_map_leads_to_every_page():
    """No page would lead to a new page."""
    docs = ROOT / "docs"
    pages = {str(page.relative_to(docs)) for page in docs.rglob("*.md")} - {"README.md"}
    assert pages - set(links(docs / "README.md")) == set()
    assert "docs/README.md" in links(ROOT / "README.md")

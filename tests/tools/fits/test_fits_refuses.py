# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What the command is asked wrongly ends in one sentence that says what to name instead."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn as nn

from deepspeed.compile.fits import fits
from deepspeed.compile.tools.fits import __main__ as command
from deepspeed.compile.tools.fits import sources
from deepspeed.compile.tools.fits.modes import Mode

from support.ids import vary
from support.models import TEXT_SIZES

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    **TEXT_SIZES,
}


def refusal(capsys, *arguments):
    """Returns the one line that the command prints when it ends, without the progress that it reports before."""
    with pytest.raises(SystemExit) as ended:
        command.main([*map(str, arguments)])
    assert ended.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if " error: " in line]
    return line


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder in which the command runs. What is imported from there is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    before = {*sys.modules}
    yield tmp_path
    for name in {*sys.modules}.difference(before):
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.follows("name a configuration whose parts suit each other")
@vary(
    "changed, said",
    [
        ({"num_attention_heads": 0}, "transformers reads no configuration of config.json ("),
        ({"hidden_size": 65}, "is not a multiple of the number of attention heads (4).); name a config.json that it"),
        ({"hidden_size": "wide"}, "Validation error for field 'hidden_size': TypeError: Field 'hidden_size' expected"),
        ({"architectures": [3]}, "name a config.json that it reads, a folder with one, or a model of the hub"),
        ({"hidden_act": "none"}, "transformers makes no model of config.json (KeyError: 'none'); name a config"),
        ({"num_key_value_heads": 0}, "name a configuration whose parts suit each other and its class in architect"),
        ({"architectures": ["GPT2LMHeadModel"]}, "transformers makes no model of config.json ('LlamaConfig' object"),
    ],
)
def test_a_configuration_whose_parts_disagree(capsys, folder, changed, said):
    """Who changed a number of a config.json would read a traceback of transformers, or advice about functions."""
    pytest.importorskip("transformers", reason="a config.json needs transformers: requirements/benchmarks.txt")
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changed}))
    assert said in refusal(capsys, "--model", "config.json")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    with torch.device("meta"):
        assert type(sources.named("config.json")()).__name__ == "LlamaForCausalLM"


@vary(
    "text, said",
    [
        ("def make(:", "mine cannot be imported (invalid syntax (mine.py, line 1)); name a module of this folder or"),
        ("1 / 0", "mine cannot be imported (division by zero); name a module of this folder or of PYTHONPATH"),
        ("import sys; sys.exit(3)", "mine cannot be imported (3); name a module of this folder or of PYTHONPATH"),
        ("make = 3", "mine has no function make; name one that returns a model"),
        ("from os import getcwd as make", "returned str, and no torch.nn.Module; name a function that returns a"),
        ("make = lambda: None", "what makes the model returned NoneType, and no torch.nn.Module; name a function"),
        ("def make(): raise SystemExit(2)", "the model cannot be made without memory (2); name a function without"),
        ("from torch.nn import Linear as make", "name a function without arguments, and leave its weights and its"),
        (
            "import torch; make = lambda: torch.nn.Linear(2, 2).to('cpu')",
            "leave its weights and its device to the program that trains it",
        ),
    ],
)
def test_a_module_that_makes_no_model(capsys, folder, text, said):
    """The command would end in a traceback, or as the module that it imports ends the process."""
    (folder / "mine.py").write_text(text)
    assert said in refusal(capsys, "--model", "mine:make")


@vary(
    "arguments, said",
    [
        (["--model", "none/config.json"], "there is no file none/config.json; name a config.json, a folder with one,"),
        # A file that is JSON, but no configuration.
        (["--model", "a:b", "--config", "list.json"], "has no sections; name a file as DeepSpeed reads it"),
        (["--model", "a:b", "--checkpoint"], "--checkpoint goes with --config"),
    ],
)
def test_files_that_are_not_there(capsys, folder, arguments, said):
    """The command would end with a traceback, and not with a sentence that says what to name."""
    pytest.importorskip("transformers", reason="a config.json needs transformers: requirements/benchmarks.txt")
    (folder / "list.json").write_text("[1, 2]")
    assert said in refusal(capsys, *arguments)


def test_without_transformers(capsys, monkeypatch):
    """Who lacks the package would see an ImportError, and not what to install."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "`pip install transformers`, or name a function that makes" in refusal(capsys, "--model", "some/model")


def test_the_search_path_stays_as_the_module_leaves_it(folder, monkeypatch):
    """The first entry would be removed, which may be one that the module has added for its own imports."""
    (folder / "mine.py").write_text("import sys; sys.path.insert(0, 'of its own'); from torch.nn import Identity")
    before = [*sys.path]
    monkeypatch.setattr(sys, "path", [*before])
    sources.named("mine:Identity")
    assert sys.path == ["of its own", *before]


class Fed(nn.Module):
    """A model whose forward is ``of``."""

    def __init__(self, of, **attributes):
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.forward = of
        vars(self).update(attributes)


@vary(
    "make, said",
    [
        (lambda: Fed(lambda: 1), "Fed takes no tokens; call fits(..., batch=...) with a function that makes it"),
        (lambda: Fed(lambda ids: "text"), "the model returns no tensor, but str; return its loss"),
        (lambda: Fed(lambda ids: ids, main_input_name="pixel_values"), "Fed takes images of no size"),
    ],
)
def test_a_forward_that_cannot_be_called(make, said):
    """A mistake in the model's code would end in a traceback of ours, though its states are known."""
    answer = fits(make, modes=[Mode("plain")])
    assert answer.first.forward is None and answer.first.at_rest > 0
    assert any(said in note for note in answer.notes)


@pytest.mark.follows("the model returns no tensor, but {}; return its loss")
def test_what_the_forward_lacks_is_mended():
    """The advice would not help."""
    taught = fits(
        lambda: Fed(lambda images: images.mean(), main_input_name="pixel_values"),
        modes=[Mode("plain")],
        batch=lambda *_: {"images": torch.empty(2, 4, requires_grad=True)},
    )
    assert taught.first.forward is not None, taught.notes


@pytest.mark.follows("cannot be written: {}; name a file in a folder that there is")
def test_a_place_that_cannot_be_written(capsys, tmp_path):
    """All would be estimated first, for minutes, and then lost in a traceback."""
    arguments = "--model", "no_such_module:make", "--json"
    place = tmp_path / "no folder" / "figures.json"
    assert f"--json {place} cannot be written: " in refusal(capsys, *arguments, place)
    place.parent.mkdir()
    place.write_text("{}")
    # What is there already stays, because the model is refused.
    assert "no_such_module cannot be imported" in refusal(capsys, *arguments, place) and place.read_text() == "{}"


MODEL = """
import torch

def model():
    return torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 8), torch.nn.Flatten(0), Mean())

class Mean(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.without_elements = torch.nn.Parameter(torch.empty(0))

    def forward(self, x):
        return x.mean() + self.without_elements.sum()
"""


@pytest.mark.slow
def test_the_command_names_the_compiler_that_it_needs(tmp_path):
    """A machine on which the reducer cannot be built would show a traceback."""
    (tmp_path / "made.py").write_text(MODEL)
    folders = {name: tmp_path / name for name in ("PATH", "HOME", "TORCH_EXTENSIONS_DIR")}
    for folder in folders.values():
        folder.mkdir()

    def ended(**variables):
        # Where the package itself may lie.
        variables |= {name: value for name, value in os.environ.items() if name == "PYTHONPATH"}
        command = [sys.executable, "-m", "deepspeed.compile.fits", "--model", "made:model", "--gpus", "2", "--all"]
        variables["DS_ACCELERATOR"] = "cpu"
        return subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)

    lacks = ended(**{name: str(folder) for name, folder in folders.items()})
    assert lacks.returncode == 2 and "Traceback" not in lacks.stderr, lacks.stderr
    assert "C++ compiler" in lacks.stderr.splitlines()[-1]
    has = ended(**os.environ)
    assert has.returncode == 0 and "could not be traced" not in has.stdout, has.stderr
    assert "optimizer on the host" in has.stdout

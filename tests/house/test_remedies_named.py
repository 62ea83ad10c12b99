# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Every message that names a remedy has a test that follows the remedy: ``support/remedies.py`` says which."""

import ast
import re

import pytest

from support.documentation import ROOT
from support.remedies import ADVISES_NOTHING, FOLLOWED

pytestmark = pytest.mark.quick

VERBS = (
    "build|call|change|compare|compile|create|destroy|do|drop|enable|give|import|install|leave|load|make|name|omit|pass|"
    "put|raise|register|remove|restart|run|save|set|split|train|undo|use|wait|write"
)
# A text gives advice behind a semicolon or, for example, behind "so".
ADVICE = re.compile(rf"; |(?:: |, or |, so |(?:^|\. )(?:To [^,]+, )?)(?:(?i:{VERBS})) |[`(]pip install |`apt-get ")
# Of what these functions say, and of what is raised, each text may give advice.
SAYS = {"error", "warn", "warning"}
OURS = ("deepspeed/compile", "deepspeed/ops/op_builder")


def is_said(node):
    """Whether a message stands within: an error, a warning, or a sentence of ``refusals()`` or ``warnings()``."""
    if isinstance(node, ast.Raise):
        # The text of an Unfit is a reason, which a warning holds.
        return getattr(getattr(node.exc, "func", None), "id", None) != "Unfit"
    if isinstance(node, ast.Call):
        return getattr(node.func, "attr", getattr(node.func, "id", None)) in SAYS
    return isinstance(node, ast.Yield)


def texts_of_python(source):
    """Yields (text, whether a message has it) of a file's string literals, each with {} for what is put in.

    Docstrings and arguments' help are left out.
    """
    tree = ast.parse(source)
    nodes = [*ast.walk(tree)]
    skipped = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    skipped |= {
        id(node.value) for node in nodes if isinstance(node, ast.keyword) and node.arg in ("help", "description")
    }
    said = {id(part) for node in nodes if is_said(node) for part in ast.walk(node)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            skipped.update(map(id, node.values))
    for node in nodes:
        if id(node) in skipped:
            continue
        if isinstance(node, ast.JoinedStr):
            text = "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
            yield text, id(node) in said
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value, id(node) in said


def texts_of_cpp(source):
    """Yields the same of a file in C++, where literals stand together one behind the other or are added up."""
    literal = r'"(?:[^"\\\n]|\\.)*"'
    for found in re.finditer(rf"{literal}(?:\s*\+?\s*{literal})*", source):
        yield "".join(match[1:-1] for match in re.findall(literal, found[0])), False


def messages():
    """Lists (file, text) of what may give advice."""
    files = [ROOT / "setup.py", *(path for folder in OURS for path in sorted((ROOT / folder).rglob("*.py")))]
    found = [(path, texts_of_python) for path in files]
    found += [(path, texts_of_cpp) for path in sorted((ROOT / "csrc" / "compile").glob("*.cpp"))]
    return [
        (str(path.relative_to(ROOT)), text)
        for path, texts in found
        for text, is_message in texts(path.read_text())
        if len(text) > 20
        and (ADVICE.search(text) or is_message and not text.endswith(": {}"))
        # "import of X" names an edit.
        and not text.startswith("import of ")
    ]


MESSAGES = messages()


def test_every_remedy_has_a_test():
    """A message would advise what does not help: nobody has tried it."""
    advise = [(file, text) for file, text in MESSAGES if not text.endswith(ADVISES_NOTHING)]
    assert [advice for advice in advise if not any(fragment in advice[1] for fragment in FOLLOWED)] == []


def test_every_row_is_of_a_message():
    """A row would outlive its message."""
    texts = [text for _, text in MESSAGES]
    assert [fragment for fragment in FOLLOWED if not any(fragment in text for text in texts)] == []
    assert [end for end in ADVISES_NOTHING if not any(text.endswith(end) for text in texts)] == []


@pytest.mark.parametrize("test", sorted({*FOLLOWED.values()}))
def test_the_tests_are_there(test):
    """A test that follows a remedy would be removed or renamed, and the row still name it."""
    file, _, name = test.partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Every message that names a remedy has a test that follows the remedy: ``support/remedies.py`` says which."""

import ast
import re

import pytest

from support.documentation import ROOT
from support.remedies import FOLLOWED

pytestmark = pytest.mark.quick

VERBS = (
    "build|call|change|compare|compile|create|destroy|do|drop|enable|give|import|install|leave|load|make|name|omit|pass|"
    "put|raise|register|remove|run|save|set|split|train|undo|use|wait|write"
)
# A remedy stands behind a semicolon or, for example, behind "so".
REMEDY = re.compile(
    rf"(?:; (?:[^;,]+, )?|: |, or |, so |(?:^|\. )(?:To [^,]+, )?)(?:(?i:{VERBS})) |`pip install |`apt-get "
)
OURS = ("deepspeed/compile", "deepspeed/ops/op_builder")


def texts_of_python(source):
    """Yields the string literals of a file but for docstrings and arguments' help, each with {} for what is put in."""
    tree = ast.parse(source)
    nodes = [*ast.walk(tree)]
    skipped = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    skipped |= {
        id(node.value) for node in nodes if isinstance(node, ast.keyword) and node.arg in ("help", "description")
    }
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            skipped.update(map(id, node.values))
    for node in nodes:
        if id(node) in skipped:
            continue
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def texts_of_cpp(source):
    """Yields the string literals of a file, those together that stand one behind the other or are added up."""
    literal = r'"(?:[^"\\\n]|\\.)*"'
    for found in re.finditer(rf"{literal}(?:\s*\+?\s*{literal})*", source):
        yield "".join(each[1:-1] for each in re.findall(literal, found[0]))


def messages():
    """Lists (file, text) of the messages that name a remedy."""
    files = [(path, texts_of_python) for folder in OURS for path in sorted((ROOT / folder).rglob("*.py"))]
    files += [(path, texts_of_cpp) for path in sorted((ROOT / "csrc" / "compile").glob("*.cpp"))]
    return [
        (str(path.relative_to(ROOT)), text)
        for path, texts in files
        for text in texts(path.read_text())
        if len(text) > 30 and REMEDY.search(text)
    ]


MESSAGES = messages()


def test_every_remedy_has_a_test():
    """A message would advise what does not help: nobody has tried it."""
    assert [each for each in MESSAGES if not any(fragment in each[1] for fragment in FOLLOWED)] == []


def test_every_row_is_of_a_message():
    """A row would outlive its message."""
    texts = [text for _, text in MESSAGES]
    assert [fragment for fragment in FOLLOWED if not any(fragment in text for text in texts)] == []


@pytest.mark.parametrize("test", sorted({*FOLLOWED.values()}))
def test_the_tests_are_there(test):
    """A test that follows a remedy would be removed or renamed, and the row still name it."""
    file, _, name = test.partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}

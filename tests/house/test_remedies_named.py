# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Every message that names a remedy has a test that follows the remedy: with a part of the message in its mark."""

import ast
import re

import pytest

from support.documentation import ROOT

pytestmark = pytest.mark.quick

VERBS = (
    "ask|assign|build|call|change|compare|compile|create|delete|destroy|do|draw|drop|enable|give|import|install|leave|"
    "load|look|make|move|name|omit|pass|profile|put|raise|record|register|remove|restart|return|run|save|set|split|"
    "start|train|undo|use|wait|write"
)
# A text gives advice where such a verb stands behind a semicolon or, for example, behind "so".
ADVICE = re.compile(
    rf"(?:; |: |, or |, so |\. (?:To [^,]+, )?|^To [^,]+, )(?:(?i:{VERBS})) |[`(]pip install |`apt-get "
)
OURS = ("deepspeed/compile", "deepspeed/ops/op_builder")


def texts_of_python(source):
    """Yields a file's string literals, each with {} for what is put in, without docstrings and arguments' help."""
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
    """Yields the same of a file in C++, where literals stand together one behind the other or are added up."""
    literal = r'"(?:[^"\\\n]|\\.)*"'
    for found in re.finditer(rf"{literal}(?:\s*\+?\s*{literal})*", source):
        yield "".join(match[1:-1] for match in re.findall(literal, found[0]))


def messages():
    """Lists (file, text) of what may be a message, or a part of one."""
    files = [ROOT / "setup.py", *(path for folder in OURS for path in sorted((ROOT / folder).rglob("*.py")))]
    found = [(path, texts_of_python) for path in files]
    found += [(path, texts_of_cpp) for path in sorted((ROOT / "csrc" / "compile").glob("*.cpp"))]
    return [(str(path.relative_to(ROOT)), text) for path, texts in found for text in texts(path.read_text())]


def followed():
    """Lists the parts of messages that tests have in the mark ``follows``."""
    trees = [ast.parse(path.read_text()) for path in sorted((ROOT / "tests").rglob("test_*.py"))]
    marks = [mark for tree in trees for test in tree.body for mark in getattr(test, "decorator_list", ())]
    calls = [mark for mark in marks if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.follows"]
    return [part.value for call in calls for part in call.args if isinstance(part, ast.Constant)]


MESSAGES, FOLLOWED = messages(), followed()


def test_every_remedy_has_a_test():
    """A message would advise what does not help: nobody has tried it."""
    advise = [(file, text) for file, text in MESSAGES if len(text) > 20 and ADVICE.search(text)]
    assert [advice for advice in advise if not any(fragment in advice[1] for fragment in FOLLOWED)] == []


def test_every_mark_is_of_a_message():
    """A mark would outlive its message."""
    texts = [text for _, text in MESSAGES]
    assert [fragment for fragment in FOLLOWED if not any(fragment in text for text in texts)] == []

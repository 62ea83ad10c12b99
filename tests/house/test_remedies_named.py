# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Every message that names a remedy has a test that follows the remedy: with a part of the message in its mark."""

import ast
import re

import pytest

from support.documentation import ROOT

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
# How messages end that advise nothing: they say what is or will be, and texts that are no messages of their own.
ADVISES_NOTHING = (
    # An option has no effect, or another one than asked for.
    "because torch.compile is switched off by compile_kwargs['disable'] or TORCH_COMPILE_DISABLE",
    " no effect, because compile.deepcompile is not true; training is that of DeepSpeed",
    " has no effect on a loss of this model, because {}; it is computed in one piece",
    "=False has no effect, because a parameter without a gradient is stepped on zeros",
    "so every step takes several passes over memory ({}: {})",
    " has no effect, because no block has such parameters of its own",
    " has no effect in this stage, only in stage 3",
    "compile.passes holds 'z3', which has no effect in this stage",
    " has no effect, because gradients are divided by the number of ranks before they are summed",
    " has no effect, because only torch's own backend uses it",
    "DeepCompile keeps {} out of its graphs, where that of liger-kernel 0.8.5 computes wrong numbers",
    # What happened.
    "double backward is not supported by DeepCompile's loss in chunks, nor by torch.compile",
    "DeepCompile has compiled {}; compiling took {} s",
    "DeepCompile is compiling {}; the first step takes longer than later ones",
    "another rank could not load its master weights and has said why; no rank loaded any",
    "has been modified by an inplace operation: {} is at version {}; expected version {} instead",
    "parameter {} is made of {} tensors, and its new values are not",
    "on which engine.compile() has set up DeepCompile ZeRO-1 or ZeRO-2, and which has not been destroyed",
    "are dropped too, and the next micro-batch is the first of a step",
    "{}, so its gradients are dropped",
    "these gradients were dropped, because a later backward raised",
    "waiting for a process that is. This takes about a minute, once per environment.",
    "DeepSpeed waits for another process, which builds native code in {}",
    "cannot be built; this machine lacks {}",
    "not built; the first training builds it, which may take a minute",
    "tested with {}; the installed {} {}",
    # What goes into another text, or has one at its end that advises.
    "so rank {} goes on without compiled code: {}. {}",
    "DeepCompile compiled one frame more than {} times: {}. {}",
    "DeepSpeed cannot build {}, because this machine lacks {}",
    "it calls a module with blocks more than once",
    "nothing can be estimated ({})",
    "another profiler runs",
    "taken by get_model_state_dict()",
    "saved as a part of client_state",
    "a sharded parameter was gathered",
    "give the engine its number",
    # No messages.
    "call of the module in forward()",
    "DO NOT MATCH THE HASHES",
    "micro-batch {}, accumulation {}; {}, torch {}",
)


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


def followed():
    """Lists the parts of messages that tests have in the mark ``follows``."""
    trees = [ast.parse(path.read_text()) for path in sorted((ROOT / "tests").rglob("test_*.py"))]
    marks = [mark for tree in trees for test in tree.body for mark in getattr(test, "decorator_list", ())]
    calls = [mark for mark in marks if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.follows"]
    return [part.value for call in calls for part in call.args if isinstance(part, ast.Constant)]


MESSAGES, FOLLOWED = messages(), followed()


def test_every_remedy_has_a_test():
    """A message would advise what does not help: nobody has tried it."""
    advise = [(file, text) for file, text in MESSAGES if not text.endswith(ADVISES_NOTHING)]
    assert [advice for advice in advise if not any(fragment in advice[1] for fragment in FOLLOWED)] == []


def test_every_mark_is_of_a_message():
    """A mark would outlive its message."""
    texts = [text for _, text in MESSAGES]
    assert [fragment for fragment in FOLLOWED if not any(fragment in text for text in texts)] == []
    assert [end for end in ADVISES_NOTHING if not any(text.endswith(end) for text in texts)] == []

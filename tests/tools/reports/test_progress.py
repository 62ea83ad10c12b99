# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What is logged while graphs are compiled, and before native code is built."""

import contextlib
import logging
import re
import subprocess
import sys
import time
from typing import List, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.backends import debugging
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.utils import calculate_time_spent

from deepspeed.utils import logger

from support.beside import Beside, logged
from support.graph_cache import compiled_anew
from support.ids import vary
from support.models import Block, BlocksWithin
from support.native import look_built
from support.on_ranks import on_ranks
from support.training import REGIONAL, Case, batch

SECONDS = re.compile(r"\d+\.\d s")
# What rank 0 says, each with its seconds left out.
LINES = [
    "Block in (for 3 layers, graph 0)",
    "OtherBlock in (for 2 layers, graph 1)",
    "TwoClasses around its blocks in (graph 2)",
]


class OtherBlock(Block):
    pass


class TwoClasses(BlocksWithin):
    def __init__(self):
        super().__init__()
        self.body.blocks.extend([OtherBlock(8), OtherBlock(8)])


class Seen(NamedTuple):
    lines: List[str]  # what was logged of compilations
    shown: List[str]  # what of DeepCompile a handler of DeepSpeed's default level shows


@compiled_anew()
def trained(case, level, **patched):
    """Trains for two steps; returns what was seen of it."""
    with contextlib.ExitStack() as stack:
        texts = stack.enter_context(logged(level))
        shown, handler = [], logging.Handler(logging.WARNING)
        handler.emit = lambda record: shown.append(f"{record.levelname} {record.getMessage()}")
        logger.addHandler(handler)
        stack.callback(logger.removeHandler, handler)
        # The level of DeepSpeed's logger decides, and logged() does not raise it.
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(level)
        stack.enter_context(torch._inductor.config.patch(**patched))
        torch.manual_seed(0)
        pair = Beside(TwoClasses(), case)
        with contextlib.suppress(NotImplementedError, torch._dynamo.exc.BackendCompilerFailed):
            for step in range(2):
                pair.step(batch(step, 0, dist.get_rank(), 4))
        pair.engine.destroy()
    lines = [text for text in texts if "DeepCompile compiled" in text]
    return Seen(lines, [text for text in shown if "DeepCompile" in text])


def fails(graph):
    raise NotImplementedError


@vary("backend", ["eager"], slow=["inductor"])
def test_compilations_are_told(ranks, backend):
    """A graph would be left out or told twice, or by each rank."""
    first, other = ranks(2).run(trained, Case(backend=backend, config=REGIONAL), logging.INFO)
    lines = [SECONDS.sub("", line).replace("  ", " ") for line in first.lines]
    assert lines == [f"[Rank 0] DeepCompile compiled {line}" for line in LINES]
    assert not other.lines


CLASSES = "3 blocks of class Block and 2 blocks of class OtherBlock"
WHOLE = "TwoClasses as a whole, because compile.regional_compilation is false"


@vary(
    "config, arguments, what",
    [
        (REGIONAL, None, CLASSES),
        ({"compile": {"regional_compilation": False}}, None, WHOLE),
        (REGIONAL, {"disable": True}, None),
    ],
    expects="what",
)
def test_a_first_step_is_told_by_default(ranks, config, arguments, what):
    """The first step would be silent for a minute, and a user not learn what was compiled, or that nothing was."""
    # Copy engines, or what carries instead, have a line of their own.
    section = {**config.get("compile", {}), "copy_engines": False}
    case = Case(config={**config, "compile": section}, compile_kwargs=arguments)
    first, other = ranks(2).run(trained, case, logging.WARNING)
    told = [SECONDS.sub("S s", line) for line in first.shown]
    assert not other.shown
    if what is None:
        off = "torch.compile is switched off by compile_kwargs['disable'] or TORCH_COMPILE_DISABLE"
        assert told == [f"INFO [Rank 0] DeepCompile has compiled nothing in the first step, because {off}"]
        return
    assert told == [
        f"INFO [Rank 0] DeepCompile is compiling {what}; the first step takes longer than later ones",
        f"INFO [Rank 0] DeepCompile has compiled {what}; compiling took S s",
    ]


LATE = "entire_backward_compile"


def compile_for_a_second(gm, example_inputs):
    time.sleep(1)
    return boxed_nop(gm, example_inputs)


@on_ranks(1)
def test_a_backward_that_is_compiled_when_it_runs_counts():
    """The time would lack such backwards, which take longer than the forwards: a third of the time was told."""
    # Where a graph is compiled for one size, torch puts the backward off.
    case = Case(config={"compile": {"regional_compilation": False}}, compile_kwargs={"dynamic": False})
    # Training begins so too, which sets torch's times back.
    torch._dynamo.reset()
    before = calculate_time_spent()
    with mock.patch.object(debugging, "boxed_nop", compile_for_a_second):
        seen = trained(case, logging.WARNING)
    spent = calculate_time_spent()
    frames, backwards = (spent[name] - before.get(name, 0.0) for name in ("entire_frame_compile", LATE))
    told = float(re.search(r"compiling took ([\d.]+) s", seen.shown[-1])[1])
    assert backwards >= 1 and abs(told - (frames + backwards)) < 0.1, (told, frames, backwards)


def test_a_compilation_that_fails_is_not_told(ranks):
    """A graph that could not be compiled would be logged as compiled."""
    case = Case(backend="inductor", config=REGIONAL)
    (seen,) = ranks(1).run(trained, case, logging.INFO, pre_grad_custom_pass=fails)
    assert not seen.lines and not [line for line in seen.shown if "has compiled" in line]


@pytest.mark.program("deepspeed/compile/zero_1_and_2/gradient/native.py", "tests/support/native.py")
@pytest.mark.parametrize("present", [False, True], ids=["to be built", "built"])
def test_a_build_of_native_code_is_told(tmp_path, monkeypatch, present):
    """The compiler does not exist, so that the build ends soon after the line."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "/no-such-compiler")
    if present:
        look_built()
    code = """
from deepspeed.utils import set_log_level_from_string
set_log_level_from_string("info")
from deepspeed.compile.zero_1_and_2.gradient.native import reducer_module
reducer_module()
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 1
    told = "DeepCompile is building its native code, or waiting for a process that is" in result.stdout
    assert told != present, result.stdout

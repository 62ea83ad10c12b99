# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The section ``compile`` as a whole, before an engine is made of it."""

import logging
import re

import pytest
import torch

from deepspeed.compile.config import CompileConfig

from support.beside import logged, warnings_logged
from support.options import SMALL, train_prepared
from support.training import BOUND, Case, build, make_engine

# Options of the fork. Beside ``deepcompile: true`` the last ones would be refused.
OF_THE_FORK = {
    "store_param_remainders": True,
    "shard_frozen": True,
    "chunked_loss": True,
    "activation_memory_budget": 0,
    "monitor_memory": True,
    "regional_compilation": [],
    "overlap_param_gather": True,
    "optimizer_states": "9bit",
}


def trained_without_deepcompile():
    """Returns the warnings of an engine with options of the fork and ``deepcompile: false``, and its error."""
    torch.manual_seed(0)
    case = Case(model=SMALL, config={"compile": {"deepcompile": False, **OF_THE_FORK}}, deepcompile=False)
    module = build(case)
    with warnings_logged() as texts:
        engine = make_engine(module, case)
        error = train_prepared(case, module, engine)
    return [text for text in texts if "compile." in text], error


def test_without_deepcompile_it_trains_as_deepspeed(ranks):
    """``deepcompile: false`` would not be the one switch: other options would be refused, act, or be lost unsaid."""
    (told, error), (of_other, other_error) = ranks(2).run(trained_without_deepcompile)
    (sentence,) = told
    assert not of_other and max(error, other_error) < BOUND
    assert sorted(re.findall(r"compile\.(\w+)", sentence.partition(" have no effect")[0])) == sorted(OF_THE_FORK)


@pytest.mark.quick
def test_what_is_told_without_deepcompile(tmp_path):
    """An option that is off, or that works without DeepCompile, would be called one without effect."""
    picture = {"folder": str(tmp_path)}
    off = {"optimizer_states": None, "shard_frozen": False, "chunked_loss": "auto"}
    with logged(logging.WARNING) as texts:
        assert CompileConfig(memory_picture=picture, **off).memory_picture is not None
        CompileConfig(deepcompile="true", shard_frozen=True)
        assert not texts
        assert CompileConfig(deepcompile="false", shard_frozen=True).set_for_zero_1_and_2() == []
    (sentence,) = texts
    assert "compile.shard_frozen has no effect, because compile.deepcompile is not true" in sentence

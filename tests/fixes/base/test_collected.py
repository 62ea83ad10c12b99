# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Engines that Python collects while the compiler has a mode of tensors open."""

import gc
import weakref

import pytest
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from support.on_ranks import on_ranks
from support.training import Case, batch, build, make_engine


class Asked(TorchDispatchMode):
    """A mode as the compiler opens them, which notes the functions that are called with real tensors."""

    def __init__(self):
        super().__init__()
        self.functions = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.functions.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("offloaded", [False, True])
@on_ranks(1)
def test_an_engine_is_collected_before_its_module(offloaded):
    """A module that outlives its engine would keep the engine, with its gradients' memory on the host."""
    case = Case(adam=True, stage=2, offloaded=offloaded)
    module = build(case)
    engine = make_engine(module, case)
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("is_destroyed, offloaded", [(True, False), (False, False), (True, True), (False, True)])
@on_ranks(1)
def test_an_engine_that_is_collected_while_another_one_compiles(is_destroyed, offloaded):
    """Fake tensors' mode would raise errors that print the optimizer's states, which takes minutes."""
    case = Case(adam=True, stage=2, offloaded=offloaded)
    engine = make_engine(build(case), case)
    engine.backward(engine(batch(0, 0, dist.get_rank(), 4)))
    engine.step()
    if is_destroyed:
        engine.destroy()
    gone, mode = weakref.ref(engine), Asked()
    with mode:
        del engine
        gc.collect()
    assert gone() is None
    assert mode.functions == []

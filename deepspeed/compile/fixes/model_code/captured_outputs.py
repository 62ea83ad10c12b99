# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Makes Dynamo trace the hooks by which models of transformers collect the logits of their routers.

To transformers: these hooks read a ``ContextVar``, at which Dynamo ends the graph of each layer, also in calls that
collect nothing. If Dynamo could read it, it would compile each layer anew, because it checks the length of the list to
which the hook appends. Please give each layer a list of its own.
"""

import contextlib
import functools
import sys
import threading
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch.nn import Module

from ...features.blocks.block_calls import Around
from ...zero_1_and_2.gradient.backward import in_backward


class _BlockOutputs(threading.local):
    """What hooks in the graph of the block collect that this thread runs. Another thread may run another model.

    Attributes:
        is_known: whether the hooks read ``lists``. If not, they read transformers' own variable.
        lists: an empty list for each kind of output that is collected, or None if none is.
    """

    def __init__(self):
        self.is_known = False
        self.lists: Optional[Dict[str, List[Any]]] = None


_of_block = _BlockOutputs()


def traced_collection(module: Module) -> Optional[Around]:
    """Returns a wrapper of block calls with which hooks of routers are traced, or None if there are no such hooks."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    kinds = (getattr(part, "_can_record_outputs", None) or {} for part in module.modules())
    if not hasattr(collector, "get") or not any("router_logits" in recorded for recorded in kinds):
        return None
    return functools.partial(_around, _read_by_hooks(collector))


@functools.cache
def _read_by_hooks(collector) -> Callable[[], Optional[Dict[str, List[Any]]]]:
    """Makes traced hooks read ``_of_block``. Returns the method that reads transformers' variable."""
    original = collector.get

    def get():
        if torch.compiler.is_dynamo_compiling() and _of_block.is_known:
            return _of_block.lists
        return original()

    collector.get = get
    return original


def _around(read, module, blocks, call):
    """Returns the call of a block, or of a module that calls ``blocks``, around another call.

    ``read()`` returns transformers' lists, or None where nobody collects.
    """
    if blocks is not None:
        return call
    # The kinds of outputs that the last forward has collected.
    last: Tuple[str, ...] = ()

    def run(block, /, *args, **kwargs):
        nonlocal last
        collected = read()
        if collected is not None:
            last = tuple(name for name in collected if not name.startswith("_"))
        # In a backward, a checkpoint computes the block again. Nobody collects then, but the block must run the graph
        # that its first run has run, so ``last`` stays.
        elif not in_backward():
            last = ()
        if "hidden_states" in last:
            # Transformers collects the input of the first layer if the list is empty.
            return call(block, *args, **kwargs)
        with _collecting(last) as lists:
            result = call(block, *args, **kwargs)
        if collected is not None:
            for name, values in lists.items():
                collected[name].extend(values)
        return result

    return run


@contextlib.contextmanager
def _collecting(names):
    """Yields the lists that hooks in the block's graph fill."""
    before = _of_block.is_known, _of_block.lists
    lists: Dict[str, List[Any]] = {name: [] for name in names}
    _of_block.is_known, _of_block.lists = True, lists or None
    try:
        yield lists
    finally:
        _of_block.is_known, _of_block.lists = before

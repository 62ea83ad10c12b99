# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Access to DeepCompile's native code."""

import functools
from typing import Any

import torch

from ..messages import warn

# Classes of the native module, which ``csrc/includes/deepcompile.h`` explains. A reducer hands over the targets of a
# parameter group when a step is complete.
Reducer = Any
HandedOver = Any


@functools.lru_cache(maxsize=1)
def reducer_module() -> Any:
    """Returns the native module of ZeRO-1/2, built at first use. ``csrc/compile/bindings.cpp`` defines it.

    Loading the module registers the operators ``torch.ops.deepcompile``.

    Raises:
        RuntimeError: if the module cannot be built. The cause is the error of the build.
    """
    from deepspeed.ops.op_builder.dc import DeepCompileBuilder

    builder = DeepCompileBuilder()
    try:
        if not builder.is_built():
            # Warn, because DeepSpeed shows no lower level by default.
            warn(
                "DeepCompile is building its native code, or waiting for a process that is. This takes about a "
                "minute, once per environment."
            )
        module = builder.load_reducer()
    except Exception as error:
        lacking = builder.lacking()
        why = f"this machine lacks {lacking}" if lacking else error
        raise RuntimeError(f"DeepCompile could not build its native code: {why}") from error
    # Nothing uses the results of these operators, but dead-code elimination must keep their calls.
    for operator in (torch.ops.deepcompile.reduce_grad.default, torch.ops.deepcompile.end_backward.default):
        torch.fx.node.has_side_effect(operator)
    # Results while a graph is traced. Registrations are then on the host, even if gradients are not.
    torch.library.register_fake("deepcompile::reduce_grad", lambda grad, *_, **__: grad.new_empty(0))
    torch.library.register_fake("deepcompile::end_backward", lambda *_: None)
    return module


def users_of(storage: torch.UntypedStorage) -> int:
    """Counts tensors, NumPy arrays and others that have a storage, of which the caller has one variable of Python."""
    # How often torch counts one variable differs by release.
    count, alone = reducer_module().users_of_storage, torch.empty(0).untyped_storage()
    return count(storage) - count(alone)

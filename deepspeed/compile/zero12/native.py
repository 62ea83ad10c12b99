# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Access to DeepCompile's native code."""

import functools
from types import ModuleType
from typing import Any

import torch

# The native class, whose methods ``csrc/includes/deepcompile.h`` explains.
Reducer = Any


@functools.lru_cache(maxsize=1)
def reducer_module() -> ModuleType:
    """Returns the native module of ZeRO-1/2, built at first use.

    Loading the module registers the operators ``torch.ops.deepcompile``.

    Raises:
        RuntimeError: if the module cannot be built. The cause is the error of the build.
    """
    from deepspeed.ops.op_builder.dc import DeepCompileBuilder

    try:
        module = DeepCompileBuilder().load_reducer()
    except Exception as error:
        raise RuntimeError(
            "DeepCompile could not build its native code: check that a C++ compiler and ninja are installed "
            "(`ds_report` lists what is missing) and see the output above"
        ) from error
    # Nothing uses the results of these operators, but dead-code elimination must keep their calls.
    for operator in (torch.ops.deepcompile.reduce_grad.default, torch.ops.deepcompile.end_backward.default):
        torch.fx.node.has_side_effect(operator)
    torch.library.register_fake("deepcompile::reduce_grad", _reduce_grad_traced)
    torch.library.register_fake("deepcompile::end_backward", _end_backward_traced)
    return module


# What the operators return while a graph is traced. Registrations are on the host then, even if gradients are not.


def _reduce_grad_traced(grad, registrations, slot, donated=False):
    return grad.new_empty(0)


def _end_backward_traced(reductions_and_registrations, graph_id, release_reduce_buckets):
    pass

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
# Names and contracts of the passes are the base's, which is
# Copyright (c) Microsoft Corporation.
# SPDX-License-Identifier: Apache-2.0
"""The passes ``z1`` and ``z2`` of the base's schedules. Graphs get their reductions before a schedule begins."""

from typing import NoReturn

from .zero_1_and_2_compile_base import CONTRACT_Z1, CONTRACT_Z2, NAME_Z1, NAME_Z2

__all__ = ["CONTRACT_Z1", "CONTRACT_Z2", "NAME_Z1", "NAME_Z2", "add_z1_reduce", "add_z2_reduce"]


# The base's engine registers these passes. A schedule may hold only the pass of its stage, and is compared with these
# functions.
def add_z1_reduce(*args, **kwargs) -> NoReturn:
    """Stands for ZeRO-1 in a schedule. Raises NotImplementedError if a schedule runs it."""
    raise NotImplementedError(
        "DeepCompile ZeRO-1/2 rewrites the joint graph before it is partitioned, so its pass "
        "cannot run in a schedule; call engine.compile() without `schedule`"
    )


def add_z2_reduce(*args, **kwargs) -> NoReturn:
    """Stands for ZeRO-2 in a schedule. Raises NotImplementedError if a schedule runs it."""
    add_z1_reduce()

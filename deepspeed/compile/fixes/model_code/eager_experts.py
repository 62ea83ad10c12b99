# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Recommends a faster implementation of experts to models of transformers that run them one after the other.

To transformers: the implementation "eager" loops over the experts that have tokens, whose number the host must wait
for, so ``torch.compile`` leaves the graph before each loop. Please say so where it is chosen for training.
"""

from typing import Iterator

from torch.nn import Module

EAGER = (
    "{} layers of experts have the implementation 'eager', which runs one expert after the other and leaves the "
    'compiled graphs for that; call model.set_experts_implementation("grouped_mm")'
)


def advice(module: Module) -> Iterator[str]:
    """Yields a sentence if layers of experts in ``module`` run expert after expert."""
    count = sum(_runs_one_after_the_other(submodule) for submodule in module.modules())
    if count:
        yield EAGER.format(count)


def _runs_one_after_the_other(module):
    # Classes of experts whose implementation can be chosen have this method. Models have the configuration, too.
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return implementation == "eager" and hasattr(module, "_apply_gate")

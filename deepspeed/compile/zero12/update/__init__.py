# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Steps this rank's partitions: master weights, optimizer states and the new values of parameters.

A rule (``rule.py``) steps the partitions that it serves. A new rule is one new file here, and its line in
:func:`make_rules`.

- ``groups.py``: which rule steps which parameter group. The optimizer steps whole what no rule serves or may step.
- ``authors.py``: whether rules may step in an optimizer's place.
- ``ranges.py``: the pass over one partition, and its gradient, given range by range and dropped.
- ``own_step.py``: the last rule, by which the optimizer itself steps ranges.
- ``adam.py``: the rule for Adam and AdamW, which step a range in one pass over memory.
- ``adam_operators.py``, ``adam_kernel.py``: what a pass does, in torch's operators and as a kernel for GPUs.
- ``eight_bit.py``, ``blockwise.py``, ``dynamic_map.py``: the same rule with states in 8 bits; how a partition's states
  are kept in blocks; and what the codes stand for.
- ``muon.py``: makes updates of gradients for DeepSpeed's Muon, and says which optimizer steps these.
"""

from typing import List, Optional

from .adam import OnePassAdam
from .eight_bit import EightBitAdam
from .own_step import OwnRanges
from .rule import Rule


def make_rules(compiles: bool, optimizer_states: Optional[str] = None) -> List[Rule]:
    """Returns the rules for the partitions of one engine, in the order in which they are asked for a step.

    Args:
        compiles: whether generated code may step partitions.
        optimizer_states: the format of optimizer states, "8bit", or None for the optimizer's own.
    """
    if optimizer_states == "8bit":
        return [EightBitAdam()]
    return [*([OnePassAdam()] if compiles else []), OwnRanges()]

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Steps this rank's partitions: master weights, optimizer states and the new values of parameters.

The optimizer steps a partition whole, unless a rule steps it. Rules are optional parts (``Feature.rules()``).

- ``rule.py``: what a rule is.
- ``groups.py``: which rule steps which parameter group.
- ``authors.py``: whether rules may step in an optimizer's place.
- ``ranges.py``: the pass over one partition, and its gradient, given range by range and dropped.
"""

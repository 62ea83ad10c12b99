# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Steps this rank's partitions: master weights, optimizer states and the new values of parameters.

A rule (``rule.py``) steps the partitions that it serves. ``make_rules()`` in ``groups.py`` lists the rules, and the
optimizer itself steps what none of them serves. A new rule is one new file here and its entry there.

- ``groups.py``: which rule steps which parameter group; partitions that the optimizer must step whole.
- ``ranges.py``: the pass over one partition, and its gradient, given range by range and dropped.
- ``own_step.py``, ``authors.py``: ranges stepped by the optimizer, and whether they may be.
- ``compiled.py``, ``recorded.py``: a rule that steps a range in one pass over memory, as recorded from the optimizer.
"""

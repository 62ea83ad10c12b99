# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The life of a step: norm, overflow, this rank's partitions, and the gather.

The first rule of a part that serves a partition steps it, range by range. With AdamW and no option set, that rule is
``OnePassAdam`` in ``features/update/adam.py``, and ``OwnRanges`` in ``own_ranges.py`` beside it, which calls the
optimizer's own ``step()``, for the first step and for partitions of fewer elements than the ``LEAST_NUMEL`` of
``adam.py``. A partition that no rule serves is stepped whole by the optimizer (``partitions.py``).
"""

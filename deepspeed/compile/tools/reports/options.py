# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The option of this part."""

from pydantic import BaseModel


class Options(BaseModel):
    monitor_memory: bool = False
    """Whether rank 0 writes its counters of gradients, and its peaks of memory, to DeepSpeed's monitors every
    ``steps_per_print`` steps. Off by default, because each report restarts these counters and torch's peaks, which
    other code may read."""

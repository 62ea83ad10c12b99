# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Pictures of the memory of one training step.

``compile.memory_picture`` in ``ds_config`` makes an engine record a step; ``docs/guides/memory.md`` tells how to use
and how to read the pictures. The command, which draws a recorded step again or lays two over each other, is::

    python -m deepspeed.compile.memory_picture A.json [B.json] [-o OUT]

The files, each of which imports only from those above it:

==============  =====================================================================================
data.py         a step's memory, its JSON file, and what draws it
classify.py     from the events of torch's profiler to memory by category
record.py       records a step: the profiler, and the marks where phases begin and end
draw_png.py     draws with matplotlib
of_engine.py    records an engine's step, with the memory of its tensors
__main__.py     the command
==============  =====================================================================================

Only ``of_engine.py`` and ``__main__.py`` need DeepSpeed. ``benchmarks/`` loads the others by their place in the
checkout, so that it measures every DeepSpeed, and FSDP2, with the same code.
"""

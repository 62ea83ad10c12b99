# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The front door of an engine: reads its options, refuses what cannot be honoured, and has the engine compile itself.

- ``options.py``, ``sentences.py``: the section ``compile``. What has no effect is left out, what is wrong said in one
  sentence.
- ``initialize.py``, ``same_models.py``: what ``deepspeed.initialize()`` refuses, before it changes anything where it
  can, models that differ by rank among it.
- ``feature.py``, ``refused.py``, ``refused_calls.py``, ``ignored.py``: options of DeepSpeed that are refused, and
  those that are warned of. A part's own options are its own business.
- ``self_compile.py``: when an engine compiles itself.
"""

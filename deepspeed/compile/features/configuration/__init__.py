# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The front door of an engine: reads its options, refuses those it cannot honour, and makes the engine compile itself.

- ``options.py``: reads the section ``compile``. It drops options without effect, and reports a wrong one in one
  sentence.
- ``initialize.py``: the checks of ``deepspeed.initialize()``, if possible before it changes anything. They also refuse
  models that differ by rank.
- ``feature.py``, ``refused.py``: refuse options of DeepSpeed, and warn of options without effect. Each part does so
  for its own options.
- ``self_compile.py``: decides when an engine compiles itself.
"""

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``setup.py`` changes in DeepSpeed: (file, name of the edit, anchor, replacement)."""

EDITS = (
    (
        "deepspeed/runtime/engine.py",
        "refusal of a backend",
        'f"Backend {backend} is not supported for DeepCompile."',
        "f\"Backend {backend} is not supported for DeepCompile; use 'inductor' or 'eager'\"",
    ),
    # Only the text: what to do about it.
    (
        "deepspeed/runtime/engine.py",
        "refusal of an engine without an optimizer",
        '"zero stage {} requires an optimizer".format(zero_stage)',
        '"zero stage {} requires an optimizer; give deepspeed.initialize() an optimizer, or, for an engine "\\\n'
        '                "that does not train, set zero_optimization.stage to 0".format(zero_stage)',
    ),
)

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``setup.py`` changes in DeepSpeed: (file, name of the edit, anchor, replacement)."""

EDITS = (
    (
        "deepspeed/env_report.py",
        "line of fits in ds_report",
        '    print("DeepSpeed general environment info:")\n',
        "    report.append((\n"
        "        'fork: will it fit?', 'python -m deepspeed.compile.fits --model NAME --gpus N --memory GB'))\n"
        '    print("DeepSpeed general environment info:")\n',
    ),
)

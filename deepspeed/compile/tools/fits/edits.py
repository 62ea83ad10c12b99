# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``setup.py`` changes in DeepSpeed: {file: {anchor: new text}}. In the text, ``...`` stands for the anchor."""

EDITS = {
    "deepspeed/env_report.py": {
        '    print("DeepSpeed general environment info:")\n': (
            "    report.append((\n"
            "        'fork: will it fit?', 'python -m deepspeed.compile.fits --model NAME --gpus N --memory GB'))\n..."
        ),
    },
}

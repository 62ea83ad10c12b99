# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``setup.py`` changes in DeepSpeed: (file, name of the edit, anchor, replacement)."""

EDITS = (
    (
        "deepspeed/runtime/utils.py",
        "end of see_memory_usage()",
        "    print(f'CPU Virtual Memory:  used = {used_GB} GB, percent = {vm_stats.percent}%')\n",
        "    print(f'CPU Virtual Memory:  used = {used_GB} GB, percent = {vm_stats.percent}%')\n"
        "    from deepspeed.compile.tools.monitoring.feature import print_gradient_memory\n"
        "    print_gradient_memory()\n",
    ),
)

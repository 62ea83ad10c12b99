# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``setup.py`` changes in DeepSpeed: (file, name of the edit, anchor, replacement)."""

EDITS = (
    (
        "deepspeed/runtime/engine.py",
        "optimizer of initialize()",
        "        if optimizer_wrapper == ZERO_OPTIMIZATION:\n"
        "            self.optimizer = self._configure_zero_optimizer(basic_optimizer)\n",
        "        if optimizer_wrapper == ZERO_OPTIMIZATION:\n"
        "            from deepspeed.compile.fixes.pinning.pinning import explained_pinning\n"
        "            with explained_pinning(self):\n"
        "                self.optimizer = self._configure_zero_optimizer(basic_optimizer)\n",
    ),
    (
        "deepspeed/runtime/engine.py",
        "collection of an engine",
        "    def __del__(self):\n        try:\n            self.destroy()\n",
        "    def __del__(self):\n        try:\n"
        "            from deepspeed.compile.fixes.pinning.pinning import destroy_collected\n"
        "            destroy_collected(self)\n",
    ),
)

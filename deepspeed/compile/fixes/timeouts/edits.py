# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``setup.py`` changes in DeepSpeed: (file, name of the edit, anchor, replacement)."""

ENGINE = "deepspeed/runtime/engine.py"
IMPORT = "from deepspeed.compile.z3_eager_fallback import"
EDITS = (
    (ENGINE, "import of timeouts", IMPORT, f"from deepspeed.compile.fixes.timeouts import timeouts\n{IMPORT}"),
    (
        ENGINE,
        "process groups at the end of deepspeed.initialize()",
        "\n    def _optimized_linear_offload_setup",
        "        timeouts.shorten_timeouts(self)\n\n    def _optimized_linear_offload_setup",
    ),
)

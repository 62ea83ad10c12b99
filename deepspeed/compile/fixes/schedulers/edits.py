# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``setup.py`` changes in DeepSpeed: (file, name of the edit, anchor, replacement)."""

ENGINE = "deepspeed/runtime/engine.py"
IMPORT = "from deepspeed.compile.z3_eager_fallback import"
EDITS = (
    (ENGINE, "import of schedulers", IMPORT, f"from deepspeed.compile.fixes import schedulers\n{IMPORT}"),
    (
        ENGINE,
        "empty parameter groups",
        "        basic_optimizer.param_groups[:] = [pg for pg",
        "        schedulers.forget_empty_groups(basic_optimizer, self.client_lr_scheduler)\n"
        "        basic_optimizer.param_groups[:] = [pg for pg",
    ),
)

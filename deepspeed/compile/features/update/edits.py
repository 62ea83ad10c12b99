# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``setup.py`` changes in DeepSpeed: (file, name of the edit, anchor, replacement)."""

ENGINE = "deepspeed/runtime/engine.py"
IMPORT = "from deepspeed.compile.z3_eager_fallback import"
EDITS = (
    (
        ENGINE,
        "import of states",
        IMPORT,
        f"from deepspeed.compile.features.update import states\n{IMPORT}",
    ),
    (
        ENGINE,
        "end of loading a ZeRO checkpoint",
        "            else:\n                success = False\n            if not success:\n"
        "                self.optimizer._restore_from_bit16_weights()\n",
        "            else:\n                success = False\n            if not success:\n"
        "                self.optimizer._restore_from_bit16_weights()\n"
        "            states.after_load(self)\n",
    ),
    (
        ENGINE,
        "step of the optimizer",
        "            self.optimizer.step()\n",
        "            states.before_step(self)\n            self.optimizer.step()\n",
    ),
    (
        "deepspeed/checkpoint/zero_checkpoint.py",
        "read of a rank's file",
        "            for key in keys_to_ignore:\n",
        "            from deepspeed.compile.features.update.states import convert_saved\n"
        "            convert_saved(sd)\n"
        "            for key in keys_to_ignore:\n",
    ),
)

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``setup.py`` changes in DeepSpeed: (file, name of the edit, anchor, replacement)."""

ENGINE = "deepspeed/runtime/engine.py"
IMPORT = "from deepspeed.compile.z3_eager_fallback import"
EDITS = (
    (
        ENGINE,
        "import of eight_bit",
        IMPORT,
        f"from deepspeed.compile.features.eight_bit import states as eight_bit\n{IMPORT}",
    ),
    (
        ENGINE,
        "end of loading a ZeRO checkpoint",
        "            else:\n                success = False\n            if not success:\n"
        "                self.optimizer._restore_from_bit16_weights()\n",
        "            else:\n                success = False\n            if not success:\n"
        "                self.optimizer._restore_from_bit16_weights()\n"
        "            eight_bit.after_load(self)\n",
    ),
    (
        ENGINE,
        "step of the optimizer",
        "            self.optimizer.step()\n",
        "            eight_bit.before_step(self)\n            self.optimizer.step()\n",
    ),
    (
        "deepspeed/checkpoint/zero_checkpoint.py",
        "read of a rank's file",
        "            for key in keys_to_ignore:\n",
        "            from deepspeed.compile.features.eight_bit.states import convert_saved\n"
        "            convert_saved(sd)\n"
        "            for key in keys_to_ignore:\n",
    ),
)

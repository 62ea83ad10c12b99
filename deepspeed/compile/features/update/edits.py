# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``setup.py`` changes in DeepSpeed: {file: {anchor: new text}}. In the text, ``...`` stands for the anchor."""

ENGINE = "deepspeed/runtime/engine.py"
IMPORT = "from deepspeed.compile.z3_eager_fallback import"
EDITS = {
    ENGINE: {
        IMPORT: "from deepspeed.compile.features.update import states\n...",
        (
            "            else:\n                success = False\n            if not success:\n"
            "                self.optimizer._restore_from_bit16_weights()\n"
        ): "...            states.after_load(self)\n",
        "            self.optimizer.step()\n": "            states.before_step(self)\n...",
    },
    "deepspeed/checkpoint/zero_checkpoint.py": {
        "            for key in keys_to_ignore:\n": (
            "            from deepspeed.compile.features.update.states import convert_saved\n"
            "            convert_saved(sd)\n..."
        ),
    },
}

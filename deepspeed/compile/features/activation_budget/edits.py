# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``setup.py`` changes in DeepSpeed: {file: {anchor: new text}}. In the text, ``...`` stands for the anchor."""

ENGINE = "deepspeed/runtime/engine.py"
IMPORT = "from deepspeed.compile.z3_eager_fallback import"
EDITS = {
    ENGINE: {
        IMPORT: "from deepspeed.compile.features.activation_budget.errors import explained_errors\n...",
        "            with compiled_autograd(self._is_compiled_autograd_enabled, self._compile_kwargs):\n": (
            "            with explained_errors(self), \\\n"
            "                    compiled_autograd(self._is_compiled_autograd_enabled, self._compile_kwargs):\n"
        ),
    },
}

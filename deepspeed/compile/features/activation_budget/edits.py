# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``setup.py`` changes in DeepSpeed: (file, name of the edit, anchor, replacement)."""

ENGINE = "deepspeed/runtime/engine.py"
IMPORT = "from deepspeed.compile.z3_eager_fallback import"
OURS = "from deepspeed.compile.features.activation_budget.errors import explained_errors"
EDITS = (
    (ENGINE, "import of activation_budget", IMPORT, f"{OURS}\n{IMPORT}"),
    (
        ENGINE,
        "errors of backward()",
        "            with compiled_autograd(self._is_compiled_autograd_enabled, self._compile_kwargs):\n"
        "                loss.backward(**backward_kwargs)\n",
        "            with explained_errors(self), \\\n"
        "                    compiled_autograd(self._is_compiled_autograd_enabled, self._compile_kwargs):\n"
        "                loss.backward(**backward_kwargs)\n",
    ),
)

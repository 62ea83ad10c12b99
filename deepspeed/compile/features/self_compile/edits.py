# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``setup.py`` changes in DeepSpeed: (file, name of the edit, anchor, replacement)."""

ENGINE = "deepspeed/runtime/engine.py"
IMPORT = "from deepspeed.compile.z3_eager_fallback import"
EDITS = (
    (
        ENGINE,
        "import of self_compile",
        IMPORT,
        f"from deepspeed.compile.features.self_compile import calls as self_compile\n{IMPORT}",
    ),
    (
        ENGINE,
        "warning in forward()",
        "if self.is_deepcompile_enabled() and not self.is_deepcompile_active() and not self.is_compiled:",
        "if self_compile.awaits_its_user(self):",
    ),
    # The next two anchors are lines that setup.py itself has put there.
    (
        ENGINE,
        "beginning of forward()",
        "        around = deepcompile.around_forward(self, inputs, kwargs)\n",
        "        self_compile.before_forward(self)\n"
        "        around = deepcompile.around_forward(self, inputs, kwargs)\n",
    ),
    (
        ENGINE,
        "end of a step",
        "            deepcompile.after_step(self)\n",
        "            deepcompile.after_step(self)\n            self_compile.after_step(self)\n",
    ),
    (
        ENGINE,
        "beginning of compile()",
        "        if self.is_compiled:\n            if self._compile_mode == compile_mode:\n",
        "        compile_kwargs = self_compile.note_arguments(self, backend, compile_kwargs, schedule)\n"
        "        if self.is_compiled:\n            if self._compile_mode == compile_mode:\n",
    ),
)

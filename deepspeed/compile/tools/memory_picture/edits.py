# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``setup.py`` changes in DeepSpeed: {file: {anchor: new text}}. In the text, ``...`` stands for the anchor."""

ENGINE = "deepspeed/runtime/engine.py"
IMPORT = "from deepspeed.compile.z3_eager_fallback import"
EDITS = {
    ENGINE: {
        IMPORT: "from deepspeed.compile.tools.memory_picture import of_engine as memory_picture\n...",
        "        self._do_sanity_check()\n": "...        memory_picture.refuse_others(self)\n",
        "        self._configure_autoep_folding_optimizer_gradient_reduction()\n": (
            "        memory_picture.prepare(self)\n..."
        ),
        # setup.py itself has added the next two anchors.
        "        with around as (inputs, kwargs), \\\n": (
            "        with memory_picture.around_forward(self, around) as (inputs, kwargs), \\\n"
        ),
        "        if at_boundary:\n": "...            memory_picture.after_step(self)\n",
        "            if optimizer is not None and hasattr(optimizer, 'destroy'):\n": (
            "            memory_picture.at_end(self)\n..."
        ),
    },
    "setup.py": {
        # What `pip install .[pictures]` brings for compile.memory_picture.
        "extras_require = {\n": "...    'pictures': ['matplotlib'],\n",
    },
}

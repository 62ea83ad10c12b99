# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``setup.py`` changes in DeepSpeed: (file, name of the edit, anchor, replacement)."""

ENGINE = "deepspeed/runtime/engine.py"
IMPORT = "from deepspeed.compile.z3_eager_fallback import"
OF_ENGINE = "from deepspeed.compile.tools.memory_picture import of_engine as memory_picture"
EDITS = (
    (ENGINE, "import of memory_picture", IMPORT, f"{OF_ENGINE}\n{IMPORT}"),
    (
        ENGINE,
        "beginning of an engine that records",
        "        self._do_sanity_check()\n",
        "        self._do_sanity_check()\n        memory_picture.refuse_others(self)\n",
    ),
    (
        ENGINE,
        "end of _configure_optimizer()",
        "        self._configure_autoep_folding_optimizer_gradient_reduction()\n",
        "        memory_picture.prepare(self)\n"
        "        self._configure_autoep_folding_optimizer_gradient_reduction()\n",
    ),
    # setup.py itself has added the next two anchors.
    (
        ENGINE,
        "recording of a forward",
        "        with around as (inputs, kwargs), \\\n",
        "        with memory_picture.around_forward(self, around) as (inputs, kwargs), \\\n",
    ),
    (
        ENGINE,
        "recorded step",
        "        if at_boundary:\n",
        "        if at_boundary:\n            memory_picture.after_step(self)\n",
    ),
    (
        ENGINE,
        "destroy()",
        "            if optimizer is not None and hasattr(optimizer, 'destroy'):\n",
        "            memory_picture.at_end(self)\n"
        "            if optimizer is not None and hasattr(optimizer, 'destroy'):\n",
    ),
    # What `pip install .[pictures]` brings for compile.memory_picture.
    (
        "setup.py",
        "extra 'pictures'",
        "extras_require = {\n",
        "extras_require = {\n    'pictures': ['matplotlib'],\n",
    ),
)

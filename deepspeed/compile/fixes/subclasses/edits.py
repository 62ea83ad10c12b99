# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``setup.py`` changes in DeepSpeed: (file, name of the edit, anchor, replacement)."""

ENGINE = "deepspeed/runtime/engine.py"
IMPORT = "from deepspeed.compile.z3_eager_fallback import"
EDITS = (
    (
        ENGINE,
        "import of subclasses",
        IMPORT,
        f"from deepspeed.compile.fixes.subclasses import calls as subclasses\n{IMPORT}",
    ),
    (
        ENGINE,
        "broadcast of parameters",
        "        for n, p in self.module.named_parameters():\n"
        "            # Broadcast the model for different parameters\n",
        "        for n, p in subclasses.to_broadcast(self.module):\n"
        "            # Broadcast the model for different parameters\n",
    ),
    # The functions of this file leave tensors on the host. Torch cannot call them for a tensor that wraps other
    # tensors.
    (
        "deepspeed/runtime/checkpoint_engine/torch_checkpoint_engine.py",
        "load()",
        "torch.load(path, map_location=map_location, weights_only=False)",
        "torch.load(path, weights_only=False, map_location=(\n"
        "            'cpu' if getattr(map_location, '__module__', None) == 'deepspeed.runtime.state_dict_factory'\n"
        "            else map_location))",
    ),
    (
        "deepspeed/utils/debug.py",
        "names of parameters",
        "    for name, param in model.named_parameters():\n        param_names[param] = name\n",
        "    from deepspeed.compile.fixes.subclasses.calls import named_parameters\n"
        "    for name, param in named_parameters(model):\n        param_names[param] = name\n",
    ),
)

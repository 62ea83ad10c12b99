# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``setup.py`` changes in DeepSpeed: (file, name of the edit, anchor, replacement)."""

ENGINE = "deepspeed/runtime/engine.py"
IMPORT = "from deepspeed.compile.z3_eager_fallback import"
EDITS = (
    (
        ENGINE,
        "import of shard_frozen",
        IMPORT,
        f"from deepspeed.compile.features.shard_frozen import calls as shard_frozen\n{IMPORT}",
    ),
    (
        ENGINE,
        "move of the module to the device",
        "            self.module.to(self.device)\n\n        # MoE related initialization\n",
        "            shard_frozen.move_to_device(self)\n\n        # MoE related initialization\n",
    ),
    (
        ENGINE,
        "saving of the module",
        "        module = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)\n",
        "        shard_frozen.refuse_to_save(self, exclude_frozen_parameters)\n"
        "        module = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)\n",
    ),
    (
        ENGINE,
        "shared parameters of a checkpoint",
        "param.ds_id if is_zero3_model else param.data_ptr()",
        "param.ds_id if is_zero3_model else shard_frozen.place_of(param)",
    ),
)

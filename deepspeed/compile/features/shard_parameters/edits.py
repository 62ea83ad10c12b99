# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``setup.py`` changes in DeepSpeed: (file, name of the edit, anchor, replacement)."""

ENGINE = "deepspeed/runtime/engine.py"
IMPORT = "from deepspeed.compile.z3_eager_fallback import"
EDITS = (
    (
        ENGINE,
        "import of shard_parameters",
        IMPORT,
        f"from deepspeed.compile.features.shard_parameters import calls as shard_parameters\n{IMPORT}",
    ),
    (
        ENGINE,
        "parameters that another engine has sharded",
        "        is_zero_init_model = self.zero_optimization_partition_weights() and any(\n",
        "        shard_parameters.take_from_other_engines(self)\n"
        "        is_zero_init_model = self.zero_optimization_partition_weights() and any(\n",
    ),
    (
        ENGINE,
        "move of the module to the device",
        "            self.module.to(self.device)\n\n        # MoE related initialization\n",
        "            shard_parameters.move_to_device(self)\n\n        # MoE related initialization\n",
    ),
    (
        ENGINE,
        "class of the ZeRO-1/2 optimizer",
        "            Stage1And2ZeroOptimizer = DeepSpeedZeroOptimizer if not self.zenflow else ",
        "            Stage1And2ZeroOptimizer = shard_parameters.optimizer_of(self) if not self.zenflow else ",
    ),
    (
        ENGINE,
        "preparation of sharding at the end of deepspeed.initialize()",
        "\n    def _optimized_linear_offload_setup",
        "        shard_parameters.prepare(self)\n\n    def _optimized_linear_offload_setup",
    ),
    # The copy in another dtype would be a second one, of a whole partition.
    (
        "deepspeed/runtime/zero/stage_1_and_2.py",
        "copy of a partition to the master weights",
        "weights_partition = self.parallel_partitioned_bit16_groups[i][partition_id].detach().clone().to(\n"
        "                device=self.device, dtype=self.master_weights_and_grads_dtype)",
        "weights_partition = self.parallel_partitioned_bit16_groups[i][partition_id].detach().to(\n"
        "                device=self.device, dtype=self.master_weights_and_grads_dtype, copy=True)",
    ),
    (
        ENGINE,
        "values of a module's state dict",
        "            sd = remove_random_ltd_state_dict(sd)\n        return sd\n",
        "            sd = remove_random_ltd_state_dict(sd)\n        return shard_parameters.with_values(self, sd)\n",
    ),
    (
        ENGINE,
        "values of frozen parameters in a checkpoint of stage 2",
        "            frozen_param_fragments[name] = attr_func(param)\n\n        return frozen_param_fragments\n",
        "            frozen_param_fragments[name] = attr_func(param)\n\n"
        "        return shard_parameters.with_values(self, frozen_param_fragments)\n",
    ),
    (
        ENGINE,
        "values of parameters that a caller saves in a checkpoint",
        "        state.update(client_state)\n        log_dist(",
        "        state.update(shard_parameters.client_with_values(self, client_state))\n        log_dist(",
    ),
    # A parameter at rest has no view.
    (
        "deepspeed/utils/tensor_fragment.py",
        "shape of a parameter",
        "if self.view(-1).shape == hp_grad_fragment.shape:",
        "if hp_grad_fragment.shape == (self.numel(),):",
    ),
    (
        ENGINE,
        "shared parameters of a checkpoint",
        "param.ds_id if is_zero3_model else param.data_ptr()",
        "param.ds_id if is_zero3_model else shard_parameters.place_of(param)",
    ),
    # Trainers take the weights that they save from here.
    (
        "deepspeed/checkpoint/utils.py",
        "clones of a module's state dict",
        "return type(item)({k: clone_tensors_for_torch_save(v, device) for k, v in item.items()})",
        "from deepspeed.compile.features.shard_parameters import calls as shard_parameters\n"
        "        return type(item)(shard_parameters.cloned(item, device, clone_tensors_for_torch_save))",
    ),
)

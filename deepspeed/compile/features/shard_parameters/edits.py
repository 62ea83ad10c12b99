# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``setup.py`` changes in DeepSpeed: {file: {anchor: new text}}. In the text, ``...`` stands for the anchor."""

ENGINE = "deepspeed/runtime/engine.py"
IMPORT = "from deepspeed.compile.z3_eager_fallback import"
EDITS = {
    ENGINE: {
        IMPORT: "from deepspeed.compile.features.shard_parameters import calls as shard_parameters\n...",
        "        is_zero_init_model = self.zero_optimization_partition_weights() and any(\n": (
            "        shard_parameters.take_from_other_engines(self)\n..."
        ),
        "            self.module.to(self.device)\n": "            shard_parameters.move_to_device(self)\n",
        "            Stage1And2ZeroOptimizer = DeepSpeedZeroOptimizer if not self.zenflow else ": (
            "            Stage1And2ZeroOptimizer = "
            "shard_parameters.optimizer_of(self, DeepSpeedZeroOptimizer) if not self.zenflow else "
        ),
        "\n    def _optimized_linear_offload_setup": "        shard_parameters.prepare(self)\n...",
        "            sd = remove_random_ltd_state_dict(sd)\n        return sd\n": (
            "            sd = remove_random_ltd_state_dict(sd)\n"
            "        return shard_parameters.with_values(self, sd)\n"
        ),
        "        return frozen_param_fragments\n": (
            "        return shard_parameters.with_values(self, frozen_param_fragments)\n"
        ),
        "        state.update(client_state)\n        log_dist(": (
            "        state.update(shard_parameters.client_with_values(self, client_state))\n        log_dist("
        ),
        "param.ds_id if is_zero3_model else param.data_ptr()": (
            "param.ds_id if is_zero3_model else shard_parameters.place_of(param)"
        ),
    },
    "deepspeed/runtime/zero/stage_1_and_2.py": {
        # The copy in another dtype would be a second one, of a whole partition.
        (
            "weights_partition = self.parallel_partitioned_bit16_groups[i][partition_id].detach().clone().to(\n"
            "                device=self.device, dtype=self.master_weights_and_grads_dtype)"
        ): (
            "weights_partition = self.parallel_partitioned_bit16_groups[i][partition_id].detach().to(\n"
            "                device=self.device, dtype=self.master_weights_and_grads_dtype, copy=True)"
        ),
    },
    "deepspeed/utils/tensor_fragment.py": {
        # A parameter at rest has no view.
        "if self.view(-1).shape == hp_grad_fragment.shape:": "if hp_grad_fragment.shape == (self.numel(),):",
    },
    "deepspeed/checkpoint/utils.py": {
        # Trainers take the weights that they save from here.
        "return type(item)({k: clone_tensors_for_torch_save(v, device) for k, v in item.items()})": (
            "from deepspeed.compile.features.shard_parameters import calls as shard_parameters\n"
            "        return type(item)(shard_parameters.cloned(item, device, clone_tensors_for_torch_save))"
        ),
    },
}

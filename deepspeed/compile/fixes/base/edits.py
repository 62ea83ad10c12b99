# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``setup.py`` changes in DeepSpeed: {file: {anchor: new text}}. In the text, ``...`` stands for the anchor."""

ENGINE = "deepspeed/runtime/engine.py"
OFFLOAD = "deepspeed/runtime/activation_checkpointing/offload_activations.py"
IMPORT = "from deepspeed.compile.z3_eager_fallback import"
EDITS = {
    ENGINE: {
        IMPORT: (
            "from deepspeed.compile.fixes.base import pinning, schedulers, subclasses, timeouts\n"
            "from deepspeed.compile.fixes.base import whole_checkpoints\n..."
        ),
        # pinning.py
        "            self.optimizer = self._configure_zero_optimizer(basic_optimizer)\n": (
            "            with pinning.explained_pinning(self):\n    ..."
        ),
        "    def __del__(self):\n        try:\n            self.destroy()\n": (
            "    def __del__(self):\n        try:\n            pinning.destroy_collected(self)\n"
        ),
        # schedulers.py
        "        basic_optimizer.param_groups[:] = [pg for pg": (
            "        schedulers.forget_empty_groups(basic_optimizer, self.client_lr_scheduler)\n..."
        ),
        # subclasses.py
        (
            "        for n, p in self.module.named_parameters():\n"
            "            # Broadcast the model for different parameters\n"
        ): (
            "        for n, p in subclasses.to_broadcast(self.module):\n"
            "            # Broadcast the model for different parameters\n"
        ),
        # timeouts.py
        "\n    def _optimized_linear_offload_setup": "        timeouts.shorten_timeouts(self)\n...",
        # whole_checkpoints.py
        "    def save_checkpoint(self, save_dir, tag=None,": "    @whole_checkpoints.tells_which_is_whole\n...",
        "    def load_checkpoint(self,\n": "    @whole_checkpoints.loads_one_checkpoint\n...",
        (
            "            self.checkpoint_engine.commit(commit_info)\n"
            "            if save_latest and self.global_rank == 0:\n"
            "                with open(os.path.join(save_dir, 'latest'), 'w') as fd:\n"
            "                    fd.write(tag)\n"
        ): "            whole_checkpoints.commit(self, commit_info)\n",
        (
            "        self.checkpoint_engine.commit(commit_info)\n\n"
            "        if self.global_rank == 0 and commit_info.save_latest:\n"
            "            with open(os.path.join(commit_info.save_dir, 'latest'), 'w') as fd:\n"
            "                fd.write(commit_info.tag)\n"
        ): "        whole_checkpoints.commit(self, commit_info)\n",
        "        self.checkpoint_engine.commit(commit_info)\n\n        return True\n": (
            "        whole_checkpoints.checkpoint_files.give_names(self.checkpoint_engine)\n..."
        ),
        "        sd_loader = SDLoaderFactory.get_sd_loader(ckpt_list, checkpoint_engine": (
            "        if not ckpt_list:\n            whole_checkpoints.refuse(self._get_ckpt_name(load_dir, tag))\n..."
        ),
        "            self._copy_recovery_script(save_path)\n": (
            "            with whole_checkpoints.checkpoint_files.noting_error(self.checkpoint_engine):\n    ..."
        ),
        "            self.load_module_state_dict(checkpoint=checkpoint,\n": (
            "            whole_checkpoints.begin_to_load(self)\n..."
        ),
        "            zero_sd_list = None\n": "            whole_checkpoints.begin_to_load(self)\n...",
        "            zero_sd_list = self._get_all_zero_checkpoints(load_dir, tag)\n": (
            "            with whole_checkpoints.reading_partitions(self):\n    ..."
        ),
        # See ds_to_universal.py below.
        '"currently supported.")\n': (
            '"currently supported; run `python -m deepspeed.checkpoint.ds_to_universal "\n'
            '                    f"--input_folder {os.path.join(load_dir, tag)} --output_folder "\n'
            "                    f\"{os.path.join(load_dir, 'universal')}`, "
            'set checkpoint.load_universal to true, "\n'
            "                    'and load with tag=\"universal\"')\n"
        ),
    },
    OFFLOAD: {
        # inputs_on_host.py
        "from deepspeed.accelerator import get_accelerator\n": (
            "...from deepspeed.compile.fixes.base import inputs_on_host\n"
        ),
        "        tensor_id = self.offload_input(tensor)\n": "        inputs_on_host.reuse_memory(self)\n...",
        "        return _OffloadedTensorRef(tensor_id)\n": (
            "        return inputs_on_host.forget_when_dropped(self, _OffloadedTensorRef(tensor_id))\n"
        ),
        "            return self._restore_tensor(maybe_ref.tensor_id, cache=True)\n": (
            "            return inputs_on_host.brought_back(self, maybe_ref.tensor_id)\n"
        ),
        "        self.stats.offloaded_tensors += 1\n": "        inputs_on_host.wait_after_sending(self)\n...",
        "        cpu_tensor, device, shape, stride, buffer_key = tracked\n": (
            "        inputs_on_host.wait_before_bringing_back(self)\n..."
        ),
    },
    "deepspeed/runtime/checkpoint_engine/torch_checkpoint_engine.py": {
        # subclasses.py: the functions of this file leave tensors on the host. Torch cannot call them for a tensor that
        # wraps other tensors.
        # checkpoint_files.py: what is read is whole, or the error says so.
        "        partition = torch.load(path, map_location=map_location, weights_only=False)\n": (
            "        with checkpoint_files.reading(path):\n"
            "            partition = torch.load(path, weights_only=False, map_location=(\n"
            "                'cpu' if getattr(map_location, '__module__', None) == "
            "'deepspeed.runtime.state_dict_factory'\n"
            "                else map_location))\n"
        ),
        # checkpoint_files.py
        "from deepspeed.utils import log_dist\n": ("...from deepspeed.compile.fixes.base import checkpoint_files\n"),
        '        log_dist(f"[Torch] Checkpoint {info.tag} is about to be saved!", ranks=[0])\n': (
            "        checkpoint_files.begin(self)\n..."
        ),
        "        torch.save(state_dict, path, _use_new": (
            "        with checkpoint_files.writing(self, path) as path:\n    ..."
        ),
        '        #logger.info(f"[Torch] Checkpoint {tag} is ready now!")\n': (
            "        checkpoint_files.give_names(self)\n..."
        ),
    },
    "deepspeed/runtime/sequence_parallel/ulysses_sp.py": {
        # packed_rows.py
        "from deepspeed.utils.logging import logger\n": "...from deepspeed.compile.fixes.base import packed_rows\n",
        "        self.core_attn_implementation = None  # set by": "        self.rows_are_packed = False\n...",
        "        uattn.core_attn_implementation = core_attn_implementation\n": (
            "...        packed_rows.ATTENTIONS.add(uattn)\n"
        ),
        '        kwargs["position_ids"] = torch.cat(position_ids_list, dim=1)\n': (
            "..."
            "        window = kwargs.get('sliding_window')\n"
            "        attention_mask = packed_rows.mask(self, module, kwargs['position_ids'], attention_mask, window)\n"
        ),
        "            chunk_len = seq_length // self.sp_world_size\n": (
            "...            packed_rows.look(batch['position_ids'])\n"
        ),
        "        for k in batch.keys():\n            if torch.is_tensor(batch[k]):\n                batch": (
            "        batch = packed_rows.without_lengths(batch)\n..."
        ),
        # A rank that evaluates alone has whole rows, of which transformers' mask is right.
        "            if not _is_block_mask:\n": (
            "            if not _is_block_mask and (module.training or not uattn.disable_in_eval):\n"
        ),
        "        if not module.training and self.disable_in_eval:\n": (
            "...            packed_rows.count_own_heads(self, module, query, key)\n"
        ),
        "        if core_attn_implementation in unsupported_attn_implementation:\n": (
            "        packed_rows.warn_of_windows(core_attn_implementation, hf_model_config)\n..."
        ),
        # To DeepSpeed: SequenceTiledCompute keeps its inputs as attributes of the context. So the hidden states of all
        # tokens stay through the backward of all layers, until the caller drops the loss. Please save them for the
        # backward.
        "            ctx.kwargs_to_shard = kwargs_to_shard\n": (
            "            ctx.keys_to_shard = keys_to_shard\n"
            "            ctx.save_for_backward(*kwargs_to_shard.values())\n"
        ),
        "        kwargs_to_shard = ctx.kwargs_to_shard\n": (
            "        kwargs_to_shard = dict(zip(ctx.keys_to_shard, ctx.saved_tensors))\n"
        ),
    },
    "deepspeed/runtime/sequence_parallel/parallel_state_sp.py": {
        # To DeepSpeed: the ranks of a sequence count as those of a model, because these functions are missing. So a
        # universal checkpoint cannot be made of what they save, nor be loaded by them, DeepSpeed's layers of experts
        # take other ranks' tokens for their own, and partition_activations mixes activations of different tokens.
        "get_model_parallel_group = get_sequence_parallel_group\n": (
            "...\n\ndef get_tensor_model_parallel_world_size():\n    return 1\n"
            "\n\ndef get_tensor_model_parallel_rank():\n    return 0\n"
        ),
    },
    "deepspeed/moe/utils.py": {
        # To DeepSpeed: the order of a set of names is another one in each process, so where experts have several
        # process groups, ranks reduce and save different parameters as one. Please sort the names.
        "        for key in data_parallel_group_names:\n": "        for key in sorted(data_parallel_group_names):\n",
    },
    "deepspeed/utils/debug.py": {
        # subclasses.py
        "    for name, param in model.named_parameters():\n        param_names[param] = name\n": (
            "    from deepspeed.compile.fixes.base.subclasses import named_parameters\n"
            "    for name, param in named_parameters(model):\n        param_names[param] = name\n"
        ),
    },
    "deepspeed/checkpoint/ds_to_universal.py": {
        # To DeepSpeed: ds_to_universal.py refuses each checkpoint of ZeRO-1 and ZeRO-2 whose user has not written
        # universal_checkpoint_info into it ("Verify that client creates this state"). Without model parallelism, which
        # needs the state to say how parts of parameters belong together, it reads nothing of that but a version, which
        # --inject_missing_state makes up. Please make this the default there, and have the error on another number of
        # ranks name the command.
        (
            "        if args.inject_missing_state:\n            _inject_missing_state(ds_checkpoint)\n"
            "        _check_for_required_state(ds_checkpoint)\n\n        iteration"
        ): (
            "        if args.inject_missing_state or ds_checkpoint.tp_degree * ds_checkpoint.pp_degree == 1:\n"
            "            _inject_missing_state(ds_checkpoint)\n"
            "        _check_for_required_state(ds_checkpoint)\n\n        iteration"
        ),
    },
}

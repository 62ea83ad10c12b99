# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Which test follows the remedy that a message names. ``house/test_remedies_named.py`` lists the messages."""

_REFUSED = "features/configuration/test_options_refused.py::test_refused"
_REFUSED_BLOCKS = "features/blocks/test_blocks_refused.py::test_refused"
_ADVISED = "features/configuration/test_options_refused.py::test_what_refusals_advise"
_EIGHT_BIT = "features/update/test_eight_bit_in_engine.py::test_refused_states"
_MUON = "features/muon/test_muon.py::test_refused_with_muon"
_SHARDING = "features/shard_parameters/test_shard_remedies.py::test_what_messages_advise"
_SECTION = "features/configuration/test_section.py::test_a_section_that_is_refused_in_one_sentence"
_OF_COMPILE = "core/test_second_derivatives.py::test_the_engine_says_what_to_do_and_that_is_right"

# A part of a message -> the test that does what the message advises.
FOLLOWED = {
    # Sharded parameters.
    "and cannot be trained; set requires_grad before the engine is made": _SHARDING,
    "and another rank was to save it; save it on rank 0 alone": _SHARDING,
    "was called within a forward or a backward; call it outside of them": _SHARDING,
    "leave it out, or call the engine outside of these": (
        "features/configuration/test_contexts_of_callers.py::test_a_context_around_the_first_forward"
    ),
    "make the same {} on every rank": "features/configuration/test_same_models.py::test_models_that_differ",
    "change its values in place, or make another engine of the model": _SHARDING,
    "and its engine was destroyed; make another engine of the model, or destroy": _SHARDING,
    "run the backward before destroy(), or the forward again": _SHARDING,
    "and cannot be {} here; do it within `with unsharded_parameters(engine):`": _SHARDING,
    ", or save with engine.save_checkpoint(), engine.save_16bit_model() or Accelerate's": _SHARDING,
    "by some ranks alone; do it on all ranks, or within": (
        "features/shard_parameters/test_joint_reads.py::test_not_all_ranks_read"
    ),
    "so it has no values and cannot be {}; make it within `with unsharded_parameters(engine):`": (
        "features/shard_parameters/test_shard_frozen.py::test_copies_made_at_rest"
    ),
    "has sharded its parameters by compile.shard_parameters; call destroy() of that engine first": _SHARDING,
    "cannot move it to the host; name other states in include=[...]": _SHARDING,
    "and compile.shard_parameters='all' a part of them; leave one of them out": _SHARDING,
    "compare the first losses with those of a run without it": _SHARDING,
    "load the model on the host before deepspeed.initialize(), which cuts it there": (
        "features/shard_parameters/test_from_host.py::test_it_trains_as_from_the_device"
    ),
    "clone() what you keep, or take it anew": (
        "features/shard_parameters/test_shard_all.py::test_views_that_are_kept_over_a_step"
    ),
    "is no number of blocks; set it to one, which may be 0": _SECTION,
    'compile.shard_frozen is shard_parameters now; set it to "frozen"': _SECTION,
    "needs blocks whose parameters are gathered; set compile.regional_compilation to true": _SECTION,
    "that compile.shard_parameters shards stay whole; set that too": _SECTION,
    "(if need be on zeros, and multiply the output by 0), or use unsharded_parameters(engine)": (
        "features/shard_parameters/test_ranks_alike.py::test_a_block_on_zeros"
    ),
    # The blocks, and what is compiled of them.
    "has no such module outside of another block; {}": _REFUSED_BLOCKS,
    "use a release of torch that ds_report names as tested": (
        "features/activation_budget/test_activation_budget.py::test_another_partitioner_of_torch"
    ),
    "has no effect, so give it to engine.compile()": (
        "features/blocks/test_blocks_training.py::test_arguments_with_which_blocks_were_compiled"
    ),
    "if one was changed, change a copy of it, or set the option to null": (
        "features/activation_budget/test_activation_budget.py::test_an_input_that_others_change"
    ),
    "found no blocks that repeat in {}; name their classes in a list": _REFUSED_BLOCKS,
    "use the names of its blocks' classes": _REFUSED_BLOCKS,
    "name its blocks' classes in compile.regional_compilation, or leave this out": (
        "features/overlap_gather/test_overlap_gather_refused.py::test_refused"
    ),
    "which makes a graph of every block; leave one of them out": _REFUSED_BLOCKS,
    "Pass use_cache=False, because a layer finds the cache filled": (
        "fixes/key_value_cache/test_key_value_cache.py::test_a_cache_for_which_layers_are_compiled_again"
    ),
    "call them with use_cache=True to have a cache": (
        "fixes/key_value_cache/test_key_value_cache.py::test_which_forwards_keep_no_cache"
    ),
    "register hooks at modules to have it compiled": "core/test_remedies.py::test_hooks_at_modules",
    "use hooks of tensors, in a forward hook, instead": (
        "features/blocks/test_hooks_later.py::test_hooks_of_tensors_instead"
    ),
    "compare losses with Liger turned off": ("fixes/liger/test_liger_lacks.py::test_a_liger_that_has_other_functions"),
    "destroy that engine, or set compile.regional_compilation to false for that engine": (
        "features/blocks/test_blocks_chosen.py::test_blocks_of_another_engine"
    ),
    "raise torch._dynamo.config.recompile_limit before engine.compile()": (
        "features/blocks/test_blocks_compilations.py::test_layers_are_compiled_as_often_as_they_differ"
    ),
    "leave empty groups out of the optimizer": (
        "fixes/schedulers/test_schedulers.py::test_nothing_is_said_where_empty_groups_are_left_out"
    ),
    "cannot compile {}; name other classes": (
        "features/blocks/test_blocks_chosen.py::test_blocks_that_cannot_be_compiled"
    ),
    # The configuration.
    "{} is no option; {}: {}": _SECTION,
    "use one of these names": _SECTION,
    "{} is missing; set it": _SECTION,
    "for DeepCompile set zero_optimization.stage to 1 or 2": (
        "features/configuration/test_by_configuration.py::test_the_stages_that_are_advised"
    ),
    'is no section; set it to one such as {"deepcompile": true}': (
        "features/configuration/test_section.py::test_what_is_no_section"
    ),
    "has no effect without a monitor; enable tensorboard": (
        "tools/monitoring/test_monitors.py::test_warned_without_a_monitor"
    ),
    "has no effect without steps_per_print; set steps_per_print": (
        "tools/monitoring/test_monitors.py::test_monitors_get_counters_and_peaks"
    ),
    "is no dict of arguments of torch.compile; pass one, or leave it out": (
        "features/configuration/test_by_configuration.py::test_arguments_that_are_no_dict"
    ),
    "or by an earlier call; call it before the first forward": (
        "features/blocks/test_compilation_limits.py::test_arguments_that_come_late"
    ),
    "is no part of the activations; set it to a number from 0 to 1": _SECTION,
    "names no classes; name some, or set it to true or false": _SECTION,
    "not with compile.passes={}; leave one of them out": _SECTION,
    "{}{} does not fit; set it to {}{}": _SECTION,
    "needs blocks that wait for their parameters; set compile.regional_compilation to true": _SECTION,
    "has no sections; name a file as DeepSpeed reads it": "tools/fits/test_fits.py::test_json_has_bytes",
    "whose size its configuration has; name no sequence": "tools/fits/test_fits.py::test_images_have_no_tokens",
    "{} has {} positions; ask for a sequence of at most so many": (
        "tools/fits/test_fits.py::test_adapters_and_positions_as_a_gpt_has_them"
    ),
    "--checkpoint goes with --config": "tools/fits/test_fits.py::test_a_configuration_of_checkpointed_layers",
    "lines with regional_compilation make blocks": (
        "features/blocks/test_blocks_chosen.py::test_more_that_is_compiled_as_a_whole"
    ),
    # Optimizers and their states.
    "does not divide partitions of {} elements; {}": "programs/test_optimizers.py::test_states_that_stay_in_fp32",
    "give it block_size={}": "programs/test_optimizers.py::test_states_that_stay_in_fp32",
    "{} {}, or leave {} out": "features/update/test_remainders_refused.py::test_refused",
    "a rule must return the end of the elements": "core/test_ranges.py::test_ranges_step_as_the_whole",
    "has no form for the third state of amsgrad=true; set amsgrad to false": _EIGHT_BIT,
    "{} {}, or leave compile.optimizer_states out": ("features/update/test_eight_bit_refused.py::test_refused"),
    "set torch_autocast.dtype to bfloat16, or leave {} out": _EIGHT_BIT,
    "set zero_optimization.elastic_checkpoint to false, or leave compile.optimizer_states out": _EIGHT_BIT,
    "is for Adam and AdamW of torch and DeepSpeed, not for {}; use one of these": (
        "features/update/test_eight_bit_refused.py::test_refused"
    ),
    "leave it so, or use Adam or AdamW of torch": (
        "features/update/test_eight_bit_in_engine.py::test_partitions_that_no_block_size_divides"
    ),
    "needs Triton on a GPU; install triton": (
        "features/update/test_remainders_in_engine.py::test_a_gpu_without_triton"
    ),
    "is not supported with Muon, whose updates are computed on the device; leave it out": _MUON,
    "which has whole matrices, at the wrong places; set it to false": _MUON,
    "by the scale; set torch_autocast.dtype to bfloat16": _MUON,
    "has use_muon, and its parameter {} is no matrix; set it to false": _MUON,
    "does not divide its shape {} into heads; set it to None": _MUON,
    "needs whole matrices, which it does not get from ZeRO; use DeepSpeed's own": _MUON,
    "because partitions are smaller than matrices; use fewer ranks, or AdamW": (
        "features/muon/test_muon.py::test_partitions_smaller_than_matrices_are_refused"
    ),
    "because its checkpoint is of other partitions; load one of as many ranks": (
        "features/muon/test_muon.py::test_momentum_of_other_partitions"
    ),
    "is only supported in stage 3; use 'cpu'": _ADVISED,
    "super_offload is only supported in stage 3; leave it out": _ADVISED,
    "works with a gradient scaler; undo that": (
        "features/update/test_eight_bit_in_engine.py::test_a_step_that_others_have_changed_is_refused"
    ),
    "load them with the edition, the number of ranks and the settings with which they were saved": (
        "features/update/test_eight_bit_states.py::test_states_that_are_saved_and_loaded"
    ),
    "load them with the number of ranks and the settings with which they were saved": (
        "features/update/test_eight_bit_states.py::test_states_that_are_saved_and_loaded"
    ),
    "leave compile.optimizer_states out to set states": (
        "features/shard_parameters/test_shard_all.py::test_what_works_at_rest"
    ),
    "host memory for gradients could not be had; use more ranks": ("core/test_offload.py::test_little_host_memory"),
    ", or set offload_optimizer.pin_memory to false": "fixes/pinning/test_pinning.py::test_no_memory_to_pin",
    "call engine.reload_states() to {}": (
        "features/update/test_remainders_in_engine.py::test_saved_and_loaded_in_other_places"
    ),
    "goes with ZeRO-1 and ZeRO-2 only; leave it out, or set zero_optimization.stage to 1 or 2": (
        "features/configuration/test_section.py::test_what_is_advised_at_the_beginning"
    ),
    "keeps no {}; leave one of them out": (
        "features/configuration/test_section.py::test_what_is_advised_at_the_beginning"
    ),
    "needs master weights in fp32; leave it out": (
        "features/configuration/test_section.py::test_what_is_advised_at_the_beginning"
    ),
    "there are some in {}; set bf16.enabled": (
        "features/configuration/test_section.py::test_what_is_advised_at_the_beginning"
    ),
    "set gradient_clipping to 0": "features/muon/test_muon.py::test_clipping_is_told_with_its_number",
    "set its max_norm to None, or leave compile.{} out": (
        "features/update/test_remainders_in_engine.py::test_embeddings_with_a_max_norm"
    ),
    # What DeepCompile cannot honour.
    "call it before the first backward or after engine.step()": (
        "features/configuration/test_refused_engines.py::test_refused_with_gradients_of_an_unfinished_step"
    ),
    "zero_optimization.zenflow is not supported; remove it": _ADVISED,
    "use stage 2, which accumulates in fp32, or grad_accum_dtype='bf16'": _ADVISED,
    "compiles without DeepCompile; leave it out, or set compile.deepcompile to false": _REFUSED,
    "generation swaps the modules that were compiled; set it to false": _ADVISED,
    "set random_ltd.enabled to false": _ADVISED,
    "set it to false or tune without engine.compile()": _ADVISED,
    "is no number of compilations; set it to 1 or more": _ADVISED,
    "is neither true nor false; set it to one of them, or to None": _ADVISED,
    "of which torch.compile takes one; remove either": _ADVISED,
    "is no dict of torch.compile's options; pass one, or leave it out": _ADVISED,
    "is not a mode of torch.compile; use one of {}": _ADVISED,
    "is not an argument of this torch's torch.compile(); remove it": _ADVISED,
    "go with backend 'inductor', not 'eager'; remove them": _ADVISED,
    "which is not an option of this torch; remove it": _ADVISED,
    "scheduled passes rewrite exist; leave `schedule` out": _REFUSED,
    "use mode 'max-autotune-no-cudagraphs' or none": _ADVISED,
    "drops the notes that say which gradient is whose; remove it": _ADVISED,
    "DeepCompile's partitioner inserts the reductions; remove it": _ADVISED,
    "profile without engine.compile()": (
        "features/configuration/test_options_warned.py::test_a_profile_without_compiling"
    ),
    "use torch.profiler for those": ("features/configuration/test_options_warned.py::test_a_profile_of_reductions"),
    "which is for stage 3; make the model without it": (
        "features/configuration/test_refused_engines.py::test_a_model_of_zero_init"
    ),
    "optimizer wrapper {} is not supported; set compile.deepcompile to false": (
        "core/test_refused.py::test_an_optimizer_wrapper_of_the_user"
    ),
    "give deepspeed.initialize() an optimizer": (
        "features/configuration/test_refused_engines.py::test_an_engine_without_an_optimizer"
    ),
    "or torch.nn.functional.linear to torch._C._nn.linear before this one compiles": (
        "features/configuration/test_refused_engines.py::test_linear_that_zero_3_has_replaced"
    ),
    "failed half-way; create the engine anew": ("core/test_refused.py::test_refused_after_half_a_compile"),
    "make it real, with a last dimension of two": "core/test_parameters_unusual.py::test_complex",
    "which no step of ZeRO-1 and ZeRO-2 changes; set its requires_grad to false": (
        "core/test_parameters_unusual.py::test_a_parameter_made_of_others"
    ),
    "is sparse, and DeepCompile reduces dense ones only; build the module with sparse=False": (
        "core/test_remedies.py::test_a_sparse_gradient"
    ),
    "got a sparse gradient, and DeepCompile reduces dense ones only": "core/test_remedies.py::test_a_sparse_gradient",
    "pipeline parallelism is not supported; set compile.deepcompile to false": (
        "features/configuration/test_refused_engines.py::test_refused_engines"
    ),
    "have process groups of their own, are not supported; set compile.deepcompile to false": (
        "features/configuration/test_refused_engines.py::test_refused_engines"
    ),
    "set compile.passes to ['autotp']": "features/configuration/test_refused_engines.py::test_refused_engines",
    "set compile.passes to ['autosp'] and use stage 1": (
        "features/configuration/test_refused_engines.py::test_refused_engines"
    ),
    "is too old; install torch {} or newer": "core/test_refused.py::test_refused_with_an_old_torch",
    "is not supported for DeepCompile; use 'inductor' or 'eager'": (
        "features/configuration/test_options_refused_by_deepspeed.py::test_refused_by_deepspeed"
    ),
    # Steps and backwards.
    "code that DeepCompile has compiled has none; run this forward and its backward in": _OF_COMPILE,
    "which has no second derivatives; run this forward and its backward in": (
        "core/test_second_derivatives.py::test_parameters_of_a_module_that_is_called_directly"
    ),
    "give it these too, or set their requires_grad to false": (
        "core/test_remedies.py::test_layers_of_which_the_optimizer_lacks_a_parameter"
    ),
    "use that one, and destroy this one": "core/test_remedies.py::test_an_engine_whose_parameters_a_later_one_trains",
    "call engine.optimizer.zero_grad() and run all of its micro-batches again": (
        "core/test_faults.py::test_a_step_of_which_a_part_was_lost"
    ),
    "use engine.coalesce_grad_reduction() or": "core/test_remedies.py::test_several_backwards_in_one_step",
    "was put into the model, or its requires_grad set, after the engine was made; make the engine anew": (
        "core/test_remedies.py::test_a_parameter_that_the_optimizer_lacks"
    ),
    "load a checkpoint with its optimizer states before going on": "core/test_faults.py::test_half_a_step",
    "so set compute_grad_norm to true": "core/test_remedies.py::test_clipping_without_a_norm",
    "raised in another thread while this one began; run this one again": (
        "core/test_remedies.py::test_a_backward_that_raised_in_another_thread"
    ),
    "on their way to other ranks; call it when the backward has ended": (
        "core/test_changes_in_backwards.py::test_a_hook_drops_gradients"
    ),
    "run the forward again with an engine that is alive": (
        "core/test_engine_ends.py::test_a_graph_of_a_destroyed_engine_says_so"
    ),
    "run a backward at the gradient accumulation boundary first": "core/test_lifetime.py::test_release",
    "tensors; assign a tensor to an entry of the list": "core/test_averaged_gradients.py::test_a_flat_partition",
    "is no tensor of {} elements; assign one": "core/test_averaged_gradients.py::test_a_flat_partition",
    "look for the first error of any rank, and start the processes again from a checkpoint": (
        "core/test_faults_on_one_rank.py::test_ranks_that_are_apart_start_again"
    ),
    "Restart from a checkpoint": "core/test_faults_on_one_rank.py::test_ranks_that_are_apart_start_again",
    # The tools.
    "change that, or leave the configuration out": (
        "tools/fits/test_fits.py::test_a_configuration_that_is_not_reckoned"
    ),
    "is not above 0; name what there is": "tools/fits/test_fits.py::test_numbers_that_no_gpu_has",
    "is not from 1 to {}; name what there is": "tools/fits/test_fits.py::test_numbers_that_no_gpu_has",
    "no parameter of the model is trained; set requires_grad of some": (
        "tools/fits/test_fits.py::test_a_model_that_is_asked_about_otherwise"
    ),
    "call fits(..., batch=...) with a function that makes it": (
        "tools/fits/test_fits.py::test_a_model_that_is_asked_about_otherwise"
    ),
    "name a function without arguments, and leave its weights": (
        "tools/fits/test_fits.py::test_the_command_prints_modes"
    ),
    "has no function {}; name one that returns a model": "tools/fits/test_fits.py::test_the_command_prints_modes",
    "name a module of this folder or of PYTHONPATH": "tools/fits/test_fits.py::test_the_command_prints_modes",
    "`pip install transformers`, or name a function that makes a model": (
        "tools/fits/test_fits.py::test_the_command_prints_modes"
    ),
    "there is no file {}; name a config.json": "tools/fits/test_fits.py::test_a_model_of_transformers",
    "reads no configuration of {} ({}); name a config.json": ("tools/fits/test_fits.py::test_a_model_of_transformers"),
    "name a configuration whose parts suit each other": (
        "tools/fits/test_fits_refuses.py::test_a_configuration_whose_parts_disagree"
    ),
    "and no torch.nn.Module; name a function that returns a model": (
        "tools/fits/test_fits.py::test_the_command_prints_modes"
    ),
    "the model returns no tensor, but {}; return its loss": (
        "tools/fits/test_fits_refuses.py::test_what_the_forward_lacks_is_mended"
    ),
    "cannot be written: {}; name a file in a folder that there is": (
        "tools/fits/test_fits_refuses.py::test_a_place_that_cannot_be_written"
    ),
    "cannot be written: {}; name another place with --out": (
        "tools/memory_picture/test_memory_picture.py::test_the_command_says_where_it_cannot_write"
    ),
    "holds no step's memory; give a file": (
        "tools/memory_picture/test_memory_picture.py::test_the_command_lays_two_steps_over_each_other"
    ),
    "give one or two files, not {}": (
        "tools/memory_picture/test_memory_picture.py::test_the_command_lays_two_steps_over_each_other"
    ),
    "draw it with the DeepSpeed that wrote it": (
        "tools/memory_picture/test_memory_picture.py::test_what_is_advised_of_files_that_cannot_be_read"
    ),
    "record the step again": (
        "tools/memory_picture/test_memory_picture.py::test_what_is_advised_of_files_that_cannot_be_read"
    ),
    "{} cannot be imported; {}": (
        "tools/memory_picture/test_memory_picture.py::test_a_library_that_lacks_is_named_once_and_the_rest_is_drawn"
    ),
    "{} cannot be imported, so its picture was not drawn; {}": (
        "tools/memory_picture/test_memory_picture.py::test_a_library_that_lacks_is_named_once_and_the_rest_is_drawn"
    ),
    "its data will be written; `{}`, now or before `python -m {} FILE.json` draws them later": (
        "tools/memory_picture/test_memory_picture.py::test_a_library_that_lacks_is_named_once_and_the_rest_is_drawn"
    ),
    "is no JSON; give a file": (
        "tools/memory_picture/test_memory_picture.py::test_the_command_lays_two_steps_over_each_other"
    ),
    "and this engine has stage {}; leave {} out": (
        "tools/memory_picture/test_memory_picture.py::test_what_cannot_be_recorded_is_refused_at_once"
    ),
    "{}.folder: {}; name another folder": (
        "tools/memory_picture/test_memory_picture.py::test_what_cannot_be_recorded_is_refused_at_once"
    ),
    "deepspeed.compile.zero12 is deepspeed.compile.zero_1_and_2 now": (
        "house/test_dependencies.py::test_every_file_can_be_imported"
    ),
    "deepspeed.compile.features.shard_frozen is deepspeed.compile.features.shard_parameters now": (
        "house/test_dependencies.py::test_every_file_can_be_imported"
    ),
    "deepspeed.compile.features.memory_picture is deepspeed.compile.memory_picture now": (
        "tools/memory_picture/test_memory_picture.py::test_the_former_name"
    ),
    "deepspeed.compile.features.fits is deepspeed.compile.fits now": (
        "house/test_dependencies.py::test_every_file_can_be_imported"
    ),
    "this engine will have BF16_Optimizer; leave {} out": (
        "features/configuration/test_section.py::test_what_is_advised_at_the_beginning"
    ),
    "set {}.step to an earlier one": (
        "tools/memory_picture/test_memory_picture.py::test_several_engines_record_one_after_the_other"
    ),
    "cannot be differentiated; set the optimizer's differentiable to false": (
        "features/update/test_remainders_in_engine.py::test_a_step_that_others_have_changed_is_refused"
    ),
    "which has hooks or was replaced; undo that, or leave {} out": (
        "features/update/test_remainders_in_engine.py::test_a_step_that_others_have_changed_is_refused"
    ),
    # The build.
    "`apt-get install g++`, or name one in CXX": "core/test_remedies.py::test_one_rank_without_a_compiler",
    "`pip install ninja`, and the environment's bin in PATH": "core/test_remedies.py::test_without_ninja_or_headers",
    "or newer is needed (pip install --upgrade setuptools)": (
        "house/test_packaging.py::test_an_old_setuptools_is_refused"
    ),
    "delete it to have it downloaded again": (
        "house/test_packaging.py::test_kept_archive_with_another_hash_is_refused"
    ),
    "put that file into {}, or name the folder that holds it in {}": (
        "house/test_packaging.py::test_unreachable_base_is_named_and_can_be_provided"
    ),
    "install torch first and add --no-build-isolation": (
        "house/test_packaging.py::test_install_reinstall_with_native_code_and_uninstall"
    ),
    "`apt-get install python3-dev`": "core/test_remedies.py::test_without_ninja_or_headers",
}

# How messages end that advise nothing: they say what is or will be, and texts that are no messages of their own.
ADVISES_NOTHING = (
    # An option has no effect, or another one than asked for.
    "because torch.compile is switched off by compile_kwargs['disable'] or TORCH_COMPILE_DISABLE",
    " no effect, because compile.deepcompile is not true; training is that of DeepSpeed",
    " has no effect on a loss of this model, because {}; it is computed in one piece",
    "=False has no effect, because a parameter without a gradient is stepped on zeros",
    "so every step takes several passes over memory ({}: {})",
    " has no effect, because no block has such parameters of its own",
    " has no effect in this stage, only in stage 3",
    "compile.passes holds 'z3', which has no effect in this stage",
    " has no effect, because gradients are divided by the number of ranks before they are summed",
    " has no effect, because only torch's own backend uses it",
    "DeepCompile keeps {} out of its graphs, where that of liger-kernel 0.8.5 computes wrong numbers",
    # What happened.
    "double backward is not supported by DeepCompile's loss in chunks, nor by torch.compile",
    "DeepCompile has compiled {}; compiling took {} s",
    "DeepCompile is compiling {}; the first step takes longer than later ones",
    "another rank could not load its master weights and has said why; no rank loaded any",
    "has been modified by an inplace operation: {} is at version {}; expected version {} instead",
    "parameter {} is made of {} tensors, and its new values are not",
    "on which engine.compile() has set up DeepCompile ZeRO-1 or ZeRO-2, and which has not been destroyed",
    "are dropped too, and the next micro-batch is the first of a step",
    "{}, so its gradients are dropped",
    "these gradients were dropped, because a later backward raised",
    "waiting for a process that is. This takes about a minute, once per environment.",
    "DeepSpeed waits for another process, which builds native code in {}",
    "cannot be built; this machine lacks {}",
    "not built; the first training builds it, which may take a minute",
    "tested with {}; the installed {} is {}",
    # What goes into another text, or has one at its end that advises.
    "so rank {} goes on without compiled code: {}. {}",
    "DeepCompile compiled one frame more than {} times: {}. {}",
    "DeepSpeed cannot build {}, because this machine lacks {}",
    "it calls what calls its blocks more than once",
    "nothing can be reckoned ({})",
    "another profiler runs",
    "taken by get_model_state_dict()",
    "a sharded parameter was gathered",
    "give the engine its number",
    # No messages.
    "call of the module in forward()",
    "DO NOT MATCH THE HASHES",
    "{paragraphs}{figure}</body></html>\n",
    "micro-batch {}, accumulation {}; {}, torch {}",
)

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Every name of the base release and of torch's internals that this fork leans on.

A move to another base or torch release fails here, by name, and not somewhere in training.
"""

import importlib
import inspect
import re

import pytest

# Found by importing: "module:dotted.name".
IMPORTABLE = """
deepspeed.comm:broadcast deepspeed.comm:get_global_rank
deepspeed.comm:get_rank deepspeed.comm:get_world_group
deepspeed.compile.backend:param_manager
deepspeed.compile.graph_param:DSGraphParamManager.params
deepspeed.compile.passes.contract:PassContract
deepspeed.compile.util:get_deepcompile_handle deepspeed.compile.util:get_last_uses
deepspeed.ops.adam:FusedAdam
deepspeed.ops.op_builder.builder:CUDAOpBuilder deepspeed.ops.op_builder.builder:OpBuilder.load
deepspeed.runtime.base_optimizer:ZeROOptimizer.backward_prologue
deepspeed.runtime.base_optimizer:ZeROOptimizer.backward_epilogue
deepspeed.runtime.base_optimizer:ZeROOptimizer.get_param_comm_dtype
deepspeed.runtime.base_optimizer:ZeROOptimizer._backward_active_depth
deepspeed.runtime.base_optimizer:ZeROOptimizer.enter_backward
deepspeed.runtime.base_optimizer:ZeROOptimizer.scale_if_loss
deepspeed.utils.timer:SynchronizedWallClockTimer.Timer.reset
deepspeed.runtime.engine:DeepSpeedEngine._forward_epilogue
deepspeed.runtime.engine:DeepSpeedEngine._forward_prologue
deepspeed.runtime.engine:DeepSpeedEngine.autotuning_enabled
deepspeed.runtime.engine:DeepSpeedEngine.flops_profiler_enabled
deepspeed.runtime.engine:DeepSpeedEngine.fp16_auto_cast
deepspeed.runtime.engine:DeepSpeedEngine.fp16_enabled
deepspeed.runtime.engine:DeepSpeedEngine.is_compiled deepspeed.runtime.engine:DeepSpeedEngine.compile
deepspeed.runtime.engine:DeepSpeedEngine.is_deepcompile_active
deepspeed.runtime.engine:DeepSpeedEngine.is_deepcompile_enabled
deepspeed.runtime.engine:DeepSpeedEngine.uses_parallelization_pass_only
deepspeed.runtime.engine:DeepSpeedEngine.zero_optimization_stage
deepspeed.accelerator:get_accelerator
deepspeed.runtime.engine:DeepSpeedEngine.memory_breakdown
deepspeed.runtime.engine:DeepSpeedEngine.random_ltd_enabled
deepspeed.runtime.engine:DeepSpeedEngine.wall_clock_breakdown
deepspeed.runtime.engine:DeepSpeedEngine.autotp_size
deepspeed.runtime.engine:DeepSpeedEngine.is_gradient_accumulation_boundary
deepspeed.runtime.engine:DeepSpeedEngine.zero_reduce_bucket_size
deepspeed.runtime.constants:PIPE_REPLICATED
deepspeed.runtime.utils:all_gather_dp_groups deepspeed.runtime.utils:is_invalid_grad_norm
deepspeed.runtime.utils:is_model_parallel_parameter
deepspeed.runtime.zero.offload_config:OffloadDeviceEnum.none
deepspeed.runtime.zero.stage_1_and_2:INITIAL_MICRO_STEP_ID
deepspeed.runtime.zero.stage_1_and_2:OPTIMIZER_ALLGATHER_TIMER
deepspeed.runtime.zero.stage_1_and_2:OPTIMIZER_GRADIENTS_TIMER
deepspeed.runtime.zero.stage_1_and_2:OPTIMIZER_STEP_TIMER deepspeed.runtime.zero.stage_1_and_2:OPTIMIZER_TIMERS
deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.check_overflow
deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.get_grad_norm_direct
deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.load_state_dict
deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.offload_states
deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.refresh_fp32_params
deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.reload_states
deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.scaled_global_norm
deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.state_dict
deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.update_lp_params
deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer._model_parallel_all_reduce
deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer._optimizer_step
deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer._update_scale
deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.destroy
deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.overlapping_partition_gradients_reduce_epilogue
deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.setup_buckets
deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.step
deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.zero_grad
torch._dynamo.backends.debugging:boxed_nop
torch:autograd.Variable._execution_engine.queue_callback
torch:_C._current_graph_task_id torch:AcceleratorError torch:OutOfMemoryError
torch:distributed.DistBackendError torch:distributed.ProcessGroup._get_backend
torch:_guards.CompileContext.current_compile_id
torch._dynamo.backends.common:aot_autograd
torch._functorch._aot_autograd.descriptors:GradAOTOutput
torch._functorch._aot_autograd.fx_utils:get_all_input_and_grad_nodes
torch._functorch.partitioners:_has_tag_must_be_in_backward
torch._functorch.partitioners:min_cut_rematerialization_partition
torch._inductor:config.custom_partitioner_fn torch._inductor:config.triton.cudagraphs torch._inductor:list_mode_options
torch._inductor:config.memory_planning
torch._inductor.codegen.wrapper:PythonWrapperCodegen.writeline
torch._inductor.compile_fx:compile_fx torch._inductor.compile_fx:compile_fx_inner
torch._inductor.ir:FallbackKernel.codegen torch._inductor.ir:FallbackKernel.create
torch._inductor.ir:ReinterpretView torch._inductor.ir:TensorBox.create
torch._inductor.lowering:add_needs_realized_inputs torch._inductor.lowering:make_fallback
torch._inductor.lowering:register_lowering
torch._inductor.scheduler:SchedulerBuffer.get_aliases torch._inductor.scheduler:SchedulerBuffer.get_mutations
torch._inductor.utils:GPU_ALIGN_BYTES
torch._inductor.virtualized:V
torch._inductor.custom_graph_pass:CustomPartitionerFn
torch.fx.node:has_side_effect
torch.nn:Module.register_load_state_dict_pre_hook torch.nn:Module.register_state_dict_pre_hook
torch.nn:Parameter._backward_hooks torch.nn:Parameter._post_accumulate_grad_hooks
torch.optim.optimizer:_global_optimizer_post_hooks torch.optim.optimizer:_global_optimizer_pre_hooks
torch.torch_version:TorchVersion
torch:_foreach_norm
""".split()

# Attributes that instances of a class set or read: "module:class", then the names.
INSTANCE_ATTRIBUTES = {
    "deepspeed.runtime.engine:DeepSpeedEngine": ""
    "inside_no_sync_ctxt has_moe_layers sequence_parallel_size param_names optimizer module _config micro_steps "
    "engine_timers timers _deepcompile_active _is_gradient_accumulation_boundary _running_engine_backward",
    "deepspeed.runtime.base_optimizer:BackwardHookStateManager": "post_backward_callback_queued",
    "deepspeed.utils.timer:SynchronizedWallClockTimer.Timer": "started_",
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer": ""
    "averaged_gradients bit16_groups bit16_groups_flat contiguous_gradients gradient_accumulation_dtype "
    "_grad_acc_hooks params_in_partition partition_gradients partition_size real_dp_process_group "
    "round_robin_bit16_groups round_robin_bit16_offsets optimizer _coalesce_grad_reduction "
    # Of its step, which ours takes the place of.
    "allgather_bucket_size check_grad_overflow clip_grad compute_grad_norm dp_process_group dtype _global_grad_norm "
    "loss_scale micro_step_id model_parallel_rank nccl_start_alignment_factor overflow "
    "parallel_partitioned_bit16_groups single_partition_of_fp32_groups timers torch_autocast_gradscaler",
}

# What the source of a function or class must show: "module:dotted.name", then a pattern.
BEHAVIOUR = [
    ("torch._functorch._aot_autograd.fx_utils:get_all_input_and_grad_nodes", r'meta\["desc"\]'),
    ("torch._inductor.codegen.wrapper:PythonWrapperCodegen", r"self\.freed\b[\s\S]*name in self\.freed"),
    ("torch._inductor.codegen.wrapper:PythonWrapperCodegen.generate_fallback_kernel", r"codegen_args|ExternKernel"),
    ("torch._inductor.compile_fx:partition_fn", r'compiler="inductor"'),
    ("torch._inductor.graph:GraphLowering", r"self\.cpp_wrapper\b[\s\S]*self\.mutated_buffers\b"),
    ("torch._inductor.ir:ExternKernel", r"self\.constant_args\b"),
    ("torch._inductor.scheduler:NodeUser", r"is_weak: bool"),
    ("torch._inductor.scheduler:Scheduler", r"self\.name_to_buf\b[\s\S]*wrapper_code\.freed"),
    ("torch._inductor.scheduler:SchedulerBuffer", r"users: list\[NodeUser\]"),
    ("deepspeed.compile.util:deepcompile_backward_prologue", r"start_backward\("),
    ("deepspeed.compile.util:get_deepcompile_handle", r"DeepCompileBuilder\(\)\.load\(\)"),
    ("deepspeed.runtime.engine:DeepSpeedEngine._backward_prologue", r"optimizer\.backward_prologue\(\)"),
    ("deepspeed.runtime.engine:DeepSpeedEngine._backward_epilogue", r"optimizer\.backward_epilogue\(\)"),
    ("deepspeed.runtime.engine:DeepSpeedEngine", r"def allreduce_gradients[\s\S]{0,400}is_deepcompile_active\(\)"),
    ("deepspeed.runtime.engine:DeepSpeedEngine.destroy", r"optimizer\.destroy\(\)"),
    (
        "deepspeed.runtime.engine:DeepSpeedEngine.get_deepcompile_backend",
        r"init_z1_and_2\(self, backend, compile_config, compile_kwargs, schedule, use_z2=True\)",
    ),
    (
        "deepspeed.runtime.engine:DeepSpeedEngine",
        r"def backward\(self, loss[\s\S]{,2500}optimizer\.scale_if_loss\(loss\)[\s\S]{,900}loss\.backward\(",
    ),
    (
        "deepspeed.runtime.engine:DeepSpeedEngine.coalesce_grad_reduction",
        r"inside_no_sync_ctxt = True\s+optimizer\._coalesce_grad_reduction = True",
    ),
    (
        "deepspeed.runtime.engine:DeepSpeedEngine._flush_coalesced_reduction_zero12",
        r"overlapping_partition_gradients_reduce_epilogue\(\)",
    ),
    ("deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.offload_states", r'"move_flat_partition"'),
    ("torch._inductor.compile_fx:get_input_idxs_to_check", r"should_assume_input_aligned"),
    ("deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.get_grad_norm_direct", r'"_zero_padding"'),
    # What our step does too, in this order. Anything new in between has to be looked at.
    (
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.step",
        r"check_overflow\([\s\S]*scaled_global_norm\([\s\S]*_update_scale\([\s\S]*zero_grad\([\s\S]*"
        r"unscale_and_clip_grads\([\s\S]*_optimizer_step\([\s\S]*all_gather_dp_groups\(",
    ),
]

# What the base imports from the files that this fork replaces: module, then the names it must find there.
PROVIDED = {
    "deepspeed.compile.fx": ""
    "_make_node_meta add_args_process add_end_backward add_free_activations add_postprocess "
    "find_node_by_name "
    "find_node_by_tag get_node_shape_meta get_output_node move_primals_to_head replace_node_users "
    "replace_reduce_outputs_with_none should_release_reduce_buckets",
    "deepspeed.compile.config": "CompileConfig",
    "deepspeed.compile.init_z1_and_2": "init_z1_and_2",
    "deepspeed.compile.passes.zero_1_and_2_compile": ""
    "CONTRACT_Z1 CONTRACT_Z2 NAME_Z1 NAME_Z2 add_z1_reduce add_z2_reduce",
    "deepspeed.ops.op_builder.dc": "DeepCompileBuilder",
}


def resolve(reference):
    module, _, name = reference.partition(":")
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("reference", IMPORTABLE)
def test_name_exists(reference):
    resolve(reference)


@pytest.mark.parametrize(
    "reference, name", [(cls, name) for cls, names in INSTANCE_ATTRIBUTES.items() for name in names.split()]
)
def test_instances_have_the_attribute(reference, name):
    sources = "".join(
        inspect.getsource(cls) for cls in resolve(reference).__mro__ if cls.__module__.startswith("deeps")
    )
    assert re.search(rf"self\.{name}\b", sources), f"{reference} no longer has {name}"


@pytest.mark.parametrize("reference, pattern", BEHAVIOUR)
def test_the_base_still_does(reference, pattern):
    assert re.search(pattern, inspect.getsource(resolve(reference))), f"{reference} no longer matches {pattern}"


@pytest.mark.parametrize(
    "module, name", [(module, name) for module, names in PROVIDED.items() for name in names.split()]
)
def test_the_base_finds_what_it_imports(module, name):
    assert hasattr(importlib.import_module(module), name)


def test_every_compile_option_that_the_base_reads_is_there():
    """``config.py`` is ours, so an option that a new base reads has to be added to it."""
    from pathlib import Path

    import deepspeed
    from deepspeed.compile.config import CompileConfig

    root, read = Path(deepspeed.__file__).parent, set()
    for path in root.rglob("*.py"):
        read |= {*re.findall(r"\bcompile_config\.(\w+)|\bcompile_config, \"(\w+)\"", path.read_text())}
    for path in (root / "ops" / "csrc" / "compile_zero3").iterdir():
        read |= {*re.findall(r'get_config<\w+>\(config, "(\w+)"()\)', path.read_text())}
    names = {name for pair in read for name in pair if name}
    assert len(names) > 15 and names - set(CompileConfig.model_fields) == set()


def test_nothing_else_is_imported_from_the_replaced_files():
    """Every ``from <replaced module> import ...`` of the installed package names something listed above."""
    import ast
    from pathlib import Path

    import deepspeed

    root = Path(deepspeed.__file__).parent
    for path in root.rglob("*.py"):
        package = ["deepspeed", *path.relative_to(root).parts[:-1]]
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom):
                continue
            prefix = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*prefix, node.module] if node.module else prefix)
            for alias in node.names:
                if module in PROVIDED and not (package[:2] == ["deepspeed", "compile"] and is_ours(path)):
                    assert alias.name in PROVIDED[module].split(), f"{path} imports {alias.name} from {module}"


def is_ours(path):
    return "the authors of this fork" in path.read_text()[:200]


def test_torch_defines_the_descriptor_by_which_gradients_are_found():
    from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput

    gradient = GradAOTOutput(grad_of=PlainAOTInput(idx=3))
    assert gradient.grad_of == PlainAOTInput(idx=3) and gradient.grad_of.idx == 3


def test_autograd_drops_queued_callbacks_when_a_backward_raises():
    """The watch on a raising backward is the one thing that leans on how autograd frees its graph task."""
    import torch

    class Callback:
        outcome = "alive"

        def __call__(self):
            self.outcome = "called"

        def __del__(self):
            outcomes.append(self.outcome)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            torch.autograd.Variable._execution_engine.queue_callback(Callback())
            if Fails.on_purpose:
                raise ArithmeticError("on purpose")
            return gradient

    outcomes = []
    for Fails.on_purpose in (False, True):
        try:
            Fails.apply(torch.ones(1, requires_grad=True)).sum().backward()
        except ArithmeticError:
            pass
    assert outcomes == ["called", "alive"]

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Every name of the base release and of torch's internals that this fork leans on.

A move to another base or torch release fails here, by name, and not somewhere in training.
"""

import ast
import contextlib
import functools
import importlib
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "deepspeed"
# Names under which the fork's code holds instances, and their classes.
HOLDERS = {
    "engine": "deepspeed.runtime.engine:DeepSpeedEngine",
    "optimizer": "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer",
}
# What the fork itself adds to such instances.
OWN = {
    "_compile_arguments",
    "_deepcompile",
    "_memory_recorder",
    "_has_logged_its_stage",
    "_has_warned_of_evaluation",
    "_half_loaded",
    "_has_begun_to_load",
    "_save_has_come_to",
    "base_orders",
    "even_layouts",
    "is_in_our_order",
    "masters_as_remainders",
    "masters_from_base",
    "own_masters",
    "own_partitions",
    "plain_class",
    "whole_states",
}
# Attributes of `optimizer` where that is torch's, in the step over chunks.
HOOKS_OF_TORCH = {"_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_optimizer_step_code"}
OF_TORCH = {"state", "param_groups", *HOOKS_OF_TORCH}


def trees():
    """Yields (name, syntax tree) of each Python file of the fork."""
    for path in sorted(ROOT.rglob("*.py")):
        yield path.relative_to(ROOT.parent).as_posix(), ast.parse(path.read_text())


def dotted(node):
    """Returns "a.b.c" for such an expression, and None for any other."""
    if isinstance(node, ast.Name):
        return node.id
    head = dotted(node.value) if isinstance(node, ast.Attribute) else None
    return head and f"{head}.{node.attr}"


def names_used():
    """Lists "module:dotted.name" of what the fork imports within functions, and of what it reads of other modules.

    Names that a file imports at once need no test, because without one of them the file cannot be imported.
    """
    found = set()
    for path, tree in trees():
        modules = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                modules.update((alias.asname or alias.name, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                module = node.module or ""
                if node.level:
                    package = path.removesuffix(".py").split("/")[: -node.level]
                    module = ".".join([*package, *filter(None, [module])])
                if node not in tree.body and module.split(".")[0] in ("torch", "deepspeed"):
                    found.update(f"{module}:{alias.name}" for alias in node.names if alias.name != "*")
        # Whole expressions, not the parts of which they are made.
        parts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(tree):
            name = dotted(node) if isinstance(node, ast.Attribute) and id(node) not in parts else None
            head, _, rest = (name or "").partition(".")
            if head in modules and modules[head].split(".")[0] in ("torch", "deepspeed"):
                if not rest.startswith("ops."):
                    found.add(f"{modules[head]}:{rest}")
    return sorted(found)


def attributes_used():
    """Lists (class, name) of what the fork reads and writes of the base's engine and optimizer."""
    found = set()
    for _, tree in trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or node.attr in OWN | OF_TORCH:
                continue
            name = dotted(node.value)
            if name in HOLDERS:
                found.add((HOLDERS[name], node.attr))
    return sorted(found)


# Names of instances that other names hold: "module:class", then the names.
INSTANCE_ATTRIBUTES = {
    "deepspeed.runtime.activation_checkpointing.offload_activations:CheckpointHiddenStatesOffload": "_fwd_stash "
    "_keep_last _num_bytes _pool_cpu_buffer _restore_tensor _stream_context _tracker compute_stream "
    "max_fwd_stash_count s1 stats use_streams",
    "deepspeed.runtime.base_optimizer:BackwardHookStateManager": "post_backward_callback_queued",
    "deepspeed.runtime.zero.muon.muon_optimizer:MuonWithAuxAdam": "aux_optimizer",
    "deepspeed.utils.timer:SynchronizedWallClockTimer.Timer": "started_ reset",
}
# Methods that the optimizer's mixin overrides, and names that strings or other objects stand for.
IMPORTABLE = """
deepspeed.compile.graph_param:DSGraphParamManager.params
deepspeed.ops.op_builder.builder:OpBuilder.load
torch._C._profiler:_EventType.Allocation torch._C._autograd:_ProfilerResult.experimental_event_tree
torch._functorch._aot_autograd.descriptors:GradAOTOutput
torch._functorch.partitioners:_has_tag_must_be_in_backward
torch._inductor:config.custom_partitioner_fn torch._inductor:config.triton.cudagraphs
torch._inductor:config.memory_planning
torch._inductor.codegen.wrapper:PythonWrapperCodegen.writeline
torch._inductor.ir:FallbackKernel.codegen torch._inductor.ir:FallbackKernel.create
torch._inductor.scheduler:SchedulerBuffer.get_aliases torch._inductor.scheduler:SchedulerBuffer.get_mutations
torch.distributed:ProcessGroup._get_backend
torch.distributed:ProcessGroup._start_coalescing torch.distributed:ProcessGroup._end_coalescing
torch.nn:Module.register_load_state_dict_pre_hook torch.nn:Module.register_state_dict_pre_hook
torch.utils.cpp_extension:_get_build_directory
torch.nn:Parameter._backward_hooks torch.nn:Parameter._post_accumulate_grad_hooks
""".split()

# What the source of a function or class must show: "module:dotted.name", then a pattern.
BEHAVIOUR = [
    ("torch._functorch._aot_autograd.fx_utils:get_all_input_and_grad_nodes", r'meta\["desc"\][\s\S]*\.grad_of\b'),
    ("torch._functorch._aot_autograd.descriptors:PlainAOTInput", r"idx: int"),
    (
        "torch._functorch.partitioners:min_cut_rematerialization_partition",
        r"config\.activation_memory_budget[\s\S]* choose_saved_values_set\(\s+joint_graph,\s+node_info,\s+memory_b",
    ),
    ("torch._inductor.codegen.wrapper:PythonWrapperCodegen", r"self\.freed\b[\s\S]*name in self\.freed"),
    ("torch._inductor.codegen.wrapper:PythonWrapperCodegen.generate_fallback_kernel", r"codegen_args|ExternKernel"),
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
    ("deepspeed:set_optimizer_flags", r'setattr\(p, "muon_num_heads", num_heads\)'),
    ("deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.offload_states", r'"move_flat_partition"'),
    (
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.__init__",
        r"param_buffer_of_bit16_for_cpu_offload_groups[\s\S]*self\.reduction_stream =[\s\S]*"
        r"self\.temp_grad_buffer_for_cpu_offload =[\s\S]*self\.temp_grad_buffer_for_gpu_offload =",
    ),
    (
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer._link_all_hp_params",
        r"self\._get_offload_gradient_dict\(\)[\s\S]*offload_gradient_dict=self\.offload_gradient_dict",
    ),
    ("deepspeed.utils.tensor_fragment:tensor_fragment.get_lp_grad_fragment", r"self\.offload_gradient_dict\b"),
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
    "deepspeed.ops.op_builder.dc": "DeepCompileBuilder",
}


def resolve(reference):
    module, _, name = reference.partition(":")
    found = importlib.import_module(module)
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        # A module of a package is the package's attribute only once it was imported.
        return importlib.import_module(f"{module}.{name}")
    return found


def is_there(reference):
    with contextlib.suppress(ImportError):
        resolve(reference)
        return True
    return False


# Reading the source of a class takes as long as parsing its file.
source = functools.cache(inspect.getsource)


# The old name of a module -> what its error names instead.
MOVED = {
    "deepspeed/compile/zero12.py": "deepspeed.compile.zero_1_and_2",
}


@pytest.mark.follows(
    "deepspeed.compile.zero12 is deepspeed.compile.zero_1_and_2 now",
)
def test_every_file_can_be_imported():
    """A file that few trainings need would import a name that is gone."""
    for name, _ in trees():
        if name in MOVED:
            with pytest.raises(ImportError, match=re.escape(MOVED[name])):
                importlib.import_module(name.removesuffix(".py").replace("/", "."))
            continue
        try:
            importlib.import_module(name.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
        except ModuleNotFoundError as error:
            # Torch for CPUs has none.
            assert error.name == "triton", name


def test_names_exist():
    """A name that only a rare case uses would be gone, and training would fail when it comes to that case."""
    assert [name for name in (*names_used(), *IMPORTABLE) if not is_there(name)] == [], "gone"


def test_instances_have_the_attributes():
    """The base would keep something under another name, and the fork would write what nothing reads."""
    of_others = [(cls, name) for cls, names in INSTANCE_ATTRIBUTES.items() for name in names.split()]

    def has(reference, name):
        cls = resolve(reference)
        sources = (source(base) for base in cls.__mro__ if base.__module__.startswith("deeps"))
        return hasattr(cls, name) or re.search(rf"self\.{name}\b", "".join(sources))

    assert [use for use in (*attributes_used(), *of_others) if not has(*use)] == [], "gone"


def test_methods_of_the_mixins_override_some_of_the_base():
    """The base would call a method under a new name, and ours would not run."""
    from deepspeed.compile.features.shard_parameters.feature import GathersInBackward
    from deepspeed.compile.features.update.feature import FormOfStates
    from deepspeed.compile.features.update.masters_in_optimizer import RemaindersOfParameters
    from deepspeed.compile.zero_1_and_2.step.optimizer import StepLocalGradients
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    mixins = StepLocalGradients, FormOfStates, RemaindersOfParameters, GathersInBackward
    for name in (name for mixin in mixins for name in vars(mixin)):
        is_known = name.startswith("__") or name in OWN or hasattr(DeepSpeedZeroOptimizer, name)
        assert is_known, f"the base no longer has {name}"


def test_the_base_still_does():
    """A name would be there still, but do something else, so that gradients are lost or divided twice."""
    changed = [entry for entry in BEHAVIOUR if not re.search(entry[1], source(resolve(entry[0])))]
    assert changed == [], "these no longer match"


def test_the_base_finds_what_it_imports():
    """A file of the base could not be imported, because ours has taken the place of one that has the name."""
    names = [f"{module}:{name}" for module, names in PROVIDED.items() for name in names.split()]
    assert [name for name in names if not is_there(name)] == [], "gone"


def test_every_compile_option_that_the_base_reads_is_there():
    """``config.py`` is ours, so an option that a new base reads would not be in it."""
    import deepspeed
    from deepspeed.compile.config import CompileConfig

    root, read = Path(deepspeed.__file__).parent, set()
    for path in root.rglob("*.py"):
        read |= {*re.findall(r"\bcompile_config\.(\w+)|\bcompile_config, \"(\w+)\"", path.read_text())}
    for path in (root / "ops" / "csrc" / "compile_zero3").iterdir():
        read |= {*re.findall(r'get_config<\w+>\(config, "(\w+)"()\)', path.read_text())}
    names = {name for pair in read for name in pair if name}
    # The other names are methods.
    options = {name for name in names if not hasattr(CompileConfig, name)}
    assert len(options) > 15 and options - set(CompileConfig.model_fields) == set()


def test_nothing_else_is_imported_from_the_replaced_files():
    """A file of the base would import a name from one of ours that ``PROVIDED`` does not list, and fail."""
    import deepspeed

    root = Path(deepspeed.__file__).parent
    imports_ours = re.compile(rf"\b(?:{'|'.join(name.rpartition('.')[2] for name in PROVIDED)})\s+import\b")
    for path in root.rglob("*.py"):
        package, text = ["deepspeed", *path.relative_to(root).parts[:-1]], path.read_text()
        # Parsing takes long, and most files of the base use none of ours.
        for node in ast.walk(ast.parse(text)) if imports_ours.search(text) else ():
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
    """Descriptors would no longer be equal by what they describe, and no gradient would be found in a graph."""
    from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput

    gradient = GradAOTOutput(grad_of=PlainAOTInput(idx=3))
    assert gradient.grad_of == PlainAOTInput(idx=3) and gradient.grad_of.idx == 3


def test_autograd_drops_queued_callbacks_when_a_backward_raises():
    """Autograd would keep or call a callback when a backward raises, and the next backward would take it for its own.

    The watch on a raising backward is the one thing that leans on how autograd frees its graph task.
    """
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

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The rules by which files of the fork import each other, write state, use private names, and tell their types.

``docs/architecture.md`` tells why.
"""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

from deepspeed.compile.features import NAMES

ROOT = Path(__file__).resolve().parent.parent
COMPILE = ROOT / "deepspeed" / "compile"
ZERO12 = COMPILE / "zero12"

# Each module may import those of the lines above its own, and what is on its own line nothing of that line.
FLOORS = """
fx passes.zero_1_and_2_compile zero12.feature zero12.hooks zero12.messages zero12.timers
zero12.native zero12.interrupted
zero12.collectives zero12.layout
zero12.update zero12.update.authors zero12.update.rule zero12.norm zero12.views zero12.placement
zero12.update.ranges
zero12.update.groups
zero12.backward zero12.gather zero12.step
zero12.state
zero12.optimizer
zero12.graph.guards zero12.graph.keys
zero12.graph.parameter_numbers zero12.graph.lowering zero12.graph.reductions
zero12.graph.partitioner
zero12.graph.frame
zero12.graph.backend
zero12.options
zero12.self_compile
zero12.calls
zero12 zero12.set_up
init_z1_and_2
features.blocks.parameters features.blocks.reasons features.key_value_cache.feature features.overlap_gather.runs
features.subclasses.tensors
features.blocks.compilation_limit features.overlap_gather.gather features.shard_frozen.at_rest
features.subclasses.calls
features.blocks.block_calls features.overlap_gather.gather_hooks features.shard_frozen.unit
features.blocks.choose_blocks features.shard_frozen.gather_order features.shard_frozen.saved_tensors
features.blocks.compile_blocks features.shard_frozen.sharded_blocks
features.blocks.feature
features.ranges.own_step features.muon.muon features.one_pass_adam.dynamic_map
features.one_pass_adam.adam_operators features.muon.stand_in
features.one_pass_adam.adam features.one_pass_adam.adam_kernel features.eight_bit.blockwise
features.eight_bit.eight_bit features.eight_bit.states
features.ranges.feature features.one_pass_adam.feature features.eight_bit.feature features.muon.feature
features.activation_budget.errors features.activation_budget.split features.dora.feature features.liger.feature
features.loss.chunked_loss features.loss.own_graph features.shard_frozen.rewrite
features.loss.find_loss
features.activation_budget.feature features.loss.feature features.overlap_gather.feature features.shard_frozen.feature
features.monitoring.feature features.progress.feature features.report features.shard_frozen.calls features.schedulers
features.offload.host_memory features.offload.pinning
features.offload.feature
features.memory_picture.data
features.memory_picture.classify features.memory_picture.draw_png features.memory_picture.draw_html
features.memory_picture.record features.memory_picture.files
features.memory_picture.of_engine features.memory_picture.__main__
"""

TRAINING = {
    "optimizer",
    "state",
    "backward",
    "step",
    "norm",
    "interrupted",
    "update",
    "gather",
    "layout",
    "views",
    "placement",
}
# What the base keeps of a backward and counts.
FLAGS = {"micro_steps", "_backward_active_depth", "post_backward_callback_queued"}
# Private names that the fork gives to objects of the base, and one of Python's named tuples.
OWN_NAMES = {"_zero12", "_compile_arguments", "_memory_recorder", "_replace", "_asdict"}
COMPILER = ("torch._dynamo", "torch._functorch", "torch._guards", "torch._inductor")


def name_of(path):
    parts = path.relative_to(COMPILE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules():
    """Returns name -> syntax tree of every module of the fork below ``deepspeed/compile/``."""
    return {name_of(path): ast.parse(path.read_text()) for path in COMPILE.rglob("*.py")}


def run_nodes(node):
    """Yields the nodes of a syntax tree that Python runs: none below ``if TYPE_CHECKING``, which only names types."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            for other in child.orelse:
                yield from run_nodes(other)
        else:
            yield from run_nodes(child)


def imported(name, tree, known):
    """Yields the modules of the fork that a module imports, also within functions."""
    package = name.split(".") if (COMPILE / Path(*name.split(".")) / "__init__.py").is_file() else name.split(".")[:-1]
    for node in run_nodes(tree):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        above = package[: len(package) - node.level + 1]
        module = ".".join([*above, *(node.module or "").split(".")]).strip(".")
        for alias in node.names:
            inner = f"{module}.{alias.name}".strip(".")
            yield inner if inner in known else module


def floors(names):
    """Returns name -> number of the line in FLOORS, for all modules that have one."""
    lines = {entry: number for number, line in enumerate(FLOORS.strip().splitlines()) for entry in line.split()}
    found = {name: lines.get(name, lines.get(f"{name.rpartition('.')[0]}.*")) for name in names}
    return {name: floor for name, floor in found.items() if floor is not None}


def test_imports_lead_down():
    """Two files would need each other, so that neither can be read, tested or replaced alone."""
    trees = modules()
    floor = floors(trees)
    doors = {f"features.{name}{file}" for name in NAMES for file in ("", ".edits", ".options")} - {*floor}
    without = {*doors, "config", "features", "memory_picture", "zero12.graph"}
    assert {*trees} - {*floor, *without} == set(), "say in FLOORS where these stand"
    for name, tree in trees.items():
        for other in imported(name, tree, trees):
            if other in floor and other != name:
                assert floor[other] < floor[name], f"{name} imports {other}"


def test_the_core_imports_no_optional_part():
    """A part could not be removed, because the core would miss it."""
    trees = modules()
    for name, tree in trees.items():
        if not name.startswith("features"):
            assert not [other for other in imported(name, tree, trees) if other.startswith("features.")], name


def test_every_optional_part_is_named():
    """DeepSpeed would not call a part, without a word, because setup.py makes the edits of named parts alone."""
    folders = {path.parent.name for path in (COMPILE / "features").glob("*/__init__.py")}
    assert folders == set(NAMES)


def test_the_recorder_needs_no_deepspeed():
    """The benchmark could not measure other systems, where no DeepSpeed or another one is installed."""
    for path in (COMPILE / "features" / "memory_picture").glob("*.py"):
        if path.stem in ("of_engine", "options", "__main__"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level < 2 and not (node.module or "").startswith("deepspeed"), path.name
            elif isinstance(node, ast.Import):
                assert not any(alias.name.startswith("deepspeed") for alias in node.names), path.name


def test_the_compiler_and_tensors_of_meshes_are_imported_when_they_are_needed():
    """The launcher and all commands would take twice as long to start, and they need neither."""
    code = "import sys, deepspeed; print([name for name in sys.argv[1:] if name in sys.modules])"
    # Not in the checkout's own folder, whose deepspeed/ is not the whole package.
    command = [sys.executable, "-c", code, "torch._dynamo", "torch.distributed.tensor"]
    printed = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True).stdout
    # DeepSpeed may print a line about the accelerator first.
    assert printed.splitlines()[-1] == "[]"


def test_graphs_and_training_do_not_know_each_other():
    """A change of how graphs are made could break the step, and the other way round."""
    trees = modules()
    for name, tree in trees.items():
        parts = {other.split(".")[1] for other in imported(name, tree, trees) if other.startswith("zero12.")}
        if name.startswith("zero12.graph"):
            assert not TRAINING & parts, name
        elif name.removeprefix("zero12.").split(".")[0] in TRAINING:
            assert "graph" not in parts, name


def test_one_module_writes_the_flags_of_a_backward():
    """A second file would set a flag, and the base would miss a boundary or reduce twice."""
    writers = {
        (node.attr, name)
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in FLAGS and isinstance(node.ctx, ast.Store)
    }
    assert writers == {(flag, "zero12.backward") for flag in FLAGS}


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def dotted(node):
    """Returns "a.b.c" for such an expression; whatever is no name or attribute stands as "?"."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def private_names(tree):
    """Yields the private names that a module imports, reads or writes, each with what stands before it."""
    for node in run_nodes(tree):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [dotted(node)]
        elif isinstance(node, ast.Call) and dotted(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            names = [f"?.{each.value}" for each in node.args[1:2] if isinstance(each, ast.Constant)]
        else:
            continue
        yield from (name for name in names if any(map(is_private, name.split("."))))


def own_names(tree):
    """Yields the names that a module defines, and the attributes that its classes give themselves."""
    for node in run_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
            name = dotted(node)
            yield name.removeprefix("self.")


def test_the_docs_list_who_uses_private_names():
    """A move to another torch would miss a file that uses what torch may change without notice."""
    trees = modules()
    own = {name for tree in trees.values() for name in own_names(tree)} | OWN_NAMES
    found = {"of torch's compiler": set(), "others of torch, and those of the base": set()}
    for name, tree in trees.items():
        parts = name.removeprefix("zero12.").split(".")
        file = f"{parts[0]}/" if parts[0] in ("graph", "update") else f"{'/'.join(parts)}.py"
        for private in private_names(tree):
            if private.startswith(COMPILER):
                found["of torch's compiler"].add(file)
            elif not {part for part in private.split(".") if is_private(part)} <= own:
                found["others of torch, and those of the base"].add(file)
    page = (ROOT / "docs" / "architecture.md").read_text()
    for kind, files in found.items():
        (row,) = re.findall(rf"(?m)^ *\| {kind} \|(.*)\|$", page)
        assert {*re.findall(r"`([^`]+)`", row)} == files, kind


def public_functions(tree):
    """Yields the functions of a module, and the methods of its public classes, that another file may call."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not is_private(node.name):
            yield from public_functions(node)
        elif isinstance(node, ast.FunctionDef) and (not is_private(node.name)):
            yield node


def test_functions_that_other_files_call_are_typed():
    """mypy would not see that a caller gives the wrong argument, because it checks against types that are there."""
    paths = [ROOT / "setup.py", *(ROOT / "deepspeed").rglob("*.py")]
    for path in paths:
        for function in public_functions(ast.parse(path.read_text())):
            arguments = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
            untyped = [each.arg for each in arguments if each.annotation is None and each.arg not in ("self", "cls")]
            assert not untyped, f"{path.name}: {function.name}({', '.join(untyped)})"
            assert function.returns or function.name.startswith("__"), f"{path.name}: {function.name}() -> ?"


def test_the_native_code_has_what_its_protocols_say():
    """A method of the native code would take other arguments than the protocol that mypy checks calls against."""
    from deepspeed.compile.zero12 import native

    module = native.reducer_module()

    def members(cls):
        return {name for name in vars(cls) if not name.startswith("_")}

    classes = ((native.Reducer, module.Reducer), (native.HandedOver, module.HandedOver))
    assert all(members(protocol) == members(found) for protocol, found in classes)
    assert members(native.NativeModule) | {"Reducer", "HandedOver"} == members(module)
    for protocol, found in (*classes, (native.NativeModule, module)):
        properties = {name for name in members(protocol) if isinstance(getattr(protocol, name), property)}
        for name in members(protocol) - properties:
            taken = len(re.findall(r"\barg\d+: ", getattr(found, name).__doc__))
            assert len(inspect.signature(getattr(protocol, name)).parameters) == 1 + taken, name
    keywords = re.findall(r"(\w+): ", module.Reducer.__init__.__doc__.partition("*,")[2])
    assert [*inspect.signature(native.Reducer.__init__).parameters] == ["self", *keywords]

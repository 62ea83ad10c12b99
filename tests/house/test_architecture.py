# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The rules by which files of the fork import each other, write state, use private names, and tell their types.

``docs/internals/architecture.md`` tells why.
"""

import ast
import collections
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed import distributed_c10d

from deepspeed.compile.parts import NAMES

ROOT = Path(__file__).resolve().parents[2]
COMPILE = ROOT / "deepspeed" / "compile"
CORE = "zero_1_and_2"

# Of the core and its door. Beside them are fx.py, which ZeRO-3 uses, the door of the section "compile", and old names.
MOST_LINES, DOOR = 3900, "init_z1_and_2.py"
SHELVES = ("features", "fixes", "tools")
# Public names of tools, beside the shelves.
PUBLIC = {"fits", "memory_picture"}
# The name of a part, in a text.
_PART = rf"(?:{'|'.join(SHELVES)})\.\w+"
# Overrides of methods of the base and of torch, which these call and the core does not.
CALLED_FROM_OUTSIDE = {
    *("move_flat_partition", "overlapping_partition_gradients_reduce_epilogue", "setup_buckets", "update_lp_params"),
    *("reduce_ready_partitions_and_remove_grads", "codegen_size_asserts", "uuid"),
    # What a rule may ask for of a gradient.
    "as_they_are",
}
# Attributes of objects of the base, the user and torch -> the modules that write them or their entries, with why each
# of several does. The core's compile_module() restores _compiled_call_impl where no part compiles the module.
WRITERS = {
    "micro_steps": {"zero_1_and_2.gradient.backward"},
    "_backward_active_depth": {"zero_1_and_2.gradient.backward"},
    "post_backward_callback_queued": {"zero_1_and_2.gradient.backward"},
    "averaged_gradients": {"zero_1_and_2.gradient.backward"},
    "_hp_optimizer_states_linked": {"features.checkpoints.feature"},
    "offload_gradient_dict": {"features.offload_optimizer.feature"},
    "_compiled_call_impl": {"features.blocks.block_calls"},
    "grad": {
        "zero_1_and_2.step.partitions": "of the master weights, while the optimizer steps them",
        "features.update.own_ranges": "of a part of the master weights, while the optimizer steps it",
        "features.offload_optimizer.feature": "of the master weights: gives back what the base has made",
        "tools.fits.activations": "of parameters without memory, which no step follows",
    },
    "param_groups": {
        "zero_1_and_2.step.partitions": "while the optimizer steps, also a part of the master weights",
        "features.update.muon_in_engine": "of the Adam within DeepSpeed's Muon, which shares those of Muon",
    },
    # A function that is given the states of some master weights may write entries too, as in update/blockwise.py.
    "state": {
        "features.update.own_ranges": "what a rule has made, and that of a part of the master weights while it steps",
        "features.checkpoints.in_base_order": "those of a partition in another order, while it is saved or loaded",
        "features.update.muon": "the momentum of whole matrices, before a rule steps",
        "features.update.muon_in_engine": "of the Adam within DeepSpeed's Muon, which shares those of Muon",
    },
    "__class__": {
        "zero_1_and_2.step.optimizer": "of the optimizer, while gradients come from a reducer",
        "zero_1_and_2.step.even_order": "of the optimizer, as long as its elements are in our order",
        "features.overlap_gather.arriving": "of parameters, on their way or at rest, and of others of these values",
        "features.update.masters_in_optimizer": "of what the base keeps of a parameter: its master weight is computed",
        "features.shard_parameters.from_host": "of the optimizer, which it has made in another way than the base",
    },
    "set_full_hp_param": {
        "features.update.states": "refuses to set a state in 8 bits",
        "features.update.masters_in_optimizer": "sets parameter and remainder",
    },
    "lp_fragment": {
        "features.checkpoints.in_base_order": "leads to this rank's shard, and leaves the graph out",
        "features.shard_parameters.segments": "leads to this rank's part, where the flat tensor has no memory",
    },
    "torch._dynamo.config": {
        "features.blocks.guards": "guards, until a compilation ends",
        "features.blocks.compilation_limit": "the limit of compilations, while a block runs",
        "features.update.muon": "the limit of compilations, while DeepSpeed's function for matrices runs",
    },
}


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


def imported(name, tree, known, nodes=None):
    """Yields the modules of the fork that a module imports, also within functions.

    ``nodes``: lists the nodes of a tree; by default those that run.
    """
    package = name.split(".") if (COMPILE / Path(*name.split(".")) / "__init__.py").is_file() else name.split(".")[:-1]
    for node in (nodes or run_nodes)(tree):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        above = package[: len(package) - node.level + 1]
        module = ".".join([*above, *(node.module or "").split(".")]).strip(".")
        for alias in node.names:
            inner = f"{module}.{alias.name}".strip(".")
            yield inner if inner in known else module


def folder_of(part):
    return COMPILE / part.replace(".", "/")


def part_of(module):
    """Returns the name of the part of a module, "" if it is of none."""
    shelf, _, rest = module.partition(".")
    return f"{shelf}.{rest.partition('.')[0]}" if shelf in SHELVES and rest else ""


def needs(name):
    """Returns the names of the parts that a part names in ``NEEDS``."""
    for node in ast.parse((folder_of(name) / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "NEEDS":
            return set(ast.literal_eval(node.value))
    return set()


def circles(graph):
    """Returns the sets of names that lead to each other."""

    def reached(name):
        found, open_ = set(), [name]
        while open_:
            more = graph[open_.pop()] - found
            found |= more
            open_ += more
        return found

    reach = {name: reached(name) for name in graph}
    return {frozenset(other for other in reach[name] if name in reach[other]) for name in graph if name in reach[name]}


def test_no_modules_need_each_other():
    """Neither of two such modules could be read, tested or replaced alone. Imports that only name types count."""
    trees = modules()
    graph = {
        name: {other for other in imported(name, tree, trees, ast.walk) if other in trees} - {name}
        for name, tree in trees.items()
    }
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == {frozenset("bc")}
    assert circles(graph) == set()


def test_the_core_imports_no_optional_part():
    """A part could not be removed, because the core would miss it."""
    trees = modules()
    for name, tree in trees.items():
        if not part_of(name) and name not in PUBLIC:
            assert {*map(part_of, imported(name, tree, trees, ast.walk))} <= {""}, name


def test_parts_import_what_they_need():
    """A part could be removed, and another one would fail that has not said that it needs it."""
    trees = modules()
    for name, tree in trees.items():
        part = part_of(name)
        # A file beside the folders is the old name of a part.
        if part and folder_of(part).is_dir():
            others = {*map(part_of, imported(name, tree, trees, ast.walk))} - {""}
            assert others <= {part} | needs(part), name


def test_tests_of_a_part_import_the_parts_that_it_needs():
    """Who removes another part would have to look for tests that can no longer be collected."""
    for path in (path for shelf in SHELVES for path in (ROOT / "tests" / shelf).glob("*/*.py")):
        part = f"{path.parent.parent.name}.{path.parent.name}"
        for node in ast.parse(path.read_text()).body:
            names = re.findall(rf"deepspeed\.compile\.({_PART})", ast.unparse(node)) if is_import(node) else []
            assert set(names) & set(NAMES) <= {part} | needs(part), path.name


def is_import(node):
    return isinstance(node, (ast.Import, ast.ImportFrom))


def public_names(tree):
    """Yields the names of a module's functions and classes, and of the methods of its classes."""
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from public_names(node)


def test_the_core_has_no_helper_of_one_part():
    """A reader of the core would read what nobody calls, or what belongs to one part."""
    texts = {path: path.read_text() for path in COMPILE.rglob("*.py")}
    core = [path for path in texts if CORE in path.parts]
    # How often each file has each word.
    words = {path: collections.Counter(re.findall(r"\w+", text)) for path, text in texts.items()}
    calls = re.findall(r"\w+", (ROOT / "setup.py").read_text() + (COMPILE / DOOR).read_text())
    for name in {name for path in core for name in public_names(ast.parse(texts[path]))} - CALLED_FROM_OUTSIDE:
        users = {path for path in texts if words[path][name]}
        in_core = sum(words[path][name] for path in users.intersection(core))
        parts = {part_of(name_of(path)) for path in users} - {""}
        assert in_core > 1 or len(parts) > 1 or name in calls, name


def added_by(edits):
    """Returns the lines that edits of the base add: file of the base -> text."""
    return {file: "\n".join(new.replace("...", "") for new in changes.values()) for file, changes in edits.items()}


def test_the_base_calls_one_file_of_the_core():
    """Who reads an edit would look for its function in every file, or a function would stay that nothing calls."""
    texts = added_by(runpy.run_path(str(ROOT / "setup.py"))["EDITS"])
    # Builds of native code know no engine: DeepSpeed's setup.py imports this folder before there is a package.
    assert re.findall(r"from \S+ import .*", texts.pop("deepspeed/ops/op_builder/builder.py")) == [
        "from .build_folder import load"
    ]
    added = "".join(texts.values())
    imports = re.findall(r"from \S+ import .*", added)
    assert imports == [f"from deepspeed.compile.{CORE}.engine import calls as deepcompile"]
    calls = {node.name for node in public_functions(ast.parse((COMPILE / CORE / "engine/calls.py").read_text()))}
    assert {*re.findall(r"\bdeepcompile\.(\w+)\(", added)} == calls


@pytest.mark.parametrize("part", [part for part in NAMES if (folder_of(part) / "edits.py").is_file()])
def test_edits_of_a_part_call_that_part(part):
    """A part that was removed would leave calls of it in the base, or one that stays would call one that is gone."""
    edits = runpy.run_path(str(folder_of(part) / "edits.py"))["EDITS"]
    modules = re.findall(
        rf"deepspeed\.compile\.({'|'.join(SHELVES)})(?:\.| import )(\w+)", "".join(added_by(edits).values())
    )
    assert {".".join(names) for names in modules} <= {part}


def imports_at_the_top(path):
    """Yields the names that a file imports when it is imported itself: not those that its functions import."""
    open_ = [ast.parse(path.read_text())]
    while open_:
        for node in ast.iter_child_nodes(open_.pop()):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            elif not isinstance(node, (ast.FunctionDef, ast.Lambda)):
                open_.append(node)


def imports_of_features(tree):
    """Yields the modules of optional parts that a file names, also within functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and re.match(
            rf"deepspeed\.compile\.({'|'.join(SHELVES)})\b", node.module or ""
        ):
            yield node.module


def test_tests_of_the_core_are_not_of_an_optional_part():
    """Where a part is removed, its tests would stay and fail."""
    for path in (ROOT / "tests" / "core").glob("*.py"):
        assert {*imports_of_features(ast.parse(path.read_text()))} == set(), path.name


def test_each_optional_part_has_tests():
    """A part would have its tests where nobody looks for them, or none."""
    files = [path for shelf in SHELVES for path in (ROOT / "tests" / shelf).glob("*/test_*.py")]
    assert {f"{path.parent.parent.name}.{path.parent.name}" for path in files} == set(NAMES)


def test_what_tests_of_the_core_import_imports_no_optional_part_at_the_top():
    """Where somebody has removed a part, pytest could not collect the file, and none of its tests would run."""
    tests = ROOT / "tests"
    paths = [tests / "conftest.py", *(tests / "core").glob("*.py")]
    for path in paths:
        names = set(imports_at_the_top(path))
        assert not [name for name in names if re.match(rf"deepspeed\.compile\.{_PART}", name)], path.name
        modules_of_support = {Path(tests, *name.split(".")[:2]) for name in names if name.startswith("support.")}
        more = {path for module in modules_of_support for path in (module.with_suffix(".py"), module / "__init__.py")}
        paths += sorted(path for path in more.difference(paths) if path.is_file())


def test_the_core_is_small():
    """One evening would no longer be enough to read it."""
    paths = [COMPILE / DOOR, *(COMPILE / CORE).rglob("*.py")]
    assert sum(len(path.read_text().splitlines()) for path in paths) <= MOST_LINES


def test_every_optional_part_is_named():
    """DeepSpeed would not call a part, without a word, because setup.py makes the edits of named parts alone."""
    folders = [path.parent for shelf in SHELVES for path in (COMPILE / shelf).glob("*/__init__.py")]
    assert {name_of(folder / "__init__.py") for folder in folders} == set(NAMES)


def test_the_recorder_needs_no_deepspeed():
    """The benchmark could not measure other systems, where no DeepSpeed or another one is installed."""
    for path in (COMPILE / "tools" / "memory_picture").glob("*.py"):
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
    training = ("gradient", "step", "parameter")
    for name, tree in trees.items():
        if not name.startswith(f"{CORE}."):
            continue
        others = {other.removeprefix(f"{CORE}.") for other in imported(name, tree, trees) if other.startswith(CORE)}
        folders = {other.split(".")[0] for other in others - {"gradient.native"}}
        if name.startswith(f"{CORE}.graph"):
            assert folders.isdisjoint(training), name
        elif name.split(".")[1] in training:
            assert "graph" not in folders, name


def held(value):
    """Returns the attribute that an expression is, or of which it is an entry; None if it is something else."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "get":
        value = value.func.value
    value = value.value if isinstance(value, ast.Subscript) else value
    return value if isinstance(value, ast.Attribute) else None


def written(tree):
    """Yields the names of attributes that a module assigns, or of which it assigns an entry, also by another name.

    Of what it assigns in a module, such as torch's options of Dynamo, yields the whole name of that module too.
    """
    for function in [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))]:
        called = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and held(node.value) is not None:
                called |= {name.id: held(node.value) for name in node.targets if isinstance(name, ast.Name)}
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and dotted(node.func) == "setattr":
                yield node.args[1].value if isinstance(node.args[1], ast.Constant) else dotted(node.args[0])
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "patch":
                patched = node.func.value
                yield dotted(called.get(patched.id, patched) if isinstance(patched, ast.Name) else patched)
            if not isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)):
                continue
            attribute = node.value if isinstance(node, ast.Subscript) else node
            if isinstance(attribute, ast.Attribute):
                yield attribute.attr
                yield dotted(attribute.value)
            elif isinstance(node, ast.Subscript) and isinstance(attribute, ast.Name) and attribute.id in called:
                yield called[attribute.id].attr


def test_few_modules_write_what_the_base_keeps():
    """Another file would set a flag, and the base would miss a boundary, reduce twice or link states too early."""
    assert {*written(ast.parse("a.b[0] = setattr(m.c, n, 1)\nd = m.e\nd.patch(f=1)\ng = a.h.get(1)\ng[2] = 3"))} >= {
        *("b", "m.c", "m.e", "h")
    }
    writers = {(name, module) for module, tree in modules().items() for name in written(tree) if name in WRITERS}
    assert writers == {(name, module) for name, of_name in WRITERS.items() for module in of_name}


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
            names = [f"?.{argument.value}" for argument in node.args[1:2] if isinstance(argument, ast.Constant)]
        else:
            continue
        yield from (name for name in names if any(map(is_private, name.split("."))))


def test_private_names_of_torch_in_sharded_parameters_are_tested():
    """No test would ask a new torch for what this part leans on, and training would read memory that is gone."""
    folder = "features.shard_parameters."
    test = ROOT / "tests" / "features" / "shard_parameters" / "test_private_torch.py"
    tested = {part for name in private_names(ast.parse(test.read_text())) for part in name.split(".")}
    of_torch = {*dir(torch.Tensor), *dir(torch.nn.Module), *dir(torch.UntypedStorage), *dir(distributed_c10d)}
    # What other parts import too.
    anywhere = ("torch.utils._pytree", "torch.utils._python_dispatch")
    found = set()
    for name, tree in modules().items():
        # The source of rewrite.py is in the keys of torch's caches.
        if not name.startswith(folder) or name == f"{folder}rewrite":
            continue
        for private in private_names(tree):
            first, *parts = private.split(".")
            if first != "self" and not private.startswith(anywhere):
                found.update(part for part in parts if is_private(part) and (first == "torch" or part in of_torch))
    assert found - tested == set()
    assert {"_cdata", "_version", "_apply", "_execution_engine"} <= found


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
            untyped = [
                argument.arg
                for argument in arguments
                if argument.annotation is None and argument.arg not in ("self", "cls")
            ]
            assert not untyped, f"{path.name}: {function.name}({', '.join(untyped)})"
            assert function.returns or function.name.startswith("__"), f"{path.name}: {function.name}() -> ?"

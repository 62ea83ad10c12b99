# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Regional compilation: each repeated block of a model is a graph of its own, compiled once for all of its layers.

A reduction learns at run time which parameter it is for, so one graph reduces every layer's gradients. What calls the
blocks runs uncompiled, and what lies further out is compiled as ever.
"""

import copyreg
import inspect
import logging
from collections import defaultdict
from typing import Iterable, List, Tuple

import torch
from torch.nn import Embedding, Module, ModuleDict, ModuleList, Parameter, Sequential

from deepspeed.utils import log_dist

from .compilation_limit import own_code

# They hold modules and are no part of a model's depth themselves.
CONTAINERS = (ModuleList, ModuleDict, Sequential)


def choose_blocks(module: Module, wanted, compile_kwargs) -> Tuple[List[Module], str]:
    """Decides which blocks become graphs of their own.

    Args:
        module: the model.
        wanted: the option ``compile.regional_compilation``. None for the blocks that repeat, if they are alike, can be
            compiled, and are called by a module inside of the model, of whose parameters they have most. What is
            around that one, usually head and loss, is still compiled.
        compile_kwargs: further arguments of ``torch.compile``.

    Returns:
        The blocks, and if there are none the reason why the model is compiled as a whole.

    Raises:
        ValueError: as :func:`find_blocks`, if they were asked for.
    """
    if wanted is False:
        return [], "compile.regional_compilation is false"
    if wanted is not None:
        return find_blocks(module, wanted), ""
    if compile_kwargs.get("fullgraph"):
        return [], "compile_kwargs['fullgraph'] asks for one graph"
    blocks = _each_once(_repeated(module))
    if blocks and all(block._compiled_call_impl is not None for block in blocks) and not _obstacle(module, blocks):
        # Somebody has chosen already, as Accelerate does when it is asked for regional compilation.
        return blocks, ""
    why = _reason_for_whole(module, blocks)
    return ([], why) if why else (blocks, "")


def _reason_for_whole(module, blocks):
    if not blocks:
        return f"no blocks repeat in {type(module).__name__}"
    obstacle = _obstacle(module, blocks)
    if obstacle:
        return f"torch cannot compile {obstacle}"
    owners = owners_of(module, blocks)
    if module in owners:
        return f"{type(module).__name__} calls its blocks itself, so all around them would run uncompiled"
    kinds = defaultdict(set)
    for block in blocks:
        kinds[type(block)].add(tuple((name, each.shape, each.dtype) for name, each in block.named_parameters()))
    differing = sorted(kind.__name__ for kind, alike in kinds.items() if len(alike) > 1)
    if differing:
        return f"parameters of {differing} are not alike"
    inside = {parameter: parameter.numel() for block in blocks for parameter in block.parameters()}
    around = {
        parameter: parameter.numel()
        for each in {part for owner in owners for part in owner.modules()}
        # The rows of an embedding are looked up, so there is nothing to gain from compiling that.
        if not isinstance(each, Embedding)
        for parameter in each.parameters(recurse=False)
        if parameter not in inside
    }
    if sum(around.values()) > sum(inside.values()):
        return f"blocks are the smaller part of {sorted({type(owner).__name__ for owner in owners})}"
    return None


def find_blocks(module: Module, wanted) -> List[Module]:
    """Lists the blocks of a model, outermost only, each once, in the model's order.

    Args:
        module: the model.
        wanted: True for blocks that repeat: modules of one class, with submodules and parameters, of which a
            ``ModuleList`` or a ``Sequential`` holds several. Or the names of their classes.

    Raises:
        ValueError: in a sentence, if there is none, none of a class that is named, or one that cannot be compiled.
    """
    candidates = _repeated(module) if wanted is True else _of_classes(module, set(wanted))
    found = _each_once(candidates)
    if wanted is True and not found:
        raise ValueError(
            f"compile.regional_compilation=true found no blocks that repeat in {type(module).__name__}; name their "
            "classes in a list, or set it to false"
        )
    missing = set() if wanted is True else set(wanted) - {type(block).__name__ for block in found}
    if missing:
        raise ValueError(
            f"compile.regional_compilation names {sorted(missing)}, but {type(module).__name__} has no such module "
            "outside of another block; use the names of its blocks' classes"
        )
    obstacle = _obstacle(module, found)
    if obstacle:
        raise ValueError(
            f"compile.regional_compilation cannot compile {obstacle}; name other classes, or set it to false"
        )
    return found


def _obstacle(module, blocks):
    """Says which block, or module that calls blocks, cannot be changed, and why; or returns None."""
    for changed in (*owners_of(module, blocks), *blocks):
        why = _reason_against(changed)
        if why is None and changed in blocks and _kept_from_compiler(changed):
            why = "its forward is kept from the compiler"
        if why:
            return f"{type(changed).__name__} by itself, because {why}"
    return None


def _each_once(modules):
    return list({id(module): module for module in modules}.values())


def _repeated(module):
    children = list(module.children())
    alike = [type(child) for child in children] if isinstance(module, (ModuleList, Sequential)) else []
    for child in children:
        # A lone layer such as a Linear is too little for a graph.
        whole = any(child.children()) and any(True for _ in child.parameters()) and not isinstance(child, CONTAINERS)
        if whole and alike.count(type(child)) > 1 and not _kept_from_compiler(child):
            yield child
        else:
            yield from _repeated(child)


def _of_classes(module, names):
    for child in module.children():
        if type(child).__name__ in names:
            yield child
        else:
            yield from _of_classes(child, names)


def _kept_from_compiler(module):
    # Looked up without asking the class, whose forward may be something else, as a ScriptModule's is.
    return getattr(inspect.getattr_static(plain_class(module), "forward"), "_torchdynamo_disable", False)


def _reason_against(module):
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a ScriptModule"
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    if plain_class(module).forward is Module.forward:
        return "it has no forward"
    try:
        _subclass(plain_class(module))
    except Exception as error:
        return f"its class cannot be subclassed ({error})"
    return None


def owners_of(module: Module, blocks: List[Module]) -> List[Module]:
    """Lists the modules whose forward calls blocks: the nearest around each that has a forward of its own."""
    ids = {id(block) for block in blocks}

    def walk(parent, owner):
        owner = owner if isinstance(parent, (ModuleList, ModuleDict)) else parent
        for child in parent.children():
            if id(child) in ids:
                yield owner
            else:
                yield from walk(child, owner)

    return _each_once(walk(module, module))


def reducible_in_all(blocks: List[Module], parameters: Iterable[Parameter]) -> List[Parameter]:
    """Leaves out of ``parameters`` those whose like in another block of the class is not among them.

    The graph that serves all blocks of a class reduces what it reduced in the block for which it was compiled.
    """
    parameters = list(parameters)
    reducible = {id(parameter) for parameter in parameters}
    alike = defaultdict(list)
    for block in blocks:
        for name, parameter in block.named_parameters(remove_duplicate=False):
            alike[type(block), name].append(parameter)
    left_out = set()
    for group in alike.values():
        # One that is frozen has another graph compiled for its block.
        trained = [id(parameter) for parameter in group if parameter.requires_grad]
        if not reducible.issuperset(trained):
            left_out.update(trained)
    return [parameter for parameter in parameters if id(parameter) not in left_out]


def compile_regions(
    module: Module, blocks: List[Module], backend, compile_kwargs, limit, waiting=None
) -> List[Module]:
    """Has each block's forward compiled, one graph for all blocks of a class; what calls the blocks stays eager.

    Modules get a class of their own, as FSDP2 does with those that it shards; copies of them have the class they had
    before. Hooks and checkpointing stay outside of the graphs.

    Args:
        module: the model.
        blocks: what :func:`find_blocks` returned.
        backend: of ``torch.compile``.
        compile_kwargs: further arguments of ``torch.compile``.
        limit: the ``CompilationLimit`` of ``backend``.
        waiting: None, or a ``Waiting`` that is told before all these forwards, and behind those of what calls blocks.

    Returns:
        The modules that were changed, for :func:`restore`.
    """
    owners, classes = owners_of(module, blocks), {}
    for owner in owners:
        # A compiler that followed it to the blocks would look into each of them, again and again, and some models
        # ask whether they are traced: attention then gets a mask in memory instead of the word "causal".
        plain = type(owner)
        classes[plain] = _subclass(plain, forward=_uncompiled(plain.forward, waiting))
    for plain in {type(block): None for block in blocks}:
        classes[plain] = _subclass(
            plain,
            forward=_compiled(plain.forward, backend, compile_kwargs, limit, waiting),
            # For code other than the owner's.
            __call__=torch.compiler.disable(plain.__call__),
        )
    # Only when there is a class for each: a model is changed as a whole or not at all.
    changed = [*owners, *blocks]
    for each in changed:
        each.__class__ = classes[type(each)]
    return changed


def _uncompiled(forward, waiting):
    if waiting is None:
        return torch.compiler.disable(forward)

    def method(self, *args, **kwargs):
        waiting.enter(self)
        output = forward(self, *args, **kwargs)
        waiting.leave()
        return output

    method.__signature__ = inspect.signature(forward)
    return torch.compiler.disable(method)


def _compiled(forward, backend, compile_kwargs, limit, waiting):
    # torch.compile takes entries out of the options that it is given.
    options = compile_kwargs.get("options")
    own = {**compile_kwargs, "options": dict(options)} if options is not None else dict(compile_kwargs)
    # The limit is kept for all ranks.
    own.pop("recompile_limit", None)
    compiled = torch.compile(own_code(forward), **{**own, "backend": backend})

    # Without the marks of torch.compile, by which the compiler would take this method for the one that it compiles:
    # layers of transformers compare the two to see which of them is to checkpoint.
    def method(self, *args, **kwargs):
        if waiting is not None:
            waiting.enter(self)
        return limit.call_block(self, compiled, forward, args, kwargs)

    method.__signature__ = inspect.signature(forward)
    return method


def _new(cls, *arguments):
    return cls.__new__(cls, *arguments)


def _subclass(plain, **members):
    def as_plain(self, protocol):
        # A copy belongs to no engine, whose graphs would reduce its gradients, and this class cannot be pickled.
        function, arguments, *rest = plain.__reduce_ex__(self, protocol)
        # Which insists on an object's own class.
        function = _new if function is copyreg.__newobj__ else function
        return function, tuple(plain if argument is type(self) else argument for argument in arguments), *rest

    kept = {"class_before_regions": plain, "__module__": plain.__module__, "__reduce_ex__": as_plain}
    return type(plain.__name__, (plain,), {**kept, **members})


def take_over_compiled(modules: Iterable[Module]) -> None:
    """Has these modules run as if their ``compile()`` had never been called: their graphs would reduce nothing."""
    compiled = [each for each in modules if getattr(each, "_compiled_call_impl", None) is not None]
    if compiled:
        names = sorted({plain_class(each).__name__ for each in compiled})
        log_dist(
            f"DeepCompile compiles {len(compiled)} modules of {names} itself that were compiled before; what their "
            "compile() was given has no effect, so give it to engine.compile()",
            ranks=[0],
            level=logging.WARNING,
        )
    for each in compiled:
        each._compiled_call_impl = None


def plain_class(module: Module) -> type:
    """Returns the class that a module had before :func:`compile_regions`."""
    return getattr(type(module), "class_before_regions", type(module))


def refuse_blocks_of_others(module: Module) -> None:
    """Raises ValueError if an engine that trains other parameters has compiled parts of this model."""
    for each in module.modules():
        if type(each) is not plain_class(each):
            raise ValueError(
                f"{type(each).__name__} is compiled for an engine that trains other parameters of the model; destroy "
                "that one first, or set compile.regional_compilation to false for it"
            )


def restore(modules: List[Module]) -> None:
    """Undoes :func:`compile_regions`."""
    for module in modules:
        module.__class__ = plain_class(module)

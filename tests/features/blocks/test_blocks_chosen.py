# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Regional compilation: which modules are the blocks, and what compiling them does to these modules."""

import contextlib
import copy
import itertools
import pickle
import types

import pytest
import torch
from torch.nn import Embedding, Linear, Module, ModuleDict, ModuleList, Sequential

from deepspeed.compile.config import CompileConfig
from deepspeed.compile.features.blocks.block_calls import ModuleCall, take_over_compiled
from deepspeed.compile.features.blocks.choose_blocks import choose_blocks, find_blocks
from deepspeed.compile.features.blocks.compilation_limit import CompilationLimit
from deepspeed.compile.features.blocks.compile_blocks import compile_blocks, refuse_blocks_of_others
from deepspeed.compile.features.blocks.feature import Blocks, chosen_blocks
from deepspeed.compile.zero_1_and_2.feature import Request

from support.ids import vary
from support.models import Block, BlocksWithin, BreakingBlock, EagerBlock, Model


class Lonely(Module):
    def __init__(self):
        super().__init__()
        self.layers = ModuleList([Block(4), Linear(4, 4)])

    def forward(self, x):
        return self.layers[0](x)


class Nested(Module):
    def __init__(self):
        super().__init__()
        self.stages = Sequential(Sequential(Block(4), Block(4)), Sequential(Block(4), Block(4)))
        self.tail = ModuleList([Linear(4, 4), Linear(4, 4), Embedding(3, 4)])

    def forward(self, x):
        return self.stages(x)


def run_as_traced(gm, inputs, **kwargs):
    """A backend."""
    return gm


def test_blocks_that_repeat():
    """A container, or a layer that is alone of its kind, would be taken for a block."""
    model = Model(width=4, depth=2)
    assert find_blocks(model, True) == list(model.blocks)
    nested = Nested()
    assert find_blocks(nested, True) == [block for stage in nested.stages for block in stage]


def test_containers_are_no_blocks():
    """Lists of modules, which have no forward, would be compiled because they repeat."""
    model = Module()
    model.layers = ModuleList(ModuleList([Block(4), Linear(4, 4)]) for _ in range(2))
    with pytest.raises(ValueError, match="found no blocks that repeat"):
        find_blocks(model, True)
    model.groups = ModuleList(Sequential(Block(4), Block(4)) for _ in range(2))
    assert find_blocks(model, True) == [block for group in model.groups for block in group]


def test_each_block_once():
    """A block that is registered twice would be compiled twice."""
    model = Model(width=4, depth=3)
    model.alias = ModuleList(model.blocks)
    assert find_blocks(model, True) == list(model.blocks)


def jit(block):
    return torch.jit.script(Linear(4, 4))


def replaced(block):
    block.forward = len
    return block


def kept(block):
    return EagerBlock(4)


def without_forward(block):
    return ModuleDict({"block": block})


class CallsItself(Block):
    def __call__(self, x):
        return self.forward(x)


def calls_itself(block):
    return CallsItself(4)


class CallsTorchs(Block):
    def __call__(self, x):
        return super().__call__(x)


def wrapped(call, times):
    """A call of a module, wrapped as the offload of checkpointed inputs wraps it. One of its names has no value."""
    if not times:
        return call
    wraps = wrapped(call, times - 1)
    if times < 0:
        unset = None

    def outer(self, *args):
        return wraps(self, *args) if args else unset

    return outer


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("kind", [Block, CallsTorchs, CallsItself])
def test_a_call_that_is_wrapped(monkeypatch, kind, times):
    """An engine that compiles itself within the step of who wraps calls would make no graphs of blocks, or raise."""
    monkeypatch.setattr(kind, "__call__", wrapped(kind.__call__, times), raising=False)
    model = Lonely()
    model.layers[0] = kind(4)
    assert torch.equal(model.layers[0](torch.ones(2, 4)), model.layers[0].forward(torch.ones(2, 4)))
    if kind is CallsItself:
        with pytest.raises(ValueError, match="does not call nn.Module's"):
            find_blocks(model, [kind.__name__])
    else:
        assert find_blocks(model, [kind.__name__]) == [model.layers[0]]


class CallsOtherwise(Block):
    def _call_impl(self, x):
        return 2 * super()._call_impl(x)


def calls_otherwise(block):
    return CallsOtherwise(4)


@pytest.mark.follows("cannot compile {}; name other classes")
@vary(
    "change, why",
    [
        (jit, "it is a ScriptModule"),
        (replaced, "its forward was replaced on the instance"),
        (kept, "its forward is kept from the compiler"),
        (without_forward, "it has no forward"),
        (calls_itself, "its __call__ does not call nn.Module's"),
        (calls_otherwise, "it has a _call_impl of its own"),
    ],
    expects="why",
)
def test_blocks_that_cannot_be_compiled(change, why):
    """A module whose call does not lead to its forward would be compiled, and its compiled code never run."""
    model = Lonely()
    model.layers[0] = change(model.layers[0])
    name = type(model.layers[0]).__name__
    with pytest.raises(ValueError, match=f"cannot compile {name} by itself, because {why}; name other classes"):
        find_blocks(model, [name])
    # Not within that module.
    model.layers.append(Embedding(3, 4))
    assert find_blocks(model, ["Embedding"]) == [model.layers[2]]


def no_limit(model):
    return CompilationLimit(model, 8)


class WholeState(Block):
    """Does not leave the compiled call out of its state."""

    def __getstate__(self):
        return self.__dict__


@vary("kind", [Block, WholeState])
def test_pickled_and_copied(kind):
    """A copy or pickle of a compiled module would carry the compiled call, or the end of compiling leave a trace."""
    model, x = Model(width=4, depth=2), torch.tensor([[1, 2, 3]])
    model.blocks = ModuleList(kind(4) for _ in range(2))
    expected = model(x)
    blocks = find_blocks(model, True)
    undo = contextlib.ExitStack()
    compile_blocks(model, blocks, run_as_traced, {}, no_limit(model), undo)
    assert [module._compiled_call_impl is not None for module in (model, *blocks)] == [True] * 3
    assert find_blocks(model, True) == blocks
    # A pickle can be read without DeepSpeed.
    assert b"deepspeed" not in pickle.dumps(model)
    for duplicate in (copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert duplicate._compiled_call_impl is None
        assert torch.equal(duplicate(x), expected)
    # A shallow copy of such a state runs as the block itself: docs/reference/limits.md.
    shallow = [copy.copy(blocks[0])] if kind is Block else []
    for block in (*shallow, copy.deepcopy(blocks[0]), pickle.loads(pickle.dumps(blocks[0]))):
        assert block._compiled_call_impl is None
        assert vars(block).keys() - {"_compiled_call_impl"} == vars(Block(4)).keys()
    undo.close()
    assert vars(model).keys() == vars(Model()).keys() and vars(blocks[0]).keys() == vars(Block(4)).keys()
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_what_the_caller_compiled_since_stays():
    """The end of an engine would take away what the caller compiled in its lifetime."""
    model = Model(width=4, depth=2)
    undo = contextlib.ExitStack()
    compile_blocks(model, list(model.blocks), run_as_traced, {}, no_limit(model), undo)
    model.blocks[0].compile(backend="eager")
    since = model.blocks[0]._compiled_call_impl
    undo.close()
    assert model.blocks[0]._compiled_call_impl is since and model.blocks[1]._compiled_call_impl is None


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("compiled", [False, True])
def test_calls_are_taken_out_in_any_order(order, compiled):
    """An engine that ends before another of the same module would put back, or leave, the other's compiled call."""
    module = Block(4)
    if compiled:
        module.compile(backend="eager")
    before, calls = dict(vars(module)), [ModuleCall(module, module._call_impl, no_limit(module)) for _ in range(3)]
    for call in calls:
        call.put_in()
    there = list(calls)
    for index in order:
        calls[index].take_out()
        there.remove(calls[index])
        assert module._compiled_call_impl is (there[-1] if there else before.get("_compiled_call_impl"))
    assert vars(module) == before


def test_options_are_not_used_up():
    """torch.compile takes entries out of the options that it is given, so only the first class would have them."""
    seen, options = [], {"guard_filter_fn": lambda guards: seen.append(1) or [True] * len(guards)}
    nested = Nested()
    nested.layers = ModuleList([BreakingBlock(4), BreakingBlock(4)])
    blocks = find_blocks(nested, ["Block", "BreakingBlock"])
    undo = contextlib.ExitStack()
    compile_blocks(nested, blocks, run_as_traced, {"options": options}, no_limit(nested), undo)
    nested.stages(torch.ones(1, 4))
    once = len(seen)
    nested.layers[0](torch.ones(1, 4))
    assert 0 < once < len(seen) and list(options) == ["guard_filter_fn"]
    undo.close()


@pytest.mark.quick
def test_blocks_that_are_named():
    """Of several names only one would count, or modules of a named class that do not repeat be left out."""
    nested = Nested()
    assert find_blocks(nested, ["Block"]) == [block for stage in nested.stages for block in stage]
    assert find_blocks(nested, ["Linear", "Sequential"]) == [nested.stages, *nested.tail[:2]]


def test_a_class_that_is_misspelled():
    """The user would have to read the model's code for the names."""
    with pytest.raises(ValueError, match=r"names \['Blok'\], .*; the classes that repeat there are \['Block'\]$"):
        find_blocks(Model(), ["Blok"])


def chosen(module, wanted=None, **compile_kwargs):
    return choose_blocks(module, wanted, compile_kwargs)


@pytest.mark.options("compile.regional_compilation")
def test_blocks_that_are_chosen_by_default():
    """The embedding would count as a part around the blocks, and the model be compiled as a whole."""
    model = BlocksWithin()
    assert chosen(model) == (list(model.body.blocks), "")
    model.body.embedding = Embedding(10**5, 8)
    assert chosen(model) == (list(model.body.blocks), "")
    assert chosen(model, True) == (list(model.body.blocks), "")
    assert chosen(model, ["Body"]) == ([model.body], "")


def around_is_larger(model):
    model.body.side = Linear(100, 100)


def unlike(model):
    model.body.blocks[1] = Block(16)


def refuse_without_blocks(model):
    model.body.blocks = ModuleList([Block(8)])


def past_torch(model):
    model.body.blocks = ModuleList(CallsItself(8) for _ in range(3))


@vary(
    "change, why",
    [
        (around_is_larger, "blocks are the smaller part of ['Body']"),
        (unlike, "parameters of ['Block'] are not alike"),
        (refuse_without_blocks, "no blocks repeat in BlocksWithin"),
        (past_torch, "CallsItself by itself, because its __call__ does not call nn.Module's"),
    ],
    expects="why",
)
def test_what_is_compiled_as_a_whole_by_default(change, why):
    """Blocks would be compiled by themselves where most of the model, or of its graphs, would gain nothing."""
    model = BlocksWithin()
    change(model)
    blocks, reason = chosen(model)
    assert blocks == [] and why in reason


@pytest.mark.options("compile.regional_compilation")
@vary("model", [Model, BlocksWithin])
def test_blocks_that_were_compiled_by_themselves(model):
    """Blocks that the caller has compiled would not be found, or keep the caller's compiled call beside ours."""
    model = model()
    blocks = [block for block in model.modules() if isinstance(block, Block)]
    for block in blocks:
        block.compile()
    # Whoever compiled all of them has asked for blocks, also where the model's own forward calls them.
    assert chosen(model) == (blocks, "")
    take_over_compiled(model.modules())
    assert [block._compiled_call_impl for block in blocks] == [None] * len(blocks)


@pytest.mark.follows("lines with regional_compilation make blocks")
def test_more_that_is_compiled_as_a_whole():
    """``fullgraph`` or ``regional_compilation: false`` would not keep a model in one graph."""
    assert chosen(Model()) == ([], "Model calls its blocks itself, so all around them would run uncompiled")
    assert chosen(BlocksWithin(), fullgraph=True) == ([], "compile_kwargs['fullgraph'] asks for one graph")

    # Where another option works on blocks, they become graphs in any model that has some, unless this one says no.
    model = Model()
    assert choose_blocks(model, None, {}, needed=True) == (list(model.blocks), "")
    assert chosen(model, True) == (list(model.blocks), "")
    assert choose_blocks(model, None, {"fullgraph": True}, needed=True)[0] == []
    assert chosen(BlocksWithin(), False) == ([], "compile.regional_compilation is false")


def requested(compile_kwargs, **options):
    engine = types.SimpleNamespace(module=BlocksWithin())
    engine._config = types.SimpleNamespace(compile_config=CompileConfig(deepcompile=True, **options))
    return Request(engine, "eager", compile_kwargs)


@pytest.mark.quick
def test_options_for_blocks_with_fullgraph():
    """The refusal would advise to name blocks, which ``fullgraph`` contradicts in turn."""
    (said,) = Blocks.refusals(requested({"fullgraph": True}, overlap_param_gather=True))
    assert said == (
        "compile.overlap_param_gather works on blocks, and the model is compiled as a whole, because "
        "compile_kwargs['fullgraph'] asks for one graph; leave one of them out"
    )
    # As is advised.
    assert not [*Blocks.refusals(requested({}, overlap_param_gather=True))]
    assert not [*Blocks.refusals(requested({"fullgraph": True}))]


@pytest.mark.quick
def test_blocks_are_chosen_once():
    """A part would check, or wait for, other blocks than those that are compiled."""
    request = requested({})
    engine = request.engine
    blocks, _ = chosen_blocks(request)
    engine.module.body.blocks = ModuleList([Block(8)])
    assert blocks and chosen_blocks(request)[0] is blocks and not chosen_blocks(Request(engine, "eager", {}))[0]


@pytest.mark.follows("destroy that engine, or set compile.regional_compilation to false for that engine")
def test_blocks_of_another_engine():
    """A second engine would compile blocks whose compiled call reduces the first engine's gradients."""
    model = BlocksWithin()
    blocks, _ = chosen(model)
    undo = contextlib.ExitStack()
    compile_blocks(model, blocks, run_as_traced, {}, no_limit(model), undo)
    with pytest.raises(ValueError, match="Body is compiled by another engine, which trains other parameters"):
        refuse_blocks_of_others(model)
    # What blocks there are does not depend on it.
    assert chosen(model) == (blocks, "")
    undo.close()
    refuse_blocks_of_others(model)

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Regional compilation: one graph for every layer of a kind, and the same gradients."""

import copy
import itertools
import pickle

import pytest
import torch
from torch.nn import Embedding, Linear, Module, ModuleDict, ModuleList, Sequential

from support import regions
from support.ids import vary
from support.models import WITH_BLOCKS, Block, BlocksWithin, BreakingBlock, EagerBlock, Model
from support.training import Case, check_trained, train_beside_plain_loop

REGIONAL = {"compile": {"regional_compilation": True}}


def check(results):
    for result in check_trained(results):
        # Autograd's way gives the same numbers.
        assert result.counters["from_graphs"] > 0


# With graphs as they are traced, test_parameter_gather.py has the same table.
@vary(
    "stage, accumulation, model",
    [(*varied, model) for model, varied in zip(WITH_BLOCKS, itertools.cycle([(1, 3), (2, 1)]))],
)
def test_trains_as_a_plain_loop(ranks, stage, accumulation, model):
    case = Case(model=model, stage=stage, accumulation=accumulation, backend="inductor", config=REGIONAL)
    check(ranks(2).run(train_beside_plain_loop, case))


@vary(
    "varied",
    [
        {"skip_on_odd_steps": True, "steps": 5, "accumulation": 2},
        {"vary_length": True, "steps": 6},
        {"evaluate_between": True},
        {"bucket": 1},
        {"bucket": 10**6},
        {"bucket": 10**6, "skip_on_odd_steps": True, "steps": 5},
        {"bucket": 10**6, "vary_length": True, "steps": 6},
    ],
)
@vary("stage", [1, 2])
def test_variations(ranks, stage, varied):
    check(ranks(2).run(train_beside_plain_loop, Case(stage=stage, config=REGIONAL, **varied)))


def test_one_graph_serves_all_layers(ranks):
    case = Case(config=REGIONAL, bucket=10**6)
    for graphs, counters, sent, error in ranks(2).run(regions.graphs_and_buckets, case):
        assert error < 1e-5
        # Six parameters of each block; embedding and head stay with the forward that calls the blocks, uncompiled.
        assert graphs == [6]
        assert (counters["from_graphs"], counters["from_autograd"]) == (18, 2)
        # No layer's graph flushes what others could fill.
        assert sent == [1, 1, 1, 1]


def test_gradients_of_uncompiled_code_are_not_copied(ranks):
    # With a bucket of one element, none is packed with others.
    case = Case(config=REGIONAL, bucket=1, backend="inductor")
    for counters, error in ranks(2).run(regions.train_what_is_partly_uncompiled, case):
        # Embedding, norm and scale are used between the blocks. The embedding's gradient would take 768 bytes.
        assert counters["from_autograd"] == 4 and counters["peak_bucket"] < 768
        assert error < 1e-5


def test_a_hook_keeps_its_gradient(ranks):
    # With a bucket of one element, none is copied into a bucket with others.
    case = Case(config=REGIONAL, bucket=1)
    for of_hook, error in ranks(2).run(regions.hook_that_keeps_its_gradient, case):
        assert of_hook < 1e-5 and error < 1e-5


@vary("hooked", [False, True])
@vary("model, aligned", [("OneGraph", True), ("OddSizes", False)], expects="aligned")
def test_parameters_at_any_address(ranks, model, aligned, hooked):
    """Layers of odd sizes lie at odd addresses, and one graph serves them all."""
    case = Case(model=model, config=REGIONAL, backend="inductor")
    for addresses, told in ranks(2).run(regions.alignment_told_to_inductor, case, hooked):
        assert (len(addresses) == 1) == aligned, "the model does not show what it should"
        if aligned:
            assert told == {"forward": 0, "backward": 0}
        else:
            # The forward takes the norm's two and two of each Linear; the backward needs fewer.
            assert told["forward"] == 6 and told["backward"] > 0


def test_blocks_within_the_model_are_regions_by_default(ranks):
    for graphs, counters, _, error in ranks(2).run(regions.graphs_and_buckets, Case(model="BlocksWithin")):
        # All blocks' graph, and that of the head and the loss, around the uncompiled body.
        assert graphs == [6, 1]
        assert (counters["from_graphs"], counters["from_autograd"]) == (19, 1)
        assert error < 1e-5


def test_without_regions_one_graph_has_all(ranks):
    for graphs, _, sent, _ in ranks(2).run(regions.graphs_and_buckets, Case(bucket=10**6)):
        assert graphs == [20] and sent == [1, 1, 1, 1]


def test_ranks_agree_after_a_backward_that_raised(ranks):
    case = Case(config=REGIONAL, bucket=10**6)
    for raised, error in ranks(2).run(regions.raising_at_different_layers, case, timeout=120):
        assert raised
        assert error < 1e-5


def test_a_hook_on_one_layer(ranks):
    for hooked, counters, error in ranks(2).run(regions.hook_on_second_layer, Case(config=REGIONAL)):
        assert hooked == 2
        # That parameter of all three blocks, embedding and head.
        assert counters["from_autograd"] == 5
        assert error < 1e-5


def test_layers_that_differ_are_compiled_each(ranks):
    # 36 graphs of 12 layers, where torch would stop at 8.
    assert max(ranks(2).run(regions.layers_that_differ, 8)) < 1e-5


def test_layers_that_are_too_different(ranks):
    # Of 36 graphs 24 may be made: then all go on uncompiled.
    assert max(ranks(2).run(regions.layers_that_differ, 2)) < 1e-5
    for message in ranks(2).run(regions.layers_that_differ, 2, fails=True):
        assert "compiled one frame more than 24 times" in message
        assert "raise torch._dynamo.config.recompile_limit before engine.compile()" in message
    # Layers that are alike need one compilation.
    assert max(ranks(2).run(regions.layers_that_differ, 1, alike=True)) < 1e-5


def test_compilations_before_a_reset_do_not_count(ranks):
    assert max(ranks(2).run(regions.resets, Case(config=REGIONAL))) < 1e-5


def test_destroy_and_copies(ranks):
    for before, during, copied, after, error in ranks(2).run(regions.classes, Case(config=REGIONAL)):
        assert before == during == after, "the classes have other names"
        assert copied < 1e-5
        assert error < 1e-5


@vary("checkpoint", [False, True])
def test_attention_stays_on_its_causal_path(ranks, checkpoint):
    pytest.importorskip("transformers", reason="the model is one of transformers': requirements/demo.txt")
    for layers, masks, error in ranks(2).run(regions.attention_of_qwen3, checkpoint):
        # One graph, traced once, in which attention is told "causal" rather than given a mask. Checkpointing is around
        # it, not in it, where it would be a graph within the graph.
        assert (layers, masks) == (3, ["None"])
        assert error < 1e-5


# Finding blocks -------------------------------------------------------------------------------------------------


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


@pytest.fixture(scope="module")
def find_blocks():
    from deepspeed.compile.zero12.graph.choose_blocks import find_blocks

    return find_blocks


def test_blocks_that_repeat(find_blocks):
    model = Model(width=4, depth=2)
    assert find_blocks(model, True) == list(model.blocks)
    # No containers and no lone layers.
    nested = Nested()
    assert find_blocks(nested, True) == [block for stage in nested.stages for block in stage]


def test_containers_are_no_blocks(find_blocks):
    model = Module()
    model.layers = ModuleList(ModuleList([Block(4), Linear(4, 4)]) for _ in range(2))
    with pytest.raises(ValueError, match="found no blocks that repeat"):
        find_blocks(model, True)
    model.groups = ModuleList(Sequential(Block(4), Block(4)) for _ in range(2))
    assert find_blocks(model, True) == [block for group in model.groups for block in group]


def test_each_block_once(find_blocks):
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


class Final(Block):
    @classmethod
    def __init_subclass__(cls):
        raise TypeError("this one is final")


def final(block):
    return Final(4)


@vary(
    "change, why",
    [
        (jit, "it is a ScriptModule"),
        (replaced, "its forward was replaced on the instance"),
        (kept, "its forward is kept from the compiler"),
        (without_forward, "it has no forward"),
        (final, r"its class cannot be subclassed \(this one is final\)"),
    ],
    expects="why",
)
def test_blocks_that_cannot_be_compiled(find_blocks, change, why):
    model = Lonely()
    model.layers[0] = change(model.layers[0])
    name = type(model.layers[0]).__name__
    with pytest.raises(ValueError, match=f"cannot compile {name} by itself, because {why}; name other classes"):
        find_blocks(model, [name])


def no_limit():
    from deepspeed.compile.zero12.graph.compilation_limit import CompilationLimit
    from deepspeed.compile.zero12.native import reducer_module

    no_engine = {"overlap": True, "synchronize_before": False, "synchronize_after": False}
    return CompilationLimit(8, reducer_module().Reducer(identity=0, bucket_numel=1, **no_engine))


def test_pickled_and_copied():
    from deepspeed.compile.zero12.graph.choose_blocks import find_blocks
    from deepspeed.compile.zero12.graph.compile_blocks import compile_blocks, restore

    model, x = Model(width=4, depth=2), torch.tensor([[1, 2, 3]])
    expected = model(x)
    blocks = find_blocks(model, True)
    changed = compile_blocks(model, blocks, "eager", {}, no_limit())
    assert type(blocks[0]) is type(blocks[1]) is not Block
    assert find_blocks(model, True) == blocks
    for duplicate in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(duplicate) is Model and type(duplicate.blocks[0]) is Block
        assert torch.equal(duplicate(x), expected)
    restore(changed)
    assert type(model) is Model and type(model.blocks[1]) is Block


def test_options_are_not_used_up():
    from deepspeed.compile.zero12.graph.choose_blocks import find_blocks
    from deepspeed.compile.zero12.graph.compile_blocks import compile_blocks, restore

    seen, options = [], {"guard_filter_fn": lambda guards: seen.append(1) or [True] * len(guards)}
    nested = Nested()
    nested.layers = ModuleList([BreakingBlock(4), BreakingBlock(4)])
    blocks = find_blocks(nested, ["Block", "BreakingBlock"])
    changed = compile_blocks(nested, blocks, "eager", {"options": options}, no_limit())
    nested.stages(torch.ones(1, 4))
    once = len(seen)
    nested.layers[0](torch.ones(1, 4))
    assert 0 < once < len(seen) and list(options) == ["guard_filter_fn"]
    restore(changed)


def test_blocks_that_are_named(find_blocks):
    nested = Nested()
    assert find_blocks(nested, ["Block"]) == [block for stage in nested.stages for block in stage]
    assert find_blocks(nested, ["Linear", "Sequential"]) == [nested.stages, *nested.tail[:2]]


@vary(
    "wanted, sentence",
    [
        (True, "compile.regional_compilation=true found no blocks that repeat in Lonely"),
        (["Block", "Layer"], r"compile.regional_compilation names \['Layer'\], but Lonely has no such module"),
    ],
    expects="sentence",
)
def test_no_blocks(find_blocks, wanted, sentence):
    with pytest.raises(ValueError, match=sentence):
        find_blocks(Lonely(), wanted)


def chosen(module, wanted=None, **compile_kwargs):
    from deepspeed.compile.zero12.graph.choose_blocks import choose_blocks

    return choose_blocks(module, wanted, compile_kwargs)


def test_blocks_that_are_chosen_by_default():
    model = BlocksWithin()
    assert chosen(model) == (list(model.body.blocks), "")
    # An embedding is no reason against.
    model.body.embedding = Embedding(10**5, 8)
    assert chosen(model) == (list(model.body.blocks), "")
    assert chosen(model, True) == (list(model.body.blocks), "")
    assert chosen(model, ["Body"]) == ([model.body], "")


def around_is_larger(model):
    model.body.side = Linear(100, 100)


def unlike(model):
    model.body.blocks[1] = Block(16)


def no_blocks(model):
    model.body.blocks = ModuleList([Block(8)])


@vary(
    "change, why",
    [
        (around_is_larger, "blocks are the smaller part of ['Body']"),
        (unlike, "parameters of ['Block'] are not alike"),
        (no_blocks, "no blocks repeat in BlocksWithin"),
    ],
    expects="why",
)
def test_what_is_compiled_as_a_whole_by_default(change, why):
    model = BlocksWithin()
    change(model)
    blocks, reason = chosen(model)
    assert blocks == [] and why in reason


@vary("model", [Model, BlocksWithin])
def test_blocks_that_were_compiled_by_themselves(model):
    from deepspeed.compile.zero12.graph.compile_blocks import take_over_compiled

    model = model()
    blocks = [block for block in model.modules() if isinstance(block, Block)]
    for block in blocks:
        block.compile()
    # Whoever compiled all of them has asked for regions, also where the model's own forward calls them.
    assert chosen(model) == (blocks, "")
    take_over_compiled(model.modules())
    assert [block._compiled_call_impl for block in blocks] == [None] * len(blocks)


def test_more_that_is_compiled_as_a_whole():
    assert chosen(Model()) == ([], "Model calls its blocks itself, so all around them would run uncompiled")
    assert chosen(BlocksWithin(), fullgraph=True) == ([], "compile_kwargs['fullgraph'] asks for one graph")
    assert chosen(BlocksWithin(), False) == ([], "compile.regional_compilation is false")


def test_blocks_of_another_engine():
    from deepspeed.compile.zero12.graph.compile_blocks import compile_blocks, refuse_blocks_of_others, restore

    model = BlocksWithin()
    blocks, _ = chosen(model)
    changed = compile_blocks(model, blocks, "eager", {}, no_limit())
    with pytest.raises(ValueError, match="Body is compiled for an engine that trains other parameters"):
        refuse_blocks_of_others(model)
    # What blocks there are does not depend on it.
    assert chosen(model) == (blocks, "")
    restore(changed)
    refuse_blocks_of_others(model)


def test_belongs_to_zero_1_and_2():
    from deepspeed.compile.config import CompileConfig
    from deepspeed.ops.op_builder.dc import DeepCompileHandle

    for option, value in (("regional_compilation", True), ("overlap_param_gather", True)):
        for others, sentence in (
            ({}, f"compile.{option} belongs to DeepCompile; set compile.deepcompile to true"),
            ({"deepcompile": True, "passes": ["autosp"]}, f"compile.{option} goes with ZeRO-1 and ZeRO-2 only"),
        ):
            with pytest.raises(ValueError, match=sentence):
                CompileConfig(**{option: value, **others})
        # What the engine calls for ZeRO-3.
        with pytest.raises(ValueError, match=f"compile.{option} goes with ZeRO-1 and ZeRO-2 only"):
            DeepCompileHandle().init(None, CompileConfig(deepcompile=True, **{option: value}), 10)
    with pytest.raises(ValueError, match="names no classes"):
        CompileConfig(deepcompile=True, regional_compilation=[])

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Regional compilation: one graph for every layer of a kind, and the same gradients."""

import pytest
from torch.nn import Embedding, Linear, Module, ModuleList, Sequential

from support import regions
from support.models import CASES, Block, Model
from support.training import Case, train_beside_plain_loop

REGIONAL = {"compile": {"regional_compilation": True}}
NOTHING = {"bound": 0, "pending": 0, "bucket": 0, "unreduced": 0}
WITH_BLOCKS = [name for name, model in CASES.items() if issubclass(model, Model)]


def check(results):
    for result in results:
        assert result["error"] < 1e-5
        assert result["moved"] > 1e-3
        assert all(after == NOTHING for after in result["held"]), result["held"]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("stage, accumulation", [(1, 3), (2, 1)])
@pytest.mark.parametrize("model", WITH_BLOCKS)
def test_trains_as_a_plain_loop(ranks, model, stage, accumulation, backend):
    case = Case(model=model, stage=stage, accumulation=accumulation, backend=backend, config=REGIONAL)
    check(ranks(2).run(train_beside_plain_loop, case))


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    "varied",
    [
        {"skip_on_odd_steps": True, "steps": 5, "accumulation": 2},
        {"vary_length": True, "steps": 6},
        {"evaluate_between": True},
        {"bucket": 1},
        {"bucket": 10**6},
    ],
    ids=lambda varied: "-".join(varied),
)
def test_variations(ranks, stage, varied):
    check(ranks(2).run(train_beside_plain_loop, Case(stage=stage, config=REGIONAL, **varied)))


def test_one_graph_serves_all_layers(ranks):
    case = Case(config=REGIONAL, bucket=10**6)
    for graphs, counters, sent, error in ranks(2).run(regions.graphs_and_buckets, case):
        assert error < 1e-5
        # Six parameters of each block; embedding and head stay with the forward that calls the blocks, uncompiled.
        assert graphs == [6]
        assert (counters["from_graphs"], counters["from_autograd"]) == (18, 2)
        # The first backward cannot know that its graph will run again, and sends a bucket a layer. Later ones send all
        # layers together. The embedding's gradient comes behind the last graph.
        assert sent == [4, 2, 2, 2]


def test_without_regions_one_graph_has_all(ranks):
    for graphs, _, sent, _ in ranks(2).run(regions.graphs_and_buckets, Case(bucket=10**6)):
        assert graphs == [20] and sent == [1, 1, 1, 1]


def test_ranks_agree_on_buckets_after_a_backward_that_raised(ranks):
    case = Case(config=REGIONAL, bucket=10**6)
    for raised, error in ranks(2).run(regions.raising_at_different_layers, case, timeout=120):
        assert raised
        assert error < 1e-5


def test_destroy_and_copies(ranks):
    for before, during, copied, after, error in ranks(2).run(regions.classes, Case(config=REGIONAL)):
        assert before == during == after, "the classes have other names"
        assert copied < 1e-5
        assert error < 1e-5


@pytest.mark.parametrize("checkpoint", [False, True])
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


class Nested(Module):
    def __init__(self):
        super().__init__()
        self.stages = Sequential(Sequential(Block(4), Block(4)), Sequential(Block(4), Block(4)))
        self.tail = ModuleList([Linear(4, 4), Linear(4, 4), Embedding(3, 4)])


@pytest.fixture(scope="module")
def find_blocks():
    from deepspeed.compile.regions import find_blocks

    return find_blocks


def test_blocks_that_repeat(find_blocks):
    model = Model(width=4, depth=2)
    assert find_blocks(model, True) == list(model.blocks)
    # The outermost that repeat, and no lone layers.
    nested = Nested()
    assert find_blocks(nested, True) == list(nested.stages)


def test_blocks_that_are_named(find_blocks):
    nested = Nested()
    assert find_blocks(nested, ["Block"]) == [block for stage in nested.stages for block in stage]
    assert find_blocks(nested, ["Linear", "Sequential"]) == [nested.stages, *nested.tail[:2]]


@pytest.mark.parametrize(
    "wanted, sentence",
    [
        (True, "compile.regional_compilation=true found no blocks that repeat in Lonely"),
        (["Block", "Layer"], r"compile.regional_compilation names \['Layer'\], but Lonely has no such module"),
    ],
)
def test_no_blocks(find_blocks, wanted, sentence):
    with pytest.raises(ValueError, match=sentence):
        find_blocks(Lonely(), wanted)


def test_belongs_to_zero_1_and_2():
    from deepspeed.compile.config import CompileConfig
    from deepspeed.compile.native import DeepCompileHandle

    for options, sentence in (
        ({}, "belongs to DeepCompile; set compile.deepcompile to true"),
        ({"deepcompile": True, "passes": ["autosp"]}, "not with compile.passes="),
    ):
        with pytest.raises(ValueError, match=sentence):
            CompileConfig(regional_compilation=True, **options)
    config = CompileConfig(deepcompile=True, regional_compilation=["Block"])
    # What the engine calls for ZeRO-3.
    with pytest.raises(ValueError, match="goes with ZeRO-1 and ZeRO-2 only"):
        DeepCompileHandle().init(None, config, 10)

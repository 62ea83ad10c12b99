# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Regional compilation: one graph for every layer of a kind, and the same gradients."""

import copy
import functools
import itertools
from typing import Any, Dict, List, NamedTuple, Set, Tuple

import pytest
import torch
import torch.distributed as dist
from torch._inductor import compile_fx, config

from deepspeed.compile.fx import reduce_nodes
from deepspeed.compile.zero12.graph import backend as reduce_backend

from support.beside import Beside
from support.beside import check as check_beside
from support.blocks import REGIONAL, train_and_destroy, train_beside
from support.ids import vary
from support.lifetime import Raises
from support.models import VOCABULARY, WITH_BLOCKS, Block, BlocksWithin, Model
from support.parameter_gather import Around
from support.training import (
    BOUND,
    OVERLAPPED,
    Case,
    average_gradients,
    batch,
    build,
    check_trained,
    device,
    make_engine,
    make_optimizer,
    relative_error,
    train_beside_plain_loop,
)


def check(results):
    for result in check_trained(results):
        # Autograd's way gives the same numbers.
        assert result.counters["from_graphs"] > 0


# With graphs as they are traced, test_parameter_gather.py has the same table.
@pytest.mark.quick
@vary(
    "stage, accumulation, model",
    [(*varied, model) for model, varied in zip(WITH_BLOCKS, itertools.cycle([(1, 3), (2, 1)]))],
)
def test_blocks_train_as_a_plain_loop(ranks, stage, accumulation, model):
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
def test_variations_with_blocks(ranks, stage, varied):
    check(ranks(2).run(train_beside_plain_loop, Case(stage=stage, config=REGIONAL, **varied)))


class GraphsAndBuckets(NamedTuple):
    graphs: List[int]  # the reductions of each backward graph
    counters: Dict[str, Any]  # of the last backward
    sent: List[int]  # the buckets that each backward sent
    error: float  # of the parameters


def graphs_and_buckets(case):
    """Trains beside a plain loop and records the backward graphs."""
    torch._dynamo.reset()
    graphs, finish = [], reduce_backend.finish_backward_graph

    def recording(backward, *args):
        graphs.append(len(reduce_nodes(backward.graph)))
        finish(backward, *args)

    module = build(case)
    plain = copy.deepcopy(module)
    reduce_backend.finish_backward_graph = recording
    try:
        counters, error = train_and_destroy(module, plain, case, 4)
    finally:
        reduce_backend.finish_backward_graph = finish
    return GraphsAndBuckets(graphs, counters[-1], [each["buckets_sent"] for each in counters], error)


def test_one_graph_serves_all_layers(ranks):
    case = Case(config=REGIONAL, bucket=10**6)
    for seen in ranks(2).run(graphs_and_buckets, case):
        assert seen.error < BOUND
        # Six parameters of each block; embedding and head stay with the forward that calls the blocks, uncompiled.
        assert seen.graphs == [6]
        assert (seen.counters["from_graphs"], seen.counters["from_autograd"]) == (18, 2)
        # No layer's graph flushes what others could fill.
        assert seen.sent == [1, 1, 1, 1]


def test_blocks_within_the_model_by_default(ranks):
    for seen in ranks(2).run(graphs_and_buckets, Case(model="BlocksWithin")):
        # All blocks' graph, and that of the head and the loss, around the uncompiled body.
        assert seen.graphs == [6, 1]
        assert (seen.counters["from_graphs"], seen.counters["from_autograd"]) == (19, 1)
        assert seen.error < BOUND


def test_without_blocks_one_graph_has_all(ranks):
    for seen in ranks(2).run(graphs_and_buckets, Case(bucket=10**6)):
        assert seen.graphs == [20] and seen.sent == [1, 1, 1, 1]


class PartlyUncompiled(NamedTuple):
    counters: Dict[str, Any]  # of the last backward
    error: float  # of the parameters


def train_what_is_partly_uncompiled(case):
    """Trains a model of which the blocks are compiled and what is around them is not."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Around().to(device())
    counters, error = train_and_destroy(module, copy.deepcopy(module), case, 3)
    return PartlyUncompiled(counters[-1], error)


def test_gradients_of_uncompiled_code_are_not_copied(ranks):
    # With a bucket of one element, none is packed with others.
    case = Case(config=REGIONAL, bucket=1, backend="inductor")
    for result in ranks(2).run(train_what_is_partly_uncompiled, case):
        # Embedding, norm and scale are used between the blocks. The embedding's gradient would take 768 bytes.
        assert result.counters["from_autograd"] == 4 and result.counters["peak_bucket"] < 768
        assert result.error < BOUND


class KeptByAHook(NamedTuple):
    error_of_gradient: float  # of the embedding's gradient, which the hook keeps
    error: float  # of the parameters


def hook_that_keeps_its_gradient(case):
    """Takes a step in which a hook keeps the gradient of the embedding."""
    torch._dynamo.reset()
    module = build(case)
    plain = copy.deepcopy(module)
    kept = []
    module.embedding.weight.register_post_accumulate_grad_hook(lambda parameter: kept.append(parameter.grad))
    engine = make_engine(module, case)
    ids = batch(0, 0, dist.get_rank(), 4)
    engine.backward(engine(ids))
    plain(ids).backward()
    of_hook = relative_error(kept, [plain.embedding.weight.grad])
    engine.step()
    optimizer = make_optimizer(plain, case)
    average_gradients(plain)
    optimizer.step()
    error = relative_error(module.parameters(), plain.parameters())
    engine.destroy()
    return KeptByAHook(of_hook, error)


def test_a_hook_keeps_its_gradient(ranks):
    # With a bucket of one element, none is copied into a bucket with others.
    case = Case(config=REGIONAL, bucket=1)
    for result in ranks(2).run(hook_that_keeps_its_gradient, case):
        assert result.error_of_gradient < BOUND and result.error < BOUND


class Alignment(NamedTuple):
    offsets: Set[int]  # of the parameters' addresses behind a multiple of 16
    # The shapes of what a block's forward and backward are told to assume nothing of.
    unaligned_in_forward: List[Tuple[int, ...]]
    unaligned_in_backward: List[Tuple[int, ...]]
    trained: List[Tuple[int, ...]]  # the shapes of a block's trained parameters


def alignment_told_to_inductor(case, hooked=False):
    """Takes a step and records what Inductor is told about the addresses of parameters."""
    torch._dynamo.reset()
    told, compile_inner = {"forward": [], "backward": []}, compile_fx.compile_fx_inner

    def recording(gm, example_inputs, **kwargs):
        tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
        shapes = told["backward" if kwargs.get("is_backward") else "forward"]
        shapes.extend(tuple(value.shape) for value in tensors if value.storage_offset() == 1)
        return compile_inner(gm, example_inputs, **kwargs)

    compile_fx.compile_fx_inner = recording
    try:
        module = build(case)
        if hooked:
            # In no block can a graph reduce it then, but it lies where it lay.
            module.blocks[1].down.weight.register_hook(lambda gradient: None)
        engine = make_engine(module, case)
        # What comes from a cache is not compiled.
        with config.patch(force_disable_caches=True):
            engine.backward(engine(batch(0, 0, dist.get_rank(), 4)))
            engine.step()
        of_addresses = {parameter.data_ptr() % 16 for parameter in module.parameters() if parameter.requires_grad}
        trained = [tuple(each.shape) for each in module.blocks[0].parameters() if each.requires_grad]
        engine.destroy()
    finally:
        compile_fx.compile_fx_inner = compile_inner
    return Alignment(of_addresses, told["forward"], told["backward"], trained)


@vary("hooked", [False, True])
@vary("model, aligned", [("OneGraph", True), ("OddSizes", False), ("FrozenSubclass", False)], expects="aligned")
def test_parameters_at_any_address(ranks, model, aligned, hooked):
    """Layers of odd sizes lie at odd addresses, and one graph serves them all."""
    case = Case(model=model, config=REGIONAL, backend="inductor")
    for seen in ranks(2).run(alignment_told_to_inductor, case, hooked):
        assert (len(seen.offsets) == 1) == aligned, "the model does not show what it should"
        if aligned:
            assert seen.unaligned_in_forward == seen.unaligned_in_backward == []
        else:
            # The backward needs fewer.
            assert seen.unaligned_in_forward == seen.trained
            assert seen.unaligned_in_backward and {*seen.unaligned_in_backward} <= {*seen.trained}


class RaisesOutside(Model):
    """Raises in the backward behind its first block on one rank and behind its second on the other."""

    def run_block(self, block, x):
        raises_here = block is self.blocks[dist.get_rank() % 2]
        x = block(x)
        return Raises.apply(x) if raises_here else x


class Raised(NamedTuple):
    raised: bool  # whether a backward did
    error: float  # of the parameters after steps behind it


def raising_at_different_layers(case):
    """Trains on where one backward raises, behind another block on each rank."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = RaisesOutside().to(device())
    plain = copy.deepcopy(module)
    engine = make_engine(module, case)
    optimizer = make_optimizer(plain, case)
    Raises.armed = False
    train_beside(engine, plain, optimizer, range(2))
    Raises.armed, raised = True, False
    try:
        engine.backward(engine(batch(9, 0, dist.get_rank(), 4)))
    except ArithmeticError:
        raised = True
    Raises.armed = False
    engine.micro_steps += 1  # the user gives this step up
    train_beside(engine, plain, optimizer, range(2, 5))
    error = relative_error(module.parameters(), plain.parameters())
    engine.destroy()
    return Raised(raised, error)


def test_ranks_agree_after_a_backward_that_raised(ranks):
    case = Case(config=REGIONAL, bucket=10**6)
    for result in ranks(2).run(raising_at_different_layers, case):
        assert result.raised
        assert result.error < BOUND


class HookOnOneLayer(NamedTuple):
    calls: int  # of the hook
    counters: Dict[str, Any]  # of the last backward
    error: float  # of the parameters


def hook_on_second_layer(case):
    """Trains with a hook on a parameter of the second block."""
    torch._dynamo.reset()
    module = build(case)
    plain = copy.deepcopy(module)
    calls = []
    module.blocks[1].up.weight.register_hook(lambda gradient: calls.append(gradient.shape))
    counters, error = train_and_destroy(module, plain, case, 2)
    return HookOnOneLayer(len(calls), counters[-1], error)


def test_a_hook_on_one_layer(ranks):
    for result in ranks(2).run(hook_on_second_layer, Case(config=REGIONAL)):
        assert result.calls == 2
        # That parameter of all three blocks, embedding and head.
        assert result.counters["from_autograd"] == 5
        assert result.error < BOUND


class CannotBeAsked(torch.nn.Module):
    """Raises where it is asked for its length, its truth or its equality."""

    def _refuse(self, *_):
        raise TypeError("do not ask a module for this")

    __len__ = __bool__ = __eq__ = __ne__ = _refuse
    __hash__ = torch.nn.Module.__hash__


class BlockNotAsked(CannotBeAsked, Block):
    pass


class BlocksWithinNotAsked(CannotBeAsked, BlocksWithin):
    pass


def not_asked():
    return BlocksWithinNotAsked(), [BlockNotAsked(8) for _ in range(3)]


def compiled_before():
    return BlocksWithin(), [torch.compile(Block(8), backend="eager") for _ in range(3)]


def train_other_blocks(make, case):
    """Trains a model with other blocks beside a plain loop; returns the outcome."""
    torch.manual_seed(0)
    module, blocks = make()
    module.body.blocks = torch.nn.ModuleList(blocks)
    begun = Beside(module, case)
    for step in range(3):
        begun.step(batch(step, 0, dist.get_rank(), 4))
    return begun.end()


@vary("make", [not_asked, compiled_before])
@vary("config", [None, OVERLAPPED])
def test_blocks_that_cannot_be_asked(ranks, config, make):
    # The option needs blocks, so no model with it is compiled as a whole.
    for outcome in check_beside(ranks(2).run(train_other_blocks, make, Case(config=config))):
        assert min(outcome.from_graphs) >= 3 * len(list(Block(8).parameters()))


class LlamaLoss(torch.nn.Module):
    """A small Llama that maps ids to the loss."""

    def __init__(self):
        super().__init__()
        import transformers

        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCABULARY, **sizes))

    def forward(self, ids):
        return self.model(input_ids=ids, labels=ids).loss


def switch_checkpointing():
    """Layers checkpoint only in the second step, by a function that looks at what it is given."""
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    pair = Beside(LlamaLoss(), Case(config={"compile": {"regional_compilation": True}}))
    seen = {pair.module.model: set(), pair.plain.model: set()}

    def look(model, function, *args):
        # The forward and the layer, or with transformers 5.17 the layer's bound call.
        layer = getattr(function.func, "__self__", None) or function.args[0]
        seen[model].add((function.func.__name__, type(layer).__name__))
        return checkpoint(function, *args, use_reentrant=False)

    for step in range(3):
        for model in seen:
            if step == 1:
                model.gradient_checkpointing_enable()
                for layer in model.model.layers:
                    layer._gradient_checkpointing_func = functools.partial(look, model)
            elif step == 2:
                model.gradient_checkpointing_disable()
        pair.step(batch(step, 0, dist.get_rank(), 4))
    return pair.end(), *seen.values()


def test_checkpointing_comes_and_goes(ranks):
    pytest.importorskip("transformers")
    results = ranks(2).run(switch_checkpointing)
    for outcome in check_beside([outcome for outcome, *_ in results]):
        assert outcome.from_graphs[0] == outcome.from_graphs[1] == outcome.from_graphs[2] > 0
    for _, seen, expected in results:
        assert seen == expected and [layer for _, layer in seen] == ["LlamaDecoderLayer"]

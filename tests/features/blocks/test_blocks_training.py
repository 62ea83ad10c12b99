# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Regional compilation: one graph for every layer of a kind, and the same gradients."""

import functools
import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from deepspeed.compile.zero_1_and_2 import gradient_counters
from deepspeed.compile.zero_1_and_2.graph import partitioner
from deepspeed.compile.zero_1_and_2.graph.reductions import reduce_nodes

from support.beside import Beside, check, warnings_logged
from support.ids import vary
from support.lifetime import Raises
from support.models import VOCABULARY, WITH_BLOCKS, Block, BlocksWithin, LossOfIds, Model
from support.on_ranks import on_ranks
from support.parameter_gather import Around
from support.training import (
    BOUND,
    OVERLAPPED,
    REGIONAL,
    Case,
    batch,
    build,
    check_trained,
    make_engine,
    relative_error,
    train_beside_plain_loop,
)


def check_by_graphs(results):
    for result in check_trained(results):
        # Autograd's way gives the same numbers.
        assert result.counters["from_graphs"] > 0


# With graphs as they are traced, test_parameter_gather.py has the same table.
@pytest.mark.options("compile.regional_compilation")
@pytest.mark.slow
@vary(
    "stage, accumulation, model",
    [(*varied, model) for model, varied in zip(WITH_BLOCKS, itertools.cycle([(1, 3), (2, 1)]))],
)
def test_blocks_train_as_a_plain_loop(ranks, stage, accumulation, model):
    case = Case(model=model, stage=stage, accumulation=accumulation, backend="inductor", config=REGIONAL)
    check_by_graphs(ranks(2).run(train_beside_plain_loop, case))


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
    """A bucket would wait for a block that a forward left out, or for one that is compiled anew for a length."""
    check_by_graphs(ranks(2).run(train_beside_plain_loop, Case(stage=stage, config=REGIONAL, **varied)))


def graphs_and_buckets(case):
    """Trains beside a plain loop for three steps.

    Returns how many reductions each backward graph has, and the counters of each step.
    """
    graphs, counters, finish = [], [], partitioner.finish_backward_graph

    def recording(backward, *args):
        graphs.append(len(reduce_nodes(backward.graph)))
        finish(backward, *args)

    with mock.patch.object(partitioner, "finish_backward_graph", recording):
        pair = Beside(build(case), case)
        for step in range(3):
            pair.step(batch(step, 0, dist.get_rank(), 4))
            counters.append(gradient_counters(pair.engine))
    check([pair.end()])
    return graphs, counters


@on_ranks(2)
def test_one_graph_serves_all_layers():
    """Each layer would be compiled by itself, or send a bucket that others could fill."""
    graphs, counters = graphs_and_buckets(Case(config=REGIONAL, bucket=10**6))
    # Six parameters of each block; embedding and head stay with the forward that calls the blocks, uncompiled.
    assert graphs == [6]
    assert (counters[-1]["from_graphs"], counters[-1]["from_autograd"]) == (18, 2)
    assert [after["buckets_sent"] for after in counters] == [1, 1, 1]


@on_ranks(1)
def test_blocks_within_the_model_by_default():
    """Without the option no blocks would be found, or the head and the loss behind them run uncompiled."""
    graphs, counters = graphs_and_buckets(Case(model="BlocksWithin"))
    # All blocks' graph, and that of the head and the loss, around the uncompiled body.
    assert graphs == [6, 1]
    assert (counters[-1]["from_graphs"], counters[-1]["from_autograd"]) == (19, 1)


@on_ranks(2)
def test_without_blocks_one_graph_has_all():
    """A graph of the whole model would be cut, or would send what is not full."""
    graphs, counters = graphs_and_buckets(Case(bucket=10**6))
    assert graphs == [20] and [after["buckets_sent"] for after in counters] == [1, 1, 1]


@on_ranks(2)
def test_gradients_of_uncompiled_code_are_not_copied():
    """A gradient that autograd accumulates would be copied into a bucket where nothing else goes with it."""
    # With a bucket of one element, none is packed with others.
    pair = Beside(Around(), Case(config=REGIONAL, bucket=1, backend="inductor"))
    for step in range(2):
        pair.step(batch(step, 0, dist.get_rank(), 4))
    counters = gradient_counters(pair.engine)
    check([pair.end()])
    # Embedding, norm and scale are used between the blocks. The embedding's gradient would take 768 bytes.
    assert counters["from_autograd"] == 4 and counters["peak_bucket"] < 768


@on_ranks(2)
def test_a_hook_keeps_its_gradient():
    """The gradient that a hook was shown would be reduced where it lies, and change in the hook's hands."""
    # With a bucket of one element, none is copied into a bucket with others.
    case = Case(config=REGIONAL, bucket=1)
    module, kept = build(case), []
    module.embedding.weight.register_post_accumulate_grad_hook(lambda parameter: kept.append(parameter.grad))
    pair = Beside(module, case)
    pair.micro_batch(batch(0, 0, dist.get_rank(), 4))
    error = relative_error(kept, [pair.plain.embedding.weight.grad])
    pair.step_plain()
    check([pair.end()])
    assert error < BOUND


@vary("model", ["OneGraph", "OddSizes", "FrozenSubclass"])
@on_ranks(2)
def test_parameters_behind_those_of_odd_sizes(model):
    """Inductor takes all layers' parameters for aligned as the first one's are, and would read beside another's."""
    case = Case(model=model, config=REGIONAL)
    module = build(case)
    engine = make_engine(module, case)
    engine.backward(engine(batch(0, 0, dist.get_rank(), 4)))
    engine.step()
    found = {parameter.data_ptr() % 16 for parameter in module.parameters() if parameter.requires_grad}
    engine.destroy()
    assert found == {0}


class RaisesOutside(Model):
    """Raises in the backward behind its first block on one rank and behind its second on the other."""

    def run_block(self, block, x):
        raises_here = block is self.blocks[dist.get_rank() % 2]
        x = block(x)
        return Raises.apply(x) if raises_here else x


@on_ranks(2)
def test_ranks_agree_after_a_backward_that_raised():
    """What one rank had reduced before it raised would be added to what another reduces next."""
    pair, rank = Beside(RaisesOutside(), Case(config=REGIONAL, bucket=10**6)), dist.get_rank()
    Raises.armed = False
    pair.step(batch(0, 0, rank, 4))
    Raises.armed = True
    with pytest.raises(ArithmeticError):
        pair.engine.backward(pair.engine(batch(9, 0, rank, 4)))
    Raises.armed = False
    pair.engine.micro_steps += 1  # the user gives this step up
    for step in range(1, 3):
        pair.step(batch(step, 0, rank, 4))
    check([pair.end()])


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


@vary("make", [not_asked, compiled_before])
@vary("config", [None, OVERLAPPED])
@on_ranks(2)
def test_blocks_that_cannot_be_asked(config, make):
    """A module would be asked for its length or truth, or blocks that torch.compile wraps be taken for none."""
    module, blocks = make()
    module.body.blocks = torch.nn.ModuleList(blocks)
    # The option needs blocks, so no model with it is compiled as a whole.
    pair = Beside(module, Case(config=config))
    for step in range(3):
        pair.step(batch(step, 0, dist.get_rank(), 4))
    (outcome,) = check([pair.end()])
    assert min(outcome.from_graphs) >= 3 * len(list(Block(8).parameters()))


def train_with_arguments_of_compile(given_to):
    """Gives torch a filter of guards with the blocks' own compile(), or with engine.compile().

    Returns whether it is told to have no effect, how often torch has asked the filter, and what came of training.
    """
    module, asked = BlocksWithin(), []
    arguments = {"options": {"guard_filter_fn": lambda guards: asked.append(guards) or [True] * len(guards)}}
    if given_to == "blocks":
        for block in module.body.blocks:
            block.compile(backend="eager", **arguments)
    with warnings_logged() as texts:
        pair = Beside(module, Case(config=REGIONAL, compile_kwargs=arguments if given_to == "engine" else None))
    for step in range(2):
        pair.step(batch(step, 0, dist.get_rank(), 4))
    return any("so give them to engine.compile()" in text for text in texts), len(asked), pair.end()


@pytest.mark.follows("have no effect, so give them to engine.compile()")
def test_arguments_with_which_blocks_were_compiled(ranks):
    """They would be lost in silence, or also where the engine is given them, as is advised."""
    ((told, asked, ended),) = ranks(1).run(train_with_arguments_of_compile, "blocks")
    assert told and asked == 0
    check([ended])
    ((told, asked, ended),) = ranks(1).run(train_with_arguments_of_compile, "engine")
    assert not told and asked > 0
    check([ended])


class ChecksPoints(Block):
    """Checkpoints itself where it is told how, as the layers of transformers do."""

    how = None

    def __call__(self, x):
        if self.how is None:
            return super().__call__(x)
        return self.how(functools.partial(super().__call__), x)


def own_model():
    model = BlocksWithin()
    model.body.blocks = torch.nn.ModuleList(ChecksPoints(8) for _ in range(2))
    return model


def switch_own(model, how):
    for block in model.body.blocks:
        block.how = how


def llama():
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LossOfIds(transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCABULARY, **sizes)))


def switch_llama(model, how):
    model = model.model
    if how is None:
        model.gradient_checkpointing_disable()
    else:
        model.gradient_checkpointing_enable()
        for layer in model.model.layers:
            layer._gradient_checkpointing_func = how


@vary(
    "make, switch, name",
    [(own_model, switch_own, "ChecksPoints")],
    expects="switch, name",
    slow=[(llama, switch_llama, "LlamaDecoderLayer")],
)
@on_ranks(1)
def test_checkpointing_comes_and_goes(make, switch, name):
    """A layer that checkpoints from some step on would hand its compiled call, not itself, to the checkpoint."""
    if make is llama:
        pytest.importorskip("transformers")
    # Layers checkpoint only in the second step, by a function that looks at what it is given.
    pair = Beside(make(), Case(config=REGIONAL))
    seen = {pair.module: set(), pair.plain: set()}

    def look(model, function, *args):
        # The forward and the layer, or with transformers 5.17 the layer's bound call.
        layer = getattr(function.func, "__self__", None) or function.args[0]
        seen[model].add((function.func.__name__, type(layer).__name__))
        return checkpoint(function, *args, use_reentrant=False)

    for step in range(3):
        for model in seen:
            switch(model, functools.partial(look, model) if step == 1 else None)
        pair.step(batch(step, 0, dist.get_rank(), 4))
    (outcome,) = check([pair.end()])
    assert outcome.from_graphs[0] == outcome.from_graphs[1] == outcome.from_graphs[2] > 0
    assert seen[pair.module] == seen[pair.plain] and [layer for _, layer in seen[pair.module]] == [name]

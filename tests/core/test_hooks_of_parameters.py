# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Hooks of parameters may come and go at any time, and see and change gradients as without DeepCompile."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from deepspeed.compile.zero_1_and_2 import gradient_counters

from support.beside import Beside, check
from support.chunked_loss import small_chunks
from support.ids import sanitized, vary
from support.models import CASES, BlocksWithin, Body
from support.on_ranks import on_ranks
from support.training import BOUND, REGIONAL, Case, batch, device


class ComesBack(Body):
    """Calls its first block again. ``checkpointed``: whether it checkpoints blocks reentrantly."""

    def __init__(self, checkpointed):
        super().__init__()
        self.checkpointed = checkpointed

    def run_block(self, block, x):
        return checkpoint(block, x, use_reentrant=True) if self.checkpointed else block(x)

    def leave(self, x, ids):
        return self.run_block(self.blocks[0], x)


# The parameters of a model that get hooks.
PLACES = {
    "one layer": lambda model: [model.body.blocks[1].up.weight],
    "head": lambda model: [model.head.weight],
    "all": lambda model: [parameter for parameter in model.parameters() if parameter.requires_grad],
}


def node_of(parameter):
    """The node that accumulates the gradients of a parameter."""
    return parameter.expand_as(parameter).grad_fn.next_functions[0][0]


class Hooks:
    """Hooks of the parameters of one model.

    ``seen`` has a copy of each gradient that they were given, in order of the parameters.
    """

    def __init__(self):
        self.seen, self._handles, self._nodes = {}, [], []

    def add(self, parameters, kind):
        for index, parameter in enumerate(parameters):
            seen = self.seen.setdefault(index, [])
            self._handles.append(KINDS[kind](self, parameter, seen))

    def remove(self):
        while self._handles:
            self._handles.pop().remove()

    def of_gradient(self, parameter, seen):
        def change(gradient):
            seen.append(gradient.clone())
            return gradient * 1.5

        return parameter.register_hook(change)

    def of_sum(self, parameter, seen):
        def change(changed):
            seen.append(changed.grad.clone())
            changed.grad.mul_(1.5)

        return parameter.register_post_accumulate_grad_hook(change)

    def before_node(self, parameter, seen):
        def change(gradients):
            seen.append(gradients[0].clone())
            return (gradients[0] * 1.5,)

        self._nodes.append(node_of(parameter))
        return self._nodes[-1].register_prehook(change)

    def after_node(self, parameter, seen):
        self._nodes.append(node_of(parameter))
        return self._nodes[-1].register_hook(lambda _, gradients: seen.append(gradients[0].clone()))


KINDS = {
    "of the gradient": Hooks.of_gradient,
    "of the sum": Hooks.of_sum,
    "before the node": Hooks.before_node,
    "after the node": Hooks.after_node,
}


def check_hooked(pair, both, calls):
    """Ends a training beside a plain loop, both of whose models had hooks, and asserts that these saw the same.

    ``calls``: after each micro-batch, those of both.
    """
    check([pair.end()])
    assert all(of_engine == of_plain for of_engine, of_plain in calls), calls
    of_engine, of_plain = (hooks.seen for hooks in both)
    for index, gradients in of_engine.items():
        for actual, expected in zip(gradients, of_plain[index]):
            assert float((actual - expected).norm() / expected.norm().clamp(min=1e-6)) < BOUND


def train(case, model, place, kind, added, removed):
    """Trains with hooks in the micro-batches from ``added`` to before ``removed``. Added at -1: before the set-up.

    Returns, after each micro-batch, the number of calls, and how many gradients graphs reduced in it.
    """
    torch.manual_seed(0)
    module = model().to(device())
    both = Hooks(), Hooks()
    pair = Beside(module, case) if added >= 0 else None
    if pair is None:
        both[0].add(PLACES[place](module), kind)
        pair = Beside(module, case)
        both[1].add(PLACES[place](pair.plain), kind)
    calls = []
    for index in range(removed + 1):
        for hooks, side in zip(both, (pair.module, pair.plain)):
            if index == removed:
                hooks.remove()
            if index == added:
                hooks.add(PLACES[place](side), kind)
        pair.micro_batch(batch(index, 0, dist.get_rank(), 4))
        if (index + 1) % case.accumulation == 0:
            pair.step_plain()
        calls.append([sum(map(len, hooks.seen.values())) for hooks in both])
    check_hooked(pair, both, calls)
    return [of_engine for of_engine, _ in calls], pair.from_graphs


@pytest.mark.table
@vary("place", ["one layer", "all"])
@vary("kind", KINDS)
@vary("added, removed", [(-1, 1), (0, 2), (1, 3)])
@vary("stage", [1, 2])
@vary("regional", [True, False])
@on_ranks(2)
def test_hooks_come_and_go(place, kind, added, removed, stage, regional):
    """The reducer would take a gradient past a hook, or a hook would see a part of it, nothing, or see it twice."""
    case = Case(stage=stage, config={"compile": {"regional_compilation": regional}})
    calls, from_graphs = train(case, BlocksWithin, place, kind, added, removed)
    hooked = max(added, 0)
    assert calls[hooked] > 0
    # Graphs reduce all else, and what they reduced before when the hooks are gone.
    assert from_graphs[-1] == max(from_graphs)
    assert from_graphs[hooked] == (0 if place == "all" else max(from_graphs) - 1)


# The models in which gradients of one parameter come from several places.
IN_EVERY_RUN = (
    *("BlocksWithin", "CheckpointedReentrant", "CompiledAndEager", "FrozenAndUnused", "SeveralGraphs"),
    *("SharedGradient", "TiedEmbedding", "WeightInTwoGraphs"),
)


@pytest.mark.table
@vary("name", IN_EVERY_RUN, slow=[name for name in CASES if name not in (*IN_EVERY_RUN, "Hooked")])
@vary("kind", ["of the gradient", "of the sum"])
@on_ranks(2)
def test_hooks_of_every_model(name, kind):
    """A hook would see contributions of one weight one by one, or those of one graph without those of other code."""
    train(Case(bucket=40), CASES[name], "all", kind, 1, 2)


@vary("kind", ["of the gradient", "of the sum"])
@vary("stage, regional", [(1, True), sanitized(1, False)], slow=[(2, True)])
@on_ranks(2)
def test_a_rank_with_hooks_among_ranks_that_skip(kind, stage, regional):
    """A rank whose gradients take another way than those of the other ranks would wait for them, or they for it.

    Or ranks would send different buckets where autograd gives one of them a gradient that graphs give the others.
    """
    case = Case(stage=stage, config={"compile": {"regional_compilation": regional}})
    pair, hooks = Beside(BlocksWithin(), case), Hooks()
    for step in range(4):
        if dist.get_rank() == 1 and step == 1:
            for model in (pair.module, pair.plain):
                hooks.add([model.body.blocks[2].up.weight], kind)
        pair.step(batch(step, 0, dist.get_rank(), 4), (step + dist.get_rank()) % 2 == 1)
    check([pair.end()])


def out_of_turn_with_hook(rank, kind, checkpointed):
    """How many gradients came out of turn in each step. ``rank``: the one with a hook from the second step on."""
    module, hooks, counts = BlocksWithin(), Hooks(), []
    module.body = ComesBack(checkpointed)
    pair = Beside(module, Case(stage=2, config=REGIONAL))
    for step in range(4):
        if dist.get_rank() == rank and step == 1:
            for model in (pair.module, pair.plain):
                # The last that a graph of the block computes, so that no other waits for it.
                hooks.add([model.body.blocks[0].norm.bias], kind)
        pair.step(batch(step, 0, dist.get_rank(), 4))
        counts.append(gradient_counters(pair.engine)["out_of_turn"])
    check([pair.end()])
    return counts


@vary("rank", [0, 1])
# Each of the two checkpoints has a sum of its own, which the hook sees.
@vary("kind, checkpointed", [("of the gradient", False), ("of the gradient", True), ("of the sum", False)])
def test_a_block_that_is_called_again_with_a_hook_on_one_rank(ranks, kind, rank, checkpointed):
    """The rank with the hook would send a block's first gradients when others send its last, who send those late."""
    without = ranks(2).run(out_of_turn_with_hook, None, kind, checkpointed)
    hooked = ranks(2).run(out_of_turn_with_hook, rank, kind, checkpointed)
    assert hooked[1 - rank] == without[1 - rank]


@pytest.mark.sanitized
@vary("unused", [False, True])
@on_ranks(2)
def test_hooks_see_the_sum_of_micro_batches(unused):
    """ZeRO-1 adds up micro-batches in ``parameter.grad``: a hook would see the last one alone, or the sum be lost."""
    pair, both = Beside(BlocksWithin(), Case(accumulation=2)), (Hooks(), Hooks())
    for hooks, model in zip(both, (pair.module, pair.plain)):
        hooks.add([model.body.blocks[1].up.weight], "of the sum")
    calls = []
    for index in range(4):
        # The second micro-batch may not use the hooked layer.
        pair.micro_batch(batch(index, 0, dist.get_rank(), 4), unused and index % 2 == 1)
        if index % 2:
            pair.step_plain()
        calls.append([len(hooks.seen[0]) for hooks in both])
    check_hooked(pair, both, calls)


def gradients_copied(hooked):
    """How many gradients ZeRO-1 copies in a micro-batch of uncompiled code whose nodes have, or had, hooks."""
    engine = Beside(BlocksWithin(), Case(accumulation=2, compile_kwargs={"disable": True})).engine
    nodes = [node_of(parameter) for parameter in engine.module.parameters()]
    handles = [node.register_hook(lambda *_: None) for node in nodes if hooked != "never"]
    if hooked == "formerly":
        for handle in handles:
            handle.remove()
    loss = engine(batch(0, 0, dist.get_rank(), 4))
    # A look at a gradient from Python would have it copied.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        engine.backward(loss)
    engine.destroy()
    reduced = [event for event in profile.events() if event.name == "deepcompile::reduce"]
    assert len(reduced) == len(nodes)
    return sum(child.name == "aten::to" for event in reduced for child in event.cpu_children)


def test_gradients_whose_hooks_were_removed(ranks):
    """A node whose hook was removed would have its gradients copied for ever."""
    formerly, never, now = (ranks(1).run(gradients_copied, hooked)[0] for hooked in ("formerly", "never", "now"))
    # A hook that runs later reads the gradient.
    assert formerly == never < now


@on_ranks(2)
@small_chunks(numel=64)
def test_hook_of_a_head_whose_loss_is_in_chunks():
    """The loss in chunks reduces the head's gradient itself, past its hook."""
    train(Case(), BlocksWithin, "head", "of the gradient", 1, 2)


def _registers(parameter, gradients):
    def register(_):
        def change(gradient):
            handle.remove()
            gradients.append(gradient.clone())
            return gradient * 1.5

        handle = parameter.register_hook(change)

    return register


@pytest.mark.sanitized
@on_ranks(2)
def test_hooks_registered_in_a_backward():
    """What was noted when the backward began would not know of the hook."""
    # In each backward, the hook of one parameter registers another's first hook, and removes it again.
    pair, both = Beside(BlocksWithin(), Case(config=REGIONAL)), ([], [])
    for model, gradients in zip((pair.module, pair.plain), both):
        first, last = model.body.blocks[0].up.weight, model.body.blocks[2].down.weight
        last.register_hook(_registers(first, gradients))
    for step in range(2):
        pair.step(batch(step, 0, dist.get_rank(), 4))
    check([pair.end()])
    assert len(both[0]) == len(both[1]) == 2
    assert all((actual - expected).norm() / expected.norm() < BOUND for actual, expected in zip(*both))


# Autograd calls a hook of the sum too, in which there is no sum to see.
@vary("kind", [kind for kind in KINDS if kind != "of the sum"])
@vary("stage", [1, 2])
@on_ranks(2)
def test_hooks_of_a_parameter_frozen_after_its_forward(kind, stage):
    """Autograd calls the hooks although it accumulates nothing: they would be given None for the gradient."""
    pair, both = Beside(BlocksWithin(), Case(stage=stage, config=REGIONAL)), (Hooks(), Hooks())
    hooked = [PLACES["one layer"](model) for model in (pair.module, pair.plain)]
    for hooks, parameters in zip(both, hooked):
        hooks.add(parameters, kind)
    for step in range(2):
        ids = batch(step, 0, dist.get_rank(), 4)
        losses = pair.engine(ids), pair.plain(ids)
        for (parameter,) in hooked:
            parameter.requires_grad_(False)
        pair.engine.backward(losses[0])
        losses[1].backward()
        for (parameter,) in hooked:
            parameter.requires_grad_(True)
        pair.engine.step()
        pair.step_plain()
    check_hooked(pair, both, [[sum(map(len, hooks.seen.values())) for hooks in both]])
    assert len(both[0].seen[0]) == 2

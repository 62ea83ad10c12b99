# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""``compile.activation_memory_budget``: how much a forward leaves for its backward, of each engine for itself.

tests/core/test_randomness.py holds what is computed again to the random numbers of the forward.
"""

import functools
import operator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch.fx import Graph
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import CheckpointPolicy

from deepspeed.compile.features.activation_budget.feature import SplitWithin, runs_once, split_joint

from support.beside import Beside, check
from support.cache_key import check_key_of_a_part
from support.ids import vary
from support.lifetime import allocated_bytes
from support.models import Block, BlocksWithin, Body, OneGraph
from support.on_ranks import on_ranks
from support.options import ALSO_WARNED, SMALL, train_and_collect_output
from support.training import BOUND, Case, batch, build

pytestmark = pytest.mark.options("compile.activation_memory_budget")
# So long that an activation of a block is larger than what else may come and go in a forward.
LENGTH = 512
SLACK = 16 * 1024


def case_of(budget, regional=None, **varied):
    options = {"regional_compilation": regional, "activation_memory_budget": budget}
    # What is null is as if it were not given.
    return Case(**varied, config={"compile": options})


def kept_by(cases, torchs=1.0, compiled_by_caller=False):
    """Trains engines step by step in turns, beside plain loops. Lists the bytes that each one's last forward kept.

    Args:
        torchs: the budget that torch is given for the whole process.
        compiled_by_caller: whether the blocks were compiled before their engine was made.
    """
    # What a forward keeps does not depend on other ranks.
    kept = {}
    with functorch_config.patch(activation_memory_budget=torchs):
        loops = [_loop(case, compiled_by_caller) for case in cases]
        for step in range(2):
            for number, loop in enumerate(loops):
                ids = batch(step, 0, dist.get_rank(), LENGTH)
                before = allocated_bytes(torch.cuda.is_available())
                loss = loop.engine(ids)
                kept[number] = allocated_bytes(torch.cuda.is_available()) - before
                loop.engine.backward(loss)
                loop.engine.step()
                loop.plain(ids).backward()
                loop.step_plain()
        assert all(loop.end().error < BOUND for loop in loops)
    return [kept[number] for number in range(len(cases))]


def _loop(case, compiled_by_caller):
    module = build(case)
    if compiled_by_caller:
        for block in module.body.blocks:
            block.compile(backend="eager")
    return Beside(module, case, reset=False)


@vary(
    "stage, backend, model, regional, compiled_by_caller",
    [
        (1, "eager", "BlocksWithin", None, False),
        (2, "eager", "BlocksWithin", None, True),
        (2, "eager", "OneGraph", False, False),
        (1, "eager", "SeveralGraphs", False, False),
        pytest.param(1, "inductor", "OneGraph", False, False, marks=pytest.mark.slow),
        (2, "inductor", "BlocksWithin", None, False),
    ],
)
@on_ranks(1)
def test_a_smaller_budget_keeps_less(stage, backend, model, regional, compiled_by_caller):
    """A budget that reaches no partitioner, or is rounded to 0 or 1, would change nothing in how graphs are split."""
    varied = {"stage": stage, "backend": backend, "model": model, "regional": regional}
    cases = [case_of(budget, **varied) for budget in (1, 0.5, 0)]
    all_, half, none = kept_by(cases, compiled_by_caller=compiled_by_caller)
    # A hidden state is 32 KiB, and the 4x larger ones of a block, of which there are three, are the most of it.
    assert none + 128 * 1024 < half < all_ - 128 * 1024


@vary("model", ["Checkpointed", "CheckpointedEagerly", "CheckpointedReentrant"])
@vary("stage, backend", [(1, "eager")], slow=[(2, "inductor")])
@on_ranks(1)
def test_within_checkpointed_layers(stage, backend, model):
    """What a checkpoint wants computed again would be kept, or lost, where a budget splits the graph too."""
    cases = [case_of(budget, stage=stage, backend=backend, model=model) for budget in (1, 0.5, 0)]
    all_, half, none = kept_by(cases)
    # What else the process allocates differs by less than SLACK.
    assert none - SLACK < half < all_ + SLACK and none < all_ - SLACK


class ChangesABuffer(Block):
    """A block that scales by a function of a buffer, and then changes the buffer."""

    def __init__(self, width):
        super().__init__(width)
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x):
        x = super().forward(x) * self.scale.sin()
        with torch.no_grad():
            self.scale.add_(0.3)
        return x


class NormsItsWeight(Block):
    """A block that iterates on the buffers of a spectral norm before it reads them."""

    def __init__(self, width):
        super().__init__(width)
        spectral_norm(self.up)


class NormsBatches(Block):
    """A block that moves the running statistics of a norm over the batch."""

    def __init__(self, width):
        super().__init__(width)
        self.batch_norm = nn.BatchNorm1d(width)

    def forward(self, x):
        return super().forward(self.batch_norm(x.transpose(1, 2)).transpose(1, 2))


def train_for_three_steps(module, case):
    loop = Beside(module, case)
    for step in range(3):
        loop.step(batch(step, 0, dist.get_rank(), 4))
    return loop.end()


@vary(
    "backend, regional",
    [
        ("eager", True),
        pytest.param("inductor", True, marks=pytest.mark.slow),
        pytest.param("inductor", False, marks=pytest.mark.slow),
    ],
)
@vary("budget", [None, 0.5, 0])
@vary("block", [ChangesABuffer, NormsItsWeight, NormsBatches])
@on_ranks(1)
def test_what_a_forward_changes_is_not_read_again(block, budget, backend, regional):
    """A backward that computes an activation again from a changed buffer would have other gradients."""
    module = OneGraph()
    module.blocks = nn.ModuleList(block(8) for _ in range(2))
    check([train_for_three_steps(module, case_of(budget, regional, backend=backend))])


class Scaled(Block):
    """A block that scales by a function of a buffer, which other code changes."""

    def __init__(self, width):
        super().__init__(width)
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x):
        return super().forward(x) * self.scale.sin()


CHANGES = {
    "by .data": lambda tensor: tensor.data.add_(0.3),
    "in place": lambda tensor: tensor.add_(0.3),
}


class ChangedByOthers(OneGraph):
    """A model that changes the buffers of its blocks between its forward and its backward."""

    block = Scaled
    change = "in place"

    @torch.compiler.disable
    def leave(self, x, ids):
        for block in self.blocks:
            with torch.no_grad():
                CHANGES[self.change](block.scale)
        return super().leave(x, ids)


@vary(
    "backend, regional",
    [("eager", True), ("eager", False), pytest.param("inductor", True, marks=pytest.mark.slow)],
)
@vary("budget", [0.5, 0])
@vary("change", CHANGES)
@on_ranks(1)
def test_a_buffer_that_others_change(change, budget, backend, regional):
    """A backward would compute activations again from what other code has made of a buffer since, or raise."""
    module = ChangedByOthers()
    module.change = change
    (outcome,) = check([train_for_three_steps(module, case_of(budget, regional, backend=backend))])
    assert outcome.from_graphs[0] > 0


class AddsFirst(Block):
    """A block that does not need its input for its backward."""

    def forward(self, x):
        return super().forward((x + 1).tanh())


class ChangesAnInput(Body):
    """Blocks of which the first one's input is changed after its forward."""

    block = AddsFirst

    def enter(self, ids):
        self.input = super().enter(ids) + 0
        return self.input

    def leave(self, x, ids):
        with torch.no_grad():
            self.input.add_(1)
        return x


class ChangesACopy(ChangesAnInput):
    """The same, as the error advises."""

    def leave(self, x, ids):
        with torch.no_grad():
            self.input = self.input.clone().add_(1)
        return x


def end_or_error(loop):
    """Returns what a step comes to, or what it raises."""
    try:
        loop.step(batch(0, 0, dist.get_rank(), 4))
        return loop.end()
    except RuntimeError as error:
        loop.engine.destroy()
        return str(error)


def train_with_changed_input(budget, body=ChangesAnInput):
    """Returns what training came to, or what it raised."""
    module = BlocksWithin()
    module.body = body(width=8)
    loop = Beside(module, case_of(budget, True))
    return end_or_error(loop)


@pytest.mark.follows("if one was changed, change a copy of it, or set the option to null")
def test_an_input_that_others_change(ranks):
    """Torch's error would not say that it is the budget that has the backward read an input, and what helps."""
    check(ranks(1).run(train_with_changed_input, None))
    (message,) = ranks(1).run(train_with_changed_input, 0)
    assert "modified by an inplace operation" in message
    assert "compile.activation_memory_budget=0 makes a graph's backward read the graph's inputs" in message
    assert "change a copy of it, or set the option to null" in message
    check(ranks(1).run(train_with_changed_input, 0, ChangesACopy))


def another_partitioner(*args, **kwargs):
    """Splits graphs without asking what to keep."""
    return partitioners.default_partition(*args, **kwargs)


def train_with_partitioner(torchs):
    """Returns what training came to where this is torch's partitioner, or what it raised."""
    with mock.patch.object(partitioners, "min_cut_rematerialization_partition", torchs):
        return end_or_error(Beside(BlocksWithin(), case_of(0.5, True)))


@pytest.mark.follows("use a release of torch that ds_report names as tested")
def test_another_partitioner_of_torch(ranks):
    """A torch that decides elsewhere what to keep would keep all activations, or draw others in the backward."""
    (message,) = ranks(1).run(train_with_partitioner, another_partitioner)
    assert "cannot split graphs with torch" in message
    assert "use a release of torch that ds_report names as tested" in message
    check(ranks(1).run(train_with_partitioner, partitioners.min_cut_rematerialization_partition))


@vary("torchs", [1.0, 0.0])
@on_ranks(1)
def test_each_engine_keeps_its_own(torchs):
    """The budget of one engine would reach another, or one that has none would not keep what torch is told to."""
    cases = [case_of(budget, model="BlocksWithin") for budget in (0.0, 1.0, None)]
    none, all_, torchs_own = kept_by(cases, torchs)
    assert none < all_ / 2
    assert abs(torchs_own - (all_ if torchs else none)) < SLACK


@pytest.mark.quick
def test_the_key_of_torchs_caches_has_the_budget():
    """An engine would take the graph of another budget from torch's caches."""
    from deepspeed.compile.zero_1_and_2.gradient.native import reducer_module
    from deepspeed.compile.zero_1_and_2.graph.partitioner import ReduceGradPartitioner

    reducer_module()
    keys = [
        ReduceGradPartitioner({}, 0, False, False, split=SplitWithin(budget)).uuid()
        for budget in (None, 0.0, 0.5, 1.0, 0.5)
    ]
    assert len(set(keys)) == 4 and keys[2] == keys[4]


def test_a_budget_of_what_is_not_compiled(ranks):
    """Nobody would be told that a budget has no effect, or every rank would say it."""
    case = case_of(0.5, model=SMALL, steps=1, compile_kwargs={"disable": True})
    sentence = "DeepCompile with ZeRO stage 1: " + ALSO_WARNED["compile.activation_memory_budget"]
    for rank, (trained, output) in enumerate(ranks(2).run(train_and_collect_output, case)):
        assert trained.error < BOUND
        assert output.count(sentence) == (rank == 0)


def test_others_find_torchs_partitioner_as_it_is(monkeypatch):
    """Another thread that compiles without an engine would find our function in torch's while a graph is split."""
    chooses, cuts, found = partitioners.choose_saved_values_set, partitioners.solve_min_cut, []

    def cut(*args, **kwargs):
        found.append(partitioners.choose_saved_values_set)
        return cuts(*args, **kwargs)

    monkeypatch.setattr(partitioners, "solve_min_cut", cut)
    split = functools.partial(split_joint, budget=0.5)
    backend = aot_autograd(fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=split)
    torch.compile(torch.sin, backend=backend)(torch.ones(2, requires_grad=True)).sum().backward()
    assert set(found) == {chooses}


@pytest.mark.quick
@vary("drops, random", [(None, False), (0.0, False), (0.1, True)], expects="random")
def test_attention_draws_if_it_drops(drops, random):
    """Attention with dropout would draw other numbers where it is computed again, or one without always be kept."""
    graph = Graph()
    query, key, value = (graph.placeholder(name) for name in ("query", "key", "value"))
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    given = () if drops is None else (drops,)
    assert runs_once(graph.call_function(attention, (query, key, value, *given))) == random
    named = {} if drops is None else {"dropout_p": drops}
    assert runs_once(graph.call_function(attention, (query, key, value), named)) == random
    assert runs_once(graph.call_function(torch.ops.aten.rand_like.default, (query,)))
    assert not runs_once(graph.call_function(torch.ops.aten.mm.default, (query, key)))


@pytest.mark.quick
@vary(
    "target, once",
    [
        (torch.ops._c10d_functional.all_reduce.default, True),
        (torch.ops.higher_order.triton_kernel_wrapper_functional, True),
        (torch.ops.higher_order.auto_functionalized_v2, True),
        (torch.ops.prims.convert_element_type.default, False),
        (operator.getitem, False),
    ],
    expects="once",
)
def test_what_others_wrote_runs_once(target, once):
    """A collective or a kernel of the user would run a second time in the backward."""
    node = Graph().call_function(target)
    assert runs_once(node) == once
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    assert not runs_once(node)


@pytest.mark.quick
def test_source_that_was_edited():
    """Generated code that was split by the source before would be used."""
    check_key_of_a_part("feature.py", split=SplitWithin(0.5))

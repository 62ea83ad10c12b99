# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What messages advise works. Where a message has a test of its own, that test follows its advice."""

import copy
import os
import shutil
import sys
import sysconfig
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deepspeed.compile.zero_1_and_2.engine import set_up
from deepspeed.compile.zero_1_and_2.gradient.native import reducer_module
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.ops.op_builder.dc import DeepCompileBuilder

from support import training
from support.beside import Beside, check, warnings_logged
from support.lifetime import backward
from support.models import VOCABULARY, BlocksWithin
from support.on_ranks import gathered, on_ranks
from support.options import SMALL, outcome, prepare, train_prepared
from support.training import (
    BOUND,
    REGIONAL,
    Case,
    batch,
    device,
    make_engine,
    relative_error,
    step_plain,
    total_error,
)


def told_by(step, *args):
    """Returns the message of what a step raises, or an empty text."""
    try:
        step(*args)
    except RuntimeError as error:
        return str(error)
    return ""


class SparseUnseen(torch.nn.Embedding):
    """Has a sparse gradient, and does not say so."""

    def forward(self, ids):
        return torch.nn.functional.embedding(ids, self.weight, sparse=True)


def train_embedding(kind, **sparse):
    """Trains a model with an embedding whose gradient is sparse; returns what is said, or what training came to."""
    module = BlocksWithin()
    module.body.embedding = kind(VOCABULARY, 8, **sparse)
    try:
        pair = Beside(module, Case(config=REGIONAL))
    except ValueError as error:
        return str(error)
    if kind is SparseUnseen:
        told = told_by(pair.step, batch(0, 0, dist.get_rank(), 4))
        pair.engine.destroy()
        return told
    for step in range(2):
        pair.step(batch(step, 0, dist.get_rank(), 4))
    return pair.end()


@pytest.mark.follows(
    "is sparse, and DeepCompile reduces dense ones only; build the module with sparse=False",
    "got a sparse gradient, and DeepCompile reduces dense ones only",
)
def test_a_sparse_gradient(ranks):
    """The error would name no module, or a dense embedding would not train either."""
    for kind, sparse, name in (
        (torch.nn.Embedding, {"sparse": True}, "body.embedding is sparse"),
        # In code that is not compiled, which shows it when its backward runs.
        (SparseUnseen, {}, "'body.embedding.weight'"),
    ):
        (told,) = ranks(1).run(train_embedding, kind, **sparse)
        assert name in told and "build the module with sparse=False" in told
    check(ranks(1).run(train_embedding, torch.nn.Embedding, sparse=False))


class OthersWithin(BlocksWithin):
    """Has parameters with which no ZeRO optimizer could train: one with a sparse gradient, and a complex one."""

    def __init__(self):
        super().__init__()
        self.rows = torch.nn.Embedding(VOCABULARY, 8, sparse=True)
        self.phase = torch.nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def forward(self, ids):
        turned = torch.view_as_real(self.rows(ids) * self.phase)
        return super().forward(ids) * (1 + turned.square().mean())

    def of_zero(self):
        """Lists all other parameters."""
        return [*self.body.parameters(), *self.head.parameters()]


@on_ranks(2)
def test_what_the_optimizer_leaves_out():
    """A model would be refused for parameters that another optimizer trains, though ZeRO never sees them."""
    module = OthersWithin().to(device())
    plain, case = copy.deepcopy(module), Case(config=REGIONAL)
    engine = make_engine(module, case, optimizer=torch.optim.SGD(module.of_zero(), lr=0.2))
    optimizer = torch.optim.SGD(plain.of_zero(), lr=0.2)
    for step in range(2):
        ids = batch(step, 0, dist.get_rank(), 4)
        engine.backward(engine(ids))
        engine.step()
        plain(ids).backward()
        # Nobody averages these.
        others = [(model.rows.weight.grad.to_dense(), model.phase.grad) for model in (module, plain)]
        for model in (module, plain):
            model.rows.weight.grad = model.phase.grad = None
        step_plain(plain, optimizer)
    error = relative_error(module.of_zero(), plain.of_zero())
    engine.destroy()
    assert error < BOUND
    assert all(total_error([here], [there]) < BOUND for here, there in zip(*others))


@on_ranks(2)
def test_frozen_parameters_that_the_optimizer_is_given():
    """A user who gives all of a model's parameters would be refused for some that ZeRO leaves out."""
    module = OthersWithin().to(device())
    module.rows.weight.requires_grad_(False)
    module.phase.requires_grad_(False)
    engine = make_engine(module, Case(config=REGIONAL), optimizer=torch.optim.SGD(module.parameters(), lr=0.2))
    backward(engine)
    engine.step()
    engine.destroy()


def train_two_backwards(advised):
    """Two backwards of one step, of which the second replaces the first; or, as advised, both in one context."""
    pair = Beside(BlocksWithin(), Case())

    def backwards():
        for index in range(2):
            loss = pair.engine(batch(0, index, dist.get_rank(), 4))
            pair.engine.backward(loss)

    with warnings_logged() as texts:
        if advised:
            with pair.engine.coalesce_grad_reduction():
                backwards()
        else:
            backwards()
    pair.engine.step()
    for index in range(0 if advised else 1, 2):
        pair.plain(batch(0, index, dist.get_rank(), 4)).backward()
    pair.step_plain()
    return pair.end(), [text for text in texts if "use engine.coalesce_grad_reduction()" in text]


@pytest.mark.follows("use engine.coalesce_grad_reduction() or")
def test_several_backwards_in_one_step(ranks):
    """Nobody would be told that gradients are replaced, or the context that is advised would replace them too."""
    for advised in (False, True):
        for ended, told in ranks(2).run(train_two_backwards, advised):
            check([ended])
            assert bool(told) != advised


@pytest.mark.follows(
    "was put into the model, or its requires_grad set, after the engine was made; create a new engine",
)
@on_ranks(1)
def test_a_parameter_that_the_optimizer_lacks():
    """The new engine that is advised would raise as the first, whose compiled code torch still has."""
    module, case = BlocksWithin(), Case(config=REGIONAL)
    before = Beside(module, case)
    module.body.blocks[1].up.weight = torch.nn.Parameter(module.body.blocks[1].up.weight.detach() / 2)
    told = told_by(before.step, batch(0, 0, dist.get_rank(), 4))
    assert "the engine's optimizer does not have" in told and "create a new engine" in told
    before.engine.destroy()
    pair = Beside(module, case, reset=False)
    for step in range(2):
        pair.step(batch(step, 0, dist.get_rank(), 4))
    check([pair.end()])


def train_clipped(computes):
    """Sets ``clip_grad`` of an engine that computes a norm or none; returns what is said, or what training came to."""
    config = {"zero_optimization": {"compute_grad_norm": computes}}
    pair = Beside(BlocksWithin(), Case(clipping=0.2 if computes else 0.0, config=config))
    if not computes:
        pair.engine.optimizer.clip_grad = 0.2
        told = told_by(pair.step, batch(0, 0, dist.get_rank(), 4))
        pair.engine.destroy()
        return told
    for step in range(2):
        pair.micro_batch(batch(step, 0, dist.get_rank(), 4))
        assert torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.2) > 0.2
        pair.step_plain()
    return pair.end()


@pytest.mark.follows("so set compute_grad_norm to true")
def test_clipping_without_a_norm(ranks):
    """The step would end in an error that names no option, or what is advised would clip by another norm."""
    (told,) = ranks(1).run(train_clipped, False)
    assert "set compute_grad_norm to true" in told
    check(ranks(1).run(train_clipped, True))


@pytest.mark.follows("`apt-get install g++`, or name one in CXX")
@on_ranks(2)
def test_one_rank_without_a_compiler(tmp_path):
    """The other ranks would wait for it until the timeout, and end with an error that names no compiler."""
    module, engine = prepare(Case(model=SMALL))
    lacks = {"CXX": "no-such-compiler", "TORCH_EXTENSIONS_DIR": str(tmp_path)} if dist.get_rank() == 1 else {}
    # Other engines of this process have loaded what was built before.
    loaded = {} if lacks else OpBuilder._loaded_ops
    with (
        mock.patch.dict(os.environ, lacks),
        mock.patch.object(OpBuilder, "_loaded_ops", loaded),
        mock.patch.object(set_up, "reducer_module", reducer_module.__wrapped__ if lacks else reducer_module),
    ):
        said = outcome(engine.compile, backend="eager")
    assert train_prepared(Case(model=SMALL), module, engine) < BOUND
    of_first, of_other = gathered(said)
    assert of_other in of_first and "rank 1 could not set an engine up" in of_first
    assert "this machine lacks a C++ compiler (there is no no-such-compiler; `apt-get" in of_other


@pytest.mark.follows("`pip install ninja`, and the environment's bin in PATH", "`apt-get install python3-dev`")
def test_without_ninja_or_headers(tmp_path, monkeypatch):
    """A user would install what the message names, and be told of it again."""
    compiler, bin_of_environment = tmp_path / "bin" / "c++", os.path.dirname(sys.executable)
    compiler.parent.mkdir()
    compiler.symlink_to(shutil.which("c++"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(compiler.parent))
    assert DeepCompileBuilder().lacking() == "ninja (`pip install ninja`, and the environment's bin in PATH)"
    monkeypatch.setenv("PATH", f"{bin_of_environment}{os.pathsep}{compiler.parent}")
    assert DeepCompileBuilder().lacking() == ""
    with mock.patch.object(sysconfig, "get_path", lambda *_: "/no-such-folder"):
        lacking = DeepCompileBuilder().lacking()
    assert lacking == "Python's headers (there is no /no-such-folder/Python.h; `apt-get install python3-dev`)"


class OneNormElsewhere(BlocksWithin):
    """The layers look alike, and the optimizer may lack a weight of one of them."""

    def lacking(self):
        return self.body.blocks[2].norm.weight


def train_alike(advised):
    """Trains where the optimizer lacks a weight of one block, or as advised; returns what was said, and the outcome.

    Args:
        advised: None; "given": the optimizer has the weight too; "frozen": the weight is not trained.
    """
    torch.manual_seed(0)
    module = OneNormElsewhere()
    module.lacking().requires_grad_(advised != "frozen")

    def groups(model, count):
        lacking = {id(model.lacking())} if advised != "given" else set()
        return [{"params": [parameter for parameter in model.parameters() if id(parameter) not in lacking]}]

    with mock.patch.object(training, "parameter_groups", groups), warnings_logged() as texts:
        pair = Beside(module, Case(config=REGIONAL))
    if advised is None:
        pair.engine.destroy()
        return texts, None
    for step in range(2):
        pair.step(batch(step, 0, dist.get_rank(), 4))
    return texts, pair.end()


@pytest.mark.follows("give it these too, or set their requires_grad to false")
def test_layers_of_which_the_optimizer_lacks_a_parameter(ranks):
    """Gradients that graphs could reduce would stay with autograd after the user has done what the warning says."""
    ((texts, _),) = ranks(1).run(train_alike, None)
    assert any("layers that look alike share graphs" in text and "give it these too" in text for text in texts)
    for advised in ("given", "frozen"):
        ((texts, ended),) = ranks(1).run(train_alike, advised)
        check([ended])
        assert not any("to autograd" in text for text in texts) and ended.from_graphs[-1] > 0


def train_under_hooks(of_all):
    """Trains with a hook of all modules, or with one at each; returns warnings, the calls, and what came of it."""
    calls, handles = [], []
    pair = Beside(BlocksWithin(), Case(config=REGIONAL))

    def look(module, args, output):
        calls.append(type(module).__name__)

    if of_all:
        handles.append(torch.nn.modules.module.register_module_forward_hook(look))
    else:
        handles += [block.register_forward_hook(look) for block in pair.module.body.blocks]
    with warnings_logged() as texts:
        pair.step(batch(0, 0, dist.get_rank(), 4))
    for handle in handles:
        handle.remove()
    return [text for text in texts if "Hooks of all modules" in text], len(calls), pair.end()


@pytest.mark.follows("register hooks at modules to have it compiled")
def test_hooks_at_modules(ranks):
    """Nobody would be told why nothing is compiled, or hooks at modules would have nothing compiled either."""
    ((texts, calls, ended),) = ranks(1).run(train_under_hooks, True)
    assert len(texts) == 1 and "register hooks at modules to have it compiled" in texts[0]
    assert calls and ended.from_graphs == [0]
    ((texts, calls, ended),) = ranks(1).run(train_under_hooks, False)
    assert texts == [] and calls and ended.from_graphs[0] > 0
    check([ended])


@pytest.mark.follows("raised in another thread while this one began; run this one again")
@on_ranks(2)
def test_a_backward_that_raised_in_another_thread():
    """The backward that is to be run again would be refused for the same one that raised."""
    # A backward raises in another thread after this one has asked for such a backward, and before this one begins.
    pair = Beside(BlocksWithin(), Case(config=REGIONAL))
    hook = pair.module.body.blocks[0].norm.weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backward(pair.engine)
    hook.remove()
    reducer = pair.engine.optimizer._deepcompile.reducer
    # On a GPU the error comes here before autograd's thread has dropped the graph. Until then the reducer would take
    # what begins for a further loss of the same backward, on this rank alone, and ranks would wait for each other.
    while reducer.in_backward:
        time.sleep(0.001)
    told = told_by(reducer.begin_backward, True)
    for step in range(2):
        pair.step(batch(step, 0, dist.get_rank(), 4))
    check([pair.end()])
    assert "run this one again" in told

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Training forwards of transformers' models keep no cache of keys and values, unless the model reads it."""

import contextlib
import copy
import importlib
import pickle
import sys
import types
from typing import List, NamedTuple

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from deepspeed.compile.features.blocks.compilation_limit import CompilationLimit
from deepspeed.compile.features.blocks.feature import Blocks
from deepspeed.compile.fixes.model_code.key_value_cache import train_without_cache
from deepspeed.compile.zero_1_and_2 import wait_for_parameters

from support.beside import warnings_logged
from support.ids import vary
from support.models import Model, qwen3_config
from support.on_ranks import on_ranks
from support.training import OVERLAPPED, batch, compile_backend, device, engine_by_configuration


def language_model(layers):
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(qwen3_config(64, layers, 32, intermediate_size=96)).to(device()).train()


def import_transformers():
    from transformers import Qwen3ForCausalLM  # noqa: F401


@pytest.fixture
def one_rank(ranks):
    """A rank that has imported transformers' models. That takes longer than a test, whichever test comes first."""
    pytest.importorskip("transformers")
    ranks(1).run(import_transformers)
    return ranks(1)


ADVICE = "Pass use_cache=False"


def warned_of_a_cache(**asked):
    """Returns the warnings of a training forward of six layers that say to train without a cache."""
    engine = engine_by_configuration(language_model(6), True)
    ids = torch.arange(24, device=device()).view(2, 12)
    with compile_backend("eager"), warnings_logged() as warnings:
        engine(input_ids=ids, labels=ids, **asked)
    engine.destroy()
    return [warning for warning in warnings if ADVICE in warning]


@pytest.mark.follows("Pass use_cache=False, because a layer finds the cache filled")
@pytest.mark.slow
def test_a_cache_for_which_layers_are_compiled_again(one_rank):
    """The warning would not say what to do, or what it says to do would not help."""
    ((warning,),) = one_rank.run(warned_of_a_cache, use_cache=True)
    assert warning.startswith("[Rank 0] DeepCompile has compiled one frame 5 times: a frame of Qwen3DecoderLayer")
    # As is advised, and as without a word.
    assert one_rank.run(warned_of_a_cache, use_cache=False) == one_rank.run(warned_of_a_cache) == [[]]


class Pretrained(torch.nn.Module):
    """Stands for transformers' class of all models. Returns whether it was told to keep a cache."""

    def __init__(self, use_cache=True):
        super().__init__()
        self.config = types.SimpleNamespace(use_cache=use_cache)

    def can_generate(self):
        return False

    def forward(self, ids, labels=None, use_cache=None, past_key_values=None):
        return use_cache


@pytest.mark.options("compile.deepcompile")
@pytest.mark.follows("call them with use_cache=True to have a cache")
@pytest.mark.quick
def test_which_forwards_keep_no_cache(monkeypatch):
    """A forward that evaluates, goes on from a cache or was asked for one would have none, or a destroyed engine's.

    Sequences that are packed in one row would see each other where a cache is kept: transformers tells them apart only
    without one.
    """
    transformers = types.SimpleNamespace(PreTrainedModel=Pretrained)
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", transformers)
    alone, within, without, left = Pretrained(), Pretrained(), Pretrained(use_cache=False), Pretrained()
    around = torch.nn.ModuleList([within])
    with contextlib.ExitStack() as undo:
        with warnings_logged() as texts:
            for module in (alone, around, without, torch.nn.ModuleList([left])):
                train_without_cache(module, undo, CompilationLimit(module, 8).in_training)
        # What this advises is done below.
        assert len(texts) == 3 and all("call them with use_cache=True to have a cache" in text for text in texts)
        # The module around it is gone, as when a trainer has ended, and the model is used on.
        del module
        with torch.no_grad():
            assert left(1, labels=1) is None
        assert alone(1) is False and within(1, labels=1) is False
        # What is around the model may read its cache, and a model without one is left alone.
        assert within(1) is None and without(1) is None
        for model, decides in ((alone, alone), (within, around)):
            assert model(1, labels=1, use_cache=True) is True
            assert model(1, labels=1, past_key_values=()) is None
            # A forward without gradients may be the first of two of checkpointing, which must compute the same.
            with torch.no_grad():
                assert model(1, labels=1) is False and model(1) is None
            # Gradients are enabled, so the forward belongs to training, and without labels to a loop that generates.
            decides.eval()
            assert model(1, labels=1) is False and model(1) is None
            with torch.no_grad():
                assert model(1, labels=1) is None
            decides.train()
        within.eval()
        assert within(1, labels=1) is False
    assert alone(1) is None and within(1, labels=1) is None


class Activation(torch.nn.Module):
    """Counts the calls that run uncompiled."""

    calls = 0

    def forward(self, x):
        if not torch.compiler.is_compiling():
            Activation.calls += 1
        return torch.nn.functional.silu(x)


class Checkpointed(torch.nn.Module):
    """A reentrant checkpoint around a language model, which keeps a cache there."""

    def __init__(self):
        super().__init__()
        self.embedding, self.model = torch.nn.Embedding(64, 32), language_model(2).model
        for layer in self.model.layers:
            layer.mlp.act_fn = Activation()

    def run(self, x):
        output = self.model(inputs_embeds=x)
        assert output.past_key_values is not None
        return output.last_hidden_state

    def forward(self, ids):
        return checkpoint(self.run, self.embedding(ids), use_reentrant=True).square().mean()


class Distilled(torch.nn.Module):
    """Generates three tokens in its forward, and learns them."""

    def __init__(self):
        super().__init__()
        self.lm = language_model(2)
        for layer in self.lm.model.layers:
            layer.mlp.act_fn = Activation()

    def forward(self, ids):
        with torch.no_grad():
            ids = self.lm.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0)
        return self.lm(ids, labels=ids).loss


# A model -> how often an activation runs uncompiled in two steps: in a forward for each token, in both layers.
IN_TRAINING = {Checkpointed: 0, Distilled: 2 * 3 * 2}


@vary("model", [Checkpointed], slow=[Distilled])
@pytest.mark.usefixtures("one_rank")
@on_ranks(1)
def test_what_runs_without_gradients_in_a_training_forward(model):
    """A checkpoint's first run would pass for generation, and draw other random numbers than the second; or
    generation would be compiled for each length of the cache."""
    Activation.calls = 0
    with compile_backend("eager"):
        engine = engine_by_configuration(model().to(device()).train(), True)
        for _ in range(2):
            engine.backward(engine(torch.arange(24, device=device()).view(2, 12)))
            engine.step()
    engine.destroy()
    assert Activation.calls == IN_TRAINING[model]


@pytest.mark.options("compile.deepcompile")
@pytest.mark.usefixtures("one_rank")
@on_ranks(1)
def test_packed_sequences_are_kept_apart():
    """Sequences of one row would see each other: transformers tells them apart only where it keeps no cache."""
    module = language_model(2)
    for parameter in module.parameters():
        parameter.data *= 10  # so that what a token sees matters
    ids = torch.arange(24, device=device()).view(1, 24)
    positions = torch.cat([torch.arange(10), torch.arange(14)]).view(1, 24).to(device())
    packed = {"input_ids": ids, "labels": ids, "position_ids": positions}
    without, with_cache = (module(**packed, use_cache=use_cache).loss.item() for use_cache in (False, True))
    engine = engine_by_configuration(module, True)
    with compile_backend("eager"):
        loss = engine(**packed).loss.item()
    engine.destroy()
    assert loss == pytest.approx(without, rel=1e-5) and loss != pytest.approx(with_cache, rel=1e-2)


class Copied(NamedTuple):
    """A copy of a language model, or the model itself without DeepCompile."""

    loss: float
    keeps_cache: bool  # in a training forward
    loss_in_one_graph: float  # compiled with fullgraph=True


def run_copied(module, ids):
    torch._dynamo.reset()
    output = module(input_ids=ids, labels=ids)
    compiled = torch.compile(lambda ids: module(input_ids=ids, labels=ids).loss, fullgraph=True, backend="eager")
    return Copied(float(output.loss.detach()), output.past_key_values is not None, float(compiled(ids).detach()))


class Labels(torch.nn.Module):
    def __init__(self, lm):
        super().__init__()
        self.lm = lm

    def forward(self, ids):
        return self.lm(input_ids=ids, labels=ids)


@pytest.mark.slow
@vary("inside", [False, True])
@vary("more", [{}, OVERLAPPED["compile"]])
@on_ranks(2)
def test_copies_run_as_the_model_alone(inside, more):
    pytest.importorskip("transformers")
    module = language_model(2)
    # Where it is inside, another part of the engine's model gives it labels.
    engine = engine_by_configuration(Labels(module) if inside else module, True, compile=more)
    ids = torch.arange(24, device=device()).view(2, 12)
    with compile_backend("eager"):
        output = engine(ids) if inside else engine(input_ids=ids, labels=ids)
        engine.backward(output.loss)
        engine.step()
    wait_for_parameters(engine)
    # The module's own parameters hold process groups, which no pickle can have.
    copied = copy.deepcopy(module)
    pickled = pickle.dumps(copied)
    results = [run_copied(duplicate, ids) for duplicate in (copied, pickle.loads(pickled))]
    engine.destroy()
    assert b"deepspeed" not in pickled
    plain = run_copied(module, ids)
    assert plain.keeps_cache and plain.loss == pytest.approx(plain.loss_in_one_graph, rel=1e-5)
    # The engine is destroyed when the copy is copied.
    assert [*results, run_copied(copy.deepcopy(copied), ids)] == [plain] * 3


@contextlib.contextmanager
def transformers_from(folder):
    """Within it ``transformers`` is the package in ``folder``, and imported."""
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "transformers"}
    for name in before:
        del sys.modules[name]
    sys.path.insert(0, folder)
    try:
        yield importlib.import_module("transformers")
    finally:
        sys.path.remove(folder)
        del sys.modules["transformers"]
        sys.modules.update(before)


@on_ranks(1)
def test_beside_transformers_that_cannot_be_imported(tmp_path):
    """A transformers that raises when it is asked for a class would end the training of any model."""
    (tmp_path / "transformers").mkdir()
    # As where the package's own files import lazily, and one of them imports a torchvision of another torch.
    (tmp_path / "transformers" / "__init__.py").write_text(
        "def __getattr__(name):\n    raise ImportError('operator torchvision::nms does not exist')\n"
    )
    with transformers_from(str(tmp_path)) as transformers, compile_backend("eager"):
        with pytest.raises(ImportError, match="operator torchvision::nms does not exist"):
            _ = transformers.PreTrainedModel
        engine = engine_by_configuration(Model().to(device()), True)
        losses = []
        for _ in range(2):
            loss = engine(batch(0, 0, 0, 4))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        engine.destroy()
    assert losses[1] < losses[0]


class Generated(NamedTuple):
    """What training came to in which a model generates in each step, as in reinforcement learning."""

    losses: List[float]
    graphs: int  # that generation compiled
    counts: List[int]  # how often each frame was compiled, as the limit of compilations counts
    text: List[List[int]]  # of the last generation


def generate_in_training_mode(deepcompile, whole, generates):
    """Trains a model for two steps.

    Args:
        deepcompile: whether the engine compiles the model.
        whole: whether the model is one graph.
        generates: whether the model generates between the steps, in training mode and without gradients.
    """
    module = language_model(2)
    engine = engine_by_configuration(module, deepcompile, compile={"regional_compilation": not whole})
    ids = torch.arange(24, device=device()).view(2, 12)
    losses, graphs, text, counts = [], 0, ids, []
    with compile_backend("eager"):
        for _ in range(2):
            # Each text is as long as the ids, and so is each batch of training.
            loss = engine(input_ids=text, labels=text).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
            if generates:
                torch._dynamo.utils.counters.clear()
                with torch.no_grad():
                    text = module.generate(ids[:, :8], max_new_tokens=4, min_new_tokens=4, do_sample=False)
                graphs += torch._dynamo.utils.counters["stats"]["unique_graphs"]
    if deepcompile:
        limit = engine.optimizer._deepcompile.find(Blocks)._limit
        counts = sorted(count for of_frame in limit._compilations.values() for count in of_frame.values())
    engine.destroy()
    return Generated(losses, graphs, counts, text.tolist())


@vary("whole", [False], slow=[True])
def test_generation_in_training_mode(one_rank, whole):
    """Blocks would be compiled for each length of the cache, count towards the limit, or generate other texts."""
    (off,) = one_rank.run(generate_in_training_mode, False, whole, True)
    (on,) = one_rank.run(generate_in_training_mode, True, whole, True)
    (without,) = one_rank.run(generate_in_training_mode, True, whole, False)
    assert on.graphs == 0 and on.counts == without.counts and max(on.counts) == 1
    assert on.losses == pytest.approx(off.losses, rel=1e-5) and on.text == off.text
    # The losses depend on what was generated.
    assert on.losses[0] == without.losses[0] and on.losses[1] != pytest.approx(without.losses[1], rel=1e-5)


@vary("around, within", [(True, True), (True, False), (False, False)])
@pytest.mark.usefixtures("one_rank")
@on_ranks(1)
def test_what_trains_compiles_once_for_all_layers(around, within):
    """Lightning leaves the model of from_pretrained() in evaluation mode: each layer would be compiled by itself."""
    torch._dynamo.utils.counters.clear()
    module = language_model(6)
    engine = engine_by_configuration(Labels(module), True)
    ids = torch.arange(24, device=device()).view(2, 12)
    with compile_backend("eager"), warnings_logged() as warnings:
        # Before it, so that this is the only forward that needs the engine compiled.
        engine.compile(backend="eager")
        engine.train(around)
        module.train(within)
        output = engine(ids)
        engine.backward(output.loss)
        engine.step()
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        engine.eval()
        with torch.no_grad():
            engine(ids)
    of_validation = torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs
    engine.destroy()
    # One graph for all layers, and one for head and loss.
    assert (graphs, of_validation) == (2, 0) and output.past_key_values is None
    assert not [warning for warning in warnings if ADVICE in warning]

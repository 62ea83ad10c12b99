# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What changes after modules were compiled, hooks and frozen parameters, has its effect as without DeepCompile."""

import threading
from typing import List, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.callback import CallbackTrigger, callback_handler

from support.beside import Beside, Outcome, check
from support.ids import vary
from support.models import BlocksWithin
from support.training import Case, batch

# The modules of a model that get hooks.
PLACES = {
    "in a block": lambda model: [block.up for block in model.body.blocks],
    "in one block": lambda model: [model.body.blocks[1].norm],
    "block": lambda model: list(model.body.blocks),
    "body": lambda model: [model.body],
    "head": lambda model: [model.head],
    "model": lambda model: [model],
}


class Hooks:
    """Hooks of one model. ``calls`` counts how often they ran."""

    def __init__(self):
        self.calls = 0
        self._handles = []

    def add(self, modules, what):
        register = {
            "looks": lambda module: module.register_forward_hook(self.look),
            "looks before": lambda module: module.register_forward_pre_hook(self.look),
            "changes": lambda module: module.register_forward_hook(self.change),
            "looks backward": lambda module: module.register_full_backward_hook(self.look),
            "changes backward": lambda module: module.register_full_backward_hook(self.change_backward),
        }[what]
        self._handles = [register(module) for module in modules]

    def remove(self):
        while self._handles:
            self._handles.pop().remove()

    def look(self, *_):
        self.calls += 1

    def change(self, module, inputs, output):
        self.calls += 1
        return output * 1.5

    def change_backward(self, module, of_inputs, of_outputs):
        self.calls += 1
        return tuple(each if each is None else each * 1.5 for each in of_inputs)


WHATS = ("looks", "looks before", "changes", "looks backward", "changes backward")


class Seen(NamedTuple):
    calls: List[List[int]]  # of the engine's hooks and of the plain loop's, after each step
    outcome: Outcome


def train(place, what, added, removed, config=None, backend="eager"):
    """Trains where a model has hooks in the steps from ``added`` to before ``removed``."""
    torch.manual_seed(0)
    pair = Beside(BlocksWithin(), Case(config=config, backend=backend))
    both, calls = [(model, Hooks()) for model in (pair.module, pair.plain)], []
    for step in range(5):
        for model, hooks in both:
            if step == removed:
                hooks.remove()
            if step == added:
                hooks.add(PLACES[place](model), what)
        pair.step(batch(step, 0, dist.get_rank(), 4))
        calls.append([hooks.calls for _, hooks in both])
    return Seen(calls, pair.end())


def check_seen(results):
    for seen in results:
        check([seen.outcome])
        assert seen.outcome.from_graphs[0] > 0
        assert all(of_engine == of_plain for of_engine, of_plain in seen.calls), seen.calls
        assert seen.calls[-1][0] > 0


@pytest.mark.quick
@vary("place", PLACES)
@vary("what", WHATS)
@vary("added, removed", [(0, 3), (2, 4)])
def test_hooks_come_and_go(ranks, place, what, added, removed):
    check_seen(ranks(2).run(train, place, what, added, removed))


@vary("place", ["in a block", "head"])
def test_hooks_come_and_go_in_generated_code(ranks, place):
    check_seen(ranks(2).run(train, place, "changes", 1, 3, backend="inductor"))


@vary("place", PLACES)
def test_hooks_come_and_go_in_a_model_compiled_as_a_whole(ranks, place):
    config = {"compile": {"regional_compilation": False}}
    check_seen(ranks(2).run(train, place, "changes", 2, 4, config))


def train_under_global_hook(regional):
    """From the second step on, and up to the fourth, a hook of all modules doubles what some of them return."""
    torch.manual_seed(0)
    pair = Beside(BlocksWithin(), Case(config={"compile": {"regional_compilation": regional}}))

    def change(module, args, output):
        return output * 1.5 if isinstance(module, torch.nn.LayerNorm) else None

    for step in range(5):
        handle = torch.nn.modules.module.register_module_forward_hook(change) if 1 <= step < 4 else None
        try:
            pair.step(batch(step, 0, dist.get_rank(), 4))
        finally:
            if handle is not None:
                handle.remove()
    return pair.end()


@vary("regional", [None, False])
def test_hooks_of_all_modules_come_and_go(ranks, regional):
    for outcome in check(ranks(2).run(train_under_global_hook, regional)):
        assert outcome.from_graphs[0] > 0 and outcome.from_graphs[-1] > 0
        assert outcome.from_graphs[1:4] == [0, 0, 0]


def options_after_training():
    """What Dynamo's options say before an engine compiles its model, and afterwards."""
    config, options = torch._dynamo.config, []
    for _ in range(2):
        options.append((config.skip_nnmodule_hook_guards, config.skip_tensor_guards_with_matching_dict_tags))
        train("head", "looks", 1, 3)
    return options


def options_beside_another_compilation(regional):
    """What Dynamo's options say after a step in which another thread compiles all the time."""
    config, begun, over = torch._dynamo.config, threading.Event(), threading.Event()
    pair = Beside(BlocksWithin(), Case(config={"compile": {"regional_compilation": regional}}))

    def compile_backward():
        with callback_handler.install_callbacks(CallbackTrigger.LAZY_BACKWARD, "of another engine"):
            begun.set()
            over.wait()

    other = threading.Thread(target=compile_backward)
    other.start()
    begun.wait()
    try:
        pair.step(batch(0, 0, dist.get_rank(), 4))
    finally:
        over.set()
        other.join()
    return config.skip_nnmodule_hook_guards, config.skip_tensor_guards_with_matching_dict_tags, pair.end()


def test_the_options_of_other_code_stay(ranks):
    assert ranks(2).run(options_after_training) == [[(True, True)] * 2] * 2


@vary("regional", [None, False])
def test_the_options_of_other_code_stay_while_another_thread_compiles(ranks, regional):
    for *options, outcome in ranks(2).run(options_beside_another_compilation, regional):
        check([outcome])
        assert options == [True, True] and outcome.from_graphs[0] > 0


def train_what_was_frozen(place, config, backend):
    """Parameters are frozen in the first of each step's two micro-batches, so code is first compiled for that."""
    torch.manual_seed(0)
    pair = Beside(BlocksWithin(), Case(config=config, backend=backend, accumulation=2))
    for step in range(3):
        for micro_step in range(2):
            for model in (pair.module, pair.plain):
                for module in PLACES[place](model):
                    module.requires_grad_(micro_step == 1)
            pair.micro_batch(batch(step, micro_step, dist.get_rank(), 4))
        pair.step_plain()
    return pair.end()


@vary("place", ["in a block", "block", "head"])
@vary("config", [None, {"compile": {"regional_compilation": False}}])
@vary("backend", ["eager", "inductor"])
def test_what_was_frozen_is_trained(ranks, place, config, backend):
    for outcome in check(ranks(2).run(train_what_was_frozen, place, config, backend)):
        frozen, trained = outcome.from_graphs[0::2], outcome.from_graphs[1::2]
        assert max(frozen) < min(trained), outcome.from_graphs


# Models of transformers that install hooks where they are first asked for more ------------------------------------

ROUTED = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16},
    "Olmoe": {"num_experts": 4},
}


class AsksLate(torch.nn.Module):
    """Asks a model for the loss of its routers from the third step on."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, routers):
        return self.model(input_ids=ids, labels=ids, output_router_logits=routers).loss


def train_routed(name):
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = getattr(transformers, f"{name}Config")(
        num_hidden_layers=2, vocab_size=64, num_experts_per_tok=2, use_cache=False, **sizes, **ROUTED[name]
    )
    config.pad_token_id = None
    model = getattr(transformers, f"{name}ForCausalLM")(config).train()
    pair = Beside(AsksLate(model), Case())
    for step in range(4):
        pair.step(batch(step, 0, dist.get_rank(), 8), step >= 2)
    return pair.end()


@vary("name", ROUTED)
def test_hooks_of_transformers(ranks, name):
    pytest.importorskip("transformers", reason="the model is one of transformers': requirements/demo.txt")
    for outcome in check(ranks(2).run(train_routed, name)):
        assert outcome.from_graphs[0] > 0

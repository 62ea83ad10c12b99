# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What changes after modules were compiled, hooks and frozen parameters, has its effect as without DeepCompile."""

import threading
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.callback import CallbackTrigger, callback_handler
from torch.torch_version import TorchVersion

from deepspeed.compile.zero_1_and_2.hooks import no_hook

from support.beside import Beside, check, warnings_logged
from support.ids import vary
from support.models import BlocksWithin
from support.on_ranks import on_ranks
from support.training import BOUND, Case, batch, relative_error

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
    """Hooks of one model. ``seen`` has an entry for each call: what the hook found at its module."""

    def __init__(self):
        self.seen = []
        self._handles = []

    def add(self, modules, what):
        register = {
            "looks": lambda module: module.register_forward_hook(self.look),
            "looks before": lambda module: module.register_forward_pre_hook(self.look),
            "looks always": lambda module: module.register_forward_hook(self.look, with_kwargs=True, always_call=True),
            "changes": lambda module: module.register_forward_hook(self.change),
            "changes before": lambda module: module.register_forward_pre_hook(self.shift, with_kwargs=True),
            "looks backward": lambda module: module.register_full_backward_hook(self.look),
            "changes backward": lambda module: module.register_full_backward_hook(self.change_backward),
            "changes before a backward": lambda module: module.register_full_backward_pre_hook(self.halve),
        }[what.removesuffix(BY_KEYWORD)]
        self._handles = [register(module) for module in modules]

    def remove(self):
        while self._handles:
            self._handles.pop().remove()

    def look(self, module, *_):
        attributes = sorted(vars(module).keys() - {"_compiled_call_impl"})
        hooks = len(module._forward_pre_hooks) - (no_hook in module._forward_pre_hooks.values())
        self.seen.append(f"{type(module).__name__} {attributes} {hooks}")

    def change(self, module, inputs, output):
        self.look(module)
        return output * 1.5

    def shift(self, module, args, kwargs):
        self.look(module)
        values = (*args, *kwargs.values())
        shifted = [value + 0.1 if torch.is_tensor(value) and value.is_floating_point() else value for value in values]
        return tuple(shifted[: len(args)]), dict(zip(kwargs, shifted[len(args) :], strict=True))

    def change_backward(self, module, of_inputs, of_outputs):
        self.look(module)
        return tuple(gradient if gradient is None else gradient * 1.5 for gradient in of_inputs)

    def halve(self, module, of_outputs):
        self.look(module)
        return tuple(gradient * 0.5 for gradient in of_outputs)


# Of blocks that are called by the names of their inputs.
BY_KEYWORD = ", by keyword"
WHATS = ("looks", "looks before", "changes", "looks backward", "changes backward")
# Of blocks and of what calls them.
MORE_WHATS = ("looks always", "changes before", "changes before a backward")
MORE_WHATS += (f"looks always{BY_KEYWORD}", f"changes before{BY_KEYWORD}")


def call_by_keyword(block, x):
    return block(x=x)


def compiled(regional):
    """Returns the configuration of blocks that are graphs of their own (None: as by default), or of one graph."""
    return {"compile": {"regional_compilation": regional}}


def train(place, what, added, removed, regional=None, backend="eager"):
    """Trains with hooks in the steps from ``added`` to before ``removed``. They see what those of a plain loop see."""
    pair = Beside(BlocksWithin(), Case(config=compiled(regional), backend=backend))
    both, seen = [(model, Hooks()) for model in (pair.module, pair.plain)], []
    for model, _ in both:
        if what.endswith(BY_KEYWORD):
            model.body.run_block = call_by_keyword
    for step in range(removed + 1):
        for model, hooks in both:
            if step == removed:
                hooks.remove()
            if step == added:
                hooks.add(PLACES[place](model), what)
        pair.step(batch(step, 0, dist.get_rank(), 4))
        seen.append([list(hooks.seen) for _, hooks in both])
    (outcome,) = check([pair.end()])
    assert outcome.from_graphs[0] > 0
    assert all(of_engine == of_plain for of_engine, of_plain in seen), seen
    assert seen[-1][0]


@pytest.mark.options("compile.regional_compilation")
@pytest.mark.table
@vary("place, what", [*product(PLACES, WHATS), *product(("block", "body"), MORE_WHATS)])
@vary("added, removed", [(0, 2), (1, 3)])
@vary("regional", [None], slow=[False])
@on_ranks(1)
def test_hooks_come_and_go(regional, place, what, added, removed):
    """A graph that was compiled before a hook came, or went, would train on without it, or with it.

    Or the hook would be called twice, or see a module that is wrapped.
    """
    train(place, what, added, removed, regional)


@vary(
    "place, regional, backend",
    [("block", False, "eager")],
    slow=[("in a block", None, "inductor"), ("head", None, "inductor")],
)
@on_ranks(2)
def test_hooks_come_and_go_in_other_graphs(place, regional, backend):
    """The guard that sees hooks of blocks would be missing in the one graph of the model, or in generated code."""
    train(place, "changes", 1, 3, regional, backend)


@vary("regional", [None, False])
@on_ranks(1)
def test_hooks_of_all_modules_come_and_go(regional):
    """Graphs would run while torch has a hook of all modules, which no guard on one module sees."""
    # From the second step on, and up to the third, a hook of all modules changes what some of them return.
    pair = Beside(BlocksWithin(), Case(config=compiled(regional)))

    def change(module, args, output):
        return output * 1.5 if isinstance(module, torch.nn.LayerNorm) else None

    for step in range(4):
        handle = torch.nn.modules.module.register_module_forward_hook(change) if 1 <= step < 3 else None
        try:
            pair.step(batch(step, 0, dist.get_rank(), 4))
        finally:
            if handle is not None:
                handle.remove()
    (outcome,) = check([pair.end()])
    assert outcome.from_graphs[0] > 0 and outcome.from_graphs[-1] > 0
    assert outcome.from_graphs[1:3] == [0, 0]


def options_of_dynamo():
    config = torch._dynamo.config
    return config.skip_nnmodule_hook_guards, config.skip_tensor_guards_with_matching_dict_tags


@on_ranks(1)
def test_the_options_of_other_code_stay():
    """Dynamo's guards on hooks would stay on for models of others when an engine has compiled its own."""
    assert options_of_dynamo() == (True, True)
    train("head", "looks", 0, 1)
    assert options_of_dynamo() == (True, True)


@vary("regional", [None, False])
@on_ranks(1)
def test_the_options_of_other_code_stay_while_another_thread_compiles(regional):
    """The options would never be set back if another compilation ends after the engine's own."""
    # Another thread compiles all the time.
    begun, over = threading.Event(), threading.Event()
    # While parameters are on their way, some releases of torch need one of the options.
    options = {**compiled(regional)["compile"], "overlap_param_gather": False}
    pair = Beside(BlocksWithin(), Case(config={"compile": options}))

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
    assert options_of_dynamo() == (True, True)
    (outcome,) = check([pair.end()])
    assert outcome.from_graphs[0] > 0


@vary("place", ["in a block", "block", "head"])
@vary("config", [None, {"compile": {"regional_compilation": False}}])
@vary("backend", ["eager"], slow=["inductor"])
@on_ranks(1)
def test_what_was_frozen_is_trained(place, config, backend):
    """A graph that was compiled for a frozen parameter would reduce no gradient of it when it is trained."""
    # Parameters are frozen in the first of each step's two micro-batches, so code is first compiled for that.
    pair = Beside(BlocksWithin(), Case(config=config, backend=backend, accumulation=2))
    for step in range(3):
        for micro_step in range(2):
            for model in (pair.module, pair.plain):
                for module in PLACES[place](model):
                    module.requires_grad_(micro_step == 1)
            pair.micro_batch(batch(step, micro_step, dist.get_rank(), 4))
        pair.step_plain()
    (outcome,) = check([pair.end()])
    frozen, trained = outcome.from_graphs[0::2], outcome.from_graphs[1::2]
    assert max(frozen) < min(trained), outcome.from_graphs


@pytest.mark.options("compile.regional_compilation")
@vary("added", [0, 1])
@vary(
    "place, regional, named",
    [("in a block", True, "up"), ("block", True, None), ("head", False, "head"), ("head", True, "head")],
    "named",
)
@on_ranks(1)
def test_full_backward_hooks(place, regional, named, added):
    """Torch ends graphs at such a hook, and in a loop it compiles nothing: nobody would say why training is slow."""
    module, hooks = BlocksWithin(), Hooks()
    with warnings_logged() as warnings:
        if added == 0:
            hooks.add(PLACES[place](module), "looks backward")
        beside = Beside(module, Case(config={"compile": {"regional_compilation": regional}}))
        for step in range(3):
            if added == 1 == step:
                hooks.add(PLACES[place](module), "looks backward")
            beside.step(batch(step, 0, dist.get_rank(), 4))
    assert hooks.seen
    check([beside.end()])
    told = [warning for warning in warnings if "full backward hooks" in warning]
    assert len(told) == (named is not None) and all(f"{named} (" in warning for warning in told)


@pytest.mark.options("compile.regional_compilation")
@pytest.mark.follows("use hooks of tensors, in a forward hook, instead")
@vary("place, regional", [("in a block", True), ("head", False)])
@on_ranks(1)
def test_hooks_of_tensors_instead(place, regional):
    """What the warning advises would end graphs as well, or see and change nothing."""
    # As the warning advises, a forward hook gives the output a hook, which changes gradients and notes norms.
    module, seen = BlocksWithin(), []
    expected = len([*module.parameters()])
    if regional:
        # Embeddings are outside the blocks.
        expected -= 1
    if TorchVersion(torch.__version__) < "2.13":
        # Graphs end at hooks that note something, around the modules that have them.
        expected -= sum(len([*hooked.parameters()]) for hooked in PLACES[place](module))

    def change(gradient):
        seen.append(float(gradient.norm()))
        return 1.5 * gradient

    def hook_output(module, inputs, output):
        output.register_hook(change)

    for hooked in PLACES[place](module):
        hooked.register_forward_hook(hook_output)
    with warnings_logged() as warnings:
        beside = Beside(module, Case(config={"compile": {"regional_compilation": regional}}))
        beside.step(batch(0, 0, dist.get_rank(), 4))
    (outcome,) = check([beside.end()])
    assert not [warning for warning in warnings if "hooks" in warning] and outcome.from_graphs[0] >= expected
    of_engine, of_plain = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert len(of_engine) > 0 and relative_error([torch.tensor(of_engine)], [torch.tensor(of_plain)]) < BOUND

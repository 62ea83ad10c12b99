# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What the ranks do in ``test_regions.py``."""

import copy

import torch
import torch.distributed as dist
from torch._inductor import compile_fx, config

from deepspeed.compile.fx import reduce_nodes
from deepspeed.compile.zero12 import gradient_counters, reset_gradient_counters
from deepspeed.compile.zero12.graph import backend as reduce_backend

from support.lifetime import Raises
from support.models import Block, Model
from support.parameter_gather import Around
from support.training import (
    Case,
    average_gradients,
    batch,
    build,
    device,
    make_engine,
    make_optimizer,
    relative_error,
)


def train_beside(engine, plain, optimizer, steps):
    """Trains both; returns the counters of each step's backward."""
    seen, rank = [], dist.get_rank()
    for step in steps:
        reset_gradient_counters(engine)
        engine.backward(engine(batch(step, 0, rank, 4)))
        seen.append(gradient_counters(engine))
        engine.step()
        plain(batch(step, 0, rank, 4)).backward()
        average_gradients(plain)
        optimizer.step()
        optimizer.zero_grad()
    return seen


def train_and_destroy(module, plain, case, steps):
    """Makes an engine of ``module`` and trains both; returns what the backwards counted and the parameters' error."""
    engine = make_engine(module, case)
    seen = train_beside(engine, plain, make_optimizer(plain, case), range(steps))
    error = relative_error(module.parameters(), plain.parameters())
    engine.destroy()
    return seen, error


def graphs_and_buckets(case):
    """(reductions of each backward graph, counters of a backward, buckets sent by each, error of the parameters)."""
    torch._dynamo.reset()
    graphs, finish = [], reduce_backend.finish_backward_graph

    def recording(backward, *args):
        graphs.append(len(reduce_nodes(backward.graph)))
        finish(backward, *args)

    module = build(case)
    plain = copy.deepcopy(module)
    reduce_backend.finish_backward_graph = recording
    try:
        seen, error = train_and_destroy(module, plain, case, 4)
    finally:
        reduce_backend.finish_backward_graph = finish
    return graphs, seen[-1], [counters["buckets_sent"] for counters in seen], error


class RaisesOutside(Model):
    """Raises in the backward behind its first block on one rank and behind its second on the other."""

    def run_block(self, block, x):
        raises_here = block is self.blocks[dist.get_rank() % 2]
        x = block(x)
        return Raises.apply(x) if raises_here else x


def raising_at_different_layers(case):
    """(whether a backward raised, error of the parameters after steps behind it)."""
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
    return raised, error


def hook_on_second_layer(case):
    """(calls of a hook on a parameter of the second block, counters of a backward, error of the parameters)."""
    torch._dynamo.reset()
    module = build(case)
    plain = copy.deepcopy(module)
    calls = []
    module.blocks[1].up.weight.register_hook(lambda gradient: calls.append(gradient.shape))
    seen, error = train_and_destroy(module, plain, case, 2)
    return len(calls), seen[-1], error


class NamedBlock(Block):
    """Its forward reads what differs in every layer."""

    def forward(self, x):
        return super().forward(x) if self.name else x


class NamedBlocks(Model):
    block = NamedBlock

    def __init__(self, depth):
        super().__init__(depth=depth)
        for index, block in enumerate(self.blocks):
            block.name = f"layer {index}"


def layers_that_differ(limit, alike=False, fails=False):
    """What steps of a model of 12 layers raise if torch's limit is ``limit``, or the error of the parameters."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Model(depth=12) if alike else NamedBlocks(12)
    module = module.to(device())
    plain = copy.deepcopy(module)
    with torch._dynamo.config.patch(recompile_limit=limit, fail_on_recompile_limit_hit=fails):
        engine = make_engine(module, Case(config={"compile": {"regional_compilation": True}}))
        optimizer = make_optimizer(plain, Case())
        try:
            for step in range(3):
                # Unlike layers differ from each other and from themselves in other steps.
                for number, block in enumerate(module.blocks):
                    block.name = "layer" if alike else f"layer {number} in step {step}"
                train_beside(engine, plain, optimizer, [step])
            return relative_error(module.parameters(), plain.parameters())
        except Exception as error:
            return str(error)
        finally:
            engine.destroy()


def resets(case):
    """Error of the parameters when torch forgets what it has compiled before every step."""
    module = build(case)
    plain = copy.deepcopy(module)
    engine = make_engine(module, case)
    optimizer = make_optimizer(plain, case)
    with torch._dynamo.config.patch(recompile_limit=2):
        for step in range(4):
            torch._dynamo.reset()
            train_beside(engine, plain, optimizer, [step])
    error = relative_error(module.parameters(), plain.parameters())
    engine.destroy()
    return error


def classes(case):
    """Names of the modules' classes before, in and after an engine's life; errors of a copy's gradients and of all."""

    def names(of):
        return [f"{type(part).__module__}.{type(part).__name__}" for part in of.modules()]

    torch._dynamo.reset()
    module = build(case)
    plain = copy.deepcopy(module)
    before = names(module)
    engine = make_engine(module, case)
    during = names(module)
    assert type(module.blocks[0]) is not type(plain.blocks[0])
    train_beside(engine, plain, make_optimizer(plain, case), range(2))
    ids = batch(7, 0, dist.get_rank(), 4)
    # No engine knows its parameters.
    duplicate = copy.deepcopy(module)
    duplicate(ids).backward()
    plain(ids).backward()
    copied = relative_error(*([parameter.grad for parameter in each.parameters()] for each in (duplicate, plain)))
    error = relative_error(module.parameters(), plain.parameters())
    engine.destroy()
    assert type(module.blocks[0]) is type(plain.blocks[0]) and type(module) is type(plain)
    return before, during, copied, names(module), error


def attention_of_qwen3(checkpoint):
    """(layers, the masks of the attentions that were traced, error of the gradients beside the plain model's)."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch._dynamo.reset()
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    config = Qwen3Config(num_hidden_layers=3, vocab_size=64, use_cache=False, attn_implementation="sdpa", **sizes)
    module = Qwen3ForCausalLM(config).to(device()).train()
    if checkpoint:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    plain = copy.deepcopy(module)
    case = Case(config={"compile": {"regional_compilation": True}})
    masks, run = [], reduce_backend._run_as_traced

    def recording(gm, *args):
        attention = torch.nn.functional.scaled_dot_product_attention
        masks.extend(str(node.kwargs["attn_mask"]) for node in gm.graph.nodes if node.target is attention)
        return run(gm, *args)

    reduce_backend._run_as_traced = recording
    try:
        engine = make_engine(module, case)
        optimizer = make_optimizer(plain, case)
        for step in range(2):
            ids = batch(step, 0, dist.get_rank(), 8)
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
            plain(input_ids=ids, labels=ids).loss.backward()
            average_gradients(plain)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        reduce_backend._run_as_traced = run
    error = relative_error(module.parameters(), plain.parameters())
    engine.destroy()
    return config.num_hidden_layers, masks, error


def hook_that_keeps_its_gradient(case):
    """Error of what a hook on the embedding's gradient keeps, and of the parameters."""
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
    return of_hook, error


def alignment_told_to_inductor(case, hooked=False):
    """(16 - address % 16 of parameters, parameters of which forward and backward were told to assume nothing)."""
    torch._dynamo.reset()
    told, compile_inner = {"forward": 0, "backward": 0}, compile_fx.compile_fx_inner

    def recording(gm, example_inputs, **kwargs):
        offsets = [value.storage_offset() for value in example_inputs if isinstance(value, torch.Tensor)]
        told["backward" if kwargs.get("is_backward") else "forward"] += offsets.count(1)
        return compile_inner(gm, example_inputs, **kwargs)

    compile_fx.compile_fx_inner = recording
    try:
        module = build(case)
        if hooked:
            # In no block can a graph reduce it then, but it lies where it lay.
            module.blocks[1].up.weight.register_hook(lambda gradient: None)
        engine = make_engine(module, case)
        # What comes from a cache is not compiled.
        with config.patch(force_disable_caches=True):
            engine.backward(engine(batch(0, 0, dist.get_rank(), 4)))
            engine.step()
        addresses = {parameter.data_ptr() % 16 for parameter in module.parameters()}
        engine.destroy()
    finally:
        compile_fx.compile_fx_inner = compile_inner
    return addresses, told


def train_what_is_partly_uncompiled(case):
    """(counters of the last backward, error of the parameters)."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Around().to(device())
    seen, error = train_and_destroy(module, copy.deepcopy(module), case, 3)
    return seen[-1], error

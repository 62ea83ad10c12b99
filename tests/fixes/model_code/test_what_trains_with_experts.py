# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What people train with transformers' experts: losses and biases that balance, jitter, checkpoints, adapters."""

import contextlib
import functools
import importlib.util
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Dict, List, NamedTuple, Tuple

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint as checkpoint_of_torch

from deepspeed.compile.fixes.model_code.adapted_parameters import trace_adapted_parameters
from deepspeed.compile.fixes.model_code.captured_outputs import traced_collection
from deepspeed.compile.parts import NAMES
from deepspeed.compile.zero_1_and_2 import wait_for_parameters
from deepspeed.utils import safe_get_full_grad

from support.architectures import ARCHITECTURES
from support.ids import vary
from support.on_ranks import on_ranks
from support.training import BOUND, compile_backend, device, engine_by_configuration, relative_error

NEEDS_PEFT = pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="pip install -r requirements/demo.txt")
SHARDS = "features.shard_parameters" in NAMES
STEPS, EXPERTS = 4, ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


# What is done to a model before it is trained


def routers(model):
    found = [module for name, module in model.named_modules() if name.endswith((".gate", ".router"))]
    assert found
    return found


def checkpoint(model):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def checkpoint_reentrantly(model):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})


def add_balancing_loss(model):
    model.config.output_router_logits, model.router_aux_loss_coef = True, 1.0


def add_jitter(model):
    for module in model.modules():
        if hasattr(module, "jitter_noise"):
            module.jitter_noise = 0.1


def freeze_router(model):
    for router in routers(model):
        router.requires_grad_(False)


def compute_router_in_fp32(model):
    for router in routers(model):
        router.__class__ = RouterInFp32.of(type(router))


class RouterInFp32(nn.Module):
    """Computes in fp32, whatever dtype it is given."""

    @classmethod
    @functools.cache
    def of(cls, kind):
        return type("RouterInFp32", (cls, kind), {})

    def forward(self, x):
        logits = F.linear(x.reshape(-1, x.shape[-1]).float(), self.weight.float())
        weights, indices = logits.softmax(-1).topk(self.top_k, -1)
        return logits, (weights / weights.sum(-1, keepdim=True)).to(x.dtype), indices


def add_counts(model):
    """Counts tokens of each expert in a hook, for a bias that the loop corrects between steps."""
    for router in routers(model):
        router.register_buffer("counts", torch.zeros(router.num_experts))
        router.register_forward_hook(count)


@torch.no_grad()
def count(router, _, output):
    router.counts.add_(F.one_hot(output[-1], router.num_experts).sum((0, 1)))


def add_bias_of_forward(model):
    """Corrects the bias in the router's own forward."""
    add_counts(model)
    for router in routers(model):
        router.register_forward_hook(correct)


@torch.no_grad()
def correct(router, *_):
    router.e_score_correction_bias.add_(0.05 * (router.counts.mean() - router.counts).sign())


def add_adapters(model):
    from peft import LoraConfig, get_peft_model

    model.enable_input_require_grads()
    adapters = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=EXPERTS, init_lora_weights=False)
    return get_peft_model(model, adapters)


CHANGES = {
    "balancing_loss": add_balancing_loss,
    "jitter": add_jitter,
    "frozen_router": freeze_router,
    "router_in_fp32": compute_router_in_fp32,
    "counts": add_counts,
    "bias_of_forward": add_bias_of_forward,
    "adapters": add_adapters,
    "checkpointed": checkpoint,
    "checkpointed_reentrantly": checkpoint_reentrantly,
}


# Training


class Trained(NamedTuple):
    losses: List[float]
    norms: List[float]
    graphs: List[Tuple[int, int]]  # after each step how many there were, and for how many reasons Dynamo left one
    values: Dict[str, torch.Tensor]  # parameters and buffers


def tokens(name, step, one_expert_a_rank):
    batch = ARCHITECTURES[name].batch(100 * step + dist.get_rank(), 2)
    if one_expert_a_rank:
        # All tokens of a rank are alike, so each rank has experts that no token reaches, and other ones on each rank.
        batch.update({key: torch.full_like(batch[key], 3 + dist.get_rank()) for key in ("input_ids", "labels")})
    return {key: value.to(device()) for key, value in batch.items()}


def whole_parameters(engine):
    """Within it each rank has all parameters, also where the part that shards them was removed."""
    if not SHARDS:
        return contextlib.nullcontext()
    from deepspeed.compile.features.shard_parameters import unsharded_parameters

    return unsharded_parameters(engine)


def train(name, changes, deepcompile, one_expert_a_rank=False, accumulation=1, options=None, **more):
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    torch.manual_seed(0)
    model = ARCHITECTURES[name].make().to(device()).train()
    for change in changes:
        model = CHANGES[change](model) or model
    more.update(compile=options or {} if deepcompile else {}, gradient_accumulation_steps=accumulation)
    engine = engine_by_configuration(model, deepcompile, lr=0.2, momentum=0.5, **more)
    losses, norms, graphs = [], [], []
    for step in range(STEPS):
        for micro_step in range(accumulation):
            torch.manual_seed(1000 * step + 100 * micro_step + dist.get_rank())
            loss = engine(**tokens(name, accumulation * step + micro_step, one_expert_a_rank)).loss
            engine.backward(loss)
            engine.step()
        balance(model)
        losses.append(float(loss.detach()))
        norms.append(float(engine.get_global_grad_norm()))
        breaks = [reason for reason in counters["graph_break"] if "torch.compiler.disable()" not in reason]
        graphs.append((counters["stats"]["unique_graphs"], len(breaks)))
    if deepcompile:
        wait_for_parameters(engine)
    with whole_parameters(engine):
        named = (*model.named_parameters(), *model.named_buffers())
        values = {key: value.detach().clone() for key, value in named}
    engine.destroy()
    return Trained(losses, norms, graphs, values)


def balance(model):
    """Corrects the biases of routers by the counts of all ranks, as DeepSeek-V3 was trained."""
    for module in model.modules():
        if hasattr(module, "counts") and hasattr(module, "e_score_correction_bias"):
            counts = module.counts.clone()
            dist.all_reduce(counts)
            module.e_score_correction_bias += 0.05 * (counts.mean() - counts).sign()
            module.counts.zero_()


def check(name, changes, backend="eager", **more):
    with compile_backend(backend):
        off, on = (train(name, changes, deepcompile, **more) for deepcompile in (False, True))
    keys = on.values.keys()
    assert keys == off.values.keys()
    assert relative_error([on.values[key] for key in keys], [off.values[key] for key in keys]) < BOUND
    assert on.losses == pytest.approx(off.losses, rel=BOUND)
    assert on.norms == pytest.approx(off.norms, rel=BOUND)
    assert on.graphs[-1][0] == on.graphs[0][0], "a step compiled something anew"
    assert on.graphs[-1][1] == 0, "Dynamo left a block"


# What an engine has: all parameters on each rank, or parts of them.
PLACES = {"kept": {}}
if SHARDS:
    PLACES["sharded"] = {"zero_optimization": {"stage": 2}, "options": {"shard_parameters": "all"}}
CASES = [
    ("Mixtral", ["balancing_loss"]),
    ("Mixtral", ["balancing_loss", "checkpointed"]),
    ("Mixtral", ["balancing_loss", "checkpointed_reentrantly"]),
    ("Qwen3Moe", ["balancing_loss", "frozen_router"]),
    ("GptOss", ["balancing_loss"]),
    ("DeepseekV3", ["counts"]),
    ("DeepseekV3", ["counts", "checkpointed_reentrantly"]),
    ("DeepseekV3", ["bias_of_forward"]),
    ("DeepseekV3", ["frozen_router", "checkpointed"]),
    ("Mixtral", ["router_in_fp32"]),
    ("Mixtral", ["jitter"]),
    ("Mixtral", ["jitter", "checkpointed"]),
    ("Mixtral", ["jitter", "checkpointed_reentrantly"]),
    *(pytest.param(name, ["adapters"], marks=NEEDS_PEFT) for name in ("Mixtral", "GptOss")),
    pytest.param("Qwen3Moe", ["adapters", "checkpointed"], marks=NEEDS_PEFT),
    pytest.param("Mixtral", ["balancing_loss", "checkpointed_reentrantly", "adapters"], marks=NEEDS_PEFT),
]


@pytest.mark.slow
@vary("name, changes", CASES)
@vary("place", PLACES)
@on_ranks(2)
def test_it_trains_as_without_deepcompile(place, name, changes):
    """Dynamo leaves each block where hooks collect router logits, or compiles adapted experts anew in each step.

    A bias that is compiled in stays that of the first step, and a checkpoint whose second run draws other random
    numbers, or has another bias, routes tokens to experts whose outputs were not used.
    """
    # In fp32 another router would compute the same.
    more = {"bf16": {"enabled": True}} if "router_in_fp32" in changes else {}
    check(name, changes, **more, **PLACES[place])


@pytest.mark.slow
@vary("name", ["Mixtral", "Qwen3Moe", "DeepseekV3", "GptOss"])
@vary("place", PLACES)
@on_ranks(2)
def test_experts_that_one_rank_never_hits(place, name):
    """Ranks would average gradients of different experts, and the norm that clips would differ from rank to rank."""
    more = {"one_expert_a_rank": True, "accumulation": 2, "gradient_clipping": 0.5, **PLACES[place]}
    check(name, [], **more)


class Weights(nn.Module):
    """A layer whose parameter ``weights`` has adapters."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, x):
        return torch.einsum("bi,eij->bj", x, self.weights)


@NEEDS_PEFT
@pytest.mark.slow
@on_ranks(2)
def test_a_model_of_stage_3_has_adapters_too():
    """ZeRO-3 would not find the attributes of its parameters, once another engine of the process is compiled."""
    from peft import LoraConfig, get_peft_model

    trace_adapted_parameters()
    adapters = LoraConfig(r=2, target_parameters=["0.weights"], init_lora_weights=False)
    torch.manual_seed(0)
    expected, model = (get_peft_model(nn.Sequential(Weights()), adapters) for _ in range(2))
    model.load_state_dict(expected.state_dict())
    # Each parameter is cut, however small it is.
    stage = {"stage": 3, "stage3_param_persistence_threshold": 0}
    engine = engine_by_configuration(model, deepcompile=False, lr=0.1, zero_optimization=stage)
    x = torch.randn(2, 4, device=device())
    losses = [trained(x).square().mean() for trained in (engine, expected.to(device()))]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=BOUND)
    engine.backward(losses[0])
    losses[1].backward()
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    found = [(safe_get_full_grad(own), other.grad) for own, other in pairs if other.requires_grad]
    assert len(found) == 2 and relative_error(*zip(*found, strict=True)) < BOUND
    engine.destroy()


class Scored(nn.Module):
    """A block with a router whose logits a model of transformers would collect."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(4, 3)

    def forward(self, x):
        return x * self.router(x).softmax(-1).amax(-1, keepdim=True)


class Collecting(nn.Module):
    _can_record_outputs = {"router_logits": nn.Linear}

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Scored() for _ in range(3))


def collecting(call):
    """Returns a model whose routers have hooks, and a function that collects what they see while its blocks run.

    ``call(block, x)`` runs a block.
    """
    capturing = pytest.importorskip("transformers.utils.output_capturing")
    model = Collecting()
    for block in model.blocks:
        capturing.install_output_capuring_hook(block.router, "router_logits", 0)
    around = traced_collection(model)
    runs = [around(block, None, call) for block in model.blocks]

    def collect(x, names=("router_logits",), beside=lambda run, block, x: run(block, x)):
        collected = {name: [] for name in names}
        token = capturing._active_collector.set(collected or None)
        try:
            for block, run in zip(model.blocks, runs, strict=True):
                x = beside(run, block, x)
        finally:
            capturing._active_collector.reset(token)
        return [x, *collected.get("router_logits", ())]

    return model, collect


def test_hooks_of_routers_are_traced():
    """Each block would be two graphs, or be compiled anew, because the list has the logits of more blocks."""
    counter = CompileCounter()
    model, collect = collecting(torch.compile(lambda block, x: block.forward(x), backend=counter))

    x = torch.randn(5, 4, requires_grad=True)
    found = collect(x)
    assert counter.frame_count == 1 and len(found) == 4
    expected = [x]
    for block in model.blocks:
        expected[1:] = [*expected[1:], block.router(expected[0])]
        expected[0] = block(expected[0])
    for actual, wanted in zip(found, expected, strict=True):
        assert torch.equal(actual, wanted)
        # An auxiliary loss is a function of these.
        torch.autograd.grad(actual.sum(), x, retain_graph=True)
    # A checkpoint computes a block again when nothing is collected, and must find the graph of its first run.
    result = collect(x, beside=functools.partial(checkpoint_of_torch, use_reentrant=False))[0]
    before = counter.frame_count
    result.sum().backward()
    assert counter.frame_count == before
    assert traced_collection(model.blocks) is None, "blocks of other models have a wrapper for nothing"


def test_two_threads_collect_from_two_models():
    """A block would give its logits to a model that another thread runs, or to nobody."""
    compiled = torch.compile(lambda block, x: block.forward(x), backend="eager")
    together = threading.Barrier(2, timeout=60)

    def call(block, x):
        together.wait()
        result = compiled(block, x)
        together.wait()
        return result

    x, names = torch.randn(5, 4), [("router_logits",), ()]
    collects = [collecting(call)[1] for _ in names]
    with ThreadPoolExecutor(2) as threads:
        found = [threads.submit(collect, x, wanted) for collect, wanted in zip(collects, names, strict=True)]
    assert [len(result.result()) for result in found] == [4, 1]

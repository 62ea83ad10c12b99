# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What a caller may have opened around the first forward of an engine, which compiles itself there."""

import contextlib
from typing import List, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import graph
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import deepspeed

from support.training import BOUND, compile_backend, device, relative_error

WIDTH = 8


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Refuses(TorchDispatchMode):
    """Lets nothing be computed: what the set-up computes within it raises."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        raise ValueError("refused on purpose")


@contextlib.contextmanager
def deterministic():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


# Name -> context. Within those of the first table, a loss trains.
TRAINING = {
    "save_on_cpu": graph.save_on_cpu,
    "hooks": lambda: graph.saved_tensors_hooks(lambda tensor: tensor, lambda packed: packed),
    "flops": lambda: FlopCounterMode(display=False),
    "anomalies": torch.autograd.detect_anomaly,
    "autocast": lambda: torch.autocast(device().type, torch.bfloat16),
    "dispatch": Dispatches,
    "function": Functions,
    "random": torch.random.fork_rng,
    "gradients": lambda: torch.set_grad_enabled(True),
    "deterministic": deterministic,
}
OTHERS = {
    "fake": lambda: FakeTensorMode(allow_non_fake_inputs=True),
    "refuses": Refuses,
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "meta": lambda: torch.device("meta"),
}
# Name -> call of an engine within a transform.
TRANSFORMS = {
    "grad": lambda engine, x: torch.func.grad(lambda value: engine(value))(x),
    "grad_and_value": lambda engine, x: torch.func.grad_and_value(lambda value: engine(value))(x)[0],
    "vmap": lambda engine, x: torch.func.vmap(lambda value: engine(value))(x),
    "vmap of grad": lambda engine, x: torch.func.vmap(torch.func.grad(lambda value: engine(value)))(x),
    "jacrev": lambda engine, x: torch.func.jacrev(lambda value: engine(value))(x),
    "jvp": lambda engine, x: torch.func.jvp(lambda value: engine(value), (x,), (torch.ones_like(x),))[1],
}
ALL = [*TRAINING, *OTHERS, *TRANSFORMS]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(3)), nn.Linear(WIDTH, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


class First(NamedTuple):
    """What came of the first call of an engine, and of steps after it.

    Attributes:
        result: of the call; None for a tensor without values.
        raised: by the call.
        is_compiled: whether the engine has compiled itself in the call.
        losses: of steps after it.
    """

    result: Optional[torch.Tensor]
    raised: Optional[str]
    is_compiled: bool
    losses: List[torch.Tensor]


def batch_of(step):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(4, WIDTH, generator=generator).to(device())


def first_call(name, section, stage=2, accumulation=1):
    """Calls a new engine for the first time within a context, and trains it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Model().to(device())
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage},
        "compile": section,
    }
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, eps=0.1)
    result, raised = None, None
    with compile_backend("eager"):
        engine = deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]
        x = batch_of(0)
        try:
            if name in TRANSFORMS:
                result = TRANSFORMS[name](engine, x)
            else:
                with {**TRAINING, **OTHERS}[name]():
                    result = engine(x)
                    if name in TRAINING:
                        engine.backward(result)
                        engine.step()
        except (RuntimeError, ValueError) as error:
            raised = str(error)
        is_compiled, losses = engine.is_compiled, []
        for step in range(1, 4):
            loss = engine(batch_of(step))
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
    engine.destroy()
    has_values = result is not None and type(result) is torch.Tensor
    return First(result.detach().clone() if has_values else None, raised, is_compiled, losses)


def same(first, second):
    """Whether two engines have computed the same."""
    if (first.result is None) != (second.result is None) or relative_error(first.losses, second.losses) > BOUND:
        return False
    return first.result is None or relative_error([first.result], [second.result]) < BOUND

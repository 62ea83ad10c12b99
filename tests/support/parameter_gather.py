# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What the ranks do in ``test_parameter_gather.py``."""

import contextlib
import copy
import glob
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from deepspeed.compile.zero12 import gather, gather_hooks, wait_for_parameters
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

from support.models import VOCABULARY, Block, Model
from support.training import average_gradients, batch, device, make_engine, make_optimizer, relative_error


class Body(nn.Module):
    """Calls the blocks, between parameters of its own and of other modules."""

    def __init__(self, width=8, depth=3):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids):
        x = self.embedding(ids) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Around(nn.Module):
    """Uses parameters before and behind the body, in its own compiled code and in modules."""

    def __init__(self, width=8):
        super().__init__()
        self.body = Body(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.shift = nn.Parameter(torch.zeros(VOCABULARY))

    def forward(self, ids):
        logits = self.head(self.body(ids)) + self.shift
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


class EagerAround(Around):
    """The same, but nothing around the body is compiled, and some of it reads parameters without calling modules."""

    @torch.compiler.disable
    def forward(self, ids):
        x = self.body(ids)
        logits = F.linear(x, self.head.weight) + self.shift
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


class TiedAround(Around):
    def __init__(self):
        super().__init__()
        self.head.weight = self.body.embedding.weight
        # A block's parameter that other code uses too.
        self.body.blocks[1].norm.weight = self.body.norm.weight


class ReadsBefore(Around):
    """Uncompiled code reads a parameter in front of the body, without calling its module."""

    @torch.compiler.disable
    def forward(self, ids):
        penalty = self.head.weight.square().mean()
        return super().forward(ids) + penalty


class Hooked(Around):
    """A hook of a module computes with parameters before the module is called."""

    def __init__(self):
        super().__init__()
        self.before = nn.utils.weight_norm(nn.Linear(VOCABULARY, 4))

    @torch.compiler.disable
    def forward(self, ids):
        penalty = self.before(F.one_hot(ids, VOCABULARY).float()).square().mean()
        return super().forward(ids) + penalty


CASES = (Around, EagerAround, TiedAround, ReadsBefore, Hooked)
MODELS = {**{model.__name__: model for model in CASES}, "Owner": Model}
DELAY = 0.25


@contextlib.contextmanager
def one_rank_late(delay):
    """Each rank in turn sends its parameters ``delay`` seconds late. Yields the units that were waited for."""
    start, wait = gather.OverlappedGather.start, gather.OverlappedGather.wait
    turns, waited = iter(range(10**6)), []

    def late(self):
        if dist.get_rank() == next(turns) % dist.get_world_size():
            if torch.cuda.is_available():
                # There the stream comes late and the host does not wait.
                torch.cuda._sleep(int(delay * 1.5e9))
            else:
                time.sleep(delay)
        start(self)

    def watched(self, units):
        units = list(units)
        waited.extend(unit for unit in units if unit in self._works)
        wait(self, units)

    gather.OverlappedGather.start, gather.OverlappedGather.wait = late, watched
    try:
        yield waited
    finally:
        gather.OverlappedGather.start, gather.OverlappedGather.wait = start, wait


def _make(case, model):
    torch._dynamo.reset()
    built = []
    for _ in range(2):
        torch.manual_seed(0)
        built.append(MODELS[model]().to(device()))
    module, plain = built
    return module, plain, make_engine(module, case), make_optimizer(plain, case)


def _step_plain(plain, optimizer, step):
    plain(batch(step, 0, dist.get_rank(), 4)).backward()
    average_gradients(plain)
    optimizer.step()
    optimizer.zero_grad()


def train_with_a_late_rank(case, model, waits=True):
    """(largest relative error of a loss, error of the parameters, units waited for)."""
    module, plain, engine, optimizer = _make(case, model)
    worst = 0.0
    with one_rank_late(DELAY) as waited:
        wait = gather.OverlappedGather.wait
        if not waits:
            gather.OverlappedGather.wait = lambda self, units: None
        loss = engine(batch(0, 0, dist.get_rank(), 4))
        for step in range(case.steps):
            engine.backward(loss)
            engine.step()
            # Right behind the step: the plain loop's collectives would wait for the late rank too.
            loss = engine(batch(step + 1, 0, dist.get_rank(), 4))
            _step_plain(plain, optimizer, step)
            worst = max(worst, relative_error([loss], [plain(batch(step + 1, 0, dist.get_rank(), 4))]))
        gather.OverlappedGather.wait = wait
        wait_for_parameters(engine)
    error = relative_error(module.parameters(), plain.parameters())
    engine.destroy()
    dist.barrier()
    return worst, error, sorted(set(waited))


def _clones(tensors):
    return [tensor.detach().clone() for tensor in tensors]


def _saved(engine, module):
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    engine.save_checkpoint(folder[0], tag="one")
    file = glob.glob(os.path.join(folder[0], "one", "*model_states.pt"))[0]
    state = torch.load(file, map_location=device(), weights_only=False)["module"]
    dist.barrier()
    return [state[name] for name, _ in module.named_parameters()]


def _after_loading(engine, module):
    """What was loaded must not be overwritten by what is still on its way."""
    state = {name: torch.full_like(value, 0.5) for name, value in module.state_dict().items()}
    module.load_state_dict(state)
    time.sleep(2 * DELAY)
    return [parameter - 0.5 for parameter in _clones(module.parameters())]


def _after_offloading(engine, module):
    engine.offload_states()
    engine.reload_states()
    return _clones(module.parameters())


def _set(engine, module):
    for parameter in module.parameters():
        safe_set_full_fp32_param(parameter, safe_get_full_fp32_param(parameter))
    return [safe_get_full_fp32_param(parameter) for parameter in module.parameters()]


READS = {
    "wait_for_parameters": lambda engine, module: (wait_for_parameters(engine), _clones(module.parameters()))[1],
    "state_dict": lambda engine, module: [module.state_dict()[name].clone() for name, _ in module.named_parameters()],
    "state_dict of a block": lambda engine, module: _clones(module.body.blocks[0].state_dict().values()),
    "save_checkpoint": _saved,
    "load_state_dict": _after_loading,
    "offload_states": _after_offloading,
    "safe_get_full_fp32_param": lambda engine, module: [
        safe_get_full_fp32_param(parameter) for parameter in module.parameters()
    ],
    "safe_set_full_fp32_param": _set,
    "behind a forward": lambda engine, module: (
        engine(batch(9, 0, dist.get_rank(), 4)),
        _clones(module.parameters()),
    )[1],
    "destroy": lambda engine, module: (engine.destroy(), _clones(module.parameters()))[1],
}


def _outputs(engine, module, how):
    ids = batch(9, 0, dist.get_rank(), 4)
    if how == "evaluate":
        engine.eval()
        with torch.no_grad():
            return engine(ids)
    with torch.no_grad() if how == "module without gradients" else contextlib.nullcontext():
        return module(ids)


FORWARDS = ["evaluate", "module", "module without gradients"]


def read_after_a_step(case, how):
    """Largest error of what ``how`` reads right behind a step in which another rank was late."""
    module, plain, engine, optimizer = _make(case, "Around")
    worst = 0.0
    for step in range(2):
        engine.train()
        with one_rank_late(DELAY):
            engine.backward(engine(batch(step, 0, dist.get_rank(), 4)))
            engine.step()
            # Right behind the step: the plain loop's collectives would wait for the late rank too.
            read = [_outputs(engine, module, how)] if how in FORWARDS else READS[how](engine, module)
            _step_plain(plain, optimizer, step)
            expected = [plain(batch(9, 0, dist.get_rank(), 4))] if how in FORWARDS else list(plain.parameters())
            if how == "state_dict of a block":
                expected = list(plain.body.blocks[0].state_dict().values())
            if how == "load_state_dict":
                expected = [torch.zeros_like(value) for value in expected]
            worst = max(worst, relative_error(read, expected))
        if how in ("load_state_dict", "destroy"):
            break
    if how != "destroy":
        engine.destroy()
    dist.barrier()
    return worst


def order_of_waits(case):
    """Numbers of the units on their way when each block begins and when the forward is done; what becomes of hooks."""
    module, _, engine, _ = _make(case, "Around")
    in_use, pending = engine.optimizer._zero12.gather, []
    enter = gather_hooks.Waiting.enter

    def watched(self, each):
        enter(self, each)
        if isinstance(each, Block):
            pending.append(sorted(in_use._works))

    gather_hooks.Waiting.enter = watched
    try:
        for step in range(2):
            pending.clear()
            loss = engine(batch(step, 0, dist.get_rank(), 4))
            pending.append(sorted(in_use._works))
            engine.backward(loss)
            engine.step()
            after_step = sorted(in_use._works)
    finally:
        gather_hooks.Waiting.enter = enter
    copied = copy.deepcopy(module)
    left = sorted(in_use._works)
    copied.state_dict()
    engine.destroy()
    hooks = [
        hook
        for each in module.modules()
        for hook in (*each._forward_pre_hooks.values(), *each._state_dict_pre_hooks.values())
    ]
    hooks = sum(isinstance(hook, gather_hooks._Hook) for hook in hooks)
    return pending, after_step, left == after_step, hooks


def train_with_a_script_module(case):
    """Error of the parameters of a model that has a module which takes no hooks."""
    torch._dynamo.reset()
    built = []
    for _ in range(2):
        torch.manual_seed(0)
        module = EagerAround()
        module.head = torch.jit.script(module.head)
        built.append(module.to(device()))
    module, plain = built
    engine, optimizer = make_engine(module, case), make_optimizer(plain, case)
    for step in range(2):
        engine.backward(engine(batch(step, 0, dist.get_rank(), 4)))
        engine.step()
        _step_plain(plain, optimizer, step)
    module.state_dict()
    error = relative_error(module.parameters(), plain.parameters())
    engine.destroy()
    return error

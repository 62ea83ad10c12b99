# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Programs that read or write parameters between a step and the next forward, while one rank sends its own late.

Nobody of them waits, as code of libraries does not.
"""

import copy
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from deepspeed.compile.features.overlap_gather.arriving import can_be_marked
from deepspeed.compile.zero_1_and_2 import wait_for_parameters
from deepspeed.utils import safe_get_full_fp32_param

from support.ids import vary
from support.models import VOCABULARY
from support.on_ranks import on_ranks
from support.parameter_gather import Around, one_rank_late, past_the_class
from support.training import (
    BOUND,
    Case,
    batch,
    device,
    make_engine,
    make_optimizer,
    ranges_of,
    relative_error,
    train_plain,
)

DELAY = 0.1


def plain_loop(module, state):
    return [parameter.detach().clone() for parameter in module.parameters()]


def aliases(module, state):
    """As torch_ema and others copy parameters."""
    kept = [torch.zeros_like(parameter.data) for parameter in module.parameters()]
    for mean, parameter in zip(kept, module.parameters()):
        mean.copy_(parameter.data)
    return kept


def averaged_model(module, state):
    averaged = state.setdefault("averaged", AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.0)))
    averaged.update_parameters(module)
    return list(averaged.module.parameters())


def sync_of_trl(module, state):
    """As TRL's SyncRefModelCallback does."""
    target = state.setdefault("target", copy.deepcopy(module))
    for of_target, of_model in zip(target.parameters(), module.parameters()):
        of_target.data.mul_(0.0).add_(of_model.data, alpha=1.0)
    return list(target.parameters())


def lerp(module, state):
    means = [torch.zeros_like(parameter) for parameter in module.parameters()]
    with torch.no_grad():
        torch._foreach_lerp_(means, list(module.parameters()), 1.0)
    return means


def norms(module, state):
    norms = torch._foreach_norm([parameter.detach() for parameter in module.parameters()])
    return [norm / norm * parameter for norm, parameter in zip(norms, module.parameters())]


def send(module, state):
    """As to a server that generates."""
    for _, parameter in module.named_parameters():
        received = parameter.data.clone()
        dist.broadcast(received, 0)
        yield received


def broadcast_itself(module, state):
    for parameter in module.parameters():
        dist.broadcast(parameter, 0)
        yield parameter.detach().clone()


def state_dict(module, state):
    values = module.state_dict()
    return [values[name] for name, _ in module.named_parameters()]


def kept_variables(module, state):
    values = module.state_dict(keep_vars=True)
    return [values[name] * 1 for name, _ in module.named_parameters()]


def copied(module, state):
    return list(copy.deepcopy(module).parameters())


def saved(module, state):
    path = f"{state['folder']}/{dist.get_rank()}.pt"
    torch.save(module.state_dict(), path)
    values = torch.load(path)
    return [values[name] for name, _ in module.named_parameters()]


def on_a_thread(module, state):
    found = []
    threads = [threading.Thread(target=lambda: found.append(plain_loop(module, state))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(one, other) for one, other in zip(found[0], found[2]))
    return found[1]


@torch.inference_mode()
def in_inference_mode(module, state):
    return [parameter * 1 for parameter in module.parameters()]


def functional(module, state):
    values = {name: parameter * 1 for name, parameter in module.named_parameters()}
    torch.func.functional_call(module, dict(module.named_parameters()), (state["ids"],))
    return list(values.values())


def in_a_hook_of_state_dict(module, state):
    found = []
    handle = module.register_state_dict_pre_hook(lambda *_: found.extend(plain_loop(module, state)))
    module.state_dict()
    handle.remove()
    return found


def in_a_hook_of_load_state_dict(module, state):
    found = []
    handle = module.register_load_state_dict_post_hook(lambda *_: found.extend(plain_loop(module, state)))
    module.load_state_dict({}, strict=False)
    handle.remove()
    return found


def copied_one_by_one(module, state):
    return [copy.copy(parameter) for parameter in module.parameters()]


def compiled(module, state):
    if "compiled" not in state:
        state["compiled"] = torch.compile(
            lambda module: [parameter.detach() * 1 for parameter in module.parameters()], backend=past_the_class
        )
    before = sum(torch._dynamo.convert_frame.FRAME_COMPILE_COUNTER.values())
    result = state["compiled"](module)
    state.setdefault("compilations", []).append(
        sum(torch._dynamo.convert_frame.FRAME_COMPILE_COUNTER.values()) - before
    )
    return result


READERS = (
    *(plain_loop, aliases, averaged_model, sync_of_trl, lerp, norms, send, broadcast_itself, state_dict),
    *(kept_variables, copied, saved, on_a_thread, in_inference_mode, functional, copied_one_by_one),
    *(in_a_hook_of_state_dict, in_a_hook_of_load_state_dict, compiled, compiled),
)


def train(engine, step):
    engine.backward(engine(batch(step, 0, dist.get_rank(), 4)))
    engine.step()


@pytest.mark.options("compile.overlap_param_gather")
@on_ranks(2)
def test_readers(tmp_path):
    """A reader would get values from before the step. Compiled code of the caller's would be compiled in each step."""
    module = Around().to(device())
    # No option: the gather under the next forward is what everybody gets.
    engine, wrong, step = make_engine(module, Case(config={})), [], 0
    state = {"folder": tmp_path, "ids": batch(0, 0, dist.get_rank(), 4)}
    train(engine, 0)
    with one_rank_late(DELAY):
        for reader in READERS:
            # Each rank is late in one of two steps.
            for _ in range(2):
                step += 1
                train(engine, step)
                read = [value.clone() for value in reader(module, state)]
                wait_for_parameters(engine)
                if relative_error(read, module.parameters()) != 0:
                    wrong.append(reader.__name__)
    engine.destroy()
    assert wrong == []
    assert sum(state["compilations"]) <= 2 and state["compilations"][-1] == 0


def arrived_behind_steps(module, engine, kept, step):
    """Largest error of memory that somebody keeps, and how many units were on their way behind each of two steps."""
    errors, on_their_way = [], []
    for index in (step, step + 1):
        train(engine, index)
        read = [value.clone() for value in kept]
        on_their_way.append(len(engine.optimizer._deepcompile.gather._works))
        wait_for_parameters(engine)
        errors.append(relative_error(read, [*module.parameters()][: len(read)]))
    return max(errors, default=0.0), on_their_way


@on_ranks(2)
def test_aliases():
    """An average of weights that keeps `parameter.data` would read values from before the step, without a word."""
    # While memory is kept by nobody, an average, a view and nobody.
    module, found = Around().to(device()), []
    engine = make_engine(module, Case(config={}))
    train(engine, 0)
    with one_rank_late(DELAY):
        found.append(arrived_behind_steps(module, engine, [], 1))
        found.append(arrived_behind_steps(module, engine, [parameter.data for parameter in module.parameters()], 3))
        found.append(arrived_behind_steps(module, engine, [next(module.parameters()).detach()[:]], 5))
        found.append(arrived_behind_steps(module, engine, [], 7))
        # As a program does that swaps averages in: as many tensors leave the memory as come in.
        kept = [parameter.data for parameter in module.parameters()]
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()
        found.append(arrived_behind_steps(module, engine, kept, 9))
    engine.destroy()
    assert [error for error, _ in found] == [0.0] * 5
    # Without such readers the next forward begins under the gather.
    (_, before), *waits, (_, behind), swapped = found
    waits.append(swapped)
    assert all(before) and all(behind) and not any(sum(on_their_way) for _, on_their_way in waits)


def clip(module):
    for parameter in module.parameters():
        parameter.data.clamp_(-0.1, 0.1)
    return lambda value: value.clamp(-0.1, 0.1)


@torch.no_grad()
def halve(module):
    for parameter in module.parameters():
        parameter.mul_(0.5)
    return lambda value: value * 0.5


def halve_compiled(module):
    torch.compile(halve, backend="eager")(module)
    return lambda value: value * 0.5


def load(module):
    module.load_state_dict({name: torch.full_like(value, 0.5) for name, value in module.state_dict().items()})
    return lambda value: torch.full_like(value, 0.5)


def load_without_reading(module):
    module.load_state_dict({name: torch.full(value.shape, 0.5) for name, value in module.named_parameters()})
    return lambda value: torch.full_like(value, 0.5)


def replace(module):
    for parameter in module.parameters():
        parameter.data = torch.full(parameter.shape, 0.25, device=parameter.device)
    return lambda value: torch.full_like(value, 0.25)


def initialize(module):
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, 0.125)
    return lambda value: torch.full_like(value, 0.125)


@pytest.mark.options("compile.overlap_param_gather")
@on_ranks(2)
def test_writers():
    """What was written between a step and the next forward would be overwritten by what is on its way."""
    module = Around().to(device())
    engine, errors, step = make_engine(module, Case(config={})), {}, 0
    train(engine, 0)
    with one_rank_late(DELAY):
        for writer in (clip, halve, halve_compiled, load, load_without_reading, initialize, replace):
            for _ in range(2):
                step += 1
                train(engine, step)
                change = writer(module)
                # What is on its way would arrive by then.
                time.sleep(2 * DELAY)
                written = [parameter.detach().clone() for parameter in module.parameters()]
                # All ranks take part.
                expected = [change(safe_get_full_fp32_param(parameter)) for parameter in module.parameters()]
                error = relative_error(written, expected)
                errors[writer.__name__] = error + errors.get(writer.__name__, 0.0)  # NaN if one is
    engine.destroy()
    assert all(error < BOUND for error in errors.values()), errors


class Computed(Around):
    """Blocks compute weights of other parameters, and torchao has quantized the weight of the head."""

    def __init__(self, width=8):
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        super().__init__(width)
        for block in self.body.blocks:
            weight_norm(block.up)
        self.head = nn.Linear(width, VOCABULARY)
        quantize_(self.head, Int8WeightOnlyConfig(set_inductor_config=False))


@torch.no_grad()
def computed(module):
    return [*(block.up.weight for block in module.body.blocks), module.head(torch.eye(8, device=device()))]


@pytest.mark.slow
@on_ranks(2)
def test_weights_that_modules_compute():
    """A parametrization, or a function of torchao's own class, would compute with what was there before the step."""
    pytest.importorskip("torchao", reason="pip install -r requirements/front_doors.txt")
    module, errors = Computed().to(device()), []
    engine = make_engine(module, Case(config={}))
    with one_rank_late(DELAY):
        for step in range(4):
            train(engine, step)
            read = [weight.clone() for weight in computed(module)]
            wait_for_parameters(engine)
            errors.append(relative_error(read, computed(module)))
        for step in range(4, 6):
            train(engine, step)
            for block in module.body.blocks:
                block.up.weight = torch.full_like(block.up.bias, 0.5)[:, None].expand(-1, 8)
            time.sleep(2 * DELAY)
            written = computed(module)[:-1]
            errors.append(relative_error(written, [torch.full_like(weight, 0.5) for weight in written]))
    engine.destroy()
    # As weights are read, and as they are set.
    assert max(errors) < BOUND, errors


# How a caller registers a function that reads.
HOOKS = {
    "engine": lambda engine, read: engine.register_forward_pre_hook(read),
    "model, compiled with it": lambda engine, read: engine.module.register_forward_pre_hook(read),
    "model, uncompiled": lambda engine, read: engine.module.register_forward_pre_hook(torch.compiler.disable(read)),
    "block": lambda engine, read: engine.module.body.blocks[0].register_forward_pre_hook(read),
    "step": lambda engine, read: engine.optimizer.optimizer.register_step_post_hook(read),
}


@pytest.mark.options("compile.overlap_param_gather")
@vary("where", HOOKS)
@on_ranks(2)
def test_hooks(where):
    """A hook within a forward would read parameters for which nothing that runs before it waits. A hook of the
    optimizer's step would read parameters that are half of this step, where it runs when some were sent."""
    module = Around().to(device())
    engine, found = make_engine(module, Case(config={})), []

    def read(*_):
        found[:] = [parameter.detach().clone() for parameter in module.parameters()]

    HOOKS[where](engine, read)
    # Where nothing of the caller's runs in a step, it sends some parameters before it has stepped the others.
    with ranges_of(64), one_rank_late(DELAY):
        for step in range(3):
            found.clear()
            loss = engine(batch(step, 0, dist.get_rank(), 4))
            wait_for_parameters(engine)
            current = [parameter.detach().clone() for parameter in module.parameters()]
            if where != "step":
                assert relative_error(found, current) == 0.0
            engine.backward(loss)
            engine.step()
            if where == "step":
                # The optimizer steps the master weights, from which parameters get their values later.
                assert relative_error(found, current) == 0.0
    engine.destroy()


def tie_to_a_later_block(module):
    first, *_, last = module.body.blocks
    first.up.weight = last.up.weight


def tie_head_and_embedding(module):
    module.head.weight = module.body.embedding.weight


# What is tied behind each step.
TIES = (tie_to_a_later_block, tie_head_and_embedding, lambda _: None, lambda _: None)


@pytest.mark.options("compile.overlap_param_gather")
@on_ranks(2)
def test_tying():
    """A block waits for the parameters that it had at set-up. One that it gets later, of a unit that arrives behind
    its own, would be read before it has arrived."""
    built = []
    for _ in range(2):
        torch.manual_seed(0)
        built.append(Around().to(device()))
    module, plain = built
    case = Case(config={})
    engine, optimizer = make_engine(module, case), make_optimizer(plain, case)
    losses = []
    with one_rank_late(DELAY):
        for step, tie in enumerate(TIES):
            loss = engine(batch(step, 0, dist.get_rank(), 4))
            engine.backward(loss)
            engine.step()
            tie(module)
            losses.append(loss.detach())
    wait_for_parameters(engine)
    for step, tie in enumerate(TIES):
        expected = plain(batch(step, 0, dist.get_rank(), 4))
        assert relative_error([losses[step]], [expected]) < BOUND, step
        train_plain(plain, optimizer, step)
        tie(plain)
    assert relative_error(module.parameters(), plain.parameters()) < BOUND
    engine.destroy()


@on_ranks(2)
def test_what_differentiates_through_the_model():
    """A transform of torch.func wraps parameters without asking their class, so only the model's forward would wait
    for what it reads."""
    module, ids = Around().to(device()), batch(9, 0, 0, 4)
    engine = make_engine(module, Case(config={}))
    gradients = torch.func.grad(lambda values: torch.func.functional_call(module, values, (ids,)))
    with one_rank_late(DELAY):
        for step in range(3):
            train(engine, step)
            found = gradients(dict(module.named_parameters()))
            assert relative_error(found.values(), gradients(module.state_dict()).values()) == 0.0
            train(engine, step)
            for parameter in module.parameters():
                read, _ = torch.func.jvp(lambda value: value * 1, (parameter,), (torch.ones_like(parameter),))
                assert torch.equal(read, parameter)
    engine.destroy()


@on_ranks(1)
def test_dtensors():
    """A DTensor's values lie in another tensor, which is read past the DTensor's class. A trained one would stay as it
    was, and without this fork DeepSpeed raises an error of torch's that names no parameter."""
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    module = Around().to(device())
    mesh = init_device_mesh(device().type, (1,))
    module.head.weight = nn.Parameter(distribute_tensor(module.head.weight.detach(), mesh, [Replicate()]))
    assert not can_be_marked(module.head.weight)
    with pytest.raises(ValueError, match=r"head.weight is trained and made of other tensors \(DTensor\)"):
        make_engine(module, Case(config={}))


def products(module):
    return [parameter * 1 for parameter in module.parameters()]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs a GPU for each rank: peers read memory there alone")
@pytest.mark.options("compile.overlap_param_gather")
@vary("where", ["compiled", "hook"])
@on_ranks(3)
def test_writes_of_what_peers_read(where):
    """With copy engines peers read this rank's memory. A rank that has all parameters, and then writes them where
    nothing tells of the write, would change what a peer has yet to read, because that peer waited for a late rank."""
    module = Around(2048).to(device())
    engine = make_engine(module, Case(config={}))
    parameters, double = [*module.body.blocks.parameters()], torch.compile(double_all, backend="eager")
    # The hook runs behind the wait of the whole block, and compiled code behind its guards' wait.
    hook = module.body.blocks[0].register_forward_pre_hook(lambda block, _: double_all([*block.parameters()]))
    if where == "compiled":
        hook.remove()
    for step in range(4):
        engine.backward(engine(batch(step, 0, dist.get_rank(), 4)))
        if dist.get_rank() == 1:
            torch.cuda._sleep(10**9)
        engine.step()
        if where == "compiled":
            double(parameters)
        else:
            engine(batch(step, 1, dist.get_rank(), 4))
    wait_for_parameters(engine)
    for parameter in module.parameters():
        of_all = [torch.empty_like(parameter) for _ in range(3)]
        dist.all_gather(of_all, parameter.detach())
        assert all(torch.equal(parameter, other) for other in of_all), "ranks have other parameters"
    engine.destroy()


@torch.no_grad()
def double_all(parameters):
    for parameter in parameters:
        parameter.mul_(2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: a CPU has no streams")
@pytest.mark.options("compile.overlap_param_gather")
@vary("first", ["nobody", "eager", "compiled"])
@on_ranks(2)
def test_a_stream_of_the_callers(first):
    """A read would make only the stream wait on which parameters were sent, and a stream of the caller's that reads
    would get old values. Or it would find nothing to wait for, where a read or the guards of compiled code have waited
    on the first stream."""
    module = Around().to(device())
    engine, side, compiled = make_engine(module, Case(config={})), torch.cuda.Stream(), torch.compile(products)
    with one_rank_late(DELAY):
        for step in range(4):
            train(engine, step)
            # As in any program: the step's own stream comes first.
            side.wait_stream(torch.cuda.current_stream())
            if first != "nobody":
                (compiled if first == "compiled" else products)(module)
            with torch.cuda.stream(side):
                read = [parameter.detach().clone() for parameter in module.parameters()]
            wait_for_parameters(engine)
            torch.cuda.synchronize()
            assert relative_error(read, module.parameters()) == 0.0
    engine.destroy()

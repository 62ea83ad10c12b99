# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Training on streams other than the default one. Only on GPUs there are streams."""

import copy
import time
from typing import NamedTuple, Set

import pytest
import torch
import torch.distributed as dist

from deepspeed.compile.zero_1_and_2.gradient.native import reducer_module

from support.ids import vary
from support.reducers import register
from support.training import (
    BOUND,
    Case,
    average_gradients,
    batch,
    build,
    device,
    make_engine,
    make_optimizer,
    relative_error,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: a CPU has no streams"),
]
# With the former every gradient is held as it is, with the latter all are packed.
BUCKETS = [150, 10**6]
# Of the device's clock: about two seconds, in which the host runs far ahead, also where many workers share it.
CYCLES = 4 * 10**9


def beside_plain(case):
    """Returns a model and its engine, and a copy of the model with its optimizer, which a plain loop trains."""
    module = build(case)
    plain = copy.deepcopy(module)
    return module, make_engine(module, case), plain, make_optimizer(plain, case)


def step_plain(plain, optimizer):
    average_gradients(plain)
    optimizer.step()
    optimizer.zero_grad()


def end_beside(plain, engine):
    """Returns the error of the engine's parameters."""
    torch.cuda.synchronize()
    error = relative_error(engine.module.parameters(), plain.parameters())
    engine.destroy()
    return error


class Accumulated(NamedTuple):
    """What came of accumulating gradients over two streams."""

    error: float  # of the parameters beside a plain loop
    intact: bool  # whether what the first stream filled stayed as it was
    ahead: int  # in how many steps it was filled while the second stream was kept busy


class BeforeRanksAgree:
    """A reducer that calls a function when a backward has reduced all, just before the host waits for the device."""

    def __init__(self, reducer, function):
        self._reducer, self._function = reducer, function

    def __getattr__(self, name):
        return getattr(self._reducer, name)

    def finish_backward(self, reduces, completes):
        self._reducer.finish_backward(reduces, False)
        if completes:
            self._function()
        # There are no more gradients, and the ranks agree.
        return self._reducer.finish_backward(reduces, completes)


def accumulate_over_streams(case, how):
    """Of each step the last micro-batch runs on a second stream, and those before it on a first.

    The second stream waits for the first, as the caller has to see to, and is then kept busy, so that the host has
    called the whole backward before the device begins it. Meanwhile the first stream allocates memory and fills it:
    whatever that backward has given back too early. At a boundary it does so just before ranks agree, for which the
    host waits.

    Args:
        case: with gradient accumulation of 2 or more.
        how: "joined", where the last micro-batch uses every parameter; "unused", where it leaves out those of a block;
            "dropped", where ``zero_grad()`` comes behind that backward, and another one on the second stream behind it
            ends the step.
    """
    rank, (module, engine, plain, optimizer) = dist.get_rank(), beside_plain(case)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    busy_one = case.accumulation - (2 if how == "dropped" else 1)
    intact, ahead, filled = True, 0, []

    def fill():
        nonlocal ahead
        done = second.record_event()
        with torch.cuda.stream(first):
            filled.extend(torch.full_like(p, torch.nan) for p in module.parameters() for _ in range(4))
        first.synchronize()
        ahead += not done.query()

    life = engine.optimizer._deepcompile.backward
    if how != "dropped":
        life._reducer = BeforeRanksAgree(life._reducer, fill)
    for step in range(case.steps):
        for micro_step in range(case.accumulation):
            ids, skip = batch(step, micro_step, rank, 4), how == "unused" and micro_step == busy_one
            torch.cuda.synchronize()
            with torch.cuda.stream(first if micro_step < busy_one else second):
                loss = engine(ids, skip)
                if micro_step == busy_one:
                    torch.cuda._sleep(CYCLES)
                engine.backward(loss)
                # What keeps a graph alive keeps autograd's nodes, and the streams of these.
                del loss
                if micro_step == busy_one:
                    if how == "dropped":
                        engine.optimizer.zero_grad()
                        fill()
                    second.synchronize()
                    intact = intact and bool(filled) and all(bool(tensor.isnan().all()) for tensor in filled)
                    filled.clear()
                engine.step()
            (plain(ids, skip) / case.accumulation).backward()
            if how == "dropped" and micro_step == busy_one:
                optimizer.zero_grad()
        step_plain(plain, optimizer)
    return Accumulated(end_beside(plain, engine), intact, ahead)


@pytest.mark.parametrize("how", ["joined", "unused", "dropped"])
@vary("bucket", BUCKETS)
@pytest.mark.parametrize(
    "model, backend", [("OneGraph", "eager"), ("OneGraph", "inductor"), ("EagerBlocks", "eager"), ("Wide", "eager")]
)
def test_micro_batches_on_two_streams(ranks, model, backend, bucket, how):
    """The first stream would get memory back that the second, which runs behind, has still to read."""
    case = Case(model=model, backend=backend, bucket=bucket, accumulation=3 if how == "dropped" else 2, steps=4)
    for result in ranks(2).run(accumulate_over_streams, case, how):
        # The first steps compile.
        assert result.ahead >= 2, "the host was behind the device, so nothing was shown"
        assert result.intact, "memory was written to after it had been given to others"
        assert result.error < BOUND


@pytest.mark.parametrize("how", ["joined", "unused", "dropped"])
def test_targets_of_two_streams(ranks, how):
    """A target would belong to the stream that allocated it, and be used again while another stream adds to it."""
    case = Case(stage=2, accumulation=3 if how == "dropped" else 2, steps=4)
    for result in ranks(2).run(accumulate_over_streams, case, how):
        assert result.ahead >= 2 and result.intact
        assert result.error < BOUND


class InASideStream(NamedTuple):
    """What was seen of an engine in a side stream."""

    error: float  # of the parameters beside a plain loop
    streams: Set[str]  # on which a hook saw gradients
    waited: bool  # whether the side stream waited in the last backward for what the default one was doing
    # Bytes that the second to last backward has given back but that may not be used again yet, because they were
    # marked as used on a stream besides their own.
    deferred: int


def train_in_a_side_stream(case):
    """Trains in a side stream an engine that was compiled in the default one."""
    rank, module = dist.get_rank(), build(case)
    plain = copy.deepcopy(module)
    side, default, streams = torch.cuda.Stream(), torch.cuda.default_stream(), set()

    def watch(_):
        stream = torch.cuda.current_stream()
        streams.add({side: "side", default: "default"}.get(stream, "another"))

    module.head.weight.register_hook(watch)
    engine, optimizer = make_engine(module, case), make_optimizer(plain, case)
    streams.clear()
    side.wait_stream(default)
    with torch.cuda.stream(side):
        for step in range(case.steps):
            for micro_step in range(case.accumulation):
                ids = batch(step, micro_step, rank, 4)
                loss = engine(ids)
                at_last = micro_step == case.accumulation - 1
                if at_last and step == case.steps - 2:
                    torch.cuda.synchronize()
                    before = _deferred_bytes()
                    torch.cuda._sleep(CYCLES)
                if at_last and step == case.steps - 1:
                    with torch.cuda.stream(default):
                        torch.cuda._sleep(CYCLES)
                    default_done = default.record_event()
                engine.backward(loss)
                if at_last and step == case.steps - 2:
                    deferred = _deferred_bytes() - before
                if at_last and step == case.steps - 1:
                    side.synchronize()
                    waited = default_done.query()
                engine.step()
                (plain(ids) / case.accumulation).backward()
            step_plain(plain, optimizer)
    return InASideStream(end_beside(plain, engine), streams, waited, deferred)


def _deferred_bytes():
    # An allocation has the allocator look at what may be used again by now.
    torch.empty(1, device="cuda")
    statistics = torch.cuda.memory_stats()
    return statistics["active_bytes.all.current"] - statistics["allocated_bytes.all.current"]


@pytest.mark.parametrize("model", ["OneGraph", "EagerBlocks"])
@vary("stage, accumulation", [(1, 1), (1, 2), (2, 2)])
def test_training_in_a_side_stream(ranks, stage, accumulation, model):
    """The reducer would work on the default stream, and have the caller's wait for it."""
    case = Case(model=model, stage=stage, accumulation=accumulation, steps=4)
    for seen in ranks(2).run(train_in_a_side_stream, case):
        assert seen.error < BOUND
        assert seen.streams == {"side"}
        assert not seen.waited, "the side stream waited for the default one"
        assert seen.deferred == 0


class FailedSend(NamedTuple):
    """What a rank saw of a bucket of which one message could not be sent."""

    message: str
    intact: bool  # whether memory that was allocated after the bucket's stayed as it was filled


def memory_after_a_send_that_failed(numel=2**20):
    """NCCL cannot send the second of two gradients. The first is on its way then, and rank 0 answers late."""
    rank = dist.get_rank()
    reducer = reducer_module().Reducer(
        identity=10**9,
        bucket_numel=4 * numel,
        send_numel=4 * numel,
        overlap=True,
        synchronize_before=False,
        synchronize_after=False,
    )
    parameters = [torch.nn.Parameter(torch.zeros(numel, device=device())) for _ in range(2)]
    # Gradients are sent in the reverse of this order, each to the rank of its number.
    register(reducer, dist.group.WORLD, parameters, dtypes=(torch.int16, torch.float32))
    registrations = torch.tensor([10**9, 0, 1])
    # NCCL makes its communicator in the first collective.
    dist.all_reduce(torch.zeros(1, device=device()))
    torch.cuda.synchronize()
    if rank == 0:
        time.sleep(2)
    reducer.begin_backward(True)
    message = ""
    try:
        for position in (2, 1):
            gradient = torch.full((numel,), 1.0, device=device())
            torch.ops.deepcompile.reduce_grad(gradient, registrations, position, True)
            del gradient
        reducer.finish_backward(True, False)
    except (RuntimeError, TypeError) as error:
        message = str(error)
    reducer.abandon_backward()
    filled = [torch.full((numel,), 7.0, device=device()) for _ in range(4)]
    torch.cuda.synchronize()
    intact = all(bool((tensor == 7.0).all()) for tensor in filled)
    reducer.close()
    return FailedSend(message, intact)


def test_memory_of_a_send_that_failed_is_not_used_again_too_early(ranks):
    """The bucket of a send that raised half way would be freed while its first message is still read."""
    for seen in ranks(2).run(memory_after_a_send_that_failed):
        assert "not supported for NCCL" in seen.message
        assert seen.intact


def scale_in_a_region_on_another_stream(case):
    """Each backward of a region runs on a side stream, and the default one, which is kept busy, scales its sums.

    Returns the error of the parameters beside a plain loop.
    """
    rank, (module, engine, plain, optimizer) = dist.get_rank(), beside_plain(case)
    side = torch.cuda.Stream()
    for step in range(case.steps):
        ids = batch(step, 0, rank, 4)
        torch.cuda.synchronize()
        with engine.coalesce_grad_reduction():
            with torch.cuda.stream(side):
                engine.backward(engine(ids))
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda._sleep(CYCLES)
            scaled = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
            assert scaled
            torch._foreach_mul_(scaled, 1 / (1 + step))
        engine.step()
        plain(ids).backward()
        torch._foreach_mul_([parameter.grad for parameter in plain.parameters()], 1 / (1 + step))
        step_plain(plain, optimizer)
    return end_beside(plain, engine)


def test_sums_that_another_stream_scales(ranks):
    """The stream that used the gradients last would reduce sums that the caller's stream has still to scale."""
    for error in ranks(2).run(scale_in_a_region_on_another_stream, Case(steps=4)):
        assert error < BOUND

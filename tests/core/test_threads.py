# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Every public method of the native reducer may be called from any thread. ``make sanitize`` runs these too.

There is no engine around the reducer, so that nothing orders the calls but the reducer itself.
"""

import collections
import datetime
import functools
import gc
import itertools
import threading
import time
import zlib

import pytest
import torch
import torch.distributed as dist

from deepspeed.compile.zero_1_and_2.gradient.native import reducer_module

from support.meeting import new_store
from support.on_ranks import on_ranks
from support.reducers import register
from support.threads import in_threads, meanwhile
from support.training import device

pytestmark = pytest.mark.sanitized

ELEMENTS = 12


@functools.cache
def alone():
    """A process group of this rank only: what it reduces is bound at once, in whichever order threads come."""
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


@functools.cache
def together(count):
    """Process groups of all ranks, one a thread, so that each thread's collectives have an order of their own."""
    return [dist.new_group() for _ in range(count)]


_numbers = collections.defaultdict(itertools.count)


def identity_in(process_group):
    """A number that no other reducer of this process has and that is the same on every rank, as engines have one."""
    name = process_group.group_name
    return 10**6 * (1 + zlib.crc32(name.encode())) + next(_numbers[name])


class Registered:
    """A reducer and the parameters that it knows, all of one shape."""

    def __init__(self, process_group, count, flat=True, bucket=3 * ELEMENTS):
        self.parameters = [torch.nn.Parameter(torch.ones(ELEMENTS, device=device())) for _ in range(count)]
        self.reducer = reducer_module().Reducer(
            identity=identity_in(process_group),
            bucket_numel=bucket,
            send_numel=bucket,
            overlap=True,
            synchronize_before=False,
            synchronize_after=False,
        )
        self.registrations = torch.tensor([self.reducer.identity, *range(count)])
        self.world = process_group.size()
        self.numel = register(self.reducer, process_group, self.parameters, flat)

    def reduce(self, parameter, value):
        """As a compiled graph does."""
        position = 1 + next(index for index, other in enumerate(self.parameters) if other is parameter)
        torch.ops.deepcompile.reduce_grad(torch.full_like(parameter, value), self.registrations, position, True)

    def finish(self, expected):
        """Ends a step's last backward; whether each element of this rank's partition is ``expected``."""
        (handed_over,) = self.reducer.finish_backward(True, True)
        targets = handed_over.targets()
        right = all(bool((target == expected).all()) for target in targets.values())
        numel = sum(target.numel() for target in targets.values())
        self.reducer.release(0)
        return right and numel == self.numel


@pytest.mark.quick
@pytest.mark.parametrize("flat", [False, True], ids=["where-reduced", "flat"])
@pytest.mark.parametrize("route", ["graph", "autograd"])
@on_ranks(2)
def test_gradients_from_several_threads(route, flat):
    """Two threads would add to one target at once, so that one of their gradients is lost."""
    registered = Registered(alone(), count=8, flat=flat)

    def give(first):
        for parameter in registered.parameters[first::4]:
            for value in (1.0, 2.0):
                if route == "graph":
                    registered.reduce(parameter, value)
                else:
                    (parameter * value).sum().backward()

    with meanwhile(lambda: (registered.reducer.counters(), registered.reducer.in_backward)) as calls:
        for _ in range(20):
            registered.reducer.begin_backward(True)
            in_threads([functools.partial(give, first) for first in range(4)])
            assert registered.finish(3.0)
    assert len(calls) > 0
    assert registered.reducer.counters()["from_graphs" if route == "graph" else "from_autograd"] == 20 * 8 * 2
    registered.reducer.close()


@pytest.mark.core
@pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL may wait for ever where communicators are used at once")
@on_ranks(2)
def test_reducers_in_several_threads():
    """Reducers would share state of the process without a lock while other threads make and close theirs."""
    right = []

    def train(process_group, closes):
        for _ in range(10):
            registered = Registered(process_group, count=6, flat=closes)
            registered.reducer.begin_backward(True)
            for index, parameter in enumerate(registered.parameters):
                if index % 2:
                    registered.reduce(parameter, 4.0)
                else:
                    (parameter * 4.0).sum().backward()
            right.append(registered.finish(4.0))
            if closes:
                registered.reducer.close()
            # Else the last reference to it closes it.
            del registered

    groups = together(3)
    in_threads([functools.partial(train, group, index > 0) for index, group in enumerate(groups)])
    gc.collect()
    assert right == [True] * 3 * 10


def _closed_once(route, how):
    """A reducer is closed, by one thread or two at once, or dropped, while another thread is in a backward.

    Returns what errors the backward raised.
    """
    registered, begun, closed, messages = Registered(alone(), count=8), threading.Event(), threading.Event(), set()
    registered.reducer.begin_backward(True)

    def backward():
        last = False
        while not last:
            # Once more when it is closed.
            last = closed.is_set()
            for parameter in registered.parameters:
                try:
                    if route == "graph":
                        registered.reduce(parameter, 1.0)
                    else:
                        parameter.sum().backward()
                except (RuntimeError, IndexError) as error:
                    messages.add(str(error).splitlines()[0])
            begun.set()
            # Else it may have the reducer's lock back before a thread that waits for it wakes up, for minutes.
            time.sleep(0.001)

    thread = threading.Thread(target=backward)
    thread.start()
    begun.wait()
    if how != "drop":
        in_threads([registered.reducer.close] * (2 if how == "close twice" else 1) + [registered.reducer.counters])
    registered.reducer = None
    closed.set()
    thread.join()
    if route == "autograd":
        assert all(parameter.grad is not None for parameter in registered.parameters), "a gradient was lost"
    return messages


@pytest.mark.parametrize("how", ["close", "close twice", "drop"], ids=["close", "close-twice", "drop"])
@pytest.mark.parametrize("route", ["graph", "autograd"])
@on_ranks(2)
def test_a_reducer_closed_during_a_backward(route, how):
    """A thread would wait for ever, or write into memory that is gone, where another closes its reducer."""
    messages = {message for _ in range(10) for message in _closed_once(route, how)}
    # A gradient has nowhere to go then, but for that of code outside of graphs, which stays with its parameter.
    assert messages or route == "autograd"
    assert [message for message in messages if "destroyed" not in message] == []


def calls_of(registered):
    """Calls that wait for the reducer's mutex, by name."""
    gradient, reducer = torch.ones(ELEMENTS, device=device()), registered.reducer
    return {
        "operator": lambda: torch.ops.deepcompile.reduce_grad(gradient, registered.registrations, 1, False),
        "generated code": lambda: reducer_module().reduce_grad(gradient, registered.registrations, 1, False),
        "accumulation": lambda: (registered.parameters[0] * 2).sum().backward(),
        "method": reducer.follow_stream,
    }


@pytest.mark.parametrize("name", ["operator", "generated code", "accumulation", "method"])
@on_ranks(2, timeout=120)
def test_who_waits_for_the_reducer_does_not_hold_the_interpreter(name):
    """The thread that has the reducer could not go on if it needs the interpreter: counters() and checkpoints do."""
    store, key, right = new_store(), "go on", []
    (group,) = together(1)
    registered = Registered(group, count=2)
    registered.reducer.begin_backward(True)
    for parameter in registered.parameters:
        registered.reduce(parameter, 3.0)
    if dist.get_rank() == 1:
        store.wait([key], datetime.timedelta(seconds=30))
        right.append(registered.finish(3.0))
    else:
        # One thread waits in the reducer for the other rank, and holds the mutex. Another one makes the call. This
        # thread lets the other rank go on, which is possible only if no thread has kept the interpreter.
        call = calls_of(registered)[name]
        threads = [
            threading.Thread(target=lambda: right.append(registered.finish(3.0))),
            threading.Thread(target=call),
        ]
        for thread in threads:
            thread.start()
            time.sleep(0.1)
        store.set(key, "")
        for thread in threads:
            thread.join()
    registered.reducer.close()
    assert right == [True]

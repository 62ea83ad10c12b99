# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What the ranks do in ``test_loss_graph.py``."""

import contextlib
import copy

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from deepspeed.compile.zero12 import gradient_counters
from deepspeed.compile.zero12.graph import loss as loss_graph

from support.models import VOCABULARY
from support.training import average_gradients, batch, build, device, make_engine, make_optimizer, relative_error


@contextlib.contextmanager
def large_from(numel):
    """Takes tensors from so many elements on for large. Yields a list with an entry for each graph that is cut."""
    cuts, split, before = [], loss_graph.split_loss, loss_graph.LARGE_NUMEL

    def recording(*args):
        result = split(*args)
        if result is not None:
            cuts.append(result)
        return result

    loss_graph.split_loss, loss_graph.LARGE_NUMEL = recording, numel
    try:
        yield cuts
    finally:
        loss_graph.split_loss, loss_graph.LARGE_NUMEL = split, before


def step_loss(outputs, uses_logits):
    loss, logits = outputs
    return loss + logits.square().mean() if uses_logits else loss


def train(case, uses_logits, numel):
    """(graphs that were cut, gradients from graphs, error of the parameters)."""
    torch._dynamo.reset()
    module = build(case)
    plain = copy.deepcopy(module)
    with large_from(numel) as cuts:
        engine = make_engine(module, case)
        optimizer = make_optimizer(plain, case)
        for step in range(4):
            # From the third step on of other lengths than before.
            ids = batch(step, 0, dist.get_rank(), 4 if step < 2 else 5)
            # In every second step only, so that the same graph sees both.
            used = uses_logits and step % 2 == 1
            engine.backward(step_loss(engine(ids), used))
            engine.step()
            step_loss(plain(ids), used).backward()
            average_gradients(plain)
            optimizer.step()
            optimizer.zero_grad()
    error = relative_error(module.parameters(), plain.parameters())
    from_graphs = gradient_counters(engine)["from_graphs"]
    engine.destroy()
    return len(cuts), from_graphs, error


def train_with_other_lengths(case):
    """(graphs that this rank cut, error of the parameters). Only the second rank's logits are large."""
    torch._dynamo.reset()
    module = build(case)
    plain = copy.deepcopy(module)
    rank = dist.get_rank()
    with large_from(2 * 8 * VOCABULARY) as cuts:
        engine = make_engine(module, case)
        optimizer = make_optimizer(plain, case)
        for step in range(4):
            ids = batch(step, 0, rank, 4 + 4 * rank + step // 2)
            engine.backward(engine(ids)[0])
            engine.step()
            plain(ids)[0].backward()
            average_gradients(plain)
            optimizer.step()
            optimizer.zero_grad()
    error = relative_error(module.parameters(), plain.parameters())
    engine.destroy()
    return len(cuts), error


def large_allocations(case, numel):
    """How often a backward allocates as much as the logits take."""
    torch._dynamo.reset()
    module = build(case)
    with large_from(numel):
        engine = make_engine(module, case)
        for _ in range(2):
            ids = torch.zeros(2, 4000, dtype=torch.long, device=device())
            loss, logits = engine(ids)
            size = logits.nbytes
            del logits
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
            with profile(activities=activities, profile_memory=True) as profiler:
                engine.backward(loss)
            engine.step()
    engine.destroy()
    events = profiler.profiler.kineto_results.events()
    return sum(event.name() == "[memory]" and size <= event.nbytes() < size + 1024 for event in events)

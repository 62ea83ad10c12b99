# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What the ranks do in ``test_graphs.py``."""

import copy

import torch
import torch._functorch.config
import torch.distributed as dist

from deepspeed.compile.zero12 import gradient_counters
from deepspeed.compile.zero12.graph import backend as reduce_backend

from support.training import batch, build, make_engine


def backward_graphs(case):
    """Returns, for each backward graph in the order of compilation, what its nodes do; and the held buckets.

    An entry is (graph id, release flag given, reductions, end_backward calls as (reductions, id, flag), whether each
    reduction waits for the one before, whether all reduced gradients are hidden from autograd).
    """
    torch._dynamo.reset()
    # A graph that torch had kept would not be made here. The machine code of its kernels may come from where it likes.
    torch._inductor.config.fx_graph_cache = torch._functorch.config.enable_autograd_cache = False
    entries = []
    finish = reduce_backend.finish_backward_graph

    def recording(backward, graph_id, release):
        finish(backward, graph_id, release)
        nodes = list(backward.graph.nodes)
        reductions = [n for n in nodes if n.target == torch.ops.deepcompile.reduce_grad.default]
        ends = [n for n in nodes if n.target == torch.ops.deepcompile.end_backward.default]
        chained = all(later.args[3] is earlier for earlier, later in zip(reductions, reductions[1:]))
        outputs = next(n for n in nodes if n.op == "output").args[0]
        entries.append(
            (
                graph_id,
                release,
                len(reductions),
                [(len(n.args[0]) - 1, n.args[1], n.args[2]) for n in ends],
                chained,
                not any(n in reductions for n in outputs),
            )
        )

    reduce_backend.finish_backward_graph = recording
    try:
        engine = make_engine(build(case), case)
        buckets = []
        for step in range(2):
            engine.backward(engine(batch(step, 0, dist.get_rank(), 4)))
            buckets.append(gradient_counters(engine)["bucket"])
            engine.step()
        engine.destroy()
    finally:
        reduce_backend.finish_backward_graph = finish
        torch._inductor.config.fx_graph_cache = torch._functorch.config.enable_autograd_cache = True
    return copy.deepcopy(entries), buckets


def cached_again(case):
    """Compiles the same model twice from a clean state; returns torch's cache counters of both times."""
    from torch._dynamo.utils import counters

    seen = []
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        engine = make_engine(build(case), case)
        engine.backward(engine(batch(0, 0, dist.get_rank(), 4)))
        reduced = gradient_counters(engine)["from_graphs"]
        engine.step()
        engine.destroy()
        seen.append((dict(counters["inductor"]), dict(counters["aot_autograd"]), reduced))
    return seen

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Times what a step with the optimizer on the host is made of, each part alone.

From the root of the repository::

    deepspeed --module benchmarks.host                             on all GPUs of this machine
    deepspeed --num_accelerators 2 --module benchmarks.host --numel 4194304      on a CPU, in two processes

All processes work at the same time, as ranks do, and share the processor's cores. Each figure is the fastest of the
repetitions on the slowest rank, in nanoseconds for each element of a partition, or in GB/s for a link.

**What was measured.** With the optimizer on the host, a step of Qwen3-8B on 2 GPUs takes at least 1.85 s: 0.50 until
the backward ends, and 1.35 for 32 bytes of each of 8.19 billion elements at the host's 194 GB/s. A step whose ranges
DeepSpeedCPUAdam stepped takes 1.59 of that (2.938 s: docs/results/tables.md). DeepSpeedCPUAdam cannot scale or cast:
on that host (32 cores, 2 H200s, 2026-11-23) a range with both casts takes 0.494 ns an element, the norm 0.055, and
Adam alone 0.289. Adam in one pass was not timed in a step there. Of the time in ranges it takes:

- 0.73 on 16 cores (one H200, 2^28 elements, 2026-11-26): 0.245 and 0.337 ns an element, the norm 0.041, and Adam alone
  0.180, which is 28 bytes at 155 GB/s; copies to and from the device run at 55 GB/s.
- 0.57 to 0.75 on two cores of an AMD EPYC (one rank, ``--numel 134217728``, 4 runs, 2026-11-25), and 0.62 and 0.67 on
  two ranks of ``--numel 67108864``; on another such machine 1.03 to 1.16, and 0.83 with 2^24 elements. These are of an
  earlier pass. Today's takes 0.76 to 0.84 of that one's time (two busy cores of that kind, 2^25 and 2^26 elements,
  2026-11-26).
"""

import argparse
import functools
import os
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from .devices import on_gpus, synchronize
from .parts import step_partition
from .steps import leave, say


def seconds(function: Callable[[], object], repetitions: int) -> float:
    """Returns the least seconds that ``function`` took, on the slowest rank. All ranks call it at the same time."""
    fastest = float("inf")
    for _ in range(repetitions + 1):
        dist.barrier()
        begun = time.perf_counter()
        function()
        synchronize()
        took = torch.tensor(time.perf_counter() - begun)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        fastest = min(fastest, took.item())
    return fastest


def measure(numel: int, repetitions: int) -> Iterator[tuple[str, float]]:
    """Yields the name of each part, and nanoseconds for each element or GB/s, as soon as it is measured.

    Args:
        numel: elements of a partition.
        repetitions: how often to time each part, after a first time that does not count more than the others.
    """
    from deepspeed.accelerator import get_accelerator
    from deepspeed.compile.features.update.adam import OnePassAdam
    from deepspeed.compile.zero_1_and_2.step.norm import sum_of_squares
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    gradient = get_accelerator().pin_empty(numel, dtype=torch.bfloat16, device="cpu").normal_()
    master = torch.nn.Parameter(torch.randn(numel, device="cpu"))
    adam = DeepSpeedCPUAdam([master], lr=1e-5)
    sent = torch.empty(numel, dtype=torch.bfloat16, device="cuda" if on_gpus() else "cpu")
    factor = torch.full((1,), 0.5)

    def send(first, last):
        sent[first:last].copy_(gradient[first:last], non_blocking=True)

    def step(updates):
        # The new parameters are written over the gradients, as in a step.
        step_partition(adam, updates, {0: gradient}, factor, gradient, send)

    def adam_alone():
        master.grad = master.data
        adam.step()
        master.grad = None

    elements = {
        "norm": lambda: sum_of_squares([gradient]),
        "ranges: cast, scale, Adam, cast back, send": lambda: step(None),
        "one compiled pass, send": functools.partial(step, OnePassAdam()),
        "Adam alone, of the whole partition": adam_alone,
    }
    for name, part in elements.items():
        figure = seconds(part, repetitions) / numel * 1e9
        yield name, figure
    # Adam alone, the last part, reads three fp32 tensors and a gradient, and writes three.
    yield "host memory under Adam alone, all ranks, GB/s", 28 * dist.get_world_size() / figure
    if on_gpus():
        links = {
            "to the host, each rank, GB/s": lambda: gradient.copy_(sent, non_blocking=True),
            "to the device, each rank, GB/s": lambda: sent.copy_(gradient, non_blocking=True),
        }
        for name, copy in links.items():
            yield name, 2 * numel / seconds(copy, repetitions) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(prog="deepspeed --module benchmarks.host", description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=2**28, help="elements of a rank's partition")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # given by the launcher
    options = parser.parse_args()
    if on_gpus():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_num_threads(max(1, os.cpu_count() // int(os.environ["WORLD_SIZE"])))
    # Ranks wait for each other on the host, so gloo serves GPUs too.
    dist.init_process_group("gloo")
    for name, figure in measure(options.numel, options.repetitions):
        say(f"{name:50} {figure:8.3f}")
    leave()


if __name__ == "__main__":
    main()

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Times the collectives of a step, each size alone, to compare a machine with the model of docs/results/scale.md.

From the root of the repository::

    deepspeed --module benchmarks.collectives --json FILE                      on all GPUs of this machine
    deepspeed --num_accelerators 2 --module benchmarks.collectives --largest 18    on a CPU, in two processes

Sizes are powers of two of bf16 elements, all ranks' parts together, less what the ranks cannot share equally. A group
holds one message of equal size for each rank, which that rank owns. Each time is the median of the repetitions on the
slowest rank.
"""

import argparse
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from .devices import on_gpus, synchronize
from .steps import Clock, leave, say


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if on_gpus() else torch.device("cpu")


def in_a_group(collective: Callable[[torch.Tensor, int], dist.Work], parts: tuple[torch.Tensor, ...]) -> None:
    """Starts one collective for each part, owned by the rank of the part's number, and waits for all."""
    from deepspeed.compile.zero_1_and_2.parameter.carrier import grouped

    with grouped(dist.group.WORLD, device()) as works:
        for owner, part in enumerate(parts):
            works.append(collective(part, owner))
    for work in works:
        work.wait()


def collectives(elements: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Returns name -> a function that runs the collective on these elements once."""
    ranks = dist.get_world_size()
    parts = elements.chunk(ranks)
    own = parts[dist.get_rank()]
    # gloo has no average. The time is that of a sum.
    mean = dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM
    gathered = torch.empty_like(elements)
    return {
        "reduce": lambda: dist.reduce(elements, 0, mean),
        "broadcast": lambda: dist.broadcast(elements, 0),
        "reduces, one after the other": lambda: [dist.reduce(part, owner, mean) for owner, part in enumerate(parts)],
        "reduces in a group": lambda: in_a_group(
            lambda part, owner: dist.reduce(part, owner, mean, async_op=True), parts
        ),
        "broadcasts, one after the other": lambda: [dist.broadcast(part, owner) for owner, part in enumerate(parts)],
        "broadcasts in a group": lambda: in_a_group(
            lambda part, owner: dist.broadcast(part, owner, async_op=True), parts
        ),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(gathered[: own.numel()], elements, mean),
        "all-gather": lambda: dist.all_gather_into_tensor(gathered, own),
        "all-reduce": lambda: dist.all_reduce(elements, mean),
    }


def seconds(collective: Callable[[], object], repetitions: int) -> float:
    """Returns the median of the seconds of ``repetitions`` runs that follow each other, on the slowest rank."""
    for _ in range(2):
        collective()
    synchronize()
    dist.barrier()
    clock = Clock()
    clock.mark()
    for _ in range(repetitions):
        collective()
        clock.mark()
    took = torch.tensor(statistics.median(clock.seconds()), dtype=torch.float64, device=device())
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return took.item()


def measure(smallest: int, largest: int, repetitions: int) -> dict[str, dict[int, float]]:
    """Returns collective -> bytes -> seconds. ``smallest`` and ``largest`` are powers of two, in elements."""
    found: dict[str, dict[int, float]] = {}
    for power in range(smallest, largest + 1):
        numel = 2**power // dist.get_world_size() * dist.get_world_size()
        elements = torch.zeros(numel, dtype=torch.bfloat16, device=device())
        for name, collective in collectives(elements).items():
            found.setdefault(name, {})[elements.nbytes] = seconds(collective, repetitions)
    return found


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deepspeed --module benchmarks.collectives", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--smallest", type=int, default=16, help="a power of two, in elements")
    parser.add_argument("--largest", type=int, default=29, help="a power of two, in elements")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--json", type=Path, help="the file to write")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # given by the launcher
    return parser


def main() -> None:
    options = parser().parse_args()
    if on_gpus():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpus() else "gloo")
    found = measure(options.smallest, options.largest, options.repetitions)
    sizes = list(next(iter(found.values())))
    say("microseconds".ljust(34) + "".join(f"{size / 2**20:10.3g}" for size in sizes) + "  MiB")
    for name, times in found.items():
        say(name.ljust(34) + "".join(f"{1e6 * took:10.1f}" for took in times.values()))
    if options.json and dist.get_rank() == 0:
        options.json.write_text(json.dumps({"ranks": dist.get_world_size(), "seconds": found}, indent=1))
    leave()


if __name__ == "__main__":
    main()

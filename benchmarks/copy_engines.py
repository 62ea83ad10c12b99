# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Times matrix products while a unit of gradients or parameters moves between GPUs: by NCCL, or by copy engines.

From the root of the repository, on two or more GPUs of one host::

    torchrun --nproc_per_node 2 -m benchmarks.copy_engines --json FILE

NCCL's kernels take streaming multiprocessors (SMs) from the products beside them. A copy engine takes none: a rank
maps its peers' memory (symmetric memory, or CUDA IPC) and pulls what it needs. For gradients, a rank pulls its shard
of each peer's unit, and a kernel adds the shards in fp32. For parameters, a rank pulls each peer's shard.

The last part says what it costs to wait for a peer, and what becomes of a rank whose peer does not come.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

# Multicast of NVLink stays off: a program that uses it can take the GPUs of other programs out of service.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

# Matrix products, M x N x K: one that fills the GPU for long, and one of a block of Qwen3-8B with 4096 tokens.
PRODUCTS_OF = ((8192, 8192, 8192), (4096, 12288, 4096))
UNIT_BYTES = 400_000_000  # of a unit, about a block of Qwen3-8B
MILLISECONDS = 60  # of products in one measurement, about

Move = Callable[[], object]


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


class SymmetricUnit:
    """A unit in memory that every rank of the host has mapped by torch's symmetric memory."""

    name = "symmetric memory"

    def __init__(self, numel: int):
        device = torch.device("cuda", torch.cuda.current_device())
        self.memory = symmetric_memory.empty(numel, dtype=torch.bfloat16, device=device)
        self.handle = symmetric_memory.rendezvous(self.memory, dist.group.WORLD)

    def of_rank(self, rank: int) -> torch.Tensor:
        """Returns a rank's unit, [numel]."""
        return self.handle.get_buffer(rank, self.memory.shape, self.memory.dtype)

    def barrier(self) -> None:
        """Makes the current stream wait until every rank's stream has come here."""
        self.handle.barrier()


class IpcUnit:
    """A unit whose memory ranks have mapped by CUDA IPC. Its barrier is an all-reduce of one number."""

    name = "CUDA IPC"

    def __init__(self, numel: int):
        self.memory = torch.empty(numel, dtype=torch.bfloat16, device="cuda")
        from torch.multiprocessing.reductions import reduce_tensor

        torch.cuda.synchronize()
        rebuilds: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(rebuilds, reduce_tensor(self.memory))
        self._of_ranks = [
            self.memory if rank == dist.get_rank() else rebuild(*args) for rank, (rebuild, args) in enumerate(rebuilds)
        ]
        self._number = torch.zeros(1, device="cuda")

    def of_rank(self, rank: int) -> torch.Tensor:
        return self._of_ranks[rank]

    def barrier(self) -> None:
        dist.all_reduce(self._number)


def pulls(unit: Any, gathers: bool = False, add_on: torch.cuda.Stream | None = None, adds: bool = False) -> Move:
    """Returns a function that pulls shards of peers.

    Args:
        unit: mapped memory of all ranks.
        gathers: whether shards of parameters are pulled, rather than of gradients.
        adds: whether the pulled shards of gradients are added in fp32.
        add_on: the stream that adds them; None: the one that pulls.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shard = unit.memory.numel() // ranks
    peers = [(rank + step) % ranks for step in range(1, ranks)]
    staging = torch.empty(ranks - 1, shard, dtype=torch.bfloat16, device="cuda")
    whole = torch.empty_like(unit.memory)
    total = torch.empty(shard, dtype=torch.float32, device="cuda")

    @torch.compile
    def add(own, pulled, out):
        out.copy_((own.float() + pulled.float().sum(0)) / ranks)

    def gather():
        unit.barrier()
        for peer in peers:
            part = slice(peer * shard, (peer + 1) * shard)
            whole[part].copy_(unit.of_rank(peer)[part], non_blocking=True)
        unit.barrier()

    def reduce():
        unit.barrier()
        own = slice(rank * shard, (rank + 1) * shard)
        for index, peer in enumerate(peers):
            staging[index].copy_(unit.of_rank(peer)[own], non_blocking=True)
        unit.barrier()
        if add_on is not None:
            add_on.wait_stream(torch.cuda.current_stream())
        if adds:
            with torch.cuda.stream(add_on):
                add(unit.memory[own], staging, total)

    return gather if gathers else reduce


def collectives(numel: int) -> dict[str, Move]:
    """Returns name -> a function that sends a unit by NCCL once."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    unit = torch.zeros(numel, dtype=torch.bfloat16, device="cuda")
    out = torch.zeros_like(unit)
    shard = unit.chunk(ranks)[rank]
    mean = dist.ReduceOp.AVG
    owners = iter(range(10**9))
    return {
        "NCCL reduce to owners in turn": lambda: dist.reduce(unit, next(owners) % ranks, mean),
        "NCCL reduce-scatter": lambda: dist.reduce_scatter_tensor(out[: shard.numel()], unit, mean),
        "NCCL broadcast from owners in turn": lambda: dist.broadcast(unit, next(owners) % ranks),
        "NCCL all-gather": lambda: dist.all_gather_into_tensor(out, shard),
    }


def events(count: int) -> list[torch.cuda.Event]:
    return [torch.cuda.Event(enable_timing=True) for _ in range(count)]


def beside(
    move: Move | None,
    product: Move,
    each_ms: float,
    repeats: int | None = None,
    stream: torch.cuda.Stream | None = None,
) -> tuple[float, float]:
    """Returns milliseconds of a product while a move repeats on another stream, and of a move while products run.

    Each is a median on the slowest rank. Only products that lie within the moves count, and moves within the products.

    Args:
        move: or None, for products alone.
        product: starts one, on the current stream.
        each_ms: how long a product takes alone.
        repeats: of the move, in the time of all products; None: three times as many as fit if each takes 0.5 ms.
        stream: of the moves.
    """
    compute, other = torch.cuda.current_stream(), stream or torch.cuda.Stream(priority=-1)
    count = max(int(MILLISECONDS / each_ms), 20)
    repeats = repeats or max(6 * MILLISECONDS, count)
    products, moves = events(count + 1), events(repeats + 1)
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    start = torch.cuda.Event(enable_timing=True)
    start.record()
    other.wait_event(start)
    begun = 0
    # The host queues moves and products in turn, so that neither stream runs dry.
    for number in range(repeats):
        if move is not None:
            with torch.cuda.stream(other):
                moves[number].record()
                move()
                moves[number + 1].record()
        while begun < count and begun * repeats <= number * count * 2:
            products[begun].record()
            product()
            begun += 1
            products[begun].record()
    compute.synchronize()
    torch.cuda.synchronize()

    def spans(marks):
        times = [start.elapsed_time(mark) for mark in marks]
        return list(zip(times, times[1:]))

    of_products = spans(products[: begun + 1])
    of_moves = spans(moves) if move is not None else [(0.0, 1e9)]
    begin = max(of_products[2][0], of_moves[min(1, len(of_moves) - 1)][0])
    end = min(of_products[-1][1], of_moves[-1][1])
    within = [b - a for a, b in of_products if a >= begin and b <= end] or [float("nan")]
    moved = [b - a for a, b in of_moves if a >= begin and b <= end] or [float("nan")]
    found = torch.tensor([statistics.fmean(within), statistics.median(moved)], dtype=torch.float64, device="cuda")
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return tuple(found.tolist())  # type: ignore[return-value]


def alone(move: Move, times: int = 20) -> float:
    """Returns the median milliseconds of a move while nothing else runs, on the slowest rank."""
    marks = events(times + 1)
    for _ in range(3):
        move()
    torch.cuda.synchronize()
    dist.barrier()
    marks[0].record()
    for mark in marks[1:]:
        move()
        mark.record()
    torch.cuda.synchronize()
    took = statistics.median(a.elapsed_time(b) for a, b in zip(marks, marks[1:]))
    found = torch.tensor(took, dtype=torch.float64, device="cuda")
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


def units(numel: int) -> list[Any]:
    """Returns the ways to map peers' memory that this machine has, and says of others why not."""
    found = []
    for kind in (SymmetricUnit, IpcUnit):
        try:
            found.append(kind(numel))
            found[-1].memory.zero_()
        except Exception as error:  # whatever a driver or a virtual machine raises
            print(f"rank {dist.get_rank()}: no {kind.name}: {type(error).__name__}: {error}", flush=True)
        dist.barrier()
    return found


def check(unit: Any) -> bool:
    """Whether pulls bring what the peers wrote."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    unit.memory.fill_(rank + 1)
    unit.barrier()
    seen = [float(unit.of_rank(peer)[-1].cpu()) for peer in range(ranks)]
    unit.barrier()
    torch.cuda.synchronize()
    unit.memory.zero_()
    return seen == [peer + 1.0 for peer in range(ranks)]


def product_of(m: int, n: int, k: int) -> Move:
    """Returns a function that starts a product of random matrices in bf16."""
    left, right = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((m, k), (k, n)))
    out = left @ right
    return lambda: torch.mm(left, right, out=out)


def contention(numel: int, found: dict) -> list[Any]:
    """The first experiment: products and moves beside each other. Fills ``found``. Returns the mapped units."""
    ways, compute = units(numel), torch.cuda.current_stream()
    for way in ways:
        say(f"{way.name}: pulls bring what peers wrote: {check(way)}")
    moves: dict[str, Move | None] = {"nothing": None, **collectives(numel)}
    for way in ways:
        moves[f"{way.name}: pull gradients"] = pulls(way)
        moves[f"{way.name}: pull gradients and add"] = pulls(way, adds=True)
        moves[f"{way.name}: the same, add between products"] = pulls(way, adds=True, add_on=compute)
        moves[f"{way.name}: pull parameters"] = pulls(way, gathers=True)
    for shape in PRODUCTS_OF:
        rows = found.setdefault("x".join(map(str, shape)), {})
        product, free = product_of(*shape), None
        by_itself = alone(product)
        say(f"\nproduct of {shape}, {by_itself:.3f} ms alone")
        say(f"{'':52}{'product, ms':>12}{'slower':>9}{'move, ms':>10}{'GB/s':>8}{'alone, ms':>11}{'GB/s':>8}")
        for name, move in moves.items():
            if move is not None:
                move()
                torch.cuda.synchronize()
            took, moved = beside(move, product, by_itself)
            free = free or took
            row = rows[name] = {"product_ms": took, "slower": took / free}
            text = f"{name:52}{took:12.3f}{took / free:9.3f}"
            if move is not None:
                only = alone(move)
                row.update(move_ms=moved, alone_ms=only)
                text += f"{moved:10.3f}{2e-6 * numel / moved:8.0f}{only:11.3f}{2e-6 * numel / only:8.0f}"
            say(text)
    return ways


def waiting(way: SymmetricUnit, found: dict) -> None:
    """What it costs to wait for a peer: one wait for each millisecond of products."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    product = product_of(*PRODUCTS_OF[-1])
    alone_ms = alone(product)

    def between():
        torch.cuda._sleep(1_500_000)

    between_ms = alone(between)

    def signals():
        way.handle.put_signal((rank + 1) % ranks, 1)
        way.handle.wait_signal((rank - 1) % ranks, 1)

    number = torch.zeros(1, device="cuda")
    pad = way.handle.get_signal_pad((rank + 1) % ranks, [64], torch.uint32)
    waits: dict[str, Move] = {
        "barrier of all ranks": way.handle.barrier,
        "signal to one peer, and from one": signals,
        "all-reduce of one number by NCCL": lambda: dist.all_reduce(number),
        "write into a peer's signal pad by the stream": lambda: type(way.handle).stream_write_value32(pad, 60, 1),
    }
    say(f"\n{'':46}{'alone, us':>10}{'beside products, us':>21}{'product, ms':>13}{'alone':>8}")
    for name, wait in waits.items():
        try:
            wait()
            torch.cuda.synchronize()
            by_itself = alone(wait, 200)

            def spaced(wait=wait):
                wait()
                between()

            took, moved = beside(spaced, product, alone_ms, MILLISECONDS)
        except Exception as error:
            say(f"{name:46}{type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        moved -= between_ms
        found[name] = {"alone_us": 1e3 * by_itself, "beside_us": 1e3 * moved, "product_ms": took}
        say(f"{name:46}{1e3 * by_itself:10.1f}{1e3 * moved:21.1f}{took:13.3f}{alone_ms:8.3f}")


def without_a_peer(way: SymmetricUnit, found: dict) -> None:
    """What becomes of a rank whose peer does not come. It may end the program's use of the GPU, so it comes last."""
    if dist.get_rank() == 0:
        began = time.perf_counter()
        try:
            way.handle.barrier(3, timeout_ms=3000)
            torch.cuda.synchronize()
            says = "nothing"
        except Exception as error:
            says = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        took = time.perf_counter() - began
        found["a peer that does not come"] = {"seconds": took, "says": says}
        print(f"a barrier of 3 s whose peer does not come says after {took:.1f} s: {says}", flush=True)
    else:
        time.sleep(8)


def main() -> None:
    parser = argparse.ArgumentParser(prog="torchrun -m benchmarks.copy_engines", description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=UNIT_BYTES // 10**6, help="of a unit")
    parser.add_argument("--json", type=Path, help="the file to write")
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    ranks = dist.get_world_size()
    numel = options.megabytes * 500_000 // (256 * ranks) * 256 * ranks
    found: dict[str, Any] = {"ranks": ranks, "device": torch.cuda.get_device_name(), "torch": torch.__version__}
    say(f"{ranks} ranks of {found['device']}, torch {torch.__version__}, unit of {2e-6 * numel:.0f} MB")

    def write():
        if options.json and dist.get_rank() == 0:
            options.json.write_text(json.dumps(found, indent=1))

    ways = contention(numel, found.setdefault("beside products", {}))
    write()
    symmetric = [way for way in ways if isinstance(way, SymmetricUnit)]
    if symmetric:
        waiting(symmetric[0], found.setdefault("waits", {}))
        write()
        without_a_peer(symmetric[0], found)
        write()
    # The last part may have ended the GPU's context, with which nothing can be torn down.
    os._exit(0)


if __name__ == "__main__":
    main()

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Computes what communication costs a step on many ranks, and prints the tables of docs/results/scale.md.

From the root of the repository, in one process and without GPUs::

    python -m benchmarks.scale                     the tables
    python -m benchmarks.scale --latency 4         with four times NCCL's own latencies
    python -m benchmarks.scale --frozen            what shard_parameters: "frozen" costs LoRA
    python -m benchmarks.scale --fit FILE          what benchmarks.collectives measured, beside the model

**Collectives.** A collective over n ranks takes a base, a latency for each hop of NCCL's ring, and the time of its S
bytes at bandwidth B. Of NCCL's protocols the fastest one counts, as NCCL chooses.

- All-gather and reduce-scatter: ``base + hops inside nodes * inside + hops between nodes * between + S (n - 1) / n /
  B``.
- A group of k together has ``ceil(k / 16)`` times the hops.
- Latencies are those of NCCL's tuning.cc [1]. LL is left out but for comparisons: it is for messages smaller than any
  other of ours [2].
- B is 360 GB/s, inside a node and between nodes: NCCL's developers expect 360 [3] to 370 [4] GB/s of NVLink on an
  H100, and 46 to 48 [5] of each adapter of 400 Gb/s.
- NCCL puts all collectives of a group into one kernel [6] and shares their bytes equally among its channels, so up to
  16 run side by side, and those of one channel follow each other.
- All-gathers and reduce-scatters go around the ring: PAT is for one GPU of each node [7]. All-reduces may take trees.
- One reduce or broadcast, which no step has any more: ``base + n * hop + S / B``, where NCCL counts every hop as one
  over the network.

**Steps** are simulated with one stream that computes and one that communicates.

- The fork's backward: gradients arrive in the reverse order of the parameters, each after its share of the backward by
  elements of matrices. One bucket is in flight: before the next is sent, the compute stream waits for it.
- The fork's gather sends the embedding, each block and the head, and the forward waits for each where it comes to it.
  Not overlapped, it is one all-gather with nothing under it.
- Sharded (``shard_parameters: "all"``): the embedding is gathered when the forward begins, the first block behind
  it, then each block while the previous one computes, and the head under the last block. The backward begins with
  the head, gathers the last block when it comes there (from 256 ranks on it is still whole), and the others one block
  ahead again, so two units are whole at a time. Before a unit is gathered ranks compare its number by an all-reduce,
  which NCCL sends by LL. No gather follows the step.
- FSDP2: a layer is gathered while the previous one computes, in the forward and, if layers are resharded, again in the
  backward, and its gradients are reduce-scattered behind it. Collectives of the one communicator follow each other.
- Compute is 0.353 s for Qwen3-8B, a third of it the forward. The optimizer takes 10 ps for each element of a
  partition: 8.9 ms for 0.89e9 elements were measured (12 layers, 4 H200s, 2026-11-21, by a trace).

**What the choices by the number of ranks save**, Qwen3-8B with NCCL's own latencies:

- Larger buckets (``send_numel()``): 3 ms of a step on 512 ranks and 129 on 1024; with four times the latency 127 on
  256.
- The last block, which stays whole (``shard_parameters/keep.py``): 6 ms from 256 ranks on.

On 1024 ranks, groups of two blocks would hide more of the overlapped gather than blocks do: it would be waited for
10 ms instead of 26, or with four times the latency 119 instead of 278.

**Messages** are counted by the native reducer itself, on tensors without memory (``messages.py``): 321 in 134
buckets for Qwen3-8B on 2 ranks.

**Limits.** Compute slows down while collectives run, which is left out: on 4 GPUs the model has a step of 0.386 s for
FSDP2 kept, where 0.433 were measured. Left out are small collectives, the norm and the ranks' agreement (a latency
each, 1 to 5 ms on 1024 ranks), and other users of the network. NCCL carries all: copy engines, which serve one host,
are left out.

**The model beside what was measured.** ``tests/house/test_scale_model.py`` holds the model to these figures, but
for gathers and scatters of two ranks.

| 1 GiB of bf16, ms | 8 H200s: measured | model | 2 H200s: measured | model |
| --- | --- | --- | --- | --- |
| all-gather | 2.74 | 2.64 | 1.97 | 1.50 |
| reduce-scatter | 2.73 | 2.64 | 2.02 | 1.50 |
| reduce to one rank | 2.99 | 3.22 | 2.90 | 3.05 |
| broadcast | | | 2.91 | 3.05 |
| a group of reduces, an equal part to each rank | 2.77 | 2.84 | 1.62 | 1.56 |
| a group of broadcasts, an equal part from each rank | | | 1.57 | 1.56 |

A reduce of 64 MiB, a bucket of 2^25 elements, takes 0.200 ms on 2 H200s (model 0.220). The gather of all parameters of
Qwen3-8B takes 39 ms on 8 (40), by a trace. Torch 2.11.0+cu130, NVLink SHARP off; 8 H200s of one host on 2026-11-20, 4
on 2026-11-21, 2 on 2026-11-23 with ``deepspeed --module benchmarks.collectives``.

| published, 8 H100s a node, GB/s | measured | model | with four times the latency |
| --- | --- | --- | --- |
| reduce-scatter [8] of unknown size (model: 8 GiB), 4 nodes | 360 | 369 | 363 |
| the same, 32 nodes | 300 | 344 | 306 |
| the same, 128 nodes | 260 | 305 | 247 |
| all-gather [9] of 2 GiB, 32 nodes | 200 | 306 | 248 |

[1] https://github.com/NVIDIA/nccl/blob/b6475625fbcaa2c3c0e50eed2fa1255d7514d4a2/src/graph/tuning.cc
[2] Demystifying NCCL, https://arxiv.org/abs/2507.04786 (2025)
[3], [4], [5] https://github.com/NVIDIA/nccl-tests/issues/326, /212 and /290
[6], [7], [8], [9] https://github.com/NVIDIA/nccl/issues/1028, /1473, /1229 and /1218
"""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .messages import OUTSIDE, Sizes, gathers, layout, reductions, sharded_gathers, sizes
from .workload import SHAPES

RANKS = [8, 16, 32, 64, 128, 256, 512, 1024]
TOKENS = 4096  # of a micro-batch
BUCKET = 500_000_000  # DeepSpeed's default of `reduce_bucket_size`
SEND_BEFORE = 2**25  # with how many elements a bucket was sent before that depended on the number of ranks


class Protocol(NamedTuple):
    """One way in which NCCL sends. Latencies are in seconds."""

    base: float  # of any collective
    inside: float  # of a hop over NVLink
    between: float  # of a hop over the network
    # Latency of a hop of a reduce or broadcast, inside of one node and with several nodes.
    to_one_inside: float
    to_one_between: float
    bandwidth: float  # as a part of the full one


# From `baseLat` and `hwLat` of NCCL's tuning.cc. LL is left out: it is for messages smaller than any of ours.
PROTOCOLS = {
    "LL128": Protocol(14e-6, 1.9e-6, 4e-6, 1.9e-6, 4e-6, 0.92),
    "Simple": Protocol(8.4e-6, 3.4e-6, 14e-6, 28e-6, 28e-6, 1.0),
}


@dataclass(frozen=True)
class Cluster:
    """Nodes of GPUs with NVLink inside and a network between.

    Attributes:
        per_node: GPUs of a node.
        bandwidth: bytes a second over each link of a ring, the same inside and between nodes.
        channels: rings that run side by side; operations of one group are spread over them.
        latency: by how much latencies of hops are longer than NCCL's own constants.
    """

    per_node: int = 8
    bandwidth: float = 360e9
    channels: int = 16
    latency: float = 1.0

    def to_all(self, size: int, ranks: int, operations: int = 1) -> float:
        """Seconds of a group of all-gathers or reduce-scatters of ``size`` bytes, all ranks' parts together.

        The operations of a group run side by side, one or more to a channel. Those of one channel follow each other.
        """
        between = math.ceil(ranks / self.per_node) - 1
        inside, rounds = ranks - 1 - between, math.ceil(operations / self.channels)
        return min(
            protocol.base
            + self.latency * rounds * (inside * protocol.inside + between * protocol.between)
            + size * (ranks - 1) / ranks / (self.bandwidth * protocol.bandwidth)
            for protocol in PROTOCOLS.values()
        )

    def to_one(self, size: int, ranks: int, operations: int = 1) -> float:
        """Seconds of a group of reduces or broadcasts, which have ``size`` bytes together.

        The operations of a group run side by side, one or more to a channel. Those of one channel follow each other.
        """
        rounds = math.ceil(operations / self.channels)
        return min(
            protocol.base
            + self.latency
            * rounds
            * ranks
            * (protocol.to_one_inside if ranks <= self.per_node else protocol.to_one_between)
            + size / (self.bandwidth * protocol.bandwidth)
            for protocol in PROTOCOLS.values()
        )

    def compare(self, ranks: int) -> float:
        """Seconds in which ranks compare a number, by an all-reduce.

        NCCL sends so little by LL, whose hops over NVLink take longer where there is a network too. It takes the ring,
        around which an all-reduce goes twice, or a tree of the nodes with a chain in each, up and down again.
        """
        nodes = math.ceil(ranks / self.per_node)
        inside = 0.6e-6 * (1.8 if nodes > 1 else 1.0)
        ring = 6.6e-6 + 2 * self.latency * (inside * (ranks - nodes) + 2.7e-6 * (nodes - 1))
        chain = min(ranks, self.per_node) - 1
        tree = 6.8e-6 + 2 * self.latency * (inside * chain + 5e-6 * int(math.log2(nodes)))
        return min(ring, tree)


class Cost(NamedTuple):
    """Seconds of one step."""

    busy: float  # for which the stream of collectives works
    exposed: float  # for which the compute stream waits

    def __add__(self, other: "Cost") -> "Cost":  # type: ignore[override]
        return Cost(self.busy + other.busy, self.exposed + other.exposed)


@dataclass(frozen=True)
class Case:
    """A model on a cluster: what each rank computes in a step of one micro-batch.

    Attributes:
        name: of the model.
        model: its parameters.
        compute: seconds of forward and backward without any communication.
    """

    name: str
    model: Sizes
    compute: float

    def part(self, work: int) -> float:
        """Which part of the forward, or of the backward, a parameter or a unit takes."""
        return work / sum(self.model.work)

    def of_units(self) -> list[tuple[int, float]]:
        """Lists the bytes of each unit, and which part of the forward it takes."""
        numbers = range(1 + max(self.model.units))
        members = [[place for place, unit in enumerate(self.model.units) if unit == number] for number in numbers]
        return [
            (
                sum(2 * self.model.parameters[place].numel() for place in places),
                self.part(sum(self.model.work[place] for place in places)),
            )
            for places in members
        ]

    def optimizer(self, ranks: int) -> float:
        """Seconds of the optimizer: 10 ps for each element of a rank's partition, as fused AdamW was measured."""
        return 10e-12 * sum(parameter.numel() for parameter in self.model.parameters) / ranks


def reduce_gradients(case: Case, cluster: Cluster, ranks: int, send: int | None = None) -> Cost:
    """This fork's backward: buckets of reduce-scatters, one bucket in flight.

    Args:
        case: the model and its training.
        cluster: on what.
        ranks: on how many GPUs.
        send: with how many elements a bucket is sent, instead of what the engine chooses for so many ranks.
    """
    backward = case.compute * 2 / 3
    now = arrives = busy = 0.0
    for sent in reductions(case.model, ranks, BUCKET, send):
        now += backward * case.part(sent.work)
        if sent.waited or sent.bytes:
            now = max(now, arrives)
        if sent.bytes:
            took = cluster.to_all(sent.bytes, ranks, sent.messages)
            busy, arrives = busy + took, now + took
    return Cost(busy, max(now, arrives) - backward)


def gather_at_once(case: Case, cluster: Cluster, ranks: int) -> Cost:
    """``overlap_param_gather: false``: one all-gather of all parameters behind the step, with nothing under it."""
    took = cluster.to_all(sum(size for size, _ in case.of_units()), ranks)
    return Cost(took, took)


def gather_overlapped(case: Case, cluster: Cluster, ranks: int) -> Cost:
    """This fork by default: a group of all-gathers for each unit under the next forward, which waits for each."""
    return _under_the_forward(case, [_to_all(cluster, unit, ranks) for unit in gathers(case.model, ranks)])


def sharded(case: Case, cluster: Cluster, ranks: int) -> Cost:
    """``shard_parameters: "all"``: units are gathered for the forward, and blocks again for the backward.

    On many ranks the last block stays whole until its backward, as the code that trains decides. Gathers and
    reductions share the network, so one follows the other, although they have two communicators.
    """
    units = sharded_gathers(case.model, ranks)
    took = [cluster.compare(ranks) + _to_all(cluster, unit, ranks) for unit in units]
    embedding, *blocks, head = range(len(units))
    # Nothing computes while the embedding arrives, and then the first block.
    now, arrives = 0.0, took[embedding] + took[blocks[0]]
    parts = [case.compute / 3 * part for _, part in case.of_units()]
    for block in blocks:
        now = max(now, arrives)
        arrives = now + took[block + 1]
        now += parts[block]
    exposed = max(now, arrives) + parts[embedding] + parts[head] - case.compute / 3
    back = _sharded_backward(case, cluster, ranks, took)
    return Cost(sum(took) + back.busy, exposed + back.exposed)


def _sharded_backward(case, cluster, ranks, took):
    """The backward: the head is still here. Of blocks that are not, the last one is gathered when the head's backward
    is over."""
    from deepspeed.compile.features.shard_parameters.keep import kept_by_default

    backward = case.compute * 2 / 3
    now = busy = free = bucket_arrives = 0.0  # free: when the network is
    head = max(case.model.units)
    arrives = {unit: 0.0 for unit in range(head, head - 1 - kept_by_default(ranks), -1)}
    for unit, sent in zip([*reversed(case.model.units), OUTSIDE], reductions(case.model, ranks, BUCKET)):
        # A block, and the one that the backward comes to next.
        for block in (unit, unit - 1) if unit != head else ():
            if block > OUTSIDE and block not in arrives:
                busy, arrives[block] = busy + took[block], max(now, free) + took[block]
                free = arrives[block]
        now = max(now, arrives.get(unit, 0.0)) + backward * case.part(sent.work)
        if sent.waited or sent.bytes:
            now = max(now, bucket_arrives)
        if sent.bytes:
            reduced = cluster.to_all(sent.bytes, ranks, sent.messages)
            busy, free = busy + reduced, max(now, free) + reduced
            bucket_arrives = free
    return Cost(busy, max(now, bucket_arrives) - backward)


def _to_all(cluster, unit, ranks):
    """Returns the seconds of the group of all-gathers of a unit."""
    return cluster.to_all(2 * sum(unit), ranks, len(unit))


def _under_the_forward(case, took):
    """Returns the cost of units that take so many seconds each, under a forward that waits for each in turn."""
    forward = case.compute / 3
    parts = [part for _, part in case.of_units()]
    now = arrives = 0.0
    for of_unit, part in zip(took, parts):
        arrives += of_unit
        now = max(now, arrives) + forward * part
    return Cost(arrives, now - forward)


def fsdp2(case: Case, cluster: Cluster, ranks: int, reshard: bool) -> Cost:
    """FSDP2: each layer is gathered while the one before it computes, and reduced behind it.

    Embedding and head are units by themselves, as in benchmarks/systems.py, and stay gathered until their backward.

    Args:
        case: the model and its training.
        cluster: on what.
        ranks: on how many GPUs.
        reshard: ``reshard_after_forward``: whether layers are gathered again for the backward.
    """
    took = [cluster.to_all(2 * sum(unit), ranks) for unit in sharded_gathers(case.model, ranks)]
    forward = case.compute / 3
    outside, *parts, head = [part for _, part in case.of_units()]
    # Nothing computes while the embedding arrives, and then the first layer.
    now, arrives = 0.0, took[0] + took[1]
    for following, part in zip(took[2:], parts):
        begins = max(now, arrives)
        arrives = begins + following
        now = begins + forward * part
    exposed = max(now, arrives) + forward * (outside + head) - forward
    backward = 2 * forward
    # The last layer is still gathered. One communicator serves gathers and reductions, one at a time.
    now, arrives = backward * (outside + head), 0.0
    free = now + took[-1]
    for number in range(len(parts), 0, -1):
        begins = max(now, arrives)
        if reshard and number > 1:
            arrives = free = max(begins, free) + took[number - 1]
        now = begins + backward * parts[number - 1]
        free = max(now, free) + took[number]
    exposed += max(now, free) + took[0] - backward
    again = sum(took[1:-2]) if reshard else 0.0
    return Cost(2 * sum(took) + again, exposed)


# What a step may be: name -> its cost.
SYSTEMS: dict[str, Callable[[Case, Cluster, int], Cost]] = {
    "fork, not overlapped": lambda *on: reduce_gradients(*on) + gather_at_once(*on),
    "fork": lambda *on: reduce_gradients(*on) + gather_overlapped(*on),
    "fork, sharded": sharded,
    "FSDP2, kept": lambda *on: fsdp2(*on, reshard=False),
    "FSDP2, resharded": lambda *on: fsdp2(*on, reshard=True),
    "fork before, not overlapped": lambda *on: reduce_gradients(*on, send=SEND_BEFORE) + gather_at_once(*on),
    "fork before": lambda *on: reduce_gradients(*on, send=SEND_BEFORE) + gather_overlapped(*on),
}


def gather_frozen(case: Case, cluster: Cluster, ranks: int) -> Cost:
    """What ``shard_parameters: "frozen"`` costs a step of LoRA of one micro-batch.

    Each block is gathered for the forward and for the backward, while the previous one computes. The backward through
    frozen parameters takes as long as the forward. Adapters are left out.
    """
    busy = exposed = 0.0
    blocks = case.of_units()[1:-1]
    for place, (size, _) in enumerate(blocks):
        took = cluster.to_all(size, ranks)
        under = case.compute / 3 * blocks[place - 1][1] if place else 0.0
        busy, exposed = busy + 2 * took, exposed + 2 * max(0.0, took - under)
    return Cost(busy, exposed)


def frozen(case: Case, latency: float) -> str:
    """Returns the table of :func:`gather_frozen` by bandwidth."""
    cells = [["GB/s", "ranks", "a step gathers for, ms", "and waits for, ms (of the step)", "hidden from, tokens"]]
    compute = 2 * case.compute / 3
    for bandwidth in (360e9, 180e9, 45e9):
        for ranks in (8, 64):
            cost = gather_frozen(case, Cluster(bandwidth=bandwidth, latency=latency), ranks)
            blocks = compute * sum(part for _, part in case.of_units()[1:-1])
            part = cost.exposed / (cost.exposed + compute)
            cells.append(
                [
                    f"{bandwidth / 1e9:.0f}",
                    str(ranks),
                    f"{1e3 * cost.busy:.0f}",
                    f"{1e3 * cost.exposed:.0f} ({part:.0%})",
                    f"{TOKENS * cost.busy / blocks:,.0f}",
                ]
            )
    return rows(cells)


def cases() -> list[tuple[Case, list[int]]]:
    """Lists the cases to compute, each with its numbers of ranks."""
    # 0.353 s were measured for Qwen3-8B at sequence 4096 on an H200. For Qwen3-32B they grow as the products do.
    small, large = sizes(SHAPES["qwen3-8b"]), sizes(SHAPES["qwen3-32b"])
    return [
        (Case("Qwen3-8B", small, 0.353), RANKS),
        (Case("Qwen3-32B", large, 0.353 * sum(large.work) / sum(small.work)), RANKS[1:]),
    ]


def rows(cells: list[list[str]]) -> str:
    """Returns a table; the first row is its head."""
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join([lines[0], "| " + " | ".join("---" for _ in cells[0]) + " |", *lines[1:]])


def costs(case: Case, cluster: Cluster, of: list[int]) -> str:
    """Returns a table: for each number of ranks and each system what a step waits, and what collectives take."""
    cells = [["ranks", *SYSTEMS]]
    for ranks in of:
        cells.append([str(ranks)])
        for system in SYSTEMS.values():
            cost = system(case, cluster, ranks)
            step = case.compute + case.optimizer(ranks) + cost.exposed
            cells[-1].append(f"{1e3 * cost.exposed:.0f} ({cost.exposed / step:.0%}), {1e3 * cost.busy:.0f}")
    return rows(cells)


def counts(case: Case, of: list[int]) -> str:
    """Returns a table: for each number of ranks the messages of a step."""
    cells = [["ranks", "owned elements", "buckets", "messages", "buckets before", "messages before", "all-gathers"]]
    for ranks in of:
        now, before = (reductions(case.model, ranks, BUCKET, send) for send in (None, SEND_BEFORE))
        numbers = [layout(case.model, ranks).partition_numel]
        for sent in (now, before):
            numbers += [sum(message.bytes > 0 for message in sent), sum(message.messages for message in sent)]
        numbers.append(sum(map(len, gathers(case.model, ranks))))
        cells.append([str(ranks), *map(str, numbers)])
    return rows(cells)


def fit(file: Path, cluster: Cluster) -> str:
    """Returns a table of what benchmarks.collectives has measured, beside the model."""
    found = json.loads(file.read_text())
    ranks = found["ranks"]

    def group(size):
        # Each rank owns one message, so every link of the ring carries all messages but one.
        return cluster.to_one(size * (ranks - 1) // ranks, ranks, ranks)

    model: dict[str, Callable[[int], float]] = {
        "reduce": lambda size: cluster.to_one(size, ranks),
        "broadcast": lambda size: cluster.to_one(size, ranks),
        "reduces, one after the other": lambda size: ranks * cluster.to_one(size // ranks, ranks),
        "reduces in a group": group,
        "broadcasts, one after the other": lambda size: ranks * cluster.to_one(size // ranks, ranks),
        "broadcasts in a group": group,
        "reduce-scatter": lambda size: cluster.to_all(size, ranks),
        "all-gather": lambda size: cluster.to_all(size, ranks),
    }
    cells = [["collective", "smallest, us", "model", "largest, us", "model", "GB/s between the two largest"]]
    for name, computed in model.items():
        times = {int(size): took for size, took in found["seconds"][name].items()}
        (one, before), (two, after) = sorted(times.items())[-2:]
        cells.append([name])
        for size in (min(times), two):
            cells[-1] += [f"{1e6 * times[size]:.1f}", f"{1e6 * computed(size):.1f}"]
        # Where the larger took no longer, the clock has measured noise.
        cells[-1].append(f"{(two - one) / (after - before) / 1e9:.0f}" if after > before else "-")
    return rows(cells)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__.splitlines()[0])
    parser.add_argument("--latency", type=float, default=1.0, help="how many times NCCL's own constants a hop takes")
    parser.add_argument("--frozen", action="store_true", help="print what sharding frozen parameters costs instead")
    parser.add_argument("--fit", type=Path, help="print what benchmarks.collectives wrote into this file instead")
    return parser


def main() -> None:
    options = parser().parse_args()
    cluster = Cluster(latency=options.latency)
    if options.fit:
        print(fit(options.fit, cluster))
        return
    if options.frozen:
        for case, _ in cases():
            print(f"\n{case.name}\n\n{frozen(case, options.latency)}")
        return
    print(
        "Cells: ms that the compute stream waits (as a part of the step), ms that the collectives take. FSDP2 kept: "
        "reshard_after_forward=False; resharded, its default: True. It reduces gradients in bf16."
    )
    for case, of in cases():
        print(f"\n{case.name}\n\n{costs(case, cluster, of)}\n\n{counts(case, of)}")


if __name__ == "__main__":
    main()

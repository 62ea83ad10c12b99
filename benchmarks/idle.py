# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Says from a trace of one step where the compute stream is idle and for what it waits, and what communication slows.

From the root of the repository::

    deepspeed --module benchmarks.measure --shape qwen3-8b --trace TRACE
    python -m benchmarks.idle TRACE...

A trace is what torch's profiler exports, of any program; record shapes (``record_shapes=True``), because one kernel
with one grid may compute products of many sizes. Communication is NCCL's kernels, and copies between GPUs. An idle
time belongs to communication if some ends within ``AT_ONCE`` of the next kernel's beginning, to the host if the host
launched the next kernel later than the compute stream fell idle, and otherwise to the stream's own order (such as a
copy on another stream). A matrix product is "beside" communication if some runs during at least a tenth of it, because
a copy between GPUs is shorter than a large product, and "alone" if during none of it.
"""

import argparse
import bisect
import gzip
import json
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

# A kernel that waited for another stream begins at most so many microseconds after that stream's kernel has ended.
AT_ONCE = 15.0
# Idle times below this many microseconds lie between all kernels of a stream.
LAUNCH = 3.0
# The part of a product beside which communication must run.
LEAST_BESIDE = 0.1
COMMUNICATION = re.compile(r"nccl|Memcpy PtoP", re.IGNORECASE)
PRODUCT = re.compile(r"gemm|nvjet|cutlass|xmma", re.IGNORECASE)
ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}


class Kernel(NamedTuple):
    """What ran on the device. Times are microseconds."""

    begin: float
    end: float
    name: str
    stream: int
    launched: float  # when the host had launched it; minus infinity if the trace does not tell
    shape: str  # of the inputs of the operator that launched it, or its grid where the trace has no shapes

    @property
    def is_communication(self) -> bool:
        return COMMUNICATION.search(self.name) is not None

    @property
    def is_product(self) -> bool:
        return PRODUCT.search(self.name) is not None


class Idle(NamedTuple):
    """A time in which the compute stream ran nothing."""

    begin: float  # microseconds after the step's beginning
    length: float  # microseconds
    cause: str
    before: str  # the kernel that ran next


class Slowed(NamedTuple):
    """Products of one kernel and shape that ran alone, and beside communication. Times are microseconds."""

    name: str
    alone: float  # the median of one
    count_alone: int
    beside: float  # the mean of one
    count_beside: int

    @property
    def lost(self) -> float:
        """What communication cost, microseconds."""
        return (self.beside - self.alone) * self.count_beside


def read(file: Path) -> list[Kernel]:
    """Returns the kernels of a trace in the order of their beginnings."""
    opened = gzip.open(file, "rt") if file.suffix == ".gz" else file.open()
    with opened as stream:
        events: list[dict[str, Any]] = json.load(stream)["traceEvents"]
    launches, shapes = {}, {}
    for event in events:
        arguments = event.get("args", {})
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in arguments:
            launches[arguments["correlation"]] = event["ts"] + event.get("dur", 0)
        elif event.get("cat") == "cpu_op" and "Input Dims" in arguments:
            shapes[arguments.get("External id")] = str(arguments["Input Dims"])
    return sorted(
        Kernel(
            event["ts"],
            event["ts"] + event.get("dur", 0),
            event["name"],
            event["args"].get("stream", 0),
            launches.get(event["args"].get("correlation"), float("-inf")),
            shapes.get(event["args"].get("External id")) or str(event["args"].get("grid", "")),
        )
        for event in events
        if event.get("cat") in ON_DEVICE
    )


def spans(kernels: Iterable[Kernel]) -> list[tuple[float, float]]:
    """Returns the times in which at least one of the kernels ran, apart and in order."""
    found: list[tuple[float, float]] = []
    for begin, end, *_ in sorted(kernels):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def length(of: Iterable[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in of)


def within(begin: float, end: float, of: list[tuple[float, float]]) -> float:
    """Returns how much of [begin, end) lies in spans."""
    first = max(bisect.bisect(of, (begin, begin)) - 1, 0)
    total = 0.0
    for other_begin, other_end in of[first:]:
        if other_begin >= end:
            break
        total += max(0.0, min(end, other_end) - max(begin, other_begin))
    return total


def compute_stream(kernels: list[Kernel]) -> int:
    """Returns the stream on which most time is spent in kernels that are no communication."""
    times: Counter = Counter()
    for kernel in kernels:
        if not kernel.is_communication:
            times[kernel.stream] += kernel.end - kernel.begin
    return times.most_common(1)[0][0]


def idle_times(kernels: list[Kernel]) -> Iterator[Idle]:
    """Yields the idle times of the compute stream, from its first kernel to its last."""
    stream = compute_stream(kernels)
    own = [kernel for kernel in kernels if kernel.stream == stream]
    others = sorted(
        (kernel.end, kernel.is_communication, kernel.name) for kernel in kernels if kernel.stream != stream
    )
    busy_until = start = own[0].begin
    for kernel in own:
        gap = kernel.begin - busy_until
        if gap > LAUNCH:
            yield Idle(busy_until - start, gap, _cause(kernel, busy_until, others), short(kernel.name))
        busy_until = max(busy_until, kernel.end)


def _cause(kernel, idle_since, others):
    """Says for what a kernel waited. ``others``: (end, whether communication, name) of kernels of other streams."""
    if kernel.launched > idle_since:
        return "host: not launched yet"
    last = bisect.bisect(others, (kernel.begin, True, "\uffff"))
    ended = [other for other in others[max(last - 8, 0) : last] if other[0] > max(kernel.begin - AT_ONCE, idle_since)]
    for _, is_communication, name in reversed(ended):
        if is_communication:
            return short(name)
    return f"other stream: {short(ended[-1][2])}" if ended else "the stream's own order"


def slowed(kernels: list[Kernel]) -> list[Slowed]:
    """Returns the products that were seen alone and beside communication, by what communication cost them."""
    communication = spans(kernel for kernel in kernels if kernel.is_communication)
    alone, beside = defaultdict(list), defaultdict(list)
    for kernel in kernels:
        took = kernel.end - kernel.begin
        if kernel.is_product and took:
            part = within(kernel.begin, kernel.end, communication) / took
            if part == 0:
                alone[kernel.name, kernel.shape].append(took)
            elif part >= LEAST_BESIDE:
                beside[kernel.name, kernel.shape].append(took)
    found = [
        Slowed(
            short(key[0]),
            statistics.median(alone[key]),
            len(alone[key]),
            statistics.fmean(beside[key]),
            len(beside[key]),
        )
        for key in beside
        if key in alone
    ]
    return sorted(found, key=lambda row: -row.lost)


def short(name: str) -> str:
    """Returns a kernel's name without arguments of templates and functions."""
    return re.sub(r"[<(].*", "", name).removeprefix("void ").strip()[:48]


def lines(kernels: list[Kernel], most: int = 12) -> Iterator[str]:
    """Yields the lines of the report. ``most``: how many rows a table has."""
    stream = compute_stream(kernels)
    own = spans(kernel for kernel in kernels if kernel.stream == stream)
    communication = spans(kernel for kernel in kernels if kernel.is_communication)
    count = sum(kernel.is_communication for kernel in kernels)
    both = sum(within(begin, end, communication) for begin, end in own)
    idle = [*idle_times(kernels)]
    yield (
        f"step {(own[-1][1] - own[0][0]) / 1e3:.1f} ms: the compute stream runs {length(own) / 1e3:.1f}, "
        f"{count} of communication {length(communication) / 1e3:.1f}, both at once {both / 1e3:.1f}"
    )
    yield f"idle {sum(pause.length for pause in idle) / 1e3:.1f} ms, in {len(idle)} times of more than {LAUNCH:g} us"
    by_cause: Counter = Counter()
    for pause in idle:
        by_cause[pause.cause] += pause.length
    for cause, total in by_cause.most_common(most):
        yield f"  {total / 1e3:8.2f} ms  {cause}"
    yield "the longest"
    for pause in sorted(idle, key=lambda pause: -pause.length)[:most]:
        yield f"  {pause.length / 1e3:8.2f} ms at {pause.begin / 1e3:8.1f}, before {pause.before}: {pause.cause}"
    products = slowed(kernels)
    expected = sum(row.alone * row.count_beside for row in products)
    if expected:
        took = sum(row.beside * row.count_beside for row in products)
        yield (
            f"products beside communication take {took / expected:.2f} of their time alone: "
            f"{(took - expected) / 1e3:.1f} ms lost"
        )
        for row in products[:most]:
            yield (
                f"  {row.lost / 1e3:8.2f} ms  {row.beside:7.0f} us for {row.alone:7.0f} "
                f"({row.count_beside} beside, {row.count_alone} alone)  {row.name}"
            )
    else:
        yield "no product was seen both alone and beside communication"
    names: Counter = Counter()
    counts: Counter = Counter()
    for kernel in kernels:
        if kernel.is_communication:
            names[short(kernel.name)] += kernel.end - kernel.begin
            counts[short(kernel.name)] += 1
    for name, total in names.most_common(most):
        yield f"  {total / 1e3:8.1f} ms in {counts[name]:4} of {name}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.idle", description=__doc__.splitlines()[0])
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE", help="of torch's profiler, also compressed")
    for file in parser.parse_args().traces:
        kernels = read(file)
        print(file)
        if not kernels:
            print("  no kernel of a GPU is in this trace; profile with torch.profiler.ProfilerActivity.CUDA")
            continue
        for line in lines(kernels):
            print(f"  {line}")


if __name__ == "__main__":
    main()

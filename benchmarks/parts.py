# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Times what a step is made of on one device, each part alone and without DeepSpeed's engine.

From the root of the repository::

    python -m benchmarks.parts                                     on a GPU: Qwen3-8B's sizes, 6 layers
    python -m benchmarks.parts --shape tiny --seq 64               on a CPU
    python -m benchmarks.parts --only update                       the first two of these parts

- The update: AdamW over a partition of the model's sizes, stepped in ranges, in one pass, and with states in 8 bits.
- The norm of its gradients.
- The loss: the head and the cross-entropy, in one chunk and in chunks of different sizes.
- The model: forward and backward with compiled blocks and no communication.
- The update beside a forward, on a stream of its own: by how much the forward takes longer.

The floor of an update is the time in which the device copies as many bytes as the update must move.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .devices import on_gpus, synchronize
from .workload import SHAPES, Batches, Shape, build_model

if TYPE_CHECKING:
    from deepspeed.compile.zero_1_and_2.step.rule import Rule

BYTES_OF_AN_UPDATE = 28  # a bf16 gradient and parameter, and three fp32 tensors that are read and written
BYTES_WITH_8_BITS = 16  # the same with two states of a byte each
BYTES_LESS = 2  # with master weights as remainders, whose parameters are read too


class Times:
    """Prints times, and writes all of them to a file as soon as each is there, if a file is named.

    Attributes:
        file: the JSON file, or None. It has name -> {"ms": milliseconds, "floor_ms": the least that is possible}.
    """

    def __init__(self, file: str | None):
        self.file, self._found = file and Path(file), {}

    def print_row(self, name: str, seconds: float, floor: float | None = None, more: str = "") -> None:
        """Prints and writes a time; ``more`` is what stands behind it in the line."""
        part = f", {seconds / floor:.3f} of {1e3 * floor:.2f}" if floor else ""
        print(f"{name:27}{1e3 * seconds:8.2f} ms{part}{more}", flush=True)
        self._found[name] = {"ms": 1e3 * seconds, "floor_ms": 1e3 * floor if floor else None}
        if self.file:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps(self._found, indent=1) + "\n")


def seconds(function: Callable[[], object], repetitions: int) -> float:
    """Returns the median of the seconds that ``function`` takes, after it has run three times."""
    for _ in range(3):
        function()
    synchronize()
    taken = []
    for _ in range(repetitions):
        begun = time.perf_counter()
        function()
        synchronize()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def most_memory(function: Callable[[], object]) -> str:
    """Returns the memory that ``function`` newly allocates on the GPU; an empty text on a CPU."""
    if not on_gpus():
        return ""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    return f"; {(torch.cuda.max_memory_allocated() - before) / 2**30:.2f} GiB more"


class _Views(dict):
    """Offset -> gradient, given away as the optimizer's views are."""

    flat_partition = None

    def take(self) -> list[tuple[int, torch.Tensor]]:
        taken = sorted(self.items())
        self.clear()
        return taken


def step_partition(
    adam: torch.optim.Optimizer,
    updates: "Rule | None",
    gradients: dict[int, torch.Tensor],
    factor: torch.Tensor,
    new: torch.Tensor,
    written: Callable[[int, int], object],
) -> None:
    """Steps a partition as an engine does.

    Args:
        adam: the optimizer, of one parameter: the fp32 master weights of the partition.
        updates: the rule that steps ranges. None: the optimizer does.
        gradients: offset -> gradient.
        factor: by which gradients are multiplied.
        new: memory for the parameters, which may be that of the gradients.
        written: a function to call with (first, last) when the parameters [first, last) are written.
    """
    from deepspeed.compile.features.update.own_ranges import OwnStep
    from deepspeed.compile.zero_1_and_2.parameter.runs import in_one_run
    from deepspeed.compile.zero_1_and_2.step.partition_gradient import PartitionGradient
    from deepspeed.compile.zero_1_and_2.step.partitions import Ranges
    from deepspeed.compile.zero_1_and_2.step.rule import Partition

    (master,) = adam.param_groups[0]["params"]
    partition = Partition(adam, 0, factor, new.dtype, in_one_run(new), step_is_unpatched=True)
    update = (updates and updates.begin(partition)) or OwnStep(partition)
    # Each step is given the gradients anew.
    given = PartitionGradient(_Views(gradients), factor, master.data, new.dtype)
    Ranges(update, master.numel(), given, written).step_rest()


def bandwidth(device: str, repetitions: int) -> float:
    """Returns the bytes a second, read and written, of a copy on the device."""
    source = torch.empty(2**30 if on_gpus() else 2**24, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    return 4 * source.numel() / seconds(lambda: target.copy_(source), repetitions)


def time_update(shape: Shape, device: str, rate: float, repetitions: int, times: Times) -> Callable[[], None]:
    """Prints the times of the update and of the norm of all parameters of a model.

    Returns:
        What updates all parameters by a fused AdamW in one pass.
    """
    from deepspeed.compile.features.update import adam as one_pass
    from deepspeed.compile.features.update.every_step import EveryStepAdam
    from deepspeed.compile.features.update.remainders import split
    from deepspeed.compile.zero_1_and_2.layout import SHARD_MULTIPLE
    from deepspeed.compile.zero_1_and_2.step.norm import sum_of_squares

    with torch.device("meta"):
        parameters = build_model(shape, torch.bfloat16, "meta", False).parameters()
    # As in an engine, with padding.
    sizes = [-(-parameter.numel() // SHARD_MULTIPLE) * SHARD_MULTIPLE for parameter in parameters]
    if not on_gpus():
        one_pass.LEAST_NUMEL = 2**10
    numel = sum(sizes)
    master = torch.nn.Parameter(torch.randn(numel, device=device))
    new = torch.empty(numel, dtype=torch.bfloat16, device=device)
    gradients = dict(zip((sum(sizes[:index]) for index in range(len(sizes))), new.new_empty(numel).split(sizes)))
    for gradient in gradients.values():
        gradient.normal_()
    factor = torch.full((1,), 0.5, device=device)
    floor = BYTES_OF_AN_UPDATE * numel / rate
    print(f"{numel / 1e9:.2f} billion elements; {BYTES_OF_AN_UPDATE} bytes each in {1e3 * floor:.2f} ms")

    def step(adam, updates):
        step_partition(adam, updates, gradients, factor, new, lambda *_: None)

    for kind in ("fused", "foreach"):
        adam = torch.optim.AdamW([master], lr=1e-5, **{kind: True})
        for name, updates in (("in ranges", None), ("in one pass", one_pass.OnePassAdam())):
            run = functools.partial(step, adam, updates)
            took = seconds(run, repetitions)
            times.print_row(f"AdamW {kind}, {name}", took, floor, most_memory(run))
            if (kind, updates is None) == ("fused", False):
                update = run
    run = functools.partial(step, torch.optim.AdamW([master], lr=1e-5), EveryStepAdam(in_8_bits=True))
    took, floor = seconds(run, repetitions), BYTES_WITH_8_BITS * numel / rate
    times.print_row("AdamW, 8-bit states", took, floor, most_memory(run))
    for name, in_8_bits, size in (
        ("fp32 states", False, BYTES_OF_AN_UPDATE),
        ("8-bit states", True, BYTES_WITH_8_BITS),
    ):
        # In pieces, because the whole in 32 bits several times does not fit beside the states of the runs before.
        remainders = torch.empty_like(new, dtype=torch.int16)
        for masters, parameters, rests in zip(*(tensor.split(2**26) for tensor in (master.data, new, remainders))):
            parameters[:], rests[:] = split(masters)
        rule = EveryStepAdam(in_8_bits, [remainders])
        run = functools.partial(step, torch.optim.AdamW([master], lr=1e-5), rule)
        took, floor = seconds(run, repetitions), (size - BYTES_LESS) * numel / rate
        times.print_row(f"remainders, {name}", took, floor, most_memory(run))
        # The next ones would not fit beside these states.
        del run, rule, remainders
    took = seconds(lambda: sum_of_squares([*gradients.values()]), repetitions)
    times.print_row("norm", took, 2 * numel / rate)
    return update


def time_loss(shape: Shape, seq: int, device: str, repetitions: int, times: Times) -> None:
    """Prints the times and the memory of head and cross-entropy."""
    from deepspeed.compile.features.loss import chunked_loss

    hidden = torch.randn(seq, shape.hidden_size, dtype=torch.bfloat16, device=device).requires_grad_()
    weight = torch.randn(shape.vocab_size, shape.hidden_size, dtype=torch.bfloat16, device=device).mul_(0.02)
    weight.requires_grad_()
    target = torch.randint(shape.vocab_size, (seq,), device=device)

    def run():
        hidden.grad = weight.grad = None
        loss.loss_and_logits(hidden, weight, None, target)[0].backward()

    for exponent in (40, 28, 27, 26, 25):
        chunked_loss.CHUNK_LOGITS = 2**exponent
        # Otherwise torch would compile for any size of a chunk from the second size on, which is slower.
        torch._dynamo.reset()
        loss = chunked_loss.ChunkedLoss(
            chunked_loss.LossOfLogits(-100, True, torch.float32), (False, False), None, torch.compile
        )
        number = len(chunked_loss.chunks(seq, shape.vocab_size))
        took = seconds(run, repetitions)
        hidden.grad = weight.grad = None
        times.print_row(f"loss, {number:4} chunks", took, more=most_memory(run))


def time_beside(forward: Callable[[], object], update: Callable[[], None], repetitions: int) -> None:
    """Prints by how much a forward takes longer while the update runs on another stream."""
    alone, update_alone = seconds(forward, repetitions), seconds(update, repetitions)
    for priority in (0, -1):
        compute, side = torch.cuda.Stream(priority=priority), torch.cuda.Stream()
        ends = {
            stream: [torch.cuda.Event(enable_timing=True) for _ in range(repetitions)] for stream in (compute, side)
        }
        begins = [torch.cuda.Event(enable_timing=True) for _ in range(repetitions)]
        for step, begin in enumerate(begins):
            synchronize()
            begin.record()
            for stream, run in ((side, update), (compute, forward)):
                stream.wait_event(begin)
                with torch.cuda.stream(stream):
                    run()
                    ends[stream][step].record()
        synchronize()
        beside, updated = (
            statistics.median(begin.elapsed_time(end) for begin, end in zip(begins, ends[stream]))
            for stream in (compute, side)
        )
        slower = (max(beside, updated) - 1e3 * alone) / (1e3 * update_alone)
        name = "at high priority" if priority else "at the same priority"
        print(
            f"a forward of {1e3 * alone:.2f} ms {name} beside an update of {1e3 * update_alone:.2f} ms: the forward "
            f"ends after {beside:.2f} ms, the update after {updated:.2f}: {slower:.2f} ms more a ms of the update"
        )


def time_model(
    shape: Shape, seq: int, device: str, repetitions: int, update: Callable[[], None], times: Times
) -> None:
    """Prints the times of forward and backward with compiled blocks, on the device and on the host."""
    model = build_model(shape, torch.bfloat16, device, False)
    for block in model.model.layers:
        block.compile()
    ids = Batches(shape.vocab_size, 1, seq, 0, device).draw(0)

    def run():
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()

    took = seconds(run, repetitions)
    begun = time.perf_counter()
    run()
    on_host = time.perf_counter() - begun
    synchronize()
    times.print_row("model, forward and backward", took, more=f"; the host was done after {1e3 * on_host:.2f} ms")
    if not on_gpus():
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        synchronize()
    kernels = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    busy = sum(kernel.device_time_total for kernel in kernels) / 1e6
    times.print_row("model, kernels", busy, more=f", {len(kernels)} of them")
    with torch.no_grad():
        time_beside(lambda: model(input_ids=ids, labels=ids), update, repetitions)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parts", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=6, help="of the partition and of the model")
    parser.add_argument("--seq", type=int, default=4096, help="tokens")
    parser.add_argument("--repetitions", type=int, default=8)
    parser.add_argument("--only", choices=["update"], help="what to time, if not all")
    parser.add_argument("--json", metavar="FILE", help="write the times there")
    return parser


def main() -> None:
    options = parser().parse_args()
    times = Times(options.json)
    device = "cuda" if on_gpus() else "cpu"
    shape = dataclasses.replace(SHAPES[options.shape], num_hidden_layers=options.layers)
    rate = bandwidth(device, options.repetitions)
    print(f"{torch.cuda.get_device_name() if on_gpus() else 'CPU'}: a copy moves {rate / 1e12:.3f} TB/s")
    update = time_update(shape, device, rate, options.repetitions, times)
    if options.only:
        return
    time_loss(shape, options.seq, device, options.repetitions, times)
    time_model(shape, options.seq, device, options.repetitions, update, times)


if __name__ == "__main__":
    main()

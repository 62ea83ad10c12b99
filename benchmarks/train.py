# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Trains a Qwen3 with random weights and measures time and memory.

    deepspeed benchmarks/train.py --shape qwen3-8b                      on all GPUs of this machine
    deepspeed --num_accelerators 2 benchmarks/train.py --shape tiny     on a CPU, in two processes

It takes whichever DeepSpeed is installed. compare.py runs it once for each system to compare.
"""

import argparse
import dataclasses
import datetime
import json
import os
import platform
import time
import warnings
from pathlib import Path

import timeline
import torch
import torch.distributed as dist
from report import print_run
from systems import SYSTEMS, make_system
from workload import SHAPES, Batches, build_model

# DeepSpeed calls it by its older name, which torch 2.13 renames.
warnings.filterwarnings("ignore", message=".*all_gather_into_tensor.* is deprecated", category=FutureWarning)


@dataclasses.dataclass(frozen=True)
class Run:
    """What to measure. The number of layers None: as many as the shape has."""

    system: str = "deepcompile"
    shape: str = "tiny"
    layers: int | None = None
    dtype: str = "bf16"
    seq: int = 4096
    micro_batch: int = 1
    accumulation: int = 1
    stage: int = 1
    checkpoint: bool = False
    regional: bool = False
    adam: str = "foreach"
    backend: str = "inductor"
    bucket: int = 500_000_000
    learning_rate: float = 1e-5
    steps: int = 31
    warm: int = 10


def parse_arguments():
    """Returns the Run, the file for the results or None, and the file for the trace or None."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--system", choices=SYSTEMS, help="zero: DeepSpeed without DeepCompile")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--layers", type=int, help="fewer or more than the shape has")
    parser.add_argument("--dtype", choices=("bf16", "fp32"))
    parser.add_argument("--seq", type=int, help="tokens in a sequence")
    parser.add_argument("--micro-batch", type=int, help="sequences per process")
    parser.add_argument("--accumulation", type=int, help="micro-batches in a step")
    parser.add_argument("--stage", type=int, choices=(1, 2), help="of ZeRO")
    parser.add_argument("--checkpoint", action="store_true", default=None, help="activations of every layer")
    parser.add_argument("--regional", action="store_true", default=None, help="DeepCompile's regional_compilation")
    parser.add_argument("--adam", choices=("foreach", "fused"), help="which implementation of torch's AdamW")
    parser.add_argument("--backend", choices=("inductor", "eager"), help="eager: graphs, but no generated code")
    parser.add_argument("--bucket", type=int, help="ZeRO's reduce_bucket_size, elements")
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--steps", type=int, help="steps in all, the compiling ones included")
    parser.add_argument("--warm", type=int, help="steps before those whose times count")
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    parser.add_argument("--trace", metavar="FILE", help="write a trace of one step of rank 0 there, for Perfetto")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # given by the launcher
    arguments = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    arguments.pop("local_rank", None)
    files = [arguments.pop(name, None) for name in ("json", "trace")]
    run = Run(**arguments)
    positive = ("layers", "seq", "micro_batch", "accumulation", "bucket", "steps")
    for name in positive:
        if getattr(run, name) is not None and getattr(run, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if not 1 <= run.warm < run.steps:
        parser.error("--warm must be at least 1 and less than --steps, so that a step is left to be timed")
    if run.regional and run.system != "deepcompile":
        parser.error("--regional goes with --system deepcompile; fsdp2 always compiles by block, and zero not at all")
    if "RANK" not in os.environ:
        parser.error("start this with DeepSpeed's launcher: deepspeed benchmarks/train.py")
    return (run, *files)


class Trainer:
    """Trains a system and measures it on this rank."""

    def __init__(self, run, device):
        self.run, self.device = run, torch.device(device)
        self.on_gpu = self.device.type == "cuda"
        shape = SHAPES[run.shape]
        shape = dataclasses.replace(shape, num_hidden_layers=run.layers or shape.num_hidden_layers)
        dtype = torch.bfloat16 if run.dtype == "bf16" else torch.float32
        began = time.perf_counter()
        model = build_model(shape, dtype, device, run.checkpoint)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.batches = Batches(shape.vocab_size, run.micro_batch, run.seq, dist.get_rank(), device)
        self.system = make_system(run, model)
        self.setup_s = time.perf_counter() - began
        self._drawn = 0

    def synchronize(self):
        if self.on_gpu:
            torch.cuda.synchronize()

    def train_step(self, marked=None):
        """One optimizer step; returns the loss as a tensor.

        ``marked``: makes a context for each phase by its name.
        """
        total = 0.0
        for micro_step in range(self.run.accumulation):
            boundary = micro_step == self.run.accumulation - 1
            ids = self.batches.draw(self._drawn)
            self._drawn += 1
            if marked is None:
                loss = self.system.forward(ids)
                self.system.backward(loss, boundary)
                self.system.step(boundary)
            else:
                with marked("forward"):
                    loss = self.system.forward(ids)
                with marked("backward"):
                    self.system.backward(loss, boundary)
                with marked("step"):
                    self.system.step(boundary)
            total = total + loss.detach() / self.run.accumulation
        return total

    def timed_steps(self):
        """Runs ``run.steps`` steps; returns their seconds and this rank's losses."""
        seconds, losses = [], []
        for step in range(self.run.steps):
            self.synchronize()
            dist.barrier()
            began = time.perf_counter()
            loss = self.train_step()
            self.synchronize()
            seconds.append(time.perf_counter() - began)
            losses.append(loss.item())
            if step < 3 or (step + 1) % 10 == 0:
                say(f"  step {step + 1:4} of {self.run.steps}   loss {losses[-1]:.4f}   {seconds[-1]:.3f} s")
        return seconds, losses

    def watched_step(self):
        """Returns phase -> what is allocated behind it and at most in it (the last micro-batch), and the counters.

        Bytes of the CUDA allocator; phases are empty without one.
        """
        phases, counters = {}, {}
        self.synchronize()
        self.system.reset_counters()

        class Watched:
            def __init__(watched, name):
                watched.name = name

            def __enter__(watched):
                if self.on_gpu:
                    torch.cuda.reset_peak_memory_stats()

            def __exit__(watched, *exception):
                self.synchronize()
                if self.on_gpu:
                    phases[watched.name] = {
                        "after": torch.cuda.memory_allocated(),
                        "peak": torch.cuda.max_memory_allocated(),
                    }
                if self.system.counters():
                    counters[watched.name] = self.system.counters()

        self.train_step(Watched)
        return phases, counters

    def recorded_step(self):
        """Returns the Timeline of a step."""

        class Marked:
            def __init__(marked, name):
                marked.range = timeline.phase(name)

            def __enter__(marked):
                marked.range.__enter__()

            def __exit__(marked, *exception):
                self.synchronize()
                marked.range.__exit__(*exception)

        return timeline.record(lambda: self.train_step(Marked), self.device.type)

    def traced_step(self, file):
        """Writes a trace of a step to ``file`` on rank 0; returns its kernels' device seconds by name there."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.on_gpu:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profiler:
            self.train_step()
            self.synchronize()
        if dist.get_rank() == 0:
            profiler.export_chrome_trace(str(file))
        kernels = [event for event in profiler.key_averages() if event.self_device_time_total > 0]
        kernels.sort(key=lambda event: -event.self_device_time_total)
        return {event.key: event.self_device_time_total / 1e6 for event in kernels[:60]}


def say(text):
    """Prints on rank 0 only."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def gather(value):
    """Returns every rank's ``value``, in rank order."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def environment():
    import transformers

    try:
        import deepspeed

        version = deepspeed.__version__
    except ImportError:
        version = None
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "world": dist.get_world_size(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deepspeed": version,
        "transformers": transformers.__version__,
    }


def measure(run, device, trace):
    """Runs and measures; returns what is written as JSON, the same on every rank."""
    from torch._dynamo.utils import compilation_time_metrics

    trainer = Trainer(run, device)
    say(f"{trainer.parameters / 1e6:,.1f} million parameters; set up in {trainer.setup_s:.1f} s")
    seconds, losses = trainer.timed_steps()
    compilation = {name: round(sum(values), 3) for name, values in compilation_time_metrics.items()}
    reserved = torch.cuda.memory_reserved() if trainer.on_gpu else None
    phases, counters = trainer.watched_step()
    recorded = trainer.recorded_step()
    # A CPU's allocator keeps no count of its own: there it is what the step adds.
    phases = phases or {name: recorded.allocated_in(name) for name in timeline.PHASES}
    kernels = trainer.traced_step(trace) if trace else {}

    memory = {"phases": phases, "counters": counters, "reserved": reserved}
    ranks = gather({**memory, "most_gradients": recorded.most_gradients()})
    slowest = [max(of_ranks) for of_ranks in zip(*gather(seconds))]
    timed = sorted(slowest[run.warm :])
    first_and_last = sorted({0, dist.get_world_size() - 1})
    timelines = gather(dataclasses.asdict(recorded.thinned(600)) if dist.get_rank() in first_and_last else None)
    return {
        "run": dataclasses.asdict(run),
        "environment": environment(),
        "parameters": trainer.parameters,
        "setup_s": max(gather(trainer.setup_s)),
        "first_step_s": slowest[0],
        "step_s": timed[len(timed) // 2],
        "steps_s": slowest,
        "losses": [sum(of_ranks) / len(of_ranks) for of_ranks in zip(*gather(losses))],
        "compilation_s": compilation,
        "ranks": ranks,
        "timelines": {str(rank): timelines[rank] for rank in first_and_last},
        "kernels_s": kernels,
    }


def main():
    run, file, trace = parse_arguments()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        device = f"cuda:{torch.cuda.current_device()}"
    else:
        device = "cpu"
        torch.set_num_threads(max(1, os.cpu_count() // int(os.environ["WORLD_SIZE"])))
    if run.system == "fsdp2":
        on_gpu = {"backend": "nccl", "device_id": torch.device(device)}
        dist.init_process_group(**({"backend": "gloo"} if device == "cpu" else on_gpu))
    else:
        import deepspeed

        deepspeed.init_distributed()
    result = measure(run, device, trace)
    if dist.get_rank() == 0:
        print_run(result)
        if file:
            Path(file).write_text(json.dumps(result, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

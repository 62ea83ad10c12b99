# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Trains one system and measures it: the steps' times first, then one step for memory, and one for its course."""

import contextlib
import dataclasses
import datetime
import functools
import gc
import importlib.util
import os
import platform
import statistics
import sys
import time

import timeline
import torch
import torch.distributed as dist
from systems import make_system
from workload import SHAPES, Batches, build_model


def on_gpus():
    """Whether to use GPUs: where there are any, unless DeepSpeed is told to use the CPU."""
    return os.environ.get("DS_ACCELERATOR") != "cpu" and torch.cuda.is_available()


class Clock:
    """Takes the times of steps without holding up the host, which may run ahead of the device."""

    def __init__(self):
        self._marks = []

    def mark(self):
        """Marks the end of one step and the beginning of the next."""
        if not on_gpus():
            self._marks.append(time.perf_counter())
            return
        self._marks.append(torch.cuda.Event(enable_timing=True))
        self._marks[-1].record()

    def seconds(self):
        """Returns the seconds between marks. The device is done with them on return."""
        pairs = zip(self._marks, self._marks[1:])
        if not on_gpus():
            return [end - begin for begin, end in pairs]
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]


class Phase:
    """A context around a phase of a step: calls ``begin(name)``, and ``end(name)`` when the device is done with it."""

    def __init__(self, name, begin, end):
        self._name, self._begin, self._end = name, begin, end

    def __enter__(self):
        self._begin(self._name)

    def __exit__(self, *exception):
        if on_gpus():
            torch.cuda.synchronize()
        self._end(self._name)


class Trainer:
    """Trains a system on this rank."""

    def __init__(self, run, device):
        self.run, self.device = run, torch.device(device)
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
        if on_gpus():
            # What a system needed to set itself up is not what it needs to train.
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def train_step(self, begin=None, end=None):
        """One optimizer step; returns the loss as a tensor.

        Args:
            begin, end: called with the name of each phase; the device then waits at its end. None: it never waits.
        """
        phase = functools.partial(Phase, begin=begin, end=end) if begin else contextlib.nullcontext
        total = 0.0
        for micro_step in range(self.run.accumulation):
            boundary = micro_step == self.run.accumulation - 1
            ids = self.batches.draw(self._drawn)
            self._drawn += 1
            with phase("forward"):
                loss = self.system.forward(ids)
            with phase("backward"):
                self.system.backward(loss, boundary)
            with phase("step"):
                self.system.step(boundary)
            total = total + loss.detach() / self.run.accumulation
        return total

    def timed_steps(self):
        """Runs ``run.steps`` steps; returns their seconds and this rank's losses."""
        clock, losses = Clock(), []
        dist.barrier()
        clock.mark()
        for step in range(self.run.steps):
            losses.append(self.train_step())
            clock.mark()
            # To read the loss the host has to wait, so that is not done where times count for a table.
            if step < 3 or (step + 1) % 100 == 0:
                say(f"  step {step + 1:4} of {self.run.steps}   loss {losses[-1].item():.4f}")
        return clock.seconds(), [loss.item() for loss in losses]

    def watched_step(self):
        """Returns phase -> what is allocated behind it and at most in it (the last micro-batch), and the counters.

        Bytes of the CUDA allocator; phases are empty without one.
        """
        phases, counters = {}, {}
        self.system.reset_counters()

        def begin(_name):
            if on_gpus():
                torch.cuda.reset_peak_memory_stats()

        def end(name):
            if on_gpus():
                allocated, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
                phases[name] = {"after": allocated, "peak": peak}
            if self.system.counters():
                counters[name] = self.system.counters()

        self.train_step(begin, end)
        return phases, counters

    def recorded_step(self):
        """Returns the Timeline of a step."""
        ranges = {}

        def begin(name):
            ranges[name] = timeline.phase(name)
            ranges[name].__enter__()

        def end(name):
            ranges[name].__exit__(None, None, None)

        standing = self.system.standing_gradients()
        return timeline.record(lambda: self.train_step(begin, end), self.device.type, standing)

    def trace_step(self, file):
        """Writes a trace of a step to ``file`` on rank 0."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if on_gpus():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profiler:
            self.train_step()
            if on_gpus():
                torch.cuda.synchronize()
        if dist.get_rank() == 0:
            profiler.export_chrome_trace(str(file))


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

    import deepspeed

    return {
        "date": datetime.date.today().isoformat(),
        "host": platform.node(),
        "device": torch.cuda.get_device_name() if on_gpus() else "CPU",
        "world": dist.get_world_size(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "fork": importlib.util.find_spec("deepspeed.compile.gradient_partition") is not None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpus() else None,
        "transformers": transformers.__version__,
        "command": " ".join(sys.argv),
    }


def measure(run, device, trace):
    """Runs and measures; returns what is written as JSON."""
    from torch._dynamo.utils import compilation_time_metrics

    trainer = Trainer(run, device)
    say(f"{trainer.parameters / 1e6:,.1f} million parameters; set up in {trainer.setup_s:.1f} s")
    seconds, losses = trainer.timed_steps()
    # Totals by torch's own names, of which some contain others.
    compilation = {name: round(sum(values), 3) for name, values in compilation_time_metrics.items()}
    reserved = torch.cuda.max_memory_reserved() if on_gpus() else None
    phases, counters = trainer.watched_step()
    recorded = trainer.recorded_step()
    if trace:
        trainer.trace_step(trace)
    of_rank = {
        "setup_s": trainer.setup_s,
        "first_step_s": seconds[0],
        "step_s": statistics.median(seconds[run.warm :]),
        "compilation_s": compilation,
        # A CPU's allocator keeps no count of its own: there it is what the step adds.
        "phases": phases or {name: recorded.allocated_in(name) for name in timeline.PHASES},
        "reserved": reserved,
        "most_gradients": recorded.most_gradients(),
        "counters": counters,
    }
    shown = dist.get_rank() in (0, dist.get_world_size() - 1)
    timelines = gather(dataclasses.asdict(recorded.thinned(600)) if shown else None)
    # A step is over when its slowest rank is.
    slowest = [max(of_ranks) for of_ranks in zip(*gather(seconds))]
    return {
        "run": dataclasses.asdict(run),
        "environment": environment(),
        "parameters": trainer.parameters,
        "first_step_s": slowest[0],
        "step_s": statistics.median(slowest[run.warm :]),
        "steps_s": slowest,
        "losses": [statistics.fmean(of_ranks) for of_ranks in zip(*gather(losses))],
        "ranks": gather(of_rank),
        "timelines": {str(rank): line for rank, line in enumerate(timelines) if line},
    }

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The training steps of one rank: to take their times, to read memory after each phase, and to profile."""

import contextlib
import dataclasses
import gc
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist

from . import flops
from .devices import mapped_bytes, on_gpus, synchronize
from .recorder import data, record
from .settings import Settings
from .systems import make_system
from .tiles import save_inputs_on_host, tile_loss, tile_mlps
from .workload import SHAPES, Batches, add_adapters, build_model, multiply_in_float8


def say(text: str) -> None:
    """Prints on rank 0 only."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def leave() -> None:
    """Ends communication, at the end of a rank's program."""
    dist.barrier()
    # Reference cycles still hold process groups, whose threads must end before the interpreter does. Otherwise the
    # interpreter may abort at its end (pytorch/pytorch issue 190489).
    gc.collect()
    dist.destroy_process_group()


class Clock:
    """Takes the times of steps and of their phases. On GPUs it uses CUDA events: the host may run ahead of the device.

    So a phase lasts from when the device has done what was queued before the phase until it has done the phase's part.
    """

    def __init__(self):
        self._marks = [self._now()]
        self._phases = []  # of each step: (name, begin, end)

    def _now(self):
        if not on_gpus():
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context of a phase of the current step. A step may have several phases of one name."""
        if len(self._phases) < len(self._marks):
            self._phases.append([])
        begin = self._now()
        yield
        self._phases[-1].append((name, begin, self._now()))

    def mark(self) -> None:
        """Marks the end of a step and the beginning of the next."""
        self._marks.append(self._now())

    def seconds(self) -> list[float]:
        """Returns the seconds of each step, after waiting for the device to reach the end of the last."""
        return [self._between(begin, end) for begin, end in itertools.pairwise(self._marks)]

    def phase_seconds(self) -> dict[str, list[float]]:
        """Returns the seconds of each step's phases: name -> for each step, the sum of its phases of that name."""
        sums = {name: [0.0] * len(self._phases) for name, *_ in self._phases[0]}
        for step, phases in enumerate(self._phases):
            for name, begin, end in phases:
                sums[name][step] += self._between(begin, end)
        return sums

    @staticmethod
    def _between(begin, end):
        if not on_gpus():
            return end - begin
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


class Trainer:
    """Trains a system on this rank.

    Attributes:
        settings: of the run.
        device: of this rank.
        parameters: the number of the model's parameters.
        flops_per_token: see flops.py.
        batches: this rank's.
        system: which holds the model.
        setup_s: seconds that building the model and wrapping it in the system took.
        setup_peak: the most bytes of the device that this took; None on a CPU.
    """

    def __init__(self, settings: Settings, device: str):
        self.settings, self.device = settings, torch.device(device)
        shape = SHAPES[settings.shape]
        shape = dataclasses.replace(shape, num_hidden_layers=settings.layers or shape.num_hidden_layers)
        dtype = torch.bfloat16 if settings.dtype == "bf16" else torch.float32
        began = time.perf_counter()
        if on_gpus():
            torch.cuda.reset_peak_memory_stats()
        model = build_model(shape, dtype, self._where(), settings.checkpoint, drawn_on=device)
        if settings.float8:
            multiply_in_float8(model, settings.float8, settings.float8_gather)
        if settings.lora:
            add_adapters(model, settings.lora)
        if settings.inputs_on_host == "torch":
            save_inputs_on_host(model)
        if settings.mlp_tiles:
            tile_mlps(model, settings.mlp_tiles)
        if settings.loss_tiles:
            tile_loss(model, settings.loss_tiles, by_deepspeed=not settings.is_fsdp2)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.flops_per_token = flops.per_token(model, settings.seq)
        self.batches = Batches(shape.vocab_size, settings.micro_batch, settings.seq, dist.get_rank(), device)
        self.system = make_system(settings, model)
        self.setup_s = time.perf_counter() - began
        self.setup_peak = torch.cuda.max_memory_allocated() + mapped_bytes() if on_gpus() else None
        self._drawn = 0  # batches so far
        self._offloading = contextlib.nullcontext()
        if settings.inputs_on_host == "deepspeed":
            from deepspeed.runtime.activation_checkpointing.offload_activations import CheckpointHiddenStatesOffload

            self._offloading = CheckpointHiddenStatesOffload()
        if on_gpus():
            # The memory that setting up took must not count as memory that training takes.
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def _where(self):
        """Returns the device on which this rank's model is made."""
        if self.settings.model_on == "device":
            return str(self.device)
        return "cpu" if self.settings.model_on == "host" or dist.get_rank() == 0 else "meta"

    def train_step(
        self, around: Callable[[str], AbstractContextManager] = contextlib.nullcontext
    ) -> torch.Tensor | float:
        """Trains one optimizer step; returns its loss, a tensor [] on the device.

        Args:
            around: called with the name of each phase ("forward", "backward", "step"); returns a context for it.
        """
        total = 0.0
        for micro_step in range(self.settings.accumulation):
            boundary = micro_step == self.settings.accumulation - 1
            ids = self.batches.draw(self._drawn)
            self._drawn += 1
            with self._offloading:
                with around("forward"):
                    loss = self.system.forward(ids)
                with around("backward"):
                    self.system.backward(loss, boundary)
            with around("step"):
                self.system.step(boundary)
            total = total + loss.detach() / self.settings.accumulation
        return total

    def timed_steps(
        self, around_last: Callable[[str], AbstractContextManager] = contextlib.nullcontext
    ) -> tuple[list[float], dict[str, list[float]], list[float]]:
        """Trains ``settings.steps`` steps; returns the seconds of each and of its phases, and this rank's losses.

        Args:
            around_last: called with the name of each phase of the last step; returns a context for it.
        """
        dist.barrier()
        clock, losses = Clock(), []

        @contextlib.contextmanager
        def both(name):
            with clock.phase(name), around_last(name):
                yield

        for step in range(self.settings.steps):
            losses.append(self.train_step(both if step == self.settings.steps - 1 else clock.phase))
            clock.mark()
            # The host waits for the device to read a loss, so it reads none in most steps that count for the median.
            if step < 3 or (step + 1) % 100 == 0:
                say(f"  step {step + 1:4} of {self.settings.steps}   loss {losses[-1].item():.4f}")
        return clock.seconds(), clock.phase_seconds(), [loss.item() for loss in losses]

    def watch(
        self,
    ) -> tuple[Callable[[str], AbstractContextManager], dict[str, dict[str, int]], dict[str, dict[str, int]]]:
        """Returns what watches the phases of a step: the host waits for the device after each and reads its memory.

        With accumulation, the figures of a phase are those of the last micro-batch.

        Returns:
            A context for each phase, and two dicts that these contexts fill. The first: phase -> {"after": bytes
            allocated at its end, "peak": the most bytes in it, "active": the most with what other streams still read},
            as the CUDA allocator counts them; empty on a CPU. The second: phase -> the system's counters at its end;
            empty if the system does not count.
        """
        phases, counters = {}, {}
        self.system.reset_counters()

        @contextlib.contextmanager
        def watch(name):
            if on_gpus():
                torch.cuda.reset_peak_memory_stats()
            yield
            synchronize()
            if on_gpus():
                mapped = mapped_bytes()
                allocated, peak = torch.cuda.memory_allocated() + mapped, torch.cuda.max_memory_allocated() + mapped
                # Memory that a copy on another stream still reads is free to the program, but not to the allocator.
                active = torch.cuda.memory_stats()["active_bytes.all.peak"] + mapped
                phases[name] = {"after": allocated, "peak": peak, "active": active}
            counted = self.system.counters()
            if counted:
                counters[name] = counted

        return watch, phases, counters

    def recorded_step(self) -> data.StepMemory:
        """Trains a step under torch's profiler; returns its memory."""
        recording = record.Recording(self.device, self.system.tensors(), mapped_bytes())
        self.train_step(lambda name: record.phase(name, self.device))
        return recording.stop({})

    def trace_step(self, file: str | Path) -> None:
        """Trains a step under torch's profiler; on rank 0, writes a trace of it to ``file``."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if on_gpus():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
            self.train_step()
            synchronize()
        if dist.get_rank() == 0:
            profiler.export_chrome_trace(str(file))

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Trains a Qwen3 with random weights and measures time and memory.

From the root of the repository::

    deepspeed --module benchmarks.measure --shape qwen3-8b                      on all GPUs of this machine
    deepspeed --num_accelerators 2 --module benchmarks.measure --shape tiny     on a CPU, in two processes

It measures whichever DeepSpeed is installed. benchmarks.compare runs it once for each system.
"""

import dataclasses
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .devices import mapped_bytes, on_gpus, take_gpu
from .recorder import data
from .results import PHASES, Result, allocated_in
from .settings import Settings, parse_command_line
from .steps import Trainer, leave, say
from .systems import is_fork
from .tables import print_run

# DeepSpeed calls it by its older name, which torch 2.13 renames.
warnings.filterwarnings("ignore", message=".*all_gather_into_tensor.* is deprecated", category=FutureWarning)

# A timeline is written with about this many points.
TIMELINE_POINTS = 600


def gather(value: Any) -> list:
    """Returns every rank's ``value``, in rank order."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def environment() -> dict[str, Any]:
    """Returns what the run ran on: the host, its devices, and versions."""
    import transformers

    import deepspeed

    return {
        "date": datetime.date.today().isoformat(),
        "host": platform.node(),
        "device": torch.cuda.get_device_name() if on_gpus() else "CPU",
        "world": dist.get_world_size(),
        "gpus": torch.cuda.device_count() if on_gpus() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "fork": is_fork(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpus() else None,
        "transformers": transformers.__version__,
        "torchao": importlib.metadata.version("torchao") if importlib.util.find_spec("torchao") else None,
        "command": " ".join(["-m", f"{__package__}.measure", *sys.argv[1:]]),
    }


def measure(settings: Settings, device: str, trace: str | None) -> Result:
    """Trains on this rank and measures; every rank calls it, and every rank returns the result of all ranks.

    The steps whose times are taken come first. One more step is for memory, and one for the timeline, because reading
    memory and profiling hold up the host. A brief run has neither on GPUs: it reads memory in its last timed step.

    Args:
        settings: of the run.
        device: this rank's, for example "cuda:0" or "cpu".
        trace: the file for a trace of one step of rank 0, or None.
    """
    from torch._dynamo.utils import compilation_time_metrics

    trainer = Trainer(settings, device)
    say(f"{trainer.parameters / 1e6:,.1f} million parameters; set up in {trainer.setup_s:.1f} s")
    watching = trainer.watch() if settings.brief else None
    seconds, phase_seconds, losses = trainer.timed_steps(*(watching[:1] if watching else ()))
    # Totals by torch's own names, of which some contain others.
    compilation = {name: round(sum(values), 3) for name, values in compilation_time_metrics.items()}
    reserved = torch.cuda.max_memory_reserved() + mapped_bytes() if on_gpus() else None
    outside = None
    if on_gpus():
        free, total = torch.cuda.mem_get_info()
        outside = total - free - torch.cuda.memory_reserved() - mapped_bytes()
    if watching is None:
        watching = trainer.watch()
        trainer.train_step(watching[0])
    _, phases, counters = watching
    recorded = None if settings.brief and on_gpus() else trainer.recorded_step()
    if trace:
        trainer.trace_step(trace)
    of_rank = {
        "setup_s": trainer.setup_s,
        "setup_peak": trainer.setup_peak,
        "first_step_s": seconds[0],
        "step_s": statistics.median(seconds[settings.warm :]),
        "phases_s": {name: statistics.median(seconds[settings.warm :]) for name, seconds in phase_seconds.items()},
        "compilation_s": compilation,
        # A CPU's allocator keeps no count. There the profiler tells what the step adds to what tensors held before.
        "phases": phases or {name: allocated_in(recorded, name) for name in PHASES},
        "reserved": reserved,
        "outside": outside,
        "most_gradients": recorded and max(recorded.sums(data.OF_GRADIENTS)),
        "counters": counters,
        # Linux tells it in KiB.
        "host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    shown = recorded and dist.get_rank() in (0, dist.get_world_size() - 1)
    timelines = gather(dataclasses.asdict(recorded.thinned(TIMELINE_POINTS)) if shown else None)
    # A step is over when its slowest rank is.
    slowest = [max(of_ranks) for of_ranks in zip(*gather(seconds))]
    return {
        "run": dataclasses.asdict(settings),
        "environment": environment(),
        "parameters": trainer.parameters,
        "flops_per_token": trainer.flops_per_token,
        "first_step_s": slowest[0],
        "step_s": statistics.median(slowest[settings.warm :]),
        "steps_s": slowest,
        "losses": [statistics.fmean(of_ranks) for of_ranks in zip(*gather(losses))],
        "ranks": gather(of_rank),
        "timelines": {str(rank): line for rank, line in enumerate(timelines) if line},
    }


def main() -> None:
    settings, file, trace = parse_command_line(__doc__.splitlines()[0])
    device = take_gpu() if on_gpus() else "cpu"
    if device == "cpu" or settings.offload:
        torch.set_num_threads(max(1, os.cpu_count() // int(os.environ["WORLD_SIZE"])))
    if settings.is_fsdp2 or settings.system == "ddp":
        # With offloading, gradients are on the host when their norm is taken.
        backend = "cuda:nccl,cpu:gloo" if settings.offload else "nccl"
        on_gpu = {"backend": backend, "device_id": torch.device(device)}
        dist.init_process_group(**({"backend": "gloo"} if device == "cpu" else on_gpu))
    else:
        import deepspeed

        deepspeed.init_distributed()
    result = measure(settings, device, trace)
    if dist.get_rank() == 0:
        print_run(result)
        if file:
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            Path(file).write_text(json.dumps(result, indent=1) + "\n")
    leave()


if __name__ == "__main__":
    main()

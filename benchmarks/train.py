# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Trains a Qwen3 with random weights and measures time and memory.

    deepspeed benchmarks/train.py --shape qwen3-8b                      on all GPUs of this machine
    deepspeed --num_accelerators 2 benchmarks/train.py --shape tiny     on a CPU, in two processes

It takes whichever DeepSpeed is installed. compare.py runs it once for each system to compare.
"""

import argparse
import dataclasses
import gc
import json
import os
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from report import print_run
from systems import SYSTEMS
from trainer import measure, on_gpus
from workload import SHAPES

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
    one_graph: bool = False
    overlap_gather: bool = False
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
    parser.add_argument("--stage", type=int, choices=(1, 2), help="of ZeRO; 2: FSDP2 too reduces always")
    parser.add_argument("--checkpoint", action="store_true", default=None, help="activations of every layer")
    parser.add_argument("--one-graph", action="store_true", default=None, help="DeepCompile without regions")
    parser.add_argument(
        "--overlap-gather", action="store_true", default=None, help="DeepCompile's overlap_param_gather"
    )
    parser.add_argument("--adam", choices=("foreach", "fused"), help="which implementation of torch's AdamW")
    parser.add_argument("--backend", choices=("inductor", "eager"), help="eager: graphs, but no generated code")
    parser.add_argument("--bucket", type=int, help="ZeRO's reduce_bucket_size, elements; FSDP2 sends blocks")
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
    if (run.one_graph or run.overlap_gather) and run.system != "deepcompile":
        parser.error("--one-graph and --overlap-gather go with --system deepcompile")
    if run.one_graph and run.overlap_gather:
        parser.error("--overlap-gather needs the graphs of blocks; leave --one-graph out")
    if "RANK" not in os.environ:
        parser.error("start this with DeepSpeed's launcher: deepspeed benchmarks/train.py")
    return (run, *files)


def main():
    run, file, trace = parse_arguments()
    if on_gpus():
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
    # What is left in cycles holds process groups, whose threads have to end before the interpreter does: otherwise it
    # may be aborted there (pytorch/pytorch issue 190489).
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Whether to use GPUs, and which."""

import os
import sys

import torch


def on_gpus() -> bool:
    """Whether to use GPUs: where there are any, unless ``DS_ACCELERATOR`` tells DeepSpeed to use the CPU."""
    return os.environ.get("DS_ACCELERATOR") != "cpu" and torch.cuda.is_available()


def visible_gpus() -> list[str]:
    """Returns the numbers of the GPUs to use, as DeepSpeed's launcher counts them; empty on a CPU.

    Raises:
        SystemExit: if ``CUDA_VISIBLE_DEVICES`` names GPUs by something else than numbers.
    """
    if not on_gpus():
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(index) for index in range(torch.cuda.device_count())]
    named = visible.split(",")
    if not all(name.isdecimal() for name in named):
        raise SystemExit(f"CUDA_VISIBLE_DEVICES={visible}: DeepSpeed's launcher needs numbers; name GPUs by these.")
    return named


def take_gpu() -> str:
    """Chooses the GPU of this rank before anything communicates, and returns its name, for example "cuda:0".

    Where ranks are more than GPUs, they share these. NCCL refuses two ranks of one host on one GPU, and tells hosts
    apart by a variable. So each rank has a name of its own there, and messages go through sockets.
    """
    rank, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    # All ranks are on this machine.
    if int(os.environ["WORLD_SIZE"]) > gpus:
        os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
        rank %= gpus
        os.environ["LOCAL_RANK"] = str(rank)
    torch.cuda.set_device(rank)
    return f"cuda:{rank}"


def synchronize() -> None:
    """Makes the host wait until the GPU has done its work; on a CPU there is nothing to wait for."""
    if on_gpus():
        torch.cuda.synchronize()


def mapped_bytes() -> int:
    """Returns the bytes of memory that DeepCompile's ranks map on each other's GPUs. Torch's allocator, and so its
    peaks, leave them out. They stay from set-up to end."""
    deepcompile = sys.modules.get("deepspeed.compile.zero_1_and_2")
    return deepcompile.mapped_memory.nbytes if deepcompile else 0

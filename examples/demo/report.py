# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What rank 0 prints."""

import contextlib
import os
import threading
import time

import torch

import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator


def say(text):
    """Prints on rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


@contextlib.contextmanager
def announce(what, silent=False):
    """Says what is being done, every 15 s that it still is, and how long it took."""
    if silent:
        yield
        return
    say(f"{what} ...")
    began, done = time.perf_counter(), threading.Event()

    def keep_saying():
        while not done.wait(15):
            say(f"  ... still at it after {time.perf_counter() - began:.0f} s")

    thread = threading.Thread(target=keep_saying, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    say(f"  done in {time.perf_counter() - began:.1f} s")


def _over_ranks(value, operation):
    tensor = torch.as_tensor(value, dtype=torch.float64, device=get_accelerator().current_device_name())
    dist.all_reduce(tensor, op=operation)
    return tensor.item()


def maximum_over_ranks(value):
    return _over_ranks(value, dist.ReduceOp.MAX)


def mean_over_ranks(value):
    return _over_ranks(value, dist.ReduceOp.SUM) / dist.get_world_size()


def seconds(value):
    return f"{value:.3f} s"


def mebibytes(value):
    return "0" if value == 0 else f"{value / 2**20:.2f} MiB"


def print_table(config, results):
    """Prints the two runs side by side.

    Args:
        config: the demo's Config.
        results: "off" and "on" -> what ``train()`` returned.
    """
    off, on = results["off"], results["on"]
    rows = [
        ("first step", seconds(off["first_step_s"]), seconds(on["first_step_s"])),
        ("later steps (median)", seconds(off["step_s"]), seconds(on["step_s"])),
        ("loss of the first step", f"{off['losses'][0]:.6f}", f"{on['losses'][0]:.6f}"),
        ("loss of the last step", f"{off['losses'][-1]:.6f}", f"{on['losses'][-1]:.6f}"),
        ("gradients held by a rank", "", ""),
    ]
    for moment, held in off["gradient_bytes"].items():
        peak = moment.startswith("peak")
        rows.append(
            (
                f"  {moment}",
                ("at least " if peak else "") + mebibytes(held),
                ("at most " if peak else "") + mebibytes(on["gradient_bytes"][moment]),
            )
        )
    if off["gpu_bytes"]:
        rows.append(("GPU memory allocated", "", ""))
        rows += [
            (f"  {moment}", mebibytes(held), mebibytes(on["gpu_bytes"][moment]))
            for moment, held in off["gpu_bytes"].items()
        ]
    device = torch.cuda.get_device_name() if off["gpu_bytes"] else "CPU"
    world = dist.get_world_size()
    processes = f"{world} process{'es' if world > 1 else ''} on {device}"
    print(
        f"\nQwen3, {off['parameters'] / 1e6:.1f} million parameters in {config.dtype}, ZeRO-{config.stage}, "
        f"accumulation {config.accumulation}; {processes}, torch {torch.__version__}"
    )
    print(f"{'':26}{'DeepCompile off':>22}{'DeepCompile on':>22}")
    for name, *values in rows:
        print(f"{name:26}{values[0]:>22}{values[1]:>22}".rstrip())
    print(
        "Highest of any rank. Peak: off, sampled as each gradient arrives; on, a sum of peaks that may not coincide.",
        flush=True,
    )
    if not off["gpu_bytes"]:
        print(
            "A CPU shows that it trains, that losses agree, and which gradients a rank holds. It cannot show how much "
            "faster a step is on GPUs, nor a GPU's memory: docs/results/summary.md has these.",
            flush=True,
        )

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Copy engines where they can serve, and what says so elsewhere. The rest needs GPUs: see ``carry.py``."""

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from deepspeed.compile.features.copy_engines.feature import why_impossible, why_not_on_this_rank
from deepspeed.compile.zero_1_and_2.parameter.carrier import MappedMemory

from support.lifetime import alive_soon, backward, start
from support.on_ranks import on_ranks
from support.training import Case

pytestmark = pytest.mark.options("compile.copy_engines")
PROGRAM = Path(__file__).with_name("carry.py")


def test_hosts_are_told_apart_by_the_launcher(monkeypatch):
    """Without this, ranks of several hosts could try to map each other's memory, and hang in that."""
    import deepspeed.compile.features.copy_engines.feature as possible

    class Cuda:
        def device_name(self):
            return "cuda"

    monkeypatch.setattr(possible, "get_accelerator", Cuda)
    for local, world, begins in (("8", 16, "ranks are on several"), ("8", 8, ""), ("", 8, ""), ("1", 1, "a single")):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        assert why_impossible(world).startswith(begins) and bool(why_impossible(world)) == bool(begins)


@pytest.mark.quick
def test_streams_that_share_a_queue(monkeypatch):
    """A stream that waits for a rank would hold up what that rank waits for: both would hang."""
    group = mock.Mock(**{"_get_backend.return_value.name.return_value": "nccl"})
    assert why_not_on_this_rank(group, torch.device("cuda", 0)) == ""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1 makes" in why_not_on_this_rank(group, torch.device("cuda", 0))


@pytest.mark.quick
def test_mapped_memory_is_counted_as_long_as_it_lives():
    """Memory of a tensor whose data has moved would count as mapped, or memory that another tensor has would not."""
    mapped, flat, other = MappedMemory(), torch.zeros(1000), torch.zeros(30)
    mapped.add(flat)
    mapped.add(other)
    assert mapped.nbytes == 4120
    flat.data = other.data
    del other
    assert mapped.nbytes == 120
    del flat
    assert mapped.nbytes == 0


@on_ranks(1)
def test_nothing_keeps_the_memory_of_parameters_that_are_on_the_host():
    """Mapped memory is free when nothing refers to it, and a program that makes room on the GPU would get none."""
    _, engine = start(Case())
    backward(engine, 0)
    engine.step()
    memory = [StorageWeakRef(flat.untyped_storage()) for flat in engine.optimizer.bit16_groups_flat]
    assert memory and not any(storage.expired() for storage in memory)
    engine.offload_states()
    assert alive_soon(memory) == 0
    engine.reload_states()
    engine.destroy()


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("ranks", [2, 4], ids=str)
def test_ranks_that_share_a_gpu(ranks):
    """Without this, copied bytes could be wrong or late, memory could exceed what is stated, and ranks could hang."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={ranks}",
        str(PROGRAM),
        # Other tests may run beside this one.
        "--shared",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ.copy())
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]

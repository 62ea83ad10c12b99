# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Memory that all ranks of one host have mapped: on their GPUs for what they carry, on the host for signals."""

import contextlib
import mmap
import os
import tempfile
from typing import TYPE_CHECKING, Any, Iterator, List, NamedTuple

import torch
import torch.distributed as dist

from ...zero_1_and_2.collectives import every_rank_raises
from ...zero_1_and_2.gradient.native import reducer_module
from ...zero_1_and_2.parameter.carrier import mapped_memory

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Files that processes of one host share and that lie in memory.
SHARED = "/dev/shm"
# Torch reads this variable. A program that uses NVLink's multicast can take the GPUs of others out of service.
NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


class Mapped(NamedTuple):
    """A tensor of this rank, and where this rank's device finds it and the peers' tensors of the same size."""

    tensor: torch.Tensor
    addresses: List[int]  # by rank
    handle: object  # keeps the peers' memory mapped


def native() -> Any:
    """Returns the native module, built at first use. ``csrc/includes/deepcompile_copy_engines.h`` explains it."""
    return reducer_module().copy_engines


def mapped(numel: int, dtype: torch.dtype, device: torch.device, group: "ProcessGroup") -> Mapped:
    """Allocates an uninitialized tensor [numel] on each rank's device. Every rank of the group calls this.

    The memory is not torch's allocator's. It is freed with the tensor and the handle.

    Raises:
        RuntimeError: if memory ran out, or the ranks cannot map each other's.
    """
    from torch.distributed import _symmetric_memory as symmetric_memory

    with every_rank_raises("allocate memory that all ranks map", group):
        # Torch's allocator does not know of this memory, so it would not give back what it keeps unused.
        torch.cuda.empty_cache()
        tensor = symmetric_memory._SymmetricMemory.empty_strided_p2p((numel,), (1,), dtype, device)
    # A rank that fails in there keeps the others waiting until the store's timeout.
    with every_rank_raises("map the memory of other ranks", group), _without_multicast():
        handle = symmetric_memory.rendezvous(tensor, group)
        addresses = [handle.get_buffer(rank, (numel,), dtype).data_ptr() for rank in range(dist.get_world_size(group))]
    addresses[dist.get_rank(group)] = tensor.data_ptr()
    mapped_memory.add(tensor)
    return Mapped(tensor, addresses, handle)


def shared_words(group: "ProcessGroup") -> torch.Tensor:
    """Returns words for ``Signals``, zeroed: int32 [world + 1, channels, numbers of a word], in memory that all ranks
    of the group share. Every rank calls this.

    Raises:
        RuntimeError: if a rank cannot map the memory, for example because it runs on another host.
    """
    code = native()
    shape = (dist.get_world_size(group) + 1, code.CHANNELS, code.NUMBERS_OF_A_WORD)
    bytes_ = torch.Size(shape).numel() * torch.int32.itemsize
    path, is_first = "", dist.get_rank(group) == 0
    try:
        with every_rank_raises("share memory for signals", group):
            if is_first:
                file, path = tempfile.mkstemp(prefix="deepcompile-signals-", dir=SHARED)
                with open(file, "wb") as opened:
                    opened.truncate(bytes_)
        told = [path]
        dist.broadcast_object_list(told, dist.get_global_rank(group, 0), group)
        with every_rank_raises("map another rank's memory for signals", group):
            with open(told[0], "r+b") as opened:
                memory = mmap.mmap(opened.fileno(), bytes_)
    finally:
        # The mappings keep the memory.
        if path:
            os.unlink(path)
    return torch.frombuffer(memory, dtype=torch.int32).view(shape)


@contextlib.contextmanager
def _without_multicast() -> Iterator[None]:
    before = os.environ.get(NO_MULTICAST)
    os.environ[NO_MULTICAST] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[NO_MULTICAST]
        else:
            os.environ[NO_MULTICAST] = before

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Sets the native carrier of copy engines up for a process group."""

from typing import Any, List, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ...zero_1_and_2.collectives import collective, every_rank_raises
from ...zero_1_and_2.parameter.carrier import Awaitable, Collectives
from .mapped import mapped, native, shared_words

# The staging of gradients in bytes, on each GPU for each process group, and its slots. While peers pull from
# one slot, others are filled.
STAGING_BYTES = 2**27
SLOTS = 4
# More than one stream hides the pauses between copies.
PULLS = 2
# A row is cut at multiples of so many bytes.
ALIGNMENT = 256
# In so many seconds the ranks' first exchange must succeed.
PROBE_SECONDS = 60.0
WRITE = "learn that other ranks have read the parameters"


def device_bytes(ranks: int) -> int:
    """Returns the bytes that the carrier of a process group takes on each GPU, besides the flat tensors."""
    return SLOTS * (ranks - 1) * row_bytes(ranks)


def row_bytes(ranks: int, staging_bytes: int = STAGING_BYTES, slots: int = SLOTS) -> int:
    """Returns the bytes of the row that a slot has for each peer."""
    return max(staging_bytes // slots // (ranks - 1) // ALIGNMENT, 1) * ALIGNMENT


class CopyEngineCarrier:
    """Carries the gradients and parameters of one process group by copy engines.

    Every rank of the group makes it, and calls each method in the same order.

    Args:
        group: a process group with several ranks, all on this host.
        device: this rank's GPU.
        timeout: for how many seconds a rank waits for a peer; None: as long as the process group does.
        maps_flat: whether flat tensors are mapped. Mapped memory cannot be freed under a tensor, as is done with flat
            tensors where parameters are sharded.
        staging_bytes, slots: of the staging.

    Raises:
        RuntimeError: on every rank, if the ranks cannot map each other's memory, or their signals do not arrive.
    """

    def __init__(
        self,
        group: ProcessGroup,
        device: torch.device,
        timeout: Optional[float] = None,
        maps_flat: bool = True,
        staging_bytes: int = STAGING_BYTES,
        slots: int = SLOTS,
    ):
        self._group, self._device, self._maps_flat = group, device, maps_flat
        # What peers can read here: where it begins and ends, and what keeps it mapped. Not the tensors, whose memory
        # others move and allocate anew.
        self._flats: List[Tuple[int, int, object]] = []
        # Carries what lies elsewhere, such as parameters that were moved to the host and back.
        self._collectives = Collectives(group)
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        code = native()
        row = row_bytes(world, staging_bytes, slots)
        self._staging = mapped(slots * (world - 1) * row, torch.uint8, device, group)
        words = shared_words(group)
        with every_rank_raises("set copy engines up", group):
            self._signals = code.Signals(words=words, rank=rank, timeout=PROBE_SECONDS)
            streams = [torch.cuda.Stream(device, priority=-1) for _ in range(3 + min(PULLS, world - 1))]
            self.native: Any = code.CopyEngines(
                signals=self._signals,
                rank=rank,
                streams=[(stream.stream_id, stream.device_type, stream.cuda_stream) for stream in streams],
                device=device,
                staging=self._staging.addresses,
                staging_bytes=self._staging.tensor.nbytes,
                slots=slots,
                row_bytes=row,
            )
        self._probe()
        self._signals.set_timeout(timeout or timeout_of(group, device))

    def flat_tensor(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """Returns memory of zeros for parameters that :meth:`gather` carries."""
        return self.partition(numel, like) if self._maps_flat else self._collectives.flat_tensor(numel, like)

    def partition(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """Returns memory of zeros for shards that :meth:`gather` carries."""
        return self._mapped(numel, like.dtype).zero_()

    def take_in(self, memory: torch.Tensor) -> torch.Tensor:
        return self._mapped(memory.numel(), memory.dtype).copy_(memory)

    def flats_have_left(self) -> None:
        self.native.forget_flats()
        self._flats.clear()

    def _mapped(self, numel, dtype):
        flat = mapped(numel, dtype, self._device, self._group)
        self.native.add_flat(flat.addresses, flat.tensor.nbytes)
        begin = flat.tensor.data_ptr()
        self._flats.append((begin, begin + flat.tensor.nbytes, flat.handle))
        return flat.tensor

    def beside(self, process_group: ProcessGroup) -> "CopyEngineCarrier":
        """Returns this carrier: gathers and reductions wait for signals of their own. What lies elsewhere goes by
        collectives of ``process_group``."""
        self._collectives = Collectives(process_group)
        return self

    def before_write(self) -> None:
        """Makes the current stream wait until the other ranks have pulled what :meth:`gather` offers."""
        # Once closed, it has nothing under way.
        if self.native is not None:
            with collective(WRITE):
                self.native.before_write()

    def gather(
        self, memory: torch.Tensor, runs: Sequence[Tuple[int, int]], shards: Optional[Sequence[torch.Tensor]] = None
    ) -> List[Awaitable]:
        """Begins to pull the shards of other ranks, as ``Carrier.gather()`` of the core says.

        Raises:
            DistBackendError: if another rank has died, here or in ``wait()``.
        """
        own = [shard for shard in shards or () if shard.numel()]
        if not all(map(self._maps, [memory] if shards is None else own)):
            return self._collectives.gather(memory, runs, shards)
        return [self.native.gather([memory.narrow(0, *run) for run in runs if run[1]], own)]

    def _maps(self, tensor):
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
        return any(first <= begin and end <= behind for first, behind, _ in self._flats)

    def close(self) -> None:
        """Waits for all that was begun, and frees the staging. Tensors of :meth:`flat_tensor` go on to live."""
        self.native.close()
        self.native = None
        del self._signals, self._staging
        self._flats.clear()

    def _probe(self):
        """Exchanges a few numbers."""
        rank, world = dist.get_rank(self._group), dist.get_world_size(self._group)
        with every_rank_raises("exchange numbers by copy engines", self._group):
            sent = torch.arange(world * ALIGNMENT, dtype=torch.float32, device=self._device) * (rank + 1)
            got = sent.new_empty(ALIGNMENT)
            for work in self.native.reduce([(sent, got)], 1.0):
                work.wait()
            self._signals.wait_for_all()
            # The row that this rank adds is still there.
            wanted = sent.chunk(world)[rank] / (rank + 1) * (world * (world + 1) // 2)
            if not torch.equal(got, wanted):
                raise RuntimeError("the copied bytes are wrong")


def timeout_of(group: ProcessGroup, device: torch.device) -> float:
    """Returns the timeout of a process group in seconds."""
    backend = group._get_backend(device)
    backend = getattr(backend, "wrapped_pg", backend)
    return backend.options._timeout.total_seconds()

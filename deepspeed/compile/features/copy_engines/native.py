# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The native classes and functions of copy engines, as Python sees them."""

from typing import Any, Dict, List, Protocol, Tuple, Type, cast

import torch
from torch.distributed import Work

from ...zero_1_and_2.gradient.native import reducer_module


class Signals(Protocol):
    """The native class ``Signals``. ``csrc/includes/deepcompile_copy_engines.h`` explains its methods."""

    def __init__(self, *, words: torch.Tensor, rank: int, timeout: float): ...
    def set_timeout(self, timeout: float) -> None: ...
    def expect(self, channel: int, number: int) -> None: ...
    def check(self) -> None: ...
    def wait_for_all(self) -> None: ...
    def exchange(self, own: List[int]) -> List[int]: ...
    def give_up(self, reason: str) -> None: ...


class CopyEngines(Protocol):
    """The native class ``CopyEngines``, which the same file explains."""

    def __init__(
        self,
        *,
        signals: Signals,
        rank: int,
        streams: List[Tuple[int, int, int]],
        device: torch.device,
        staging: List[int],
        staging_bytes: int,
        slots: int,
        row_bytes: int,
    ): ...

    def reduce(self, messages: List[Tuple[torch.Tensor, torch.Tensor]], divisor: float) -> List[Work]: ...
    def add_flat(self, addresses: List[int], bytes: int) -> None: ...
    def forget_flats(self) -> None: ...
    def gather(self, runs: List[torch.Tensor], shards: List[torch.Tensor] = ...) -> Work: ...
    def before_write(self) -> None: ...
    def wait_for_signals(self) -> None: ...
    def close(self) -> None: ...


class NativePart(Protocol):
    """The native module ``copy_engines``, which ``csrc/compile/bindings.cpp`` defines."""

    Signals: Type[Signals]
    CopyEngines: Type[CopyEngines]
    CHANNELS: int
    NUMBERS_OF_A_WORD: int

    def cut(self, shard_bytes: List[int], row_bytes: int) -> List[List[Tuple[int, int, int, int]]]: ...
    def schedule(
        self, world: int, rank: int, slots: int, pulls: int, first: int, portions: int
    ) -> List[Dict[str, Any]]: ...
    def add_rows(self, out: torch.Tensor, rows: torch.Tensor, scale: float) -> None: ...


def native() -> NativePart:
    """Returns the native module, built at first use."""
    return cast(NativePart, reducer_module().copy_engines)

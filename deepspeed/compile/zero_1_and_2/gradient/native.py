# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Access to DeepCompile's native code."""

import functools
from typing import Any, Callable, Dict, List, Optional, Protocol, Type

import torch
from torch.distributed import ProcessGroup

from ..messages import warn


class HandedOver(Protocol):
    """The targets of a parameter group, which the reducer hands to the optimizer when a step is complete."""

    @property
    def flat_partition(self) -> Optional[torch.Tensor]: ...
    def targets(self) -> Dict[int, torch.Tensor]: ...
    def are_views(self, views: List[Optional[torch.Tensor]]) -> bool: ...


class Reducer(Protocol):
    """The native class ``Reducer`` as Python sees it. ``csrc/includes/deepcompile.h`` explains its methods."""

    def __init__(
        self,
        *,
        identity: int,
        bucket_numel: int,
        send_numel: int,
        overlap: bool,
        hold_on_cpu: bool = ...,
        synchronize_before: bool,
        synchronize_after: bool,
    ): ...

    @property
    def identity(self) -> int: ...

    def some_want_to_hold(self) -> bool: ...
    def hold_on_cpu(self, holds: bool) -> None: ...

    def add_group(
        self,
        process_group: ProcessGroup,
        divisor: float,
        partition_numel: int,
        target_dtype: torch.dtype,
        device: torch.device,
        flat: bool,
        host: Optional[torch.Tensor],
    ) -> int: ...

    def set_carrier(self, group: int, carrier: object) -> None: ...

    def register_parameter(
        self,
        group: int,
        name: str,
        parameter: torch.Tensor,
        communication_dtype: torch.dtype,
        shard_numel: int,
        offset: int,
    ) -> None: ...

    @property
    def in_backward(self) -> bool: ...

    def listen(self, begin: Callable[[], bool]) -> None: ...
    def follow_stream(self) -> None: ...
    def leads_to_parameters(self) -> bool: ...
    def abandon_unfinished(self, may_enclose: bool) -> Optional[str]: ...
    def abandoned(self) -> Optional[str]: ...
    def begin_backward(self, reduces: bool) -> None: ...
    def replace_gradients(self) -> None: ...
    def finish_backward(self, reduces: bool, completes: bool) -> List[HandedOver]: ...
    def abandon_backward(self) -> None: ...
    def compare_and_await_targets(self) -> None: ...
    def await_others(self) -> None: ...
    def release(self, group: Optional[int]) -> None: ...
    def close(self) -> None: ...
    def counters(self) -> Dict[str, int]: ...
    def reset_counters(self) -> None: ...


class NativeModule(Protocol):
    """The native module that ``csrc/compile/bindings.cpp`` defines."""

    Reducer: Type[Reducer]
    HandedOver: Type[HandedOver]
    # Native modules of optional parts.
    copy_engines: Any

    def reduce_grad(
        self, grad: torch.Tensor, registrations: torch.Tensor, position: int, donated: bool
    ) -> torch.Tensor: ...
    def leads_to_compiled_code(self) -> bool: ...
    def could_not(self, purpose: str, reason: str) -> str: ...
    def users_of_storage(self, storage: torch.UntypedStorage) -> int: ...


@functools.lru_cache(maxsize=1)
def reducer_module() -> NativeModule:
    """Returns the native module of ZeRO-1/2, built at first use.

    Loading the module registers the operators ``torch.ops.deepcompile``.

    Raises:
        RuntimeError: if the module cannot be built. The cause is the error of the build.
    """
    from deepspeed.ops.op_builder.dc import DeepCompileBuilder

    builder = DeepCompileBuilder()
    try:
        if not builder.is_built():
            # Warn, because DeepSpeed shows no lower level by default.
            warn(
                "DeepCompile is building its native code, or waiting for a process that is. This takes about a "
                "minute, once per environment."
            )
        module: NativeModule = builder.load_reducer()
    except Exception as error:
        lacking = builder.lacking()
        why = f"this machine lacks {lacking}" if lacking else "the output above says why"
        raise RuntimeError(f"DeepCompile could not build its native code: {why}") from error
    # Nothing uses the results of these operators, but dead-code elimination must keep their calls.
    for operator in (torch.ops.deepcompile.reduce_grad.default, torch.ops.deepcompile.end_backward.default):
        torch.fx.node.has_side_effect(operator)
    # Results while a graph is traced. Registrations are then on the host, even if gradients are not.
    torch.library.register_fake("deepcompile::reduce_grad", lambda grad, *_, **__: grad.new_empty(0))
    torch.library.register_fake("deepcompile::end_backward", lambda *_: None)
    return module


def users_of(storage: torch.UntypedStorage) -> int:
    """Counts tensors, NumPy arrays and others that have a storage, of which the caller has one variable of Python."""
    # How often torch counts one variable differs by release.
    count, alone = reducer_module().users_of_storage, torch.empty(0).untyped_storage()
    return count(storage) - count(alone)

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The error when host memory cannot be pinned, and the end of engines, which checks what is pinned.

To DeepSpeed: if ``offload_optimizer`` cannot pin memory, torch's error reads like one of GPU memory. Please name
``offload_optimizer.pin_memory`` and the size in it.
"""

import contextlib
import traceback
from typing import TYPE_CHECKING, Iterator

from torch.utils._python_dispatch import _disable_current_modes, is_in_torch_dispatch_mode

from deepspeed.accelerator import get_accelerator

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


@contextlib.contextmanager
def explained_pinning(engine: "DeepSpeedEngine") -> Iterator[None]:
    """Context in which an engine makes its optimizer. Adds a remedy to errors while host memory is pinned.

    Raises:
        RuntimeError: if the memory could not be pinned. The message says how much.
    """
    try:
        yield
    except RuntimeError as error:
        # The device may also run out of memory, outside of this function of the accelerator.
        code = getattr(get_accelerator().pin_memory, "__code__", None)
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code is code]
        tensor = frames[0].f_locals.get("tensor") if frames else None
        if not engine.is_deepcompile_enabled() or tensor is None or "out of memory" not in str(error):
            raise
        raise RuntimeError(
            f"zero_optimization.offload_optimizer: {tensor.nbytes / 2**30:.1f} GiB more of pinned host memory could "
            "not be allocated; use more ranks, or set offload_optimizer.pin_memory to false"
        ) from error


def destroy_collected(engine: "DeepSpeedEngine") -> None:
    """Called when Python collects an engine, for example while another one compiles within FakeTensorMode.

    DeepSpeed asks each tensor of the optimizer's states whether it is pinned. That mode raises an error for each,
    which prints the tensor. Torch has no public way to leave modes, and another thread could wait for a lock that this
    thread holds.
    """
    # Without an open mode, do not call the private function, which imports a part of the compiler.
    with _disable_current_modes() if is_in_torch_dispatch_mode() else contextlib.nullcontext():
        engine.destroy()

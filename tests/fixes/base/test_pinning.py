# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""An error of pinned host memory says which option helps."""

import pytest

from deepspeed.accelerator import get_accelerator

from support.on_ranks import on_ranks
from support.training import Case, build, make_engine


def pin_memory(numel):
    """Has the name of the accelerator's function, but is another function with other arguments."""
    raise RuntimeError(f"CUDA error: out of memory: {numel} elements")


def pin(tensor, **_):
    pin_memory(tensor.numel())


def pin_elsewhere(*tensors, **_):
    pin_memory(sum(tensor.numel() for tensor in tensors))


def without_memory_to_pin(pins):
    """Returns what deepspeed.initialize() raises where no memory can be pinned."""
    accelerator = get_accelerator()
    accelerator.pin_memory = pins
    try:
        with pytest.raises(RuntimeError) as raised:
            make_engine(build(Case()), Case(offloaded=True))
        # As is advised.
        section = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
        make_engine(build(Case()), Case(offloaded=True, config={"zero_optimization": section})).destroy()
    finally:
        del accelerator.pin_memory
    # The traceback would keep the engine that was not made.
    return raised.value.with_traceback(None)


@pytest.mark.follows(", or set offload_optimizer.pin_memory to false")
@on_ranks(1)
def test_no_memory_to_pin():
    """Torch's error of pinned memory names the GPU's, and no option that helps."""
    error = without_memory_to_pin(pin)
    assert str(error) == (
        "zero_optimization.offload_optimizer: 0.0 GiB more of pinned host memory could not be allocated; use more "
        "ranks, or set offload_optimizer.pin_memory to false"
    )
    assert str(error.__cause__).startswith("CUDA error: out of memory")
    # How much was asked for is not known.
    assert str(without_memory_to_pin(pin_elsewhere)).startswith("CUDA error: out of memory")

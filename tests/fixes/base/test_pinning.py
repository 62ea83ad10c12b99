# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""An error of pinned host memory says which option helps."""

from typing import NamedTuple

import pytest

from deepspeed.accelerator import get_accelerator

from support.training import Case, build, make_engine


class Unpinned(NamedTuple):
    """What deepspeed.initialize() says where no memory can be pinned, and the error that this follows."""

    sentence: str
    cause: str


def pin_memory(numel):
    """Has the name of the accelerator's function, but is another function with other arguments."""
    raise RuntimeError(f"CUDA error: out of memory: {numel} elements")


def pin(tensor, **_):
    pin_memory(tensor.numel())


def pin_elsewhere(*tensors, **_):
    pin_memory(sum(tensor.numel() for tensor in tensors))


def without_memory_to_pin(pins):
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
    return Unpinned(str(raised.value), str(raised.value.__cause__))


@pytest.mark.follows(", or set offload_optimizer.pin_memory to false")
def test_no_memory_to_pin(ranks):
    """Torch's error of pinned memory names the GPU's, and no option that helps."""
    for unpinned in ranks(1).run(without_memory_to_pin, pin):
        assert unpinned.sentence == (
            "zero_optimization.offload_optimizer: 0.0 GiB more of pinned host memory could not be allocated; use more "
            "ranks, or set offload_optimizer.pin_memory to false"
        )
        assert unpinned.cause.startswith("CUDA error: out of memory")
    # How much was asked for is not known.
    for unpinned in ranks(1).run(without_memory_to_pin, pin_elsewhere):
        assert unpinned.sentence.startswith("CUDA error: out of memory")

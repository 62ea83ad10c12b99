# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The gradient of master weights that an optimizer steps whole."""

import weakref

import pytest
import torch

from deepspeed.compile.zero_1_and_2.step.partition_gradient import PartitionGradient

from support.optimizers import Views
from support.training import device

FACTORS = pytest.mark.parametrize("factor", [None, 1 / 3], ids=["unscaled", "scaled"])


def on_device(factor):
    return None if factor is None else torch.tensor([factor], device=device())


@pytest.mark.quick
@FACTORS
def test_gradients_are_copied_to_their_places_and_dropped(factor):
    """A gradient would be stepped at another's place, padding by what memory had before, or its memory kept."""
    flat = torch.zeros(50, device=device())
    for offset, numel in ((2, 25), (30, 1), (33, 14)):
        flat[offset : offset + numel] = torch.randn(numel).bfloat16().float()
    views = Views({offset: flat[offset : offset + numel].bfloat16() for offset, numel in ((2, 25), (30, 1), (33, 14))})
    held = [weakref.ref(gradient) for gradient in views.values()]
    gradient = PartitionGradient(views, on_device(factor), flat, torch.bfloat16)
    taken = gradient.scaled(0, 50)
    assert torch.equal(taken, flat if factor is None else flat * on_device(factor))
    assert not views and not any(reference() is not None for reference in held)


@pytest.mark.quick
@FACTORS
def test_gradients_in_one_tensor_are_scaled_there(factor):
    """A copy would take the memory of a whole partition, which a gradient in one tensor saves."""
    flat = torch.randn(50, device=device())
    expected, views = flat * (factor or 1.0), Views({2: flat[2:7], 7: flat[7:27]})
    views.flat_partition = flat
    taken = PartitionGradient(views, on_device(factor), flat, flat.dtype).scaled(0, 50)
    assert taken.data_ptr() == flat.data_ptr() and not views
    torch.testing.assert_close(taken, expected)

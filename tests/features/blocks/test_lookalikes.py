# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Which parameters look like ones that the optimizer lacks."""

import pytest
import torch

from deepspeed.compile.features.blocks.parameters import partially_trained_lookalikes

from support.models import BlocksWithin


@pytest.mark.quick
def test_layers_that_share_no_graph_are_not_taken_for_alike():
    """Where an optimizer lacks one linear layer, autograd would hold the gradients of all others of a model."""
    model = BlocksWithin()
    model.other = torch.nn.Linear(*model.body.blocks[0].up.weight.shape[::-1])
    lacks = {id(model.other.weight), id(model.other.bias)}
    registered = [parameter for parameter in model.parameters() if id(parameter) not in lacks]
    assert partially_trained_lookalikes(model, registered) == []
    norms = [block.norm.weight for block in model.body.blocks]
    registered = [parameter for parameter in registered if parameter is not norms[1]]
    assert list(map(id, partially_trained_lookalikes(model, registered))) == list(map(id, norms))

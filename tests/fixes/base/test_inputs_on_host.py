# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's inputs of checkpointed layers on the host: how often they come back, and when their memory is reused.

tests/programs/test_long_sequences.py trains with them.
"""

import types
from unittest import mock

import pytest
import torch

from deepspeed.compile.fixes.base import inputs_on_host
from deepspeed.runtime.activation_checkpointing.offload_activations import (
    CheckpointHiddenStatesOffload,
    _ActivationOffloadEngine,
)


def made(**options):
    # The accelerator of a CPU has all tensors on the host already.
    manager = CheckpointHiddenStatesOffload(use_pin_memory=False, use_streams=False, min_offload_bytes=0, **options)
    manager._should_skip = lambda tensor: False
    return manager


def sent(manager, tensor):
    manager.mark(tensor)
    return manager._pack_tensor(tensor)


@pytest.mark.quick
@pytest.mark.parametrize("kept", [0, 1])
def test_comes_back_for_each_backward(kept):
    """A second backward through a graph would find an input gone, or the first would leave all inputs there."""
    values = torch.arange(6.0)
    manager = made(keep_last_count=kept)
    with manager:
        handle = sent(manager, values.clone())
        for _ in range(2):
            assert torch.equal(manager._unpack_tensor(handle), values)
        assert not manager._restored


def test_memory_of_the_host_is_reused():
    """The second micro-batch in one context would take as much memory of the host again."""
    manager = made(keep_last_count=0)
    with manager:
        first = sent(manager, torch.ones(4))
        host, *_ = manager._tracker[first.tensor_id]
        other = sent(manager, torch.ones(4))
        assert manager._tracker[other.tensor_id][0] is not host
        del first
        assert manager._tracker[sent(manager, torch.ones(4)).tensor_id][0] is host


def test_the_last_input_goes_when_its_layer_is_done():
    """The last layer's input, which never left, would stay on the device through the whole backward."""
    manager = made(keep_last_count=1)
    with manager:
        first, last = (sent(manager, torch.ones(4)) for _ in range(2))
        assert [*manager._keep_last] == [last.tensor_id]
        manager._unpack_tensor(last)
        del last
        manager._unpack_tensor(first)
        assert not manager._keep_last


def test_numbers_of_another_context():
    """An input of this context would be forgotten when a handle of the context before, of the same number, is."""
    manager = made(keep_last_count=0)
    with manager:
        old = sent(manager, torch.zeros(4))
    with manager:
        new = sent(manager, torch.ones(4))
        assert new.tensor_id == old.tensor_id
        del old
        sent(manager, torch.zeros(4))
        assert torch.equal(manager._unpack_tensor(new), torch.ones(4))


class Stream:
    """Notes for which of its events the host waited."""

    def __init__(self):
        self.events, self.waited = 0, []

    def record_event(self):
        self.events += 1
        return types.SimpleNamespace(synchronize=lambda number=self.events: self.waited.append(number))


@pytest.mark.parametrize("stash, behind", [(0, 2), (5, 5)])
def test_host_waits_for_earlier_copies(stash, behind):
    """The host would ask for memory of all inputs at once, or wait for a copy of which the device needs the result."""
    of_layers, of_arguments = (
        mock.Mock(spec=spec, use_streams=True, s1=Stream(), compute_stream=Stream(), max_fwd_stash_count=stash)
        for spec in (CheckpointHiddenStatesOffload, _ActivationOffloadEngine)
    )
    for _ in range(8):
        for engine in (of_layers, of_arguments):
            inputs_on_host.wait_after_sending(engine)
            inputs_on_host.wait_before_bringing_back(engine)
    assert of_layers.s1.waited == [*range(1, 8 - behind + 1)]
    assert of_layers.compute_stream.waited == [*range(1, 8)]
    # DeepSpeed's cpu_checkpointing sends several tensors of a layer: the host would wait for what it has just started.
    assert not of_arguments.s1.waited and not of_arguments.compute_stream.waited

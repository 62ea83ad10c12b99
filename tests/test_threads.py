# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Every public method of the native reducer may be called from any thread. ``make sanitize`` runs these too."""

import pytest
import torch

from support import threads

pytestmark = pytest.mark.sanitized


@pytest.mark.parametrize("flat", [False, True], ids=["where-reduced", "flat"])
@pytest.mark.parametrize("route", ["graph", "autograd"])
def test_gradients_from_several_threads(ranks, route, flat):
    for right, all_received in ranks(2).run(threads.gradients_from_threads, route, flat):
        assert right and all_received


@pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL may wait for ever where communicators are used at once")
def test_reducers_in_several_threads(ranks):
    for right, count in ranks(2).run(threads.reducers_in_threads):
        assert right and count == 3 * 10


@pytest.mark.parametrize("how", ["close", "close twice", "drop"])
@pytest.mark.parametrize("route", ["graph", "autograd"])
def test_a_reducer_closed_during_a_backward(ranks, route, how):
    for messages in ranks(2).run(threads.closed_meanwhile, route, how):
        # A gradient has nowhere to go then, but for that of code outside of graphs, which stays with its parameter.
        assert messages or route == "autograd"
        assert all("destroyed" in message for message in messages), messages

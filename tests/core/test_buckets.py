# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""How many bytes of gradients wait for their reduction, and when a bucket is sent."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deepspeed.compile.zero_1_and_2 import gradient_counters
from deepspeed.compile.zero_1_and_2.engine import set_up
from deepspeed.compile.zero_1_and_2.gradient.native import reducer_module

from support.ids import vary
from support.lifetime import backward, start
from support.on_ranks import on_ranks
from support.reducers import register
from support.training import NOTHING, Case, device, held


class EqualMatrices(torch.nn.Module):
    """Eight matrices of 64 elements."""

    def __init__(self):
        super().__init__()
        self.matrices = torch.nn.ParameterList(torch.eye(8) for _ in range(8))

    def forward(self, ids):
        x = ids[:, :1] + torch.ones(1, 8, device=ids.device)
        for matrix in self.matrices:
            x = x @ matrix
        return x.square().mean()


def step_once(case, module=None):
    """Returns the counters of a step's backward, and how many bytes the gradient of each parameter has."""
    module, engine = start(case, module)
    backward(engine)
    counters = gradient_counters(engine)
    engine.step()
    sizes = [parameter.nbytes for parameter in module.parameters()]
    engine.destroy()
    return counters, sizes


@pytest.mark.sanitized
# A bucket of the whole model would allow for anything.
@pytest.mark.options("zero_optimization.reduce_bucket_size")
@vary("bucket", [1, 100, 300])
@on_ranks(2)
def test_pending_bytes_stay_within_bucket_and_largest_gradient(bucket):
    """A gradient would be added to a bucket that is full already, or is on its way."""
    counters, sizes = step_once(Case(bucket=bucket))
    assert 0 < counters["peak_pending"] <= 4 * bucket + max(sizes) < sum(sizes)
    assert counters["bucket"] == 0


@pytest.mark.sanitized
@on_ranks(2)
def test_pending_bytes_of_equal_gradients():
    """A bucket would be sent one gradient too late, or hold its gradients until the next one is sent."""
    # Two are sent together; beside them a third fits into the bucket and a fourth does not.
    counters, sizes = step_once(Case(bucket=160), EqualMatrices().to(device()))
    assert counters["peak_pending"] == 3 * max(sizes)


SEND_NUMEL = 2**12


class LargeMatrices(torch.nn.Module):
    """Three with as many elements as a bucket is sent with, and one four times as large, whose gradient is first."""

    def __init__(self):
        super().__init__()
        shapes = [(2**6, 2**6)] * 3 + [(2**6, 2**8)]
        self.matrices = torch.nn.ParameterList(torch.full(shape, 2.0**-6) for shape in shapes)

    def forward(self, ids):
        x = ids[0, :1].to(self.matrices[0].dtype) + torch.ones(1, 2**6, device=ids.device, dtype=torch.bfloat16)
        there, back, again, last = self.matrices
        return (x @ there @ back.t() @ again @ last).square().mean()


@on_ranks(2)
def test_buckets_are_sent_before_they_are_full():
    """Buckets as large as the model, which DeepSpeed has by default, would be sent when the backward ends."""
    with mock.patch.multiple(set_up, SEND_NUMEL=SEND_NUMEL, SEND_NUMEL_OF_A_RANK=1):
        module, engine = start(Case(dtype="bf16", bucket=10**9), LargeMatrices().to(device()))
    backward(engine)
    counters = gradient_counters(engine)
    engine.destroy()
    # The large one at once; while it is on its way, two others; the last.
    assert counters["buckets_sent"] == 3
    assert counters["peak_pending"] == (4 + 2) * module.matrices[0].nbytes


@pytest.mark.follows("has failed; look for the first error of this rank")
@on_ranks(2)
def test_a_bucket_that_failed_is_not_sent_again():
    """Other ranks would take it for the next bucket, or the step would lack its gradients without a word."""
    # Each gradient is a bucket. That of the first cannot be sent, because integers are not averaged. The other
    # gradients come all the same, as from another thread of the backward.
    parameters = [torch.nn.Parameter(torch.ones(2, device=device())) for _ in range(3)]
    reducer = reducer_module().Reducer(
        identity=10**9,
        bucket_numel=1,
        send_numel=1,
        overlap=True,
        synchronize_before=False,
        synchronize_after=False,
    )
    # Turns are those of a backward, in which the last parameter is first.
    register(reducer, dist.group.WORLD, parameters, dtypes=[torch.float32, torch.float32, torch.int16])
    registrations, raised = torch.tensor([reducer.identity, 0, 1, 2]), []

    @contextlib.contextmanager
    def noted():
        try:
            yield
            raised.append("nothing")
        # NCCL's own is a TypeError.
        except (RuntimeError, TypeError) as error:
            raised.append(str(error))

    reducer.begin_backward(True)
    for index in (2, 1, 0):
        with noted():
            torch.ops.deepcompile.reduce_grad(torch.ones(2, device=device()), registrations, 1 + index, False)
    with noted():
        reducer.finish_backward(True, True)
    reducer.abandon_backward()
    after = held(reducer.counters())
    reducer.close()
    first, *later = raised
    # Gloo and NCCL say it in their own words.
    assert first != "nothing" and "an earlier bucket" not in first
    # A gradient whose turn has not come is kept.
    assert len(later) == 3 and later[-1] != "nothing"
    assert all("an earlier bucket of it has failed" in error for error in later if error != "nothing")
    assert after == NOTHING

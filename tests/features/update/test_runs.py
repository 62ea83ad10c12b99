# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The kernel for GPUs steps all shards of a partition with one launch, wherever these lie."""

import itertools

import pytest
import torch

from deepspeed.compile.features.update import adam
from deepspeed.compile.features.update.adam_operators import Elements, Settings, step_rows
from deepspeed.compile.features.update.dynamic_map import BLOCK, make_map
from deepspeed.compile.features.update.remainders import join
from deepspeed.compile.zero_1_and_2.parameter.runs import Runs
from deepspeed.compile.zero_1_and_2.step.partition_gradient import ALIGN_NUMEL

from support.optimizers import skip_without_kernel
from support.training import device, relative_error


@pytest.mark.parametrize("states", ["fp32", "8bit"])
@pytest.mark.parametrize("remainders", [False, True])
def test_one_launch_steps_all_runs(states, remainders):
    """A shard would be stepped with another one's gradient, written over its neighbour, or left out with padding."""
    skip_without_kernel()
    torch.manual_seed(0)
    # Elements of shards and of their gradients. A shard of padding alone has none.
    shards, with_gradient = (256, 512, 3072, 256, 256, 2304, 768), (256, 509, 3000, 10, 0, 2304, 700)
    offsets = [*itertools.accumulate(shards, initial=0)]
    numel, columns = offsets.pop(), BLOCK if states == "8bit" else ALIGN_NUMEL
    # Each shard lies behind as many elements of other ranks' as it has itself.
    flat = torch.randn(3 * numel, device=device()).bfloat16()
    new = Runs(flat, [(offset, 3 * offset + shard) for offset, shard in zip(offsets, shards)], numel)
    gradients = [torch.randn(count, device=device()).bfloat16() for count in with_gradient]
    together = torch.zeros(numel, device=device(), dtype=torch.bfloat16)
    for offset, gradient in zip(offsets, gradients):
        together[offset : offset + gradient.numel()] = gradient
    master = torch.randn(numel, device=device())
    if remainders:
        master = torch.randint(-30000, 30000, (numel,), dtype=torch.int16, device=device())
    scalars = Settings(torch.tensor([0.7, 0.01, 0.002, 0.1, 0.05, 0.01, 0.3, 0.4, 1e-8], device=device()))
    moments, scales = (torch.randn(numel, device=device()), torch.rand(numel, device=device())), ()
    if states == "8bit":
        scalars = scalars._replace(maps=tuple(make_map(state, device()) for state in (True, False)))
        moments = tuple(torch.randint(0, 256, (numel,), dtype=torch.uint8, device=device()) for _ in moments)
        scales = tuple(torch.rand(numel // BLOCK, device=device()) for _ in moments)
    # What is not this rank's stays as it is.
    before, rows = (
        flat.clone(),
        [tensor.clone().view(-1, columns) for tensor in (together, master, new.read(0, numel))],
    )
    of_states = [tensor.clone() for tensor in (*moments, *scales)]
    wanted = Elements(*rows, tuple(state.view(-1, columns) for state in of_states[:2]), tuple(of_states[2:]))
    step_rows(wanted, scalars)
    kernel = adam.kernel()
    found = kernel.runs_of([*zip(offsets, gradients, strict=True)], new)
    table = kernel.tabulate(found, states == "8bit", master.device)
    # As the first unit and the rest are.
    for first, limit in ((0, offsets[2]), (offsets[2], numel)):
        kernel.step_runs(table, first, limit, master, scalars, moments, scales)
    assert relative_error([new.read(0, numel)], [wanted.new.view(-1)]) < 1e-2
    if remainders:
        found, expected = (join(values, rest) for values, rest in ((new.read(0, numel), master), rows[2:0:-1]))
        assert relative_error([found], [expected.view(-1)]) < 1e-5
    else:
        assert relative_error([master], [wanted.master.view(-1)]) < 1e-6
    for found, expected in zip(moments, of_states):
        assert (found != expected).float().mean() < (1e-3 if states == "8bit" else 1.0)
        assert states == "8bit" or relative_error([found], [expected]) < 1e-6
    new.write(0, before.new_zeros(numel))
    foreign = Runs(before, [(offset, 3 * offset + shard) for offset, shard in zip(offsets, shards)], numel)
    foreign.write(0, before.new_zeros(numel))
    assert torch.equal(flat, before)

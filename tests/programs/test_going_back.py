# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed as it was released begins a training, this fork resumes it, and DeepSpeed as it was released resumes that.

``make test`` installs the released DeepSpeed in a folder, and names the folder in ``--base``.
"""

import os
from pathlib import Path

import pytest
import torch

from support.back_and_forth import (
    IN_BF16,
    IN_GROUPS,
    KINDS,
    convert,
    load_of_other_ranks,
    part,
    save_for_other_ranks,
)
from support.pool import TESTS
from support.training import ROUNDING, total_error

pytestmark = pytest.mark.program(
    "deepspeed/compile/features/update",
    "deepspeed/compile/zero_1_and_2/engine/state.py",
    "requirements/base.txt",
    "setup.py",
    "tests/support/back_and_forth.py",
)

STOCK, FORK = "0.19.8", "0.19.8+zerograd.1"


@pytest.fixture
def stock(request):
    """Returns the variables of processes that import DeepSpeed as it was released."""
    folder = request.config.option.base
    if folder is None:
        pytest.skip("needs DeepSpeed 0.19.8 in a folder that --base names; make test installs it there")
    folder = Path(folder).resolve()
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), str(TESTS), os.environ.get("PYTHONPATH")])),
        # Native code of the two must not take each other's place.
        "TORCH_EXTENSIONS_DIR": str(folder / "torch_extensions"),
    }


def equal(actual, expected):
    return torch.equal(torch.as_tensor(actual), torch.as_tensor(expected))


def masters(state):
    return [torch.as_tensor(value) for name, value in sorted(state.items()) if name.startswith("master")]


def largest(losses, expected):
    return max(abs(a - e) for a, e in zip(losses, expected, strict=True))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "world, options, kinds",
    [
        (2, {}, KINDS),
        (2, {"shard_parameters": "all"}, KINDS),
        (2, {"store_param_remainders": True}, IN_BF16),
        pytest.param(1, {}, IN_GROUPS, marks=SLOW),
        pytest.param(4, {}, IN_GROUPS, marks=SLOW),
        pytest.param(4, {"shard_parameters": "all"}, IN_GROUPS, marks=SLOW),
    ],
    ids=["whole", "sharded", "remainders", "one-rank-groups", "four-ranks-groups", "four-ranks-groups-sharded"],
)
def test_stock_then_fork_then_stock(ranks, stock, tmp_path, world, options, kinds):
    """A checkpoint of another format, or of this rank's parameters alone, would end a training or change it."""
    folder, options = str(tmp_path), {"deepcompile": True, **options}
    # Processes of one DeepSpeed at a time.
    pool = ranks(world, **stock)
    whole = pool.run(part, kinds, folder, 0, parts=3)
    parts = [pool.run(part, kinds, folder, 0)]
    parts.append(ranks(world).run(part, kinds, folder, 1, options=options))
    parts.append(ranks(world, **stock).run(part, kinds, folder, 2))
    for rank in range(world):
        for index, kind in enumerate(kinds):
            uninterrupted, seen = whole[rank][index], [of_part[rank][index] for of_part in parts]
            assert [run.version for run in (uninterrupted, *seen)] == [STOCK, STOCK, FORK, STOCK]
            assert [run.step_local for run in seen] == [False, True, False]
            # What was saved is what is loaded, bit for bit.
            for before, after in zip(seen, seen[1:]):
                assert {*after.loaded} == {*before.reached} and "exp_avg 0" in after.loaded
                assert [name for name in after.loaded if not equal(after.loaded[name], before.reached[name])] == []
            # And the training goes on as one that was not interrupted.
            losses = [loss for run in seen for loss in run.losses]
            assert losses[0] - min(losses) > 0.1
            assert largest(losses, uninterrupted.losses) < ROUNDING[kind.dtype] * losses[0], kind
            begun, reached, expected = map(masters, (seen[0].loaded, seen[2].reached, uninterrupted.reached))
            moved, error = total_error(expected, begun), total_error(reached, expected)
            assert moved > 0.1 and error < ROUNDING[kind.dtype] * moved, kind
            assert seen[2].schedule == uninterrupted.schedule


@SLOW
@pytest.mark.parametrize("world", [1, 2, 4])
def test_states_in_8_bits(ranks, stock, tmp_path, world):
    """The way that the documentation names would lead to no checkpoint that DeepSpeed can read, or to other states."""
    folder, kinds, fp32 = str(tmp_path), IN_GROUPS, {"deepcompile": True}
    parts = [ranks(world, **stock).run(part, kinds, folder, 0)]
    parts.append(ranks(world).run(part, kinds, folder, 1, options={**fp32, "optimizer_states": "8bit"}))
    parts.append(ranks(world).run(part, kinds, folder, 2, options=fp32, steps=0))
    parts.append(ranks(world, **stock).run(part, kinds, folder, 3))
    for rank in range(world):
        for index, kind in enumerate(kinds):
            begun, in_8_bits, converted, ended = (of_part[rank][index] for of_part in parts)
            assert [begun.version, in_8_bits.version, ended.version] == [STOCK, FORK, STOCK]
            assert all(equal(*both) for both in zip(masters(in_8_bits.reached), masters(ended.loaded), strict=True))
            assert {*ended.loaded} == {*begun.reached} and "exp_avg 1" in ended.loaded
            assert [name for name in ended.loaded if not equal(ended.loaded[name], converted.reached[name])] == []
            losses = [loss for run in (begun, in_8_bits, ended) for loss in run.losses]
            assert losses[0] - min(ended.losses) > 0.1, kind
            assert ended.schedule == (9, [0.02, 0.01])


@SLOW
@pytest.mark.parametrize("saved_by, loaded_by", [(2, 3), (3, 2)])
@pytest.mark.parametrize("maker", [STOCK, FORK])
def test_universal(ranks, stock, tmp_path, maker, saved_by, loaded_by):
    """A universal checkpoint that one of the two makes would be one that the other reads otherwise, or not at all."""
    folder, kinds, options = str(tmp_path), IN_GROUPS, {"deepcompile": True}
    if maker == STOCK:
        saved = ranks(saved_by, **stock).run(save_for_other_ranks, kinds, folder)[0]
        ranks(1, **stock).run(convert, kinds, folder, "--inject_missing_state")
    else:
        saved = ranks(saved_by).run(save_for_other_ranks, kinds, folder, options)[0]
        ranks(1).run(convert, kinds, folder)
    by_fork = ranks(loaded_by).run(load_of_other_ranks, kinds, folder, options)[0]
    by_stock = ranks(loaded_by, **stock).run(load_of_other_ranks, kinds, folder)[0]
    assert (by_stock[0], by_fork[0]) == (STOCK, FORK)
    for kind, seen, (loaded, reached, schedule), (expected_loaded, expected, expected_schedule) in zip(
        kinds, saved, by_fork[1], by_stock[1], strict=True
    ):
        for found in (loaded, expected_loaded):
            assert {*found} == {*seen} and [name for name in seen if not equal(seen[name], found[name])] == []
        moved = total_error(masters(expected), masters(seen))
        assert moved > 1e-2, "the last steps changed little, so agreement shows nothing"
        assert total_error(masters(reached), masters(expected)) < ROUNDING[kind.dtype] * moved
        assert schedule == expected_schedule

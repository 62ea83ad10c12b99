# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What a rank is told where there are fewer GPUs than ranks, and only there."""

import json
import os
import subprocess
import sys

import pytest

from support import shared_gpus

PROGRAM = """
import json, os, sys
import beside_it
names = ("LOCAL_RANK", "NCCL_HOSTID", "NCCL_SOCKET_IFNAME")
print(json.dumps([beside_it.WORD, sys.argv, {name: os.environ.get(name) for name in names}]))
"""


@pytest.mark.quick
@pytest.mark.parametrize("world, gpus", [(1, 0), (4, 0), (1, 1), (2, 2), (2, 8)])
def test_ranks_with_a_gpu_each_or_with_none_are_left_alone(world, gpus):
    """Ranks with a GPU each would talk through the network."""
    assert all(shared_gpus.variables(rank, world, gpus) == {} for rank in range(world))


@pytest.mark.quick
@pytest.mark.parametrize("world, gpus", [(2, 1), (8, 1), (3, 2), (8, 3)])
def test_ranks_that_share_gpus_have_names_of_their_own(world, gpus):
    """Two ranks on one GPU would have one name, and NCCL would refuse them; or a GPU would stand idle."""
    of_ranks = [shared_gpus.variables(rank, world, gpus) for rank in range(world)]
    assert len({environment["NCCL_HOSTID"] for environment in of_ranks}) == world
    # All GPUs are used, and none that is not there.
    assert {environment["LOCAL_RANK"] for environment in of_ranks} == {str(number) for number in range(gpus)}
    assert {environment["NCCL_SOCKET_IFNAME"] for environment in of_ranks} == {"lo"}


@pytest.mark.parametrize("gpus", [0, 1])
def test_a_program_under_a_launcher(tmp_path, gpus):
    """A program would not find what lies beside it, or a rank would look for a GPU that is not there.

    As if torch found so many GPUs. No rank makes a communicator, so none is needed.
    """
    (tmp_path / "beside_it.py").write_text("WORD = 'found'")
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "torch.py").write_text(f"class cuda: device_count = staticmethod(lambda: {gpus})")
    command = [sys.executable, shared_gpus.__file__, str(tmp_path / "program.py"), "--steps", "3"]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONSAFEPATH", "NCCL_HOSTID")}
    environment.update(RANK="1", LOCAL_RANK="1", WORLD_SIZE="2")
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    word, arguments, variables = json.loads(result.stdout)
    assert word == "found" and arguments == [str(tmp_path / "program.py"), "--steps", "3"]
    assert variables["LOCAL_RANK"] == ("0" if gpus else "1")
    assert variables["NCCL_HOSTID"] == ("rank1" if gpus else None)

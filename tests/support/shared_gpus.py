# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Ranks that share GPUs, where a test asks for more ranks than there are GPUs.

NCCL refuses two ranks of one host on one GPU. It tells hosts apart by the variable ``NCCL_HOSTID``, which a rank reads
when it makes its first communicator. Here each rank has a name of its own there, so NCCL takes each rank for a host of
its own and sends messages through sockets. Results are those of ranks with a GPU each; times are not.

A launcher knows nothing of this. Under a launcher this file runs the program of a rank::

    deepspeed --num_gpus 2 --no_local_rank tests/support/shared_gpus.py PROGRAM arguments...
"""

import os
import runpy
import sys
from typing import Dict


def variables(rank: int, world: int, gpus: int) -> Dict[str, str]:
    """Returns what a rank has in its environment besides, or instead of, what its launcher has set.

    Args:
        rank: of the process.
        world: number of ranks, all on this machine.
        gpus: number of GPUs; 0 on CPU.
    """
    if not 0 < gpus < world:
        return {}
    return {
        "LOCAL_RANK": str(rank % gpus),
        "NCCL_HOSTID": f"rank{rank}",
        # All ranks are on this machine: no other device leads to them for sure, and none is faster.
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }


def main() -> None:
    del sys.argv[0]
    # Python looks first for modules where a program lies that it runs.
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))

    import torch

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ.update(variables(rank, world, torch.cuda.device_count()))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()

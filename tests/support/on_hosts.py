# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""A program for DeepSpeed's launcher: each rank trains, and writes what came of it into a folder that all ranks share.

The folder is the current one.
"""

import argparse
import datetime
import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist

import deepspeed
from deepspeed.compile.zero_1_and_2 import gradient_counters, wait_for_parameters

from support.training import Case, batch, build, held, make_engine

CASES = [
    Case("BlocksWithin", stage=1, accumulation=2),
    Case("BlocksWithin", stage=2, accumulation=2, config={"compile": {"overlap_param_gather": True}}),
]


def whereabouts():
    """Returns the host, the rank on it, and whether the first rank is found on the same host."""
    try:
        # The first rank listens on every address of its host.
        socket.create_connection(("127.0.0.1", int(os.environ["MASTER_PORT"])), timeout=5).close()
        beside_first = True
    except ConnectionRefusedError:
        beside_first = False
    return socket.gethostname(), int(os.environ["LOCAL_RANK"]), beside_first


def train(engine, case, steps):
    """Trains for steps; returns the losses of this rank, and all parameters after them as one tensor."""
    losses = []
    for step in steps:
        for micro_step in range(case.accumulation):
            loss = engine(batch(step, micro_step, dist.get_rank(), 4))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        Path(f"rank{dist.get_rank()}-trains").touch()
    wait_for_parameters(engine)
    values = torch.cat([parameter.detach().flatten() for parameter in engine.module.parameters()])
    return {"losses": losses, "parameters": values}


def train_and_resume(case, steps):
    """Trains, saves a checkpoint, and trains twice from there: with the same engine and with one that loads it."""
    engine = make_engine(build(case), case)
    begun = train(engine, case, range(steps))
    engine.save_checkpoint(f"stage{case.stage}")
    went_on = train(engine, case, range(steps, 2 * steps))
    counters = gradient_counters(engine)
    engine.destroy()
    engine = make_engine(build(case, seed=1), case)
    engine.load_checkpoint(f"stage{case.stage}")
    resumed = train(engine, case, range(steps, 2 * steps))
    engine.destroy()
    return {
        "begun": begun,
        "went on": went_on,
        "resumed": resumed,
        "held": held(counters),
        "from graphs": counters["from_graphs"],
    }


parser = argparse.ArgumentParser()
parser.add_argument("steps", type=int, help="before a checkpoint, and as many after it")
parser.add_argument("--timeout", type=int, default=300, help="seconds after which a collective gives up")
parser.add_argument("--local_rank", type=int)  # given by the launcher
args = parser.parse_args()

deepspeed.init_distributed(timeout=datetime.timedelta(seconds=args.timeout))
where = whereabouts()
trained = [train_and_resume(case, args.steps) for case in CASES]
torch.save({"where": where, "trained": trained}, f"rank{dist.get_rank()}.pt")
dist.destroy_process_group()

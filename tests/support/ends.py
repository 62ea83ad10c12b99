# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""How ranks end of which one goes wrong: what each returned, or what ended it."""

import re

import torch

from support.pool import Ranks

# Seconds after which a collective gives up, and what the test allows on top of them. Ranks that compile on a busy
# machine may reach a collective more than 6 s apart. NCCL's watchdog takes another minute to write down what was
# running before it ends the process.
TIMEOUT, GRACE = 20, 60
# Long enough for a busy machine: what is asserted is how long a rank has waited.
PATIENCE = 300


def in_processes_of_their_own(function, *args, patience=PATIENCE):
    """What each of two ranks returned, or how it ended, under a short timeout of the process group."""
    return Ranks(2, patience=TIMEOUT).run_to_the_end(function, *args, timeout=patience)


def names_the_bucket(message):
    return re.search("could not reduce the bucket that begins with the gradient of parameter '.+' of shape", message)


def not_ended_by_nccl(answers, capfd):
    """Returns {rank: its answer} without ranks that NCCL's watchdog ended: no exception can come from there.

    Asserts of these that the watchdog has said what timed out, or which call failed.
    """
    ended = [rank for rank, answer in enumerate(answers) if answer == "died with exit status -6"]
    if ended:
        assert torch.cuda.is_available(), answers
        said = capfd.readouterr().err
        assert re.search("Watchdog caught collective operation timeout|watchdog thread terminated", said), said[-2000:]
    return {rank: answer for rank, answer in enumerate(answers) if rank not in ended}

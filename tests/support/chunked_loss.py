# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Losses in chunks of few logits, and what was computed in chunks.

Runs in the processes of ``support.pool``.
"""

import contextlib
from typing import Any, Iterator, List, NamedTuple, Tuple
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile


class Seen(NamedTuple):
    graphs: List  # whose loss is computed in chunks
    chunks: List[int]  # how many chunks each backward had


@contextlib.contextmanager
def small_chunks(numel: int = 1024, rows: int = 8, many: int = 1) -> Iterator[Seen]:
    """Within it, chunks have at most so many logits and begin at multiples of so many rows of the head.

    From ``many`` logits on, chunks are the default.
    """
    # Tests of the core use this module too, and are collected where this part was removed.
    from deepspeed.compile.features.loss import chunked_loss, find_loss

    seen = Seen([], [])
    find_chunks, make = chunked_loss.chunks, find_loss.ChunkedLoss

    def recording(*args):
        found = find_chunks(*args)
        seen.chunks.append(len(found))
        return found

    def making(*args):
        seen.graphs.append(make(*args))
        return seen.graphs[-1]

    with (
        mock.patch.multiple(chunked_loss, CHUNK_LOGITS=numel, ALIGNED_ROWS=rows, chunks=recording),
        mock.patch.multiple(find_loss, MANY_LOGITS=many, ChunkedLoss=making),
    ):
        yield seen


def profiled_backward(engine: Any, ids: torch.Tensor) -> Tuple[int, Any]:
    """Runs the forward and the backward of a model that returns (loss, logits), whose logits nobody keeps.

    Returns:
        the bytes of the logits, and a profile of the backward with its memory.
    """
    loss, logits = engine(ids)
    size = logits.nbytes
    del logits
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities, profile_memory=True) as profiler:
        engine.backward(loss)
    return size, profiler

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from support.pool import Ranks  # noqa: E402


@pytest.fixture(scope="session")
def ranks():
    """Returns ``ranks(world)``: the processes of that world size, started once a test run."""
    pools = {}

    def of(world):
        import torch

        if torch.cuda.is_available() and torch.cuda.device_count() < world:
            pytest.skip(f"needs {world} GPUs, and {torch.cuda.device_count()} are here")
        if world not in pools:
            # Only one pool at a time keeps its processes: two cores do not carry more.
            for pool in pools.values():
                pool.stop()
            pools[world] = Ranks(world)
        return pools[world]

    yield of
    for pool in pools.values():
        pool.stop()


def pytest_addoption(parser):
    parser.addoption("--models", type=int, help="how many random models test_fuzz.py tries; a few by default")
    parser.addoption("--seed", type=int, default=0, help="from which they are drawn")


def pytest_configure(config):
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    config.addinivalue_line("markers", "gpu: needs GPUs; skipped with a reason where there are none")

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""``tools/fits/gradients.py`` counts what the native reducer holds, and needs no native code to do so."""

import os
import random
import subprocess
import sys

import pytest
import torch
from torch.nn import Parameter

from deepspeed.compile.tools.fits import gradients
from deepspeed.compile.zero_1_and_2.gradient import layout, native

SENT = 500  # elements with which a bucket is sent here


class Gradient(torch.autograd.Function):
    """Has a parameter get a gradient that the reducer copies, which counts as much as if the reducer kept it."""

    @staticmethod
    def forward(ctx, parameter):
        ctx.parameter = parameter
        return parameter.new_empty(())

    @staticmethod
    def backward(ctx, _):
        return ctx.parameter.detach().new_empty(()).expand(ctx.parameter.shape)


def counted(one_of, parameters, arrivals, ranks, rank, stage, accumulation, bucket, overlap):
    """Returns what the native reducer itself counts, over a process group of which one rank is there."""
    laid_out, dtype = gradients.layout_of(parameters, ranks), parameters[0].dtype

    def held():
        counters = reducer.counters()
        return counters["pending"] + counters["unreduced"] + counters["bound"]

    def arrive(index):
        torch.autograd.backward([Gradient.apply(parameters[index])])
        return held()

    with one_of(ranks, rank) as process_group:
        reducer = native.reducer_module().Reducer(
            identity=-1,
            bucket_numel=bucket,
            send_numel=SENT,
            overlap=overlap,
            synchronize_before=False,
            synchronize_after=False,
        )
        flat = dtype == torch.float32
        group = reducer.add_group(process_group, laid_out.partition_size[0], dtype, torch.device("meta"), flat, None)
        last = {index: place for place, index in enumerate(arrivals)}
        offsets = [offset for _, offset in layout.flat_layout(laid_out, 0)]
        # The reducer expects gradients in the reverse of the order of registration.
        for index in sorted(range(len(parameters)), key=lambda index: -last.get(index, len(arrivals))):
            reducer.register_parameter(group, str(index), parameters[index], dtype, offsets[index])
        for _ in range(accumulation - 1):
            reducer.begin_backward(stage == 2)
            for index in arrivals:
                arrive(index)
            reducer.finish_backward(stage == 2, False)
        before = held()
        reducer.begin_backward(True)
        arrived = [arrive(index) for index in arrivals]
        reducer.finish_backward(True, False)
        bound = reducer.counters()["bound"]
        reducer.close()
    for parameter in parameters:
        parameter.grad = None
    return gradients.Sent(before, arrived, bound)


def test_what_the_reducer_counts(package, monkeypatch):
    """The reckoning would have another rule than the reducer: of buckets, of turns, or of what waits."""
    pytest.importorskip("transformers", reason="the benchmark needs transformers: requirements/benchmarks.txt")
    one_of, seed = package("messages").one_of, random.Random(0)
    monkeypatch.setattr(gradients, "send_numel", lambda ranks: SENT)
    differ = []
    for _ in range(60):
        dtype = seed.choice([torch.bfloat16, torch.float32])
        numels = [seed.choice([0, 1, 7, 64, 300, 301, 1000, 2500]) for _ in range(seed.randint(2, 9))] + [5]
        parameters = [Parameter(torch.empty(numel, dtype=dtype, device="meta")) for numel in numels]
        # Some never arrive, and some twice or three times, as tied weights do.
        arrivals = seed.choices([index for index, numel in enumerate(numels) if numel], k=seed.randint(1, 14))
        ranks = seed.choice([1, 2, 3, 8])
        case = arrivals, ranks, seed.randrange(ranks), seed.choice([1, 2]), seed.choice([1, 3])
        case += seed.choice([1, 400, 900, 3000, 10**6]), seed.choice([True, False])
        expected, reckoned = counted(one_of, parameters, *case), gradients.send(parameters, *case)
        if expected != reckoned:
            differ.append((numels, case, expected, reckoned))
    assert differ == []


MODEL = """
import torch

def model():
    return torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 8), torch.nn.Flatten(0), Mean())

class Mean(torch.nn.Module):
    def forward(self, x):
        return x.mean()
"""


@pytest.mark.slow
def test_the_command_needs_no_compiler(tmp_path):
    """The command would build native code first, which a laptop without a C++ compiler cannot."""
    (tmp_path / "made.py").write_text(MODEL)
    folders = {name: tmp_path / name for name in ("PATH", "HOME", "TORCH_EXTENSIONS_DIR")}
    for folder in folders.values():
        folder.mkdir()
    variables = {name: str(folder) for name, folder in folders.items()}
    # Where the package itself may lie.
    variables |= {name: value for name, value in os.environ.items() if name == "PYTHONPATH"}
    ended = subprocess.run(
        [sys.executable, "-m", "deepspeed.compile.fits", "--model", "made:model", "--gpus", "2"],
        cwd=tmp_path,
        env=variables | {"DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert "optimizer on the host" in ended.stdout and "could not be traced" not in ended.stdout
    assert [*folders["TORCH_EXTENSIONS_DIR"].iterdir()] == []


def test_nothing_native_is_asked(monkeypatch):
    """The test above in short."""

    def load(*_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(layout, "reducer_module", load)
    monkeypatch.setattr(native, "reducer_module", load)
    parameters = [Parameter(torch.empty(numel, device="meta")) for numel in (5, 300)]
    assert gradients.send(parameters, [1, 0], 2, 0).bound and gradients.gathered_in_step(parameters, 2, 0)

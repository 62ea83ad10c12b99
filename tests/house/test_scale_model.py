# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The model of communication in docs/results/scale.md: what it counts, and what it computes beside measurements."""

import functools
import json
import re

import pytest
import torch

from deepspeed.compile.tools.fits.gradients import one_of

from support.benchmarks import BENCHMARKS
from support.documentation import ROOT
from support.ids import vary
from support.programs import ON_CPU, launch

GIB = 2**30


@pytest.fixture(scope="module")
def qwen3(package):
    """Returns ``qwen3(shape)``, the parameters of a Qwen3."""
    pytest.importorskip("transformers", reason="the benchmark needs transformers: requirements/benchmarks.txt")
    messages, shapes = package("messages"), package("workload").SHAPES
    return functools.cache(lambda shape: messages.sizes(shapes[shape]))


def test_messages_of_a_step(package, qwen3):
    """The model would count other messages than a step sends: one for each large gradient, and for small ones of a
    bucket together. 134 buckets were measured on 2 GPUs."""
    model = qwen3("qwen3-8b")
    sent = package("messages").reductions(model, 2, 500_000_000)
    large = sum(parameter.numel() >= 2 * 2**17 for parameter in model.parameters)
    assert sum(message.bytes > 0 for message in sent) == 134
    assert large < sum(message.messages for message in sent) <= large + 134


@vary("world", [2, 8, 64, 1024])
@vary("shape", ["tiny", "qwen3-8b", "qwen3-32b"])
def test_each_byte_is_sent_once(package, qwen3, shape, world):
    """A gradient would be counted twice, or padding as one."""
    messages, model = package("messages"), qwen3(shape)
    whole = sum(parameter.nbytes for parameter in model.parameters)
    sent = messages.reductions(model, world, 500_000_000)
    assert sum(message.bytes for message in sent) == whole
    units = messages.gathers(model, world)
    assert sum(map(sum, units)) == messages.layout(model, world).flat_numel
    padding = len(model.parameters) * world * 256
    assert whole <= 2 * sum(map(sum, units)) < whole + 2 * padding
    assert len(units) == 1 + max(model.units)
    sharded = messages.sharded_gathers(model, world)
    norm = [parameter for parameter, unit in zip(model.parameters, model.units) if unit == 0 and parameter.dim() == 1]
    assert whole - norm[0].nbytes <= 2 * sum(map(sum, sharded)) < whole + 2 * padding
    # The embedding and the head are units by themselves.
    assert len(sharded) == len(units)


def test_what_is_registered_with_torch_goes(package):
    """A second file of tests imports the package anew, and torch 2.11 takes one function for each operator."""
    ours = "aten/record_stream/Meta"
    with one_of(2):
        assert ours in torch.library._impls
    assert ours not in torch.library._impls


# A row of the docstring of benchmarks/scale.py for each kind of collective -> seconds by the model on so many GPUs.
COLLECTIVES = {
    "all-gather": lambda cluster, ranks: cluster.to_all(GIB, ranks),
    "reduce-scatter": lambda cluster, ranks: cluster.to_all(GIB, ranks),
    "reduce to one rank": lambda cluster, ranks: cluster.to_one(GIB, ranks),
    "broadcast": lambda cluster, ranks: cluster.to_one(GIB, ranks),
    "a group of reduces, an equal part to each rank": lambda cluster, ranks: of_others(cluster, ranks),
    "a group of broadcasts, an equal part from each rank": lambda cluster, ranks: of_others(cluster, ranks),
}


# The docstring says that the model is not held to these.
FAR_OFF = {("all-gather", 2), ("reduce-scatter", 2)}


def of_others(cluster, ranks):
    """A rank sends to or receives from all others; its own part stays where it is."""
    return cluster.to_one(GIB * (ranks - 1) // ranks, ranks, operations=ranks)


def test_the_model_computes_what_its_docstring_says_was_measured(package):
    """The docstring would have other figures than the model, or the model be over 10 % off what was measured."""
    cluster, page = package("scale").Cluster(), package("scale").__doc__
    checked = 0
    for name, model in COLLECTIVES.items():
        (cells,) = re.findall(rf"(?m)^\| {re.escape(name)} \|(.*)\|$", page)
        eight, modelled_eight, two, modelled_two = (cell.strip() for cell in cells.split("|"))
        for ranks, measured, computed in ((8, eight, modelled_eight), (2, two, modelled_two)):
            if measured:
                milliseconds = 1e3 * model(cluster, ranks)
                assert f"{milliseconds:.2f}" == computed, (name, ranks)
                if (name, ranks) not in FAR_OFF:
                    assert milliseconds == pytest.approx(float(measured), rel=0.1), (name, ranks)
                checked += 1
    assert checked == 10
    measured, computed = re.search(r"takes ([\d.]+) ms on 2 H200s \(model ([\d.]+)\)", page).groups()
    # A message of 2^25 elements of bf16.
    milliseconds = 1e3 * cluster.to_one(2**26, 2)
    assert f"{milliseconds:.3f}" == computed and milliseconds == pytest.approx(float(measured), rel=0.11)


def test_a_part_of_steps_that_was_measured(package, qwen3):
    """The model would be far from the part of a step that traces show."""
    scale = package("scale")
    case = scale.Case("Qwen3-8B", qwen3("qwen3-8b"), 0.353)
    # A trace of 0.19.8 on 8 GPUs has 39 ms for the gather of all parameters.
    assert scale.gather_at_once(case, scale.Cluster(), 8).exposed == pytest.approx(0.039, rel=0.1)


def test_modes_of_fsdp2(package, qwen3):
    """The model would compare the fork with another mode of FSDP2 than the column says."""
    scale = package("scale")
    case, cluster = scale.Case("Qwen3-8B", qwen3("qwen3-8b"), 0.353), scale.Cluster()
    took = [cluster.to_all(2 * sum(unit), 64) for unit in package("messages").sharded_gathers(case.model, 64)]
    kept, resharded = (scale.SYSTEMS[f"FSDP2, {mode}"](case, cluster, 64) for mode in ("kept", "resharded"))
    # Each unit is gathered once and reduced once. Layers are gathered again but for the last, which is still whole.
    assert kept.busy == pytest.approx(2 * sum(took))
    assert resharded.busy == pytest.approx(2 * sum(took) + sum(took[1:-2]))
    # Nothing hides embedding and first layer, nor at the end the reductions of these two, nor a part of the head.
    head = took[-1] - case.compute / 3 * case.of_units()[-2][1]
    assert kept.exposed == pytest.approx(2 * (took[0] + took[1]) + head, rel=0.02)
    for ranks in scale.RANKS:
        kept, resharded = (scale.SYSTEMS[f"FSDP2, {mode}"](case, cluster, ranks) for mode in ("kept", "resharded"))
        assert 0 < kept.exposed <= resharded.exposed
    # Where layers arrive later than they compute, what is gathered twice is waited for twice.
    assert kept.exposed < 0.7 * resharded.exposed


def test_sharded_parameters(package, qwen3):
    """The column of sharded parameters would leave out a gather, or hide one under what has not begun."""
    scale = package("scale")
    case, cluster = scale.Case("Qwen3-8B", qwen3("qwen3-8b"), 0.353), scale.Cluster()
    units = package("messages").sharded_gathers(case.model, 8)
    took = [cluster.compare(8) + cluster.to_all(2 * sum(unit), 8, len(unit)) for unit in units]
    cost, reduced = scale.sharded(case, cluster, 8), scale.reduce_gradients(case, cluster, 8)
    # Blocks are gathered for the forward and for the backward, embedding and head once.
    assert cost.busy == pytest.approx(reduced.busy + 2 * sum(took) - took[0] - took[-1])
    # Nothing hides the embedding, the first block of the forward, and the first one of the backward. Of the rest
    # only a little is seen: a part of the head, and where gathers and reductions wait for each other.
    at_least = reduced.exposed + took[0] + took[1] + took[-2]
    assert at_least <= cost.exposed < 1.6 * at_least
    for bandwidth in (1e9, 360e9):
        cost = scale.sharded(case, scale.Cluster(bandwidth=bandwidth), 8)
        assert 0 < cost.busy - cost.exposed < case.compute, "more is hidden than there is to hide it under"


@vary("latency", [1.0, 4.0])
def test_choices_never_cost_more_than_before(package, qwen3, latency):
    """A choice by the number of ranks would make a step slower than without it."""
    scale = package("scale")
    case, cluster = scale.Case("Qwen3-8B", qwen3("qwen3-8b"), 0.353), scale.Cluster(latency=latency)
    gained = {}
    for ranks in scale.RANKS:
        now, before = (scale.SYSTEMS[name](case, cluster, ranks) for name in ("fork", "fork before"))
        # A larger bucket is sent a little later.
        assert now.exposed <= before.exposed + 0.001, ranks
        gained[ranks] = before.exposed - now.exposed
    assert gained[1024] > 0.02 * case.compute


def test_the_page_has_what_the_model_computes(package, qwen3):
    """The page would say that a step waits as long as one of FSDP2, by figures of another model."""
    scale, page = package("scale"), (ROOT / "docs" / "results" / "scale.md").read_text()
    case, columns = scale.Case("Qwen3-8B", qwen3("qwen3-8b"), 0.353), list(scale.SYSTEMS)[:5]
    for ranks in (8, 128, 1024):
        waits = [
            [scale.SYSTEMS[name](case, scale.Cluster(latency=latency), ranks).exposed for latency in (1.0, 4.0)]
            for name in columns
        ]
        cells = (", ".join(f"{1e3 * wait:.0f}" for wait in of_system) for of_system in waits)
        assert f"| {ranks} | {' | '.join(cells)} |" in page, (ranks, waits)


def test_ranks_compare_by_a_tree(package):
    """On many ranks a comparison would take as long as a ring, which NCCL leaves where a tree is faster."""
    cluster = package("scale").Cluster()
    # 2 * (7 hops inside of nodes and 7 between them), by the constants of NCCL's tuning.cc for LL.
    assert cluster.compare(1024) == pytest.approx(6.8e-6 + 2 * (7 * 1.08e-6 + 7 * 5e-6))
    assert cluster.compare(2) == pytest.approx(6.6e-6 + 2 * 0.6e-6)


@pytest.mark.program("benchmarks")
def test_collectives_are_measured_and_compared(package, tmp_path):
    (tmp_path / "benchmarks").symlink_to(BENCHMARKS)
    file = tmp_path / "measured.json"
    options = ["--smallest", 10, "--largest", 12, "--repetitions", 2, "--json", file]
    command = ["--num_accelerators", 2, "--module", "benchmarks.collectives", *options]
    ended = launch(command, tmp_path, **ON_CPU)
    assert ended.returncode == 0, ended.stdout
    found = json.loads(file.read_text())
    assert found["ranks"] == 2
    for name, times in found["seconds"].items():
        assert name in ended.stdout
        assert list(times) == ["2048", "4096", "8192"] and all(took > 0 for took in times.values())
    table = package("scale").fit(file, package("scale").Cluster())
    assert table.count("\n") == 1 + len(found["seconds"]) - 1, "all but the all-reduce, which nothing in a step uses"
    # Where others use the machine, a larger message may seem to take no longer than a smaller one.
    found["seconds"] = {name: dict.fromkeys(times, 1e-5) for name, times in found["seconds"].items()}
    file.write_text(json.dumps(found))
    assert package("scale").fit(file, package("scale").Cluster()).count("| - |") == len(found["seconds"]) - 1

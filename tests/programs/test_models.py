# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Models of transformers, trained without DeepCompile and with it, by nothing but the configuration.

One in ``make test`` and a dozen in ``make test-all``, where a dozen train sharded too; ``make models`` trains all in
both stages and with each kind of sharded parameters, and prints a table of what came of both stages.
"""

import contextlib
import dataclasses
from typing import List, NamedTuple, Optional

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree

from deepspeed.compile.features.shard_parameters import unsharded_parameters
from deepspeed.compile.features.shard_parameters.feature import sharded_blocks
from deepspeed.compile.zero_1_and_2 import gradient_counters, reset_gradient_counters

from support.architectures import ARCHITECTURES, IN_EVERY_RUN
from support.chunked_loss import small_chunks
from support.ids import case_ids
from support.tables import MODEL
from support.training import BOUND, compile_backend, device, engine_by_configuration, held, total_error

# Rows of the micro-batches of each step. Of several ranks, rank 0 has another number of them in the last.
STEPS = ((2, 2), (2, 2), (2, 3))
# torch's own aot_eager cannot run the graphs of these either: one views a tensor with other strides than were traced.
WITH_INDUCTOR = ("Qwen3Next", "OlmoHybrid")
# These call blocks again, or a large layer between blocks.
IN_AN_ORDER_OF_THEIR_OWN = ("Qwen3VL", "Zamba2")
# Of these so few layers are made that none repeat, so sharding needs the names of the blocks' classes.
BLOCKS = {
    "Albert": ["AlbertLayer"],
    "Funnel": ["FunnelLayer"],
    "Jamba": ["JambaMambaDecoderLayer", "JambaAttentionDecoderLayer"],
    "OlmoHybrid": ["OlmoHybridLinearAttentionDecoderLayer", "OlmoHybridAttentionDecoderLayer"],
}


def pytest_generate_tests(metafunc):
    takes_all = metafunc.config.option.every_model
    if "shards" in metafunc.fixturenames:
        names = "shards, name"
        both = [(shards, name) for name in ARCHITECTURES for shards in ("all", "frozen")]
        some = enumerate((*IN_EVERY_RUN, *IN_AN_ORDER_OF_THEIR_OWN))
        dozen = [pytest.param(("all", "frozen")[index % 2], name, marks=pytest.mark.slow) for index, name in some]
    else:
        names = "stage, name, world"
        both = [(stage, name, 2) for name in ARCHITECTURES for stage in (1, 2)]
        # One stage is enough for the dozen: what differs between the stages is tested elsewhere.
        first, *others = ((1 + index % 2, name) for index, name in enumerate(IN_EVERY_RUN))
        dozen = [(*first, 1), *(pytest.param(*other, 2, marks=pytest.mark.slow) for other in others)]
    cases = both if takes_all else dozen
    metafunc.parametrize(names, cases, ids=case_ids(names, cases, expects="world"))


@dataclasses.dataclass
class Counted:
    """What the counters said with DeepCompile."""

    from_graphs: int  # gradients of the last micro-batch that graphs reduced
    from_autograd: int  # those that autograd accumulated
    held: int  # bytes after the last step
    graphs: int  # that were compiled


@dataclasses.dataclass
class Training:
    losses: List[float]
    parameters: List[torch.Tensor]
    moved: float  # how far training moved the parameters
    counted: Optional[Counted]  # None without DeepCompile
    at_rest: int  # how many units were sharded after the last step


def train(name, stage, deepcompile, shards=None):
    """Trains for three steps of two micro-batches.

    ``shards``: None, or which parameters are sharded with DeepCompile. For "frozen", every other one is frozen.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = ARCHITECTURES[name].make().to(device()).train()
    for index, parameter in enumerate(model.parameters()):
        if parameter.dim() == 0:
            # DeepSpeed 0.19.8 broadcasts parameters as bytes, as which torch cannot view one without dimensions.
            parameter.data = parameter.data.view(1)
        if shards == "frozen":
            parameter.requires_grad_(parameter.requires_grad and index % 2 == 1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    more = {
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 20000},
    }
    if shards is not None and deepcompile:
        more["compile"] = {"shard_parameters": shards, "regional_compilation": BLOCKS.get(name)}
    engine = engine_by_configuration(model, deepcompile, lr=0.2, momentum=0.5, **more)
    losses, rank, differs = [], dist.get_rank(), dist.get_rank() == 0 < dist.get_world_size() - 1
    for step, rows_of_each in enumerate(STEPS):
        for micro_step, rows in enumerate(rows_of_each):
            seed = 100 * step + 10 * micro_step + rank
            batch = ARCHITECTURES[name].batch(seed, rows if differs else 2)
            batch = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device()), batch)
            if engine.is_compiled:
                reset_gradient_counters(engine)
            loss = engine(**batch).loss
            engine.backward(loss)
            counters = gradient_counters(engine) if engine.is_compiled else None
            engine.step()
            losses.append(float(loss.detach()))
    sharded = sharded_blocks(engine)
    at_rest = sum(not unit.is_gathered for unit in sharded.units) if sharded is not None else 0
    with unsharded_parameters(engine):
        trained = [parameter.detach().clone() for parameter in model.parameters()]
    counted = None
    if counters is not None:
        counted = Counted(
            from_graphs=counters["from_graphs"],
            from_autograd=counters["from_autograd"],
            held=sum(held(gradient_counters(engine)).values()),
            graphs=torch._dynamo.utils.counters["stats"]["unique_graphs"],
        )
    engine.destroy()
    return Training(losses, trained, total_error(trained, before), counted, at_rest)


class OffAndOn(NamedTuple):
    losses_off: List[float]  # without DeepCompile
    losses_on: List[float]
    error: float  # of the parameters with DeepCompile, against those without
    moved: float  # how far training with DeepCompile moved the parameters
    counted: Counted
    at_rest: int  # as for ``Training``, with DeepCompile


def off_and_on(name, stage, shards=None):
    """Trains an architecture without DeepCompile and with it. ``shards``: as for :func:`train`."""
    # In one of the stages, so that losses in one piece are trained too.
    losses = small_chunks() if stage == 2 else contextlib.nullcontext()
    with compile_backend("inductor" if name in WITH_INDUCTOR else "eager"), losses:
        off, on = (train(name, stage, deepcompile, shards) for deepcompile in (False, True))
    error = total_error(on.parameters, off.parameters)
    return OffAndOn(off.losses, on.losses, error, on.moved, on.counted, on.at_rest)


@pytest.mark.table
def test_trains_as_without_deepcompile(ranks, record_property, stage, name, world):
    """A model that is written as others write theirs would find no blocks, or break at each layer."""
    pytest.importorskip("transformers")
    found = {"name": name, "stage": stage}
    record_property(MODEL, found)
    results = ranks(world).run(off_and_on, name, stage)
    counted = results[0].counted
    found["error"] = max(result.error for result in results)
    found["from_graphs"], found["graphs"] = counted.from_graphs, counted.graphs
    found["gradients"] = counted.from_graphs + counted.from_autograd
    for result in results:
        assert result.error < BOUND, result
        for off, on in zip(result.losses_off, result.losses_on, strict=True):
            assert on == pytest.approx(off, rel=1e-4), result
        assert result.moved > 1e-3, "the parameters hardly changed, so agreement shows nothing"
        # What calls blocks that are compiled by themselves is not compiled: embeddings, norms.
        assert result.counted.from_graphs > 2 * result.counted.from_autograd and result.counted.held == 0, result


@pytest.mark.table
def test_trains_sharded_as_without_deepcompile(ranks, shards, name):
    """A model that calls its blocks in an order of its own would read one that was given back."""
    pytest.importorskip("transformers")
    for result in ranks(2).run(off_and_on, name, 2, shards):
        assert result.error < BOUND, result
        for off, on in zip(result.losses_off, result.losses_on, strict=True):
            assert on == pytest.approx(off, rel=1e-4), result
        assert result.moved > 1e-4 and result.at_rest > 0, result

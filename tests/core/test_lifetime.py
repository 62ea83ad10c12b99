# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""When gradient memory exists, and that nothing keeps it longer or writes to it too early."""

import gc
import time
import weakref
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from deepspeed.compile.zero_1_and_2 import gradient_counters
from deepspeed.compile.zero_1_and_2.step.even_order import even_class
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer, GradPartitionBufferGroup

from support.beside import Beside
from support.engines import CaseBeside
from support.ids import sanitized, vary
from support.lifetime import allocated_bytes, backward, least_allocated_bytes, start
from support.meeting import new_store
from support.models import Model
from support.on_ranks import on_ranks
from support.training import (
    BOUND,
    NOTHING,
    Case,
    batch,
    build,
    default_dtype,
    device,
    held,
    make_engine,
)

# Stages of a target ---------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("dtype", [sanitized("fp32"), "bf16"])
@vary("stage, accumulation", [(1, 1), (1, 3), (2, 1), (2, 3)])
@on_ranks(2)
def test_stages_of_a_target(stage, accumulation, dtype):
    """Gradient memory would exist before its stage begins, or longer than it lasts, and train as well."""
    _, engine = start(Case(stage=stage, accumulation=accumulation, dtype=dtype))
    optimizer = engine.optimizer
    assert gradient_counters(engine)["registered"] == 20
    assert held(gradient_counters(engine)) == NOTHING
    backwards = []
    for micro_step in range(accumulation):
        backward(engine, 0, micro_step)
        backwards.append(held(gradient_counters(engine)))
        if micro_step == accumulation - 1:
            group = optimizer.averaged_gradients[0]
            flat = group.flat_partition
            flat_shape = None if flat is None else flat.shape
            storages = {view.untyped_storage().data_ptr(): view.untyped_storage().nbytes() for view in group}
            handed_over = sum(view.numel() for view in group)
            del group, flat
        engine.step()
    assert held(gradient_counters(engine)) == NOTHING
    assert not any(entry is not None for entry in optimizer.averaged_gradients.values())
    partition, partition_bytes = int(optimizer.partition_size[0]), sum(storages.values())
    engine.destroy()
    if dtype == "fp32":
        # The optimizer takes the flat partition as it is.
        assert flat_shape == (partition,) and partition_bytes == 4 * partition
    else:
        # It makes an fp32 copy, so gradients stay where they are. No byte of anything else stays with them.
        assert flat_shape is None and partition_bytes == 2 * handed_over
    assert handed_over <= partition
    for micro_step, after in enumerate(backwards):
        at_boundary = micro_step == accumulation - 1
        assert after["pending"] == after["bucket"] == 0
        assert after["bound"] == (partition_bytes if stage == 2 or at_boundary else 0)
        assert (after["unreduced"] > 0) == (stage == 1 and not at_boundary)
    assert [name for name in vars(optimizer) if "deepcompile" in name.lower()] == []
    # But for the order of its elements.
    assert type(optimizer) is even_class(DeepSpeedZeroOptimizer) and not hasattr(optimizer, "_deepcompile")


@pytest.mark.parametrize("dtype", [sanitized("fp32"), "bf16"])
@vary("stage", [1, 2])
@on_ranks(2)
def test_callers_of_the_base_find_its_names(dtype, stage):
    """Code that is written for the base's entries of ``averaged_gradients`` would raise for lack of a name."""
    # Of FewParameters one rank owns padding only.
    _, engine = start(Case(model="FewParameters", dtype=dtype, stage=stage))
    optimizer = engine.optimizer
    with default_dtype(torch.float64):
        backward(engine)
        entry = optimizer.averaged_gradients[0]
        kinds = {(tensor.dtype, tensor.device.type) for tensor in entry}
    assert kinds == {(torch.float32 if dtype == "fp32" else torch.bfloat16, device().type)}
    names = [name for name in dir(GradPartitionBufferGroup([], torch.zeros(0))) if not name.startswith("_")]
    assert [name for name in [*names, "release_grad_buffers"] if not hasattr(entry, name)] == []
    flat = optimizer._get_preflattened_grad_partition(0)
    # In bf16 each gradient lies where it was reduced; a flat partition would be another copy.
    assert (flat.numel() == int(optimizer.partition_size[0])) if dtype == "fp32" else flat is None
    del flat, entry
    optimizer._release_preflattened_grad_buffers()
    assert held(gradient_counters(engine)) == NOTHING
    optimizer.zero_grad()
    backward(engine, 1)
    engine.step()
    assert list(optimizer.averaged_gradients.values()) == [None]
    engine.destroy()


# Moments --------------------------------------------------------------------------------------------------------


@pytest.mark.sanitized
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@on_ranks(2)
def test_a_rank_binds_when_its_first_piece_arrives(dtype):
    """The target of a rank would be allocated when the backward begins, beside activations that are freed later."""
    # Bound bytes when a backward begins, and each time a block's input gradient has been computed, last block first.
    bound = []

    def note(gradient):
        bound.append(gradient_counters(engine)["bound"])

    class Watched(Model):
        def run_block(self, block, x):
            torch._dynamo.graph_break()
            if x.requires_grad:
                x.register_hook(note)
            return block(x)

    torch.manual_seed(0)
    _, engine = start(Case(bucket=1, dtype=dtype), Watched().to(device()))
    backward(engine)
    engine.step()
    bound.clear()
    loss = engine(batch(1, 0, dist.get_rank(), 4))
    loss.register_hook(note)
    engine.backward(loss)
    engine.destroy()
    # Gradients arrive from the last parameters to the first, and each rank gets its shard of each. In fp32 the first
    # that arrives makes the flat partition. In bf16 each target has memory of its own.
    assert bound[0] == 0 < bound[1] and bound == sorted(bound)
    assert (bound[1] < bound[-1]) == (dtype == "bf16")


ACTIVATION_NUMEL = 7919  # no other tensor has as many elements
live_activations = []


@torch.library.custom_op("deepcompile_tests::pass_on", mutates_args=())
def pass_on(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@torch.library.custom_op("deepcompile_tests::count_activations", mutates_args=())
def count_activations(gradient: torch.Tensor) -> torch.Tensor:
    tensors = [value for value in gc.get_objects() if type(value) is torch.Tensor]
    live_activations.append(sum(tensor.numel() == ACTIVATION_NUMEL for tensor in tensors))
    return gradient.clone()


for operator in (pass_on, count_activations):
    operator.register_fake(torch.empty_like)
pass_on.register_autograd(lambda _, gradient: count_activations(gradient))


class SeveralActivations(torch.nn.Module):
    """Counts activations in the backward when it has used all of those that lie behind its parameter."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        x = pass_on(x * self.weight).expand(ACTIVATION_NUMEL)
        for _ in range(3):
            # Torch saves a cumulated sum rather than compute it again.
            x = x * x.cumsum(0) / ACTIVATION_NUMEL
        return x.mean()


@pytest.mark.options("compile.free_activation")
@pytest.mark.parametrize("backend", [sanitized("eager"), "inductor"])
@on_ranks(2)
def test_activations_are_freed_after_their_last_use(backend):
    """A backward graph would keep its inputs until it ends, because its caller still holds them."""
    live_activations.clear()
    _, engine = start(Case(backend=backend), SeveralActivations().to(device()))
    for _ in range(3):
        engine.backward(engine(torch.ones(1, device=device())))
        engine.step()
    engine.destroy()
    assert live_activations == [0, 0, 0]


class DropsGradients(torch.optim.SGD):
    """Drops each gradient when it has read it, and notes whether the memory is free then."""

    def step(self, closure=None):
        super().step(closure)
        self.freed = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    memory = StorageWeakRef(parameter.grad.untyped_storage())
                    parameter.grad = None
                    self.freed.append(memory.expired())


@vary("dtype", ["fp32", "bf16"])
@on_ranks(2)
def test_an_optimizer_frees_what_it_drops(dtype):
    """A step would keep the gradient of a partition until it has stepped all partitions."""
    case = Case(dtype=dtype)
    module = build(case)
    optimizer = DropsGradients(module.parameters(), lr=0.1)
    # With a hook, its step() reads whole partitions.
    optimizer.register_step_pre_hook(lambda *_: None)
    engine = make_engine(module, case, optimizer=optimizer)
    backward(engine)
    engine.step()
    engine.destroy()
    assert optimizer.freed == [True]


@pytest.mark.follows("run all of the step's micro-batches again, each with a backward")
@pytest.mark.sanitized
@pytest.mark.parametrize("how", ["zero_grad", "destroy"])
@vary("stage", [1, 2])
@on_ranks(2)
def test_release(how, stage):
    """Gradients would outlive zero_grad() or the engine, or a step would be taken without any."""
    pair = CaseBeside(Case(stage=stage))
    engine, reducer = pair.engine, pair.engine.optimizer._deepcompile.reducer
    backward(engine)
    assert reducer.counters()["bound"] > 0
    if how == "destroy":
        engine.destroy()
        counters = reducer.counters()
        assert held(counters) == NOTHING and counters["registered"] == 0
    else:
        engine.optimizer.zero_grad()
        assert held(reducer.counters()) == NOTHING
        with pytest.raises(RuntimeError, match="found no gradients"):
            engine.step()
        pair.step(1)
        assert pair.last_error() < BOUND


@vary("stage", [1, 2])
@on_ranks(2)
def test_an_engine_that_is_dropped_between_backward_and_step(stage):
    """Its parameters would stay for good, because the reducer keeps parameters, and these kept the reducer."""
    module, engine = start(Case(stage=stage))
    backward(engine, 0, 0)
    references = [weakref.ref(parameter) for parameter in module.parameters()]
    del module, engine
    # The reducer goes with the engine, and what only the reducer has kept goes later.
    gc.collect()
    gc.collect()
    assert all(reference() is None for reference in references)


@pytest.mark.core
@vary("stage", [1, 2])
@on_ranks(2)
def test_a_step_returns_every_byte(stage):
    """Memory that no counter counts, such as a bucket or a copy of the partition, would stay from step to step."""
    _, engine = start(Case(stage=stage, bucket=10**5), Model(width=256).to(device()))
    for step in range(3):
        backward(engine, step)
        engine.step()
    grown, grown_until_optimizer, partitions = [], [], []
    for step in (3, 4):
        ids = batch(step, 0, dist.get_rank(), 4)
        dist.barrier()
        before = least_allocated_bytes(ids.is_cuda)
        loss = engine(ids)
        engine.backward(loss)
        del loss
        grown_until_optimizer.append(allocated_bytes(ids.is_cuda) - before)
        partitions.append(gradient_counters(engine)["bound"])
        engine.step()
        dist.barrier()
        grown.append(least_allocated_bytes(ids.is_cuda) - before)
    engine.destroy()
    partition = min(partitions)
    assert partition > 10**6
    # What a C heap and a grad norm come and go by is small against a partition.
    assert min(grown_until_optimizer) > 0.9 * max(partitions)
    # What threads of a compiler allocate beside one of the steps is no leak.
    assert min(map(abs, grown)) < 0.05 * partition


# Memory that a collective still reads ---------------------------------------------------------------------------


class Delayed(NamedTuple):
    """What came of training with ranks that start their backwards late."""

    error: float
    waited: float  # the longest backward, in seconds


def train_with_a_straggler(case, delay):
    """Each rank in turn starts its backward late, so that the others' collectives wait while they compute on."""
    rank, pair, waited = dist.get_rank(), Beside(build(case), case), 0.0
    store, ranks = new_store(), range(dist.get_world_size())
    for step in range(case.steps):
        ids = batch(step, 0, rank, 4)
        loss = pair.engine(ids)
        begun = time.monotonic()
        if step > 0:
            # So late that the others have begun, whatever else the machine does.
            store.set(f"rank {rank} begins step {step}", "")
            if rank == step % len(ranks):
                store.wait([f"rank {other} begins step {step}" for other in ranks])
                time.sleep(delay)
                begun = time.monotonic()
        pair.engine.backward(loss)
        if loss.is_cuda:
            # There the device waits and not the host.
            torch.cuda.synchronize()
        waited = max(waited, time.monotonic() - begun) if step > 0 else 0.0
        pair.engine.step()
        pair.plain(ids).backward()
        pair.step_plain()
    return Delayed(pair.last_error(), waited)


def check_delayed(results):
    assert max(result.waited for result in results) > 0.25, "no rank waited, so nothing was delayed"
    assert max(result.error for result in results) < BOUND


@vary("backend", ["eager"], slow=["inductor"])
@pytest.mark.parametrize("model", ["OneGraph", "RepeatedLayers", "SeveralGraphs", "EagerBlocks", "Checkpointed"])
def test_a_delayed_collective_reads_what_was_reduced(ranks, model, backend):
    """A backward would go on to write into a bucket that a collective has not read yet, as another rank is late."""
    case = Case(model=model, backend=backend, bucket=200, steps=3)
    check_delayed(ranks(2).run(train_with_a_straggler, case, 0.3))


@vary(
    "model, backend",
    [("WideRepeatedLayers", "eager"), ("WideRepeatedLayers", "inductor")],
    slow=[("Wide", "eager"), ("Wide", "inductor")],
)
@vary("bucket", [10**6, 10**7])
def test_gradients_reduced_where_they_lie_are_not_overwritten(ranks, bucket, model, backend):
    """A graph would use a gradient's memory again while a collective still reads the gradient there."""
    case = Case(model=model, backend=backend, bucket=bucket, steps=3)
    check_delayed(ranks(2).run(train_with_a_straggler, case, 0.3))

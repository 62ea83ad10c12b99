# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""When gradient memory exists, and that nothing keeps it longer or writes to it too early."""

import gc
import time
from typing import Dict, List, NamedTuple, Optional, Set, Tuple

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


class Window(NamedTuple):
    """What an engine of one parameter group held in one accumulation window; ``held()`` says what that is."""

    registered: int  # parameters
    compiled: Dict[str, int]  # held after compile()
    backwards: List[Dict[str, int]]  # held after each backward
    stepped: Dict[str, int]  # held after the step
    partition: int  # elements of this rank's partition
    handed_over: int  # elements of the gradients that the optimizer is given
    handed_over_bytes: int  # of the memory in which these lie
    flat: Optional[Tuple[int, int]]  # dimensions and elements of the flat partition, if there is one
    handed_over_after_step: list
    optimizer_attributes: List[str]  # of the fork, which destroy() has left
    optimizer_is_itself_again: bool


def stages_of_a_target(case):
    """Trains one accumulation window, and looks after each of its stages."""
    _, engine = start(case)
    optimizer = engine.optimizer
    registered, compiled = gradient_counters(engine)["registered"], held(gradient_counters(engine))
    backwards = []
    for micro_step in range(case.accumulation):
        backward(engine, 0, micro_step)
        backwards.append(held(gradient_counters(engine)))
        if micro_step == case.accumulation - 1:
            group = optimizer.averaged_gradients[0]
            flat = group.flat_partition
            flat_shape = None if flat is None else (flat.dim(), flat.numel())
            storages = {view.untyped_storage().data_ptr(): view.untyped_storage().nbytes() for view in group}
            handed_over, partition = sum(view.numel() for view in group), int(optimizer.partition_size[0])
            del group, flat
        engine.step()
    stepped = held(gradient_counters(engine))
    handed_over_after_step = [entry for entry in optimizer.averaged_gradients.values() if entry is not None]
    engine.destroy()
    return Window(
        registered=registered,
        compiled=compiled,
        backwards=backwards,
        stepped=stepped,
        partition=partition,
        handed_over=handed_over,
        handed_over_bytes=sum(storages.values()),
        flat=flat_shape,
        handed_over_after_step=handed_over_after_step,
        optimizer_attributes=[name for name in vars(optimizer) if "deepcompile" in name.lower()],
        # But for the order of its elements.
        optimizer_is_itself_again=type(optimizer) is even_class(DeepSpeedZeroOptimizer)
        and not hasattr(optimizer, "_deepcompile"),
    )


@pytest.mark.core
@pytest.mark.parametrize("dtype", [sanitized("fp32"), "bf16"])
@vary("stage, accumulation", [(1, 1), (1, 3), (2, 1), (2, 3)])
def test_stages_of_a_target(ranks, stage, accumulation, dtype):
    """Gradient memory would exist before its stage begins, or longer than it lasts, and train as well."""
    case = Case(stage=stage, accumulation=accumulation, dtype=dtype)
    for seen in ranks(2).run(stages_of_a_target, case):
        assert seen.registered == 20
        assert seen.compiled == NOTHING
        partition_bytes = seen.handed_over_bytes
        if dtype == "fp32":
            # The optimizer takes the flat partition as it is.
            assert seen.flat == (1, seen.partition) and partition_bytes == 4 * seen.partition
        else:
            # It makes an fp32 copy, so gradients stay where they are. No byte of anything else stays with them.
            assert seen.flat is None and partition_bytes == 2 * seen.handed_over
        for micro_step, after in enumerate(seen.backwards):
            at_boundary = micro_step == accumulation - 1
            assert after["pending"] == after["bucket"] == 0
            assert after["bound"] == (partition_bytes if stage == 2 or at_boundary else 0)
            assert (after["unreduced"] > 0) == (stage == 1 and not at_boundary)
        assert len(seen.backwards) == accumulation
        assert seen.handed_over <= seen.partition
        assert seen.stepped == NOTHING
        assert seen.handed_over_after_step == []
        assert seen.optimizer_attributes == [] and seen.optimizer_is_itself_again


class Entry(NamedTuple):
    """What code written for the base's own entries of ``averaged_gradients`` finds in one of this fork."""

    lacking: List[str]  # names that the base's entries have
    kinds: Set[Tuple[torch.dtype, str]]  # dtypes and types of devices of its tensors
    flat: Optional[int]  # elements of the flat partition that the base's step finds, if it finds one
    partition: int  # elements of a partition
    released: Dict[str, int]  # held when the base has released the entry
    after_step: list  # the entries after a step


def entries_as_in_the_base(case):
    """Uses an entry of ``averaged_gradients`` as the base does, and then trains a step."""
    _, engine = start(case)
    optimizer = engine.optimizer
    with default_dtype(torch.float64):
        backward(engine)
        entry = optimizer.averaged_gradients[0]
        kinds = {(tensor.dtype, tensor.device.type) for tensor in entry}
    names = [name for name in dir(GradPartitionBufferGroup([], torch.zeros(0))) if not name.startswith("_")]
    lacking = [name for name in [*names, "release_grad_buffers"] if not hasattr(entry, name)]
    flat = optimizer._get_preflattened_grad_partition(0)
    numel = None if flat is None else flat.numel()
    del flat, entry
    optimizer._release_preflattened_grad_buffers()
    released = held(gradient_counters(engine))
    optimizer.zero_grad()
    backward(engine, 1)
    engine.step()
    after_step = list(optimizer.averaged_gradients.values())
    engine.destroy()
    return Entry(lacking, kinds, numel, int(optimizer.partition_size[0]), released, after_step)


@pytest.mark.parametrize("dtype", [sanitized("fp32"), "bf16"])
@vary("stage", [1, 2])
def test_callers_of_the_base_find_its_names(ranks, dtype, stage):
    """Code that is written for the base's entries of ``averaged_gradients`` would raise for lack of a name."""
    # Of FewParameters one rank owns padding only.
    case = Case(model="FewParameters", dtype=dtype, stage=stage)
    expected = {(torch.float32 if dtype == "fp32" else torch.bfloat16, device().type)}
    for entry in ranks(2).run(entries_as_in_the_base, case):
        assert entry.lacking == []
        assert entry.kinds == expected
        # In bf16 each gradient lies where it was reduced; a flat partition would be another copy.
        assert entry.flat == (entry.partition if dtype == "fp32" else None)
        assert entry.released == NOTHING
        assert entry.after_step == [None]


# Moments --------------------------------------------------------------------------------------------------------


def binding_moments(case):
    """Bound bytes on this rank when a backward begins, and each time a block's input gradient has been computed, last
    block first."""
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
    _, engine = start(case, Watched().to(device()))
    backward(engine)
    engine.step()
    bound.clear()
    loss = engine(batch(1, 0, dist.get_rank(), 4))
    loss.register_hook(note)
    engine.backward(loss)
    engine.destroy()
    return bound


@pytest.mark.sanitized
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_rank_binds_when_its_first_piece_arrives(ranks, dtype):
    """The target of a rank would be allocated when the backward begins, beside activations that are freed later."""
    # Gradients arrive from the last parameters to the first, and each rank gets its shard of each. In fp32 the first
    # that arrives makes the flat partition. In bf16 each target has memory of its own.
    for bound in ranks(2).run(binding_moments, Case(bucket=1, dtype=dtype)):
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


def activations_behind_their_last_use(case):
    """How many activations live when a backward has used all of them, in each step."""
    live_activations.clear()
    _, engine = start(case, SeveralActivations().to(device()))
    for _ in range(3):
        engine.backward(engine(torch.ones(1, device=device())))
        engine.step()
    engine.destroy()
    return list(live_activations)


@pytest.mark.options("compile.free_activation")
@pytest.mark.parametrize("backend", [sanitized("eager"), "inductor"])
def test_activations_are_freed_after_their_last_use(ranks, backend):
    """A backward graph would keep its inputs until it ends, because its caller still holds them."""
    for live in ranks(2).run(activations_behind_their_last_use, Case(backend=backend)):
        assert live == [0, 0, 0]


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


def freed_by_its_optimizer(case):
    module = build(case)
    optimizer = DropsGradients(module.parameters(), lr=0.1)
    # With a hook, its step() reads whole partitions.
    optimizer.register_step_pre_hook(lambda *_: None)
    engine = make_engine(module, case, optimizer=optimizer)
    engine.backward(engine(batch(0, 0, dist.get_rank(), 4)))
    engine.step()
    engine.destroy()
    return optimizer.freed


@vary("dtype", ["fp32", "bf16"])
def test_an_optimizer_frees_what_it_drops(ranks, dtype):
    """A step would keep the gradient of a partition until it has stepped all partitions."""
    assert ranks(2).run(freed_by_its_optimizer, Case(dtype=dtype)) == [[True], [True]]


class Released(NamedTuple):
    """What was held before and after a release, and the error of a later step."""

    before: Dict[str, int]
    after: Dict[str, int]
    error: float


def release_by(how, case):
    """Releases the gradients of a backward by ``how``, and then trains on where an engine is left."""
    pair = CaseBeside(case)
    engine = pair.engine
    backward(engine)
    before = held(gradient_counters(engine))
    if how == "zero_grad":
        engine.optimizer.zero_grad()
        after = held(gradient_counters(engine))
        message = None
        try:
            engine.step()
        except RuntimeError as error:
            message = str(error)
        assert message and "found no gradients" in message, message
    elif how == "destroy":
        reducer = engine.optimizer._deepcompile.reducer
        engine.destroy()
        after = held(reducer.counters())
        after["registered"] = reducer.counters()["registered"]
        return Released(before, after, 0.0)
    pair.step(1)
    return Released(before, after, pair.last_error())


@pytest.mark.follows("run a backward at the gradient accumulation boundary first")
@pytest.mark.sanitized
@pytest.mark.parametrize("how", ["zero_grad", "destroy"])
@vary("stage", [1, 2])
def test_release(ranks, how, stage):
    """Gradients would outlive zero_grad() or the engine, or a step would be taken without any."""
    for released in ranks(2).run(release_by, how, Case(stage=stage)):
        assert released.before["bound"] > 0
        assert all(count == 0 for count in released.after.values()), released
        assert released.error < BOUND


class Growth(NamedTuple):
    """By how many bytes allocated memory grew in a step."""

    whole: int  # by the end of the step
    until_optimizer: int  # by the beginning of the optimizer's step
    partition: int  # bytes of a partition


def net_bytes_of_steps(case):
    """Measures allocated memory around the fourth step and around the fifth."""
    module, engine = start(case, Model(width=256).to(device()))
    for step in range(3):
        backward(engine, step)
        engine.step()
    growths = []
    for step in (3, 4):
        ids = batch(step, 0, dist.get_rank(), 4)
        dist.barrier()
        before = least_allocated_bytes(ids.is_cuda)
        loss = engine(ids)
        engine.backward(loss)
        del loss
        until_optimizer = allocated_bytes(ids.is_cuda) - before
        partition = gradient_counters(engine)["bound"]
        engine.step()
        dist.barrier()
        growths.append(Growth(least_allocated_bytes(ids.is_cuda) - before, until_optimizer, partition))
    engine.destroy()
    return growths


@pytest.mark.core
@vary("stage", [1, 2])
def test_a_step_returns_every_byte(ranks, stage):
    """Memory that no counter counts, such as a bucket or a copy of the partition, would stay from step to step."""
    case = Case(stage=stage, bucket=10**5)
    for growths in ranks(2).run(net_bytes_of_steps, case):
        for growth in growths:
            assert growth.partition > 10**6
            # What a C heap and a grad norm come and go by is small against a partition.
            assert growth.until_optimizer > 0.9 * growth.partition
        # What threads of a compiler allocate beside one of the steps is no leak.
        assert min(abs(growth.whole) for growth in growths) < 0.05 * growth.partition


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


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", ["OneGraph", "RepeatedLayers", "SeveralGraphs", "EagerBlocks", "Checkpointed"])
def test_a_delayed_collective_reads_what_was_reduced(ranks, model, backend):
    """A backward would go on to write into a bucket that a collective has not read yet, as another rank is late."""
    case = Case(model=model, backend=backend, bucket=200, steps=3)
    check_delayed(ranks(2).run(train_with_a_straggler, case, 0.3))


@pytest.mark.parametrize(
    "model, backend",
    [
        ("WideRepeatedLayers", "eager"),
        ("WideRepeatedLayers", "inductor"),
        *(pytest.param("Wide", backend, marks=pytest.mark.slow) for backend in ("eager", "inductor")),
    ],
)
@vary("bucket", [10**6, 10**7])
def test_gradients_reduced_where_they_lie_are_not_overwritten(ranks, bucket, model, backend):
    """A graph would use a gradient's memory again while a collective still reads the gradient there."""
    case = Case(model=model, backend=backend, bucket=bucket, steps=3)
    check_delayed(ranks(2).run(train_with_a_straggler, case, 0.3))

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""With the optimizer on the host (``offload_optimizer``), gradients go there too, and training stays what it is.

``test_dtypes.py`` has the number formats, ``test_engine_state.py`` what is moved, and
``features/checkpoints/`` what is saved, read and set.
"""

import contextlib
import copy
from typing import Dict, NamedTuple

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.compile.zero_1_and_2 import gradient_counters
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from support.beside import Beside
from support.faults import half_a_step, on_every_rank
from support.ids import vary
from support.lifetime import address_space_left, backward, start
from support.models import CASES
from support.options import ALSO_WARNED, train_and_collect_warnings
from support.training import (
    BOUND,
    NOTHING,
    OVERLAPPED,
    Case,
    batch,
    build,
    check_trained,
    compile_backend,
    device,
    engine_by_configuration,
    held,
    low_precision,
    offload,
    ranges_of,
    relative_error,
    step_plain,
    total_error,
    train_beside_plain_loop,
)

# Gradients that reach the reducer in another way each, and partitions of another kind.
IN_EVERY_RUN = ("RepeatedLayers", "CompiledAndEager", "FrozenAndUnused", "OddSizes", "FillsPartition", "FewParameters")


@pytest.mark.options("zero_optimization.offload_optimizer")
@pytest.mark.table
@vary(
    "stage, accumulation, model, backend",
    [
        *(
            pytest.param(
                *(1 + index % 2, 1 + 2 * (index // 2 % 2), model, "eager"),
                marks=[] if model in IN_EVERY_RUN else pytest.mark.slow,
            )
            for index, model in enumerate(CASES)
        ),
        pytest.param(1, 3, "RepeatedLayers", "inductor", marks=pytest.mark.slow),
        pytest.param(2, 1, "OneGraph", "inductor", marks=pytest.mark.slow),
    ],
)
def test_offloaded_models(ranks, stage, accumulation, model, backend):
    """A gradient that autograd, and no graph, makes would stay on the device, where no step looks for it."""
    case = Case(model=model, stage=stage, accumulation=accumulation, backend=backend, offloaded=True)
    results = check_trained(ranks(2).run(train_beside_plain_loop, case))
    # Of FewParameters one rank owns padding only.
    assert any(result.counters["on_host"] > 0 for result in results)
    assert all(result.counters["peak_bound"] == 0 for result in results)


@vary(
    "varied",
    [
        {"groups": 3, "clipping": 0.05},
        {"model": "OddSizes", "bucket": 1},
        {"model": "RepeatedLayers", "config": OVERLAPPED},
        {"config": {"zero_optimization": {"round_robin_gradients": True, "overlap_comm": False}}},
        {"config": {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": False}}}},
        {"config": {"zero_optimization": {"parameter_alignment": True}}, "model": "OddSizes", "groups": 2},
        {"config": {"data_types": {"grad_accum_dtype": "fp32"}}, "skip_on_odd_steps": True, "steps": 5},
    ],
)
@vary("stage", [1, 2])
def test_offloaded_variations(ranks, stage, varied):
    """Gradients that lie elsewhere in the host's memory than the optimizer looks for them would step others."""
    case = Case(stage=stage, accumulation=2, offloaded=True, **varied)
    check_trained(ranks(2).run(train_beside_plain_loop, case))


@vary("model", ["OneGraph", "FewParameters"])
@vary("stage", [1, 2])
@vary("world", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_offloaded_layouts(ranks, world, model, stage):
    """A rank that owns nothing, or everything, would wait for a copy that nobody makes."""
    case = Case(model=model, stage=stage, accumulation=2, offloaded=True)
    check_trained(ranks(world).run(train_beside_plain_loop, case))


class Memory(NamedTuple):
    """What an engine holds at each moment of a step: the counters, and where gradients and masters lie."""

    counters: Dict[str, Dict[str, int]]
    partition: int  # bytes of this rank's gradients
    on_host: bool  # gradients that were handed over, and masters
    is_master_free: bool  # masters have no gradients of their own between steps


def follow_a_step(case):
    module, engine = start(case)
    optimizer, counters = engine.optimizer, {}
    backward(engine)
    counters["first backward"] = held(gradient_counters(engine))
    engine.step()
    backward(engine, micro_step=1)
    counters["last backward"] = held(gradient_counters(engine))
    tensors = [*optimizer.averaged_gradients[0], *optimizer.single_partition_of_fp32_groups]
    partition = sum(view.numel() * view.element_size() for view in optimizer.averaged_gradients[0])
    engine.step()
    counters["step"] = held(gradient_counters(engine))
    is_master_free = optimizer.single_partition_of_fp32_groups[0].grad is None
    engine.destroy()
    return Memory(counters, partition, all(tensor.is_cpu for tensor in tensors), is_master_free)


@vary("stage", [1, 2])
def test_no_gradient_stays_on_the_device(ranks, stage):
    """A gradient that was copied and kept would take the device memory that offloading is to save."""
    for memory in ranks(2).run(follow_a_step, Case(stage=stage, accumulation=2, dtype="bf16", offloaded=True)):
        on_host = {**NOTHING, "on_host": memory.partition}
        if stage == 2:
            assert memory.counters["first backward"] == on_host
        else:
            assert memory.counters["first backward"]["unreduced"] > 0
        assert memory.counters["last backward"] == on_host
        assert memory.counters["step"] == NOTHING
        assert memory.on_host and memory.is_master_free


def engine_with_optimizer_of_configuration(module, params, config, deepcompile=True, around=None):
    """Returns an engine, compiled within the context ``around`` where there is DeepCompile."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": params},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "compile": {"deepcompile": deepcompile},
        **config,
    }
    engine = deepspeed.initialize(model=module, config=config)[0]
    if deepcompile:
        with around or contextlib.nullcontext():
            engine.compile(backend="eager")
    return engine


class Stepped(NamedTuple):
    """What an optimizer that DeepSpeed has made came to, against one of torch in a plain loop."""

    optimizer: str
    masters: float
    states: float
    ranges: int


def train_with_optimizer_of_configuration(params, numel):
    """Trains with an optimizer that the configuration names, range by range, beside torch's AdamW."""
    from deepspeed.compile.zero_1_and_2.step.partition_gradient import PartitionGradient

    torch._dynamo.reset()
    settings = {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-4, "weight_decay": 0.1}
    module = build(Case())
    plain = copy.deepcopy(module)
    engine = engine_with_optimizer_of_configuration(module, {**settings, **params}, {"gradient_clipping": 0.5})
    expected = torch.optim.AdamW(plain.parameters(), **settings)
    take, taken = PartitionGradient.scaled, []
    PartitionGradient.scaled = lambda self, *span: taken.append(span) or take(self, *span)
    try:
        with ranges_of(numel):
            for step in range(4):
                backward(engine, step)
                engine.step()
                plain(batch(step, 0, dist.get_rank(), 4)).backward()
                step_plain(plain, expected, 0.5)
    finally:
        PartitionGradient.scaled = take
    pairs = list(zip(module.parameters(), plain.parameters(), strict=True))
    states = [
        (safe_get_full_optimizer_state(parameter, name), expected.state[other][name])
        for parameter, other in pairs
        for name in ("exp_avg", "exp_avg_sq")
    ]
    result = Stepped(
        type(engine.optimizer.optimizer).__name__,
        relative_error([safe_get_full_fp32_param(parameter) for parameter, _ in pairs], plain.parameters()),
        relative_error(*zip(*states, strict=True)),
        len(taken),
    )
    engine.destroy()
    return result


@vary("params, name", [({}, "DeepSpeedCPUAdam"), ({"torch_adam": True}, "AdamW")], expects="name")
def test_the_optimizer_that_deepspeed_makes(ranks, params, name):
    """DeepSpeed's Adam for CPUs, cut into ranges, would count a step for each range."""
    for stepped in ranks(2).run(train_with_optimizer_of_configuration, params, numel=50):
        assert stepped.optimizer == name
        assert stepped.masters < BOUND and stepped.states < BOUND
        assert stepped.ranges > 8


MASTERS = {"bf16": "bf16_master_weights_and_grads", "fp16": "fp16_master_weights_and_grads"}


class Masters(NamedTuple):
    """What came of training with DeepCompile and without."""

    difference: float
    moved: float
    dtype: str


def masters_in_low_precision(dtype):
    section = {**low_precision(dtype, loss_scale_window=4)[dtype], MASTERS[dtype]: True}
    trained = []
    for deepcompile in (True, False):
        torch._dynamo.reset()
        module = build(Case())
        engine = engine_with_optimizer_of_configuration(module, {"lr": 0.05}, {dtype: section}, deepcompile)
        for step in range(6):
            backward(engine, step)
            engine.step()
        trained.append([safe_get_full_fp32_param(parameter).float() for parameter in module.parameters()])
        master_dtype = engine.optimizer.single_partition_of_fp32_groups[0].dtype
        engine.destroy()
    return Masters(total_error(*trained), total_error(trained[0], build(Case()).parameters()), str(master_dtype))


@pytest.mark.options("bf16.bf16_master_weights_and_grads", "fp16.fp16_master_weights_and_grads")
@vary("dtype, master", [("bf16", "torch.bfloat16"), ("fp16", "torch.float16")], expects="master")
def test_masters_in_low_precision(ranks, dtype, master):
    """The new parameters are written over gradients of the same format, which a range might still have to read."""
    for masters in ranks(2).run(masters_in_low_precision, dtype):
        assert masters.dtype == master
        assert masters.difference < 1e-2 * masters.moved


@vary("where, how", [("forward", "raises"), ("backward", "raises"), ("behind the backward", "interrupted")])
@vary("stage", [1, 2])
def test_the_step_after_a_fault(ranks, stage, where, how):
    """Copies that were on their way when the backward raised would be added to the next step's gradients."""
    case = Case(stage=stage, accumulation=3, bucket=50, offloaded=True)
    for after in ranks(2).run(on_every_rank, case, where, how):
        assert after.raised and after.error < BOUND
        assert after.held_at_last == NOTHING


def half_a_step_in_ranges(case, folder):
    """The fault comes between two ranges."""
    with ranges_of(7):
        return half_a_step(case, folder)


@vary("stage", [1, 2])
def test_half_a_step_offloaded(ranks, tmp_path, stage):
    """Ranges that were stepped before an interruption would be stepped again with what lies over their gradients."""
    case = Case(stage=stage, accumulation=3, groups=2, offloaded=True)
    for after in ranks(2).run(half_a_step_in_ranges, case, str(tmp_path)):
        assert "was ended half way (Injected: behind the update)" in after.raised[1]
        assert after.error < BOUND


class Compiled(NamedTuple):
    """What came of an engine that had gradients before it was compiled."""

    error: float  # of the parameters beside an engine without DeepCompile
    moved: float
    refused: str  # what engine.compile() said between two micro-batches
    is_attached: bool  # in the end


def compiled_between_micro_batches(stage):
    """Trains an engine that may compile itself, from a first micro-batch on that is in evaluation mode."""
    config = {"gradient_accumulation_steps": 2, "zero_optimization": {"stage": stage}}
    offload(config)
    trained = []
    for deepcompile in (False, True):
        torch._dynamo.reset()
        module = build(Case())
        engine = engine_by_configuration(module, deepcompile, **config)
        for step in range(3):
            for micro_step in range(2):
                engine.train(step > 0 or micro_step > 0)
                with compile_backend("eager"):
                    backward(engine, step, micro_step)
                    if deepcompile and (step, micro_step) == (0, 0):
                        with pytest.raises(ValueError) as raised:
                            engine.compile(backend="eager")
                        # As if nobody had called it.
                        engine._compile_arguments = None
                    engine.step()
        trained.append([parameter.detach().clone() for parameter in module.parameters()])
        is_attached = hasattr(engine.optimizer, "_deepcompile")
        engine.destroy()
    moved = relative_error(trained[0], build(Case()).parameters())
    return Compiled(relative_error(*reversed(trained)), moved, str(raised.value), is_attached)


@vary("stage", [1, 2])
def test_gradients_before_compile_are_not_lost(ranks, stage):
    """The base keeps a first micro-batch's gradients in host memory of its own, which DeepCompile does not read."""
    for result in ranks(2).run(compiled_between_micro_batches, stage):
        assert "gradients computed before engine.compile() would be lost" in result.refused
        assert result.is_attached and result.error < BOUND < result.moved


class Large(torch.nn.Module):
    """A matrix whose gradient has 96 MiB: from 32 on, the C library has memory from the system."""

    NUMEL = 24 * 2**20

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64, self.NUMEL // 64))

    def forward(self, ids):
        return (self.weight.mean(dim=1) * (ids.flatten()[0] + 1)).square().sum()


def train_with_little_host_memory():
    """Trains with gradients in fp32 beside masters in bf16. Compiling may take 72 MiB of the host's memory.

    Returns what engine.compile() raises or, if nothing, how far training with DeepCompile and without is apart.
    """
    config = {
        "bf16": {"enabled": True, MASTERS["bf16"]: True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
    }
    trained = []
    for deepcompile in (True, False):
        torch._dynamo.reset()
        module, little = Large().to(device()), address_space_left(3 * Large.NUMEL)
        try:
            engine = engine_with_optimizer_of_configuration(module, {"lr": 0.05}, config, deepcompile, little)
        except RuntimeError as error:
            return str(error)
        backward(engine)
        engine.step()
        trained.append(module.weight.detach().float())
        engine.destroy()
    return total_error(trained[:1], trained[1:]), total_error(trained[:1], [torch.ones_like(trained[0])])


@pytest.mark.follows("host memory for gradients could not be allocated; use more ranks")
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's driver takes address space of the host too")
def test_little_host_memory(ranks):
    """Torch's error would name no option, or more ranks, as is advised, would need as much memory each."""
    (said,) = ranks(1).run(train_with_little_host_memory)
    assert said == (
        "zero_optimization.offload_optimizer: 0.1 GiB of host memory for gradients could not be allocated; use more "
        "ranks"
    )
    for difference, moved in ranks(2).run(train_with_little_host_memory):
        assert difference < 1e-2 * moved


@pytest.mark.options("zero_optimization.cpu_offload")
def test_deprecated_name(ranks):
    """DeepSpeed takes the old name for the new one, and gradients would stay on the device."""
    config = {"zero_optimization": {"cpu_offload": True}, "zero_force_ds_cpu_optimizer": False}
    results = check_trained(ranks(2).run(train_beside_plain_loop, Case(stage=2, config=config)))
    assert all(result.counters["on_host"] > 0 == result.counters["peak_bound"] for result in results)


# Copies between device and host ------------------------------------------------------------------------------------

# Of the device's clock: about a quarter of a second.
CYCLES = 5 * 10**8


def keep_other_streams_busy():
    """Keeps every stream busy but the current one. What the caller then puts on another stream runs late."""
    # torch's pool has 32 streams, which it gives out in turn. The reducer's stream of copies is one of them.
    for stream in [torch.cuda.Stream() for _ in range(32)]:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(CYCLES)


def train_with_late_work(case, late):
    """Trains beside a plain loop, while part of the device's work runs late in each step.

    ``late``: "copies" to the host and collectives, the "gradients" themselves, or the "parameters" that come back.
    """
    pair = Beside(build(case), case)
    for step in range(case.steps):
        for micro_step in range(case.accumulation):
            ids = batch(step, micro_step, dist.get_rank(), 4)
            loss = pair.engine(ids)
            if late == "copies":
                keep_other_streams_busy()
            elif late == "gradients":
                torch.cuda._sleep(CYCLES)
            pair.engine.backward(loss)
            if late == "parameters":
                keep_other_streams_busy()
            pair.engine.step()
            (pair.plain(ids) / case.accumulation).backward()
        step_plain(pair.plain, pair.optimizer, case.clipping)
    return pair.last_error()


NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: a CPU has no streams")
# With fewer connections to the device, streams share them and wait for each other.
CONNECTIONS = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}


@pytest.mark.gpu
@NEEDS_GPU
@vary("late", ["copies", "gradients", "parameters"])
@vary("world, stage, accumulation", [(1, 1, 1), (1, 2, 2), (2, 1, 2), (2, 2, 2)])
@vary("model, bucket", [("OneGraph", 200), ("Wide", 10**6), ("WideRepeatedLayers", 10**6)])
def test_late_work_is_waited_for(ranks, model, bucket, world, stage, accumulation, late):
    """A copy that nobody waits for brings old gradients to the host, or old parameters to the device."""
    # Clipping, because the host then needs the norm.
    case = Case(model, stage=stage, accumulation=accumulation, bucket=bucket, steps=4, clipping=0.05, offloaded=True)
    for error in ranks(world, **CONNECTIONS).run(train_with_late_work, case, late):
        assert error < BOUND


@pytest.mark.gpu
@NEEDS_GPU
@vary("late", ["copies", "gradients", "parameters"])
@vary(
    "varied",
    [
        {"groups": 2},
        {"config": OVERLAPPED},
        {"config": {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": False}}}},
        {"config": {"zero_optimization": {"round_robin_gradients": True}}},
    ],
)
@vary("stage", [1, 2])
def test_late_work_is_waited_for_with_options(ranks, stage, varied, late):
    """Options lead to other copies, on other streams, which nobody might wait for."""
    settings = {"model": "WideRepeatedLayers", "stage": stage, "accumulation": 2, "bucket": 10**6, "steps": 4}
    case = Case(**settings, clipping=0.05, offloaded=True, **varied)
    for error in ranks(2, **CONNECTIONS).run(train_with_late_work, case, late):
        assert error < BOUND


@pytest.mark.options("zero_optimization.ignore_unused_parameters")
def test_warned_with_offloading(ranks):
    """An unused parameter would be stepped in silence where the option asks for an error."""
    config = {"zero_optimization": {"ignore_unused_parameters": False}}
    case = Case(model="FrozenAndUnused", steps=1, offloaded=True, config=config)
    (result,) = ranks(1).run(train_and_collect_warnings, case)
    assert result.trained.error < BOUND
    assert result.warnings == [("1", ALSO_WARNED["zero_optimization.ignore_unused_parameters"])]

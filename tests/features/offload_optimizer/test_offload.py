# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""With the optimizer on the host (``offload_optimizer``), gradients go there too, and training stays what it is.

``test_dtypes.py`` has the number formats, ``test_engine_state.py`` what is moved, and
``features/checkpoints/`` what is saved, read and set.
"""

import contextlib
import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.compile.zero_1_and_2 import gradient_counters
from deepspeed.compile.zero_1_and_2.step.partition_gradient import PartitionGradient
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from support.beside import Beside
from support.faults import half_a_step, on_every_rank
from support.ids import vary
from support.lifetime import address_space_left, backward, start, take_steps
from support.models import CASES
from support.on_ranks import on_ranks
from support.options import ALSO_WARNED, outcome, train_and_collect_warnings
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
@vary("world", [1], slow=[3])
def test_offloaded_layouts(ranks, world, model, stage):
    """A rank that owns nothing, or everything, would wait for a copy that nobody makes."""
    case = Case(model=model, stage=stage, accumulation=2, offloaded=True)
    check_trained(ranks(world).run(train_beside_plain_loop, case))


@vary("stage", [1, 2])
@on_ranks(2)
def test_no_gradient_stays_on_the_device(stage):
    """A gradient that was copied and kept would take the device memory that offloading is to save."""
    _, engine = start(Case(stage=stage, accumulation=2, dtype="bf16", offloaded=True))
    optimizer = engine.optimizer
    backward(engine)
    first = held(gradient_counters(engine))
    engine.step()
    backward(engine, micro_step=1)
    gradients, masters = [*optimizer.averaged_gradients[0]], optimizer.single_partition_of_fp32_groups
    on_host = {**NOTHING, "on_host": sum(view.numel() * view.element_size() for view in gradients)}
    if stage == 2:
        assert first == on_host
    else:
        assert first["unreduced"] > 0
    assert held(gradient_counters(engine)) == on_host
    engine.step()
    assert held(gradient_counters(engine)) == NOTHING
    assert all(tensor.is_cpu for tensor in [*gradients, *masters])
    assert masters[0].grad is None
    engine.destroy()


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


@vary("params, name", [({}, "DeepSpeedCPUAdam"), ({"torch_adam": True}, "AdamW")], expects="name")
@on_ranks(2)
def test_the_optimizer_that_deepspeed_makes(params, name):
    """DeepSpeed's Adam for CPUs, cut into ranges, would count a step for each range."""
    settings = {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-4, "weight_decay": 0.1}
    module = build(Case())
    plain = copy.deepcopy(module)
    engine = engine_with_optimizer_of_configuration(module, {**settings, **params}, {"gradient_clipping": 0.5})
    assert type(engine.optimizer.optimizer).__name__ == name
    expected = torch.optim.AdamW(plain.parameters(), **settings)
    take, taken = PartitionGradient.scaled, []
    noted = mock.patch.object(PartitionGradient, "scaled", lambda self, *span: taken.append(span) or take(self, *span))
    with noted, ranges_of(50):
        for step in range(4):
            take_steps(engine, first=step)
            plain(batch(step, 0, dist.get_rank(), 4)).backward()
            step_plain(plain, expected, 0.5)
    assert len(taken) > 8
    pairs = list(zip(module.parameters(), plain.parameters(), strict=True))
    states = [
        (safe_get_full_optimizer_state(parameter, name), expected.state[other][name])
        for parameter, other in pairs
        for name in ("exp_avg", "exp_avg_sq")
    ]
    masters = [safe_get_full_fp32_param(parameter) for parameter, _ in pairs]
    assert relative_error(masters, plain.parameters()) < BOUND
    assert relative_error(*zip(*states, strict=True)) < BOUND
    engine.destroy()


MASTERS = {"bf16": "bf16_master_weights_and_grads", "fp16": "fp16_master_weights_and_grads"}


@pytest.mark.options("bf16.bf16_master_weights_and_grads", "fp16.fp16_master_weights_and_grads")
@vary("dtype, master", [("bf16", torch.bfloat16), ("fp16", torch.float16)], expects="master")
@on_ranks(2)
def test_masters_in_low_precision(dtype, master):
    """The new parameters are written over gradients of the same format, which a range might still have to read."""
    section = {**low_precision(dtype, loss_scale_window=4)[dtype], MASTERS[dtype]: True}
    trained = []
    for deepcompile in (True, False):
        torch._dynamo.reset()
        module = build(Case())
        engine = engine_with_optimizer_of_configuration(module, {"lr": 0.05}, {dtype: section}, deepcompile)
        take_steps(engine, 6)
        trained.append([safe_get_full_fp32_param(parameter).float() for parameter in module.parameters()])
        assert engine.optimizer.single_partition_of_fp32_groups[0].dtype == master
        engine.destroy()
    assert total_error(*trained) < 1e-2 * total_error(trained[0], build(Case()).parameters())


@vary("where, how", [("forward", "raises"), ("backward", "raises"), ("behind the backward", "interrupted")])
@vary("stage", [1, 2])
def test_the_step_after_a_fault(ranks, stage, where, how):
    """Copies that were on their way when the backward raised would be added to the next step's gradients."""
    case = Case(stage=stage, accumulation=3, bucket=50, offloaded=True)
    for after in ranks(2).run(on_every_rank, case, where, how):
        assert after.raised and after.error < BOUND
        assert after.held_at_last == NOTHING


@vary("stage", [1, 2])
@on_ranks(2)
def test_half_a_step_offloaded(tmp_path, stage):
    """Ranges that were stepped before an interruption would be stepped again with what lies over their gradients."""
    # The fault comes between two ranges.
    with ranges_of(7):
        after = half_a_step(Case(stage=stage, accumulation=3, groups=2, offloaded=True), str(tmp_path))
    assert "was ended half way (Injected: behind the update)" in after.raised[1]
    assert after.error < BOUND


@vary("stage", [1, 2])
@on_ranks(2)
def test_gradients_before_compile_are_not_lost(stage):
    """The base keeps a first micro-batch's gradients in host memory of its own, which DeepCompile does not read."""
    config = {"gradient_accumulation_steps": 2, "zero_optimization": {"stage": stage}}
    offload(config)
    trained = []
    for deepcompile in (False, True):
        torch._dynamo.reset()
        module = build(Case())
        engine = engine_by_configuration(module, deepcompile, **config)
        for step in range(3):
            for micro_step in range(2):
                # The engine may compile itself from the first micro-batch on, which is in evaluation mode.
                engine.train(step > 0 or micro_step > 0)
                with compile_backend("eager"):
                    backward(engine, step, micro_step)
                    if deepcompile and (step, micro_step) == (0, 0):
                        said = outcome(engine.compile, backend="eager")
                        assert said.startswith("ValueError")
                        assert "gradients computed before engine.compile() would be lost" in said
                        # As if nobody had called it.
                        engine._compile_arguments = None
                    engine.step()
        trained.append([parameter.detach().clone() for parameter in module.parameters()])
        assert hasattr(engine.optimizer, "_deepcompile") == deepcompile
        engine.destroy()
    moved = relative_error(trained[0], build(Case()).parameters())
    assert relative_error(*reversed(trained)) < BOUND < moved


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
        take_steps(engine)
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

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Every option works under DeepCompile ZeRO-1/2, or ``engine.compile()`` warns that it does not, or refuses it.

Refusing leaves the engine as it was.

``docs/options.md`` lists them all; the last tests here hold it against the tables of this file and the base's fields.
"""

import contextlib
import copy
import dataclasses
import gc
import inspect
import io
import logging
import re
from pathlib import Path
from typing import Optional

import pytest
import torch

from support.training import (
    Case,
    average_gradients,
    batch,
    build,
    held,
    make_engine,
    make_optimizer,
    relative_error,
    total_error,
    train_beside_plain_loop,
)

TESTS = Path(__file__).resolve().parent
# Two parameters, quickly compiled. What options do to gradients does not depend on more; layouts have their own tests.
SMALL = "FillsPartition"
SMALL_NUMEL = 96  # of each
NOTHING = {"bound": 0, "pending": 0, "bucket": 0, "unreduced": 0}


# Honoured -------------------------------------------------------------------------------------------------------


def train_each_beside_plain_loop(cases):
    return [train_beside_plain_loop(case) for case in cases]


def train_both_stages(ranks, **varied):
    """Results by stage of rank 0, after comparing every rank's parameters with the plain loop's."""
    cases = [Case(**{"model": SMALL, "steps": 2, "accumulation": 2, "stage": stage, **varied}) for stage in (1, 2)]
    results = ranks(2).run(train_each_beside_plain_loop, cases)
    for result in (result for rank in results for result in rank):
        assert result["error"] < 1e-5
        assert result["moved"] > 1e-3, "the parameters hardly changed, so agreement shows nothing"
        assert all(after == NOTHING for after in result["held"]), result["held"]
    return results[0]


# What has no counterpart in the reducer, chooses between ways to the same gradients, or is the base's to do: training
# is right with these values, and with the defaults, which every other test has.
HARMLESS = {
    "contiguous_gradients": {"config": {"zero_optimization": {"contiguous_gradients": False}}},
    "use_multi_rank_bucket_allreduce": {"config": {"zero_optimization": {"use_multi_rank_bucket_allreduce": False}}},
    "reduce_scatter": {"config": {"zero_optimization": {"reduce_scatter": False}}},
    "allgather": {"config": {"zero_optimization": {"allgather_partitions": False, "allgather_bucket_size": 2}}},
    "no-offload": {
        "config": {"zero_optimization": {"offload_optimizer": {"device": "none"}, "cpu_offload_param": False}}
    },
    "prescale_gradients": {
        "config": {
            "prescale_gradients": True,
            "gradient_predivide_factor": 8,
            # DeepSpeed itself declines the two in stage 2 otherwise.
            "zero_optimization": {"reduce_scatter": False},
        },
    },
    "of-stage-3": {
        "config": {
            "zero_optimization": {
                "sub_group_size": 10,
                "stage3_prefetch_bucket_size": 10,
                "stage3_param_persistence_threshold": 10,
                "stage3_model_persistence_threshold": 10,
                "stage3_max_live_parameters": 10,
                "stage3_max_reuse_distance": 10,
                "stage3_gather_fp16_weights_on_model_save": True,
                "stage3_module_granularity_threshold": 10,
                "stage3_use_all_reduce_for_fetch_params": True,
                "stage3_allgather_sequential": True,
                "zero_hpz_partition_size": 1,
                "memory_efficient_linear": False,
                "pipeline_loading_checkpoint": True,
                "override_module_apply": False,
                "log_trace_cache_warnings": True,
                "enable_sanity_checks": True,
                "save_muon_momentum_buffer_in_memory": True,
                "leaf_module": {"names": ["head"]},
            },
        },
    },
    "of-what-is-off": {
        "model": "FrozenAndUnused",
        "config": {
            "zero_optimization": {"cpu_offload_use_pin_memory": True, "ignore_unused_parameters": False},
            "compile": {"free_activation_threshold": 1, "offload_activation_pin_memory": False, "passes": ["z1"]},
            "fp16": {"enabled": False, "auto_cast": True},
            "comms_logger": {"enabled": False},
            "seq_parallel_communication_data_type": "fp16",
            "disable_allgather": True,
        },
    },
    "reports": {
        "steps": 1,
        "accumulation": 1,
        "config": {"dump_state": True, "memory_breakdown": True, "steps_per_print": 1},
    },
    "synchronize": {"config": {"compile": {"sync_before_reduce": True, "sync_after_reduce": True}}},
}


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless(ranks, name):
    train_both_stages(ranks, **HARMLESS[name])


@pytest.mark.parametrize(
    "config",
    [
        {"round_robin_gradients": True},
        {"parameter_alignment": True},
        {"round_robin_gradients": True, "parameter_alignment": True},
    ],
    ids="-".join,
)
def test_layouts_of_the_flat_partition(ranks, config):
    # Clipping needs the norm, which must pair each view of the partition with its parameter and skip the padding.
    train_both_stages(ranks, groups=2, clipping=0.05, model="OddSizes", config={"zero_optimization": config})


def test_overlap(ranks):
    def memory(zero_options, compile_options):
        config = {"zero_optimization": zero_options, "compile": compile_options}
        results = train_both_stages(ranks, model="OneGraph", bucket=400, steps=1, accumulation=1, config=config)
        return [result["counters"]["peak_bucket"] for result in results]

    overlapping = memory({}, {})
    assert memory({"overlap_comm": True}, {}) == overlapping
    # One bucket fills while another one travels, unless the first has to arrive before.
    waiting = memory({"overlap_comm": False}, {})
    assert memory({}, {"double_buffer": False}) == waiting
    assert all(less < more for less, more in zip(waiting, overlapping))


def test_reduce_bucket_size(ranks):
    largest_gradient = 192 * 4
    for bucket in (1, 300):
        for result in train_both_stages(ranks, model="OneGraph", bucket=bucket, steps=1, accumulation=1):
            assert result["counters"]["peak_pending"] <= 4 * bucket + largest_gradient


def train_with_and_without_norm(stage):
    norms = []
    for options in ({}, {"compute_grad_norm": False}):
        case = Case(model=SMALL, stage=stage, config={"zero_optimization": options})
        engine = make_engine(build(case), case)
        engine.backward(engine(batch(0, 0, torch.distributed.get_rank(), 4)))
        engine.step()
        norms.append(engine.get_global_grad_norm())
        engine.destroy()
    return [None if norm is None else float(norm) for norm in norms]


def test_compute_grad_norm(ranks):
    train_both_stages(ranks, config={"zero_optimization": {"compute_grad_norm": False}})
    for stage in (1, 2):
        (computed, skipped), other_rank = ranks(2).run(train_with_and_without_norm, stage)
        assert computed > 0 and skipped is None and other_rank == [computed, skipped]


def train_and_collect_output(case):
    """Returns the result of training and the lines that DeepSpeed logged or printed meanwhile."""
    logger, printed, logged = logging.getLogger("DeepSpeed"), io.StringIO(), []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logger.addHandler(handler)
    level = logger.level
    try:
        with contextlib.redirect_stdout(printed):
            result = train_beside_plain_loop(case)
    finally:
        logger.removeHandler(handler)
        # DeepSpeed keeps it for the life of the process.
        logger.setLevel(level)
    return result, "\n".join([*logged, printed.getvalue()])


def test_debug_log(ranks):
    config = {"log_level": "info", "compile": {"debug_log": True}}
    for stage in (1, 2):
        case = Case(stage=stage, model="SeveralGraphs", steps=1, config=config)
        results = ranks(2).run(train_and_collect_output, case)
        assert all(result["error"] < 1e-5 for result, _ in results)
        _, output = results[0]
        graphs = [int(index) for index in re.findall(r"^DeepCompile graph (\d+), forward:", output, re.MULTILINE)]
        assert sorted(graphs) == [0, 1, 2]
        assert output.count("deepcompile.end_backward.default") == 3


def train_without_collector(case):
    engine_enabled = gc.isenabled()
    module = build(case)
    engine = make_engine(module, case)
    during = gc.isenabled()
    engine.destroy()
    return train_beside_plain_loop(case), (engine_enabled, during, gc.isenabled())


def test_disable_python_gc(ranks):
    for stage in (1, 2):
        case = Case(model=SMALL, stage=stage, accumulation=2, config={"disable_python_gc": True})
        for result, enabled in ranks(2).run(train_without_collector, case):
            assert result["error"] < 1e-5
            assert enabled == (True, False, True)
            # Nothing waits for the collector.
            assert all(after == NOTHING for after in result["held"]), result["held"]


# Number formats -------------------------------------------------------------------------------------------------


def divide_by_the_scale_of_the_backward(optimizer):
    """DeepSpeed's own step divides by the scale of the next backward, which is another one where the scale grows."""
    update, unscale, scaler = optimizer._update_scale, optimizer.unscale_and_clip_grads, optimizer.loss_scaler
    before = []

    def updated(overflow):
        before[:] = [scaler.cur_scale]
        update(overflow)

    def unscaled(*args):
        after, scaler.cur_scale = scaler.cur_scale, *before
        unscale(*args)
        scaler.cur_scale = after

    optimizer._update_scale, optimizer.unscale_and_clip_grads = updated, unscaled


def train_as_without_deepcompile(case, spoil):
    """Trains with DeepCompile and without; returns how their fp32 parameters differ and what each said of its steps.

    ``spoil``: index of the step whose loss is infinite on rank 0, or None.
    """
    from deepspeed.compile.zero12 import gradient_counters
    from deepspeed.utils import safe_get_full_fp32_param

    rank, trained, told = torch.distributed.get_rank(), [], []
    for deepcompile in (True, False):
        torch._dynamo.reset()
        module = build(case)
        engine = make_engine(module, dataclasses.replace(case, deepcompile=deepcompile))
        if not deepcompile and case.dtype == "fp16" and engine.optimizer.dynamic_loss_scale:
            divide_by_the_scale_of_the_backward(engine.optimizer)
        steps = []
        try:
            for step in range(case.steps):
                for micro_step in range(case.accumulation):
                    loss = engine(batch(step, micro_step, rank, 4))
                    engine.backward(loss * float("inf") if (step, rank) == (spoil, 0) else loss)
                    engine.step()
                steps.append((engine.skipped_steps, engine.optimizer.loss_scale))
            told.append(steps)
            trained.append([safe_get_full_fp32_param(parameter).clone() for parameter in module.parameters()])
            if deepcompile:
                counters = gradient_counters(engine)
        finally:
            engine.destroy()
    finite = [all(bool(p.isfinite().all()) for p in parameters) for parameters in trained]
    return {
        "difference": total_error(*trained),
        "moved": total_error(trained[0], build(case).parameters()),
        "finite": finite,
        "told": told,
        "held": held(counters),
        "peak_pending": counters["peak_pending"],
        "peak_bound": counters["peak_bound"],
    }


def train_as_without_deepcompile_in_stages(stages, case, spoil):
    return [train_as_without_deepcompile(dataclasses.replace(case, stage=stage), spoil) for stage in stages]


@dataclasses.dataclass(frozen=True)
class Format:
    """A choice of number formats. Sizes are in bytes of an element."""

    coarsest: str
    case: Case
    sent: tuple  # of the gradients of each of SMALL's parameters on their way
    kept: int  # of the target
    stages: tuple = (1, 2)
    spoil: Optional[int] = None


def bf16(**options):
    return Case(dtype="bf16", config={"bf16": options})


def fp16(**options):
    return Case(dtype="fp16", config={"fp16": options})


def autocast(dtype, **options):
    return Case(config={"torch_autocast": {"enabled": True, "dtype": dtype, **options}})


def accumulated(dtype, in_dtype):
    return Case(dtype=dtype, config={"data_types": {"grad_accum_dtype": in_dtype}})


def communicated(dtype, in_dtype):
    return Case(dtype=dtype, config={"communication_data_type": in_dtype})


SCALE = {
    "initial_scale_power": 17,
    "hysteresis": 2,
    "consecutive_hysteresis": True,
    "loss_scale_window": 2,
    "min_loss_scale": 4,
}
DATA_TYPES = {"param_dtype": "bf16", "buffer_dtype": "fp32", "keep_in_fp32_modules": []}
FORMATS = {
    "fp32-communicated-in-fp16": Format("fp16", communicated("fp32", "fp16"), (2, 2), 4),
    "fp32-communicated-in-bf16": Format("bf16", communicated("fp32", "bf16"), (2, 2), 4),
    "fp32-accumulated-in-bf16": Format("bf16", accumulated("fp32", "bf16"), (4, 4), 2),
    "bf16": Format("bf16", bf16(), (2, 2), 2),
    "bf16-communicated-in-fp32": Format("bf16", communicated("bf16", "fp32"), (4, 4), 2),
    "bf16-accumulated-in-fp32": Format("bf16", accumulated("bf16", "fp32"), (2, 2), 4, stages=(2,)),
    "bf16-states": Format("bf16", bf16(bf16_master_weights_and_grads=True, bf16_optimizer_states=True), (2, 2), 2),
    "bf16-immediate_grad_update": Format("bf16", bf16(immediate_grad_update=True), (2, 2), 2),
    "bf16-check_grad_overflow": Format("bf16", bf16(), (2, 2), 2, spoil=1),
    "bf16-no-check_grad_overflow": Format("bf16", bf16(check_grad_overflow=False), (2, 2), 2, spoil=1),
    "fp16-static-scale": Format("fp16", fp16(loss_scale=64), (2, 2), 2),
    "fp16-dynamic-scale": Format("fp16", dataclasses.replace(fp16(**SCALE), steps=6), (2, 2), 2),
    "fp16-accumulated-in-fp32": Format("fp16", accumulated("fp16", "fp32"), (2, 2), 4),
    "param-and-buffer-dtype": Format("bf16", Case(dtype="bf16", config={"data_types": DATA_TYPES}), (2, 2), 2),
    "autocast-bf16": Format("bf16", autocast("bfloat16"), (4, 2), 4),
    "autocast-fp16": Format("fp16", autocast("float16"), (4, 2), 4),
    "autocast-safe-modules": Format(
        "bf16", autocast("bfloat16", lower_precision_safe_modules=["torch.nn.Embedding"]), (2, 4), 4
    ),
}
# Both ways round gradients at the same places, but sum micro-batches and ranks in one order or another, and where
# DeepSpeed stores a sum in the parameters' format, it is here in the format asked for. So parameters differ by what
# one rounding of the coarsest format involved makes of the distance that they have moved.
ROUNDING = {"bf16": 2**-8, "fp16": 2**-11}


@pytest.mark.parametrize("name", FORMATS)
def test_formats(ranks, name):
    how = FORMATS[name]
    # One bucket, so that all gradients are on their way at the same time.
    case = dataclasses.replace(how.case, model=SMALL, accumulation=2, bucket=10**6)
    results = ranks(2).run(train_as_without_deepcompile_in_stages, how.stages, case, how.spoil)
    for result in (result for rank in results for result in rank):
        assert result["peak_pending"] == SMALL_NUMEL * sum(how.sent)
        assert result["peak_bound"] == SMALL_NUMEL * how.kept
        assert result["held"] == NOTHING
        deepcompiled, eager = result["told"]
        assert deepcompiled == eager
        skipped, scales = [step[0] for step in deepcompiled], {step[1] for step in deepcompiled}
        if name == "bf16-no-check_grad_overflow":
            assert skipped == [0, 0, 0] and result["finite"] == [False, False]
            continue
        assert result["finite"] == [True, True]
        assert result["moved"] > 1e-2
        assert result["difference"] < ROUNDING[how.coarsest] * result["moved"]
        if name in ("bf16-check_grad_overflow", "fp16-dynamic-scale"):
            assert 0 < skipped[-1] < case.steps, "the case shows nothing of skipped steps"
        if name == "fp16-dynamic-scale":
            assert len(scales) > 2, "the case shows nothing of the scale's ups and downs"


# What the engine does around the forward -------------------------------------------------------------------------


class Recorder(torch.nn.Module):
    """Notes the format of its input."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.formats = []

    def forward(self, x, second):
        self.note(x, second)
        return self.linear(x).sum()

    @torch.compiler.disable
    def note(self, x, second):
        self.formats.append((x.dtype, second.dtype))


def train_and_measure(stage):
    """Returns what the engine measured, and did, around the forward."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    torch._dynamo.reset()
    get_accelerator().is_fp16_supported = lambda: True
    module = Recorder()
    engine = deepspeed.initialize(
        model=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "steps_per_print": 1,
            "wall_clock_breakdown": True,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
            "fp16": {"enabled": True, "auto_cast": True, "loss_scale": 1},
            "compile": {"deepcompile": True},
        },
    )[0]
    engine.compile(backend="eager")
    x = torch.ones(2, 4, device=engine.device)
    times = []
    for _ in range(5):
        engine.backward(engine(x, torch.ones((2,), device=engine.device)))
        engine.step()
        times.append(engine.get_wall_clock_timers()["fwd_microstep"])
    told = module.formats, times, engine.tput_timer.global_step_count, engine.tput_timer.total_elapsed_time
    # Neither what did it, nor the hooks that do it without DeepCompile, are left.
    engine.destroy()
    return (*told, len(module._forward_pre_hooks))


def test_around_the_forward(ranks):
    for stage in (1, 2):
        for formats, times, steps, seconds, hooks in ranks(2).run(train_and_measure, stage):
            assert formats == [(torch.float16, torch.float16)] * 5
            assert all(time > 0 for time in times)
            assert steps == 5 and seconds > 0
            assert hooks == 0


# Arguments of engine.compile() ----------------------------------------------------------------------------------


# Not every torch has it.
ISOLATED = {name: True for name in inspect.signature(torch.compile).parameters if name == "isolate_recompiles"}


@pytest.mark.parametrize(
    "kwargs, varied, from_graphs",
    [
        ({"dynamic": True}, {"vary_length": True}, True),
        ({"dynamic": False}, {"vary_length": True}, True),
        ({"fullgraph": True, "mode": "default", "options": None, "backend": "ignored", **ISOLATED}, {}, True),
        # Code that the compiler is kept from is trained by autograd's way.
        ({"disable": True}, {}, False),
        ({"dynamic": False, "recompile_limit": 1}, {"vary_length": True}, None),
    ],
    ids=["dynamic", "static", "fullgraph", "disable", "recompile_limit"],
)
def test_compile_kwargs(ranks, kwargs, varied, from_graphs):
    unknown = set(kwargs) - {*inspect.signature(torch.compile).parameters}
    if unknown:
        pytest.skip(f"torch.compile of torch {torch.__version__} has no {', '.join(unknown)}")
    for result in train_both_stages(ranks, compile_kwargs=kwargs, steps=3, **varied):
        counters = result["counters"]
        assert counters["from_graphs"] + counters["from_autograd"] == 2 * 3 * 2
        if from_graphs is None:
            assert counters["from_graphs"] > 0 and counters["from_autograd"] > 0
        else:
            assert counters["from_autograd" if from_graphs else "from_graphs"] == 0


def train_and_collect_patches(case, seen):
    """Returns the result of training and the options that the code generator got, by name."""
    from torch._inductor import compile_fx

    patches, real = [], compile_fx.compile_fx

    def record(*args, config_patches=None, **kwargs):
        # It calls itself once the options are in force.
        if config_patches is not None:
            patches.append({name: config_patches.get(name) for name in seen})
        return real(*args, config_patches=config_patches, **kwargs)

    compile_fx.compile_fx = record
    try:
        return train_beside_plain_loop(case), patches
    finally:
        compile_fx.compile_fx = real


@pytest.mark.parametrize(
    "kwargs, expected",
    [
        ({"mode": "max-autotune-no-cudagraphs"}, {"max_autotune": True, "coordinate_descent_tuning": True}),
        (
            {"options": {"epilogue_fusion": False, "max_fusion_size": 1}},
            {"epilogue_fusion": False, "max_fusion_size": 1},
        ),
    ],
    ids=["mode", "options"],
)
def test_inductor_gets(ranks, kwargs, expected):
    case = Case(model=SMALL, backend="inductor", steps=2, accumulation=2, compile_kwargs=kwargs)
    for result, patches in ranks(2).run(train_and_collect_patches, case, list(expected)):
        assert result["error"] < 1e-5
        assert patches and all(got == expected for got in patches)


def compile_with_the_default_schedule(stage):
    from deepspeed.compile.passes import zero_1_and_2_compile as passes

    case = Case(model=SMALL, stage=stage)
    module, engine = prepare(case)
    log, handler = [], logging.Handler()
    handler.emit = lambda record: log.append(record.getMessage())
    logging.getLogger("DeepSpeed").addHandler(handler)
    try:
        schedule = [[0, [passes.add_z2_reduce if stage == 2 else passes.add_z1_reduce]]]
        engine.compile(backend="eager", schedule=schedule, compiled_autograd_enabled=True)
    finally:
        logging.getLogger("DeepSpeed").removeHandler(handler)
    return train_prepared(case, module, engine), log


def test_schedule_and_compiled_autograd(ranks):
    for stage in (1, 2):
        for error, log in ranks(2).run(compile_with_the_default_schedule, stage):
            assert error < 1e-5
            assert any("disabling compiled autograd" in message for message in log)


# Checkpoints ----------------------------------------------------------------------------------------------------


def load_with_and_without_deepcompile(folder, case):
    """Saves with DeepCompile; returns how far master parameters are from those saved after loading into each engine.

    The engine with DeepCompile goes on training, with which error is returned too.
    """

    def masters(engine):
        return [partition.detach().clone() for partition in engine.optimizer.single_partition_of_fp32_groups]

    rank = torch.distributed.get_rank()
    torch._dynamo.reset()
    engine = make_engine(build(case), case)
    for step in range(2):
        engine.backward(engine(batch(step, 0, rank, 4)))
        engine.step()
    # Without it, which optimizers with a fused step keep there, DeepSpeed does not load elastic states.
    engine.optimizer.param_groups[0]["step"] = 2
    engine.save_checkpoint(folder, tag="saved")
    saved = masters(engine)
    engine.destroy()
    loaded, continued = [], []
    for deepcompile in (True, False):
        module = build(case, seed=1)
        engine = make_engine(module, dataclasses.replace(case, deepcompile=deepcompile))
        engine.load_checkpoint(folder, tag="saved")
        loaded.append(masters(engine))
        engine.backward(engine(batch(2, 0, rank, 4)))
        engine.step()
        continued.append(masters(engine))
        engine.destroy()
    return [total_error(masters, saved) for masters in loaded], total_error(*continued)


@pytest.mark.parametrize(
    "options, exact",
    [({}, True), ({"elastic_checkpoint": True}, True), ({"load_from_fp32_weights": False}, False)],
    ids=["default", "elastic_checkpoint", "load_from_fp32_weights"],
)
def test_loading(ranks, tmp_path, options, exact):
    for stage in (1, 2):
        case = Case(model=SMALL, stage=stage, dtype="bf16", config={"zero_optimization": options})
        folder = str(tmp_path / str(stage))
        for errors, continued in ranks(2).run(load_with_and_without_deepcompile, folder, case):
            assert errors[0] == errors[1]
            assert (errors[0] == 0) == exact
            assert continued < ROUNDING["bf16"]


# Warned of ------------------------------------------------------------------------------------------------------


def only_in_stage_3(section, **options):
    return {
        f"{section}.{name}": f"{section}.{name}={value} has no effect in this stage, only in stage 3"
        for name, value in options.items()
    }


ONLY_IN_STAGE_3 = {
    "zero_optimization": {
        "zero_quantized_weights": True,
        "zero_quantized_nontrainable_weights": True,
        "zero_quantized_gradients": True,
        "zero_hpz_partition_size": 2,
    },
    "compile": {
        "free_activation": True,
        "offload_activation": True,
        "offload_opt_states": True,
        "offload_parameters": True,
        "symmetric_memory": True,
        "sync_before_allgather": True,
        "sync_after_allgather": True,
        "keep_int_input_tensors": False,
        "keep_all_input_tensors": True,
    },
}
OFFLOADS = "zero_optimization.{} has no effect in this stage, only in stage 3"
# What is said of each, by the name under which docs/options.md has it. All are given at once.
WARNED = {
    **only_in_stage_3("zero_optimization", **ONLY_IN_STAGE_3["zero_optimization"]),
    **only_in_stage_3("compile", **ONLY_IN_STAGE_3["compile"]),
    "zero_optimization.offload_param": OFFLOADS.format("offload_param"),
    "compile.passes": "compile.passes holds 'z3', which has no effect in this stage",
    "gradient_predivide_factor": "gradient_predivide_factor=2.0 has no effect, because gradients are divided by the "
    "number of ranks before they are summed",
    "flops_profiler": "flops_profiler.enabled=true has no effect, because compiled code does not call the functions "
    "that the flops profiler counts; profile without engine.compile()",
    "comms_logger": "comms_logger.enabled=true has no effect on the reductions of gradients, which the log leaves "
    "out; use torch.profiler for those",
    "compile_kwargs.name": "compile_kwargs['name'] has no effect, because torch gives it to its own backend only",
}
# The same option in another word.
ALSO_WARNED = {"zero_optimization.cpu_offload_param": OFFLOADS.format("cpu_offload_param")}
WITHOUT_EFFECT = Case(
    model=SMALL,
    accumulation=2,
    config={
        "zero_optimization": {
            **ONLY_IN_STAGE_3["zero_optimization"],
            "offload_param": {"device": "cpu"},
            # DeepSpeed itself declines gradient_predivide_factor in stage 2 otherwise.
            "reduce_scatter": False,
        },
        "compile": {**ONLY_IN_STAGE_3["compile"], "passes": ["z1", "z3"]},
        "gradient_predivide_factor": 2.0,
        "flops_profiler": {"enabled": True, "profile_step": 1},
        "comms_logger": {"enabled": True},
        # The engine does something around the forward then.
        "memory_breakdown": True,
    },
    compile_kwargs={"name": "region"} if "name" in inspect.signature(torch.compile).parameters else None,
)


def train_and_collect_warnings(case):
    """Returns the result of training, what was warned of because of options, and whether the flops profiler ran."""
    from deepspeed import comm

    try:
        result, output = train_and_collect_output(case)
    finally:
        # DeepSpeed has one logger of communication for all engines.
        comm.comm.comms_logger.enabled = False
    return result, re.findall(r"DeepCompile with ZeRO stage (\d): (.+)", output), "Profile Summary" in output


@pytest.mark.parametrize("stage", [1, 2])
def test_warned(ranks, stage):
    expected = dict(WARNED)
    if WITHOUT_EFFECT.compile_kwargs is None:
        del expected["compile_kwargs.name"]
    results = ranks(2).run(train_and_collect_warnings, dataclasses.replace(WITHOUT_EFFECT, stage=stage))
    for rank, (result, warnings, profiled) in enumerate(results):
        assert result["error"] < 1e-5 < result["moved"]
        assert not profiled
        assert sorted(warnings) == sorted((str(stage), says) for says in expected.values() if rank == 0)


def test_warned_in_another_word(ranks):
    case = Case(model=SMALL, steps=1, config={"zero_optimization": {"cpu_offload_param": True}})
    (result, warnings, _), _ = ranks(2).run(train_and_collect_warnings, case)
    assert result["error"] < 1e-5
    assert warnings == [("1", *ALSO_WARNED.values())]


# Refused --------------------------------------------------------------------------------------------------------


def prepare(case):
    """A module and its engine, on which engine.compile() has not been called."""
    torch._dynamo.reset()
    config = {"compile": {}, **(case.config or {})}
    config["compile"] = {"deepcompile": True, **config["compile"]}
    module = build(case)
    return module, make_engine(module, dataclasses.replace(case, config=config, deepcompile=False))


def train_prepared(case, module, engine):
    """Trains for two steps; returns the error of the parameters against a plain loop. Destroys the engine."""
    plain, rank = copy.deepcopy(module), torch.distributed.get_rank()
    plain_optimizer = make_optimizer(plain, case)
    for step in range(2):
        ids = batch(step, 0, rank, 4)
        engine.backward(engine(ids))
        engine.step()
        plain(ids).backward()
        average_gradients(plain)
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    error = relative_error(module.parameters(), plain.parameters())
    engine.destroy()
    return error


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A configuration, or arguments of engine.compile(), with which that raises ``says``."""

    says: str
    stage: int = 1
    dtype: str = "fp32"
    config: dict = dataclasses.field(default_factory=dict)
    arguments: dict = dataclasses.field(default_factory=dict)
    # What of the section `compile` to change so that engine.compile() works; None: nothing helps but a new engine.
    amends: Optional[dict] = None
    trains: bool = True  # whether the engine can train on this test's model without DeepCompile


def zero_options(**options):
    return {"zero_optimization": options}


def of_compile_kwargs(says, compile_kwargs, backend="inductor"):
    """Without these arguments engine.compile() works."""
    return Refusal(says, arguments={"backend": backend, "compile_kwargs": compile_kwargs}, amends={})


RANDOM_LTD = {
    "enabled": True,
    "total_layer_num": 1,
    "random_ltd_layer_num": 1,
    "random_ltd_layer_id": [0],
    "model_mask_name": None,
    "model_type": "decoder",
    "hidden_state_order": "batch_seq_dim",
    "random_ltd_schedule": {
        "min_value": 2,
        "max_value": 4,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 2, "seq_per_step": 2},
    },
    "layer_token_lr_schedule": {"enabled": False, "total_layer_tokens": 1, "warmup_layer_tokens": 1},
}

# By the name under which docs/options.md has them.
REFUSED = {
    "zero_optimization.offload_optimizer": Refusal(
        "zero_optimization.offload_optimizer is not supported; remove it or use stage 3",
        config={**zero_options(offload_optimizer={"device": "cpu"}), "zero_force_ds_cpu_optimizer": False},
    ),
    "zero_optimization.cpu_offload": Refusal(
        "zero_optimization.cpu_offload is not supported; remove it or use stage 3",
        stage=2,
        config={**zero_options(cpu_offload=True), "zero_force_ds_cpu_optimizer": False},
    ),
    "zero_optimization.zenflow": Refusal(
        "zero_optimization.zenflow is not supported; remove it",
        stage=2,
        config={
            **zero_options(
                offload_optimizer={"device": "cpu", "pin_memory": False},
                zenflow={"select_strategy": "step", "select_interval": 1, "update_interval": 1},
            ),
            "zero_force_ds_cpu_optimizer": False,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        },
        trains=False,
    ),
    "data_types.grad_accum_dtype": Refusal(
        "data_types.grad_accum_dtype='fp32' with bf16 is not supported in stage 1; use stage 2, which accumulates in "
        "fp32, or grad_accum_dtype='bf16'",
        dtype="bf16",
        config={"data_types": {"grad_accum_dtype": "fp32"}},
    ),
    "data_efficiency": Refusal(
        "data_efficiency.data_routing.random_ltd is not supported, because its layers load native code and change "
        "their shapes inside of what is compiled; set random_ltd.enabled to false",
        config={"data_efficiency": {"data_routing": {"random_ltd": RANDOM_LTD}}},
    ),
    "autotuning": Refusal(
        "autotuning.enabled=true is not supported, because compiled code does not call the functions that the flops "
        "profiler counts for it; set it to false or tune without engine.compile()",
        config={"autotuning": {"enabled": True, "start_profile_step": 100}},
    ),
    "hybrid_engine": Refusal(
        "hybrid_engine.enabled=true is not supported, because generation swaps the modules that were compiled; set it "
        "to false",
        config={"hybrid_engine": {"enabled": True}},
    ),
    "compile.regional_compilation": Refusal(
        "compile.regional_compilation=true found no blocks that repeat in FillsPartition; name their classes in a "
        "list, or set it to false",
        config={"compile": {"regional_compilation": True}},
        amends={"regional_compilation": ["Linear"]},
    ),
    "compile.overlap_param_gather": Refusal(
        "compile.overlap_param_gather needs blocks that wait for their parameters, and the model is compiled as a "
        "whole, because no blocks repeat in FillsPartition; name its blocks' classes in compile.regional_compilation, "
        "or leave this out",
        config={"compile": {"overlap_param_gather": True}},
        amends={"regional_compilation": ["Linear"]},
    ),
    "compile_kwargs.mode": of_compile_kwargs(
        "CUDA graphs (compile_kwargs mode 'reduce-overhead' or 'max-autotune', or option triton.cudagraphs) cannot "
        "record reductions that are decided at run time; use mode 'max-autotune-no-cudagraphs' or none",
        {"mode": "reduce-overhead"},
    ),
    "compile_kwargs.options": of_compile_kwargs(
        "the option custom_partitioner_fn of torch.compile is taken: DeepCompile's partitioner inserts the "
        "reductions; remove it",
        {"options": {"custom_partitioner_fn": len}},
    ),
    "schedule": Refusal(
        "`schedule` may only be [(0, ['zero2_compile'])], because gradients are handled before the graphs that "
        "scheduled passes rewrite exist; leave `schedule` out",
        stage=2,
        arguments={"backend": "eager", "schedule": [(0, [len])]},
        amends={},
    ),
}

# The same options in other words.
ALSO_REFUSED = {
    "regional_compilation-unknown-class": Refusal(
        "compile.regional_compilation names ['Layer'], but FillsPartition has no such module outside of another "
        "block; use the names of its blocks' classes",
        config={"compile": {"regional_compilation": ["Linear", "Layer"]}},
        amends={"regional_compilation": ["Linear"]},
    ),
    "regional_compilation-fullgraph": Refusal(
        "compile_kwargs['fullgraph'] contradicts compile.regional_compilation, which makes a graph of every block; "
        "leave one of them out",
        config={"compile": {"regional_compilation": ["Linear"]}},
        arguments={"backend": "eager", "compile_kwargs": {"fullgraph": True}},
        amends={"regional_compilation": False},
    ),
    "mode-max-autotune": of_compile_kwargs(
        "CUDA graphs (compile_kwargs mode 'reduce-overhead' or 'max-autotune', or option triton.cudagraphs) cannot "
        "record reductions that are decided at run time; use mode 'max-autotune-no-cudagraphs' or none",
        {"mode": "max-autotune"},
    ),
    "option-cudagraphs": of_compile_kwargs(
        "CUDA graphs (compile_kwargs mode 'reduce-overhead' or 'max-autotune', or option triton.cudagraphs) cannot "
        "record reductions that are decided at run time; use mode 'max-autotune-no-cudagraphs' or none",
        {"options": {"triton.cudagraphs": True}},
    ),
    "mode-lite": of_compile_kwargs(
        "the option selective_decompose of torch.compile (which compile_kwargs mode 'lite' sets) drops the notes that "
        "say which gradient is whose; remove it or use another mode",
        {"mode": "lite"},
    ),
    "unknown-mode": of_compile_kwargs(
        "compile_kwargs['mode']='fastest' is not a mode of torch.compile; use one of ",
        {"mode": "fastest"},
    ),
    "mode-and-options": of_compile_kwargs(
        "compile_kwargs holds both `mode` and `options`, of which torch.compile takes one; remove either",
        {"mode": "default", "options": {}},
    ),
    "options-for-eager": of_compile_kwargs(
        "`mode` and `options` of compile_kwargs go with backend 'inductor', not 'eager'; remove them",
        {"options": {"epilogue_fusion": False}},
        backend="eager",
    ),
    "unknown-option": of_compile_kwargs(
        "compile_kwargs['options'] holds 'epilog_fusion', which is not an option of this torch; remove it",
        {"options": {"epilog_fusion": False}},
    ),
    "unknown-compile-kwarg": of_compile_kwargs(
        "compile_kwargs['full_graph'] is not an argument of this torch's torch.compile(); remove it",
        {"full_graph": True},
        backend="eager",
    ),
    "offload-of-both": Refusal(
        "zero_optimization.offload_optimizer is not supported; remove it or use stage 3",
        stage=2,
        config={
            **zero_options(offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"}),
            "zero_force_ds_cpu_optimizer": False,
        },
    ),
}


def refuse(refusal):
    """Returns what engine.compile() raised, what it changed, and the error of training the engine thereafter."""
    from deepspeed import comm
    from deepspeed.runtime.engine import DeepSpeedEngine

    case = Case(model=SMALL, stage=refusal.stage, dtype=refusal.dtype, config=refusal.config)
    try:
        module, engine = prepare(case)
        before = state_of(engine)
        try:
            engine.compile(**{"backend": "eager", **refusal.arguments})
            return "compiled", None, None
        except Exception as exception:
            raised = f"{type(exception).__name__}: {exception}"
        changed = [name for name, value in state_of(engine).items() if value != before[name]]
        error = None
        if refusal.amends is not None:
            for name, value in refusal.amends.items():
                setattr(engine._config.compile_config, name, value)
            engine.compile(backend="eager")
            assert engine.is_deepcompile_active()
        if refusal.trains:
            error = train_prepared(case, module, engine)
        assert isinstance(engine, DeepSpeedEngine)
        return raised, changed, error
    finally:
        # DeepSpeed has one logger of communication for all engines.
        comm.comm.comms_logger.enabled = False


def state_of(engine):
    """What engine.compile() changes when it succeeds."""
    return {
        "optimizer": type(engine.optimizer),
        "gradient hooks": len(getattr(engine.optimizer, "_grad_acc_hooks", [])),
        "contiguous_gradients": getattr(engine.optimizer, "contiguous_gradients", None),
        "active": engine.is_deepcompile_active(),
        "compiled": engine.is_compiled,
        "module compiled": engine.module._compiled_call_impl,
        "forward hooks": (len(engine.module._forward_pre_hooks), len(engine.module._forward_hooks)),
        "engine hooks": (len(engine._forward_pre_hooks), len(engine._forward_hooks)),
    }


@pytest.mark.parametrize("name", [*REFUSED, *ALSO_REFUSED])
def test_refused(ranks, name):
    refusal = {**REFUSED, **ALSO_REFUSED}[name]
    for raised, changed, error in ranks(2).run(refuse, refusal):
        said = f"ValueError: DeepCompile with ZeRO stage {refusal.stage}: {refusal.says}"
        assert raised == said if not said.endswith(" ") else raised.startswith(said)
        assert "\n" not in raised
        assert changed == []
        if refusal.trains:
            # Twice the rounding of the parameters' format, in which they are compared.
            assert error < {"fp32": 1e-5, "fp16": 2**-10, "bf16": 2**-7}[refusal.dtype]


def compile_in_the_middle(case):
    """Calls engine.compile() after each micro-batch of the first step, and after that step; trains for two steps.

    Returns what it raised each time, and the error of the parameters against a plain loop.
    """
    rank, raised = torch.distributed.get_rank(), []
    module, engine = prepare(case)
    # In training mode the engine would compile itself before the first of them.
    engine.eval()
    plain = build(case)
    plain_optimizer = make_optimizer(plain, case)
    for step in range(2):
        for micro_step in range(case.accumulation):
            ids = batch(step, micro_step, rank, 4)
            engine.backward(engine(ids))
            if step == 0:
                raised.append(outcome(engine.compile, backend="eager"))
            engine.step()
            (plain(ids) / case.accumulation).backward()
        raised.append(outcome(engine.compile, backend="eager"))
        average_gradients(plain)
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    error = total_error(module.parameters(), plain.parameters())
    active = engine.is_deepcompile_active()
    engine.destroy()
    return raised, active, error


def outcome(function, *args, **kwargs):
    """What a call raised, as text; None if it returned."""
    try:
        function(*args, **kwargs)
    except Exception as exception:
        return f"{type(exception).__name__}: {exception}"
    return None


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("dtype, accumulated_in", [("fp32", "fp32"), ("fp16", "fp32")])
def test_refused_with_gradients_of_an_unfinished_step(ranks, stage, dtype, accumulated_in):
    case = Case(
        model=SMALL,
        stage=stage,
        dtype=dtype,
        accumulation=2,
        config={"data_types": {"grad_accum_dtype": accumulated_in}},
    )
    for raised, active, error in ranks(2).run(compile_in_the_middle, case):
        refused = (
            f"ValueError: DeepCompile with ZeRO stage {stage}: gradients computed before engine.compile() would be "
            "lost; call it before the first backward or after engine.step() at the gradient accumulation boundary"
        )
        assert raised == [refused, refused, None, None]
        assert active
        assert error < {"fp32": 1e-5, "fp16": 2**-10}[dtype]


def compile_with_an_old_torch():
    from deepspeed.compile.zero12 import options as zero_options

    case, oldest = Case(model=SMALL), zero_options.OLDEST_TORCH
    module, engine = prepare(case)
    zero_options.OLDEST_TORCH = "99.1"
    try:
        raised = outcome(engine.compile, backend="eager")
    finally:
        zero_options.OLDEST_TORCH = oldest
    return raised, train_prepared(case, module, engine)


def test_refused_with_an_old_torch(ranks):
    for raised, error in ranks(2).run(compile_with_an_old_torch):
        assert raised == (
            f"ValueError: DeepCompile with ZeRO stage 1: torch {torch.__version__} is too old; install torch 99.1 or "
            "newer"
        )
        assert error < 1e-5


def compile_twice_after_torch_failed(stage):
    case = Case(model=SMALL, stage=stage)
    module, engine = prepare(case)
    compiles, torch.compile = torch.compile, len  # Not to be called with these arguments.
    try:
        first = outcome(engine.compile, backend="eager")
    finally:
        torch.compile = compiles
    second = outcome(engine.compile, backend="eager")
    return first, second, train_prepared(case, module, engine)


def test_refused_after_torch_failed(ranks):
    for stage in (1, 2):
        for first, second, error in ranks(2).run(compile_twice_after_torch_failed, stage):
            assert first == "TypeError: len() takes no keyword arguments"
            assert second == (
                f"ValueError: DeepCompile with ZeRO stage {stage}: an earlier engine.compile() failed half-way; "
                "create the engine anew"
            )
            assert error < 1e-5


# What DeepSpeed itself refuses, by the name under which docs/options.md has it: when, beginning of what it raises,
# configuration, arguments of engine.compile().
REFUSED_BY_DEEPSPEED = {
    "gradient_allreduce_op": (
        "initialize",
        "ValueError: gradient_allreduce_op='sum' is not supported with DeepCompile",
        {"gradient_allreduce_op": "sum"},
    ),
    "managed_gradient_accumulation": (
        "initialize",
        "AssertionError: managed_gradient_accumulation=False is not supported with DeepCompile",
        {"managed_gradient_accumulation": False},
    ),
    "zero_optimization.legacy_stage1": (
        "initialize",
        "Exception: The deprecated version of ZeRO Stage 1 is not supported",
        {"zero_optimization": {"legacy_stage1": True}},
    ),
    "zero_optimization.allgather_bucket_size": (
        "initialize",
        "AssertionError: allgather_bucket_size must be a multiple of nccl_start_alignment_factor",
        {"zero_optimization": {"allgather_bucket_size": 3}},
    ),
    "zero_optimization.compute_grad_norm": (
        "initialize",
        "ValueError: zero_optimization.compute_grad_norm=false requires gradient_clipping=0",
        {"zero_optimization": {"compute_grad_norm": False}, "gradient_clipping": 1.0},
    ),
    "prescale_gradients": (
        "initialize",
        "AssertionError: pre-scale gradients is not yet supported with ZeRO-2 with reduce scatter enabled",
        {"prescale_gradients": True, "zero_optimization": {"stage": 2}},
    ),
    "bf16.bf16_master_weights_and_grads": (
        "initialize",
        "AssertionError: Master weights feature requires ZeRO-1 Offload with DeepSpeedCPUAdam",
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    ),
    "fp16.fp16_master_weights_and_grads": (
        "initialize",
        "AssertionError: Master weights feature requires ZeRO-1 Offload with DeepSpeedCPUAdam",
        {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
    ),
    "compile.autoep_non_moe": (
        "compile",
        "ValueError: compile.autoep_non_moe=True uses vanilla torch.compile and cannot be combined with DeepCompile",
        {"compile": {"autoep_non_moe": True}},
    ),
    "backend": (
        "compile",
        "AssertionError: Backend aot_eager is not supported for DeepCompile",
        {},
        {"backend": "aot_eager"},
    ),
}
ALSO_REFUSED_BY_DEEPSPEED = {
    "unknown-pass": ("compile", "AssertionError: Unknown pass fuse", {}, {"schedule": [(0, ["fuse"])]}),
    "autotp-and-z1": (
        "compile",
        "NotImplementedError: The AutoTP compile pass cannot yet be combined with AutoSP or the ZeRO passes",
        {"compile": {"passes": ["autotp", "z1"]}},
    ),
}


def meet_refusals_of_deepspeed(refusals):
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    met = {}
    for name, (_, _, config, *arguments) in refusals.items():
        try:
            _, engine = prepare(Case(model=SMALL, config=config))
        except Exception as exception:
            met[name] = ("initialize", f"{type(exception).__name__}: {exception}")
        else:
            met[name] = ("compile", outcome(engine.compile, **{"backend": "eager", **dict(*arguments)}))
            engine.destroy()
    return met


def test_refused_by_deepspeed(ranks):
    refusals = {**REFUSED_BY_DEEPSPEED, **ALSO_REFUSED_BY_DEEPSPEED}
    for met in ranks(2).run(meet_refusals_of_deepspeed, refusals):
        begun = {name: (when, (raised or "")[: len(refusals[name][1])]) for name, (when, raised) in met.items()}
        assert begun == {name: (when, says) for name, (when, says, *_) in refusals.items()}


def compile_engines_of_other_kinds():
    """What engine.compile() raises on engines that shard or replicate parameters in other ways; by kind."""
    import deepspeed
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
    from deepspeed.pipe import LayerSpec, PipelineModule
    from deepspeed.utils import groups

    def raised(module, parameters=None, optimizer=torch.optim.SGD, mesh=None, **config):
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 1},
            "compile": {"deepcompile": True},
            **config,
        }
        optimizer = optimizer(parameters or module.parameters(), lr=0.1)
        engine = deepspeed.initialize(model=module, optimizer=optimizer, config=config, mesh_param=mesh)[0]
        return outcome(engine.compile, backend="eager")

    said = {"muon": raised(torch.nn.Linear(4, 4, bias=False), optimizer=torch.optim.Muon)}
    # From here on, process groups stay behind; in this order they do not stand in each other's way.
    said["sequence"] = raised(torch.nn.Linear(4, 4), mesh=(1, 2))
    groups.mesh_device = None
    experts = torch.nn.Sequential(torch.nn.Linear(4, 4), MoE(4, torch.nn.Linear(4, 4), num_experts=2, ep_size=1))
    named = {"params": list(experts.parameters()), "name": "all"}
    said["experts"] = raised(experts, split_params_into_different_moe_groups_for_optimizer(named))
    # Experts of one's own, marked as those of DeepSpeed's layers are.
    marked = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    for parameter in marked[1].parameters():
        parameter.allreduce, parameter.group_name = False, "ep_size_1"
    named = {"params": list(marked.parameters()), "name": "all"}
    said["marked experts"] = raised(marked, split_params_into_different_moe_groups_for_optimizer(named))
    sharded = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    specs = [
        {"patterns": [r".*0\.weight$"], "partition_type": "column"},
        {"patterns": [r".*1\.weight$"], "partition_type": "row"},
    ]
    partition = {"use_default_specs": False, "layer_specs": specs}
    said["tensor"] = raised(sharded, tensor_parallel={"autotp_size": 2, "partition_config": partition})
    layers = [LayerSpec(torch.nn.Linear, 4, 4), LayerSpec(torch.nn.Linear, 4, 4)]
    said["pipeline"] = raised(PipelineModule(layers=layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss))
    return said


# By the name under which docs/options.md has them.
REFUSED_ENGINES = {
    "optimizer": (
        "muon",
        "optimizer Muon needs whole gradients, which no rank holds; use another optimizer or set compile.deepcompile "
        "to false",
    ),
    "tensor_parallel": (
        "tensor",
        "tensor_parallel.autotp_size=2 is only supported with the pass 'autotp'; set compile.passes to ['autotp']",
    ),
    "sequence_parallel_size": (
        "sequence",
        "sequence parallelism over 2 ranks is only supported with the pass 'autosp'; set compile.passes to ['autosp'] "
        "and use stage 1",
    ),
    "expert_parallel": (
        "experts",
        "mixture-of-experts layers, whose experts have process groups of their own, are not supported; set "
        "compile.deepcompile to false",
    ),
    "pipeline": ("pipeline", "pipeline parallelism is not supported; set compile.deepcompile to false"),
}


def test_refused_engines(ranks):
    try:
        results = ranks(2).run(compile_engines_of_other_kinds)
    finally:
        ranks(2).stop()
    expected = {kind: f"ValueError: DeepCompile with ZeRO stage 1: {says}" for kind, says in REFUSED_ENGINES.values()}
    expected["marked experts"] = expected["experts"]
    assert results == [expected, expected]


# The documentation ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Row:
    text: str
    tests: list


def documented():
    """The rows of the tables of docs/options.md, by the full name of each option."""
    rows, prefix = {}, ""
    for line in (TESTS.parent / "docs" / "options.md").read_text().splitlines():
        if line.startswith("#"):
            section = re.fullmatch(r"#+ Section `(\w+)`", line)
            prefix = f"{section[1]}." if section else ""
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 3 and cells[0].startswith("`"):
            for name in re.findall(r"`([^`]+)`", cells[0]):
                assert prefix + name not in rows, f"{prefix}{name} has two rows"
                rows[prefix + name] = Row(cells[1], re.findall(r"\btest_\w+", cells[2]))
    return rows


def test_every_field_is_documented():
    from deepspeed.compile.config import CompileConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    names = set(documented())
    for section, config in (
        ("zero_optimization", DeepSpeedZeroConfig),
        ("compile", CompileConfig),
        ("bf16", DeepSpeedBF16Config),
        ("fp16", DeepSpeedFP16Config),
    ):
        fields = {f"{section}.{field.alias or name}" for name, field in config.model_fields.items()}
        there = {name for name in names if name.startswith(f"{section}.")}
        assert fields - there == set(), "docs/options.md lacks these"
        assert there - fields == set(), "docs/options.md has these, which DeepSpeed does not know"


def test_every_argument_of_compile_is_documented():
    from deepspeed.runtime.engine import DeepSpeedEngine

    names = set(documented())
    assert {*inspect.signature(DeepSpeedEngine.compile).parameters} - {"self", "compile_kwargs"} - names == set()
    arguments = {f"compile_kwargs.{name}" for name in inspect.signature(torch.compile).parameters}
    assert arguments - {"compile_kwargs.model"} - names == set(), "docs/options.md lacks these"


def test_what_is_warned_of_is_documented_as_warned():
    rows = documented()
    assert {name for name, row in rows.items() if "Warned" in row.text} == {*WARNED, *ALSO_WARNED}


def test_what_is_refused_is_documented_as_refused():
    rows = documented()
    refused = {name for name, row in rows.items() if re.search("refused(?! by DeepSpeed)", row.text, re.IGNORECASE)}
    assert refused == {*REFUSED, *REFUSED_ENGINES}
    by_deepspeed = {name for name, row in rows.items() if re.search("refused by DeepSpeed", row.text, re.IGNORECASE)}
    assert by_deepspeed == {*REFUSED_BY_DEEPSPEED}


def test_the_documentation_names_tests():
    sources = "".join(path.read_text() for path in TESTS.glob("test_*.py"))
    tests = {*re.findall(r"^def (test_\w+)", sources, re.MULTILINE)}
    assert {name for name, row in documented().items() if not row.tests or not tests.issuperset(row.tests)} == set()

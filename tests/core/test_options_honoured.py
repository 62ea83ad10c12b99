# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Options of DeepSpeed that DeepCompile ZeRO-1/2 honours, and those that change nothing about its gradients.

With each, training on two ranks gives the parameters of a plain loop.
"""

import dataclasses
import gc
import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.compile.zero_1_and_2.engine import set_up
from deepspeed.compile.zero_1_and_2.gradient import native
from deepspeed.runtime.config import DeepSpeedConfig

from support.ids import vary
from support.on_ranks import on_ranks
from support.options import SMALL, train_and_collect_output, train_each_beside_plain_loop
from support.training import (
    BOUND,
    NOTHING,
    Case,
    build,
    check_trained,
    make_engine,
    train_beside_plain_loop,
)

# What has no counterpart in the reducer, chooses between ways to the same gradients, or is read with other options
# only. All are given at once: training must come to the same bits as without them.
HARMLESS = {
    "zero_optimization": {
        "contiguous_gradients": False,
        "use_multi_rank_bucket_allreduce": False,
        "reduce_scatter": False,
        "allgather_partitions": False,
        "allgather_bucket_size": 2,
        "offload_optimizer": {"device": "none"},
        "cpu_offload_param": False,
        "cpu_offload_use_pin_memory": True,
        "ignore_unused_parameters": False,
        "sub_group_size": 10,
        "stage3_prefetch_bucket_size": 10,
        "stage3_param_persistence_threshold": 10,
        "stage3_model_persistence_threshold": 10,
        "stage3_max_live_parameters": 10,
        "stage3_max_reuse_distance": 10,
        "stage3_gather_16bit_weights_on_model_save": True,
        "stage3_module_granularity_threshold": 10,
        "stage3_use_all_reduce_for_fetch_params": True,
        "stage3_allgather_sequential": True,
        "memory_efficient_linear": False,
        "pipeline_loading_checkpoint": True,
        "override_module_apply": False,
        "log_trace_cache_warnings": True,
        "enable_sanity_checks": True,
        "save_muon_momentum_buffer_in_memory": True,
        "leaf_module": {"names": ["head"]},
    },
    "compile": {"free_activation_threshold": 1, "offload_activation_pin_memory": False, "passes": ["z1"]},
    "fp16": {"enabled": False, "auto_cast": True},
    "comms_logger": {"enabled": False},
    "seq_parallel_communication_data_type": "fp16",
    "disable_allgather": True,
    "prescale_gradients": True,
    "gradient_predivide_factor": 8,
}
ALSO_HARMLESS = {
    # With the value that it has anyway.
    "zero_hpz_partition_size": 1,
    # The same option in another word. DeepSpeed takes one of them.
    "stage3_gather_fp16_weights_on_model_save": True,
}


def taken_by(config):
    """What DeepSpeed has made of the section ``zero_optimization``: the options that are not as by default."""
    engine = make_engine(build(Case(model=SMALL)), Case(model=SMALL, config=config))
    taken = {field.alias or name: name for name, field in type(engine._config.zero_config).model_fields.items()}
    given = engine._config.zero_config
    changed = {
        alias
        for alias, name in taken.items()
        if getattr(given, name, None) != type(given).model_fields[name].get_default(call_default_factory=True)
    }
    engine.destroy()
    return changed


@vary("stage", [1, 2])
def test_harmless(ranks, stage):
    """An option would be refused, or change gradients, that the documentation says has no effect."""
    case = Case(model="FrozenAndUnused", stage=stage, accumulation=2, steps=2)
    zero_optimization = {**HARMLESS["zero_optimization"], **ALSO_HARMLESS}
    del zero_optimization[f"stage3_gather_{'fp16' if stage == 1 else '16bit'}_weights_on_model_save"]
    cases = [case, dataclasses.replace(case, config={**HARMLESS, "zero_optimization": zero_optimization})]
    for without, with_options in ranks(2).run(train_each_beside_plain_loop, cases):
        check_trained([without])
        assert with_options == without


def without_effect():
    """Lists the options of ``HARMLESS`` outside ``zero_optimization`` with which DeepSpeed's settings are the same."""

    def settings(config):
        found = vars(DeepSpeedConfig({"train_batch_size": dist.get_world_size(), **config}))
        del found["_param_dict"]  # the configuration as it was given
        # Some settings are objects that print their address.
        plain = {
            name: vars(value) if type(value).__repr__ is object.__repr__ else value for name, value in found.items()
        }
        return {name: repr(value) for name, value in plain.items()}

    given, default = [], settings({})
    for name, value in HARMLESS.items():
        if name != "zero_optimization":
            given += (
                [{name: {key: entry}} for key, entry in value.items()] if isinstance(value, dict) else [{name: value}]
            )
    return [option for option in given if settings(option) == default]


def test_harmless_options_are_taken(ranks):
    """An option of the test above would have a name or a value by which DeepSpeed changes nothing."""
    (taken,) = ranks(1).run(taken_by, {"zero_optimization": HARMLESS["zero_optimization"]})
    # DeepSpeed drops this deprecated option when it has read it.
    assert HARMLESS["zero_optimization"].keys() - taken == {"cpu_offload_param"}
    # What fp16 has anyway, because its section has another option.
    assert ranks(1).run(without_effect) == [[{"fp16": {"enabled": False}}]]


@pytest.mark.options(
    "zero_optimization.round_robin_gradients", "zero_optimization.parameter_alignment", "gradient_clipping"
)
@vary(
    "config",
    [
        {"round_robin_gradients": True},
        {"parameter_alignment": True},
        {"round_robin_gradients": True, "parameter_alignment": True},
    ],
)
@vary("stage", [1, 2])
def test_layouts_of_the_flat_partition(ranks, stage, config):
    """The norm would pair a view of the partition with another's parameter, or count the padding."""
    config = {"zero_optimization": config}
    case = Case("OddSizes", stage=stage, accumulation=2, steps=2, groups=2, clipping=0.05, config=config)
    check_trained(ranks(2).run(train_beside_plain_loop, case))


@pytest.mark.options("zero_optimization.overlap_comm", "compile.double_buffer", "compile.sync_after_reduce")
@vary(
    "waits, overlaps",
    [
        ({"zero_optimization": {"overlap_comm": False}}, {"zero_optimization": {"overlap_comm": True}}),
        ({"compile": {"double_buffer": False}}, {}),
        ({"compile": {"sync_after_reduce": True}}, {}),
    ],
)
def test_overlap(ranks, waits, overlaps):
    """An option would be ignored by which a bucket has to arrive before the next one fills, and memory doubles."""
    # Each of the two gradients is a bucket.
    case = Case(model=SMALL, stage=2, steps=1, bucket=100)
    cases = [dataclasses.replace(case, config=config) for config in (waits, overlaps)]
    for results in ranks(2).run(train_each_beside_plain_loop, cases):
        waiting, overlapping = (result.counters["peak_bucket"] for result in check_trained(results))
        assert 0 < waiting < overlapping


@pytest.mark.options("compile.sync_before_reduce", "compile.sync_after_reduce")
@vary("option", ["sync_before_reduce", "sync_after_reduce"])
@on_ranks(1)
def test_synchronize(option):
    """The reducer would not be told to wait for the device, which nothing shows on a CPU, whose device is the host."""
    told, module = {}, native.reducer_module()

    def make(*args, **kwargs):
        told.update(kwargs)
        return module.Reducer(*args, **kwargs)

    word = option.replace("sync", "synchronize").removesuffix("_reduce")
    for asked in (True, False):
        case = Case(model=SMALL, config={"compile": {option: asked}})
        with mock.patch.object(set_up, "reducer_module", lambda: SimpleNamespace(**{**vars(module), "Reducer": make})):
            make_engine(build(case), case).destroy()
        assert told[word] is asked


@pytest.mark.options("compile.debug_log")
def test_debug_log(ranks):
    """A graph would be missing from the log by which people look for a fault, or be logged without its reductions."""
    config = {"log_level": "info", "compile": {"debug_log": True}}
    case = Case(model="SeveralGraphs", steps=1, config=config)
    (result,) = ranks(1).run(train_and_collect_output, case)
    graphs = [int(index) for index in re.findall(r"^DeepCompile graph (\d+), forward:", result.output, re.MULTILINE)]
    assert sorted(graphs) == [0, 1, 2]
    assert result.output.count("deepcompile.end_backward.default") == 1


@pytest.mark.options("memory_breakdown", "steps_per_print", "dump_state", "timers")
@pytest.mark.parametrize(
    "option, says",
    [
        ("dump_state", r"DeepSpeedEngine configuration:"),
        ("memory_breakdown", r"Engine before forward[\s\S]*Engine after backward"),
        ("steps_per_print", r"step=1, skipped=0, lr=[\s\S]*global_step=3, RunningAvgSamplesPerSec=\d"),
    ],
)
def test_reports(ranks, option, says):
    """A report that somebody asks for would not be there under DeepCompile."""
    case = Case(model=SMALL, steps=3, config={"log_level": "info", option: 1 if option == "steps_per_print" else True})
    (result,) = ranks(1).run(train_and_collect_output, case)
    assert re.search(says, result.output)
    assert result.trained.error < BOUND


@pytest.mark.options("disable_python_gc")
@vary("stage", [1, 2])
@on_ranks(2)
def test_disable_python_gc(stage):
    """Gradient memory would wait for the garbage collector, which an engine's end would also leave disabled."""
    case = Case(model=SMALL, stage=stage, accumulation=2, config={"disable_python_gc": True})
    assert gc.isenabled()
    engine = make_engine(build(case), case)
    assert not gc.isenabled()
    engine.destroy()
    trained = train_beside_plain_loop(case)
    assert gc.isenabled()
    assert trained.error < BOUND
    # Nothing waits for the collector.
    assert all(after == NOTHING for after in trained.held), trained.held


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


@pytest.mark.options("fp16.enabled", "fp16.loss_scale", "fp16.auto_cast", "wall_clock_breakdown", "timers")
@vary("stage", [1, 2])
@on_ranks(1)
def test_around_the_forward(stage):
    """An input would not be cast, a forward not be timed, or a hook stay on the module when the engine has ended."""
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
    assert module.formats == [(torch.float16, torch.float16)] * 5
    assert all(time > 0 for time in times)
    # What the engine's throughput timer counted and added up.
    assert engine.tput_timer.global_step_count == 5 and engine.tput_timer.total_elapsed_time > 0
    # Neither what did it, nor the hooks that do it without DeepCompile, are left.
    engine.destroy()
    assert not module._forward_pre_hooks

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Options of DeepSpeed that DeepCompile ZeRO-1/2 honours, and those that change nothing about its gradients.

With each, training on two ranks gives the parameters of a plain loop.
"""

import gc
import re
from typing import List, NamedTuple, Optional, Tuple

import torch

from support.ids import vary
from support.options import SMALL, train_and_collect_output, train_both_stages
from support.training import BOUND, NOTHING, Case, Trained, batch, build, make_engine, train_beside_plain_loop

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


@vary("name", HARMLESS)
def test_harmless(ranks, name):
    train_both_stages(ranks, **HARMLESS[name])


@vary(
    "config",
    [
        {"round_robin_gradients": True},
        {"parameter_alignment": True},
        {"round_robin_gradients": True, "parameter_alignment": True},
    ],
)
def test_layouts_of_the_flat_partition(ranks, config):
    # Clipping needs the norm, which must pair each view of the partition with its parameter and skip the padding.
    train_both_stages(ranks, groups=2, clipping=0.05, model="OddSizes", config={"zero_optimization": config})


def test_overlap(ranks):
    def memory(zero_options, compile_options):
        config = {"zero_optimization": zero_options, "compile": compile_options}
        results = train_both_stages(ranks, model="OneGraph", bucket=400, steps=1, accumulation=1, config=config)
        return [result.counters["peak_bucket"] for result in results]

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
            assert result.counters["peak_pending"] <= 4 * bucket + largest_gradient


class Norms(NamedTuple):
    """What an engine says of the norm of a step's gradients; None if it says nothing."""

    computed: Optional[float]
    skipped: Optional[float]  # with ``compute_grad_norm: false``


def train_with_and_without_norm(stage):
    """Trains for one step with the norm of the gradients and one without."""
    norms = []
    for options in ({}, {"compute_grad_norm": False}):
        case = Case(model=SMALL, stage=stage, config={"zero_optimization": options})
        engine = make_engine(build(case), case)
        engine.backward(engine(batch(0, 0, torch.distributed.get_rank(), 4)))
        engine.step()
        norms.append(engine.get_global_grad_norm())
        engine.destroy()
    return Norms(*(None if norm is None else float(norm) for norm in norms))


def test_compute_grad_norm(ranks):
    train_both_stages(ranks, config={"zero_optimization": {"compute_grad_norm": False}})
    for stage in (1, 2):
        norms, of_other_rank = ranks(2).run(train_with_and_without_norm, stage)
        assert norms.computed > 0 and norms.skipped is None and of_other_rank == norms


def test_debug_log(ranks):
    config = {"log_level": "info", "compile": {"debug_log": True}}
    for stage in (1, 2):
        case = Case(stage=stage, model="SeveralGraphs", steps=1, config=config)
        results = ranks(2).run(train_and_collect_output, case)
        assert all(result.trained.error < BOUND for result in results)
        output = results[0].output
        graphs = [int(index) for index in re.findall(r"^DeepCompile graph (\d+), forward:", output, re.MULTILINE)]
        assert sorted(graphs) == [0, 1, 2]
        assert output.count("deepcompile.end_backward.default") == 3


class WithoutCollector(NamedTuple):
    trained: Trained
    enabled_before: bool  # whether the garbage collector was, before the engine was made
    enabled_during: bool
    enabled_after: bool  # the engine was destroyed


def train_without_collector(case):
    """Notes whether the garbage collector is enabled around an engine, and trains another one."""
    before = gc.isenabled()
    module = build(case)
    engine = make_engine(module, case)
    during = gc.isenabled()
    engine.destroy()
    trained = train_beside_plain_loop(case)
    return WithoutCollector(trained, before, during, gc.isenabled())


def test_disable_python_gc(ranks):
    for stage in (1, 2):
        case = Case(model=SMALL, stage=stage, accumulation=2, config={"disable_python_gc": True})
        for result in ranks(2).run(train_without_collector, case):
            assert result.trained.error < BOUND
            assert (result.enabled_before, result.enabled_during, result.enabled_after) == (True, False, True)
            # Nothing waits for the collector.
            assert all(after == NOTHING for after in result.trained.held), result.trained.held


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


class AroundTheForward(NamedTuple):
    formats: List[Tuple[torch.dtype, torch.dtype]]  # of both inputs of each forward
    times: List[float]  # of each forward, as the engine took them
    steps: int  # that the engine's throughput timer counted
    seconds: float  # that it added up
    hooks: int  # on the module when the engine was destroyed


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
    steps, seconds = engine.tput_timer.global_step_count, engine.tput_timer.total_elapsed_time
    # Neither what did it, nor the hooks that do it without DeepCompile, are left.
    engine.destroy()
    return AroundTheForward(module.formats, times, steps, seconds, hooks=len(module._forward_pre_hooks))


def test_around_the_forward(ranks):
    for stage in (1, 2):
        for seen in ranks(2).run(train_and_measure, stage):
            assert seen.formats == [(torch.float16, torch.float16)] * 5
            assert all(time > 0 for time in seen.times)
            assert seen.steps == 5 and seen.seconds > 0
            assert seen.hooks == 0

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Options of DeepSpeed that ``deepspeed.initialize()`` refuses, and arguments that ``engine.compile()`` refuses.

``refused.py`` of each part's tests has what the part refuses.
"""

import importlib
import inspect
from pathlib import Path

import pytest
import torch

from support.ids import vary
from support.options import TWICE_ROUNDED
from support.refusals import Refusal, check_advice, check_refused, of_compile_kwargs, refuse, zero_options

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


def with_cuda_graphs(arguments):
    return of_compile_kwargs(
        "CUDA graphs (compile_kwargs mode 'reduce-overhead' or 'max-autotune', or option triton.cudagraphs) cannot "
        "record reductions that are decided at run time; use mode 'max-autotune-no-cudagraphs' or none",
        arguments,
        instead=({"mode": "max-autotune-no-cudagraphs"}, {}),
    )


# By the name under which docs/reference/options.md has them.
REFUSED = {
    "zero_optimization.offload_optimizer": Refusal(
        "zero_optimization.offload_optimizer.device='nvme' is only supported in stage 3; use 'cpu'",
        config={
            **zero_options(offload_optimizer={"device": "nvme", "nvme_path": "/tmp"}),
            "zero_force_ds_cpu_optimizer": False,
        },
        instead=({**zero_options(offload_optimizer={"device": "cpu"}), "zero_force_ds_cpu_optimizer": False},),
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
        instead=({**zero_options(offload_optimizer={"device": "cpu"}), "zero_force_ds_cpu_optimizer": False},),
    ),
    "data_types.grad_accum_dtype": Refusal(
        "data_types.grad_accum_dtype='fp32' with bf16 is not supported in stage 1; use stage 2, which accumulates in "
        "fp32, or grad_accum_dtype='bf16'",
        dtype="bf16",
        config={"data_types": {"grad_accum_dtype": "fp32"}},
        instead=(
            {**zero_options(stage=2), "data_types": {"grad_accum_dtype": "fp32"}},
            {"data_types": {"grad_accum_dtype": "bf16"}},
        ),
    ),
    "data_efficiency": Refusal(
        "data_efficiency.data_routing.random_ltd is not supported, because its layers load native code and change "
        "their shapes inside of what is compiled; set random_ltd.enabled to false",
        config={"data_efficiency": {"data_routing": {"random_ltd": RANDOM_LTD}}},
        instead=({"data_efficiency": {"data_routing": {"random_ltd": {**RANDOM_LTD, "enabled": False}}}},),
    ),
    "autotuning": Refusal(
        "autotuning.enabled=true is not supported, because compiled code does not call the functions that the flops "
        "profiler counts for it; set it to false, or set compile.deepcompile to false",
        config={"autotuning": {"enabled": True, "start_profile_step": 100}},
        instead=({"autotuning": {"enabled": False, "start_profile_step": 100}},),
    ),
    "compile.autoep_non_moe": Refusal(
        "compile.autoep_non_moe=true compiles without DeepCompile; leave it out, or set compile.deepcompile to false",
        config={"compile": {"autoep_non_moe": True}},
        amends={"autoep_non_moe": False},
    ),
    "hybrid_engine": Refusal(
        "hybrid_engine.enabled=true is not supported, because generation swaps the modules that were compiled; set it "
        "to false",
        config={"hybrid_engine": {"enabled": True}},
        instead=({"hybrid_engine": {"enabled": False}},),
    ),
    "compile_kwargs.mode": with_cuda_graphs({"mode": "reduce-overhead"}),
    "compile_kwargs.options": of_compile_kwargs(
        "the option custom_partitioner_fn of torch.compile is taken: DeepCompile's partitioner inserts the "
        "reductions; remove it",
        {"options": {"custom_partitioner_fn": len}},
        instead=({"options": {}},),
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
    "mode-max-autotune": with_cuda_graphs({"mode": "max-autotune"}),
    "option-cudagraphs": with_cuda_graphs({"options": {"triton.cudagraphs": True}}),
    "mode-lite": of_compile_kwargs(
        "the option selective_decompose of torch.compile (which compile_kwargs mode 'lite' sets) drops the notes that "
        "say which gradient is whose; remove it or use another mode",
        {"mode": "lite"},
        instead=({}, {"mode": "default"}),
    ),
    "unknown-mode": of_compile_kwargs(
        "compile_kwargs['mode']='fastest' is not a mode of torch.compile; use one of ['default', "
        "'max-autotune-no-cudagraphs']",
        {"mode": "fastest"},
        instead=({"mode": "default"}, {"mode": "max-autotune-no-cudagraphs"}),
    ),
    "options-of-another-type": of_compile_kwargs(
        "compile_kwargs['options']='max_autotune' is not a dict of torch.compile's options; pass one, or leave it out",
        {"options": "max_autotune"},
        instead=({"options": {"max_autotune": True}}, {}),
    ),
    "dynamic-of-another-type": of_compile_kwargs(
        "compile_kwargs['dynamic']='auto' is neither true nor false; set it to one of them, or to None",
        {"dynamic": "auto"},
        instead=tuple({"dynamic": value} for value in (True, False, None)),
        backend="eager",
    ),
    "mode-and-options": of_compile_kwargs(
        "compile_kwargs holds both `mode` and `options`, but torch.compile takes one of them; remove either",
        {"mode": "default", "options": {}},
        instead=({"mode": "default"}, {"options": {}}),
    ),
    "options-for-eager": of_compile_kwargs(
        "`mode` and `options` of compile_kwargs go with backend 'inductor', not 'eager'; remove them",
        {"options": {"epilogue_fusion": False}},
        instead=({},),
        backend="eager",
    ),
    "unknown-option": of_compile_kwargs(
        "compile_kwargs['options'] holds 'epilog_fusion', which is not an option of this torch; remove it",
        {"options": {"epilog_fusion": False}},
        instead=({"options": {}},),
    ),
    "option-with-dashes": of_compile_kwargs(
        "the option custom_partitioner_fn of torch.compile is taken: DeepCompile's partitioner inserts the "
        "reductions; remove it",
        {"options": {"custom-partitioner-fn": len}},
        instead=({"options": {"epilogue-fusion": False}},),
    ),
    "option-of-another-type": of_compile_kwargs(
        "compile_kwargs['options'] holds 'max-autotune' with the value 'yes', which is not of type bool; give it such "
        "a value, or remove it",
        {"options": {"max-autotune": "yes"}},
        instead=({"options": {"max-autotune": False}}, {"options": {}}),
    ),
    "unknown-compile-kwarg": of_compile_kwargs(
        "compile_kwargs['full_graph'] is not an argument of this torch's torch.compile(); remove it",
        {"full_graph": True},
        instead=({},),
        backend="eager",
    ),
    "super-offload": Refusal(
        "zero_optimization.offload_optimizer.super_offload is only supported in stage 3; leave it out",
        config={
            **zero_options(offload_optimizer={"device": "cpu", "super_offload": True}),
            "zero_force_ds_cpu_optimizer": False,
        },
        instead=({**zero_options(offload_optimizer={"device": "cpu"}), "zero_force_ds_cpu_optimizer": False},),
    ),
}
# Older releases of torch do not have this argument, and refuse it by its name.
if "recompile_limit" in inspect.signature(torch.compile).parameters:
    ALSO_REFUSED.update(
        {
            f"recompile-limit-{name}": of_compile_kwargs(
                f"compile_kwargs['recompile_limit']={limit!r} is not a number of compilations; set it to 1 or more",
                {"recompile_limit": limit},
                instead=({"recompile_limit": 1},),
                backend="eager",
            )
            for name, limit in {"of-another-type": "8", "of-0": 0}.items()
        }
    )


def of_all_parts():
    """Returns all refusals: those above, and those of each part whose tests are there."""
    found = {**REFUSED, **ALSO_REFUSED}
    for path in sorted(Path(__file__).parents[1].glob("*/refused.py")):
        part = importlib.import_module(f"features.{path.parent.name}.{path.stem}")
        found.update({**part.REFUSED, **getattr(part, "ALSO_REFUSED", {})})
    return found


REFUSALS = of_all_parts()
WITH_GPUS = {
    "compile.copy_engines": pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs have copy engines"),
}


@pytest.mark.follows(
    "compiles without DeepCompile; leave it out, or set compile.deepcompile to false",
    "scheduled passes rewrite exist; leave `schedule` out",
    "has no such module outside of another block; {}",
    "found no blocks that repeat in {}; name their classes in a list",
    "use the names of its blocks' classes",
    "which makes a graph of every block; leave one of them out",
    "name its blocks' classes in compile.regional_compilation, or leave this out",
    "set it to null or false",
    "{} {}, or leave compile.optimizer_states out",
    "{} {}, or leave {} out",
    "is for Adam and AdamW of torch and DeepSpeed, not for {}; use one of these",
)
@pytest.mark.quick
@pytest.mark.table
@vary("name", [pytest.param(name, marks=WITH_GPUS.get(name, ())) for name in REFUSALS])
def test_refused(ranks, name):
    """An option that cannot be honoured would be ignored, or its refusal would not say what to do or not help."""
    check_refused(ranks, REFUSALS[name])


@vary("name", ["data_types.grad_accum_dtype", "schedule", "compile.regional_compilation"])
def test_training_after_a_refusal(ranks, name):
    """A refused engine would keep hooks on its module, or one whose arguments were refused be left half changed."""
    for refused in ranks(2).run(refuse, REFUSALS[name], trains=True):
        assert refused.error < TWICE_ROUNDED[REFUSALS[name].dtype]


@pytest.mark.follows(
    "is only supported in stage 3; use 'cpu'",
    "super_offload is only supported in stage 3; leave it out",
    "zero_optimization.zenflow is not supported; remove it",
    "use stage 2, which accumulates in fp32, or grad_accum_dtype='bf16'",
    "generation swaps the modules that were compiled; set it to false",
    "set random_ltd.enabled to false",
    "profiler counts for it; set it to false, or set compile.deepcompile to false",
    "is not a number of compilations; set it to 1 or more",
    "is neither true nor false; set it to one of them, or to None",
    "but torch.compile takes one of them; remove either",
    "is not a dict of torch.compile's options; pass one, or leave it out",
    "is not a mode of torch.compile; use one of {}",
    "is not an argument of this torch's torch.compile(); remove it",
    "go with backend 'inductor', not 'eager'; remove them",
    "which is not an option of this torch; remove it",
    "which is not of type {}; give it such a value, or remove it",
    "use mode 'max-autotune-no-cudagraphs' or none",
    "drops the notes that say which gradient is whose; remove it",
    "DeepCompile's partitioner inserts the reductions; remove it",
)
def test_what_refusals_advise(ranks):
    """The advice would be refused in turn, or not train."""
    check_advice(ranks, {**REFUSED, **ALSO_REFUSED})

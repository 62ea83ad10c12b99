# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Options that ``deepspeed.initialize()`` refuses, and arguments that ``engine.compile()`` refuses.

The former leaves the module and the optimizer as they were, the latter the engine.
"""

import dataclasses
import inspect
from typing import List, NamedTuple, Optional, Tuple

import pytest
import torch

from support.ids import vary
from support.options import SMALL, TWICE_ROUNDED, outcome, prepare, train_prepared
from support.training import Case, build, make_optimizer


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A configuration with which deepspeed.initialize() raises ``says``, or arguments of engine.compile()."""

    says: str
    stage: int = 1
    dtype: str = "fp32"
    config: dict = dataclasses.field(default_factory=dict)
    arguments: dict = dataclasses.field(default_factory=dict)
    # What of the section `compile` to change so that it works; None: something else helps.
    amends: Optional[dict] = None
    # Configurations that ``says`` advises.
    instead: Tuple[dict, ...] = ()

    def amended(self):
        """Returns the first configuration that is not refused."""
        if self.amends is None:
            return self.instead[0]
        return {**self.config, "compile": {**self.config.get("compile", {}), **self.amends}}


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
        "profiler counts for it; set it to false or tune without engine.compile()",
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
    "compile.shard_parameters": Refusal(
        "compile.shard_parameters needs blocks whose parameters are gathered, and the model is compiled as a whole, "
        "because no blocks repeat in FillsPartition; name its blocks' classes in compile.regional_compilation, or "
        "leave this out",
        config={"compile": {"shard_parameters": "frozen"}},
        amends={"shard_parameters": None},
    ),
    "compile.optimizer_states": Refusal(
        "compile.optimizer_states='8bit' is for Adam and AdamW of torch and DeepSpeed, not for SGD; use one of these, "
        "or leave compile.optimizer_states out",
        config={"compile": {"optimizer_states": "8bit"}},
        amends={"optimizer_states": None},
    ),
    "compile.store_param_remainders": Refusal(
        "compile.store_param_remainders is for Adam and AdamW of torch and DeepSpeed, not for SGD; use one of these, "
        "or leave compile.store_param_remainders out",
        config={"compile": {"store_param_remainders": True}},
        amends={"store_param_remainders": False},
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
        "compile_kwargs['mode']='fastest' is not a mode of torch.compile; use one of ['default', "
        "'max-autotune-no-cudagraphs']",
        {"mode": "fastest"},
    ),
    "options-of-another-type": of_compile_kwargs(
        "compile_kwargs['options']='max_autotune' is no dict of torch.compile's options; pass one, or leave it out",
        {"options": "max_autotune"},
    ),
    "dynamic-of-another-type": of_compile_kwargs(
        "compile_kwargs['dynamic']='auto' is neither true nor false; set it to one of them, or to None",
        {"dynamic": "auto"},
        backend="eager",
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
                f"compile_kwargs['recompile_limit']={limit!r} is no number of compilations; set it to 1 or more",
                {"recompile_limit": limit},
                backend="eager",
            )
            for name, limit in {"of-another-type": "8", "of-0": 0}.items()
        }
    )


class Refused(NamedTuple):
    raised: str
    changed: List[str]  # what of the state of the module and its optimizer, or of the engine
    error: Optional[float]  # of training thereafter; None without training


def refuse(refusal, trains=False):
    """Makes an engine of a module that is to be refused, then one as the refusal says, and trains if that is asked.

    The second engine has the module and the optimizer of the first. Where arguments of engine.compile() are refused,
    the engine is the same.
    """
    from deepspeed import comm

    case = Case(model=SMALL, stage=refusal.stage, dtype=refusal.dtype, config=refusal.config)
    advised = dataclasses.replace(case, config=refusal.amended())
    module, engine, error = build(case), None, None
    optimizer = make_optimizer(module, case)
    try:
        if refusal.arguments:
            engine = prepare(case, module).engine
        before = state_of(module, optimizer, engine)
        if engine is None:
            raised = outcome(prepare, case, module, optimizer=optimizer)
        else:
            raised = outcome(engine.compile, **{"backend": "eager", **refusal.arguments})
        changed = [name for name, value in state_of(module, optimizer, engine).items() if value != before[name]]
        if trains or engine is not None:
            if engine is None:
                engine = prepare(advised, module, optimizer=optimizer).engine
            for name, value in (refusal.amends or {}).items():
                setattr(engine._config.compile_config, name, value)
            engine.compile(backend="eager")
            assert engine.is_deepcompile_active()
        if trains:
            error = train_prepared(case, module, engine)
        elif engine is not None:
            engine.destroy()
        return Refused(raised or "nothing: it compiled", changed, error)
    finally:
        # DeepSpeed has one logger of communication for all engines.
        comm.comm.comms_logger.enabled = False


def state_of(module, optimizer, engine):
    """What deepspeed.initialize() or, if there is an engine, engine.compile() changes when it succeeds."""
    if engine is None:
        hooks = [(len(each._forward_pre_hooks), len(each._forward_hooks)) for each in module.modules()]
        held = [
            [(id(each), each.data_ptr(), each.dtype) for each in group["params"]] for group in optimizer.param_groups
        ]
        values = [(name, value.data_ptr(), value.dtype) for name, value in module.state_dict().items()]
        states = len(optimizer.state)
        return {"hooks": hooks, "compiled": module._compiled_call_impl, "optimizer": (held, states), "values": values}
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


@pytest.mark.quick
@pytest.mark.table
@vary("name", [*REFUSED, *ALSO_REFUSED])
def test_refused(ranks, name):
    """An option that cannot be honoured would be ignored, or its refusal would not say what to do or not help."""
    refusal = {**REFUSED, **ALSO_REFUSED}[name]
    (refused,) = ranks(1).run(refuse, refusal)
    said = f"ValueError: DeepCompile with ZeRO stage {refusal.stage}: {refusal.says}"
    assert refused.raised == said if not said.endswith(" ") else refused.raised.startswith(said)
    assert "\n" not in refused.raised
    assert refused.changed == []


@vary("name", ["compile.regional_compilation", "data_types.grad_accum_dtype", "schedule"])
def test_training_after_a_refusal(ranks, name):
    """A refused engine would keep hooks on its module, or one whose arguments were refused be left half changed."""
    for refused in ranks(2).run(refuse, REFUSED[name], trains=True):
        assert refused.error < TWICE_ROUNDED[REFUSED[name].dtype]


def follow(refusals):
    """Makes engines anew as the refusals advise; returns the errors of training them, by the name of the refusal."""
    errors = {}
    for name, refusal in refusals.items():
        for number, config in enumerate(refusal.instead):
            case = Case(model=SMALL, stage=refusal.stage, dtype=refusal.dtype, config=config)
            module, engine = prepare(case)
            engine.compile(backend="eager")
            assert engine.is_deepcompile_active()
            errors[name, number] = train_prepared(case, module, engine)
    return errors


def test_what_refusals_advise(ranks):
    """The advice would be refused in turn, or not train."""
    refusals = {**REFUSED, **ALSO_REFUSED}
    assert all(each.instead or each.amends is not None for each in refusals.values())
    (errors,) = ranks(1).run(follow, refusals)
    assert all(error < TWICE_ROUNDED[refusals[name].dtype] for (name, _), error in errors.items()), errors

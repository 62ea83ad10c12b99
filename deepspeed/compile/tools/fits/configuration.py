# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Reads a DeepSpeed configuration as the engine does, and refuses options that are not estimated."""

import dataclasses
from typing import Any, Dict, List, Tuple

import torch
from pydantic import ValidationError

from deepspeed.runtime.config import DeepSpeedConfig

from .modes import Mode, Question

_SAYS = "the configuration"
# Options that change the memory in a way that is not estimated, unless they are off.
_NOT_ESTIMATED = (
    "autotuning.enabled",
    "bf16.bf16_master_weights_and_grads",
    "bf16.bf16_optimizer_states",
    "communication_data_type",
    "data_efficiency.data_routing.random_ltd.enabled",
    "data_types.grad_accum_dtype",
    "data_types.param_dtype",
    "expert_parallel.enabled",
    "fp16.fp16_master_weights_and_grads",
    "hybrid_engine.enabled",
    "pipeline",
    "tensor_parallel",
    "torch_autocast.enabled",
    "weight_quantization",
    "zero_optimization.offload_optimizer.super_offload",
    "zero_optimization.parameter_alignment",
    "zero_optimization.round_robin_gradients",
    "zero_optimization.zenflow",
)
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_MICRO, _ACCUMULATION, _ALL = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"


def apply(config: Dict[str, Any], question: Question, checkpoint: bool) -> Tuple[Mode, Question, List[str]]:
    """Reads a configuration.

    Args:
        config: the configuration of DeepSpeed. An option "auto" has the question's value, or DeepSpeed's default.
        question: the user's question. Its micro-batch and accumulation override the configuration's.
        checkpoint: whether every block is computed again in the backward.

    Returns:
        The mode of the configuration, the question that it completes, and sentences on options that it left open.

    Raises:
        ValueError: if DeepSpeed refuses the configuration, or if it has an option that is not estimated.
    """
    automatic: List[str] = []
    config = _decided(config, "", automatic)
    for name, value in ((_MICRO, question.micro_batch), (_ACCUMULATION, question.accumulation)):
        if value is not None:
            config[name] = value
    if question.micro_batch and question.accumulation:
        config.pop(_ALL, None)
    elif _ALL not in config:
        config.setdefault(_MICRO, 1)

    # Ranks that share a sequence are one for DeepSpeed's batch sizes. ZeRO cuts the states over all of them.
    sharing = config.get("sequence_parallel_size") or question.sequence_ranks
    if not isinstance(sharing, int) or sharing < 1 or question.gpus % sharing:
        raise ValueError(f"{_SAYS} has sequence_parallel_size {sharing!r}, which does not divide {question.gpus} GPUs")

    class ForGpus(DeepSpeedConfig):
        def _configure_train_batch_size(self) -> None:
            self.world_size = question.gpus // sharing
            super()._configure_train_batch_size()

    try:
        parsed = ForGpus(config)
    except Exception as error:  # noqa: BLE001  DeepSpeed raises many kinds for what it cannot read
        raise ValueError(f"DeepSpeed refuses {_SAYS}: {_said(error)}") from error
    zero, section, kind = parsed.zero_config, parsed.compile_config, (parsed.optimizer_name or "AdamW")
    dtype = torch.bfloat16 if parsed.bfloat16_config.enabled else torch.float32
    dtype = torch.float16 if parsed.float16_config.enabled else dtype
    if "bf16.enabled" in automatic or "fp16.enabled" in automatic:
        dtype = question.dtype or torch.bfloat16
    host = zero.offload_optimizer.device if zero.offload_optimizer is not None else "none"
    doubts = (
        (zero.stage not in (1, 2), f"has ZeRO stage {int(zero.stage)}, and only the stages 1 and 2 are estimated"),
        (not section.deepcompile, "does not set compile.deepcompile to true, and only DeepCompile is estimated"),
        (kind.lower() not in ("adam", "adamw"), f"has {kind}, and only Adam and AdamW are estimated"),
        ((parsed.optimizer_params or {}).get("amsgrad"), "has amsgrad, whose third state is not estimated"),
        (section.store_param_remainders and dtype != torch.bfloat16, f"keeps remainders of {dtype}, not of bf16"),
        (host == "cpu" and section.store_param_remainders, "has remainders with its optimizer on the host"),
        (host == "cpu" and section.optimizer_states, "has states in 8 bits with its optimizer on the host"),
        (
            section.shard_parameters == "all" and section.overlap_param_gather,
            "has overlap_param_gather with sharded parameters",
        ),
        (
            sharing > 1 and parsed.seq_parallel_communication_data_type != torch.float32,
            "has seq_parallel_communication_data_type, which is not estimated",
        ),
        (host not in ("none", "cpu"), f"has its optimizer on {host}, which is not estimated"),
        (question.dtype not in (None, dtype), f"trains in {dtype}, and {question.dtype} is asked for"),
        *(
            (_value(config, name) not in (None, False, _NAMES[dtype]), f"has {name}, which is not estimated")
            for name in _NOT_ESTIMATED
        ),
    )
    refused = [why for is_so, why in doubts if is_so]
    if refused:
        raise ValueError(f"{_SAYS} {', and '.join(refused)}; change that, or leave the configuration out")
    mode = Mode(
        "your configuration",
        checkpoint=checkpoint,
        budget=section.activation_memory_budget,
        chunked_loss=section.chunked_loss,
        shard_parameters=section.shard_parameters,
        overlap_gather=bool(section.overlap_param_gather),
        keep=section.keep_gathered,
        eight_bit=section.optimizer_states == "8bit",
        remainders=section.store_param_remainders,
        offload=host == "cpu",
        stage=int(zero.stage),
    )
    completed = dataclasses.replace(
        question,
        sequence_ranks=sharing,
        micro_batch=parsed.train_micro_batch_size_per_gpu,
        accumulation=parsed.gradient_accumulation_steps,
        dtype=dtype,
        bucket=int(zero.reduce_bucket_size),
        overlap=section.double_buffer and _value(config, "zero_optimization.overlap_comm") is not False,
        regional=section.regional_compilation,
        copy_engines=section.copy_engines,
    )
    notes = []
    if automatic:
        notes.append(f'"auto" stands for what the command says, or for DeepSpeed\'s default: {", ".join(automatic)}.')
    return mode, completed, notes


def _said(error: Exception) -> str:
    """Returns the text of an error, in one line."""
    if isinstance(error, ValidationError):
        fields = ((".".join(map(str, field["loc"])), field["msg"]) for field in error.errors())
        return ", ".join(f"{name}: {message}" for name, message in fields)
    return " ".join(str(error).split())


def _decided(section: Dict[str, Any], place: str, automatic: List[str]) -> Dict[str, Any]:
    """Returns a section without its options "auto", whose names are added to ``automatic``."""
    automatic += [f"{place}{name}" for name, value in section.items() if value == "auto"]
    return {
        name: _decided(value, f"{place}{name}.", automatic) if isinstance(value, dict) else value
        for name, value in section.items()
        if value != "auto"
    }


def _value(config: Dict[str, Any], name: str) -> Any:
    """Returns the value of an option by its dotted name, or None."""
    value: Any = config
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value

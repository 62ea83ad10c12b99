# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The user's question, and the modes that are compared, with their lines of a configuration."""

import dataclasses
import json
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

import torch

from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

# The largest number that a question may have.
MOST = 2**24


@dataclasses.dataclass(frozen=True)
class Question:
    """The training that has to fit, and the GPUs."""

    gpus: int = 1  # the number of GPUs, which train with data parallelism
    memory: float = 80  # the nominal memory of each GPU in GB: 80 for an H100, of which torch shows 79.1 GiB
    sequence: Optional[int] = None  # tokens of a sequence. None: 4096, or as many as the model has positions
    sequence_ranks: int = 1  # how many GPUs share a sequence by Ulysses, each with an equal part of its tokens
    micro_batch: Optional[int] = None  # sequences of a micro-batch. None: the configuration's number, or 1
    accumulation: Optional[int] = None  # micro-batches of a step. None: the configuration's number, or 1
    lora: Optional[int] = None  # the rank of adapters at all linear layers of the blocks; None: no adapters
    # Returns the model's arguments for (micro_batch, sequence); by default token ids or images, as the model's
    # configuration says.
    batch: Optional[Callable[[int, int], Dict[str, torch.Tensor]]] = None
    # The dtype of parameters and activations. None: the configuration's, or bf16. Masters and moments are fp32.
    dtype: Optional[torch.dtype] = None
    bucket: int = int(DeepSpeedZeroConfig().reduce_bucket_size)  # ``reduce_bucket_size``
    overlap: bool = True  # whether buckets travel while the backward goes on
    regional: Any = None  # ``compile.regional_compilation``
    copy_engines: Optional[bool] = None  # ``compile.copy_engines``
    inputs_on_host: bool = False  # whether inputs of checkpointed layers are on the host
    # mlp_tiles, loss_tiles: into how many tiles of tokens DeepSpeed cuts each MLP, and head and loss; None: none.
    mlp_tiles: Optional[int] = None
    loss_tiles: Optional[int] = None
    seconds: float = 300  # for tracing in all. Modes that are not traced by then lack activations

    def __post_init__(self) -> None:
        for name in ("memory", "seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r} is not above 0; use the real number")
        parts = ("sequence_ranks", "mlp_tiles", "loss_tiles")
        for name in ("gpus", "sequence", "micro_batch", "accumulation", "lora", *parts):
            value = getattr(self, name)
            # Torch counts the bytes of all of these together in 64 bits.
            if value is not None and not 1 <= value <= MOST:
                raise ValueError(f"{name}={value!r} is not from 1 to {MOST}; use the real number")


@dataclasses.dataclass(frozen=True)
class Mode:
    """One way to train."""

    name: str  # the name in the table
    # The time of a step as a multiple of the plain mode's, which is printed rounded to a tenth. docs/results/tables.md
    # and docs/reference/packages.md have the measurements, of Qwen3-8B where there are several.
    pace: float = 1.0
    system: str = "fork"  # "fork" or "fsdp2"
    checkpoint: bool = False  # whether every block is computed again in the backward
    # budget, chunked_loss, shard_parameters: the options of these names of the section ``compile``.
    budget: Optional[float] = None
    chunked_loss: Optional[bool] = None
    shard_parameters: Optional[str] = None
    # Whether the configuration sets ``overlap_param_gather`` to true, which makes blocks. The overlapped gather
    # itself, which is the default of blocks, changes no peak.
    overlap_gather: bool = False
    keep: Union[int, str, None] = None  # ``keep_gathered``
    eight_bit: bool = False  # ``optimizer_states: "8bit"``
    remainders: bool = False  # ``store_param_remainders``
    offload: bool = False  # whether masters, moments and gradients are on the host
    reshard: bool = False  # FSDP2's ``reshard_after_forward``
    stage: int = 1  # the stage of ZeRO. With 2, FSDP2 reduces gradients in each micro-batch, which is its default

    @property
    def by_blocks(self) -> bool:
        """Whether the mode needs blocks, even if the engine would otherwise compile the model as a whole."""
        needs = self.checkpoint or self.shard_parameters is not None or self.overlap_gather
        return needs or self.system == "fsdp2"

    @property
    def of_activations(self) -> Tuple:
        """The options on which the activations depend, apart from the blocks."""
        # FSDP2's users compute the loss from the logits that the model returns.
        own_loss = self.system == "fsdp2"
        return self.checkpoint, self.budget, False if own_loss else self.chunked_loss, own_loss

    @property
    def options(self) -> int:
        """The number of options that the mode sets."""
        given = (self.budget, self.chunked_loss, self.shard_parameters, self.keep)
        flags = (self.checkpoint, self.overlap_gather, self.eight_bit, self.remainders, self.offload)
        return sum(option is not None for option in given) + sum(flags)

    def lines(self, enables: bool, is_whole: bool) -> List[str]:
        """Lists the lines to write.

        Args:
            enables: whether the model has transformers' ``gradient_checkpointing_enable()``.
            is_whole: whether the model would be compiled as a whole by default.
        """
        options: Dict[str, Any] = {
            "deepcompile": True,
            "regional_compilation": True if is_whole and self.by_blocks else None,
            "activation_memory_budget": self.budget,
            "chunked_loss": self.chunked_loss,
            "overlap_param_gather": self.overlap_gather or None,
            "shard_parameters": self.shard_parameters,
            "keep_gathered": self.keep,
            "optimizer_states": "8bit" if self.eight_bit else None,
            "store_param_remainders": self.remainders or None,
        }
        zero: Dict[str, Any] = {
            "stage": self.stage,
            "offload_optimizer": {"device": "cpu"} if self.offload else None,
        }
        sections = {"compile": options, "zero_optimization": zero}
        given = {key: {name: v for name, v in section.items() if v is not None} for key, section in sections.items()}
        lines = [f'"{name}": {json.dumps(section)}' for name, section in given.items() if section]
        if self.system == "fsdp2":
            lines = [f"fully_shard(..., reshard_after_forward={self.reshard})"]
        if self.checkpoint:
            enabled = enables and self.system == "fork"
            lines += ["model.gradient_checkpointing_enable()" if enabled else "torch.utils.checkpoint at each block"]
        return lines


# The pace with sharded parameters, whose blocks are gathered again in the backward, and what checkpointing adds. The
# latter, and the hundredth more that sharding takes without remainders, come from older runs.
SHARDED, CHECKPOINTED = 1.07, 0.25

_BASES = (
    Mode("ZeRO-1 or 2"),
    Mode("loss in chunks", chunked_loss=True),
    Mode("budget 0.5", 1.1, budget=0.5),
    Mode("budget 0.25", 1.2, budget=0.25),
    Mode("8-bit states", eight_bit=True),
    Mode("remainders", remainders=True),
    Mode("remainders, 8-bit states", remainders=True, eight_bit=True),
    Mode("optimizer on the host", 7.0, offload=True),
    Mode("frozen sharded", 1.1, shard_parameters="frozen"),
    Mode("sharded", 1.08, shard_parameters="all"),
    Mode("sharded, remainders", SHARDED, shard_parameters="all", remainders=True),
    Mode("sharded, remainders, kept", 1.0, shard_parameters="all", remainders=True, keep="fit"),
    Mode("sharded, remainders, 8-bit states", SHARDED, shard_parameters="all", remainders=True, eight_bit=True),
    Mode("FSDP2, kept", 1.17, "fsdp2"),
    Mode("FSDP2, resharded", 1.23, "fsdp2", reshard=True),
)


def _checkpointed(mode):
    name = "checkpointed" if mode == _BASES[0] else f"{mode.name}, checkpointed"
    return dataclasses.replace(mode, name=name, pace=mode.pace + CHECKPOINTED, checkpoint=True)


# A budget, too, makes the backward compute again.
MODES = (*_BASES, *(_checkpointed(mode) for mode in _BASES if mode.budget is None))


def modes_for(question: Question, has_frozen: bool, has_blocks: bool) -> List[Mode]:
    """Lists the modes that have a meaning for a model.

    Args:
        has_frozen: whether a parameter of a block is frozen.
        has_blocks: whether it has blocks that can have graphs of their own.
    """
    modes = [
        mode
        for mode in MODES
        if (question.gpus > 1 or not mode.shard_parameters)
        and (mode.shard_parameters != "frozen" or has_frozen)
        and (has_blocks or not mode.by_blocks)
        # DeepSpeed's tiles tell ZeRO when a gradient is complete.
        and (mode.system == "fork" or not (question.mlp_tiles or question.loss_tiles))
        and (question.dtype == torch.bfloat16 or not mode.remainders)
    ]
    if question.accumulation == 1:
        return modes
    # Before the last micro-batch, ZeRO-1 keeps whole gradients, and ZeRO-2 a partition.
    each_stage = [dataclasses.replace(modes[0], name=f"ZeRO-{stage}", stage=stage) for stage in (1, 2)]
    return each_stage + [dataclasses.replace(mode, stage=2) for mode in modes[1:]]

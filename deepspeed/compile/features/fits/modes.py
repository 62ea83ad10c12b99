# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The modes that are compared: the lines of a configuration, and what they change of the sums."""

import dataclasses
from typing import Any, Dict, List, Optional, Tuple


@dataclasses.dataclass(frozen=True)
class Mode:
    """One way to train.

    Attributes:
        name: for the table.
        lines: what is written into the configuration, beside ``"deepcompile": true``.
        pace: the time of a step, as a multiple of the plain one, to the next tenth: docs/performance.md and
            docs/what_people_train_with.md have the measurements.
        system: "fork" or "fsdp2".
        checkpoint: whether every block is computed again in the backward.
        budget, chunked_loss: the options of these names of the section ``compile``.
        shard_frozen: whether ``shard_parameters`` is "frozen".
        eight_bit: ``optimizer_states: "8bit"``.
        remainders: ``store_param_remainders``.
        offload: whether masters, moments and gradients are on the host.
        reshard: FSDP2's ``reshard_after_forward``.
        stage: of ZeRO.
    """

    name: str
    lines: str
    pace: float
    system: str = "fork"
    checkpoint: bool = False
    budget: Optional[float] = None
    chunked_loss: Optional[bool] = None
    shard_frozen: bool = False
    eight_bit: bool = False
    remainders: bool = False
    offload: bool = False
    reshard: bool = False
    stage: int = 1

    @property
    def of_activations(self) -> Tuple:
        """What the activations depend on."""
        # FSDP2's users compute the loss of logits that the model returns.
        own_loss = self.system == "fsdp2"
        return self.checkpoint, self.budget, False if own_loss else self.chunked_loss, own_loss


CHECKPOINTED = "model.gradient_checkpointing_enable()"
_OFFLOAD = '"offload_optimizer": {"device": "cpu"}'
_EIGHT_BIT, _REMAINDERS = '"optimizer_states": "8bit"', '"store_param_remainders": true'
_KEPT = "fully_shard(..., reshard_after_forward=False)"
_RESHARDED = "fully_shard(..., reshard_after_forward=True)"

MODES = (
    Mode("ZeRO-1 or 2", '"deepcompile": true', 1.0),
    Mode("overlapped", '"overlap_param_gather": true', 1.0),
    Mode("loss in chunks", '"chunked_loss": true', 1.0, chunked_loss=True),
    Mode("budget 0.5", '"activation_memory_budget": 0.5', 1.1, budget=0.5),
    Mode("budget 0.25", '"activation_memory_budget": 0.25', 1.2, budget=0.25),
    Mode("checkpointed", CHECKPOINTED, 1.3, checkpoint=True),
    Mode("8-bit states", _EIGHT_BIT, 1.0, eight_bit=True),
    Mode("8-bit states, checkpointed", f"{_EIGHT_BIT}, {CHECKPOINTED}", 1.3, eight_bit=True, checkpoint=True),
    Mode("remainders", _REMAINDERS, 1.0, remainders=True),
    Mode("remainders, checkpointed", f"{_REMAINDERS}, {CHECKPOINTED}", 1.3, remainders=True, checkpoint=True),
    Mode("remainders, 8-bit states", f"{_REMAINDERS}, {_EIGHT_BIT}", 1.0, remainders=True, eight_bit=True),
    Mode(
        "remainders, 8-bit states, checkpointed",
        f"{_REMAINDERS}, {_EIGHT_BIT}, {CHECKPOINTED}",
        1.3,
        remainders=True,
        eight_bit=True,
        checkpoint=True,
    ),
    Mode("optimizer on the host", _OFFLOAD, 7.0, offload=True),
    Mode("optimizer on the host, checkpointed", f"{_OFFLOAD}, {CHECKPOINTED}", 7.0, offload=True, checkpoint=True),
    Mode("frozen sharded", '"shard_parameters": "frozen"', 1.1, shard_frozen=True),
    Mode(
        "frozen sharded, checkpointed",
        f'"shard_parameters": "frozen", {CHECKPOINTED}',
        1.4,
        shard_frozen=True,
        checkpoint=True,
    ),
    Mode("FSDP2, kept", _KEPT, 1.1, "fsdp2"),
    Mode("FSDP2, resharded", _RESHARDED, 1.2, "fsdp2", reshard=True),
    Mode("FSDP2, kept, checkpointed", f"{_KEPT}, checkpoint_wrapper", 1.4, "fsdp2", checkpoint=True),
    Mode(
        "FSDP2, resharded, checkpointed",
        f"{_RESHARDED}, checkpoint_wrapper",
        1.5,
        "fsdp2",
        reshard=True,
        checkpoint=True,
    ),
)


def modes_for(trains_all: bool, ranks: int, has_blocks: bool) -> List[Mode]:
    """Lists the modes that have a meaning for a model.

    Args:
        trains_all: whether no parameter is frozen.
        ranks: how many GPUs train it.
        has_blocks: whether it has blocks that have graphs of their own.
    """
    return [
        mode
        for mode in MODES
        if (not mode.shard_frozen or (not trains_all and ranks > 1 and has_blocks))
        and (has_blocks or not (mode.checkpoint or mode.name == "overlapped" or mode.system == "fsdp2"))
        and (trains_all or not (mode.offload or mode.eight_bit or mode.remainders))
    ]


def configured(config: Dict[str, Any], checkpoint: bool) -> Mode:
    """Returns the mode of a DeepSpeed configuration."""
    section, zero = config.get("compile", {}), config.get("zero_optimization", {})
    return Mode(
        "your configuration",
        "as it is",
        0.0,
        checkpoint=checkpoint,
        budget=section.get("activation_memory_budget"),
        chunked_loss=section.get("chunked_loss"),
        shard_frozen=section.get("shard_parameters") == "frozen",
        eight_bit=section.get("optimizer_states") == "8bit",
        remainders=bool(section.get("store_param_remainders")),
        offload=(zero.get("offload_optimizer") or {}).get("device", "none") != "none",
        stage=zero.get("stage", 1),
    )

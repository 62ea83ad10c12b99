# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed's engine calls to keep parameters on the host until they are sharded, and to save a checkpoint."""

import itertools
from typing import TYPE_CHECKING, Any, Dict

import torch

from deepspeed.accelerator import get_accelerator

from ...zero_1_and_2.engine.state import state_of
from ...zero_1_and_2.feature import Request
from ..subclasses.calls import BROADCAST_LATER
from .at_rest import Resharded

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


def move_to_device(engine: "DeepSpeedEngine") -> None:
    """Called when an engine begins. Moves the module to the engine's device.

    With ``compile.shard_parameters``, the frozen parameters of blocks that are on the host stay there until they are
    sharded, so the model need not fit on one device.

    Raises:
        ValueError: if parameters that are to be sharded are on the meta device, or if there are no blocks.
    """
    module, stays = engine.module, []
    trains = engine.client_optimizer is not None or engine.optimizer_name() is not None
    shards = engine.is_deepcompile_enabled() and engine._config.compile_config.shard_parameters
    if shards and trains and engine.zero_optimization_stage() in (1, 2):
        _refuse_meta(module)
        stays = _to_be_sharded(engine)
    if not stays:
        module.to(engine.device)
        return
    stay = {id(parameter) for parameter in stays}
    module._apply(lambda tensor: tensor if id(tensor) in stay else tensor.to(engine.device))
    for parameter in stays:
        setattr(parameter, BROADCAST_LATER, True)


def _refuse_meta(module):
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            raise ValueError(
                f"parameter {name} is on the meta device, so compile.shard_parameters has no values to shard; load "
                "the model on the host before deepspeed.initialize(), which leaves the blocks' frozen parameters "
                "there until each rank takes its part"
            )


def _to_be_sharded(engine):
    """Lists the parameters that will be sharded and are not on the engine's device."""
    from ...zero_1_and_2.engine.options import refusal
    from ..blocks.feature import Blocks, chosen_blocks
    from .feature import ShardParameters
    from .sharded_blocks import frozen_of_blocks

    request = Request(engine, get_accelerator().get_compile_backend(), compile_kwargs={})
    # Now, because the device may lack memory for a whole model.
    error = refusal(request, itertools.chain(Blocks.refusals(request), ShardParameters.refusals(request)))
    if error is not None:
        raise error
    frozen = itertools.chain.from_iterable(frozen_of_blocks(engine.module, chosen_blocks(request)[0], []))
    return [parameter for parameter in frozen if is_elsewhere(parameter, torch.device(engine.device))]


def is_elsewhere(parameter: torch.nn.Parameter, device: torch.device) -> bool:
    """Whether a parameter is not on ``device``."""
    return parameter.device.type != device.type


def with_values(engine: "DeepSpeedEngine", state_dict: Dict[str, Any]) -> Dict[str, Any]:
    """Called on all ranks with a state dict of the module. Gives parameters at rest their values, on the first rank.

    The values are on the host. On other ranks these parameters stay at rest.
    """
    if state_of(engine) is None:
        return state_dict
    # Imported here, because the compiler takes a second, for which DeepSpeed need not wait.
    from .feature import sharded_blocks

    sharded = sharded_blocks(engine)
    return state_dict if sharded is None else sharded.with_values(state_dict)


def place_of(parameter: torch.Tensor) -> int:
    """Called when a checkpoint is saved. Returns a number that two parameters share if they are one in memory."""
    return id(parameter) if isinstance(parameter, Resharded) else parameter.data_ptr()

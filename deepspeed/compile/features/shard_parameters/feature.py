# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Keeps a part of the blocks' parameters on each rank (``compile.shard_parameters``)."""

import weakref
from typing import TYPE_CHECKING, Container, Iterator, Optional, Sequence

import torch
from torch.distributed import ProcessGroup

import deepspeed.comm as dist
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ...fixes.base.timeouts import shorten_timeout
from ...zero_1_and_2.engine.state import EngineState, state_of
from ...zero_1_and_2.feature import Feature, Request, SetUpContext
from ...zero_1_and_2.gradient.registered import registered_parameters
from ...zero_1_and_2.messages import warn
from ...zero_1_and_2.parameter.gather import AllGather
from ...zero_1_and_2.step.even_order import EvenOrder
from ..blocks.feature import Blocks
from .generation import synchronize_generation
from .keep import STEPS_BEFORE, kept_by_default
from .rewrite import SaveByHooks
from .sharded_blocks import ShardedBlocks

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

_groups_of_shards: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class ShardedGather(AllGather):
    """Makes units gather their parameters again when the next forward needs them."""

    def __init__(self, optimizer: DeepSpeedZeroOptimizer, sharded: ShardedBlocks):
        super().__init__(optimizer)
        self._sharded = sharded

    def start(self) -> None:
        self._sharded.refresh()

    def refuse_to_offload(self, include: Optional[Container[OffloadStateTypeEnum]]) -> None:
        if include is None or OffloadStateTypeEnum.lp_params in include:
            raise ValueError(
                "compile.shard_parameters='all' keeps a part of the parameters on each rank, and offload_states() "
                "cannot move it to the host; name other states in include=[...]"
            )

    def wait_all(self) -> None:
        self._sharded.take_changes()

    # A step reads this rank's shards.
    before_step = wait_all


class GathersInBackward(EvenOrder):
    """The methods of the base's ZeRO-1/2 optimizer that begin and end a backward."""

    _deepcompile: EngineState

    def backward_prologue(self) -> None:
        self._deepcompile.find(ShardParameters).sharded.passes.begin_backward()
        super().backward_prologue()

    def backward_epilogue(self, *args, **kwargs) -> None:
        # Before this rank waits for gradients of other ranks, which may wait for collectives of this backward. None of
        # them waits for gradients of this rank there: the reducer holds these until now (`hold_on_cpu`).
        self._deepcompile.find(ShardParameters).sharded.passes.finish_backward()
        super().backward_epilogue(*args, **kwargs)


class ShardParameters(Feature):
    """Shards the frozen parameters, or all parameters, of the blocks of one engine."""

    @classmethod
    def is_wanted(cls, request: Request) -> bool:
        return request.options.shard_parameters is not None

    @classmethod
    def refusals(cls, request: Request) -> Iterator[str]:
        if request.options.shard_parameters == "all" and request.options.overlap_param_gather:
            yield (
                "compile.overlap_param_gather keeps all parameters on each rank, and compile.shard_parameters='all' a "
                "part of them; leave one of them out"
            )

    def __init__(self, context: SetUpContext):
        """Nothing is sharded yet."""
        optimizer, blocks = context.optimizer, context.get(Blocks)
        group, device = _groups_of_shards[optimizer.dp_process_group], optimizer.bit16_groups_flat[0].device
        trained = registered_parameters(optimizer)
        shards_all = context.request.options.shard_parameters == "all"
        optimizer_of_all = optimizer if shards_all else None
        self.sharded = ShardedBlocks(
            context.module, blocks.blocks, trained, group, device, context.identity, optimizer_of_all
        )
        if self.sharded.optimizer is not None:
            self.gather = ShardedGather(optimizer, self.sharded)
        context.undo.callback(self.sharded.close)
        context.backend.rewrites.append(SaveByHooks.of_parameters)
        kept = context.request.options.keep_gathered
        if kept is None and shards_all:
            kept = kept_by_default(dist.get_world_size(group))
        self._steps_before_keeping = STEPS_BEFORE if kept == "fit" else 0
        self.sharded.whole.most_kept = kept if isinstance(kept, int) else 0
        if not self.sharded.units:
            warn("compile.shard_parameters has no effect, because no block has such parameters of its own")
        # A graph of the code around a block has no place at which to gather the block. The backward may compute the
        # block again when its parameters have been given back.
        blocks.wrap_calls(self.sharded.passes.around_call, always=True)
        if self.sharded.units:
            blocks.wrap_module(self.sharded.passes.around_module)
            synchronize_generation(context.module, self.sharded.whole, group, context.undo)

    optimizer_mixins = (GathersInBackward,)

    @property
    def shares(self) -> Sequence[torch.Tensor]:
        """This rank's shards of frozen parameters. Those of trained ones are the optimizer's partitions."""
        return self.sharded.shares

    def commit(self) -> None:
        self.sharded.shard()

    def after_step(self, engine: "DeepSpeedEngine") -> None:
        self.sharded.after_step()
        # The first step that is taken makes the optimizer's states. One that overflows is left out.
        if self._steps_before_keeping and engine.was_step_applied():
            self._steps_before_keeping -= 1
            if not self._steps_before_keeping:
                self.sharded.keep_what_fits()


FEATURE = ShardParameters


def sharded_blocks(engine: "DeepSpeedEngine") -> Optional[ShardedBlocks]:
    """Returns what has an engine's sharded parameters, or None if it shards none."""
    deepcompile = state_of(engine)
    part = None if deepcompile is None else deepcompile.find(ShardParameters)
    return None if part is None else part.sharded


def make_group_of_shards(group: ProcessGroup, device: torch.device) -> None:
    """Makes the process group for sharded parameters of the ranks of ``group``. All engines of these have the same.

    Engines come and go, but a communicator takes memory and time. All ranks call this when an engine is made: parts
    have no collectives when :meth:`~Feature.__init__` makes them. ``device``: of the parameters.
    """
    if group not in _groups_of_shards:
        ranks = dist.get_all_ranks_from_group(group)
        # If ``group`` has not all ranks, the others are not here.
        is_part = len(ranks) < dist.get_world_size()
        _groups_of_shards[group] = torch.distributed.new_group(ranks, use_local_synchronization=is_part)
    shorten_timeout(_groups_of_shards[group], device)

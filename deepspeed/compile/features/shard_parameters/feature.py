# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Keeps a part of the blocks' parameters on each rank (``compile.shard_parameters``)."""

import contextlib
import functools
import itertools
import weakref
from typing import TYPE_CHECKING, Callable, Container, Dict, Iterable, Iterator, List, Optional, Sequence, Union

import torch
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter

import deepspeed.comm as dist
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

from ...fixes.base.subclasses import is_dtensor, plain_tensors
from ...fixes.base.timeouts import shorten_timeout
from ...zero_1_and_2.collectives import every_rank_raises
from ...zero_1_and_2.engine.state import EngineState, state_of
from ...zero_1_and_2.feature import Feature, Request, SetUpContext
from ...zero_1_and_2.gradient.backward import in_backward
from ...zero_1_and_2.gradient.registered import registered_parameters
from ...zero_1_and_2.hooks import Hook
from ...zero_1_and_2.messages import log_notice, warn
from ...zero_1_and_2.parameter.carrier import Collectives
from ...zero_1_and_2.parameter.gather import AllGather
from ...zero_1_and_2.step.even_order import EvenOrder
from ..blocks.feature import Blocks
from ..blocks.parameters import by_block
from ..overlap_gather.arriving import is_traced
from .at_rest import refuse_checkpoint
from .comparison import FIRST_OF_UNITS, UNIT_ID_STRIDE, Comparison
from .generation import synchronize_generation
from .joint_reads import JointReads
from .keep import STEPS_BEFORE, blocks_that_fit, kept_by_default
from .outside import large_outside
from .passes import Passes
from .rewrite import SaveByHooks
from .saved_tensors import saving_handles
from .segments import give_up_flats, take_partitions
from .unit import TAKE_IN, Unit
from .unit_memory import UnitMemory

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

_groups_of_shards: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class GathersInBackward(EvenOrder):
    """The methods of the base's ZeRO-1/2 optimizer that begin and end a backward."""

    _deepcompile: EngineState

    def backward_prologue(self) -> None:
        self._deepcompile.find(ShardParameters).passes.begin_backward()
        super().backward_prologue()

    def backward_epilogue(self, *args, **kwargs) -> None:
        # Before this rank waits for gradients of other ranks, which may wait for collectives of this backward. None of
        # them waits for gradients of this rank there: the reducer holds these until now (`hold_on_cpu`).
        self._deepcompile.find(ShardParameters).passes.finish_backward()
        super().backward_epilogue(*args, **kwargs)


class ShardParameters(Feature, AllGather):
    """Shards the frozen parameters, or all parameters, of the blocks of one engine.

    Frozen parameters outside blocks, and those that several blocks hold, stay whole on every rank. With "all", trained
    parameters are sharded too, large ones outside of blocks among them. Then this is also the gather after a step: it
    makes units gather their parameters again when the next forward needs them.

    Attributes:
        units: of blocks, and of large parameters outside of blocks.
        passes: gathers them for forwards and backwards, block by block.
        whole: which of them are whole.
        outside: the unit of the other trained parameters outside of blocks, which is never resharded, or None.
        process_group: of the ranks that have parts of the parameters.
        is_closed: whether the engine was destroyed.
    """

    optimizer_mixins = (GathersInBackward,)

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
        AllGather.__init__(self, context.optimizer)
        module, blocks = context.module, context.get(Blocks)
        self.process_group = _groups_of_shards[context.optimizer.dp_process_group]
        self._device = context.optimizer.bit16_groups_flat[0].device
        shards_all = context.request.options.shard_parameters == "all"
        world = dist.get_world_size(self.process_group)
        self._shards_trained = shards_all and world > 1
        self._make_units(context, blocks.blocks)
        for block in blocks.blocks:
            if id(block) in self._unit_of:
                refuse = functools.partial(refuse_checkpoint, self._unit_of[id(block)])
                context.undo.callback(block.register_state_dict_pre_hook(Hook(refuse)).remove)
        self.is_closed = False
        context.undo.callback(self.close)
        context.backend.rewrites.append(SaveByHooks.of_parameters)
        kept = context.request.options.keep_gathered
        if kept is None and shards_all:
            kept = kept_by_default(world)
        self._steps_before_keeping = STEPS_BEFORE if kept == "fit" else 0
        self.whole.most_kept = kept if isinstance(kept, int) else 0
        if not self.units:
            alone = "a single rank has no other to share parameters with"
            why = alone if world == 1 else "no block has such parameters of its own"
            warn(f"compile.shard_parameters has no effect, because {why}")
        # A graph of the code around a block has no place at which to gather the block. The backward may compute the
        # block again when its parameters have been given back.
        blocks.wrap_calls(self.passes.around_call, always=True)
        if self.units:
            blocks.wrap_module(self.passes.around_module)
            synchronize_generation(module, self.whole, self.process_group, context.undo)

    def _make_units(self, context, blocks):
        optimizer, module, process_group = context.optimizer, context.module, self.process_group
        trained = registered_parameters(optimizer)
        # Trained parameters that no block holds alone: large ones, and others in a unit that is never resharded.
        self.outside: Optional[Unit] = None
        rank, world = dist.get_rank(process_group), dist.get_world_size(process_group)
        dtypes = (flat.dtype for flat in optimizer.bit16_groups_flat)
        groups = [*zip(context.layouts, dtypes, strict=True)] if self._shards_trained else []
        outside, *of_blocks = by_block(trained if self._shards_trained else [], module, blocks)
        self._joint_reads = JointReads(process_group)
        # Engines share the process group.
        first_number = context.identity * UNIT_ID_STRIDE
        numbers = itertools.count(first_number + FIRST_OF_UNITS)
        names = {parameter: name for name, parameter in module.named_parameters()}
        names_of_modules = {part: name for name, part in module.named_modules()}

        def make_unit(name, trained, frozen=()):
            def named(parameters):
                return {names.get(parameter, "a parameter"): parameter for parameter in parameters}

            memory = UnitMemory(named(frozen), named(trained), groups, rank, world, self._device)
            memory.frozen.carrier = Collectives(process_group)
            return Unit(memory, process_group, self._device, next(numbers), name)

        self._unit_of: Dict[int, Unit] = {}
        of_block = zip(blocks, frozen_of_blocks(module, blocks, trained), of_blocks, strict=True)
        for block, frozen, its_trained in of_block:
            if frozen or its_trained:
                name = f"block {names_of_modules.get(block, type(block).__name__)}"
                self._unit_of[id(block)] = make_unit(name, its_trained, frozen)
        large: Dict[Parameter, Unit] = {}
        for parameter in large_outside(outside, module, blocks):
            large[parameter] = make_unit(f"parameter {names.get(parameter)}", [parameter])
        outside = [parameter for parameter in outside if parameter not in large]
        if outside:
            self.outside = make_unit("parameters outside of blocks", outside)
        self.units = [*self._unit_of.values(), *large.values()]
        moments = Comparison(first_number, "", process_group, self._device)
        self.passes = Passes(module, blocks, self._unit_of, large, moments)
        self.whole = self.passes.whole
        for unit in self.units:
            unit.owner = self

    @property
    def gather(self) -> Optional[AllGather]:  # type: ignore[override]
        # No attribute, because an object that holds itself is not freed with its engine.
        return self if self._shards_trained else None

    @property
    def shares(self) -> Sequence[torch.Tensor]:
        """This rank's shards of frozen parameters. Those of trained ones are the optimizer's partitions."""
        return [unit.memory.frozen.own for unit in self.units if unit.memory.is_shared]

    def commit(self) -> None:
        """Gives up all but this rank's part of each unit."""
        # Units are taken in one by one, so that at most one more whole unit is on the device. What a rank does alone
        # for one unit runs where ranks compare errors for the next: otherwise they would wait for a rank that raised.
        optimizer = self._optimizer() if self._shards_trained else None
        segments = [segment for unit in self._all_units() for segment in unit.memory.trained]
        alone: Callable[[], None] = functools.partial(take_partitions, optimizer, segments, self.process_group)
        for unit in self.units:
            unit.take_in(alone)
            alone = unit.reshard
        if self.outside is not None:
            self.outside.take_in(alone)
            # Parameters that were cut from the host have no values on a rank but its shards.
            alone = self.outside.refresh
        with every_rank_raises(TAKE_IN, self.process_group):
            alone()
            if optimizer is not None:
                give_up_flats(optimizer, segments)

    def _all_units(self):
        return self.units if self.outside is None else [*self.units, self.outside]

    def start(self) -> None:
        for unit in self._all_units():
            unit.refresh()

    def refuse_to_offload(self, include: Optional[Container[OffloadStateTypeEnum]]) -> None:
        if include is None or OffloadStateTypeEnum.lp_params in include:
            raise ValueError(
                "compile.shard_parameters='all' keeps a part of the parameters on each rank, and offload_states() "
                "cannot move it to the host; name other states in include=[...]"
            )

    def wait_all(self) -> None:
        """Called before others read this rank's partitions: takes over what a caller has changed in place."""
        if self.outside is not None:
            # It is small, and whole all the time: any code may have changed it.
            self.outside.is_used = True
        for unit in self._all_units():
            unit.take_changes()

    # A step reads this rank's shards.
    before_step = wait_all

    def after_step(self, engine: "DeepSpeedEngine") -> None:
        self._joint_reads.after_step()
        # The first step that is taken makes the optimizer's states. One that overflows is left out.
        if self._steps_before_keeping and engine.was_step_applied():
            self._steps_before_keeping -= 1
            if not self._steps_before_keeping:
                units = list(self._unit_of.values())
                self.whole.most_kept = blocks_that_fit(units, self.process_group, self._device)
                log_notice(
                    f"compile.keep_gathered: of {len(units)} blocks, {self.whole.most_kept} stay whole until their "
                    "backward"
                )

    # Whole ---------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def gathered(self, parameters: Union[Parameter, Iterable[Parameter], None] = None) -> Iterator[None]:
        """Context in which parameters are gathered: all, or the units of these. All ranks enter it; changes stay."""
        if self.passes.under_way or in_backward():
            raise RuntimeError(
                "unsharded_parameters() was called within a forward or a backward; call it outside of them"
            )
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        ids = {id(parameter) for parameter in parameters or ()}
        units = [unit for unit in self.units if any(id(held) in ids for _, held in unit.memory.parameters())]
        with self._whole(None if parameters is None else units):
            yield

    @contextlib.contextmanager
    def _whole(self, units):
        """Context in which units are whole, or all (None)."""
        if not self.whole.are_fixed:
            self.passes.end_backward()
        with self.whole.fixed() if units is None else self.whole.held(units), saving_handles():
            yield

    def gather_with_all(self, unit: Unit, stack: contextlib.ExitStack) -> bool:
        """Gathers a unit outside of forwards and backwards, if all ranks do, until ``stack`` ends.

        Returns whether all ranks do.
        """
        if self.is_closed or in_backward() or is_traced():
            return False
        if not self._joint_reads.agree(unit.comparison.number, unit.memory.name):
            return False
        stack.enter_context(self._whole([unit]))
        return True

    def give_up(self) -> None:
        """Gathers all parameters for good. All ranks call it."""
        self.passes.end_backward()
        self.whole.give_up()

    def close(self) -> None:
        """Called at the engine's end. The parameters stay as they are: gathered in :meth:`gathered`, else at rest."""
        self.is_closed = True
        self.whole.leave_as_they_are()
        self.passes.remove_hooks()
        for unit in self.units:
            # Where parameters have their values from once the engine is gone, if another engine is made of them.
            unit.keep()


FEATURE = ShardParameters


def sharded_blocks(engine: "DeepSpeedEngine") -> Optional[ShardParameters]:
    """Returns the part that shards an engine's parameters, or None if it shards none."""
    deepcompile = state_of(engine)
    return None if deepcompile is None else deepcompile.find(ShardParameters)


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


def frozen_of_blocks(module: Module, blocks: List[Module], trained: List[Parameter]) -> List[List[Parameter]]:
    """Lists for each block the parameters that are sharded. ``trained``: the parameters that an optimizer has."""
    kept = {id(parameter) for parameter in trained}
    frozen = [
        parameter for parameter in module.parameters() if id(parameter) not in kept and _can_be_sharded(parameter)
    ]
    return by_block(frozen, module, blocks)[1:]


def _can_be_sharded(parameter):
    if parameter.requires_grad or is_dtensor(parameter) or not parameter.numel():
        return False
    return all(tensor.is_contiguous() and not tensor.is_meta for tensor in plain_tensors([parameter]))

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What one engine shards, from the first cut to the engine's end (``compile.shard_parameters``)."""

import contextlib
import functools
import weakref
from typing import Callable, Dict, Iterable, Iterator, List, Optional, Union

import torch
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter

import deepspeed.comm as dist
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ...fixes.base.subclasses import is_dtensor, plain_tensors
from ...zero_1_and_2.collectives import every_rank_raises
from ...zero_1_and_2.gradient.backward import in_backward
from ...zero_1_and_2.hooks import Hook
from ...zero_1_and_2.layout import layouts_of
from ...zero_1_and_2.messages import log_notice
from ...zero_1_and_2.parameter.carrier import Collectives
from ..blocks.parameters import by_block
from ..overlap_gather.arriving import is_traced
from .at_rest import refuse_checkpoint
from .comparison import FIRST_OF_UNITS, UNIT_ID_STRIDE, Comparison
from .joint_reads import JointReads
from .keep import blocks_that_fit
from .outside import OutsideUnits, large_outside
from .passes import Passes
from .saved_tensors import saving_handles
from .segments import give_up_flats, take_partitions
from .unit import TAKE_IN, Unit
from .unit_memory import UnitMemory


class ShardedBlocks:
    """Shards parameters of blocks over ranks. ``passes`` gathers them, block by block.

    Frozen parameters outside blocks, and those that several blocks hold, stay whole on every rank. With an optimizer,
    trained parameters are sharded too, large ones outside of blocks among them.

    Args:
        module: the model.
        blocks: its blocks.
        trained: the parameters that the optimizer has.
        process_group, device: as for :class:`Unit`.
        identity: of the engine, the same on all ranks.
        optimizer: None, or the optimizer whose parameters are sharded too.

    Attributes:
        units: of blocks, and of large parameters outside of blocks.
        passes: gathers them for forwards and backwards.
        whole: which of them are whole.
        optimizer: a weak reference to the optimizer whose parameters are sharded too; None if they stay whole.
        outside: the unit of the other trained parameters outside of blocks, which is never resharded, or None.
        is_closed: whether the engine was destroyed.
    """

    def __init__(
        self,
        module: Module,
        blocks: List[Module],
        trained: List[Parameter],
        process_group: ProcessGroup,
        device: torch.device,
        identity: int,
        optimizer: Optional[DeepSpeedZeroOptimizer] = None,
    ):
        self._group, self._device = process_group, device
        self.optimizer = None
        # Trained parameters that no block holds alone: large ones, and others in a unit that is never resharded.
        self.outside: Optional[Unit] = None
        of_blocks: List[List[Parameter]] = [[] for _ in blocks]
        groups = []
        rank, world = dist.get_rank(process_group), dist.get_world_size(process_group)
        if optimizer is not None and world > 1:
            self.optimizer = weakref.ref(optimizer)
            dtypes = (flat.dtype for flat in optimizer.bit16_groups_flat)
            groups = [*zip(layouts_of(optimizer), dtypes, strict=True)]
            outside, *of_blocks = by_block(trained, module, blocks)
        self._joint_reads = JointReads(process_group)
        # Engines share the process group.
        first_number = identity * UNIT_ID_STRIDE
        names = {parameter: name for name, parameter in module.named_parameters()}
        names_of_modules = {part: name for name, part in module.named_modules()}

        def make_unit(number, name, trained, frozen=()):
            def named(parameters):
                return {names.get(parameter, "a parameter"): parameter for parameter in parameters}

            memory = UnitMemory(named(frozen), named(trained), groups, rank, world, device)
            memory.frozen.carrier = Collectives(process_group)
            return Unit(memory, process_group, device, first_number + FIRST_OF_UNITS + number, name)

        self._unit_of: Dict[int, Unit] = {}
        of_block = zip(blocks, frozen_of_blocks(module, blocks, trained), of_blocks, strict=True)
        for block, frozen, its_trained in of_block:
            if frozen or its_trained:
                name = f"block {names_of_modules.get(block, type(block).__name__)}"
                self._unit_of[id(block)] = make_unit(len(self._unit_of), name, its_trained, frozen)
        self.units = list(self._unit_of.values())
        moments = Comparison(first_number, "", process_group, device)
        self.passes = Passes(self._unit_of, self.units, moments)
        self.whole = self.passes.whole
        large = {}
        if self.optimizer is not None:
            for parameter in large_outside(outside, module, blocks):
                large[parameter] = make_unit(len(self.units), f"parameter {names.get(parameter)}", [parameter])
                self.units.append(large[parameter])
            outside = [parameter for parameter in outside if parameter not in large]
            if outside:
                self.outside = make_unit(len(self.units), "parameters outside of blocks", outside)
        self.passes.around = OutsideUnits(self.whole, module, blocks, large, self.passes.reach)
        for unit in self.units:
            unit.owner = self
        self._hooks = [
            block.register_state_dict_pre_hook(Hook(functools.partial(refuse_checkpoint, self._unit_of[id(block)])))
            for block in blocks
            if id(block) in self._unit_of
        ]
        self.is_closed = False

    @property
    def shares(self) -> List[torch.Tensor]:
        """This rank's parts of the units, 1-D and of bytes."""
        return [unit.memory.frozen.own for unit in self.units if unit.memory.is_shared]

    def shard(self) -> None:
        """Gives up all but this rank's part of each unit."""
        # Units are taken in one by one, so that at most one more whole unit is on the device. What a rank does alone
        # for one unit runs where ranks compare errors for the next: otherwise they would wait for a rank that raised.
        optimizer = self.optimizer and self.optimizer()
        segments = [segment for unit in self._all_units() for segment in unit.memory.trained]
        alone: Callable[[], None] = functools.partial(take_partitions, optimizer, segments, self._group)
        for unit in self.units:
            unit.take_in(alone)
            alone = unit.reshard_first
        if self.outside is not None:
            self.outside.take_in(alone)
            # Parameters that were cut from the host have no values on a rank but its shards.
            alone = self.outside.refresh
        with every_rank_raises(TAKE_IN, self._group):
            alone()
            if optimizer is not None:
                give_up_flats(optimizer, segments)

    def _all_units(self):
        return self.units if self.outside is None else [*self.units, self.outside]

    def refresh(self) -> None:
        """Called on all ranks when partitions hold new values of the trained parameters."""
        for unit in self._all_units():
            unit.refresh()

    def keep_what_fits(self) -> None:
        """Called on all ranks between steps. From now on, as many units of blocks are kept as fit beside the rest."""
        units = list(self._unit_of.values())
        self.whole.most_kept = blocks_that_fit(units, self._group, self._device)
        log_notice(
            f"compile.keep_gathered: of {len(units)} blocks, {self.whole.most_kept} stay whole until their backward"
        )

    # Whole ---------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def gathered(self, parameters: Union[Parameter, Iterable[Parameter], None] = None) -> Iterator[None]:
        """Context in which parameters are gathered: all, or the units of these. All ranks enter it; changes stay."""
        if self.passes.under_way or in_backward():
            raise RuntimeError(
                "unsharded_parameters() was called within a forward or a backward; call it outside of them"
            )
        with self._whole(None if parameters is None else self._units_of(parameters)):
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

    def after_step(self) -> None:
        """Called on all ranks after each step."""
        self._joint_reads.after_step()

    def _units_of(self, parameters):
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        ids = {id(parameter) for parameter in parameters}
        return [unit for unit in self.units if any(id(held) in ids for _, held in unit.memory.parameters())]

    def take_changes(self) -> None:
        """Called before others read this rank's partitions: takes over what a caller has changed in place."""
        if self.outside is not None:
            # It is small, and whole all the time: any code may have changed it.
            self.outside.is_used = True
        for unit in self._all_units():
            unit.take_changes()

    def give_up(self) -> None:
        """Gathers all parameters for good. All ranks call it."""
        self.passes.end_backward()
        self.whole.give_up()

    def close(self) -> None:
        """Called at the engine's end. The parameters stay as they are: gathered in :meth:`gathered`, else at rest."""
        self.is_closed = True
        self.whole.leave_as_they_are()
        for hook in self._hooks:
            hook.remove()
        self.passes.around.remove_hooks()
        for unit in self.units:
            # Where parameters have their values from once the engine is gone, if another engine is made of them.
            unit.keep(self)


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

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""How parameters get their new values after a ZeRO-1/2 step, of which each rank has computed a partition.

:class:`AllGather` is done when the step is. :class:`OverlappedGather` (``compile.overlap_param_gather``) sends what no
block has for itself first, then block after block, and the next forward waits for a block's when it comes to it.
Reads that it does not see, such as ``parameter.clone()`` between a step and the next forward, must be preceded by
:func:`wait_for_parameters`.
"""

import weakref
from collections import defaultdict
from typing import Dict, Iterable, List, Set

import torch
from torch.nn import Module, Parameter

import deepspeed.comm as dist
from deepspeed.runtime.utils import all_gather_dp_groups
from deepspeed.utils import logger

from .flat_layout import flat_layout, registered_parameters
from .other_ranks import collective

PURPOSE = "get the parameters that other ranks have stepped"


def wait_for_parameters(engine) -> None:
    """Makes every parameter of an engine current: whatever the current stream reads from now on has its new value.

    Needed before parameters are read or written directly between ``engine.step()`` and the next forward, and only
    with ``compile.overlap_param_gather``; without it this does nothing. Does not wait for the device.
    """
    gather = getattr(engine.optimizer, "_gather", None)
    if gather is not None:
        gather.wait_all()


class AllGather:
    """Gathers all parameters at once, before the step returns."""

    def __init__(self, optimizer):
        self._optimizer = weakref.ref(optimizer)

    def start(self) -> None:
        """Called on every rank when the partitions hold their new values."""
        optimizer = self._optimizer()
        with collective(PURPOSE):
            all_gather_dp_groups(
                groups_flat=optimizer.bit16_groups_flat,
                partitioned_param_groups=optimizer.parallel_partitioned_bit16_groups,
                dp_process_group=optimizer.real_dp_process_group,
                start_alignment_factor=optimizer.nccl_start_alignment_factor,
                allgather_bucket_size=optimizer.allgather_bucket_size,
            )

    def wait_all(self) -> None:
        """There is nothing to wait for."""


class OverlappedGather:
    """Sends each partition's parameters to the other ranks while the next forward runs.

    Args:
        optimizer: a ZeRO-1/2 optimizer.
        units: parameters that are waited for together, in the order in which they are sent; each of the optimizer's is
            in one. A unit is sent as few contiguous runs, each by the rank that owns it.
    """

    def __init__(self, optimizer, units: List[List[Parameter]]):
        self._optimizer = weakref.ref(optimizer)
        self._unit_of = {id(parameter): index for index, unit in enumerate(units) for parameter in unit}
        self._runs = [_runs(optimizer, unit) for unit in units]
        # Of each unit that is on its way.
        self._works: Dict[int, list] = {}

    def start(self) -> None:
        """Called on every rank when the partitions hold their new values. Returns while they are being sent."""
        self.wait_all()
        optimizer = self._optimizer()
        with collective(PURPOSE):
            for index, runs in enumerate(self._runs):
                self._works[index] = [
                    dist.broadcast(
                        optimizer.bit16_groups_flat[group].narrow(0, first, last - first),
                        src=dist.get_global_rank(optimizer.real_dp_process_group[group], owner),
                        group=optimizer.real_dp_process_group[group],
                        async_op=True,
                    )
                    for group, first, last, owner in runs
                    # A rank that is alone has nobody to send to.
                    if dist.get_world_size(optimizer.real_dp_process_group[group]) > 1
                ]

    def units_of(self, parameters: Iterable[Parameter]) -> Set[int]:
        """Returns the numbers of the units in which these are; frozen parameters are in none."""
        return {self._unit_of[id(parameter)] for parameter in parameters if id(parameter) in self._unit_of}

    def wait(self, units: Iterable[int]) -> None:
        """Has the current stream, and on a CPU the caller, wait for these units."""
        if self._works:
            for index in units:
                works = self._works.get(index, [])
                while works:
                    # One whose wait raised is asked again: its parameters must not be used.
                    with collective(PURPOSE):
                        works[-1].wait()
                    works.pop()
                self._works.pop(index, None)

    def wait_all(self) -> None:
        """Waits for all that is on its way."""
        self.wait(sorted(self._works))


def _runs(optimizer, parameters):
    """Lists (group, first element, element behind the last, owner's rank) of what these cover of the flat tensors."""
    wanted = {id(parameter) for parameter in parameters}
    runs = []
    for group, size in enumerate(optimizer.partition_size):
        numel, adjacent = int(size), False
        for parameter, offset in flat_layout(optimizer, group):
            if id(parameter) not in wanted or parameter.numel() == 0:
                adjacent = adjacent and parameter.numel() == 0
                continue
            first = offset
            while first < offset + parameter.numel():
                owner = first // numel
                last = min(offset + parameter.numel(), (owner + 1) * numel)
                if adjacent and runs[-1][3] == owner:
                    # What lies between the two is padding.
                    runs[-1] = (group, runs[-1][1], last, owner)
                else:
                    runs.append((group, first, last, owner))
                adjacent, first = True, last
    return runs


# The unit of what no block holds, or more than one does.
OUTSIDE = 0

# Where the forward waits ----------------------------------------------------------------------------------------


class Waiting:
    """Has a model wait for parameters that are on their way wherever it uses them.

    What no block holds is sent first, and the engine's forward waits for it before it begins; a block waits for its
    own parameters. All is there when the blocks are through, and when a state dict is read or loaded. Where the module
    is called without its engine, other modules wait when they are called and graphs when they are run.

    Args:
        optimizer: a ZeRO-1/2 optimizer.
        module: the model.
        blocks: its blocks.
    """

    def __init__(self, optimizer, module: Module, blocks: List[Module]):
        self._gather = OverlappedGather(optimizer, _units(optimizer, module, blocks))
        self._units_of_block = {id(block): sorted(self._gather.units_of(block.parameters())) for block in blocks}
        self._hooks = []
        optimizer.when_destroyed(self._remove_hooks)
        outside = {id(each) for each in _modules_outside(module, blocks)}
        for each in module.modules():
            if isinstance(each, torch.jit.ScriptModule):
                # It takes no hooks; those of the modules and of the engine around it are called too.
                continue
            self._hooks.append(each.register_state_dict_pre_hook(_Hook(self.leave)))
            self._hooks.append(each.register_load_state_dict_pre_hook(_Hook(self.leave)))
            own = self._gather.units_of(each.parameters(recurse=False))
            if id(each) in outside and (own or each is module):
                # Before other hooks, which may compute with parameters, as that of weight_norm() does.
                self._hooks.append(each.register_forward_pre_hook(_Hook(self.begin), prepend=True))
        optimizer._gather = self._gather

    def begin(self) -> None:
        """Called before a forward: waits for what no block holds."""
        self._gather.wait([OUTSIDE])

    def enter(self, module: Module) -> None:
        """Called before the forward of a block, or of what calls the blocks."""
        self._gather.wait(self._units_of_block.get(id(module), [OUTSIDE]))

    def leave(self) -> None:
        """Called behind the forward of what calls the blocks."""
        self._gather.wait_all()

    def before_graph(self, inputs):
        """Returns a function to call before each run of a graph with these inputs, or None if it needs none."""
        units = sorted(self._gather.units_of(value for value in inputs if isinstance(value, Parameter)))
        return (lambda: self._gather.wait(units)) if units else None

    def _remove_hooks(self):
        for hook in self._hooks:
            hook.remove()
        try:
            self._gather.wait_all()
        except RuntimeError as error:
            logger.warning(f"The engine is destroyed, but parameters of the last step did not arrive: {error}")


class _Hook:
    """A hook of a module that calls ``wait()``. Copies of the module get one that does nothing, as do its pickles."""

    def __init__(self, wait=None):
        self._wait = wait

    def __call__(self, *_args):
        # A compiler leaves this out: its graphs are waited for as a whole.
        if not torch.compiler.is_compiling() and self._wait is not None:
            self._wait()

    def __reduce__(self):
        return _Hook, ()


def _modules_outside(module, blocks):
    inside = {id(each) for block in blocks for each in block.modules()}
    return [each for each in module.modules() if id(each) not in inside]


def _units(optimizer, module, blocks):
    """Lists the units in the order in which they are sent: what no block has for itself, then each block's own."""
    outside = {
        id(parameter) for each in _modules_outside(module, blocks) for parameter in each.parameters(recurse=False)
    }
    holders = defaultdict(set)
    for index, block in enumerate(blocks):
        for parameter in block.parameters():
            holders[id(parameter)].add(index)
    units = [[] for _ in range(1 + len(blocks))]
    # Also those that only the optimizer knows.
    for parameter in registered_parameters(optimizer):
        held_by = holders[id(parameter)]
        alone = len(held_by) == 1 and id(parameter) not in outside
        units[1 + next(iter(held_by)) if alone else OUTSIDE].append(parameter)
    return units

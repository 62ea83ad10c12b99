# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Gathers updated parameters while the next forward begins (``compile.overlap_param_gather``)."""

import functools
from typing import TYPE_CHECKING, Callable, List, Optional

from torch.nn import Module, Parameter

from deepspeed.utils import logger

from ...zero_1_and_2.feature import Feature, Request, SetUpContext
from ...zero_1_and_2.gradient.registered import registered_parameters
from ..blocks.feature import Blocks, chosen_blocks
from ..blocks.parameters import by_block, held_by_scripts
from .gather import OverlappedGather
from .guards_of_callers import all_guards

if TYPE_CHECKING:
    from ...zero_1_and_2.graph.backend import Frame

# The number of the unit of all parameters that lie outside the blocks or in several blocks.
OUTSIDE = 0


class OverlapGather(Feature):
    """Sends the unit ``OUTSIDE`` and then the unit of each block, and makes compiled code wait for its parameters.

    A block waits for its own unit, and the code around blocks for the unit ``OUTSIDE``. The guards of compiled code
    read the class of parameters, so parameters must arrive before. Any other code waits when it reads a parameter.
    """

    @classmethod
    def is_wanted(cls, request: Request) -> bool:
        if request.options.overlap_param_gather is not None:
            return request.options.overlap_param_gather
        # Sharded parameters are gathered by their own part.
        if request.options.sharded == "all":
            return False
        return bool(chosen_blocks(request)[0])

    def __init__(self, context: SetUpContext):
        blocks, module = context.get(Blocks), context.module
        units = by_block(registered_parameters(context.optimizer), module, blocks.blocks)
        self.gather = OverlappedGather(context.optimizer, context.layouts, units, held_by_scripts(module))
        context.undo.enter_context(all_guards())
        context.undo.callback(self._end)
        self._units_of_block = {id(block): self.gather.units_of(block.parameters()) for block in blocks.blocks}
        # The units whose parameters the code around blocks reads.
        self._around_blocks = {OUTSIDE}
        blocks.wrap_calls(self._around_call)
        # The set grows, and each call waits for what it has by then.
        blocks.wrap_module(functools.partial(self._waiting, self._around_blocks))

    def _around_call(self, module: Module, blocks: Optional[List[Module]], call: Callable) -> Callable:
        if blocks is not None:
            # The module runs uncompiled, so its reads wait by themselves.
            return call
        return self._waiting(self._units_of_block[id(module)], call)

    def _waiting(self, units, call):
        gather = self.gather

        def wait_and_call(module, /, *args, **kwargs):
            gather.wait(sorted(units))
            return call(module, *args, **kwargs)

        return wait_and_call

    def around_compile(self, frame: "Frame", compiled: Callable[[], Callable]) -> Callable:
        if frame.layer is None:
            # Code around blocks may read a block's parameter too. Wait for its unit first, so that guards find the
            # parameter in its own class.
            self._around_blocks.update(
                self.gather.units_of(value for value in frame.inputs if isinstance(value, Parameter))
            )
        return compiled()

    def _end(self):
        try:
            self.gather.close()
        except RuntimeError as error:
            logger.warning(f"The engine is destroyed, but parameters of the last step did not arrive: {error}")


FEATURE = OverlapGather

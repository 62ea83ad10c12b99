# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Keeps a part of the blocks' frozen parameters on each rank."""

from typing import Sequence

from ...zero12.feature import Asked, Feature, Making
from .rewrite import SaveByHooks


class ShardFrozen(Feature):
    """Has graphs find the parameters that are sharded between their forward and their backward."""

    @classmethod
    def is_wanted(cls, asked: Asked) -> bool:
        return asked.options.shard_frozen

    def __init__(self, making: Making):
        pass

    def rewrite(self, inputs: Sequence) -> SaveByHooks:
        return SaveByHooks.of_frozen(inputs)


FEATURE = ShardFrozen

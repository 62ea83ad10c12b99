# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Inserts reductions into the joint graph of a frame, and splits the graph into a forward and a backward."""

import dataclasses
import hashlib
from typing import Any, Mapping, Optional, Protocol, Sequence, Tuple

import torch
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx import GraphModule

from deepspeed.utils import logger

from .keys import cache_key
from .reductions import donate_gradients, finish_backward_graph, insert_reductions


class Rewrite(Protocol):
    """How an optional part changes a joint graph before it is split."""

    @property
    def key(self) -> object:
        """Everything that determines the change: its arguments, and a hash of its source. Equal keys have one repr."""

    def __call__(self, joint: GraphModule) -> None: ...


class Split(Protocol):
    """How an optional part splits a joint graph."""

    @property
    def key(self) -> object:
        """As in :class:`Rewrite`."""

    def __call__(self, joint: GraphModule, joint_inputs: Sequence, **kwargs: Any) -> Tuple[GraphModule, GraphModule]:
        """Returns the forward and the backward graph, as torch's partitioners do."""


@dataclasses.dataclass(frozen=True, eq=False)
class ReduceGradPartitioner(CustomPartitionerFn):
    """Inserts the reductions, then splits the joint graph as torch would, or as an optional part does."""

    positions: Mapping[int, int]  # index of a graph's input that is reduced -> its position in the registrations
    graph_id: Optional[int]  # for the log; None if the frame reduces nothing
    release_reduce_buckets: bool  # whether the backward of this graph is the last that reduces
    debug_log: bool  # whether to log the split graphs
    rewrites: Sequence[Rewrite] = ()
    split: Optional[Split] = None
    donates: bool = False  # whether to mark gradients that the reducer may keep, because the graphs run as split

    def uuid(self) -> bytes:
        """Identifies this partitioner in the keys of torch's caches."""
        schema = str(torch.ops.deepcompile.reduce_grad.default._schema)
        positions = sorted(self.positions.items())
        how = self.release_reduce_buckets, self.donates
        parts = [rewrite.key for rewrite in self.rewrites], self.split and self.split.key
        key = cache_key(), schema, positions, how, parts
        return hashlib.sha256(repr(key).encode()).digest()

    def __call__(self, gm: GraphModule, joint_inputs: Sequence, **kwargs: Any) -> Tuple[GraphModule, GraphModule]:
        insert_reductions(gm, self.positions)
        for rewrite in self.rewrites:
            rewrite(gm)
        split = self.split or min_cut_rematerialization_partition
        forward, backward = split(gm, joint_inputs, **kwargs)
        finish_backward_graph(backward, self.release_reduce_buckets)
        if self.donates:
            donate_gradients(backward)
        if self.debug_log:
            logger.info(f"DeepCompile graph {self.graph_id}, forward:\n{forward.graph}\nbackward:\n{backward.graph}")
        return forward, backward

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Cuts a model on the host, parameter by parameter, while the ZeRO-1/2 optimizer is made.

DeepSpeed has the whole model on the device, and then its flat tensors beside it. Here each trained parameter comes to
the device by itself, from the first rank, and each rank keeps its shard. So a device has its partition and one
parameter, and the model need not fit there. The other ranks need no values: their model may be on the meta device.
"""

import functools
from typing import Any, Set

import torch
from torch.nn import Module, Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ...fixes.base.subclasses import BROADCAST_LATER
from ...zero_1_and_2.collectives import collective
from ...zero_1_and_2.layout import Layout, layouts_of
from ...zero_1_and_2.step.even_order import adopt

PURPOSE = "cut a model on the host"
# Whether a tensor has no values on any rank, or on a rank other than the first.
_NO_VALUES, _NO_VALUES_HERE = 2, 1


def give_values(module: Module, device: torch.device) -> Set[int]:
    """Takes tensors of other ranks than the first from the meta device to the host. All ranks call it.

    Buffers get the first rank's values. Parameters get memory alone, which nobody writes, so that the system does not
    provide it: their values come later, to the device. The tensors stay the same objects, which an optimizer may have.

    Returns:
        ids of the tensors that at least one rank has elsewhere than on its device. All ranks get those of the same
        tensors: a rank that broadcast a parameter which another rank keeps on the host would wait for that rank.

    Raises:
        ValueError: if the first rank has no values, or a tensor is made of others. Every rank raises it.
    """
    buffers = dict(module.named_buffers())
    tensors = {**dict(module.named_parameters()), **buffers}
    found = [[_lacks(tensor), is_elsewhere(tensor, device)] for tensor in tensors.values()]
    of_ranks = torch.tensor(found, dtype=torch.uint8, device=device).view(-1, 2)
    with collective(PURPOSE):
        dist.all_reduce(of_ranks, op=dist.ReduceOp.MAX)
    lacks, are_elsewhere = of_ranks.T.tolist()
    lacking = dict(zip(tensors, lacks, strict=True))
    for name, lack in lacking.items():
        if lack == _NO_VALUES:
            kind = "buffer" if name in buffers else "parameter"
            raise ValueError(
                f"{kind} {name} is on the meta device, so compile.shard_parameters has no values to shard; load "
                "the model on the host before deepspeed.initialize(), which cuts it there; ranks other than the first "
                "need no values, and may leave a model of plain tensors on the meta device"
            )
    for tensor in tensors.values():
        if tensor.is_meta:
            memory = torch.empty_like(tensor, device="cpu").requires_grad_(tensor.requires_grad)
            # ``data`` cannot be assigned from the host to the meta device, and torch.utils.swap_tensors() refuses
            # tensors that have weak references.
            torch._C._swap_tensor_impl(tensor, memory)
    for name, buffer in buffers.items():
        if lacking[name]:
            values = buffer.to(device).contiguous()
            with collective(PURPOSE):
                dist.broadcast(values.view(-1).view(torch.uint8), src=0)
            buffer.copy_(values)
    return {id(tensor) for tensor, elsewhere in zip(tensors.values(), are_elsewhere, strict=True) if elsewhere}


def is_elsewhere(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor is not on ``device``. From the meta device it comes to the host."""
    return ("cpu" if tensor.is_meta else tensor.device.type) != device.type


def _lacks(tensor):
    if not tensor.is_meta:
        return 0
    return _NO_VALUES if dist.get_rank() == 0 or is_traceable_wrapper_subclass(tensor) else _NO_VALUES_HERE


class _Cutting(DeepSpeedZeroOptimizer):
    """The optimizer while it is made. Its flat tensors have no memory, and this rank's partitions have their own."""

    def __init__(self, *args, **kwargs):
        self.own_partitions = {}  # number of a parameter group -> tensor, in our order
        super().__init__(*args, **kwargs)

    def flatten_dense_tensors_aligned(self, parameters, alignment, use_cpu_data=False, param_padding=None):
        # Called for one group after the other.
        group = len(self.bit16_groups_flat)
        if not any(BROADCAST_LATER in vars(parameter) for parameter in parameters):
            return super().flatten_dense_tensors_aligned(parameters, alignment, use_cpu_data, param_padding)
        process_group = self.real_dp_process_group[group]
        rank, world = dist.get_rank(process_group), dist.get_world_size(process_group)
        source, device = dist.get_global_rank(process_group, 0), torch.device(get_accelerator().current_device_name())

        def values(parameter):
            return parameter.cpu_data if use_cpu_data else parameter.data

        dtype = functools.reduce(torch.promote_types, (values(parameter).dtype for parameter in parameters))
        shapes = [values(parameter).shape for parameter in parameters]
        layout = Layout([(held, shape.numel()) for held, shape in zip(parameters, shapes, strict=True)], world, rank)
        own = self.own_partitions[group] = torch.zeros(layout.partition_numel, dtype=dtype, device=device)
        # What is read of a parameter before it is sharded is no number.
        flat = torch.full((1,), torch.nan, dtype=dtype, device=device).expand(layout.flat_numel)
        for place, shape in zip(layout.places, shapes, strict=True):
            parameter, piece = place.parameter, place.piece(rank)
            if rank == 0:
                sent = values(parameter).to(device, dtype).reshape(-1)
            else:
                sent = torch.empty(place.numel, dtype=dtype, device=device)
            with collective(PURPOSE):
                dist.broadcast(sent.view(torch.uint8), src=source, group=process_group)
            own.narrow(0, piece.offset, piece.numel).copy_(sent.narrow(0, piece.source_offset, piece.numel))
            # Before memory for the next parameter is allocated.
            del sent
            # The host's memory, too, is given back parameter by parameter.
            parameter.data = flat[:1].expand(shape)
            if use_cpu_data:
                parameter.cpu_data = parameter.data
            setattr(parameter, BROADCAST_LATER, True)
        return flat

    def get_data_parallel_partitions(self, tensor, group_id):
        partitions = super().get_data_parallel_partitions(tensor, group_id)
        if group_id in self.own_partitions:
            rank = dist.get_rank(group=self.real_dp_process_group[group_id])
            partitions[rank] = self.own_partitions[group_id]
        return partitions

    def initialize_optimizer_states(self):
        # The base makes gradients of zeros, which it drops again, except for these.
        if self.cpu_offload or isinstance(self.optimizer, torch.optim.Adagrad):
            super().initialize_optimizer_states()


def make_optimizer(module: Module, *args: Any, **kwargs: Any) -> DeepSpeedZeroOptimizer:
    """Makes a ZeRO-1/2 optimizer of a model, and cuts its parameters if they are on the host. All ranks call it."""
    optimizer = _Cutting(*args, **kwargs)
    optimizer.__class__ = DeepSpeedZeroOptimizer  # type: ignore[assignment]
    if optimizer.own_partitions:
        # A checkpoint may be loaded before the engine is compiled.
        groups = enumerate(optimizer.optimizer.param_groups)
        adopt(optimizer, layouts_of(optimizer), [index for index, group in groups if group.get("use_muon")])
    process_group, device = optimizer.dp_process_group, torch.device(get_accelerator().current_device_name())
    has = {id(parameter) for group in optimizer.bit16_groups for parameter in group}
    for parameter in module.parameters():
        if parameter.requires_grad and id(parameter) not in has and vars(parameter).pop(BROADCAST_LATER, False):
            # The caller has left it out of the optimizer, so nobody shards it.
            values = parameter.data.to(device).contiguous()
            with collective(PURPOSE):
                source = dist.get_global_rank(process_group, 0)
                dist.broadcast(values.view(-1).view(torch.uint8), src=source, group=process_group)
            parameter.data = values
    return optimizer


def is_cut(parameter: Parameter) -> bool:
    """Whether a parameter on the host is to be cut, or was cut and is not sharded yet."""
    return parameter.requires_grad and BROADCAST_LATER in vars(parameter)

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""A tensor that is made of other tensors."""

import torch
from torch.utils._pytree import tree_map_only

_AS_THEY_ARE = (torch.ops.aten.detach.default, torch.ops.aten.clone.default)


class Scaled(torch.Tensor):
    """A matrix of int8 with a scale for each row, as torchao keeps quantized weights. It has no memory of its own."""

    @staticmethod
    def __new__(cls, rows, scales):
        return torch.Tensor._make_wrapper_subclass(cls, rows.shape, dtype=scales.dtype, device=rows.device)

    def __init__(self, rows, scales):
        self.rows, self.scales = rows, scales

    @classmethod
    def of(cls, matrix):
        scales = matrix.abs().amax(1, keepdim=True) / 127
        return cls((matrix / scales).round().to(torch.int8), scales)

    def __repr__(self):
        # torch 2.11 prints tensors while it compiles. Tensor's own function would read numbers, which fakes lack.
        return f"Scaled(rows={self.rows}, scales={self.scales})"

    def __tensor_flatten__(self):
        return ["rows", "scales"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Scaled(inner["rows"], inner["scales"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args, kwargs=None):
        kwargs = dict(kwargs or {})
        moves = function is torch.ops.aten._to_copy.default and kwargs.get("dtype") in (None, args[0].dtype)
        if moves or function in _AS_THEY_ARE:
            kwargs.pop("dtype", None)
            return cls(*(function(part, **kwargs) for part in (args[0].rows, args[0].scales)))
        if function is torch.ops.aten.copy_.default:
            args[0].rows.copy_(args[1].rows)
            args[0].scales.copy_(args[1].scales)
            return args[0]
        args, kwargs = tree_map_only(cls, lambda tensor: tensor.rows * tensor.scales, (args, kwargs))
        return function(*args, **kwargs)

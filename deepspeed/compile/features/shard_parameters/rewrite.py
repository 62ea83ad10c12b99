# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Makes graphs save parameters as autograd saves tensors, with hooks."""

import dataclasses
from pathlib import Path
from typing import Sequence, Tuple

from torch._functorch._aot_autograd.descriptors import PlainAOTInput
from torch.fx import GraphModule
from torch.nn import Parameter

from ...zero_1_and_2.graph.keys import hash_of_source


@dataclasses.dataclass(frozen=True)
class SaveByHooks:
    """Makes autograd call hooks for those inputs of a frame that the backward reads.

    Torch saves without hooks what an ``autograd.Function`` in a graph has kept in another way than autograd's.

    Attributes:
        inputs: indices of the frame's inputs that are sharded between its forward and its backward.
    """

    inputs: Tuple[int, ...]

    @classmethod
    def of_parameters(cls, inputs: Sequence) -> "SaveByHooks":
        """Returns this change for the parameters among examples of a frame's inputs."""
        return cls(tuple(index for index, value in enumerate(inputs) if isinstance(value, Parameter)))

    @property
    def key(self) -> object:
        return hash_of_source(Path(__file__)), self.inputs

    def __call__(self, joint: GraphModule) -> None:
        for placeholder in joint.graph.find_nodes(op="placeholder"):
            descriptor = placeholder.meta.get("desc")
            # A part of a parameter that is made of others.
            while hasattr(descriptor, "base"):
                descriptor = descriptor.base
            if isinstance(descriptor, PlainAOTInput) and descriptor.idx in self.inputs:
                placeholder.meta.pop("saved_tensor_with_no_vc_check", None)

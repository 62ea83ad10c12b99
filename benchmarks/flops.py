# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The floating-point operations of a training step, and which part of a device's peak they are (MFU).

A token costs ``6 N + 12 L H Q T`` operations, as torchtitan counts them:

- N is the number of elements of the matrices by which a token is multiplied: the linear layers of the blocks, and the
  head; of a mixture of experts, the routers, and as many experts as a token goes to. Each element takes one
  multiplication and one addition in the forward, and twice that in the backward, for the gradient of the input and for
  that of the matrix. A frozen matrix has no gradient: its elements take 4 instead of 6. An embedding is looked up and
  takes nothing, unless its weight is the head's too.
- L layers of H heads with Q elements attend over T tokens. A head multiplies two pairs of matrices for each token in
  the forward, and four in the backward, each with Q times T multiplications and additions.

Causal attention counts as a whole, though a kernel leaves out what the mask hides, about half of it. That is
torchtitan's convention, so that these figures may be laid beside published ones. For Qwen3-8B at sequence 4096
attention is 14 % of the operations, so with half of it an MFU of 50 % would be 46.6 %.

Not counted are what is computed again (checkpointed layers, the scores in the backward of flash attention), what is
not a product of matrices (norms, rotations, softmax, loss), and the optimizer.
"""

from typing import Any

import torch

FORMULA = "6 N + 12 L H Q T"

# Name of a device, as torch has it -> dense bf16 operations a second with sums in fp32. NVIDIA's data sheets of H100
# and H200 have 1,979 TFLOP/s for the SXM modules with sparsity, which is twice the dense figure; the whitepaper
# "NVIDIA H100 Tensor Core GPU Architecture" has 989.4. Cards with other names (PCIe, NVL) have other peaks.
PEAKS = {"NVIDIA H100 80GB HBM3": 989.4e12, "NVIDIA H200": 989.4e12}


def per_token(model: torch.nn.Module, seq: int) -> int:
    """Returns the operations of forward and backward for one token.

    Args:
        model: a decoder of transformers, not yet sharded: its parameters have their whole shapes.
        seq: tokens in a sequence.
    """
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    config: Any = model.config
    # Weights of all experts, [experts, out, in], of which each token takes a few, and the router's.
    experts = [parameter for parameter in model.parameters() if parameter.dim() == 3]
    routers = [module.weight for module in model.modules() if type(module).__name__.endswith("Router")]
    # A quantized weight has another shape than its matrix.
    sizes = [(layer.weight.requires_grad, layer.in_features * layer.out_features) for layer in linear]
    sizes += [(weight.requires_grad, weight[0].numel() * config.num_experts_per_tok) for weight in experts]
    sizes += [(weight.requires_grad, weight.numel()) for weight in routers]
    matrices = sum((6 if is_trained else 4) * size for is_trained, size in sizes)
    return matrices + 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * seq


def peak(device: str, dtype: str) -> float | None:
    """Returns the operations a second that a device can do in "bf16", or None where that is not known."""
    return PEAKS.get(device) if dtype == "bf16" else None


def mfu(a_second: float, device: str, dtype: str) -> float | None:
    """Returns which part of the device's peak so many operations a second are, or None where that is not known."""
    most = peak(device, dtype)
    return most and a_second / most

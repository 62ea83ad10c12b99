# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Computes logits and their cross-entropy so that the gradient of the logits never exists as a whole.

The backward goes over chunks of the vocabulary. For each chunk it computes the gradient of the logits, and from that
the chunk's rows of the head's gradient and a summand of the hidden states' gradient. Then it drops the chunk. The
matrix multiplications are those without chunks, cut along the vocabulary:

- The rows of the head's gradient are complete when their chunk is done: each is one product over all tokens. With
  chunks of tokens, the head's gradient would be a sum over chunks, rounded to its dtype after each chunk.
- The gradient of the hidden states is a sum over chunks. It is small, so it is summed in fp32.

This autograd function runs outside of compiled graphs, because only the order of calls bounds the memory: a compiler
may move chunks, or compute several at once. Autograd passes None for the gradient of unused logits, so no zeros are
allocated for it.
"""

from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch.nn.functional import linear

from ...zero_1_and_2.graph.parameter_numbers import ParameterNumbers

# The most elements of the logits' gradient that exist at a time: 128 MiB in bf16. A chunk of this size still fills a
# GPU.
CHUNK_LOGITS = 2**26
# Chunks begin at multiples of so many rows of the head, which suits matrix multiplications on GPUs.
ALIGNED_ROWS = 128


class LossOfLogits(NamedTuple):
    """How a model's loss depends on the output ``made`` of its head."""

    ignore_index: int  # the target of tokens that do not count
    mean: bool  # whether the loss is the mean over the tokens that count, instead of their sum
    dtype: torch.dtype
    # The indices by which the model drops tokens before the loss, one after the other. Each is a tuple of slices and
    # ``...`` that keeps the last dimension, the vocabulary.
    kept: Sequence[Tuple] = ()
    # scale, cap: the logits are ``scale * made``, or with a cap ``cap * tanh(scale * made)``.
    scale: float = 1.0
    cap: Optional[float] = None


class ChunkedLoss:
    """Replaces the head and the cross-entropy in a model's graph.

    Args:
        loss: how the loss depends on the logits.
        reduced: for the head's weight and its bias, whether the backward reduces the gradient itself. Otherwise
            autograd gets the gradient.
        compile_part: compiles a function of tensors.
    """

    def __init__(
        self,
        loss: LossOfLogits,
        reduced: Sequence[bool],
        numbers: ParameterNumbers,
        compile_part: Callable[[Callable], Callable],
    ):
        self._loss, self._reduced, self._numbers = loss, reduced, numbers
        self._sum_losses, self.gradient_of_logits = compile_part(_sum_losses), compile_part(_gradient_of_logits)
        self.scale, self.scale_back = None, None
        if (loss.scale, loss.cap) != (1.0, None):
            self.scale, self.scale_back = map(compile_part, _scaling(loss.scale, loss.cap))

    def loss_and_logits(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor], target: torch.Tensor
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """Returns the loss, a tensor [], and the logits [..., V].

        Args:
            hidden: the head's input [..., H].
            weight: the head's weight [V, H].
            bias: the head's bias [V], or None.
            target: token ids, int64, one for each token that the model's loss sees.
        """
        target = self._target_of_every_token(target, hidden.shape[:-1])
        parameters = [value for value, reduced in zip((weight, bias), self._reduced) if reduced]
        registrations = self._numbers.tensor_for(parameters) if parameters else None
        return _HeadAndLoss.apply(hidden, weight, bias, target, registrations, self)

    def _target_of_every_token(self, target, shape):
        if not self._loss.kept:
            return target
        every = target.new_full((*shape, 1), self._loss.ignore_index)
        seen = every
        for index in self._loss.kept:
            seen = seen[index]
        seen.copy_(target.view(seen.shape))
        return every.view(-1)

    def compute(self, logits: torch.Tensor, target: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the loss, the log-sum-exp of each token's logits, and the loss's derivative by each token's loss.

        Args:
            logits: [N, V].
            target: int64 [N].
        """
        counts = target != self._loss.ignore_index
        logsumexp, total = self._sum_losses(logits, torch.where(counts, target, 0), counts)
        weights = counts.float()
        if self._loss.mean:
            number = counts.sum()
            # If no token counts, the loss is NaN and all gradients are zero, as in torch.
            total, weights = total / number, weights / number.clamp(min=1)
        return total.to(self._loss.dtype), logsumexp, weights

    def reduce(self, gradients: List[Optional[torch.Tensor]], registrations: Optional[torch.Tensor]) -> None:
        """Reduces the gradients of the weight and the bias that autograd does not get, and sets them to None."""
        position = 0
        for index, reduced in enumerate(self._reduced):
            position += reduced
            if reduced and gradients[index] is not None:
                # Nothing else refers to the gradient's memory, so the reducer may keep it.
                torch.ops.deepcompile.reduce_grad(gradients[index], registrations, position, True)
                gradients[index] = None


class _HeadAndLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, target, registrations, chunked):
        logits = linear(hidden, weight, bias)
        if chunked.scale is not None:
            chunked.scale(logits)
        loss, logsumexp, weights = chunked.compute(logits.view(-1, weight.size(0)), target)
        ctx.save_for_backward(hidden, weight, logits, target, logsumexp, weights)
        ctx.registrations, ctx.chunked = registrations, chunked
        # The gradient of an output that the caller does not use is None.
        ctx.set_materialize_grads(False)
        return loss, logits

    @staticmethod
    def backward(ctx, grad_loss, grad_logits):
        return *_Gradients.apply(ctx, grad_loss, grad_logits, *ctx.saved_tensors), None, None, None


class _Gradients(torch.autograd.Function):
    """The backward of :class:`_HeadAndLoss`. A function of its own, so that a second derivative raises."""

    @staticmethod
    def forward(_, ctx, grad_loss, grad_logits, hidden, weight, logits, target, logsumexp, weights):
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        tokens, vocabulary = hidden.reshape(-1, hidden.size(-1)), weight.size(0)
        logits = logits.view(-1, vocabulary)
        # A token that does not count has no gradient, also where the caller divides by a count of zero and the loss's
        # gradient is not finite: a product of zero and infinity would make all gradients NaN.
        weights = (
            torch.zeros_like(weights)
            if grad_loss is None
            else torch.where(weights == 0, 0, weights * grad_loss.float())
        )
        grad_tokens = torch.zeros_like(tokens, dtype=torch.float32) if needs_hidden else None
        grad_weight: Any = weight.new_empty(weight.shape) if needs_weight else None
        grad_bias: Any = weight.new_empty(vocabulary) if needs_bias else None
        for rows in chunks(len(tokens), vocabulary):
            gradient = ctx.chunked.gradient_of_logits(logits[:, rows], logsumexp, target - rows.start, weights)
            if grad_logits is not None:
                gradient += grad_logits.reshape(-1, vocabulary)[:, rows]
            if ctx.chunked.scale_back is not None:
                ctx.chunked.scale_back(gradient, logits[:, rows])
            if needs_hidden:
                _add_product(grad_tokens, gradient, weight[rows])
            if needs_weight:
                torch.mm(gradient.t(), tokens, out=grad_weight[rows])
            if needs_bias:
                torch.sum(gradient, 0, out=grad_bias[rows])
            # Drop the chunk before the next one is made.
            del gradient
        grad_hidden = grad_tokens.to(hidden.dtype).view(hidden.shape) if needs_hidden else None
        grad_parameters = [grad_weight, grad_bias]
        del grad_tokens, grad_weight, grad_bias
        ctx.chunked.reduce(grad_parameters, ctx.registrations)
        return grad_hidden, *grad_parameters

    @staticmethod
    def backward(_, *gradients):
        raise RuntimeError("double backward is not supported by DeepCompile's loss in chunks, nor by torch.compile")


def _scaling(scale, cap):
    """Returns two functions that work in place, forward and backward.

    The first turns the head's output into logits. The second turns the gradient of the logits into that of the head's
    output. It reads only the logits, so the head's output is not kept.
    """

    def scale_forward(made):
        values = made.float() * scale
        made.copy_(values if cap is None else cap * values.tanh())

    def scale_back(gradient, logits):
        slope = scale
        if cap is not None:
            # A logit near the cap may have been rounded to more than the cap.
            slope = scale * cap * (1 - (logits.float() / cap).square()).clamp(min=0)
        gradient.copy_(gradient.float() * slope)

    return scale_forward, scale_back


def _add_product(total, left, right):
    """Adds a matrix product to ``total``, fp32, without rounding the product to the dtype of its operands."""
    if total.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def chunks(tokens: int, vocabulary: int) -> List[slice]:
    """Cuts the vocabulary into chunks of about the same size, which have no more than ``CHUNK_LOGITS`` logits.

    A chunk has at least ``ALIGNED_ROWS`` rows of the head, however many tokens there are.
    """
    most = max(CHUNK_LOGITS // max(tokens, 1) // ALIGNED_ROWS, 1)
    groups = -(-vocabulary // ALIGNED_ROWS)
    number = -(-groups // most)
    rows = -(-groups // number) * ALIGNED_ROWS
    return [slice(first, min(first + rows, vocabulary)) for first in range(0, vocabulary, rows)]


def _sum_losses(logits, target, counts):
    """Returns the log-sum-exp of each token's logits, fp32 [N], and the sum of the losses of tokens that count."""
    values = logits.float()
    logsumexp = torch.logsumexp(values, -1)
    losses = logsumexp - values.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return logsumexp, torch.where(counts, losses, 0).sum()


def _gradient_of_logits(logits, logsumexp, target, weights):
    """Returns the gradient of a chunk of the logits [N, C], in their dtype.

    ``target`` counts from the chunk's first row of the head, and may lie outside of the chunk.
    """
    probabilities = (logits.float() - logsumexp.unsqueeze(-1)).exp()
    is_target = torch.arange(logits.size(-1), device=logits.device) == target.unsqueeze(-1)
    return ((probabilities - is_target.float()) * weights.unsqueeze(-1)).to(logits.dtype)

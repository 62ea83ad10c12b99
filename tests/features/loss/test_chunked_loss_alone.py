# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The loss in chunks, by itself: its numbers, what it refuses, and in which graphs it is found."""

import functools
from typing import NamedTuple, Optional
from unittest import mock

import pytest
import torch
from torch.nn.functional import cross_entropy, linear

from deepspeed.compile.features.loss import find_loss
from deepspeed.compile.features.loss.chunked_loss import CHUNK_LOGITS, ChunkedLoss, LossOfLogits, chunks
from deepspeed.compile.zero_1_and_2.graph.parameter_numbers import ParameterNumbers

from support.beside import warnings_logged
from support.chunked_loss import small_chunks
from support.ids import vary
from support.training import BOUND, relative_error

TOKENS, HIDDEN, VOCABULARY, IGNORED = 48, 16, 200, -100


class Operands(NamedTuple):
    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    target: torch.Tensor


def operands(dtype=torch.float32, ignore_all=False):
    torch.manual_seed(0)
    target = torch.randint(0, VOCABULARY, (TOKENS,))
    target[:: 1 if ignore_all else 5] = IGNORED
    shapes = (2, TOKENS // 2, HIDDEN), (VOCABULARY, HIDDEN), (VOCABULARY,)
    return Operands(*(torch.randn(shape).to(dtype).requires_grad_() for shape in shapes), target)


def whole(of, mean=True, times=1.0, cap=None):
    """What a model does without chunks."""
    logits = linear(of.hidden, of.weight, of.bias) * times
    logits = logits if cap is None else logits.tanh() * cap
    loss = cross_entropy(logits.float().view(-1, VOCABULARY), of.target, reduction="mean" if mean else "sum")
    return loss, logits


def chunked(of, mean=True, times=1.0, cap=None):
    loss_of = LossOfLogits(IGNORED, mean, torch.float32, scale=times, cap=cap)
    loss = ChunkedLoss(loss_of, (False, False), ParameterNumbers(0, ()), lambda part: part)
    return loss.loss_and_logits(*of)


def gradients(of, compute, mean=True, scale=1.0, step_loss=lambda loss, logits: loss):
    """Returns the loss and the gradients, divided by the scale, in fp64."""
    loss, logits = compute(of, mean)
    found = torch.autograd.grad(step_loss(loss, logits) * scale, of[:3])
    return loss.detach(), [gradient.double() / scale for gradient in found]


@pytest.mark.quick
@vary("mean", [True, False])
@vary("logits", [{}, {"times": 0.5}, {"times": 0.25, "cap": 4.0}, {"times": 4 / 33.2, "cap": 33.2}])
@vary("dtype, scale", [("float32", 1.0), ("bfloat16", 1.0), ("float16", 256.0)])
def test_gradients_of_chunks_are_as_exact_as_those_of_one_piece(dtype, scale, logits, mean):
    """Sums over chunks would be rounded more often, or a scale or cap of logits be left out of their gradients."""
    in_one_piece, in_chunks = functools.partial(whole, **logits), functools.partial(chunked, **logits)
    of = operands(getattr(torch, dtype))
    exact = Operands(*(value.detach().double().requires_grad_() for value in of[:3]), of.target)
    expected_loss, expected = gradients(exact, in_one_piece, mean)
    with small_chunks(numel=TOKENS * 16):
        loss, found = gradients(of, in_chunks, mean, scale)
        _, today = gradients(of, in_one_piece, mean, scale)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-5 if dtype == "float32" else 1e-2)
    for one, other, exact_one in zip(found, today, expected, strict=True):
        bound = 1.5 * relative_error([other], [exact_one])
        assert relative_error([one], [exact_one]) < max(bound, BOUND), dtype


def test_without_a_token_that_counts():
    """A batch whose tokens are all ignored would give gradients, or a loss that is no NaN where torch's is."""
    of = operands(ignore_all=True)
    for mean in (True, False):
        (loss, found), (expected_loss, expected) = gradients(of, chunked, mean), gradients(of, whole, mean)
        assert torch.equal(loss, expected_loss) or (loss.isnan() and expected_loss.isnan())
        assert relative_error(found, expected) == 0


def test_logits_that_the_caller_uses():
    """The gradient of logits that the caller uses too would be dropped, or the loss's be added without it."""
    of = operands()
    losses = [lambda loss, logits: loss + logits.square().mean(), lambda loss, logits: logits.exp().sum()]
    for step_loss in losses:
        with small_chunks(numel=TOKENS * 16):
            _, found = gradients(of, chunked, step_loss=step_loss)
        _, expected = gradients(of, whole, step_loss=step_loss)
        assert relative_error(found, expected) < BOUND


def test_what_would_be_wrong_raises():
    """Logits that the caller changed, or a second derivative, would give wrong gradients in silence."""
    of = operands()
    loss, logits = chunked(of)
    with torch.no_grad():
        logits.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    loss, _ = chunked(of)
    (of_hidden,) = torch.autograd.grad(loss, of.hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        of_hidden.sum().backward()


def test_chunks_are_aligned_and_complete():
    """A row of the head would belong to no chunk or to two, or a chunk be larger than memory is meant for."""
    for tokens, vocabulary in ((16384, 151936), (4096, 151936), (2**30, 1000), (1, 50257)):
        found = chunks(tokens, vocabulary)
        assert [rows.start for rows in found] == [0, *(rows.stop for rows in found[:-1])]
        assert found[-1].stop == vocabulary
        assert all(rows.start % 128 == 0 for rows in found)
        assert all(
            (rows.stop - rows.start) * tokens <= CHUNK_LOGITS or rows.stop - rows.start <= 128 for rows in found
        )


# What is found ------------------------------------------------------------------------------------------------------


class Head(torch.nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.head, self.loss = torch.nn.Linear(HIDDEN, VOCABULARY), loss

    def forward(self, hidden, target, *more):
        return self.loss(self, hidden, target, *more)


def as_transformers(self, hidden, target):
    logits = self.head(hidden[:, slice(0, None), :])
    target = torch.nn.functional.pad(target, (0, 1), value=IGNORED)[..., 1:].contiguous()
    return cross_entropy(logits.float().view(-1, VOCABULARY), target.view(-1)) / 3, logits


def slices_logits(self, hidden, target):
    logits = self.head(hidden)
    kept = logits[..., :-1, :].contiguous()
    return torch.nn.CrossEntropyLoss()(kept.view(-1, VOCABULARY), target[..., 1:].reshape(-1)), logits


def takes_all_logits(self, hidden, target):
    logits = self.head(hidden)
    return cross_entropy(logits[()].view(-1, VOCABULARY), target.view(-1)), logits


def returns_float_logits(self, hidden, target):
    logits = self.head(hidden).float()
    return cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum"), logits


def with_small_loss(self, hidden, target, smoothing=0.0):
    logits = self.head(hidden)
    small = linear(hidden[:, 0], self.head.weight[:4])
    loss = cross_entropy(logits.view(-1, VOCABULARY), target.view(-1))
    return loss + cross_entropy(small, target[:, 0] % 4, label_smoothing=smoothing), logits


def with_small_loss_that_does_not_fit(self, hidden, target):
    return with_small_loss(self, hidden, target, smoothing=0.1)


def with_large_loss_that_does_not_fit(self, hidden, target):
    logits = self.head(hidden)
    small = linear(hidden[:, :4], self.head.weight[:64])
    loss = cross_entropy(logits.view(-1, VOCABULARY), target.view(-1), label_smoothing=0.1)
    return loss + cross_entropy(small.flatten(0, 1), target[:, :4].flatten() % 64), logits


def ignores(self, hidden, target, ignored):
    logits = self.head(hidden)
    return cross_entropy(logits.view(-1, VOCABULARY), target.view(-1), ignore_index=ignored), logits


def scales(self, hidden, target):
    logits = self.head(hidden) / 2 * 3
    return cross_entropy(logits.view(-1, VOCABULARY), target.view(-1)), logits


def caps(self, hidden, target):
    logits = 3 * torch.tanh(self.head(hidden) / 3)
    return cross_entropy(logits[..., :-1, :].reshape(-1, VOCABULARY), target[:, 1:].reshape(-1)), logits


def caps_without_scale(self, hidden, target):
    logits = self.head(hidden).tanh()
    return cross_entropy(logits.float().view(-1, VOCABULARY), target.view(-1)), logits


def scales_by_a_tensor(self, hidden, target):
    logits = self.head(hidden) * self.head.bias.exp()
    return cross_entropy(logits.view(-1, VOCABULARY), target.view(-1)), logits


def scales_later(self, hidden, target):
    logits = self.head(hidden).flatten(0, 1) * 2
    return cross_entropy(logits, target.view(-1)), logits


def caps_twice(self, hidden, target):
    logits = self.head(hidden).tanh().tanh()
    return cross_entropy(logits.view(-1, VOCABULARY), target.view(-1)), logits


def scales_what_it_returns(self, hidden, target):
    made = self.head(hidden)
    return cross_entropy((made * 2).view(-1, VOCABULARY), target.view(-1)), made


def smooths(self, hidden, target):
    logits = self.head(hidden)
    return cross_entropy(logits.view(-1, VOCABULARY), target.view(-1), label_smoothing=0.1), logits


def weighs(self, hidden, target):
    logits = self.head(hidden)
    return cross_entropy(logits.view(-1, VOCABULARY), target.view(-1), torch.ones(VOCABULARY)), logits


def moves_the_vocabulary(self, hidden, target):
    logits = self.head(hidden)
    return cross_entropy(logits.view(-1, VOCABULARY // 2), target.repeat(1, 2).view(-1) // 2), logits


def selects_tokens(self, hidden, target):
    logits = self.head(hidden)
    return cross_entropy(logits[target != IGNORED], target[target != IGNORED]), logits


def uses_parameters_after(self, hidden, target):
    logits = self.head(hidden)
    return cross_entropy(logits.view(-1, VOCABULARY), target.view(-1)) + (logits @ self.head.weight).mean(), logits


def changes_logits(self, hidden, target):
    logits = self.head(hidden)
    loss = cross_entropy(logits.view(-1, VOCABULARY), target.view(-1))
    return loss, logits.mul_(2)


def targets_of_logits(self, hidden, target):
    logits = self.head(hidden)
    return cross_entropy(logits.view(-1, VOCABULARY), logits.argmax(-1).view(-1)), logits


def takes_positions(self, hidden, target):
    logits = self.head(hidden)
    return cross_entropy(logits.transpose(1, 2), target), logits


def counts_in_place(self, hidden, target):
    logits = self.head(hidden)
    number = (target != IGNORED).sum()
    number.add_(1)
    return cross_entropy(logits.view(-1, VOCABULARY), target.view(-1)) / number, logits


def computes_its_own(self, hidden, target):
    logits = self.head(hidden)
    return -logits.float().log_softmax(-1).gather(-1, target.unsqueeze(-1)).mean(), logits


class Compiled(NamedTuple):
    outcome: tuple  # loss, logits, and the gradients of the head
    found: int  # how many graphs have a loss in chunks
    chunks: list  # how many each backward had
    warnings: list


def run(loss, wanted: Optional[bool] = True, compiled=True, calls=((), ())):
    """Computes a loss of a head and its gradients, once for each of ``calls``, which lists further arguments."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Head(loss)
    numbers = ParameterNumbers(0, module.parameters())
    losses = find_loss.ChunkedLosses(wanted)
    hidden, target = torch.randn(2, 8, HIDDEN), torch.randint(0, VOCABULARY, (2, 8))

    def backend(gm, inputs):
        # There is no engine that could reduce.
        make = find_loss.ChunkedLoss
        unreduced = lambda found, _, *more: make(found, (False, False), *more)  # noqa: E731
        with mock.patch.object(find_loss, "ChunkedLoss", unreduced):
            return losses.cut_out(gm, inputs, numbers, lambda part: part) or gm

    with small_chunks(numel=256) as seen, warnings_logged() as warnings:
        for more in calls:
            found, logits = (torch.compile(module, backend=backend) if compiled else module)(hidden, target, *more)
            torch.autograd.backward([found, logits], [torch.ones(()), torch.ones_like(logits)])
    outcome = found.detach(), logits.detach(), *(parameter.grad for parameter in module.parameters())
    warnings = [text for text in warnings if "chunked_loss" in text]
    return Compiled(outcome, len(seen.graphs), seen.chunks, warnings)


@vary(
    "loss", [as_transformers, slices_logits, takes_all_logits, returns_float_logits, scales, caps, caps_without_scale]
)
def test_losses_that_are_found(loss):
    """A way in which models write their loss would not be found, so that its logits have a whole gradient."""
    result = run(loss)
    assert (result.found, result.warnings) == (1, [])
    assert relative_error(result.outcome, run(loss, compiled=False).outcome) < BOUND


@pytest.mark.options("compile.chunked_loss")
@vary(
    "loss, why",
    [
        (scales_by_a_tensor, "`mul` is called between"),
        (caps_twice, "`tanh` is called between"),
        (scales_later, "`flatten` is called before its logits are scaled"),
        (scales_what_it_returns, "the head's output is also used unscaled"),
        (smooths, "smoothed labels"),
        (weighs, "has weights"),
        (moves_the_vocabulary, "changes the vocabulary"),
        (selects_tokens, "apart from one another"),
        (uses_parameters_after, "parameters are used after its head"),
        (changes_logits, "changed in place"),
        (targets_of_logits, "targets of its cross_entropy depend"),
        (takes_positions, "not one of logits [tokens, vocabulary]"),
        (counts_in_place, "something is changed in place"),
    ],
    expects="why",
)
def test_losses_that_are_not_found(loss, why):
    """A loss that chunks compute otherwise would be taken, or the user not be told why it is not."""
    result = run(loss)
    assert result.found == 0
    # Once, although the graph is found wanting in each compilation.
    assert len(result.warnings) == 1 and why in result.warnings[0], result.warnings
    assert run(loss, wanted=None).warnings == [], "nobody asked for chunks"


@vary("loss", [with_small_loss, with_small_loss_that_does_not_fit])
def test_of_several_losses_the_one_with_the_most_logits_is_in_chunks(loss):
    """The first loss of a graph would be in chunks, and a larger one behind it in one piece."""
    result = run(loss)
    assert result.found == 1 and min(result.chunks) > 1
    assert ["smoothed labels" in text for text in result.warnings] == [True] * ("not_fit" in loss.__name__)
    assert relative_error(result.outcome, run(loss, compiled=False).outcome) < BOUND


def test_a_warning_tells_of_a_loss_beside_one_in_chunks():
    """A small loss in chunks would hide that the large one is in one piece."""
    result = run(with_large_loss_that_does_not_fit)
    assert result.found == 1 and len(result.warnings) == 1 and "smoothed labels" in result.warnings[0]


def test_a_cap_that_the_dtype_rounds():
    """A token whose logits are all at the cap has no gradient, though bf16 rounds 33.2 to more."""
    hidden, weight = torch.full((1, 1, 8), 9.0), torch.full((VOCABULARY, 8), 9.0)
    of = Operands(*(value.bfloat16().requires_grad_() for value in (hidden, weight, weight[:, 0])), torch.tensor([3]))
    for compute in (whole, chunked):
        _, found = gradients(of, functools.partial(compute, times=1 / 33.2, cap=33.2))
        assert all(gradient.count_nonzero() == 0 for gradient in found)


def test_an_ignored_token_that_changes():
    """A graph would ignore the token that was ignored when it was made."""
    calls = [(5,), (6,)]
    result = run(ignores, calls=calls)
    assert result.found == 1, "only the graph that torch makes when it has seen one number"
    assert len(result.warnings) == 1 and "ignore_index" in result.warnings[0]
    assert relative_error(result.outcome, run(ignores, compiled=False, calls=calls).outcome) < BOUND


def test_few_logits_and_no_option():
    """Without the option many logits would not be in chunks, or with ``false`` they would."""
    assert run(as_transformers, wanted=None).found == 1
    assert run(as_transformers, wanted=False).found == 0
    assert run(computes_its_own).found == 0


@pytest.mark.quick
def test_a_sum_divided_by_a_count_of_zero():
    """On a rank without a token that counts, all gradients would be NaN: zero times the loss's infinite derivative."""
    for compute in (whole, chunked):
        of = operands(ignore_all=True)
        _, found = gradients(of, compute, mean=False, step_loss=lambda loss, _: loss / torch.zeros(()))
        assert all(gradient.eq(0).all() for gradient in found)

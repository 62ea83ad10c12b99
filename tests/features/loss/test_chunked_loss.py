# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Losses computed in chunks of logits: the same gradients, right logits, and never a whole gradient of the logits."""

from typing import List, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from support.architectures import ARCHITECTURES
from support.beside import Beside, Outcome, warnings_logged
from support.chunked_loss import profiled_backward, small_chunks
from support.ids import vary
from support.models import VOCABULARY, BlocksWithin, FillsPartition
from support.on_ranks import on_ranks
from support.options import ALSO_WARNED
from support.training import BOUND, Case, batch, device, make_engine, total_error

ON = {"compile": {"chunked_loss": True}}
WHOLE = {"compile": {"chunked_loss": True, "regional_compilation": False}}


def make(name):
    torch.manual_seed(0)
    return ARCHITECTURES[name].make().train()


def rows_of(name, step, micro_step=0, rows=2):
    inputs = ARCHITECTURES[name].batch(100 * step + 10 * micro_step + dist.get_rank(), rows)
    return {key: value.to(device()) for key, value in inputs.items()}


def check_in_chunks(name, case, prepare=None, rows=(2, 2), **more):
    """Trains in chunks beside a plain loop, a step with each of so many rows."""
    module = make(name)
    if prepare:
        prepare(module)
    with small_chunks() as seen:
        pair = Beside(module, case)
        for step, number in enumerate(rows):
            for micro_step in range(case.accumulation):
                inputs = {**rows_of(name, step, micro_step, number), **more}
                outputs, expected = pair.engine(**inputs), pair.plain(**inputs)
                pair.engine.backward(outputs.loss)
                pair.engine.step()
                (expected.loss / case.accumulation).backward()
            pair.step_plain()
    result = pair.end()
    assert result.total_error < BOUND and result.moved > 1e-3 and result.held == 0, result
    assert total_error([outputs.logits], [expected.logits]) < BOUND
    assert total_error([outputs.loss], [expected.loss]) < BOUND
    # Graphs, and the chunks of each backward.
    assert seen.graphs and seen.chunks and min(seen.chunks) > 1


@pytest.mark.options("compile.chunked_loss")
@vary("name", ["Qwen3", "Gemma2", "OPT", "Phi", "Cohere"])
@vary("config", [ON], slow=[WHOLE])
@vary(
    "stage, backend, rows",
    [pytest.param(1, "inductor", (2, 2, 3, 3), marks=pytest.mark.slow), (2, "eager", (2, 2))],
    expects="rows",
)
@on_ranks(1)
def test_in_chunks_it_trains_as_a_plain_loop(stage, backend, rows, config, name):
    """The loss of a model of transformers would not be found, or its head be given the gradient of one chunk."""
    pytest.importorskip("transformers")
    check_in_chunks(name, Case(stage=stage, backend=backend, config=config, bucket=20000), rows=rows)


def freeze_head(model):
    model.get_output_embeddings().requires_grad_(False)


def train_the_head_alone(model):
    model.requires_grad_(False)
    model.get_output_embeddings().requires_grad_(True)


def checkpoint(model):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


@vary("prepare", [freeze_head, train_the_head_alone, checkpoint])
@vary("config", [ON, WHOLE])
@on_ranks(1)
def test_in_chunks_with_a_model(config, prepare):
    """Where the head or the hidden states train not, a gradient of the loss would be computed or waited for."""
    pytest.importorskip("transformers")
    check_in_chunks("Qwen3", Case(config=config, bucket=20000), prepare=prepare)


class Smooths(BlocksWithin):
    """Its loss is not one that chunks compute."""

    def forward(self, ids):
        return cross_entropy(self.head(self.body(ids)).flatten(0, 1), ids.flatten(), label_smoothing=0.1)


class OwnModel(NamedTuple):
    chunked: int  # graphs whose loss is computed in chunks
    outcome: Outcome
    warnings: List[str]  # of the option


def train_own(model, case):
    """Trains one of our models, whose vocabulary makes two chunks, beside a plain loop."""
    with small_chunks(numel=128) as seen, warnings_logged() as warnings:
        pair = Beside(model(), case)
        for step in range(4):
            pair.step(batch(step, 0, dist.get_rank(), 4))
    assert pair.engine.skipped_steps == 0
    return OwnModel(len(seen.graphs), pair.end(), [text for text in warnings if "chunked_loss" in text])


@vary("stage", [1, 2])
@vary("backend", ["eager"], slow=["inductor"])
@on_ranks(1)
def test_in_chunks_with_accumulation_and_a_given_number_of_items(stage, backend):
    """The sum of losses that a trainer divides by its number of items would be divided by that of the tokens."""
    pytest.importorskip("transformers")
    case = Case(stage=stage, backend=backend, accumulation=2, config=ON, bucket=20000)
    check_in_chunks("Phi", case, num_items_in_batch=torch.tensor(7))


@vary("dtype", ["bf16", "fp16"])
def test_in_chunks_low_precision_is_as_close_to_fp32_as_in_one_piece(ranks, dtype):
    """A scaled loss in fp16 would overflow in a chunk, or a sum over chunks in bf16 be rounded with each of them."""
    cases = [Case(dtype=dtype, config={"compile": {"chunked_loss": wanted}}) for wanted in (True, False)]
    # On two ranks, between which the head's gradient is cut.
    (on, _), (off, _) = (ranks(2).run(train_own, BlocksWithin, case) for case in cases)
    assert on.chunked > 0 and off.chunked == 0
    error, bound = (result.outcome.total_error / result.outcome.moved for result in (on, off))
    assert 0 < error < 1.2 * bound < 0.1


@on_ranks(2)
def test_a_loss_that_does_not_fit_stays_in_one_piece():
    """A loss that chunks cannot compute would be computed in chunks all the same, or each rank tell of it."""
    result = train_own(Smooths, Case(config=ON))
    said = [f"[Rank 0] {ALSO_WARNED['compile.chunked_loss']}"]
    assert result.warnings == (said if dist.get_rank() == 0 else [])
    assert result.chunked == 0 and result.outcome.error < BOUND


class WithoutLoss(BlocksWithin):
    """Its caller computes the loss."""

    def forward(self, ids):
        return self.head(self.body(ids))


class UncompiledLoss(BlocksWithin):
    """Only its blocks are compiled."""

    @torch.compiler.disable(recursive=False)
    def forward(self, ids):
        return cross_entropy(self.head(self.body(ids)).flatten(0, 1), ids.flatten())


LOSS_NOT_SEEN = (
    "because no compiled graph outside of blocks calls torch.nn.functional.cross_entropy; call it in the model's "
    "forward, in code that is compiled, or leave the option out"
)
SWITCHED_OFF = "because torch.compile is switched off by compile_kwargs['disable'] or TORCH_COMPILE_DISABLE"


@pytest.mark.follows("call it in the model's forward, in code that is compiled, or leave the option out")
@vary(
    "model, chunked_loss, compile_kwargs, why",
    [
        (WithoutLoss, True, {}, LOSS_NOT_SEEN),
        (UncompiledLoss, True, {}, LOSS_NOT_SEEN),
        (BlocksWithin, True, {"disable": True}, SWITCHED_OFF),
        # As is advised.
        (BlocksWithin, True, {}, None),
        (WithoutLoss, None, {}, None),
    ],
    expects="why",
)
@on_ranks(1)
def test_a_loss_that_no_graph_holds(model, chunked_loss, compile_kwargs, why):
    """The option would do nothing, and nobody be told."""
    config = {"compile": {"chunked_loss": chunked_loss}}
    with warnings_logged() as warnings:
        engine = make_engine(model().to(device()), Case(config=config, compile_kwargs=compile_kwargs))
        for step in range(2):
            ids = batch(step, 0, 0, 4)
            outputs = engine(ids)
            loss = cross_entropy(outputs.flatten(0, 1), ids.flatten()) if outputs.dim() else outputs
            engine.backward(loss)
            engine.step()
    engine.destroy()
    texts = [text for text in warnings if "chunked_loss" in text]
    assert len(texts) == (why is not None) and all(text.endswith(why) for text in texts), texts


@pytest.mark.options("compile.chunked_loss")
@vary("evaluates", [False], slow=[True])
@on_ranks(2)
def test_chunks_by_size(evaluates):
    """A graph that first saw few logits would never be in chunks, or a rank with few wait for one with many."""
    by_size, rank = [], dist.get_rank()
    # Only six are many logits, in the last steps on one rank only.
    with small_chunks(numel=128, many=2 * 6 * VOCABULARY) as seen:
        pair = Beside(FillsPartition(), Case())
        for step, length in enumerate((4, 4, 2, 6, 4, 6, 6 - 2 * rank, 4 + 2 * rank)):
            ids = batch(step, 0, rank, length)
            if evaluates:
                with torch.no_grad():
                    pair.engine(ids)
            pair.step(ids)
            by_size.append(len(seen.chunks))
    # Only the backwards of length six are in chunks, although one graph served other lengths before.
    assert by_size == [0, 0, 0, 1, 1, 2, 3 - rank, 3]
    assert pair.end().error < BOUND


# Memory -------------------------------------------------------------------------------------------------------------


class Memory(NamedTuple):
    logits: int  # bytes
    largest: int  # allocation of the backward
    peak: int  # of what the backward has allocated and not freed


class ManyLogits(nn.Module):
    """Its parameters and hidden states are small beside its logits, which it returns."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(512, 8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 8192, bias=False)

    def forward(self, ids):
        logits = self.head(self.norm(self.embedding(ids)))
        return cross_entropy(logits.view(-1, 8192), ids.view(-1)), logits


def memory_of_backward(backend, wanted):
    """Measures the second backward of a model with many logits, which the caller has dropped."""
    case = Case(backend=backend, config={"compile": {"chunked_loss": wanted}}, bucket=10**4)
    ids = torch.arange(512, device=device()).view(2, 256)
    with small_chunks(numel=512 * 512, rows=128):
        engine = make_engine(ManyLogits().to(device()), case)
        for _ in range(2):
            size, profiler = profiled_backward(engine, ids)
            engine.step()
    engine.destroy()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return Memory(size, max(event.nbytes() for event in events), peak)


@vary("backend", ["inductor", "eager"])
def test_the_gradient_of_logits_never_exists_as_a_whole(ranks, backend):
    """The gradients of all chunks would live at once, and take as much as that of the logits in one piece."""
    (on,), (off,) = (ranks(1).run(memory_of_backward, backend, wanted) for wanted in (True, False))
    assert off.largest >= off.logits and off.peak > off.logits
    # The largest is a chunk, of a sixteenth of the logits. The eager backend makes several tensors of this size.
    assert on.largest <= on.logits // 16 + 1024
    assert on.peak < on.logits / (4 if backend == "inductor" else 3)

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Losses computed in chunks of logits: the same gradients, right logits, and never a whole gradient of the logits."""

import copy
from typing import List, NamedTuple

import pytest
import torch
import torch.distributed as dist
from test_options_warned import ALSO_WARNED
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

from deepspeed.compile.zero12 import gradient_counters, wait_for_parameters
from deepspeed.utils import safe_get_full_fp32_param

from support.architectures import ARCHITECTURES
from support.beside import warnings_logged
from support.chunked_loss import small_chunks
from support.ids import vary
from support.training import BOUND, Case, device, held, make_engine, make_optimizer, step_plain, total_error

ON = {"compile": {"chunked_loss": True}}
WHOLE = {"compile": {"chunked_loss": True, "regional_compilation": False}}


class Trained(NamedTuple):
    chunked: int  # graphs whose loss is computed in chunks
    chunks: List[int]  # how many chunks each backward had
    from_graphs: int  # gradients that the last backward's graphs have reduced
    error: float  # of the parameters, against a plain loop
    moved: float  # how far training moved the parameters
    logits: float  # relative error of the last logits
    losses: float  # relative error of the last loss
    held: int  # bytes of gradients at the end
    warnings: List[str]  # of the option


def make(name):
    torch.manual_seed(0)
    return ARCHITECTURES[name].make().to(device()).train()


def rows_of(name, step, micro_step=0, rows=2):
    batch = ARCHITECTURES[name].batch(100 * step + 10 * micro_step + dist.get_rank(), rows)
    return {key: value.to(device()) for key, value in batch.items()}


def default_loss(outputs, step):
    return outputs.loss


def with_logits(outputs, step):
    """A loss that uses the returned logits too, in every second step only, so that one graph sees both."""
    return outputs.loss + outputs.logits.square().mean() if step % 2 else outputs.loss


def of_logits_alone(outputs, step):
    return outputs.logits.square().mean()


def train(name, case, step_loss=default_loss, prepare=None, **more):
    """Trains beside a plain loop, with other numbers of rows from the third step on."""
    torch._dynamo.reset()
    module = make(name)
    if prepare:
        prepare(module)
    plain, before = copy.deepcopy(module), copy.deepcopy(module)
    with small_chunks() as seen, warnings_logged() as warnings:
        engine = make_engine(module, case)
        optimizer = make_optimizer(plain, case)
        for step in range(4):
            for micro_step in range(case.accumulation):
                batch = {**rows_of(name, step, micro_step, rows=2 if step < 2 else 3), **more}
                outputs, expected = engine(**batch), plain(**batch)
                engine.backward(step_loss(outputs, step))
                engine.step()
                (step_loss(expected, step) / case.accumulation).backward()
            step_plain(plain, optimizer)
    wait_for_parameters(engine)
    counters = gradient_counters(engine)
    result = Trained(
        chunked=len(seen.graphs),
        chunks=seen.chunks,
        from_graphs=counters["from_graphs"],
        error=total_error(module.parameters(), plain.parameters()),
        moved=total_error(module.parameters(), before.parameters()),
        logits=total_error([outputs.logits], [expected.logits]),
        losses=total_error([outputs.loss], [expected.loss]),
        held=sum(held(counters).values()),
        warnings=[text for text in warnings if "chunked_loss" in text],
    )
    engine.destroy()
    return result


def check(results, chunked=True):
    for result in results:
        assert max(result.error, result.logits, result.losses) < BOUND, result
        assert result.moved > 1e-3 and result.held == 0, result
        assert (result.chunked > 0) is chunked, result
        assert all(number > 1 for number in result.chunks) and bool(result.chunks) is chunked, result
    return results


@pytest.mark.quick
@vary("name", ["Qwen3", "Gemma2", "OPT", "Phi", "Cohere"])
@vary("config", [ON, WHOLE])
@vary("stage, backend", [(1, "inductor"), (2, "eager")])
def test_in_chunks_it_trains_as_a_plain_loop(ranks, stage, backend, config, name):
    pytest.importorskip("transformers")
    check(ranks(2).run(train, name, Case(stage=stage, backend=backend, config=config, bucket=20000)))


@vary("step_loss", [with_logits, of_logits_alone])
@vary("name", ["Qwen3", "Gemma2", "OPT"])
@vary("stage, backend", [(2, "inductor"), (1, "eager")])
def test_returned_logits_have_gradients(ranks, stage, backend, name, step_loss):
    pytest.importorskip("transformers")
    case = Case(stage=stage, backend=backend, config=ON, bucket=20000)
    check(ranks(2).run(train, name, case, step_loss))


def freeze_head(model):
    model.get_output_embeddings().requires_grad_(False)


def train_the_head_alone(model):
    model.requires_grad_(False)
    model.get_output_embeddings().requires_grad_(True)


def checkpoint(model):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def smooth_labels(model):
    def loss(logits, labels, vocab_size, **_):
        return cross_entropy(logits.view(-1, vocab_size), labels.view(-1), label_smoothing=0.1)

    model.loss_function = loss


@vary("prepare", [freeze_head, train_the_head_alone, checkpoint])
@vary("config", [ON, WHOLE])
def test_in_chunks_with_a_model(ranks, config, prepare):
    pytest.importorskip("transformers")
    check(ranks(2).run(train, "Qwen3", Case(config=config, bucket=20000), prepare=prepare))


def test_a_loss_that_does_not_fit_stays_in_one_piece(ranks):
    pytest.importorskip("transformers")
    results = ranks(2).run(train, "Qwen3", Case(config=ON, bucket=20000), prepare=smooth_labels)
    first, other = check(results, chunked=False)
    assert first.warnings == [f"[Rank 0] {ALSO_WARNED['compile.chunked_loss']}"] and not other.warnings


@vary("stage", [1, 2])
def test_in_chunks_with_accumulation_and_a_given_number_of_items(ranks, stage):
    pytest.importorskip("transformers")
    case = Case(stage=stage, backend="inductor", accumulation=2, config=ON, bucket=20000)
    check(ranks(2).run(train, "Phi", case, num_items_in_batch=torch.tensor(7)))


@vary("dtype", ["bf16", "fp16"])
def test_in_chunks_low_precision_is_as_close_to_fp32_as_in_one_piece(ranks, dtype):
    """With a scaled loss in fp16, and more roundings of the sum over chunks than in one piece."""
    pytest.importorskip("transformers")
    for of_rank in zip(*(ranks(2).run(train_low_precision, dtype, wanted) for wanted in (True, False)), strict=True):
        (chunked, error), (in_one_piece, bound) = of_rank
        assert chunked > 0 and in_one_piece == 0
        assert 0 < error < 1.2 * bound < 0.1


def train_low_precision(dtype, wanted):
    """Returns how many graphs have losses in chunks, and the error of how far the master parameters have moved."""
    torch._dynamo.reset()
    case = Case(dtype=dtype, config={"compile": {"chunked_loss": wanted}}, bucket=20000)
    module = make("Qwen3")
    plain, before = copy.deepcopy(module), copy.deepcopy(module)
    with small_chunks() as seen:
        engine, optimizer = make_engine(module, case), make_optimizer(plain, case)
        for step in range(4):
            batch = rows_of("Qwen3", step)
            engine.backward(engine(**batch).loss)
            engine.step()
            plain(**batch).loss.backward()
            step_plain(plain, optimizer)
    assert engine.skipped_steps == 0
    masters = [safe_get_full_fp32_param(parameter) for parameter in module.parameters()]
    moved, expected = (
        [one.detach() - other.detach() for one, other in zip(trained, before.parameters())]
        for trained in (masters, plain.parameters())
    )
    engine.destroy()
    return len(seen.graphs), total_error(moved, expected)


class Sizes(NamedTuple):
    off: int  # graphs with the option off
    by_size: List[int]  # after each step, graphs by default
    error: float  # of the parameters by default


def train_by_size():
    """Trains with rows of which only three are many logits, in the last steps on one rank only, and evaluates."""
    off = train("Qwen3", Case(config={"compile": {"chunked_loss": False}})).chunked
    module = make("Qwen3")
    plain, case, found = copy.deepcopy(module), Case(), []
    length = rows_of("Qwen3", 0)["labels"].shape[1]
    with small_chunks(many=3 * length * module.config.vocab_size) as seen:
        engine = make_engine(module, case)
        optimizer = make_optimizer(plain, case)
        rank = dist.get_rank()
        for step, rows in enumerate((2, 2, 1, 3, 2, 3, 3 - rank, 2 + rank)):
            batch = rows_of("Qwen3", step, rows=rows)
            with torch.no_grad():
                engine(**batch)
            engine.backward(engine(**batch).loss)
            engine.step()
            plain(**batch).loss.backward()
            step_plain(plain, optimizer)
            found.append(len(seen.chunks))
    error = total_error(module.parameters(), plain.parameters())
    engine.destroy()
    return Sizes(off, found, error)


def test_chunks_by_size(ranks):
    pytest.importorskip("transformers")
    for rank, result in enumerate(ranks(2).run(train_by_size)):
        assert result.off == 0
        # Only the backwards of three rows are in chunks, although one graph served other numbers of rows before.
        assert result.by_size == [0, 0, 0, 1, 1, 2, 3 - rank, 3]
        assert result.error < BOUND


# Memory -------------------------------------------------------------------------------------------------------------


class Memory(NamedTuple):
    logits: int  # bytes
    largest: int  # allocation of the backward
    peak: int  # of what the backward has allocated and not freed


def memory_of_backward(backend, wanted):
    """Measures the second backward of a model with a large vocabulary, whose logits the caller has dropped."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch._dynamo.reset()
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, head_dim=8, vocab_size=8192)
    heads = dict(num_attention_heads=2, num_key_value_heads=2, use_cache=False, tie_word_embeddings=False)
    torch.manual_seed(0)
    module = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).to(device()).train()
    case = Case(backend=backend, config={"compile": {"chunked_loss": wanted}}, bucket=10**4)
    ids = torch.arange(512, device=device()).view(2, 256)
    with small_chunks(numel=512 * 512, rows=128):
        engine = make_engine(module, case)
        for _ in range(2):
            outputs = engine(input_ids=ids, labels=ids)
            loss, logits = outputs.loss, outputs.logits.nbytes
            del outputs
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
            with profile(activities=activities, profile_memory=True) as profiler:
                engine.backward(loss)
            engine.step()
    engine.destroy()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return Memory(logits, max(event.nbytes() for event in events), peak)


@pytest.mark.quick
@vary("backend", ["inductor", "eager"])
def test_the_gradient_of_logits_never_exists_as_a_whole(ranks, backend):
    pytest.importorskip("transformers")
    (on, _), (off, _) = (ranks(2).run(memory_of_backward, backend, wanted) for wanted in (True, False))
    assert off.largest >= off.logits and off.peak > off.logits
    # The largest is a chunk, of a sixteenth of the logits. The eager backend makes several tensors of this size.
    assert on.largest <= on.logits // 16 + 1024
    assert on.peak < on.logits / (4 if backend == "inductor" else 3)

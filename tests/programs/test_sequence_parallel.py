# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Sequences that lie on several ranks: DeepSpeed's Ulysses attention for models of transformers."""

import contextlib
import os
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock
from weakref import WeakSet

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.compile.fixes.base import packed_rows
from deepspeed.compile.zero_1_and_2 import gradient_counters
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import groups

from support.beside import warnings_logged
from support.front_doors import LEARNING_RATE, LENGTH, VOCABULARY, make_rows, make_tokenizer, process_as_it_was
from support.ids import vary
from support.models import qwen3_config
from support.on_ranks import on_ranks
from support.options import outcome
from support.training import device, forget_autocast

transformers = pytest.importorskip("transformers", reason="pip install -r requirements/front_doors.txt")

SLOW = pytest.mark.slow
SHARDED = {"regional_compilation": True, "shard_parameters": "all"}


def make_model(heads_of_keys, window=None, **others):
    """``window``: to how many tokens the layers but the first attend, or None."""
    torch.manual_seed(0)
    windows = {} if window is None else {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1}
    config = qwen3_config(
        VOCABULARY, num_key_value_heads=heads_of_keys, attn_implementation="sdpa", **windows, **others
    )
    return transformers.AutoModelForCausalLM.from_config(config).float().to(device()).train()


def samples(step, packed=False):
    """One sample for each rank, in which different numbers of tokens count. Of ``packed`` ones each has two texts."""
    for index, row in enumerate(make_rows(dist.get_world_size(), seed=step)):
        labels = row["labels"].clone()
        labels[: 1 + (step + 5 * index) % (LENGTH - 2)] = -100
        positions = torch.arange(LENGTH)
        if packed:
            # The second text begins in the second rank's part of the sequence.
            first = LENGTH // 2 + 1 + index % 2
            positions[first:] -= first
            labels[first] = -100
        yield {"input_ids": row["input_ids"][None], "labels": labels[None], "position_ids": positions[None]}


@contextlib.contextmanager
def attention_as_it_was():
    """Ends what Ulysses changes for the life of a process."""
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    before = functions["sdpa"]
    try:
        yield
    finally:
        functions["sdpa"] = before
        parallel_state_sp._release_sequence_parallel_groups()
        groups.mpu = None


def mean_over_ranks(engine, batch, group):
    """Returns the mean loss of a sequence's tokens, and this rank's part of it.

    The part has the gradients that transformers' Trainer gets by gathering the losses of the ranks. On gloo, torch
    cannot do the backward of such a gather if the group lacks ranks.
    """
    labels = batch.pop("shift_labels")
    loss = engine(**batch, labels=labels, shift_labels=labels, use_cache=False).loss
    counted = (labels != -100).sum()
    # A rank without tokens that count has no number for a loss.
    total = torch.stack([torch.where(counted > 0, loss.detach() * counted, 0), counted.float()])
    dist.all_reduce(total, group=group)
    mean, part = total[0] / total[1], torch.where(counted > 0, loss, 0) * counted / total[1]
    return mean.item(), part * dist.get_world_size(group)


def train(
    split, heads_of_keys, deepcompile, backend="eager", options=(), stage=1, packed=False, window=None, **config
):
    """Trains with sequences on ``split`` ranks; returns losses, parameters and the counters of gradients."""
    torch._dynamo.reset()
    forget_autocast()
    module, losses, counters = make_model(heads_of_keys, window), [], {}
    with attention_as_it_was():
        mpu = UlyssesSPAttentionHF.register_with_transformers(module, "sdpa", split, 1)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            # The ranks of a sequence go through the samples of all of them.
            "gradient_accumulation_steps": split,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
            "sequence_parallel_size": split,
            "compile": {"deepcompile": deepcompile, **dict(options)},
            **config,
        }
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)
        engine = deepspeed.initialize(model=module, config=config, optimizer=optimizer, mpu=mpu)[0]
        if deepcompile:
            engine.compile(backend=backend)
        group, rank = mpu.get_sequence_parallel_group(), mpu.get_sequence_parallel_rank()
        for step in range(3):
            own = list(samples(step, packed))[dist.get_rank()]
            for batch in UlyssesSPDataLoaderAdapter([own], rank, group, split, device()):
                inputs = {name: value.to(device()) for name, value in batch.items()}
                mean, part = mean_over_ranks(engine, inputs, group)
                engine.backward(part)
                engine.step()
                losses.append(mean)
        if deepcompile:
            counters = gradient_counters(engine)
        values = [deepspeed.utils.safe_get_full_fp32_param(parameter) for parameter in module.parameters()]
        engine.destroy()
    return losses, values, counters


def train_whole(heads_of_keys, scale, packed=False, window=None):
    """Trains on one rank with whole sequences, and with gradients that are ``scale`` times as large."""
    module = make_model(heads_of_keys, window)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)
    for step in range(3):
        optimizer.zero_grad()
        for sample in samples(step, packed):
            loss = module(**{name: value.to(device()) for name, value in sample.items()}, use_cache=False).loss
            (loss * scale / dist.get_world_size()).backward()
        optimizer.step()
    return list(module.parameters())


def difference(some, others):
    return max(float((one - other).abs().max()) for one, other in zip(some, others, strict=True))


@pytest.mark.options("sequence_parallel_size")
@pytest.mark.follows("UlyssesSPAttentionHF.register_with_transformers() returns")
@SLOW
@vary(
    "world, heads_of_keys, case",
    [
        # One head of keys for two ranks, each of which gets a copy.
        (2, 1, {"stage": 1}),
        (2, 2, {"stage": 2, "options": SHARDED}),
        (2, 2, {"stage": 1, "backend": "inductor"}),
        (4, 2, {"stage": 1}),
        (4, 2, {"stage": 2}),
        (4, 1, {"stage": 2, "options": SHARDED}),
    ],
)
@on_ranks("world")
def test_sequences_lie_on_two_ranks(world, heads_of_keys, case):
    """Gradients divided by all ranks, not by the number of sequences, would be half as large."""
    losses, values, counters = train(2, heads_of_keys, deepcompile=True, **case)
    losses_off, off, _ = train(2, heads_of_keys, deepcompile=False, **{**case, "options": ()})
    # Each rank's gather of the losses adds up gradients, which DeepSpeed does not divide by the ranks of a sequence.
    whole = train_whole(heads_of_keys, scale=2)
    assert difference(values, off) < 1e-5 and difference(values, whole) < 1e-4
    assert max(map(abs, map(float.__sub__, losses, losses_off))) < 1e-5
    assert counters["from_graphs"] > 0


@pytest.mark.follows("use 'sdpa' or 'flash_attention_2'")
@SLOW
@vary(
    "world, packed, window, case",
    [
        (2, True, None, {"stage": 1}),
        (2, True, 3, {"stage": 2, "options": SHARDED}),
        (4, True, None, {"stage": 1, "backend": "inductor"}),
        (4, False, 3, {"stage": 2}),
    ],
)
@on_ranks("world")
def test_tokens_attend_as_on_one_rank(world, packed, window, case):
    """Texts of a row would attend to each other, and layers with a window to all tokens, as with DeepSpeed alone."""
    rows = {"packed": packed, "window": window}
    losses, values, counters = train(2, 2, deepcompile=True, **rows, **case)
    losses_off, off, _ = train(2, 2, deepcompile=False, **rows, **{**case, "options": ()})
    whole, other = train_whole(2, scale=2, **rows), train_whole(2, scale=2)
    assert difference(values, off) < 1e-5 and difference(values, whole) < 1e-4
    assert difference(whole, other) > 1e-2, "agreement shows nothing"
    assert losses == pytest.approx(losses_off, abs=1e-5)
    assert counters["from_graphs"] > 0


def attention_of(implementation):
    """Returns what stands for the attention of a model that shares sequences."""
    attention = torch.nn.Module()
    attention.rows_are_packed, attention.core_attn_implementation = False, implementation
    packed_rows.ATTENTIONS.add(attention)
    return attention


def test_two_models_learn_of_texts(monkeypatch):
    """With the rows of a student whose teacher has an attention too, texts would attend to each other in the student.

    An attention would outlive its model.
    """
    monkeypatch.setattr(packed_rows, "ATTENTIONS", WeakSet())
    student, teacher = attention_of("sdpa"), attention_of("flash_attention_2")
    packed_rows.look(torch.tensor([[0, 1, 2, 0, 1]]))
    assert student.rows_are_packed and teacher.rows_are_packed
    del student, teacher
    assert not packed_rows.ATTENTIONS


@pytest.mark.follows("a byte for each pair of tokens; use 'flash_attention_2'")
def test_a_mask_of_a_gibibyte(monkeypatch):
    """A long row would end in a lack of memory, and nobody would learn that a mask needs it."""
    module = torch.nn.Module()
    long, longer = (torch.zeros(1, length, dtype=torch.int64, device="meta") for length in (2**15, 2**16))
    for call in (
        lambda attention, positions: packed_rows.mask(attention, module, positions, None, None),
        lambda attention, positions: packed_rows.look(positions),
    ):
        monkeypatch.setattr(packed_rows, "_SAID", set())
        monkeypatch.setattr(packed_rows, "ATTENTIONS", WeakSet())
        with warnings_logged() as said:
            attention = attention_of("flash_attention_2")
            attention.rows_are_packed = True
            assert call(attention, longer) is None and said == []
            attention.core_attn_implementation = "sdpa"
            for positions in (long[:, 1:], long, longer):
                call(attention, positions)
        assert said == [packed_rows.MEMORY.format(1.0)]


def test_rows_that_hold_several_texts():
    """Rows that end in padding would need a mask, models that attend to later tokens too would get a causal one, and
    nobody would learn that flex_attention takes none."""
    module, both_ways = torch.nn.Module(), torch.nn.Module()
    both_ways.is_causal = False
    positions = torch.tensor([[0, 1, 2, 3, 0, 0], [0, 1, 2, 0, 1, 0]])
    attention = attention_of("sdpa")
    packed_rows.look(positions[:1])
    assert packed_rows.mask(attention, module, positions, None, None) is None
    packed_rows.look(positions)
    seen = packed_rows.mask(attention, module, positions, None, 2)
    assert seen.shape == (2, 1, 6, 6)
    assert seen[1, 0].nonzero().tolist() == [[0, 0], [1, 0], [1, 1], [2, 1], [2, 2], [3, 3], [4, 3], [4, 4], [5, 5]]
    assert torch.equal(packed_rows.mask(attention, both_ways, positions, None, 2), seen | seen.mT)
    whole = packed_rows.mask(attention, module, positions, None, None)
    assert whole[1, 0, 2].tolist() == [True, True, True, False, False, False]
    assert torch.equal(packed_rows.mask(attention, both_ways, positions, None, None), whole | whole.mT)
    attention = attention_of("flex_attention")
    with warnings_logged() as said:
        packed_rows.look(positions)
        packed_rows.warn_of_windows("flex_attention", SimpleNamespace(layer_types=["sliding_attention"]))
        packed_rows.warn_of_windows("flex_attention", SimpleNamespace(layer_types=["full_attention"]))
        packed_rows.warn_of_windows("sdpa", SimpleNamespace(layer_types=["sliding_attention"]))
    assert said == [packed_rows.FLEX, packed_rows.WINDOWS]
    assert packed_rows.mask(attention, module, positions, "given", 2) == "given"


@vary("world, heads_of_keys, window, packed", [(2, 1, 3, False), (2, 2, None, True)], slow=[(4, 2, 3, False)])
@on_ranks("world")
def test_a_rank_evaluates_whole_rows(world, heads_of_keys, window, packed):
    """A trainer's evaluation would drop transformers' mask: texts of a row would attend to each other, and layers with
    a window to all tokens. With copies of heads of keys it would raise."""
    module = make_model(heads_of_keys, window, num_attention_heads=world).eval()
    # Each rank has rows of its own.
    (batch,) = [sample for rank, sample in enumerate(samples(0, packed)) if rank == dist.get_rank()]
    batch = {name: batch[name].to(device()) for name in ("input_ids", "position_ids")}
    with torch.no_grad():
        expected = module(**batch, use_cache=False).logits
        with attention_as_it_was():
            UlyssesSPAttentionHF.register_with_transformers(module, "sdpa", world, 1, disable_in_eval=True)
            for layer in module.model.layers:
                # As a training step leaves it, in which each rank has one head of queries and one of keys.
                layer.self_attn.num_key_value_groups = 1
            found = module(**batch, use_cache=False).logits
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.follows("or set deepspeed.utils.groups.mpu to None")
@on_ranks(2)
def test_an_engine_after_one_with_sequences_on_ranks():
    """Its gradients would be as many times too large as ranks shared a sequence of the engine before."""
    with attention_as_it_was():
        parallel_state_sp.initialize_sequence_parallel(2)
        groups.mpu = parallel_state_sp
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
        config = {**config, "zero_allow_untested_optimizer": True, "compile": {"deepcompile": True}}

        def initialize(**mpu):
            module = torch.nn.Linear(2, 2).to(device())
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            deepspeed.initialize(model=module, config=config, optimizer=optimizer, **mpu)[0].destroy()

        said = outcome(initialize)
        assert "an earlier engine's mpu makes ranks share sequences" in said
        assert outcome(initialize, mpu=parallel_state_sp) is None
        groups.mpu = None
        assert outcome(initialize) is None


@SLOW
@on_ranks(2)
def test_a_universal_checkpoint_of_sequences(tmp_path):
    """Ranks of a sequence would count as ranks of a model, of which each has saved parts of it."""
    saved, universal = str(tmp_path / "saved"), str(tmp_path / "saved" / "universal")

    def engine_of(split, seed, **checkpoint):
        torch._dynamo.reset()
        forget_autocast()
        module = make_model(2)
        mpu = UlyssesSPAttentionHF.register_with_transformers(module, "sdpa", split, 1) if split > 1 else None
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 1},
            "sequence_parallel_size": split,
            "compile": {"deepcompile": True},
            "checkpoint": checkpoint,
        }
        with torch.no_grad():
            for index, parameter in enumerate(module.parameters()):
                torch.manual_seed(100 * seed + index)
                parameter.copy_(torch.randn(parameter.shape))
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        engine = deepspeed.initialize(model=module, config=config, optimizer=optimizer, mpu=mpu)[0]
        engine.compile(backend="eager")
        return engine

    def masters(engine):
        return [deepspeed.utils.safe_get_full_fp32_param(parameter) for parameter in engine.module.parameters()]

    def step(engine, group):
        (own,) = [sample for rank, sample in enumerate(samples(0)) if rank == dist.get_rank()]
        rank = dist.get_rank(group)
        for batch in UlyssesSPDataLoaderAdapter([own], rank, group, dist.get_world_size(group), device()):
            inputs = {name: value.to(device()) for name, value in batch.items()}
            engine.backward(mean_over_ranks(engine, inputs, group)[1])
            engine.step()

    with attention_as_it_was():
        engine = engine_of(2, 1)
        step(engine, parallel_state_sp.get_sequence_parallel_group())
        expected = masters(engine)
        engine.save_checkpoint(saved, tag="one")
        engine.destroy()
        if dist.get_rank() == 0:
            command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
            folders = ["--input_folder", f"{saved}/one", "--output_folder", universal]
            subprocess.run([*command, *folders], check=True, capture_output=True)
        dist.barrier()
    with attention_as_it_was():
        engine = engine_of(2, 2, load_universal=True)
        engine.load_checkpoint(saved, tag="universal")
        assert difference(masters(engine), expected) == 0.0
        engine.destroy()
    engine = engine_of(1, 3, load_universal=True)
    engine.load_checkpoint(saved, tag="universal")
    assert difference(masters(engine), expected) == 0.0
    engine.destroy()


@pytest.mark.options("seq_parallel_communication_data_type")
@SLOW
@on_ranks(2)
def test_format_of_gradients_of_sequences():
    """Gradients would be sent in another format than DeepSpeed's with sequences on several ranks."""
    whole, half = (
        train(2, 2, deepcompile=True, seq_parallel_communication_data_type=dtype)[2]["peak_pending"]
        for dtype in ("fp32", "fp16")
    )
    assert whole == 2 * half > 0


def gathered_in_autograd(value, group):
    return _Gathered.apply(value, group)


class _Gathered(torch.autograd.Function):
    """What a rank of a group has, from all of them. The backward adds up what the ranks say of it."""

    @staticmethod
    def forward(ctx, value, group):
        ctx.group = group
        values = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
        dist.all_gather(values, value, group=group)
        return tuple(values)

    @staticmethod
    def backward(ctx, *gradients):
        total = torch.stack(gradients)
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None


@contextlib.contextmanager
def of_accelerate(deepcompile, options):
    """Yields what tells Accelerate, and trainers that use it, to lay sequences on two ranks."""
    from accelerate import ParallelismConfig, PartialState
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    with contextlib.ExitStack() as stack:
        stack.enter_context(process_as_it_was())
        stack.enter_context(attention_as_it_was())
        if device().type == "cpu":
            os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
            PartialState(backend="gloo")
            # On gloo, torch cannot do the backward of its own where the group lacks ranks.
            stack.enter_context(mock.patch("torch.distributed.nn.functional.all_gather", gathered_in_autograd))
        handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
        config = {
            "zero_optimization": {"stage": 1},
            # Of more, DeepSpeed's loader gives transformers labels on a CPU that are not contiguous.
            "train_micro_batch_size_per_gpu": 1,
            "compile": {"deepcompile": deepcompile, **dict(options)},
        }
        others = dist.get_world_size() // 2
        yield config, ParallelismConfig(sp_backend="deepspeed", sp_size=2, dp_shard_size=others, sp_handler=handler)


def positioned_rows():
    return [{**row, "position_ids": torch.arange(LENGTH)} for row in make_rows(16, seed=1)]


def arguments_of_trainer(folder, config, parallelism):
    others = {"accelerator_config": {"use_configured_state": True}} if device().type == "cpu" else {}
    return {
        "output_dir": folder,
        "deepspeed": config,
        "parallelism_config": parallelism,
        "per_device_train_batch_size": 1,
        "learning_rate": LEARNING_RATE,
        "max_steps": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **others,
    }


def trained_by(trainer):
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.model_wrapped


def transformers_trainer(folder, config, parallelism):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(**arguments_of_trainer(folder, config, parallelism))
    return trained_by(Trainer(make_model(2), arguments, train_dataset=positioned_rows()))


def sft_trainer(folder, config, parallelism):
    datasets = pytest.importorskip("datasets")
    trl = pytest.importorskip("trl")
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in make_rows(16, seed=1)])
    arguments = trl.SFTConfig(
        **arguments_of_trainer(folder, config, parallelism), bf16=False, pad_to_multiple_of=2, max_length=LENGTH
    )
    return trained_by(trl.SFTTrainer(make_model(2), arguments, train_dataset=rows, processing_class=make_tokenizer()))


def packing_sft_trainer(folder, config, parallelism):
    datasets = pytest.importorskip("datasets")
    trl = pytest.importorskip("trl")
    datasets.disable_progress_bars()
    # Of two lengths, of which each two fit into a row.
    lengths = [LENGTH // 2 - index % 2 for index in range(32)]
    rows = [
        {"input_ids": row["input_ids"][:n].tolist()} for n, row in zip(lengths, make_rows(32, seed=1), strict=True)
    ]
    arguments = trl.SFTConfig(
        **arguments_of_trainer(folder, config, parallelism),
        bf16=False,
        packing=True,
        pad_to_multiple_of=2,
        max_length=LENGTH,
    )
    train_dataset = datasets.Dataset.from_list(rows)
    return trained_by(
        trl.SFTTrainer(make_model(2), arguments, train_dataset=train_dataset, processing_class=make_tokenizer())
    )


def accelerate_alone(folder, config, parallelism):
    from accelerate import Accelerator, DeepSpeedPlugin
    from torch.utils.data import DataLoader

    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), parallelism_config=parallelism)
    model, losses = make_model(2), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    engine, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(positioned_rows(), batch_size=1))
    group = groups._get_sequence_parallel_group()
    for batch in loader:
        batch = {name: value.to(device()) for name, value in batch.items()}
        mean, part = mean_over_ranks(engine, batch, group)
        accelerator.backward(part)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean)
    return losses, engine


def train_by_door(door, folder, deepcompile, options=()):
    """Returns the losses of a program, and the parameters."""
    with of_accelerate(deepcompile, options) as (config, parallelism):
        losses, engine = door(folder, config, parallelism)
        values = [deepspeed.utils.safe_get_full_fp32_param(parameter) for parameter in engine.module.parameters()]
        assert engine.is_compiled == deepcompile and engine.sequence_parallel_size == 2
        counters = gradient_counters(engine) if deepcompile else {}
        engine.destroy()
    return losses, values, counters


@pytest.mark.options("sequence_parallel_size")
@SLOW
@vary(
    "world, door, options",
    [
        (2, transformers_trainer, {}),
        (2, transformers_trainer, SHARDED),
        (2, accelerate_alone, {}),
        (2, sft_trainer, SHARDED),
        (2, packing_sft_trainer, {}),
        (4, transformers_trainer, {}),
        (4, accelerate_alone, SHARDED),
        (4, sft_trainer, {}),
    ],
)
@on_ranks("world")
def test_trainers_split_sequences(tmp_path, world, door, options):
    """A trainer makes the mpu and the loader itself, which an engine that compiles itself might not take."""
    pytest.importorskip("accelerate", reason="pip install -r requirements/front_doors.txt")
    losses, values, counters = train_by_door(door, str(tmp_path), True, options)
    losses_off, off, _ = train_by_door(door, str(tmp_path), False)
    assert losses == pytest.approx(losses_off, abs=1e-4)
    # Of packed rows each step has others.
    assert losses[-1] < losses[0] or door is packing_sft_trainer
    assert difference(values, off) < 1e-3
    assert counters["from_graphs"] > 0


def attend(query, key, value, *_):
    """Attention of [batch, tokens, heads, width]."""
    heads_first = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    return torch.nn.functional.scaled_dot_product_attention(*heads_first).transpose(1, 2).contiguous()


class OwnModel(torch.nn.Module):
    """A model of one's own, with DeepSpeed's layer for Megatron's attention."""

    def __init__(self, group):
        super().__init__()
        self.before, self.behind = torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)
        self.attention = DistributedAttention(attend, group, scatter_idx=2, gather_idx=1)

    def forward(self, x):
        query, key, value = self.before(x).view(*x.shape[:2], 2, 12).split(4, dim=-1)
        return self.behind(self.attention(query, key, value, 0).reshape(x.shape)).square().mean()


def train_own_model(deepcompile):
    torch._dynamo.reset()
    forget_autocast()
    torch.manual_seed(0)
    with attention_as_it_was():
        parallel_state_sp.initialize_sequence_parallel(2)
        module = OwnModel(parallel_state_sp.get_sequence_parallel_group()).to(device())
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 1},
            "sequence_parallel_size": 2,
            "compile": {"deepcompile": deepcompile},
        }
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        engine = deepspeed.initialize(model=module, config=config, optimizer=optimizer, mpu=parallel_state_sp)[0]
        if deepcompile:
            engine.compile(backend="eager")
        for step in range(2):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            engine.backward(engine(torch.randn(1, 4, 8, generator=generator).to(device())))
            engine.step()
        values = [parameter.detach().clone() for parameter in module.parameters()]
        engine.destroy()
    return values


@SLOW
@on_ranks(2)
def test_attention_of_a_model_of_ones_own():
    """With torch before 2.13, what lies before the exchange would get gradients of zero."""
    assert difference(train_own_model(True), train_own_model(False)) < 1e-5

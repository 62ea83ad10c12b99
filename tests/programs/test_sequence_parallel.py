# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Sequences that lie on several ranks: DeepSpeed's Ulysses attention for models of transformers."""

import contextlib
import os

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.compile.zero_1_and_2 import gradient_counters
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import groups

from support.front_doors import LEARNING_RATE, LENGTH, VOCABULARY, make_rows, process_as_it_was
from support.ids import vary
from support.models import qwen3_config
from support.on_ranks import on_ranks
from support.training import device, forget_autocast

transformers = pytest.importorskip("transformers", reason="pip install -r requirements/front_doors.txt")

SLOW = pytest.mark.slow
SHARDED = {"regional_compilation": True, "shard_parameters": "all"}


def make_model(heads_of_keys):
    torch.manual_seed(0)
    config = qwen3_config(VOCABULARY, num_key_value_heads=heads_of_keys, attn_implementation="sdpa")
    return transformers.AutoModelForCausalLM.from_config(config).float().to(device()).train()


def samples(step):
    """One sample for each rank, in which different numbers of tokens count."""
    for index, row in enumerate(make_rows(dist.get_world_size(), seed=step)):
        labels = row["labels"].clone()
        labels[: 1 + (step + 5 * index) % (LENGTH - 2)] = -100
        yield {"input_ids": row["input_ids"][None], "labels": labels[None], "position_ids": torch.arange(LENGTH)[None]}


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


def train(split, heads_of_keys, deepcompile, backend="eager", options=(), stage=1, **config):
    """Trains with sequences on ``split`` ranks; returns losses, parameters and the counters of gradients."""
    torch._dynamo.reset()
    forget_autocast()
    module, losses, counters = make_model(heads_of_keys), [], {}
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
            own = list(samples(step))[dist.get_rank()]
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


def train_whole(heads_of_keys, scale):
    """Trains on one rank with whole sequences, and with gradients that are ``scale`` times as large."""
    module = make_model(heads_of_keys)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)
    for step in range(3):
        optimizer.zero_grad()
        for sample in samples(step):
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


def train_with_trainer(folder, deepcompile, options=()):
    """Returns the losses of transformers' Trainer, and the parameters."""
    from accelerate import ParallelismConfig, PartialState
    from accelerate.utils import DeepSpeedSequenceParallelConfig
    from transformers import Trainer, TrainingArguments

    with process_as_it_was(), attention_as_it_was():
        others = {}
        if device().type == "cpu":
            os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
            PartialState(backend="gloo")
            others["accelerator_config"] = {"use_configured_state": True}
        handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
        arguments = TrainingArguments(
            output_dir=folder,
            deepspeed={
                "zero_optimization": {"stage": 1},
                # Of more, DeepSpeed's loader gives transformers labels on a CPU that are not contiguous.
                "train_micro_batch_size_per_gpu": 1,
                "compile": {"deepcompile": deepcompile, **dict(options)},
            },
            parallelism_config=ParallelismConfig(sp_backend="deepspeed", sp_size=2, sp_handler=handler),
            per_device_train_batch_size=1,
            learning_rate=LEARNING_RATE,
            max_steps=4,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **others,
        )
        rows = [{**row, "position_ids": torch.arange(LENGTH)} for row in make_rows(16, seed=1)]
        trainer = Trainer(make_model(2), arguments, train_dataset=rows)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        engine = trainer.model_wrapped
        values = [deepspeed.utils.safe_get_full_fp32_param(parameter) for parameter in engine.module.parameters()]
        assert engine.is_compiled == deepcompile
        engine.destroy()
    return losses, values


@pytest.mark.options("sequence_parallel_size")
@SLOW
@vary("options", [{}, SHARDED])
@on_ranks(2)
def test_trainer_splits_sequences(tmp_path, options):
    """A trainer makes the mpu and the loader itself, which an engine that compiles itself might not take."""
    pytest.importorskip("accelerate", reason="pip install -r requirements/front_doors.txt")
    losses, values = train_with_trainer(str(tmp_path), True, options)
    losses_off, off = train_with_trainer(str(tmp_path), False)
    assert losses == pytest.approx(losses_off, abs=1e-4) and losses[-1] < losses[0]
    assert difference(values, off) < 1e-3


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

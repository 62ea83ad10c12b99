# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The small Qwen3 that ``test_front_doors.py`` trains, its data, its configuration and what a program leaves.

Runs in the processes of ``support.pool``.
"""

import contextlib
import dataclasses
import gc
import importlib
import logging
import os
import warnings
from typing import Any, Dict, List, NamedTuple

import torch
import torch.distributed as dist

import deepspeed
from deepspeed.accelerator import get_accelerator

from support.beside import logged
from support.models import qwen3_config
from support.quantized import keep_gradients
from support.training import device

VOCABULARY, LENGTH = 64, 12
# Tokens. Rows are made of few of them, so that the model learns something in few steps.
PAD, EOS, FIRST_TOKEN, LAST_TOKEN = 0, 1, 8, 23
ROWS = 2  # of a rank's batch
STEPS, HALF = 6, 3
SEED, LEARNING_RATE = 7, 1e-2


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained."""

    door: str
    folder: str  # of checkpoints; the same on all ranks
    stage: int = 1
    backend: str = "eager"  # of torch.compile
    deepcompile: bool = True
    pictured: bool = False  # whether the memory of a step is recorded
    shards: str = ""  # which parameters of blocks are sharded, as compile.shard_parameters has it; none by default
    blocks: bool = False  # whether each block is a graph of its own, whatever else is chosen
    exports: bool = False  # whether the weights are saved at the end, in the trainer's own format


class Outcome(NamedTuple):
    """What a program leaves when it has trained."""

    losses: List[float]  # of each step, the mean over the ranks
    evaluations: List[float]
    engine: deepspeed.DeepSpeedEngine
    others: List[deepspeed.DeepSpeedEngine] = []  # engines that are not trained


class Record(NamedTuple):
    """What a test wants to know of a program."""

    losses: List[float]
    evaluations: List[float]
    counters: Dict[str, int]  # of gradients; empty without DeepCompile
    trained: int  # how many parameters are trained
    trained_in_blocks: int  # how many of those are in the model's layers
    others_compiled: List[bool]
    warnings: List[str]  # that rank 0 printed about compilation


# Model, data and configuration


def on_cpu():
    return get_accelerator().device_name() == "cpu"


def make_model():
    """Returns the model, with the same weights every time."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(SEED)
    config = qwen3_config(VOCABULARY, pad_token_id=PAD, eos_token_id=EOS, tie_word_embeddings=True)
    return AutoModelForCausalLM.from_config(config).float()


def make_quantized_model(folder):
    """Returns the model with the weights of its linear layers in 4 bits."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    # Only a model that is loaded can be quantized. One process writes the files, because transformers has it so.
    folder = os.path.join(folder, "base")
    if dist.get_rank() == 0:
        make_model().save_pretrained(folder)
    dist.barrier()
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=nf4, dtype=torch.float32, device_map={"": device()}
    )
    keep_gradients(model)
    return model


def make_tokenizer():
    """Returns a tokenizer that has a word for each token of the model."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": PAD, "<eos>": EOS, **{f"w{token}": token for token in range(EOS + 1, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def make_rows(count, seed):
    """Lists rows of random tokens. A model can learn which tokens occur."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(FIRST_TOKEN, LAST_TOKEN + 1, (count, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids.unbind()]


def training_rows(steps=STEPS):
    return make_rows(steps * ROWS * dist.get_world_size(), seed=1)


def evaluation_rows():
    return make_rows(2 * ROWS * dist.get_world_size(), seed=2)


def ds_config(case) -> Dict[str, Any]:
    others = {"memory_picture": {"folder": case.folder}} if case.pictured else {}
    if case.blocks:
        others["regional_compilation"] = True
    if case.shards:
        others["shard_parameters"] = case.shards
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "zero_optimization": {"stage": case.stage},
        "compile": {"deepcompile": case.deepcompile, **others},
    }


# Processes that run several programs


@contextlib.contextmanager
def process_as_it_was():
    """Forgets what transformers, Accelerate and Lightning keep for the life of a process."""
    variables = dict(os.environ)
    torch._dynamo.reset()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(variables)
        with contextlib.suppress(ImportError):
            from accelerate.state import AcceleratorState, GradientState

            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
        with contextlib.suppress(ImportError):
            from transformers.integrations.deepspeed import unset_hf_deepspeed_config

            unset_hf_deepspeed_config()
        # Both turn TF32 on where they compile. transformers does it by the first name and Accelerate by the second.
        torch.backends.fp32_precision = "none"
        torch.backends.cuda.matmul.allow_tf32 = False
        torch._dynamo.reset()
        gc.collect()


@contextlib.contextmanager
def warnings_told():
    """Yields a list to which warnings about compilation are added, by DeepSpeed's logger and by torch's."""
    with contextlib.suppress(ImportError):
        # Where torchao is installed, peft imports it, and torch then warns of how torchao uses torch.compile.
        importlib.import_module("torchao.quantization")

    def keep(text):
        # torchao, which peft imports, calls what torch 2.13 deprecates.
        return "ompile" in text and "register_constant" not in text

    with logged(logging.WARNING, ("DeepSpeed", "torch"), keep) as texts, warnings.catch_warnings():
        # Deprecated names that these packages use of one another.
        warnings.simplefilter("ignore")
        yield texts

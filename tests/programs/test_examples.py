# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The programs of ``examples/`` run under DeepSpeed's launcher, on two GPUs, in two processes on one, or on CPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support import shared_gpus
from support.models import qwen3_config
from support.pool import free_port, remove_buffers

pytestmark = pytest.mark.program("examples", "requirements/front_doors.txt")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SUMS = [f"{a} plus {b} is {a + b}." for a in range(8) for b in range(8)]
# The packages that each needs besides transformers.
PROGRAMS = {
    "plain_loop.py": [],
    "float8_loop.py": ["torchao"],
    "hf_trainer.py": ["accelerate"],
    "accelerate_loop.py": ["accelerate"],
    "trl_lora.py": ["accelerate", "datasets", "peft", "trl"],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a small model and its tokenizer, as ``save_pretrained()`` writes them."""
    transformers = pytest.importorskip("transformers", reason="pip install -r requirements/front_doors.txt")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<pad>", "<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SUMS, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    config = qwen3_config(len(tokenizer), pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("program", PROGRAMS)
def test_trains(model, tmp_path, program):
    for package in PROGRAMS[program]:
        pytest.importorskip(package, reason="pip install -r requirements/front_doors.txt")
    gpus, port = torch.cuda.device_count(), free_port()
    # The launcher's argument --local_rank would tell of a GPU that is not there.
    shared = ["--no_local_rank", shared_gpus.__file__] if gpus == 1 else []
    finished = subprocess.run(
        [
            *(sys.executable, "-m", "deepspeed.launcher.runner", "--master_port", str(port)),
            *("--num_gpus" if gpus else "--num_accelerators", "2", *shared),
            *(str(EXAMPLES / program), "--model", str(model), "--epochs", "1", "--lr", "1e-2"),
        ],
        cwd=tmp_path,
        env={
            # As a person's shell has it.
            **{name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"},
            "HF_HUB_OFFLINE": "1",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    remove_buffers(port)
    assert finished.returncode == 0, finished.stdout
    losses = [float(loss) for loss in re.findall(r"(?<!_)loss'?:? '?([\d.]+)", finished.stdout)]
    assert len(losses) >= 8 and losses[-1] < losses[0] - 0.2, finished.stdout
    counts = re.findall(r"(\d+) gradients came from compiled graphs", finished.stdout)
    # Accelerate prints on the first rank of each host. On one GPU all ranks have the local rank 0.
    assert len(counts) == (2 if shared and program == "accelerate_loop.py" else 1), finished.stdout
    assert all(int(count) > 0 for count in counts), finished.stdout
    assert "DeepCompile compiles parts of the model again" not in finished.stdout

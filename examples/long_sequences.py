# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Trains on sequences that lie on several GPUs (DeepSpeed's Ulysses), with the Trainer of transformers."""

import argparse
import os

try:
    from accelerate import ParallelismConfig, PartialState
    from accelerate.utils import DeepSpeedSequenceParallelConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing.name} is missing: pip install {missing.name}") from None

import torch

from deepspeed.compile.zero_1_and_2 import gradient_counters

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
parser.add_argument("--tiny", action="store_true", help="train a small model that is made on the spot")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=1e-4)
parser.add_argument("--ranks", type=int, default=2, help="GPUs that share a sequence")
parser.add_argument("--length", type=int, default=128, help="tokens of a sequence, a multiple of --ranks")
parser.add_argument("--shard", action="store_true", help="keep a part of the parameters on each GPU")
parser.add_argument("--local_rank", type=int)  # given by the launcher
args = parser.parse_args()
if args.tiny:
    from tiny import tiny_model

    args.model = tiny_model()

if not torch.cuda.is_available():
    # Without GPUs Accelerate finds other processes only if it gets their backend.
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")
config = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 1},
    "compile": {"deepcompile": True, **({"shard_parameters": "all"} if args.shard else {})},
}
ulysses = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
# Accelerate must know how many sequences there are at a time.
sequences = int(os.environ.get("WORLD_SIZE", 1)) // args.ranks
training = TrainingArguments(
    output_dir="trained",
    deepspeed=config,
    parallelism_config=ParallelismConfig(
        sp_backend="deepspeed", sp_size=args.ranks, dp_shard_size=sequences, sp_handler=ulysses
    ),
    accelerator_config={"use_configured_state": not torch.cuda.is_available()},
    bf16=torch.cuda.is_available(),
    gradient_checkpointing=True,
    learning_rate=args.lr,
    num_train_epochs=args.epochs,
    per_device_train_batch_size=1,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(args.model)
text = " ".join(f"{a} plus {b} is {a + b}." for a in range(20) for b in range(20))
ids = torch.tensor(tokenizer(text)["input_ids"])
rows = [
    {"input_ids": row, "labels": row, "position_ids": torch.arange(args.length)}
    for row in ids[: len(ids) // args.length * args.length].view(-1, args.length)
]
trainer = Trainer(model, training, train_dataset=rows)
trainer.train()

if trainer.is_world_process_zero():
    print(gradient_counters(trainer.model_wrapped)["from_graphs"], "gradients came from compiled graphs")
torch.distributed.destroy_process_group()

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Trains a language model by preferences (DPO) or rewards (GRPO) with TRL, beside a reference model."""

import argparse
import os

try:
    from accelerate import PartialState
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing.name} is missing: pip install {missing.name}") from None

import torch

from deepspeed.compile.zero_1_and_2 import gradient_counters

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
parser.add_argument("--tiny", action="store_true", help="train a small model that is made on the spot")
parser.add_argument("--method", choices=["dpo", "grpo"], default="dpo")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=1e-5)
parser.add_argument("--micro-batch", type=int, default=4, help="rows on each GPU; with DPO a row is two sequences")
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
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 1},
    "compile": {"deepcompile": True, **({"shard_parameters": "all"} if args.shard else {})},
}
arguments = {
    "output_dir": "trained",
    "deepspeed": config,
    "accelerator_config": {"use_configured_state": not torch.cuda.is_available()},
    "bf16": torch.cuda.is_available(),
    "learning_rate": args.lr,
    "num_train_epochs": args.epochs,
    "per_device_train_batch_size": args.micro_batch,
    "beta": 0.1,  # above 0, both methods compare with a reference model, which the trainer loads
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
}
sums = [(a, b) for a in range(8) for b in range(8)]


def reward(prompts, completions, **_):
    """Counts the right answers, and a little for digits."""
    sums_of = [sum(int(word) for word in prompt.split() if word.isdigit()) for prompt in prompts]
    return [
        float(f" {total}." in text) + 0.1 * sum(letter.isdigit() for letter in text)
        for total, text in zip(sums_of, completions, strict=True)
    ]


if args.method == "dpo":
    rows = [{"prompt": f"{a} plus {b} is", "chosen": f" {a + b}.", "rejected": " hard to say."} for a, b in sums]
    trainer = DPOTrainer(args.model, args=DPOConfig(**arguments), train_dataset=Dataset.from_list(rows))
else:
    trainer = GRPOTrainer(
        args.model,
        reward_funcs=reward,
        args=GRPOConfig(**arguments, num_generations=4, max_completion_length=8),
        train_dataset=Dataset.from_list([{"prompt": f"{a} plus {b} is"} for a, b in sums]),
    )
trainer.train()

if trainer.is_world_process_zero():
    print(gradient_counters(trainer.model_wrapped)["from_graphs"], "gradients came from compiled graphs")
torch.distributed.destroy_process_group()

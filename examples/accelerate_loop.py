# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a language model with Accelerate."""

import argparse

try:
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
    from transformers import AutoModelForCausalLM, AutoTokenizer
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing.name} is missing: pip install {missing.name}") from None

import torch
from torch.utils.data import DataLoader

from deepspeed.compile.zero_1_and_2 import gradient_counters

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
parser.add_argument("--tiny", action="store_true", help="train a small model that is made on the spot")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=1e-4)
parser.add_argument("--local_rank", type=int)  # given by the launcher
args = parser.parse_args()
if args.tiny:
    from tiny import tiny_model

    args.model = tiny_model()

config = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": torch.cuda.is_available()},
    "zero_optimization": {"stage": 1},
    "compile": {"deepcompile": True},
}
# Without GPUs Accelerate finds other processes only if it gets their backend.
on_cpu = [] if torch.cuda.is_available() else [InitProcessGroupKwargs(backend="gloo")]
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), kwargs_handlers=on_cpu)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(args.model)
texts = [f"{a} plus {b} is {a + b}." for a in range(8) for b in range(8)]


def collate(texts):
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


loader = DataLoader(texts, batch_size=4, shuffle=True, collate_fn=collate)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
model.train()  # from_pretrained() leaves the model in evaluation mode
for epoch in range(args.epochs):
    for step, batch in enumerate(loader):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}, step {step}: loss {loss.item():.4f}")

accelerator.print(gradient_counters(model)["from_graphs"], "gradients came from compiled graphs")
accelerator.end_training()

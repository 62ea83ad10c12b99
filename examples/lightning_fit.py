# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a language model with Lightning, whose strategy for DeepSpeed takes GPUs only. Start it with python."""

import argparse

try:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DeepSpeedStrategy
    from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling
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

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
    "compile": {"deepcompile": True},
}


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)

    def on_train_start(self):
        self.model.train()  # from_pretrained() leaves the model in evaluation mode

    def training_step(self, batch, number):
        loss = self.model(**batch).loss
        print(f"step {number}: loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=args.lr)


tokenizer = AutoTokenizer.from_pretrained(args.model)
rows = [tokenizer(f"{a} plus {b} is {a + b}.") for a in range(8) for b in range(8)]
loader = DataLoader(rows, 4, shuffle=True, collate_fn=DataCollatorForLanguageModeling(tokenizer, mlm=False))
trainer = pl.Trainer(strategy=DeepSpeedStrategy(config=CONFIG), devices="auto", max_epochs=args.epochs)
trainer.fit(Module(), loader)
if trainer.is_global_zero:
    print(gradient_counters(trainer.strategy.model)["from_graphs"], "gradients came from compiled graphs")

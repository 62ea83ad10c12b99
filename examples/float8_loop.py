# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a language model whose linear layers multiply in float8, with DeepSpeed's engine and a loop."""

import argparse
import dataclasses

try:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from transformers import AutoModelForCausalLM, AutoTokenizer
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing.name} is missing: pip install {missing.name}") from None

import torch

import deepspeed
from deepspeed.compile.zero_1_and_2 import gradient_counters

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
parser.add_argument("--tiny", action="store_true", help="train a small model that is made on the spot")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=1e-4)
parser.add_argument("--recipe", choices=("tensorwise", "rowwise", "rowwise_with_gw_hp"), default="tensorwise")
parser.add_argument("--local_rank", type=int)  # given by the launcher
args = parser.parse_args()
if args.tiny:
    from tiny import tiny_model

    args.model = tiny_model()

config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": args.lr, "torch_adam": True}},
    "bf16": {"enabled": torch.cuda.is_available()},
    "zero_optimization": {"stage": 1},
    "compile": {"deepcompile": True},
}
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
# A CPU emulates float8, which takes longer than fp32. The head of a language model stays as it is.
float8 = dataclasses.replace(Float8LinearConfig.from_recipe_name(args.recipe), emulate=not torch.cuda.is_available())
convert_to_float8_training(model, config=float8, module_filter_fn=lambda module, name: name != "lm_head")
tokenizer = AutoTokenizer.from_pretrained(args.model)
texts = [f"{a} plus {b} is {a + b}." for a in range(8) for b in range(8)]
# A GPU multiplies float8 matrices whose sides are multiples of 16. One side is the number of tokens in a micro-batch.
batch = tokenizer(texts, padding=True, pad_to_multiple_of=16, return_tensors="pt")
batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
rows = [{name: tensor[number] for name, tensor in batch.items()} for number in range(len(texts))]

engine, _, loader, _ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), training_data=rows, config=config
)
engine.train()  # from_pretrained() leaves the model in evaluation mode
for epoch in range(args.epochs):
    for batch in loader:
        loss = engine(**{name: tensor.to(engine.device) for name, tensor in batch.items()}).loss
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0:
            print(f"epoch {epoch}, step {engine.global_steps}: loss {loss.item():.4f}")

if engine.global_rank == 0:
    print(gradient_counters(engine)["from_graphs"], "gradients came from compiled graphs")
engine.destroy()
torch.distributed.destroy_process_group()

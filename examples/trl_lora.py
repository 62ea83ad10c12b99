# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes LoRA adapters of a language model with TRL's SFTTrainer."""

import argparse
import os

try:
    from accelerate import PartialState
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoConfig, AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing.name} is missing: pip install {missing.name}") from None

import torch

from deepspeed.compile.zero_1_and_2 import gradient_counters

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
parser.add_argument("--tiny", action="store_true", help="train a small model that is made on the spot")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--rank", type=int, default=8, help="the rank of the adapters")
parser.add_argument("--micro-batch", type=int, default=4, help="texts on each GPU")
parser.add_argument("--length", type=int, default=1024, help="the most tokens of a text")
parser.add_argument("--shard", action="store_true", help="keep a part of the frozen parameters on each GPU")
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
    "compile": {"deepcompile": True, **({"shard_parameters": "frozen"} if args.shard else {})},
}
training = SFTConfig(
    output_dir="trained",
    deepspeed=config,
    accelerator_config={"use_configured_state": not torch.cuda.is_available()},
    bf16=torch.cuda.is_available(),
    learning_rate=args.lr,
    num_train_epochs=args.epochs,
    per_device_train_batch_size=args.micro_batch,
    max_length=args.length,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
)
model = args.model  # which the trainer loads on each rank
if args.shard:
    # On the host of the first rank, which sends each GPU its part. TRL would load the model on each GPU.
    if os.environ["RANK"] == "0":
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    else:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model), dtype=torch.bfloat16)
rows = [{"prompt": f"{a} plus {b} is", "completion": f" {a + b}."} for a in range(8) for b in range(8)]
trainer = SFTTrainer(
    model,
    training,
    train_dataset=Dataset.from_list(rows),
    peft_config=LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear"),
)
trainer.train()

if trainer.is_world_process_zero():
    print(gradient_counters(trainer.model_wrapped)["from_graphs"], "gradients came from compiled graphs")
torch.distributed.destroy_process_group()

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Trains a language model as a real run does: accumulates, checkpoints, shards, evaluates, saves, resumes, exports.

The recipes in ``docs/recipes`` run this file with different arguments.
"""

import argparse
import contextlib
import statistics
import time

try:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing.name} is missing: pip install {missing.name}") from None

import torch
import torch.distributed as dist

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.compile.zero_1_and_2 import gradient_counters, mapped_memory
from deepspeed.runtime.activation_checkpointing.offload_activations import CheckpointHiddenStatesOffload

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
parser.add_argument("--tiny", action="store_true", help="train a small model that is made on the spot")
parser.add_argument("--experts", action="store_true", help="make the small model a mixture of experts")
parser.add_argument("--from-scratch", action="store_true", help="begin with random weights")
parser.add_argument("--texts", help="a file with one text a line; without it: small sums")
parser.add_argument("--length", type=int, default=64, help="tokens in a row")
parser.add_argument("--pack", action="store_true", help="fill each row with several texts")
parser.add_argument("--micro-batch", type=int, default=4, help="rows on each GPU")
parser.add_argument("--accumulation", type=int, default=1, help="micro-batches in a step")
parser.add_argument("--stage", type=int, choices=[1, 2], help="of ZeRO; default: 1, but 2 to shard and accumulate")
parser.add_argument("--steps", type=int, default=16, help="steps of the whole run")
parser.add_argument("--lr", type=float, default=1e-4)
parser.add_argument("--off", action="store_true", help="train without DeepCompile, to compare")
parser.add_argument("--checkpoint", action="store_true", help="compute each layer again in the backward")
parser.add_argument("--inputs-on-host", action="store_true", help="keep inputs of checkpointed layers on the host")
parser.add_argument("--loss-tiles", type=int, metavar="N", help="cut the tokens of head and loss into N tiles")
parser.add_argument("--mlp-tiles", type=int, metavar="N", help="cut the tokens of each MLP into N tiles")
parser.add_argument("--budget", type=float, help="the part of its activations that a graph keeps, from 0 to 1")
parser.add_argument("--shard", action="store_true", help="keep a part of the parameters on each GPU")
parser.add_argument("--remainders", action="store_true", help="keep 16 bits of each master weight")
parser.add_argument("--states", choices=["8bit"], help="keep Adam's states in 8 bits")
parser.add_argument("--evaluate-every", type=int, default=8)
parser.add_argument("--save-every", type=int, default=0, help="steps between checkpoints; 0: none")
parser.add_argument("--output", default="trained", help="the folder for checkpoints and for the trained model")
parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the folder")
parser.add_argument("--universal", action="store_true", help="resume from a universal checkpoint, on other ranks")
parser.add_argument("--export", action="store_true", help="write the trained model for from_pretrained()")
parser.add_argument("--local_rank", type=int)  # given by the launcher
args = parser.parse_args()
if args.inputs_on_host and not args.checkpoint:
    parser.error("--inputs-on-host goes with --checkpoint")
if args.tiny:
    from tiny import tiny_model

    args.model = tiny_model(experts=args.experts)

config = {
    "train_micro_batch_size_per_gpu": args.micro_batch,
    "gradient_accumulation_steps": args.accumulation,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": args.lr, "torch_adam": True}},
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": args.steps, "warmup_num_steps": max(2, args.steps // 20)},
    },
    "bf16": {"enabled": True},
    # Sharded parameters would leave whole gradients between the micro-batches of stage 1.
    "zero_optimization": {"stage": args.stage or (2 if args.shard and args.accumulation > 1 else 1)},
    "compile": {"deepcompile": not args.off},
}
if args.shard:
    config["compile"]["shard_parameters"] = "all"
if args.budget is not None:
    config["compile"]["activation_memory_budget"] = args.budget
if args.remainders:
    config["compile"]["store_param_remainders"] = True
if args.states:
    config["compile"]["optimizer_states"] = args.states

if args.universal:
    config["checkpoint"] = {"load_universal": True}

deepspeed.init_distributed()
rank, world = dist.get_rank(), dist.get_world_size()
tokenizer = AutoTokenizer.from_pretrained(args.model)
if args.shard and rank > 0:
    # The first rank has the values, and sends each GPU its part.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model), dtype=torch.bfloat16)
elif args.from_scratch:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model), dtype=torch.bfloat16)
else:
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
if args.checkpoint:
    model.gradient_checkpointing_enable()
if args.loss_tiles or args.mlp_tiles:
    from tiles import loss_in_tiles, mlps_in_tiles

    # The loss first: it is compared with the model's own, on a few tokens.
    if args.loss_tiles:
        loss_in_tiles(model, args.loss_tiles)
    if args.mlp_tiles:
        mlps_in_tiles(model, args.mlp_tiles)
on_host = CheckpointHiddenStatesOffload() if args.inputs_on_host else contextlib.nullcontext()


def packed(texts):
    """Yields rows of ``--length`` tokens. Positions begin at 0 in each text, which keeps texts of a row apart."""
    ids, positions, labels = [], [], []
    for text in texts:
        own = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        ids, positions = ids + own, positions + list(range(len(own)))
        labels += [-100, *own[1:]]  # no text predicts the first token of the next one
        while len(ids) >= args.length:
            row = {"input_ids": ids, "position_ids": positions, "labels": labels}
            yield {name: torch.tensor(values[: args.length]) for name, values in row.items()}
            ids, positions, labels = ids[args.length :], positions[args.length :], labels[args.length :]


def padded(texts):
    """Yields a row for each text."""
    whole = tokenizer(texts, padding="max_length", truncation=True, max_length=args.length, return_tensors="pt")
    whole["labels"] = whole["input_ids"].masked_fill(whole["attention_mask"] == 0, -100)
    for number in range(len(texts)):
        yield {name: tensor[number] for name, tensor in whole.items()}


if args.texts:
    with open(args.texts) as file:
        texts = file.read().splitlines()
else:
    texts = [f"{a} plus {b} is {a + b}." for a in range(16) for b in range(16)]
texts = [texts[number] for number in torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))]
held_out = max(1, len(texts) // 16)
rows_of = packed if args.pack else padded
evaluation, training = list(rows_of(texts[:held_out])), list(rows_of(texts[held_out:]))
if not evaluation or not training:
    raise SystemExit(f"there are too few texts for rows of {args.length} tokens: give a smaller --length")


def micro_batch(rows, number):
    """Returns this rank's rows of a micro-batch. The number alone decides, so a resumed run goes on where it was."""
    first = (number * world + rank) * args.micro_batch
    picked = [rows[index % len(rows)] for index in range(first, first + args.micro_batch)]
    batch = {name: torch.stack([row[name] for row in picked]).to(engine.device) for name in picked[0]}
    # With a cache, texts of a packed row would attend to each other. The engine passes this in training alone.
    return {**batch, "use_cache": False}


def evaluate():
    engine.eval()
    with torch.no_grad():
        loss = engine(**micro_batch(evaluation, 0)).loss.float()
    engine.train()
    dist.all_reduce(loss)
    return loss.item() / world


def say(text):
    if rank == 0:
        print(text, flush=True)


engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
engine.train()  # from_pretrained() leaves the model in evaluation mode
if args.resume:
    engine.load_checkpoint(args.output)
    say(f"resumed after step {engine.global_steps}")
seconds = []
while engine.global_steps < args.steps:
    began, mean = time.perf_counter(), 0.0
    first = engine.global_steps * args.accumulation
    for number in range(first, first + args.accumulation):
        with on_host:
            loss = engine(**micro_batch(training, number)).loss
            engine.backward(loss)  # divides by the number of micro-batches
        engine.step()  # steps after the last of them
        mean += loss.detach() / args.accumulation
    get_accelerator().synchronize()
    seconds.append(time.perf_counter() - began)
    if len(seconds) == 5 and torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()  # of the steps without compilation
    step = engine.global_steps
    say(f"step {step}: loss {mean.item():.4f}, {seconds[-1]:.3f} s")
    if step % args.evaluate_every == 0:
        say(f"step {step}: evaluated {evaluate():.4f}")
    if args.save_every and step % args.save_every == 0:
        engine.save_checkpoint(args.output)  # by all ranks

# The first steps compile, or run again what others have compiled.
median = statistics.median(seconds[min(5, len(seconds) - 1) :]) if seconds else float("nan")
tokens = args.micro_batch * args.accumulation * args.length
say(f"median step {median:.3f} s, {tokens / median:,.0f} tokens a second on each GPU")
if torch.cuda.is_available():
    # Torch's allocator does not count memory that ranks map, such as that of parameters.
    peak = torch.cuda.max_memory_allocated() + mapped_memory.nbytes
    say(f"peak {peak / 2**30:.2f} GiB on the first GPU")
if not args.off:
    say(f"{gradient_counters(engine)['from_graphs']} gradients came from compiled graphs")
if args.export:
    engine.save_16bit_model(args.output, "pytorch_model.bin")  # by all ranks
    if rank == 0:
        model.config.save_pretrained(args.output)
        tokenizer.save_pretrained(args.output)
engine.destroy()
dist.destroy_process_group()

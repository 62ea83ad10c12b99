# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Trains a small Qwen3 twice, with DeepCompile off and on, and prints time, losses and gradient memory.

    deepspeed examples/demo/train_qwen3.py                         on all GPUs of this machine
    deepspeed --num_accelerators 2 examples/demo/train_qwen3.py    on a CPU, in two processes

The weights are random and the text is the licence of this repository, so nothing is downloaded.
"""

import dataclasses
import gc
import json
import os
import time
import warnings
from pathlib import Path

import torch
from config import on_gpus, parse_arguments
from report import announce, maximum_over_ranks, mean_over_ranks, print_table, say
from watch import GradientWatch, MemoryWatch

import deepspeed
import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator

# DeepSpeed calls it by its older name, which torch 2.13 renames.
warnings.filterwarnings("ignore", message=".*all_gather_into_tensor.* is deprecated", category=FutureWarning)

TEXT = Path(__file__).resolve().parents[2] / "LICENSE"


def ds_config(config, deepcompile):
    """Returns what a user would write into ``ds_config.json``."""
    folder = f"{config.pictures}/{'on' if deepcompile else 'off'}"
    muon = config.optimizer == "muon"
    params = {"adam_lr" if muon else "lr": config.learning_rate, "torch_adam": True}
    return {
        "train_micro_batch_size_per_gpu": config.micro_batch,
        "gradient_accumulation_steps": config.accumulation,
        # With Muon it would clip updates, whose norm is large, and so divide all learning rates.
        "gradient_clipping": 0.0 if muon else 1.0,
        "optimizer": {"type": "Muon" if muon else "AdamW", "params": params},
        "bf16": {"enabled": config.dtype == "bf16"},
        "zero_optimization": {"stage": config.stage, "reduce_bucket_size": config.bucket},
        "compile": {
            "deepcompile": deepcompile,
            **({"memory_picture": {"folder": folder}} if config.pictures else {}),
        },
        "steps_per_print": 10**9,
        "log_level": "warning",
    }


def build_model(config, device):
    """Returns a Qwen3 with random weights, the same on every rank and in every run."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    heads = config.hidden // 64
    shape = Qwen3Config(
        vocab_size=config.vocabulary,
        hidden_size=config.hidden,
        intermediate_size=3 * config.hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=config.head_dim,
        max_position_embeddings=config.seq,
        tie_word_embeddings=True,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return Qwen3ForCausalLM(shape).to(torch.bfloat16 if config.dtype == "bf16" else torch.float32)


def batch(config, step, micro_step, device):
    """Returns this rank's token ids, [micro_batch, seq], the same in every run."""
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(10_000 * (step * config.accumulation + micro_step) + dist.get_rank())
    starts = torch.randint(0, len(text) - config.seq, (config.micro_batch,), generator=generator)
    return torch.stack([text[start : start + config.seq] for start in starts]).to(device)


def train(config, deepcompile):
    """Trains a new model and returns what the table shows, the same numbers on every rank."""
    say(f"\nTraining with DeepCompile {'on' if deepcompile else 'off'}")
    device = get_accelerator().current_device_name()
    model = build_model(config, device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    gradients, memory = GradientWatch(model, deepcompile), MemoryWatch()
    engine = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=ds_config(config, deepcompile)
    )[0]
    if deepcompile:
        engine.compile(backend=config.backend)
    gradients.engine = engine

    def train_step(step):
        """One optimizer step; returns this rank's loss."""
        watched, total = step == config.steps - 1, 0.0
        for micro_step in range(config.accumulation):
            ids = batch(config, step, micro_step, device)
            loss = engine(input_ids=ids, labels=ids).loss
            if step == 0 and micro_step == 0:
                gradients.note("after compile")
            if watched:
                memory.note("forward")
            engine.backward(loss)
            total += loss.detach() / config.accumulation
            if watched:
                memory.note("backward")
                if micro_step == config.accumulation - 1:
                    gradients.note_peak("peak of the backward")
                    gradients.note("after the backward")
            engine.step()
        if watched:
            memory.note("step")
            gradients.note("after the step")
        return total

    losses, times = [], []
    for step in range(config.steps):
        if step == config.steps - 1:
            gradients.start_peak()
            memory.start()
        dist.barrier()
        get_accelerator().synchronize()
        began = time.perf_counter()
        with announce("The first step compiles the model (up to a minute)", silent=not deepcompile or step > 0):
            loss = train_step(step)
            get_accelerator().synchronize()
        times.append(time.perf_counter() - began)
        losses.append(mean_over_ranks(loss))
        if step < 2 or (step + 1) % 5 == 0:
            say(f"  step {step + 1:3} of {config.steps}   loss {losses[-1]:.4f}   {times[-1]:.2f} s")

    engine.destroy()
    return {
        "parameters": parameters,
        "first_step_s": maximum_over_ranks(times[0]),
        "step_s": maximum_over_ranks(sorted(times[1:-1])[(config.steps - 2) // 2]),
        "losses": losses,
        "gradient_bytes": {moment: maximum_over_ranks(held) for moment, held in gradients.bytes.items()},
        "gpu_bytes": {moment: maximum_over_ranks(held) for moment, held in memory.bytes.items()},
    }


def check_installation():
    try:
        from transformers import Qwen3Config  # noqa: F401
    except ImportError:
        raise SystemExit("The demo needs transformers 4.51 or newer: pip install -r requirements/demo.txt") from None
    try:
        from deepspeed.compile.zero_1_and_2 import gradient_counters  # noqa: F401
    except ImportError:
        raise SystemExit(f"deepspeed {deepspeed.__version__} is not this fork: run pip install . first.") from None


def main():
    config, file = parse_arguments(__doc__.splitlines()[0], TEXT.stat().st_size)
    check_installation()
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    once = "" if on_gpus() else " (the first time, DeepSpeed builds its shared-memory operator: up to a minute)"
    with announce("Starting the process group" + once):
        deepspeed.init_distributed()
    if not on_gpus():
        torch.set_num_threads(max(1, os.cpu_count() // dist.get_world_size()))
    with announce("Loading DeepCompile's native code (the first time, it is built: up to two minutes)"):
        from deepspeed.compile.zero_1_and_2.gradient.native import reducer_module

        reducer_module()

    results = {}
    for name in ("off", "on"):
        results[name] = train(config, deepcompile=name == "on")
        gc.collect()
        get_accelerator().empty_cache()
    if dist.get_rank() == 0:
        print_table(config, results)
        if file:
            Path(file).write_text(json.dumps({"config": dataclasses.asdict(config), **results}, indent=2) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

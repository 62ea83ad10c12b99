# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Trains models on this machine's GPU, and compares the memory with what tools/fits estimates.

From the root of the repository::

    python -m benchmarks.fits_here              all models
    python -m benchmarks.fits_here 1.7B GPT     those whose name contains one of these

Each model trains in a process of its own, on one GPU: three steps, and one whose peaks are read. The last column is
what the process has taken of the GPU beside torch's allocator: the CUDA context and the code of kernels.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from .workload import build_model

GIB = 2**30
STEPS_BEFORE = 3


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A model whose own forward calls its layers, as that of nanoGPT does, so that it is compiled as one graph."""

    def __init__(self, layers=24, width=1024, heads=16, vocabulary=50304, positions=1024):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def _qwen3():
    from .fits import SIZES

    return build_model(SIZES["Qwen3-1.7B"], torch.get_default_dtype(), str(torch.get_default_device()), False)


def _llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    # Sizes of Llama-3.2-3B.
    config = LlamaConfig(
        num_hidden_layers=28,
        hidden_size=3072,
        intermediate_size=8192,
        num_attention_heads=24,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=True,
        max_position_embeddings=131072,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def _vision_transformer():
    from transformers import ViTConfig, ViTForImageClassification

    # Sizes of ViT-Huge.
    config = ViTConfig(
        hidden_size=1280,
        num_hidden_layers=32,
        num_attention_heads=16,
        intermediate_size=5120,
        image_size=224,
        patch_size=14,
        num_labels=1000,
        attn_implementation="sdpa",
    )
    return ViTForImageClassification(config)


@dataclasses.dataclass(frozen=True)
class Run:
    """A model to train on one GPU in bf16.

    Attributes:
        make: makes it on torch's default device.
        sequence, micro_batch: of a step; no sequence for images.
        checkpoint: whether each layer is computed again in the backward.
        options: more of the section ``compile``.
    """

    make: Callable[[], nn.Module]
    sequence: int | None
    micro_batch: int = 1
    checkpoint: bool = False
    options: tuple[tuple[str, object], ...] = ()

    @property
    def config(self) -> dict:
        return {
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "compile": {"deepcompile": True, **dict(self.options)},
        }


RUNS = {
    "Qwen3-1.7B, 1024 tokens": Run(_qwen3, 1024),
    "Qwen3-1.7B, 4096 tokens": Run(_qwen3, 4096),
    "Qwen3-1.7B, 16384 tokens": Run(_qwen3, 16384),
    "Qwen3-1.7B, 16384 tokens, checkpointed": Run(_qwen3, 16384, checkpoint=True),
    "Qwen3-1.7B, 4096 tokens, budget 0.5": Run(_qwen3, 4096, options=(("activation_memory_budget", 0.5),)),
    "Llama-3.2-3B, 4096 tokens": Run(_llama, 4096),
    "GPT of 24 layers, 8 x 1024 tokens": Run(GPT, 1024, 8),
    "ViT-Huge, 32 images": Run(_vision_transformer, None, 32),
}


def train(run: Run) -> dict[str, int]:
    """Trains a model on this process's GPU; returns what it needs of memory, in bytes."""
    import deepspeed
    from deepspeed.compile.tools.fits import sources

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    torch.cuda.set_device(0)
    deepspeed.init_distributed()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = run.make().train()
    torch.set_default_dtype(torch.float32)
    if run.checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    batch = sources.batch_for(model, run.micro_batch, run.sequence or 1)
    batch = {name: tensor.cuda() for name, tensor in batch.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=run.config)[0]
    engine.compile()
    del model, optimizer
    for _ in range(STEPS_BEFORE):
        engine.backward(sources.loss_of(engine(**batch)))
        engine.step()
    figures = {}

    def note(phase):
        torch.cuda.synchronize()
        # A single rank maps nothing.
        figures[phase] = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()

    note("warm")
    loss = sources.loss_of(engine(**batch))
    note("forward")
    engine.backward(loss)
    del loss
    note("backward")
    engine.step()
    note("step")
    free, total = torch.cuda.mem_get_info()
    # What is between two steps has no batch.
    del batch
    return {
        **{phase: figures[phase] for phase in ("forward", "backward", "step")},
        "at_rest": torch.cuda.memory_allocated(),
        "outside": total - free - torch.cuda.memory_reserved(),
    }


def estimated(run: Run) -> dict[str, int]:
    """Returns what tools/fits says of a run, in bytes."""
    from deepspeed.compile.fits import fits

    answer = fits(run.make, run.config, run.checkpoint, modes=(), sequence=run.sequence, gpus=1)
    row = answer.first
    if row.forward is None:
        raise SystemExit("\n".join(answer.notes))
    return {name: getattr(row, name) for name in ("forward", "backward", "step", "at_rest")}


def main() -> int:
    """Prints the table; returns the exit status."""
    from .fits import is_far

    parser = argparse.ArgumentParser(prog="python -m benchmarks.fits_here", description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="only models whose name contains one of these words")
    parser.add_argument("--train", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no GPU is there, and a CPU's allocator keeps no count of memory; run this on a machine with one")
    if options.train:
        options.json.write_text(json.dumps(train(RUNS[options.train])))
        return 0
    chosen = {name: run for name, run in RUNS.items() if any(word in name for word in options.words or [""])}
    print("| model | figure | estimated, GiB | measured | error | beside the allocator |\n|" + " --- |" * 6)
    far = 0
    for name, run in chosen.items():
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "figures.json"
            command = [sys.executable, "-m", "benchmarks.fits_here", "--train", name, "--json", str(file)]
            trained = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if trained.returncode:
                print(f"| {name} | failed: {trained.stdout.strip().splitlines()[-1]} | | | | |", flush=True)
                far += 1
                continue
            measured = json.loads(file.read_text())
        outside, label = f"{measured.pop('outside') / GIB:.2f}", name
        expected = estimated(run)
        for phase, figure in measured.items():
            wrong = is_far(expected[phase] / GIB, figure / GIB)
            far += wrong
            error = f"{expected[phase] / figure - 1:+.2%}{' **far**' if wrong else ''}"
            print(f"| {label} | {phase} | {expected[phase] / GIB:.3f} | {figure / GIB:.3f} | {error} | {outside} |")
            label = outside = ""
        sys.stdout.flush()
    return int(far > 0)


if __name__ == "__main__":
    sys.exit(main())

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Trains a small model with DeepCompile ZeRO, with copy engines and without."""

import gc
import os
import tempfile

import torch
import torch.distributed as dist

import deepspeed
from deepspeed.compile.zero_1_and_2.parameter.carrier import mapped_memory


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 2 * width)
        self.down = torch.nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(torch.nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.embedding = torch.nn.Embedding(1000, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(layers))
        self.head = torch.nn.Linear(width, 1000, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return torch.nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())


def make(copy_engines, stage=1, accumulation=1, width=256, layers=4, offload=False, dtype="bf16", **options):
    """Returns an engine whose parameters do not depend on the rank or on ``copy_engines``."""
    torch.manual_seed(0)
    module = Model(width, layers)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        dtype: {"enabled": True, **({"initial_scale_power": 24} if dtype == "fp16" else {})},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 200_000},
        "compile": {"deepcompile": True, "copy_engines": copy_engines, **options},
    }
    if offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        # The optimizer is torch's own.
        config["zero_force_ds_cpu_optimizer"] = False
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
    engine.compile(backend="eager")
    return engine


def run(engine, steps, accumulation=1, before=lambda step: None):
    """Trains, and returns the losses of this rank."""
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    losses = []
    for step in range(steps * accumulation):
        before(step)
        tokens = torch.randint(0, 1000, (2, 64), generator=generator).to(engine.device)
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def trained(copy_engines, steps=6, accumulation=1, reloads=False, moves=False, **arguments):
    """Returns (losses, this rank's master weights as one tensor, whether copy engines carried) of a new engine.

    Args:
        reloads: whether to go on from a checkpoint.
        moves: whether to go on after states were on the host.
    """
    engine = make(copy_engines, accumulation=accumulation, **arguments)
    losses = run(engine, steps, accumulation)
    if reloads:
        folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(folders)
        engine.save_checkpoint(folders[0])
        run(engine, 2)
        engine.load_checkpoint(folders[0])
        losses += run(engine, 3)
    if moves:
        before, flats = mapped_memory.nbytes, engine.optimizer.bit16_groups_flat
        engine.offload_states()
        freed = before - mapped_memory.nbytes
        assert freed == (sum(flat.nbytes for flat in flats) if copy_engines else 0), freed
        engine.reload_states()
        assert mapped_memory.nbytes == before
        losses += run(engine, 3)
    carriers = [type(carrier).__name__ for carrier in vars(engine.optimizer)["carriers"].values()]
    masters = engine.optimizer.single_partition_of_fp32_groups
    values = torch.cat([master.detach().float().flatten() for master in masters])
    engine.destroy()
    del engine
    gc.collect()
    return losses, values, "CopyEngineCarrier" in carriers


if __name__ == "__main__":
    # On a CPU, to try this file.
    dist.init_process_group("gloo" if not torch.cuda.is_available() else "nccl")
    blocks = {"regional_compilation": ["Block"]}
    for arguments in (
        {"stage": 2, "accumulation": 2, **blocks, "overlap_param_gather": True},
        {**blocks, "shard_parameters": "all"},
        {"reloads": True},
        {"offload": True},
    ):
        one, other = trained(None, **arguments), trained(False, **arguments)
        print(arguments, one[0][-1], other[0][-1], torch.equal(one[1], other[1]), one[2], flush=True)
    os._exit(0)

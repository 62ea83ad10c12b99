# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Times steps in which ranks exchange tokens: experts or sequences that lie on several ranks.

From the root of the repository, on two GPUs or more::

    deepspeed --module benchmarks.exchanges experts
    deepspeed --module benchmarks.exchanges experts --deepcompile
    deepspeed --module benchmarks.exchanges sequences --deepcompile --shard

``experts`` trains DeepSpeed's MoE layers between dense layers, each rank with its part of the experts. ``sequences``
trains a Qwen3 whose sequences lie on all ranks (Ulysses), with every layer checkpointed. Both have random weights,
AdamW, clipping, ZeRO-1 and bf16 on GPUs. ``--tiny`` runs on a CPU too (``--num_accelerators 2``).
"""

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import deepspeed

from .devices import mapped_bytes, on_gpus, synchronize, take_gpu
from .steps import Clock, leave, say

STEPS = 24
WARM = 10


class Sizes(NamedTuple):
    """``tokens`` are those of a rank in a step."""

    width: int
    layers: int
    tokens: int
    experts: int
    vocabulary: int


LARGE, TINY = Sizes(2048, 8, 16384, 8, 32000), Sizes(32, 2, 32, 4, 64)


class Layer(nn.Module):
    """A dense MLP, and experts of which each token goes to one."""

    def __init__(self, sizes: Sizes, ranks: int):
        from deepspeed.moe.layer import MoE

        super().__init__()
        width = sizes.width
        self.norm, self.norm_of_experts = nn.RMSNorm(width), nn.RMSNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        expert = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        # Tokens beyond an expert's capacity are dropped by their place, and not by chance.
        self.experts = MoE(width, expert, sizes.experts, ranks, k=1, use_rts=False)

    def forward(self, x):
        x = x + self.down(nn.functional.silu(self.up(self.norm(x))))
        mixed, balance, _ = self.experts(self.norm_of_experts(x))
        return x + mixed, balance


class Mixture(nn.Module):
    def __init__(self, sizes: Sizes, ranks: int):
        super().__init__()
        self.layers = nn.ModuleList(Layer(sizes, ranks) for _ in range(sizes.layers))
        self.head = nn.Linear(sizes.width, sizes.width, bias=False)

    def forward(self, x):
        balances = []
        for layer in self.layers:
            x, balance = layer(x)
            balances.append(balance)
        return self.head(x).float().square().mean() + 0.01 * sum(balances)


def with_experts(sizes: Sizes, config: dict[str, Any], device: str) -> tuple[Any, Callable[[], torch.Tensor]]:
    """Returns an engine, and a function that computes the loss of the next batch."""
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    dtype = torch.bfloat16 if on_gpus() else torch.float32
    model = Mixture(sizes, dist.get_world_size()).to(device, dtype)
    groups = split_params_into_different_moe_groups_for_optimizer({"params": [*model.parameters()], "name": "all"})
    optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=on_gpus())
    engine = deepspeed.initialize(model=model, config=config, optimizer=optimizer)[0]
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    shape = (4, sizes.tokens // 8, sizes.width)
    return engine, lambda: engine(torch.randn(shape, device=device, dtype=dtype, generator=generator))


def with_sequences(sizes: Sizes, config: dict[str, Any], device: str) -> tuple[Any, Callable[[], torch.Tensor]]:
    """Returns an engine, and a function that computes the loss of this rank's part of the next sequence."""
    import transformers

    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter

    ranks = dist.get_world_size()
    heads = max(sizes.width // 128, 2 * ranks)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.Qwen3Config(
            vocab_size=sizes.vocabulary,
            hidden_size=sizes.width,
            intermediate_size=3 * sizes.width,
            num_hidden_layers=sizes.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            head_dim=sizes.width // heads,
            attn_implementation="sdpa",
        )
    ).to(device, torch.bfloat16 if on_gpus() else torch.float32)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    mpu = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", ranks, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=on_gpus())
    config = {**config, "sequence_parallel_size": ranks}
    engine = deepspeed.initialize(model=model, config=config, optimizer=optimizer, mpu=mpu)[0]
    group, rank = mpu.get_sequence_parallel_group(), mpu.get_sequence_parallel_rank()
    parts = iter(UlyssesSPDataLoaderAdapter(_sequences(ranks * sizes.tokens, sizes), rank, group, ranks, device))

    def loss():
        part = {name: value.to(device) for name, value in next(parts).items()}
        labels = part.pop("shift_labels")
        part.pop("labels", None)
        return engine(**part, labels=labels, shift_labels=labels, use_cache=False).loss

    return engine, loss


def _sequences(length: int, sizes: Sizes) -> Iterator[dict[str, torch.Tensor]]:
    for step in itertools.count():
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        tokens = torch.randint(0, sizes.vocabulary, (1, length), generator=generator)
        yield {"input_ids": tokens, "labels": tokens.clone(), "position_ids": torch.arange(length)[None]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("experts", "sequences"))
    parser.add_argument("--deepcompile", action="store_true")
    parser.add_argument("--shard", action="store_true", help="shard_parameters, of sequences with --deepcompile")
    parser.add_argument("--tiny", action="store_true", help="a few steps of a small model")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # given by the launcher
    args = parser.parse_args()
    if args.shard and not (args.deepcompile and args.what == "sequences"):
        parser.error("--shard goes with sequences --deepcompile")
    device = take_gpu() if on_gpus() else "cpu"
    deepspeed.init_distributed()
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": on_gpus()},
        "zero_optimization": {"stage": 1},
        "compile": {"deepcompile": args.deepcompile, **({"shard_parameters": "all"} if args.shard else {})},
        "steps_per_print": 10**9,
    }
    make, sizes = {"experts": with_experts, "sequences": with_sequences}[args.what], TINY if args.tiny else LARGE
    engine, next_loss = make(sizes, config, device)
    steps, warm = (4, 1) if args.tiny else (STEPS, WARM)
    clock, losses = Clock(), []
    for step in range(steps):
        if on_gpus() and step == warm:
            torch.cuda.reset_peak_memory_stats()
        loss = next_loss()
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
        clock.mark()
    synchronize()
    seconds = clock.seconds()
    found = [None] * dist.get_world_size()
    peak = (torch.cuda.max_memory_allocated() + mapped_bytes()) / 2**30 if on_gpus() else 0.0
    dist.all_gather_object(found, (statistics.median(seconds[warm:]), peak, seconds[0]))
    slowest, highest, first = map(max, zip(*found))
    mode = "off" if not args.deepcompile else "DeepCompile, sharded" if args.shard else "DeepCompile"
    say(
        f"{args.what}, {mode}: {1000 * slowest:.1f} ms a step, peak {highest:.3f} GiB, first step {first:.1f} s, "
        f"losses {losses[0].item():.4f} to {losses[-1].item():.4f}"
    )
    engine.destroy()
    leave()


if __name__ == "__main__":
    main()

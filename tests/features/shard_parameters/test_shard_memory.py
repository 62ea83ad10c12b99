# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What a rank holds while trained parameters are sharded."""

import ctypes
import gc

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspeed.compile.features.shard_parameters import feature

from support.training import Case, device, make_engine

WIDTH, DEPTH = 512, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Body(nn.Module):
    def __init__(self, checkpointed):
        super().__init__()
        self.blocks, self.checkpointed = nn.ModuleList(Block() for _ in range(DEPTH)), checkpointed

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.checkpointed == "reentrant") if self.checkpointed else block(x)
        return x


class Model(nn.Module):
    def __init__(self, checkpointed):
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(50, WIDTH), Body(checkpointed), nn.Linear(WIDTH, 50)

    def forward(self, ids):
        return F.cross_entropy(self.head(self.body(self.embedding(ids))).flatten(0, 1), ids.flatten())


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def in_use():
    """Bytes that malloc has given out."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    info = mallinfo()
    return info.uordblks + info.hblkhd


def measure(checkpointed, stage, sharded, dtype="fp32"):
    torch._dynamo.reset()
    torch.manual_seed(0)
    most, phase = {}, ["rest"]

    def sample(*_):
        most[phase[0]] = max(most.get(phase[0], 0), in_use() - before)

    gc.collect()
    before = in_use()
    module = Model(checkpointed).to(device())
    options = {"regional_compilation": True, **({"shard_parameters": "all"} if sharded else {})}
    case = Case(adam=True, stage=stage, dtype=dtype, bucket=10**5, config={"compile": options})
    engine = make_engine(module, case)
    units = feature.sharded_blocks(engine)
    optimizer = engine.optimizer

    def hook(block, args, output):
        sample()
        if output.requires_grad:
            output.register_hook(sample)

    def watch():
        for block in module.body.blocks:
            block.register_forward_hook(hook)

    step_of_groups = optimizer._optimizer_step
    optimizer._optimizer_step = lambda group: (sample(), step_of_groups(group), sample())
    watch()
    for step in range(4):
        if step == 2:
            gc.collect()
            most.clear()
        ids = torch.randint(0, 50, (1, 4))
        phase[0] = "forward"
        loss = engine(ids)
        phase[0] = "backward"
        engine.backward(loss)
        del loss
        phase[0] = "step"
        engine.step()
        gc.collect()
        phase[0] = "rest"
        sample()
    states = sum(value.nbytes for state in optimizer.optimizer.state.values() for value in state.values())
    states += sum(master.nbytes for master in optimizer.single_partition_of_fp32_groups)
    size = sum(parameter.numel() for parameter in module.parameters()) * optimizer.bit16_groups_flat[0].element_size()
    block = (
        sum(each.numel() for each in module.body.blocks[0].parameters())
        * size
        // sum(parameter.numel() for parameter in module.parameters())
    )
    found = {name: value - states for name, value in most.items()}
    home = sum(each.memory.nbytes for each in units.partitions.homes) if units else size
    buffers = units.outside.nbytes if units else 0
    engine.destroy()
    return {**found, "whole": size, "block": block, "home": home, "outside": buffers}


def test_memory(ranks, capsys):
    for checkpointed in (None, "non-reentrant", "reentrant"):
        for sharded in (False, True):
            group = ranks(2)
            results = group.run(measure, checkpointed, 2, sharded)
            group.stop()
            for rank, values in enumerate(results):
                with capsys.disabled():
                    shown = {k: round(v / 2**20, 2) for k, v in values.items()}
                    print(f"\n{checkpointed} rank {rank} {'sharded' if sharded else 'whole'}: ", shown)

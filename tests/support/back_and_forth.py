# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""A training that DeepSpeed as it was released and this fork can both go on with.

The function runs on every rank, in processes of either, so this file uses nothing that only the fork has.
"""

import dataclasses
import os
import sys
from typing import Any, Dict, List, NamedTuple, Tuple
from unittest import mock

import torch
import torch.distributed as dist

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from support.models import VOCABULARY, BlocksWithin

STEPS = 3  # of each part of a training
ACCUMULATION = 2


@dataclasses.dataclass(frozen=True)
class Kind:
    """What is trained: the stage of ZeRO, the format of the parameters, and how many groups they are in.

    The second group has another learning rate, and no weight decay.
    """

    stage: int
    dtype: str
    groups: int = 1


KINDS = [Kind(1, "fp32"), Kind(2, "bf16")]
IN_BF16 = [Kind(1, "bf16"), Kind(2, "bf16")]
IN_GROUPS = [Kind(1, "bf16", groups=2), Kind(2, "fp32", groups=2)]


class Part(NamedTuple):
    """What came of a part of a training."""

    version: str  # of the DeepSpeed that trained
    step_local: bool  # whether it trained with the fork's DeepCompile
    losses: List[float]  # of each micro-batch, on this rank
    schedule: Tuple[int, List[float]]  # the number of steps and the learning rate, at the end
    loaded: Dict[str, Any]  # this rank's masters and optimizer states at the beginning, by name
    reached: Dict[str, Any]  # and at the end


def part(kinds, folder, number, parts=1, options=None, steps=STEPS):
    """Goes on with a training of each kind, from where the part before has saved it, and saves it in ``folder``.

    Args:
        kinds: list of :class:`Kind`.
        folder: where checkpoints are.
        number: the number of this part. The first one begins anew.
        parts: how many parts to train at once, without a checkpoint between them.
        options: the section ``compile`` of the configuration. DeepSpeed as it was released has DeepCompile off.
        steps: of a part. With 0 it saves what it has loaded.
    """
    return [_part(kind, _folder(folder, kind), number, parts, options, steps) for kind in kinds]


def _folder(folder, kind):
    return os.path.join(folder, f"stage{kind.stage}")


def _engine(kind, seed, options, **config):
    torch._dynamo.reset()
    torch.manual_seed(seed)
    module = BlocksWithin().to(get_accelerator().current_device_name())
    groups, rates = [{"params": [*module.parameters()]}], [0.02]
    if kind.groups == 2:
        matrices = [parameter for parameter in module.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in module.parameters() if parameter.dim() <= 1]
        groups, rates = [{"params": matrices}, {"params": others, "weight_decay": 0.0, "lr": 0.01}], [0.02, 0.01]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": kind.dtype == "bf16"},
        "zero_optimization": {"stage": kind.stage, "reduce_bucket_size": 150},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "eps": 1e-4, "weight_decay": 0.1, "torch_adam": True}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": [0.0] * len(rates), "warmup_max_lr": rates, "warmup_num_steps": 5},
        },
        "compile": options or {"deepcompile": False},
        **config,
    }
    engine = deepspeed.initialize(model=module, model_parameters=groups, config=config)[0]
    if config["compile"]["deepcompile"]:
        engine.compile(backend="eager")
    return engine


def _train(engine, steps):
    """Returns the loss of each micro-batch."""
    losses = []
    for step in steps:
        for micro_step in range(ACCUMULATION):
            generator = torch.Generator().manual_seed(1000 * step + 100 * micro_step + dist.get_rank())
            ids = torch.randint(0, VOCABULARY, (2, 4), generator=generator).to(engine.device)
            loss = engine(ids)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
    return losses


def _part(kind, folder, number, parts, options, steps):
    engine = _engine(kind, number, options)
    if number:
        engine.load_checkpoint(folder, tag=f"part{number - 1}")
    loaded = _state(engine)
    losses = _train(engine, range(number * steps, (number + parts) * steps))
    if parts == 1:
        engine.save_checkpoint(folder, tag=f"part{number}")
    name = type(engine.optimizer).__name__
    reached, schedule = _state(engine), (engine.global_steps, engine.get_lr())
    engine.destroy()
    return Part(_version(), name.startswith("StepLocal"), losses, schedule, loaded, reached)


def save_for_other_ranks(kinds, folder, options=None):
    """Trains each kind, and saves it. Returns what each had then: states of whole parameters, by name."""
    return [_save_for_other_ranks(kind, _folder(folder, kind), options) for kind in kinds]


def _save_for_other_ranks(kind, folder, options):
    engine = _engine(kind, 0, options)
    _train(engine, range(STEPS))
    engine.save_checkpoint(folder, tag="saved")
    seen = _whole(engine)
    engine.destroy()
    return seen


def convert(kinds, folder, *flags):
    """Makes a universal checkpoint of each, in one process, as the command does."""
    for kind in kinds:
        source, target = (os.path.join(_folder(folder, kind), tag) for tag in ("saved", "universal"))
        arguments = ["ds_to_universal.py", "--input_folder", source, "--output_folder", target]
        arguments += ["--num_extract_workers", "1", "--num_merge_workers", "1", *flags]
        with mock.patch.object(sys, "argv", arguments):
            ds_to_universal.main(ds_to_universal.parse_arguments())


def load_of_other_ranks(kinds, folder, options=None):
    """Loads universal checkpoints, and trains. Returns the version, and what each had before and after that."""
    return _version(), [_load_of_other_ranks(kind, _folder(folder, kind), options) for kind in kinds]


def _load_of_other_ranks(kind, folder, options):
    engine = _engine(kind, 1, options, checkpoint={"load_universal": True})
    engine.load_checkpoint(folder, tag="universal")
    loaded = _whole(engine)
    _train(engine, range(STEPS, 2 * STEPS))
    reached, schedule = _whole(engine), (engine.global_steps, engine.get_lr())
    engine.destroy()
    return loaded, reached, schedule


def _version():
    """Returns the version without the commit, of which the fork's version has a name."""
    return deepspeed.__version__.partition(".g")[0]


def _whole(engine):
    """Master weights and states of whole parameters, as arrays. All ranks call this."""
    if not engine.is_deepcompile_enabled():
        # DeepSpeed as it was released links all groups when the first has stepped, and the second has no states then.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    seen = {}
    for name, parameter in engine.module.named_parameters():
        seen[f"master {name}"] = safe_get_full_fp32_param(parameter)
        for key in ("exp_avg", "exp_avg_sq"):
            seen[f"{key} {name}"] = safe_get_full_optimizer_state(parameter, key)
    return {name: value.detach().cpu().numpy().copy() for name, value in seen.items()}


def _state(engine):
    """This rank's masters and optimizer states, as arrays, which other processes can read.

    They are those of the state dict, which has the elements in DeepSpeed's order, without states in 8 bits. All ranks
    call this.
    """
    saved, seen = engine.optimizer.state_dict(), {}
    states = saved["base_optimizer_state"]["state"]
    for index, master in enumerate(saved["single_partition_of_fp32_groups"]):
        tensors = {"master": master, **states.get(index, {})}
        tensors = {name: value for name, value in tensors.items() if not isinstance(value, dict)}
        seen.update({f"{name} {index}": torch.as_tensor(value) for name, value in tensors.items()})
    return {name: value.detach().cpu().numpy().copy() for name, value in seen.items()}

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is loaded by another number of ranks, and exported."""

import contextlib
import dataclasses
import os
import subprocess
import sys
from typing import List, NamedTuple

import pytest
import torch
import torch.distributed as dist

from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from support.checkpoints import Plain, Run, differing, start, train
from support.parameter_gather import DELAY, one_rank_late
from support.training import BOUND, ROUNDING, device, relative_error, total_error

# Another number of ranks -------------------------------------------------------------------------------------------


def whole_state(module):
    """Master parameters and optimizer states of whole parameters: {name: tensor}, the same on each rank."""
    seen = {}
    for name, parameter in module.named_parameters():
        seen[name] = safe_get_full_fp32_param(parameter).clone()
        for key in ("exp_avg", "exp_avg_sq"):
            seen[f"{key} {name}"] = safe_get_full_optimizer_state(parameter, key).clone()
    return seen


def save_for_other_ranks(run, folder):
    """Saves a checkpoint in ``folder``, and there what an engine had then and had two steps later."""
    module, engine = start(run)
    train(engine, run, range(3))
    engine.save_checkpoint(folder, tag="saved")
    seen = {"saved": whole_state(module)}
    train(engine, run, [3, 4])
    seen["after"] = whole_state(module)
    if dist.get_rank() == 0:
        torch.save(seen, os.path.join(folder, "seen.pt"))
    engine.destroy()


class Loaded(NamedTuple):
    """What an engine that loaded a universal checkpoint had and came to."""

    differing: List[str]  # names of what differs after loading
    error: float  # two steps later
    moved: float  # in these


def load_universal(run, folder):
    """Loads a universal checkpoint and trains on."""
    seen = torch.load(os.path.join(folder, "seen.pt"), map_location=device())
    module, engine = start(dataclasses.replace(run, config={"checkpoint": {"load_universal": True}}), seed=1)
    engine.load_checkpoint(folder, tag="universal")
    loaded = whole_state(module)
    with torch.no_grad():
        written = {name: parameter.clone() for name, parameter in module.named_parameters()}
    wrong = [name for name, value in written.items() if not torch.equal(value, loaded[name].to(value.dtype))]
    train(engine, run, [3, 4])
    after = whole_state(module)
    engine.destroy()
    return Loaded(
        differing(loaded, seen["saved"]) + wrong,
        total_error(after.values(), seen["after"].values()),
        total_error(seen["after"].values(), seen["saved"].values()),
    )


class LoadedModule(NamedTuple):
    """The errors of an engine that loaded parameters alone, and how far a step moved it."""

    parameters: float
    masters: float  # made from the parameters
    stepped: float  # of the masters after the step
    moved: float


def load_module_only(run, folder):
    """Loads parameters alone, and takes a step with them beside a plain loop that begins with the same."""
    seen = torch.load(os.path.join(folder, "seen.pt"), map_location=device())["saved"]
    module, engine = start(run, seed=1)
    engine.load_checkpoint(folder, tag="saved", load_module_only=True)
    plain, dtype = Plain(run), next(module.parameters()).dtype
    names = [name for name, _ in module.named_parameters()]
    expected = [seen[name].to(dtype) for name in names]
    with torch.no_grad():
        for name, value in zip(names, expected, strict=True):
            plain.module.get_parameter(name).copy_(value)
    read = relative_error(module.parameters(), expected)
    masters = relative_error([safe_get_full_fp32_param(p) for p in module.parameters()], plain.module.parameters())
    train(engine, run, [0])
    plain.train([0])
    after = [safe_get_full_fp32_param(parameter) for parameter in module.parameters()]
    stepped, moved = total_error(after, plain.module.parameters()), total_error(after, expected)
    engine.destroy()
    return LoadedModule(read, masters, stepped, moved)


# How many ranks save, and what; each is loaded by as many as the others have.
SAVED = [
    (2, Run(stage=1, dtype="fp32")),
    (2, Run(stage=2, dtype="bf16", deepcompile=False)),
    (3, Run(stage=1, dtype="bf16")),
    (3, Run(stage=2, dtype="fp32")),
    (3, Run(stage=2, dtype="bf16", offloaded=True)),
]
CONVERT = """
import sys
from deepspeed.checkpoint import ds_to_universal
for folder in sys.argv[1:]:
    arguments = ["--input_folder", folder + "/saved", "--output_folder", folder + "/universal"]
    arguments += ["--inject_missing_state", "--num_extract_workers", "1", "--num_merge_workers", "1"]
    sys.argv = ["ds_to_universal.py", *arguments]
    ds_to_universal.main(ds_to_universal.parse_arguments())
"""


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """Returns the folder of each of SAVED, with the checkpoint as it was saved and the universal one made from it."""
    folders = [str(tmp_path_factory.mktemp(f"saved by {world} ")) for world, _ in SAVED]
    for (world, run), folder in zip(SAVED, folders, strict=True):
        ranks(world).run(save_for_other_ranks, run, folder)
    # As one process: most of the time goes into starting it.
    subprocess.run([sys.executable, "-c", CONVERT, *folders], check=True, capture_output=True, timeout=240)
    return folders


def saved_id(index):
    world, run = SAVED[index]
    return f"ranks{world}-stage{run.stage}-{run.dtype}{'-offloaded' if run.offloaded else ''}"


@pytest.mark.parametrize("deepcompile", [True, False], ids=["loaded-with", "loaded-without"])
# In this order the processes of three ranks start once.
@pytest.mark.parametrize("index", range(len(SAVED)), ids=saved_id)
def test_another_number_of_ranks(saved, ranks, index, deepcompile):
    before, run = SAVED[index]
    run, folder = dataclasses.replace(run, deepcompile=deepcompile), saved[index]
    for loaded in ranks(5 - before).run(load_universal, run, folder):
        assert loaded.differing == []
        assert loaded.moved > 1e-2
        assert loaded.error < ROUNDING[run.dtype] * loaded.moved
    for loaded in ranks(5 - before).run(load_module_only, run, folder):
        assert loaded.parameters == loaded.masters == 0
        assert loaded.moved > 1e-2
        # The plain loop computes in fp32.
        assert loaded.stepped < BOUND * loaded.moved or run.dtype != "fp32"


# Exports -----------------------------------------------------------------------------------------------------------


class Exported(NamedTuple):
    """Names of what is not bitwise the engine's own, in each export."""

    sixteen_bits: List[str]
    state_dict: List[str]  # of the module
    fp32: List[str]  # from a ZeRO checkpoint


def export(run, folder, late=False):
    """Exports right behind a step."""
    module, engine = start(run)
    with one_rank_late(DELAY) if late else contextlib.nullcontext():
        # The last rank is late with the second step, and the first one writes the files.
        train(engine, run, [0, 1])
        engine.save_16bit_model(folder)
    engine.save_checkpoint(folder)
    dist.barrier()
    exported = {
        "sixteen_bits": torch.load(os.path.join(folder, "pytorch_model.bin"), map_location=device()),
        "state_dict": engine.module_state_dict(),
        "fp32": get_fp32_state_dict_from_zero_checkpoint(folder),
    }
    # Of what a step has written, so that old values do not pass for new ones.
    own = dict(module.named_parameters(remove_duplicate=False))
    masters = {
        name: safe_get_full_fp32_param(parameter) if hasattr(parameter, "_hp_mapping") else parameter.float()
        for name, parameter in own.items()
    }
    wrong = {how: [n for n in own if n not in values] for how, values in exported.items()}
    for how, values in exported.items():
        expected = masters if how == "fp32" else own
        wrong[how] += [n for n, v in values.items() if not torch.equal(v.to(device()), expected[n].detach())]
        wrong[how] += [n for n, v in values.items() if not torch.equal(v.to(device()), masters[n].to(v.dtype))]
    engine.destroy()
    return Exported(**wrong)


@pytest.mark.parametrize(
    "run",
    [
        Run(stage=1, dtype="bf16", groups=3, overlapped=True),
        Run(stage=2, dtype="bf16", model="FrozenAndUnused"),
        Run(stage=2, dtype="fp32", model="OddSizes", groups=2),
        Run(stage=2, dtype="fp16", model="TiedEmbedding", overlapped=True),
    ],
    ids=lambda run: f"stage{run.stage}-{run.model}-{run.dtype}",
)
def test_exported(ranks, tmp_path, run):
    for wrong in ranks(2).run(export, run, str(tmp_path), late=run.overlapped):
        assert wrong == Exported([], [], [])

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is loaded by another number of ranks, and exported."""

import contextlib
import dataclasses
import os
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from support.checkpoints import Plain, Run, differing, start, to_universal, train, whole
from support.on_ranks import on_ranks
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


def check_universal(run, folder):
    """Loads a universal checkpoint and trains on, beside the engine that saved."""
    seen = torch.load(os.path.join(folder, "seen.pt"), map_location=device())
    config = {**(run.config or {}), "checkpoint": {"load_universal": True}}
    module, engine = start(dataclasses.replace(run, config=config), seed=1)
    engine.load_checkpoint(folder, tag="universal")
    loaded = whole_state(module)
    with whole(engine, run), torch.no_grad():
        written = {name: parameter.clone() for name, parameter in module.named_parameters()}
    wrong = [name for name, value in written.items() if not torch.equal(value, loaded[name].to(value.dtype))]
    train(engine, run, [3, 4])
    after = whole_state(module)
    engine.destroy()
    assert differing(loaded, seen["saved"]) + wrong == []
    moved = total_error(seen["after"].values(), seen["saved"].values())
    assert moved > 1e-2
    assert total_error(after.values(), seen["after"].values()) < ROUNDING[run.dtype] * moved


def check_module_only(run, folder):
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
    with whole(engine, run):
        assert relative_error(module.parameters(), expected) == 0
    masters = [safe_get_full_fp32_param(parameter) for parameter in module.parameters()]
    assert relative_error(masters, plain.module.parameters()) == 0
    train(engine, run, [0])
    plain.train([0])
    after = [safe_get_full_fp32_param(parameter) for parameter in module.parameters()]
    engine.destroy()
    moved = total_error(after, expected)
    assert moved > 1e-2
    # The plain loop computes in fp32.
    assert total_error(after, plain.module.parameters()) < BOUND * moved or run.dtype != "fp32"


class Converted(NamedTuple):
    """A checkpoint and the universal one made from it, for as many ranks as load it."""

    saved_by: int
    loaded_by: int
    run: Run
    folder: str = ""


SLOW = pytest.mark.slow
ROUND_ROBIN = {"zero_optimization": {"round_robin_gradients": True}}
REMAINDERS = {"compile": {"store_param_remainders": True}}
# In this order the processes of three ranks start seldom.
CONVERTED = [
    Converted(2, 1, Run("FillsPartition", stage=1, groups=2)),
    Converted(1, 2, Run("FillsPartition", stage=2, dtype="bf16", groups=2, offloaded=True)),
    Converted(2, 1, Run("BlocksWithin", stage=2, sharded=True)),
    pytest.param(Converted(2, 3, Run("BlocksWithin", stage=1, dtype="bf16", sharded=True)), marks=SLOW),
    pytest.param(Converted(3, 2, Run("BlocksWithin", stage=2, sharded=True, deepcompile=False)), marks=SLOW),
    pytest.param(Converted(2, 3, Run("BlocksWithin", dtype="bf16", sharded=True, config=REMAINDERS)), marks=SLOW),
    pytest.param(Converted(2, 3, Run(stage=1)), marks=SLOW),
    pytest.param(Converted(2, 1, Run("BlocksWithin", stage=2, config=ROUND_ROBIN)), marks=SLOW),
    pytest.param(Converted(2, 3, Run(stage=2, dtype="bf16", deepcompile=False)), marks=SLOW),
    pytest.param(Converted(3, 2, Run(stage=1, dtype="bf16")), marks=SLOW),
    pytest.param(Converted(3, 2, Run(stage=2)), marks=SLOW),
    pytest.param(Converted(3, 2, Run(stage=2, dtype="bf16", offloaded=True)), marks=SLOW),
]


def converted_id(value):
    run = value.run
    offloaded = "-offloaded" if run.offloaded else ""
    sharded = "-sharded" if run.sharded else ""
    options = "".join(f"-{name}" for section in (run.config or {}).values() for name in section)
    return f"ranks{value.saved_by}to{value.loaded_by}-stage{run.stage}-{run.dtype}{offloaded}{sharded}{options}"


@pytest.fixture(scope="module", params=CONVERTED, ids=converted_id)
def converted(request, ranks, tmp_path_factory):
    """Returns one of CONVERTED with its folder."""
    value = request.param._replace(folder=str(tmp_path_factory.mktemp("saved")))
    ranks(value.saved_by).run(save_for_other_ranks, value.run, value.folder)
    to_universal(f"{value.folder}/saved", f"{value.folder}/universal")
    return value


@pytest.mark.parametrize("deepcompile", [True, False], ids=["loaded-with", "loaded-without"])
def test_another_number_of_ranks(converted, ranks, deepcompile):
    """A parameter that lies elsewhere in the partitions of other ranks would get another one's states."""
    run = dataclasses.replace(converted.run, deepcompile=deepcompile)
    ranks(converted.loaded_by).run(check_universal, run, converted.folder)


@pytest.mark.parametrize("deepcompile", [True, False], ids=["loaded-with", "loaded-without"])
def test_parameters_alone(converted, ranks, deepcompile):
    """Master weights that are not made anew from loaded parameters would undo the load in the first step."""
    run = dataclasses.replace(converted.run, deepcompile=deepcompile)
    ranks(converted.loaded_by).run(check_module_only, run, converted.folder)


# Exports -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "run",
    [
        Run(stage=1, dtype="bf16", groups=3, overlapped=True),
        Run(stage=2, dtype="bf16", model="FrozenAndUnused"),
        Run(stage=2, dtype="bf16", model="BlocksWithin", groups=2, sharded=True),
        Run(stage=2, dtype="fp32", model="OddSizes", groups=2),
        Run(stage=2, dtype="fp16", model="TiedEmbedding", overlapped=True),
    ],
    ids=lambda run: f"stage{run.stage}-{run.model}-{run.dtype}",
)
@on_ranks(2)
def test_exported(tmp_path, run):
    """An export right behind a step that does not wait for parameters has those from before the step."""
    module, engine = start(run)
    with one_rank_late(DELAY) if run.overlapped else contextlib.nullcontext():
        # The last rank is late with the second step, and the first one writes the files.
        train(engine, run, [0, 1])
        engine.save_16bit_model(tmp_path)
    engine.save_checkpoint(tmp_path)
    dist.barrier()
    exported = {
        "16 bits": torch.load(tmp_path / "pytorch_model.bin", map_location=device()),
        "state dict": engine.module_state_dict(),
        "fp32": get_fp32_state_dict_from_zero_checkpoint(tmp_path),
    }
    # Of what a step has written, so that old values do not pass for new ones.
    with whole(engine, run):
        parameters = dict(module.named_parameters(remove_duplicate=False))
        own = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        masters = {
            name: safe_get_full_fp32_param(parameter) if hasattr(parameter, "_hp_mapping") else parameter.float()
            for name, parameter in parameters.items()
        }
    if run.sharded and dist.get_rank() > 0:
        # The first rank alone gets the values.
        exported["state dict"] = own
    wrong = {how: [n for n in own if n not in values] for how, values in exported.items()}
    for how, values in exported.items():
        expected = masters if how == "fp32" else own
        wrong[how] += [n for n, v in values.items() if not torch.equal(v.to(device()), expected[n].detach())]
        wrong[how] += [n for n, v in values.items() if not torch.equal(v.to(device()), masters[n].to(v.dtype))]
    engine.destroy()
    assert not any(wrong.values()), wrong

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""``compile.optimizer_states: "8bit"`` in engines: training, overflows, checkpoints, refusals."""

import dataclasses
from typing import Any, List, NamedTuple

import pytest
import torch
import torch.distributed as dist

from deepspeed.compile.features.update.blockwise import FORM, LENGTHS, SIGNED, is_blockwise, names_of
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)

from support.checkpoints import (
    Run,
    assert_same,
    compared,
    differing,
    in_base_order,
    sequences,
    start,
    state,
    to_universal,
    train,
)
from support.ids import vary
from support.lifetime import take_elsewhere
from support.options import outcome
from support.training import (
    ROUNDING,
    Case,
    compile_backend,
    device,
    make_engine,
    relative_error,
    total_error,
)

EIGHT_BITS = {"compile": {"optimizer_states": "8bit"}}
# Blocks of 8-bit states, which such an engine loads, need large shards: see small_shards().
FP32_STATES = {"compile": {"optimizer_states": None}}


def run_of(**varied):
    """Returns a run with 8-bit states. Only this fork's DeepCompile has these."""
    config = {**EIGHT_BITS, **varied.pop("config", {})}
    return Run(**{"model": "AlignedBlocksWithin", "config": config, **varied})


def states_of(engine):
    """Returns the optimizer's states of each parameter group, of this rank."""
    optimizer = engine.optimizer
    return [optimizer.optimizer.state[master] for master in optimizer.single_partition_of_fp32_groups]


def values(engine):
    """Returns the states of all parameters, as a user reads them."""
    parameters = engine.module.parameters()
    return [safe_get_full_optimizer_state(parameter, name).clone() for parameter in parameters for name in SIGNED]


def start_uncompiled(run, seed=0):
    """Makes a module and its engine, on which engine.compile() has not been called."""
    config = {name: options for name, options in run.config.items() if name != "compile"}
    started = start(dataclasses.replace(run, deepcompile=False, config=config), seed)
    compile_config = started.engine._config.compile_config
    compile_config.deepcompile, compile_config.optimizer_states = True, "8bit"
    return started


# Training -----------------------------------------------------------------------------------------------------------


class BothWays(NamedTuple):
    """A training with 8-bit states beside one with fp32 states."""

    blockwise: bool  # whether all states of the first are in 8 bits
    error: float  # of the master weights, relative to their norm
    moved: float  # how far training moved them, relative to their norm
    states: float  # the largest error of a state of a parameter


def train_both_ways(run, between=None):
    """Trains for five steps. ``between``: None, or "offload" to move states to the host and back before the fourth."""
    seen, blockwise = [], False
    # Without DeepCompile, DeepSpeed finds no states of a second group, and none that were moved to the host and back.
    for variant in (run, dataclasses.replace(run, config={**run.config, "compile": {}})):
        module, engine = start(variant)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad and parameter.numel()]
        begin = [parameter.detach().float().clone() for parameter in trained]
        train(engine, run, range(3))
        if between == "offload":
            engine.offload_states()
            assert all(value.is_cpu for states in states_of(engine) for value in states.values())
            take_elsewhere(engine)
            engine.reload_states()
        train(engine, run, range(3, 5))
        blockwise = blockwise or all(map(is_blockwise, states_of(engine)))
        seen.append([safe_get_full_fp32_param(parameter).clone() for parameter in trained])
        seen.append(
            [safe_get_full_optimizer_state(parameter, name).clone() for parameter in trained for name in SIGNED]
        )
        engine.destroy()
    return BothWays(
        blockwise, total_error(seen[0], seen[2]), total_error(seen[2], begin), total_error(seen[1], seen[3])
    )


@pytest.mark.options("compile.optimizer_states")
@pytest.mark.follows(
    "has no form for the third state of amsgrad=true; set amsgrad to false",
    "set torch_autocast.dtype to bfloat16, or leave {} out",
    "set zero_optimization.elastic_checkpoint to false, or leave compile.optimizer_states out",
)
@vary(
    "varied",
    [
        {"stage": 2, "groups": 2},
        {"stage": 1, "clipping": 0.05, "dtype": "bf16"},
        {"dtype": "bf16", "stage": 2, "groups": 2, "accumulation": 3, "overlapped": True, "model": "BlocksWithin"},
        {"model": "OddSizes", "groups": 2, "clipping": 0.05, "stage": 2},
        # The first steps overflow.
        {"dtype": "fp16", "config": {"fp16": {"enabled": True, "initial_scale_power": 18, "hysteresis": 1}}},
        {"dtype": "bf16", "stage": 2, "config": {"data_types": {"grad_accum_dtype": "fp32"}}},
        {"between": "offload", "stage": 2},
        # As refusals advise.
        {
            "config": {
                "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
                "zero_optimization": {"elastic_checkpoint": False},
            }
        },
    ],
)
def test_it_trains_as_with_states_in_fp32(ranks, varied):
    """Scales of the wrong blocks, or states of a step that overflowed, would leave the parameters far from these."""
    between = varied.get("between")
    run = run_of(**{name: value for name, value in varied.items() if name != "between"})
    for both in ranks(2).run(train_both_ways, run, between):
        assert both.blockwise
        assert both.moved > 1e-2, both
        # Values are rounded to some 1/64 of the largest one of their block at most, in each step.
        assert both.error < 0.05 * both.moved + ROUNDING[run.dtype], both
        assert both.states < 0.03, both


class RarelyHit(torch.nn.Module):
    """Four experts, one of which a step uses. The weights of three share blocks of 8-bit states."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(24, 24)
        self.weight = torch.nn.Parameter(torch.randn(4, 24, 24) / 5)

    def forward(self, x, chosen):
        weight = (self.weight * chosen.view(-1, 1, 1)).sum(0)
        return (self.head(x @ weight) - 1).square().mean()


def train_rarely_hit(stage, steps=30, rare=(0, 24)):
    """Trains with 8-bit states, and without DeepCompile.

    Returns of each the weight at the end, the largest change of an element in a step, and whether states have 8 bits.
    """
    found = []
    for config in (EIGHT_BITS, {}):
        torch.manual_seed(0)
        module = RarelyHit().to(device())
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        case = Case(stage=stage, clipping=0.5, config=config, deepcompile=bool(config))
        engine = make_engine(module, case, optimizer=optimizer)
        largest, before = 0.0, safe_get_full_fp32_param(module.weight).clone()
        for step in range(steps):
            torch.manual_seed(100 * step + dist.get_rank())
            # The gradients of the expert that is rarely hit are small beside those of the others.
            expert, size = (3, 1e-3) if step in rare else (step % 3, 1.0)
            chosen = torch.nn.functional.one_hot(torch.tensor(expert), 4).float().to(device())
            engine.backward(engine(size * torch.randn(8, 24, device=device()), chosen))
            engine.step()
            now = safe_get_full_fp32_param(module.weight).clone()
            largest, before = max(largest, float((now - before).abs().max())), now
        found.append((before, largest, all(map(is_blockwise, states_of(engine)))))
        engine.destroy()
    return found


@pytest.mark.options("compile.optimizer_states")
@vary("stage", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_experts_that_are_rarely_hit(ranks, stage):
    """If a second moment decayed to zero in 8 bits, the next gradient would move weights by thousands of rates."""
    for (eight, moved, blockwise), (full, moved_full, _) in ranks(2).run(train_rarely_hit, stage):
        assert blockwise
        assert moved < 2 * moved_full < 0.02
        assert relative_error([eight], [full]) < 0.01


def overflow(run):
    """Returns what differs after a step that overflows, among all that a checkpoint has."""
    _, engine = start(run)
    train(engine, run, range(2))
    before = state(engine)
    engine.backward(engine(sequences(run, 2, 0)) * torch.inf)
    engine.step()
    after = state(engine)
    engine.destroy()
    return differing(after, before)


@vary("stage", [1, 2])
def test_an_overflow_leaves_states_as_they_are(ranks, stage):
    """A block's scale would become infinite, and all its values with it."""
    for names in ranks(2).run(overflow, run_of(dtype="fp16", stage=stage, accumulation=1)):
        assert names == ["global_samples", "global_steps", "skipped_steps"]


# Checkpoints --------------------------------------------------------------------------------------------------------


class Loaded(NamedTuple):
    differing: List[str]  # what differs after loading
    end: Any  # after two more steps, against the engine that went on


def save_and_load(run, folder, early):
    """``early``: the checkpoint is loaded before engine.compile()."""
    _, engine = start(run)
    train(engine, run, range(4))
    before = state(engine)
    engine.save_checkpoint(folder, tag="saved")
    assert differing(state(engine), before) == []
    train(engine, run, [4, 5])
    later = state(engine)
    engine.destroy()
    _, engine = start_uncompiled(run, seed=1) if early else start(run, seed=1)
    engine.load_checkpoint(folder, tag="saved")
    if early:
        engine.compile(backend=run.backend)
    loaded = state(engine)
    train(engine, run, [4, 5])
    end = compared(state(engine), later, before)
    engine.destroy()
    return Loaded([name for name in differing(loaded, before) if "_codes" not in name], end)


@pytest.mark.options("compile.optimizer_states")
@vary("early", [False, True])
@vary("stage, dtype", [(2, "fp32"), (1, "bf16")])
def test_saved_and_loaded(ranks, tmp_path, stage, dtype, early):
    """Codes that a load took for fp32 values, or quantized once more, would be other states."""
    run = run_of(stage=stage, dtype=dtype, groups=2, schedule="LambdaLR")
    for loaded in ranks(2).run(save_and_load, run, str(tmp_path), early):
        assert loaded.differing == []
        assert_same(loaded.end, dtype)


# Of these, one rank shows all that make test looks for: partitions that begin within a block have their own tests.
WORLDS = [1, pytest.param(2, marks=pytest.mark.slow)]


class There(NamedTuple):
    kinds: List[List[str]]  # names of the states after loading and a step: with 8-bit states, and in fp32 again
    errors: List[float]  # of the states after loading, against those that were saved
    ends: List[float]  # of the master weights two steps later, against those of the engine that went on
    moved: float


def there_and_back(run, folder):
    """Saves with states in fp32, loads with 8-bit states, saves with these, and loads with states in fp32."""
    plain = dataclasses.replace(run, config=FP32_STATES)

    def masters(engine):
        return [safe_get_full_fp32_param(parameter).clone() for parameter in engine.module.parameters()]

    _, engine = start(plain)
    train(engine, run, range(4))
    engine.save_checkpoint(folder, tag="fp32")
    before = masters(engine)
    train(engine, run, [4])
    expected = values(engine)
    train(engine, run, [5])
    end, kinds, errors, ends = masters(engine), [], [], []
    engine.destroy()
    for kind, source, target in ((run, "fp32", "8bit"), (plain, "8bit", "last")):
        _, engine = start(kind, seed=1)
        engine.load_checkpoint(folder, tag=source)
        if source == "8bit":
            kinds.append(sorted(states_of(engine)[0]))
            train(engine, run, [5])
        else:
            train(engine, run, [4])
            kinds.append(sorted(states_of(engine)[0]))
            errors.append(total_error(values(engine), expected))
            engine.save_checkpoint(folder, tag=target)
            train(engine, run, [5])
        ends.append(total_error(masters(engine), end))
        engine.destroy()
    return There(kinds, errors, ends, total_error(end, before))


@vary("world", WORLDS)
def test_from_states_in_fp32_and_back(ranks, tmp_path, world):
    """Who turned the option on or off would go on with states of zero, or with codes for values."""
    for there in ranks(world).run(there_and_back, run_of(stage=2, dtype="bf16"), str(tmp_path)):
        names = [name for names in map(names_of, SIGNED) for name in names]
        assert there.kinds == [sorted([*names, "step"]), sorted([*SIGNED, "step"])]
        assert max(there.errors) < 0.03 and max(there.ends) < 0.1 * there.moved, there


def kinds_of(engine):
    """Returns the names of the states of the first parameter group, as a checkpoint has them."""
    return sorted(engine.optimizer.state_dict()["base_optimizer_state"]["state"][0])


def reload(run, folder):
    """Saves 8-bit states, and loads these into engines that do not train before they save again.

    Returns the names of states in each engine, and how far states that the engine with 8-bit states has are from those
    that it had when it saved, right after a load and after a move to the host and back.
    """
    plain, names = dataclasses.replace(run, config=FP32_STATES), []

    _, engine = start(run)
    train(engine, run, range(3))
    expected = values(engine)
    engine.save_checkpoint(folder, tag="8bit")
    engine.offload_states()
    engine.reload_states()
    moved = total_error(values(engine), expected)
    train(engine, run, [3])
    engine.load_checkpoint(folder, tag="8bit")
    loaded = total_error(values(engine), expected)
    engine.destroy()
    for kind in (dataclasses.replace(plain, deepcompile=False), plain, run):
        _, engine = start(kind, seed=1)
        engine.load_checkpoint(folder, tag="8bit")
        names.append(kinds_of(engine))
        engine.save_checkpoint(folder, tag="again")
        train(engine, kind, [3])
        engine.destroy()
    return names, moved, loaded


@vary("world", WORLDS)
def test_loaded_and_saved_again(ranks, tmp_path, world):
    """An engine that saves before it steps would save the form of the checkpoint that it loaded, or no form."""
    blocks = sorted([*(name for names in map(names_of, SIGNED) for name in names), FORM, LENGTHS, "step"])
    for names, moved, loaded in ranks(world).run(reload, run_of(stage=2), str(tmp_path)):
        assert names == [sorted([*SIGNED, "step"])] * 2 + [blocks]
        assert moved == loaded == 0


def step_uncompiled(run, folder):
    """Loads 8-bit states into engines that ask for these, but step without DeepCompile, and trains on.

    Returns, by the reason, whether states are 8-bit states two steps later, and how far the masters are from those of
    the engine that went on; and how far these moved.
    """

    def masters():
        found = enumerate(engine.optimizer.single_partition_of_fp32_groups)
        return [in_base_order(engine.optimizer, group, master.detach()) for group, master in found]

    _, engine = start(run)
    train(engine, run, range(4))
    engine.save_checkpoint(folder, tag="8bit")
    before = masters()
    train(engine, run, [4, 5])
    end, found = masters(), {}
    engine.destroy()
    for why in ("refused", "in evaluation mode"):
        module, engine = start_uncompiled(run, seed=1)
        engine.load_checkpoint(folder, tag="8bit")
        if why == "refused":
            assert "schedule" in outcome(engine.compile, backend="eager", schedule=[(0, [])])
        # Otherwise the engine compiles itself behind this step.
        module.train(why == "refused")
        with compile_backend("eager"):
            train(engine, run, [4])
        earlier = values(engine)
        train(engine, run, [5])
        assert not any(map(torch.equal, values(engine), earlier)), "the states that are read are old"
        found[why] = all(map(is_blockwise, states_of(engine))), total_error(masters(), end)
        engine.destroy()
    return found, total_error(end, before)


@vary("world", WORLDS)
def test_loaded_into_engines_that_step_uncompiled(ranks, tmp_path, world):
    """DeepSpeed's own step would take codes for states."""
    for found, moved in ranks(world).run(step_uncompiled, run_of(stage=2, dtype="bf16", groups=2), str(tmp_path)):
        assert moved > 1e-2 and max(error for _, error in found.values()) < 0.1 * moved, (found, moved)
        assert {why: blockwise for why, (blockwise, _) in found.items()} == {
            "refused": False,
            "in evaluation mode": True,
        }


def save_for_others(run, folder):
    _, engine = start(run)
    train(engine, run, range(3))
    engine.save_checkpoint(folder, tag="8bit")
    expected = values(engine)
    engine.destroy()
    return expected


def load_universal(run, folder, begins):
    """Loads a universal checkpoint, after a step of its own if ``begins``. Returns the states then."""
    config = {**run.config, "checkpoint": {"load_universal": True}}
    _, engine = start(dataclasses.replace(run, config=config), seed=1)
    if begins:
        train(engine, run, [0])
    engine.load_checkpoint(folder, tag="universal")
    names = kinds_of(engine)
    found = values(engine)
    train(engine, run, [3])
    engine.destroy()
    return names, found


@pytest.mark.parametrize(
    "saved_by, loads",
    [
        (2, [(1, "8bit", False)]),
        (2, [(1, "8bit", True)]),
        # With three ranks, the partitions of two groups have padding.
        pytest.param(3, [(1, "8bit", False), (2, "8bit", True), (1, "fp32", True)], marks=pytest.mark.slow),
    ],
    ids=["ranks2", "ranks2-begun", "ranks3"],
)
def test_universal_checkpoints(ranks, tmp_path, saved_by, loads):
    """8-bit states become fp32 states in a universal checkpoint. Others could not be cut for other partitions."""
    run = run_of(stage=1, model="BlocksWithin", groups=4)
    expected = ranks(saved_by).run(save_for_others, run, str(tmp_path))[0]
    to_universal(f"{tmp_path}/8bit", f"{tmp_path}/universal")
    for world, states, begins in loads:
        kind = run if states == "8bit" else dataclasses.replace(run, config=FP32_STATES)
        for names, found in ranks(world).run(load_universal, kind, str(tmp_path), begins):
            assert ("exp_avg" in names) == (kind is not run) and ("exp_avg_codes" in names) == (kind is run)
            # Each rank may have a GPU of its own. 8-bit states are rounded anew.
            error = total_error(*([value.cpu() for value in values] for values in (found, expected)))
            assert error < (0.02 if kind is run else 1e-6)


# Refusals -----------------------------------------------------------------------------------------------------------


def says_when_states_are_set(run):
    module, engine = start(run)
    train(engine, run, [0])
    parameter = next(module.parameters())
    value = safe_get_full_optimizer_state(parameter, "exp_avg")
    safe_set_full_fp32_param(parameter, torch.ones_like(parameter, dtype=torch.float32))
    kept = bool((safe_get_full_fp32_param(parameter) == 1).all())
    said = outcome(safe_set_full_optimizer_state, parameter, value, "exp_avg")
    engine.destroy()
    return kept, said


def test_states_cannot_be_set(ranks):
    """A state of one parameter that was written would round its neighbours in a block, and nobody would know."""
    for kept, said in ranks(1).run(says_when_states_are_set, run_of()):
        assert kept
        assert said.startswith("RuntimeError: exp_avg is kept in 8 bits, and to set it would round other parameters'")

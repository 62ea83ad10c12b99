# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""``compile.optimizer_states: "8bit"`` in engines: training, overflows, checkpoints, refusals."""

import dataclasses

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
from support.on_ranks import on_ranks
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
# The names of an optimizer's 8-bit states.
BLOCKWISE = [*(name for names in map(names_of, SIGNED) for name in names), "step"]


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


@pytest.mark.options("compile.optimizer_states")
@pytest.mark.follows(
    "has no form for the third state of amsgrad=true; set amsgrad to false",
    "loses squares of falling gradients where betas[1] is below 0.5; raise it",
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
@on_ranks(2)
def test_it_trains_as_with_states_in_fp32(varied):
    """Scales of the wrong blocks, or states of a step that overflowed, would leave the parameters far from these."""
    between = varied.get("between")
    run = run_of(**{name: value for name, value in varied.items() if name != "between"})
    weights, moments = [], []
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
        assert variant is not run or all(map(is_blockwise, states_of(engine)))
        weights.append([safe_get_full_fp32_param(parameter).clone() for parameter in trained])
        moments.append(
            [safe_get_full_optimizer_state(parameter, name).clone() for parameter in trained for name in SIGNED]
        )
        engine.destroy()
    moved = total_error(weights[1], begin)
    assert moved > 1e-2
    # Values are rounded to some 1/64 of the largest one of their block at most, in each step.
    assert total_error(*weights) < 0.05 * moved + ROUNDING[run.dtype]
    assert total_error(*moments) < 0.03


class RarelyHit(torch.nn.Module):
    """Four experts, one of which a step uses. The weights of three share blocks of 8-bit states."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(24, 24)
        self.weight = torch.nn.Parameter(torch.randn(4, 24, 24) / 5)

    def forward(self, x, chosen):
        weight = (self.weight * chosen.view(-1, 1, 1)).sum(0)
        return (self.head(x @ weight) - 1).square().mean()


@pytest.mark.options("compile.optimizer_states")
@vary("stage", [2], slow=[1])
@on_ranks(2)
def test_experts_that_are_rarely_hit(stage):
    """If a second moment decayed to zero in 8 bits, the next gradient would move weights by thousands of rates."""
    weights, moved = [], []
    for config in (EIGHT_BITS, {}):
        torch.manual_seed(0)
        module = RarelyHit().to(device())
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        case = Case(stage=stage, clipping=0.5, config=config, deepcompile=bool(config))
        engine = make_engine(module, case, optimizer=optimizer)
        largest, before = 0.0, safe_get_full_fp32_param(module.weight).clone()
        for step in range(30):
            torch.manual_seed(100 * step + dist.get_rank())
            # The gradients of the expert that is rarely hit are small beside those of the others.
            expert, size = (3, 1e-3) if step in (0, 24) else (step % 3, 1.0)
            chosen = torch.nn.functional.one_hot(torch.tensor(expert), 4).float().to(device())
            engine.backward(engine(size * torch.randn(8, 24, device=device()), chosen))
            engine.step()
            now = safe_get_full_fp32_param(module.weight).clone()
            largest, before = max(largest, float((now - before).abs().max())), now
        weights.append([before])
        moved.append(largest)
        assert not config or all(map(is_blockwise, states_of(engine)))
        engine.destroy()
    # By the largest change of an element in a step.
    assert moved[0] < 2 * moved[1] < 0.02
    assert relative_error(*weights) < 0.01


@vary("stage", [1, 2])
@on_ranks(2)
def test_an_overflow_leaves_states_as_they_are(stage):
    """A block's scale would become infinite, and all its values with it."""
    run = run_of(dtype="fp16", stage=stage, accumulation=1)
    _, engine = start(run)
    train(engine, run, range(2))
    before = state(engine)
    engine.backward(engine(sequences(run, 2, 0)) * torch.inf)
    engine.step()
    # Among all that a checkpoint has.
    assert differing(state(engine), before) == ["global_samples", "global_steps", "skipped_steps"]
    engine.destroy()


# Checkpoints --------------------------------------------------------------------------------------------------------


@pytest.mark.options("compile.optimizer_states")
@vary("early", [False, True])
@vary("stage, dtype", [(2, "fp32"), (1, "bf16")])
@on_ranks(2)
def test_saved_and_loaded(tmp_path, stage, dtype, early):
    """Codes that a load took for fp32 values, or quantized once more, would be other states."""
    run = run_of(stage=stage, dtype=dtype, groups=2, schedule="LambdaLR")
    _, engine = start(run)
    train(engine, run, range(4))
    before = state(engine)
    engine.save_checkpoint(tmp_path, tag="saved")
    assert differing(state(engine), before) == []
    train(engine, run, [4, 5])
    later = state(engine)
    engine.destroy()
    # The checkpoint is loaded before engine.compile() where that is early.
    _, engine = start_uncompiled(run, seed=1) if early else start(run, seed=1)
    engine.load_checkpoint(tmp_path, tag="saved")
    if early:
        engine.compile(backend=run.backend)
    assert [name for name in differing(state(engine), before) if "_codes" not in name] == []
    train(engine, run, [4, 5])
    assert_same(compared(state(engine), later, before), dtype)
    engine.destroy()


# Of these, one rank shows all that make test looks for: partitions that begin within a block have their own tests.
WORLDS = [1, pytest.param(2, marks=pytest.mark.slow)]


@vary("world", WORLDS)
@on_ranks("world")
def test_from_states_in_fp32_and_back(tmp_path, world):
    """Who turned the option on or off would go on with states of zero, or with codes for values."""
    run = run_of(stage=2, dtype="bf16")
    plain = dataclasses.replace(run, config=FP32_STATES)

    def masters(engine):
        return [safe_get_full_fp32_param(parameter).clone() for parameter in engine.module.parameters()]

    _, engine = start(plain)
    train(engine, run, range(4))
    engine.save_checkpoint(tmp_path, tag="fp32")
    before = masters(engine)
    train(engine, run, [4])
    expected = values(engine)
    train(engine, run, [5])
    end = masters(engine)
    moved = total_error(end, before)
    engine.destroy()

    _, engine = start(run, seed=1)
    engine.load_checkpoint(tmp_path, tag="fp32")
    train(engine, run, [4])
    assert sorted(states_of(engine)[0]) == sorted(BLOCKWISE)
    assert total_error(values(engine), expected) < 0.03
    engine.save_checkpoint(tmp_path, tag="8bit")
    train(engine, run, [5])
    assert total_error(masters(engine), end) < 0.1 * moved
    engine.destroy()

    _, engine = start(plain, seed=1)
    engine.load_checkpoint(tmp_path, tag="8bit")
    assert sorted(states_of(engine)[0]) == sorted([*SIGNED, "step"])
    train(engine, run, [5])
    assert total_error(masters(engine), end) < 0.1 * moved
    engine.destroy()


def kinds_of(engine):
    """Returns the names of the states of the first parameter group, as a checkpoint has them."""
    return sorted(engine.optimizer.state_dict()["base_optimizer_state"]["state"][0])


@vary("world", WORLDS)
@on_ranks("world")
def test_loaded_and_saved_again(tmp_path, world):
    """An engine that saves before it steps would save the form of the checkpoint that it loaded, or no form."""
    run = run_of(stage=2)
    plain = dataclasses.replace(run, config=FP32_STATES)
    _, engine = start(run)
    train(engine, run, range(3))
    expected = values(engine)
    engine.save_checkpoint(tmp_path, tag="8bit")
    engine.offload_states()
    engine.reload_states()
    assert total_error(values(engine), expected) == 0
    train(engine, run, [3])
    engine.load_checkpoint(tmp_path, tag="8bit")
    assert total_error(values(engine), expected) == 0
    engine.destroy()
    for kind in (dataclasses.replace(plain, deepcompile=False), plain, run):
        _, engine = start(kind, seed=1)
        engine.load_checkpoint(tmp_path, tag="8bit")
        # It has not trained yet.
        names = [*BLOCKWISE, FORM, LENGTHS] if kind is run else [*SIGNED, "step"]
        assert kinds_of(engine) == sorted(names)
        engine.save_checkpoint(tmp_path, tag="again")
        train(engine, kind, [3])
        engine.destroy()


@vary("world", WORLDS)
@on_ranks("world")
def test_loaded_into_engines_that_step_uncompiled(tmp_path, world):
    """DeepSpeed's own step would take codes for states."""
    run = run_of(stage=2, dtype="bf16", groups=2)

    def masters():
        found = enumerate(engine.optimizer.single_partition_of_fp32_groups)
        return [in_base_order(engine.optimizer, group, master.detach()) for group, master in found]

    _, engine = start(run)
    train(engine, run, range(4))
    engine.save_checkpoint(tmp_path, tag="8bit")
    before = masters()
    train(engine, run, [4, 5])
    end = masters()
    moved = total_error(end, before)
    assert moved > 1e-2
    engine.destroy()
    for why in ("refused", "in evaluation mode"):
        module, engine = start_uncompiled(run, seed=1)
        engine.load_checkpoint(tmp_path, tag="8bit")
        if why == "refused":
            assert "schedule" in outcome(engine.compile, backend="eager", schedule=[(0, [])])
        # Otherwise the engine compiles itself behind this step.
        module.train(why == "refused")
        with compile_backend("eager"):
            train(engine, run, [4])
        earlier = values(engine)
        train(engine, run, [5])
        assert not any(map(torch.equal, values(engine), earlier)), "the states that are read are old"
        assert all(map(is_blockwise, states_of(engine))) == (why == "in evaluation mode")
        assert total_error(masters(), end) < 0.1 * moved
        engine.destroy()


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


@on_ranks(1)
def test_states_cannot_be_set():
    """A state of one parameter that was written would round its neighbours in a block, and nobody would know."""
    run = run_of()
    module, engine = start(run)
    train(engine, run, [0])
    parameter = next(module.parameters())
    value = safe_get_full_optimizer_state(parameter, "exp_avg")
    safe_set_full_fp32_param(parameter, torch.ones_like(parameter, dtype=torch.float32))
    assert (safe_get_full_fp32_param(parameter) == 1).all()
    said = outcome(safe_set_full_optimizer_state, parameter, value, "exp_avg")
    assert said.startswith("RuntimeError: exp_avg is kept in 8 bits, and to set it would round other parameters'")
    engine.destroy()

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""``compile.store_param_remainders`` in engines: training, memory, checkpoints, reads and writes, refusals."""

import contextlib
import copy
import dataclasses
import gc
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.autograd.profiler import KinetoStepTracker
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.compile.features.update import masters as masters_module
from deepspeed.compile.features.update.every_step import EveryStepAdam
from deepspeed.compile.features.update.remainders import split
from deepspeed.compile.zero_1_and_2.engine import set_up
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from support.checkpoints import SEQUENCES, Run, sequences, start, to_universal, train, whole
from support.faults import Injected
from support.ids import vary
from support.lifetime import take_elsewhere, take_steps
from support.models import VOCABULARY, BlocksWithin
from support.on_ranks import gathered, on_ranks
from support.options import outcome
from support.training import (
    BOUND,
    OVERLAPPED,
    ROUNDING,
    Case,
    build,
    device,
    make_engine,
    relative_error,
    small_shards,
    total_error,
)

pytestmark = pytest.mark.options("compile.store_param_remainders")
REMAINDERS = {"store_param_remainders": True}
EIGHT_BITS = {"optimizer_states": "8bit"}


def run_of(compile_options=(), **varied):
    """Returns a run with remainders, and further options of the section ``compile``."""
    config = {**varied.pop("config", {}), "compile": {**REMAINDERS, **dict(compile_options)}}
    return Run(**{"model": "BlocksWithin", "dtype": "bf16", "stage": 2, "groups": 2, "config": config, **varied})


def without(run):
    """Returns a run with fp32 master weights."""
    options = {name: value for name, value in run.config["compile"].items() if name not in REMAINDERS}
    return dataclasses.replace(run, config={**run.config, "compile": options})


def begin(run, seed=0, compiled=True):
    """Makes an engine, which is compiled only if it is asked for."""
    engine = begin_plain(run, seed)
    ask(engine, run)
    if compiled:
        compile_engine(engine, run)
    return engine


def begin_plain(run, seed=0):
    """Makes an engine without DeepCompile."""
    return start(dataclasses.replace(run, deepcompile=False, config={**run.config, "compile": {}}), seed).engine


def ask(engine, run):
    """Gives an engine the options that its run has in the section ``compile``."""
    compile_config = engine._config.compile_config
    overlapped = OVERLAPPED["compile"] if run.overlapped else {}
    for name, value in {"deepcompile": True, **overlapped, **run.config["compile"]}.items():
        setattr(compile_config, name, value)


def compile_engine(engine, run):
    """Compiles an engine. It steps fp32 master weights by the arithmetic that remainders are stepped by, in every bit.

    Torch steps small partitions, and makes the first step, with other roundings.
    """
    with small_shards(run.config):
        engine.compile(backend=run.backend)
    if not {*REMAINDERS, *EIGHT_BITS} & run.config["compile"].keys():
        engine.optimizer._deepcompile.rules = [EveryStepAdam()]


def trained(engine):
    return [parameter for parameter in engine.module.parameters() if parameter.requires_grad and parameter.numel()]


def masters(engine):
    return [safe_get_full_fp32_param(parameter).clone() for parameter in trained(engine)]


def moments(engine):
    return [
        safe_get_full_optimizer_state(parameter, name).clone()
        for parameter in trained(engine)
        for name in ("exp_avg", "exp_avg_sq")
    ]


def step_on_given(engine, run, *numbers):
    """Steps on gradients that do not depend on the parameters, which ties may round otherwise."""
    for number in numbers:
        engine.backward(engine(sequences(run, number, 0)))
        for index, parameter in enumerate(trained(engine)):
            generator = torch.Generator().manual_seed(100 * number + index)
            safe_set_full_grad(parameter, torch.randn(parameter.shape, generator=generator).to(device()))
        engine.step()


def same(values, expected):
    return len(values) == len(expected) and all(map(torch.equal, values, expected))


def parameters_are_of_masters(engine):
    """Whether each parameter is the bf16 number next to its master weight, on every rank."""
    return all(
        torch.equal(parameter.detach(), split(master)[0])
        for parameter, master in zip(trained(engine), masters(engine), strict=True)
    )


# Training -----------------------------------------------------------------------------------------------------------


def offload(engine):
    """Moves states to the host and back."""
    engine.offload_states()
    take_elsewhere(engine)
    engine.reload_states()


def swap_in_averages(engine):
    """Trains with other parameters for an evaluation, as an average of weights does, and takes them back."""
    kept = [parameter.detach().clone() for parameter in trained(engine)]
    with torch.no_grad():
        for parameter in trained(engine):
            parameter.mul_(0.5)
        engine.module.eval()
        engine(torch.zeros((1, 4), dtype=torch.int64, device=device()))
        engine.module.train()
        for parameter, value in zip(trained(engine), kept, strict=True):
            parameter.copy_(value)


def overflow(engine):
    """A step whose gradients are not finite on one rank, which all ranks skip."""
    before, gradient = masters(engine), torch.nan if dist.get_rank() == 1 else 1.0
    engine.backward(engine(torch.zeros((1, 4), dtype=torch.int64, device=device())))
    for parameter in trained(engine):
        safe_set_full_grad(parameter, torch.full(parameter.shape, gradient, device=device()))
    engine.step()
    assert engine.skipped_steps == 1 and same(masters(engine), before)


def set_states(engine):
    """Gives the optimizer other states."""
    for parameter in trained(engine):
        for name, value in (("exp_avg", 0.25), ("exp_avg_sq", 0.5)):
            safe_set_full_optimizer_state(parameter, torch.full(parameter.shape, value, device=device()), name)


@vary(
    "varied",
    [
        {},
        {"compile_options": {"optimizer_states": "8bit"}, "model": "AlignedBlocksWithin"},
        {"stage": 1, "overlapped": True, "groups": 1},
        {"between": offload},
        {"between": overflow},
        {"between": set_states, "stage": 1},
        {"between": swap_in_averages, "overlapped": True},
        {"clipping": 0.05, "config": {"data_types": {"grad_accum_dtype": "fp32"}}},
        {"config": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}},
    ],
)
@on_ranks(2)
def test_master_weights_have_the_bits_of_those_in_fp32(varied):
    """A master weight that loses a remainder, or gets another's, would differ in some bits."""
    varied = dict(varied)
    between = varied.pop("between", None)
    run, seen = run_of(accumulation=1, **varied), []
    for variant in (run, without(run)):
        engine = begin(variant, compiled=False)
        memory = [StorageWeakRef(flat.untyped_storage()) for flat in engine.optimizer.single_partition_of_fp32_groups]
        compile_engine(engine, variant)
        before = masters(engine)
        for number in range(4):
            if between is not None and number == 2:
                between(engine)
            step_on_given(engine, variant, number)
        seen.append((masters(engine), moments(engine)))
        if variant is run:
            assert parameters_are_of_masters(engine)
            gc.collect()
            assert all(storage.expired() for storage in memory), "something holds fp32 master weights"
            elements = sum(master.numel() for master in engine.optimizer.single_partition_of_fp32_groups)
            assert sum(part.nbytes for part in engine.optimizer.masters_as_remainders.remainders) == 2 * elements
        engine.destroy()
    # Master weights and states, in every bit.
    assert all(map(same, *seen))
    assert relative_error(seen[1][0], before) > 1e-2


SETTINGS = {"lr": 0.02, "eps": 1e-4, "weight_decay": 0.1}
# An optimizer's class -> the optimizer in the configuration, or a function that makes one of parameters. On a machine
# without GPUs DeepSpeed's FusedAdam is in C++ for the host.
ADAMS = {
    "FusedAdam decoupled": {"type": "AdamW", "params": SETTINGS},
    "FusedAdam": {"type": "Adam", "params": {**SETTINGS, "adam_w_mode": False}},
    "AdamW": {"type": "AdamW", "params": {**SETTINGS, "torch_adam": True}},
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, **SETTINGS, fused=True),
}


def make_of(run, adam):
    """Makes an engine, whose optimizer is an entry of ``ADAMS``."""
    config = {"train_micro_batch_size_per_gpu": SEQUENCES // dist.get_world_size(), **run.config}
    module, arguments = build(run), {}
    if isinstance(adam, dict):
        config["optimizer"], arguments = adam, {"model_parameters": module.parameters()}
    else:
        arguments = {"optimizer": adam(module.parameters())}
    return make_engine(module, dataclasses.replace(run, config=config), **arguments)


@vary("name", ADAMS)
@on_ranks(2)
def test_each_adam(name):
    """The optimizer in C++ has its count of steps, and how weights decay, in other places than torch's."""
    run, ends = run_of(accumulation=1, groups=1), []
    for variant in (run, without(run)):
        engine = make_of(variant, ADAMS[name])
        assert type(engine.optimizer.optimizer).__name__ == name.split()[0]
        before = masters(engine)
        for number in range(3):
            step_on_given(engine, variant, number)
            # The count of steps is where each optimizer has it.
            engine.optimizer.load_state_dict(gathered(engine.optimizer.state_dict()), True, True)
        ends.append(masters(engine))
        assert variant is not run or parameters_are_of_masters(engine)
        engine.destroy()
    # The optimizer's own step() makes the master weights without remainders.
    assert relative_error(*ends) < BOUND and relative_error(ends[1], before) > 1e-2


# Checkpoints --------------------------------------------------------------------------------------------------------


def save(run, folder):
    """Trains and saves. Returns the master weights and states then, and after two more steps."""
    engine = begin(run)
    step_on_given(engine, run, *range(3))
    if engine.optimizer.elastic_checkpoint:
        # Without it, which optimizers with a fused step keep there, DeepSpeed does not load elastic states.
        for group in engine.optimizer.param_groups:
            group["step"] = 3
    engine.save_checkpoint(folder, tag="saved")
    seen = [masters(engine), moments(engine)]
    step_on_given(engine, run, 3, 4)
    seen.append(masters(engine))
    engine.destroy()
    return seen


def check_loaded(run, folder, tag, expected, before):
    """Asserts that an engine that loads what ``save`` saved has that, and goes on as the engine that saved.

    ``before``: None, "step" to train before the load, or "compile" to load before the engine is compiled.
    """
    config = {**run.config, **({"checkpoint": {"load_universal": True}} if tag == "universal" else {})}
    engine = begin(dataclasses.replace(run, config=config), 1, compiled=before != "compile")
    if before == "step":
        step_on_given(engine, run, 0)
    engine.load_checkpoint(folder, tag=tag)
    if before == "compile":
        compile_engine(engine, run)
    expected = [[value.to(device()) for value in values] for values in expected]
    assert same(masters(engine), expected[0]) and (before is None or same(moments(engine), expected[1]))
    assert parameters_are_of_masters(engine)
    step_on_given(engine, run, 3, 4)
    # On other numbers of ranks, other elements lie at the ends of partitions. On a GPU these are stepped by operators,
    # which round otherwise than the kernel.
    close = torch.cuda.is_available() and tag == "universal"
    assert relative_error(masters(engine), expected[2]) < 1e-6 if close else same(masters(engine), expected[2])
    engine.destroy()


@pytest.mark.table
@vary(
    "saves, loads, before, varied",
    [
        (True, True, "step", {}),
        (True, True, None, {}),
        (True, False, "step", {}),
        (False, True, "compile", {}),
        # States in 8 bits beside remainders, and partitions without padding.
        (True, True, "step", {"compile_options": EIGHT_BITS, "groups": 1}),
        (True, True, "step", {"config": {"zero_optimization": {"elastic_checkpoint": True}}}),
    ],
)
@on_ranks(2)
def test_saved_and_loaded(tmp_path, saves, loads, before, varied):
    """A checkpoint has fp32 master weights, so it loads with the option on and off, and in DeepSpeed."""
    run = run_of(accumulation=1, **varied)
    saved_by, loaded_by = (run if has else without(run) for has in (saves, loads))
    expected = save(saved_by, str(tmp_path))
    check_loaded(loaded_by, str(tmp_path), "saved", expected, before)


@vary("world, before", [(1, "step")], slow=[(3, None)])
def test_universal_checkpoints(ranks, tmp_path, world, before):
    """Fragments of parameters that a universal checkpoint is written into would be copies that nobody reads."""
    run = run_of(accumulation=1)
    expected = ranks(2).run(save, run, str(tmp_path))[0]
    to_universal(f"{tmp_path}/saved", f"{tmp_path}/universal")
    expected = [[value.cpu() for value in values] for values in expected]
    ranks(world).run(check_loaded, run, str(tmp_path), "universal", expected, before)


@on_ranks(2)
def test_loaded_without_the_fp32_master_weights(tmp_path):
    """Who asks for the parameters of a checkpoint would go on with remainders of its master weights, or with NaN."""
    run = run_of(accumulation=1, config={"zero_optimization": {"load_from_fp32_weights": False}})
    expected = save(run, str(tmp_path))
    rounded = [split(master)[0].float() for master in expected[0]]
    assert not same(rounded, expected[0])
    engine = begin(run, seed=1)
    step_on_given(engine, run, 0)
    engine.load_checkpoint(str(tmp_path), tag="saved")
    assert same(masters(engine), rounded) and parameters_are_of_masters(engine)
    assert same(moments(engine), expected[1])
    step_on_given(engine, run, 3, 4)
    assert 0 < relative_error(masters(engine), expected[2]) < 2 * ROUNDING["bf16"]
    engine.destroy()


# In the middle of two bf16 numbers, of which torch takes the one below.
TIE = 1.00390625


@on_ranks(2)
def test_ties(tmp_path):
    """Ranks would train on different parameters until the next step, where only the owner rounds a tie anew."""
    run = run_of(accumulation=1)
    engine = begin(run, compiled=False)
    for parameter in trained(engine):
        safe_set_full_fp32_param(parameter, torch.full(parameter.shape, TIE, device=device()))
    engine.optimizer.update_lp_params()
    assert not parameters_are_of_masters(engine), "torch rounds a tie as remainders do"
    engine.save_checkpoint(str(tmp_path), tag="ties")
    compile_engine(engine, run)
    assert parameters_are_of_masters(engine)
    engine.destroy()
    engine = begin(run, seed=1)
    engine.load_checkpoint(str(tmp_path), tag="ties")
    # All ranks call these together, also where one of them has other parameters.
    loaded = masters(engine)
    assert parameters_are_of_masters(engine) and all((master == TIE).all() for master in loaded)
    engine.destroy()


@on_ranks(2)
def test_a_load_that_fails_leaves_the_master_weights():
    """The remainders of half a checkpoint on the parameters before it would be neither one's master weights."""
    run = run_of(accumulation=1)
    _, engine = start(run)
    step_on_given(engine, run, 0)
    before = masters(engine)
    broken = copy.deepcopy(engine.optimizer.state_dict())
    if dist.get_rank() == 0:
        broken["single_partition_of_fp32_groups"][1:] = [torch.zeros(3, 3, 3)]
    states = gathered(broken)
    # Each rank looks at its own part.
    said = gathered(outcome(engine.optimizer.load_state_dict, states, True, True))
    assert "Error" in said[0]
    assert said[1] == f"RuntimeError: rank 0 could not load a checkpoint, so no rank goes on. It says: {said[0]}"
    assert same(masters(engine), before)
    step_on_given(engine, run, 1)
    assert not same(masters(engine), before)
    engine.destroy()


# Reads and writes ---------------------------------------------------------------------------------------------------


@vary("overlapped", [False, True])
@on_ranks(2)
def test_master_weights_are_read_and_written(overlapped):
    """A write that only the owner of a parameter sees would have ranks train on different parameters."""
    run = run_of(accumulation=1, overlapped=overlapped)
    _, engine = start(run)
    step_on_given(engine, run, 0)
    parameter = trained(engine)[1]

    value = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)).to(device())
    safe_set_full_fp32_param(parameter, value)
    assert torch.equal(safe_get_full_fp32_param(parameter), value)
    assert parameters_are_of_masters(engine)
    engine.optimizer.update_lp_params()
    assert torch.equal(safe_get_full_fp32_param(parameter), value)

    with torch.no_grad():
        parameter.clamp_(-0.01, 0.01)
        parameter[0] = 0
    clamped = safe_get_full_fp32_param(parameter)
    assert (clamped.abs() < 0.0101).all() and (clamped[0].abs() < 1e-30).all()
    step_on_given(engine, run, 1)
    assert all(master.isfinite().all() for master in masters(engine))
    # The learning rate is 0.02, and values before the clamp were up to 3.
    assert (parameter.detach().float() - clamped).abs().max() < 0.03

    state = {name: torch.full_like(value, 0.3) for name, value in engine.module.state_dict().items()}
    engine.module.load_state_dict(state)
    engine.optimizer.refresh_fp32_params()
    third = torch.tensor(0.3, dtype=torch.bfloat16).float().item()
    assert all((master == third).all() for master in masters(engine))

    # A read that is not known sees NaN, and a write raises.
    placeholder = engine.optimizer.single_partition_of_fp32_groups[0]
    assert placeholder.detach().isnan().all()
    assert outcome(placeholder.data.copy_, placeholder.data.clone()).startswith("RuntimeError")
    optimizer, expected = engine.optimizer, engine.optimizer.state_dict()["single_partition_of_fp32_groups"]
    engine.destroy()
    assert same(optimizer.state_dict()["single_partition_of_fp32_groups"], expected)


@vary("form", [{"sharded": True}, {"overlapped": True}])
@on_ranks(2)
def test_master_weights_are_read_after_a_change(form):
    """A parameter is a part of its master weight, and shards that a rank keeps elsewhere are those from before."""
    run = run_of(accumulation=1, model="OddSizes", **form)
    _, engine = start(run)
    step_on_given(engine, run, 0)
    with torch.no_grad():
        for parameter in trained(engine):
            parameter.mul_(0.5)
    read = masters(engine)
    with whole(engine, run):
        # A parameter rounds to the nearest bf16 number.
        assert relative_error(read, trained(engine)) < 2**-8
        engine.destroy()


@vary("steps_before", [0, 1])
@on_ranks(2)
def test_a_master_weight_is_set_beside_states_in_8_bits(steps_before):
    """Both parts set in place of the base. Who does so last depends on whether there are states at set-up."""
    run = run_of(EIGHT_BITS, accumulation=1)
    engine = begin_plain(run)
    train(engine, run, range(steps_before))
    ask(engine, run)
    compile_engine(engine, run)
    step_on_given(engine, run, steps_before)
    parameter = trained(engine)[1]
    value = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)).to(device())
    said = outcome(safe_set_full_optimizer_state, parameter, value, "exp_avg")
    assert "leave compile.optimizer_states out" in said
    safe_set_full_fp32_param(parameter, value)
    assert torch.equal(safe_get_full_fp32_param(parameter), value)
    assert parameters_are_of_masters(engine)
    engine.destroy()


class Conversions(TorchDispatchMode):
    """Finds the most elements that an operator makes of the dtype in which master weights are taken apart."""

    def __init__(self):
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.int32:
            self.most = max(self.most, result.numel())
        return result


@on_ranks(1)
def test_master_weights_are_converted_in_pieces():
    """To read the master weights of a large embedding would take several times their memory in tensors of integers."""
    at_once, run = 50, run_of(accumulation=1)
    with mock.patch.object(masters_module, "_CONVERTED", at_once):
        engine = begin(run, compiled=False)
        most = {}

        def note(way, function, *args):
            with Conversions() as conversions:
                result = function(*args)
            most[way] = conversions.most
            return result

        # An engine is set up in a thread of its own, which such a mode does not see.
        with mock.patch.object(set_up, "in_own_thread", lambda function, *args: function(*args)):
            note("set up", compile_engine, engine, run)
        parameter = max(trained(engine), key=torch.numel)
        optimizer, value = engine.optimizer, torch.randn(parameter.shape, device=device())
        note("set", safe_set_full_fp32_param, parameter, value)
        assert torch.equal(note("get", safe_get_full_fp32_param, parameter), value)
        state = note("save", optimizer.state_dict)
        safe_set_full_fp32_param(parameter, torch.zeros_like(value))
        note("load", optimizer.load_state_dict, [state], True, True)
        assert torch.equal(safe_get_full_fp32_param(parameter), value)
        engine.destroy()
    assert parameter.numel() > 2 * at_once and parameter.numel() % at_once
    assert set(most.values()) == {at_once}, most


@on_ranks(1)
def test_a_save_joins_one_group_at_a_time():
    """A save would need host memory for the master weights in two orders: 16 bytes an element where 12 are enough."""
    run = run_of(accumulation=1)
    engine = begin(run)
    step_on_given(engine, run, 0)
    join, joined, alive = masters_module.Masters.on_the_host, [], []

    def note(*args):
        alive.append(sum(not storage.expired() for storage in joined))
        values = join(*args)
        joined.append(StorageWeakRef(values.untyped_storage()))
        return values

    with mock.patch.object(masters_module.Masters, "on_the_host", note):
        state = engine.optimizer.state_dict()
    assert alive == [0, 0] and all(storage.expired() for storage in joined)
    assert same(
        state["single_partition_of_fp32_groups"], engine.optimizer.state_dict()["single_partition_of_fp32_groups"]
    )
    engine.destroy()


@vary("overlapped", [False, True])
@on_ranks(2)
def test_a_set_up_that_raises_leaves_the_master_weights(overlapped):
    """An engine that goes on without DeepCompile would step NaN."""
    run = run_of(accumulation=1, overlapped=overlapped)
    engine = begin(run, compiled=False)
    plain = begin_plain(run)
    with mock.patch.object(set_up, "attach", side_effect=Injected("no attach")):
        assert outcome(engine.compile, backend=run.backend) == "Injected: no attach"
    for trainer in (engine, plain):
        train(trainer, run, [0, 1])
    expected = masters(plain)
    assert same(masters(engine), expected) and all(master.isfinite().all() for master in expected)
    compile_engine(engine, run)
    assert same(masters(engine), expected) and parameters_are_of_masters(engine)
    train(engine, run, [2])
    assert not same(masters(engine), expected) and parameters_are_of_masters(engine)
    engine.destroy()
    plain.destroy()


@vary("rank", [0, 1])
@on_ranks(2, timeout=300)
def test_a_set_up_that_fails_late_on_one_rank(rank):
    """The other rank would wait for parameters that never come, or one rank train on without its master weights."""
    run, fails = run_of(accumulation=1), dist.get_rank() == rank
    engine = begin(run, compiled=False)
    groups, set_masters = len(engine.optimizer.single_partition_of_fp32_groups), masters_module.Masters.set

    def fail_in_the_last(masters, group, *others):
        if group == groups - 1:
            raise Injected("no memory")
        set_masters(masters, group, *others)

    broken = mock.patch.object(masters_module.Masters, "set", fail_in_the_last)
    with broken if fails else contextlib.nullcontext():
        said = outcome(engine.compile, backend=run.backend)
    others = f"rank {rank} could not convert optimizer states, so no rank goes on"
    assert said == "Injected: no memory" if fails else others in said
    loss = engine(sequences(run, 0, 0))
    for later in (outcome(engine.backward, loss), outcome(engine.optimizer.state_dict)):
        assert "engine.compile() failed half-way (" in later and "); create a new engine" in later
    again = outcome(engine.compile, backend=run.backend)
    assert "failed half-way" in again and "create a new engine" in again
    engine.destroy()
    # A destroyed engine has all its master weights.
    assert not fails or all(master.isfinite().all() for master in engine.optimizer.single_partition_of_fp32_groups)


class Interrupted(Exception):
    pass


@on_ranks(1)
def test_a_step_that_raised_half_way():
    """A load that brings half of the master weights back would go on from two steps at once."""
    run = run_of(accumulation=1)
    _, engine = start(run)
    step_on_given(engine, run, 0)
    state = copy.deepcopy(engine.optimizer.state_dict())
    before, (rule, *_) = masters(engine), engine.optimizer._deepcompile.rules
    begins = type(rule).begin

    def begin_half(rule, partition):
        step = begins(rule, partition)
        if partition.index == 1:
            step.run = raise_
        return step

    def raise_(*_):
        raise Interrupted

    with mock.patch.object(type(rule), "begin", begin_half):
        assert outcome(step_on_given, engine, run, 1).startswith("Interrupted")
    assert "step" in outcome(step_on_given, engine, run, 1)
    engine.optimizer.load_state_dict([state], True, True)
    assert same(masters(engine), before)
    step_on_given(engine, run, 1)
    engine.destroy()


@vary("world", [1], slow=[2])
@on_ranks("world")
def test_a_second_engine_and_the_end(world):
    """The parameters of a later engine would be joined with the remainders of an earlier one."""
    run = run_of(accumulation=1, groups=1)
    module, first = start(run)
    step_on_given(first, run, 0)
    kept = masters(first)
    second = make_engine(module, dataclasses.replace(run, adam=True))
    taken = [parameter.detach().float() for parameter in trained(second)]
    assert same(masters(second), taken)
    assert "later engine" in outcome(step_on_given, first, run, 1)
    step_on_given(second, run, 1)
    assert not same(masters(second), taken) and not same(masters(second), kept)
    assert parameters_are_of_masters(second)
    before = [parameter.detach().clone() for parameter in trained(second)]
    # It also drops the links of parameters that the second engine has made.
    first.destroy()
    train(second, run, [2])
    assert not same(trained(second), before)
    parameter = trained(second)[0]
    second.destroy()
    assert outcome(safe_set_full_fp32_param, parameter, parameter.detach().float()) is None


@pytest.mark.follows("call engine.reload_states() to {}")
@on_ranks(2)
def test_saved_and_loaded_in_other_places(tmp_path):
    """What is saved while parameters are on the host, and the parts of a checkpoint, go ways of their own."""
    run, folder = run_of(accumulation=1), str(tmp_path)
    _, engine = start(run)
    step_on_given(engine, run, 0)
    expected, parameter = masters(engine), trained(engine)[0]
    engine.offload_states()
    engine.save_checkpoint(folder, tag="offloaded")
    said = outcome(engine.load_checkpoint, folder, tag="offloaded")
    assert "call engine.reload_states() to load" in said
    said = outcome(safe_set_full_fp32_param, parameter, torch.zeros_like(parameter))
    assert "call engine.reload_states() to set" in said
    engine.reload_states()
    assert same(masters(engine), expected)
    # As the message advises.
    engine.load_checkpoint(folder, tag="offloaded")
    assert same(masters(engine), expected)
    for kind in OffloadStateTypeEnum:
        engine.offload_states(include=[kind])
        engine.reload_states()
        assert same(masters(engine), expected), kind
    step_on_given(engine, run, 1)
    # Loaded into remainders on the host.
    engine.offload_states(include=[OffloadStateTypeEnum.hp_params])
    engine.load_checkpoint(folder, tag="offloaded")
    engine.reload_states()
    assert same(masters(engine), expected)
    step_on_given(engine, run, 1)
    engine.load_checkpoint(folder, tag="offloaded")
    assert same(masters(engine), expected)
    rounded = [split(master)[0].float() for master in expected]
    step_on_given(engine, run, 1)
    engine.load_checkpoint(folder, tag="offloaded", load_module_only=True)
    assert same(masters(engine), rounded)
    names = [engine.param_names[parameter] for parameter in trained(engine)]
    weights = get_fp32_state_dict_from_zero_checkpoint(folder, tag="offloaded")
    assert same([weights[name].to(device()) for name in names], expected)
    engine.destroy()


# Refusals -----------------------------------------------------------------------------------------------------------


class WithRows(BlocksWithin):
    """Reads rows of a further embedding, of a class that may scale them in its forward."""

    def __init__(self, kind, **arguments):
        super().__init__()
        self.rows = kind(VOCABULARY, 8, **arguments)

    def forward(self, ids):
        return super().forward(ids) + self.rows(ids).square().mean()


@pytest.mark.follows("set its max_norm to None, or leave compile.{} out")
@vary("kind", [torch.nn.Embedding, torch.nn.EmbeddingBag])
@on_ranks(2)
def test_embeddings_with_a_max_norm(kind):
    """Rows that other ranks than their owner scale would stay as they were, so training would depend on the ranks."""
    run = run_of(accumulation=1, adam=True)

    def make(variant):
        torch.manual_seed(0)
        module = WithRows(kind, max_norm=0.5).to(device())
        config = {"train_micro_batch_size_per_gpu": SEQUENCES // dist.get_world_size(), **variant.config}
        return module, dataclasses.replace(variant, config=config)

    module, with_key = make(run)
    assert outcome(make_engine, module, with_key) == (
        "ValueError: DeepCompile with ZeRO stage 2: compile.store_param_remainders needs parameters that all "
        "ranks change alike, and the forward of rows scales the rows that a rank reads down to its max_norm; set "
        "its max_norm to None, or leave compile.store_param_remainders out"
    )
    for name, variant in {"without the key": without(run), "without max_norm": run, "frozen": run}.items():
        module, variant = make(variant)
        if name == "without max_norm":
            module.rows.max_norm = None
        if name == "frozen":
            module.rows.requires_grad_(False)
        engine = make_engine(module, variant)
        before = [parameter.detach().clone() for parameter in trained(engine)]
        train(engine, variant, range(2))
        assert not any(map(torch.equal, trained(engine), before)), name
        assert not variant.config["compile"] or parameters_are_of_masters(engine)
        engine.destroy()


def train_by_configuration(options):
    """Trains with an optimizer that the configuration names; returns master weights of before and after."""
    torch._dynamo.reset()
    config = {"optimizer": ADAMS["AdamW"], "compile": options}
    case = Case("BlocksWithin", stage=2, dtype="bf16", config=config)
    module = build(case)
    engine = make_engine(module, case, model_parameters=module.parameters())
    before = masters(engine)
    take_steps(engine, 3)
    after = masters(engine)
    engine.destroy()
    return before, after


def compare_by_configuration():
    """Returns how far training without remainders moves master weights, and how far it is from that with remainders.

    Instead of the latter, the sentence if an engine with remainders is refused.
    """
    before, expected = train_by_configuration({})
    moved = total_error(expected, before)
    try:
        _, actual = train_by_configuration(REMAINDERS)
    except ValueError as error:
        return moved, str(error)
    return moved, total_error(actual, expected)


WITHOUT_TRITON = 'raise ImportError("No module named triton")'


@pytest.mark.follows("needs Triton on a GPU; install triton")
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="where there is no GPU, nothing needs Triton")
def test_a_gpu_without_triton(ranks, tmp_path):
    """The first step would end in an error of an import, or what is advised would not train."""
    # An import of Triton finds this file instead.
    (tmp_path / "triton.py").write_text(WITHOUT_TRITON)
    folders = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    ((moved, said),) = ranks(1, PYTHONPATH=folders).run(compare_by_configuration)
    assert said == (
        "DeepCompile with ZeRO stage 2: compile.store_param_remainders needs Triton on a GPU; install triton, or "
        "leave compile.store_param_remainders out"
    )
    # Without the option.
    assert moved > 1e-2
    ((moved, error),) = ranks(1).run(compare_by_configuration)
    assert error < 1e-2 * moved


@on_ranks(1)
def test_torch_counts_steps():
    """A step would be refused beside torch's own hook of all optimizers, or the hook would not be called."""
    run, counted = run_of(accumulation=1), []
    for variant in (run, dataclasses.replace(run, deepcompile=False)):
        _, engine = start(variant)
        # As torch does for a daemon that profiles, where KINETO_USE_DAEMON is set.
        handle = register_optimizer_step_post_hook(torch.profiler._optimizer_post_hook)
        before = KinetoStepTracker.current_step()
        step_on_given(engine, variant, *range(2))
        counted.append(KinetoStepTracker.current_step() - before)
        handle.remove()
        engine.destroy()
    assert counted[0] == counted[1] > 0


@pytest.mark.follows(
    "cannot be differentiated; set the optimizer's differentiable to false",
    "which has hooks or was replaced; undo that, or leave {} out",
    "works with a gradient scaler; undo that",
)
@vary("options", [REMAINDERS, EIGHT_BITS])
@on_ranks(1)
def test_a_step_that_others_have_changed_is_refused(options):
    """The optimizer's own step() would step NaN, or states in fp32, or a hook that a user gave to it not run."""
    ((name, value),) = options.items()
    asked = f"compile.{name}" if value is True else f"compile.{name}={value!r}"
    refused = "ValueError: DeepCompile with ZeRO stage 2"
    leaves_out = f"{asked} leaves the optimizer's own step() out"
    run = run_of(model="AlignedBlocksWithin", accumulation=1)
    run = dataclasses.replace(run, config={**run.config, "compile": options})
    engine = begin(run, compiled=False)
    inner = engine.optimizer.optimizer
    handle = inner.register_step_post_hook(lambda *_: None)
    assert outcome(engine.compile, backend="eager") == (
        f"{refused}: {leaves_out}, which has hooks or was replaced; undo that, or leave compile.{name} out"
    )
    handle.remove()
    for differentiable in (True, False):
        for group in inner.param_groups:
            group["differentiable"] = differentiable
        if differentiable:
            assert outcome(engine.compile, backend="eager") == (
                f"{refused}: {asked} cannot be differentiated; set the optimizer's differentiable to false, or leave "
                f"compile.{name} out"
            )
    compile_engine(engine, run)
    step_on_given(engine, run, 0)
    handle = engine.optimizer.optimizer.register_step_post_hook(lambda *_: None)
    assert outcome(step_on_given, engine, run, 1).startswith(f"RuntimeError: {leaves_out}")
    handle.remove()
    before = masters(engine)
    step_on_given(engine, run, 1)
    assert not same(masters(engine), before)
    engine.destroy()

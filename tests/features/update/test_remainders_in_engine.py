# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""``compile.store_param_remainders`` in engines: training, memory, checkpoints, reads and writes, refusals."""

import contextlib
import copy
import dataclasses
import gc
import os
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.autograd.profiler import KinetoStepTracker
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.compile.features.update import masters as masters_module
from deepspeed.compile.features.update.remainders import split
from deepspeed.compile.features.update.remainders_rule import EveryStepAdam
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
from support.lifetime import take_elsewhere
from support.models import VOCABULARY, BlocksWithin
from support.options import outcome
from support.training import (
    BOUND,
    OVERLAPPED,
    ROUNDING,
    Case,
    batch,
    build,
    device,
    make_engine,
    relative_error,
    total_error,
)

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


def step_on_given(engine, run, number):
    """Steps on gradients that do not depend on the parameters, which ties may round otherwise."""
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


class BothWays(NamedTuple):
    same: bool  # master weights and states, in every bit
    moved: float
    right: bool  # whether all ranks have the parameters of the master weights
    held: bool  # whether anything holds the memory of fp32 master weights
    bytes_of_remainders: int
    elements: int  # of this rank's partitions


def train_both_ways(run, between=None):
    """Trains for four steps with remainders and with fp32 master weights. ``between`` is called before the third."""
    seen = []
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
            right = parameters_are_of_masters(engine)
            gc.collect()
            sizes = (
                any(not storage.expired() for storage in memory),
                sum(remainders.nbytes for remainders in engine.optimizer.masters_as_remainders.remainders),
                sum(master.numel() for master in engine.optimizer.single_partition_of_fp32_groups),
            )
        engine.destroy()
    return BothWays(
        same(seen[0][0], seen[1][0]) and same(seen[0][1], seen[1][1]),
        relative_error(seen[1][0], before),
        right,
        *sizes,
    )


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


@pytest.mark.options("compile.store_param_remainders")
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
def test_master_weights_have_the_bits_of_those_in_fp32(ranks, varied):
    """A master weight that loses a remainder, or gets another's, would differ in some bits."""
    varied = dict(varied)
    between = varied.pop("between", None)
    for both in ranks(2).run(train_both_ways, run_of(accumulation=1, **varied), between):
        assert both.same and both.right and both.moved > 1e-2, both
        assert not both.held, "something holds fp32 master weights"
        assert both.bytes_of_remainders == 2 * both.elements


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


class OfAdam(NamedTuple):
    kind: str  # the class of the optimizer
    error: float  # of master weights, where the optimizer's own step() makes those without remainders
    moved: float
    right: bool  # whether parameters are those of the master weights


def train_adam(run, name):
    ends = []
    for variant in (run, without(run)):
        engine = make_of(variant, ADAMS[name])
        before = masters(engine)
        for number in range(3):
            step_on_given(engine, variant, number)
            # The count of steps is where each optimizer has it.
            states = [None] * dist.get_world_size()
            dist.all_gather_object(states, engine.optimizer.state_dict())
            engine.optimizer.load_state_dict(states, True, True)
        ends.append(masters(engine))
        if variant is run:
            right, kind = parameters_are_of_masters(engine), type(engine.optimizer.optimizer).__name__
        engine.destroy()
    return OfAdam(kind, relative_error(*ends), relative_error(ends[1], before), right)


@pytest.mark.options("compile.store_param_remainders")
@vary("name", ADAMS)
def test_each_adam(ranks, name):
    """The optimizer in C++ has its count of steps, and how weights decay, in other places than torch's."""
    for of_adam in ranks(2).run(train_adam, run_of(accumulation=1, groups=1), name):
        assert of_adam.kind == name.split()[0]
        assert of_adam.error < BOUND and of_adam.moved > 1e-2 and of_adam.right


# Checkpoints --------------------------------------------------------------------------------------------------------


class Passed(NamedTuple):
    loaded: bool  # whether master weights and states are those that were saved, in every bit
    end: bool  # and after two more steps, those of the engine that went on
    right: bool  # whether parameters are those of the master weights right after loading


def save(run, folder):
    """Trains and saves. Returns the master weights and states then, and after two more steps."""
    engine = begin(run)
    for number in range(3):
        step_on_given(engine, run, number)
    if engine.optimizer.elastic_checkpoint:
        # Without it, which optimizers with a fused step keep there, DeepSpeed does not load elastic states.
        for group in engine.optimizer.param_groups:
            group["step"] = 3
    engine.save_checkpoint(folder, tag="saved")
    seen = [masters(engine), moments(engine)]
    for number in (3, 4):
        step_on_given(engine, run, number)
    seen.append(masters(engine))
    engine.destroy()
    return seen


def load(run, folder, tag, expected, before):
    """``before``: None, "step" to train before the load, or "compile" to load before the engine is compiled."""
    config = {**run.config, **({"checkpoint": {"load_universal": True}} if tag == "universal" else {})}
    engine = begin(dataclasses.replace(run, config=config), 1, compiled=before != "compile")
    if before == "step":
        step_on_given(engine, run, 0)
    engine.load_checkpoint(folder, tag=tag)
    if before == "compile":
        compile_engine(engine, run)
    expected = [[value.to(device()) for value in values] for values in expected]
    loaded = same(masters(engine), expected[0]) and (before is None or same(moments(engine), expected[1]))
    right = parameters_are_of_masters(engine)
    for number in (3, 4):
        step_on_given(engine, run, number)
    # On other numbers of ranks, other elements lie at the ends of partitions. On a GPU these are stepped by operators,
    # which round otherwise than the kernel.
    close = torch.cuda.is_available() and tag == "universal"
    end = relative_error(masters(engine), expected[2]) < 1e-6 if close else same(masters(engine), expected[2])
    engine.destroy()
    return Passed(loaded, end, right)


@pytest.mark.options("compile.store_param_remainders")
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
def test_saved_and_loaded(ranks, tmp_path, saves, loads, before, varied):
    """A checkpoint has fp32 master weights, so it loads with the option on and off, and in DeepSpeed."""
    run = run_of(accumulation=1, **varied)
    saved_by, loaded_by = (run if has else without(run) for has in (saves, loads))
    expected = ranks(2).run(save, saved_by, str(tmp_path))
    for passed in ranks(2).run(load, loaded_by, str(tmp_path), "saved", cpu(expected[0]), before):
        assert passed.end and passed.loaded and passed.right, passed


def cpu(seen):
    return [[value.cpu() for value in values] for values in seen]


@vary("world, before", [(1, "step"), pytest.param(3, None, marks=pytest.mark.slow)])
def test_universal_checkpoints(ranks, tmp_path, world, before):
    """Fragments of parameters that a universal checkpoint is written into would be copies that nobody reads."""
    run = run_of(accumulation=1)
    expected = ranks(2).run(save, run, str(tmp_path))
    to_universal(f"{tmp_path}/saved", f"{tmp_path}/universal")
    for passed in ranks(world).run(load, run, str(tmp_path), "universal", cpu(expected[0]), before):
        assert passed.end and passed.loaded and passed.right, passed


def load_parameters(run, folder, expected):
    """Loads a checkpoint of which the fp32 master weights are left out."""
    engine = begin(run, seed=1)
    step_on_given(engine, run, 0)
    engine.load_checkpoint(folder, tag="saved")
    expected = [[value.to(device()) for value in values] for values in expected]
    rounded = [split(master)[0].float() for master in expected[0]]
    right = {"differ": not same(rounded, expected[0])}
    right["masters"] = same(masters(engine), rounded) and parameters_are_of_masters(engine)
    right["states"] = same(moments(engine), expected[1])
    for number in (3, 4):
        step_on_given(engine, run, number)
    right["goes on"] = 0 < relative_error(masters(engine), expected[2]) < 2 * ROUNDING["bf16"]
    engine.destroy()
    return right


def test_loaded_without_the_fp32_master_weights(ranks, tmp_path):
    """Who asks for the parameters of a checkpoint would go on with remainders of its master weights, or with NaN."""
    run = run_of(accumulation=1, config={"zero_optimization": {"load_from_fp32_weights": False}})
    expected = ranks(2).run(save, run, str(tmp_path))
    for right in ranks(2).run(load_parameters, run, str(tmp_path), cpu(expected[0])):
        assert all(right.values()), right


# In the middle of two bf16 numbers, of which torch takes the one below.
TIE = 1.00390625


def tie(run, folder):
    """Trains on master weights that are ties. Returns whether all ranks have the parameters of these."""
    right = {}
    engine = begin(run, compiled=False)
    for parameter in trained(engine):
        safe_set_full_fp32_param(parameter, torch.full(parameter.shape, TIE, device=device()))
    engine.optimizer.update_lp_params()
    right["torch rounds otherwise"] = not parameters_are_of_masters(engine)
    engine.save_checkpoint(folder, tag="ties")
    engine.compile(backend=run.backend)
    right["compiled"] = parameters_are_of_masters(engine)
    engine.destroy()
    engine = begin(run, seed=1)
    engine.load_checkpoint(folder, tag="ties")
    # All ranks call these together, also where one of them has other parameters.
    loaded = masters(engine)
    right["loaded"] = parameters_are_of_masters(engine) and all((master == TIE).all() for master in loaded)
    engine.destroy()
    return right


def test_ties(ranks, tmp_path):
    """Ranks would train on different parameters until the next step, where only the owner rounds a tie anew."""
    for right in ranks(2).run(tie, run_of(accumulation=1), str(tmp_path)):
        assert all(right.values()), right


def fail_to_load(run):
    """Returns what a load of another model's checkpoint raises, and whether the engine trains on as before."""
    _, engine = start(run)
    step_on_given(engine, run, 0)
    before = masters(engine)
    broken = copy.deepcopy(engine.optimizer.state_dict())
    if dist.get_rank() == 0:
        broken["single_partition_of_fp32_groups"][1:] = [torch.zeros(3, 3, 3)]
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, broken)
    # Each rank looks at its own part.
    said = outcome(engine.optimizer.load_state_dict, states, True, True)
    kept = same(masters(engine), before)
    step_on_given(engine, run, 1)
    moved = not same(masters(engine), before)
    engine.destroy()
    return said, kept, moved


def test_a_load_that_fails_leaves_the_master_weights(ranks):
    """The remainders of half a checkpoint on the parameters before it would be neither one's master weights."""
    results = ranks(2).run(fail_to_load, run_of(accumulation=1))
    said = "RuntimeError: rank 0 could not load a checkpoint, so no rank goes on. It says: {}"
    assert results[1][0] == said.format(results[0][0])
    for said, kept, moved in results:
        assert "Error" in said and kept and moved, (said, kept, moved)


# Reads and writes ---------------------------------------------------------------------------------------------------


def write(run):
    """Writes master weights and parameters in each way that there is."""
    _, engine = start(run)
    step_on_given(engine, run, 0)
    parameter, right = trained(engine)[1], {}

    value = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)).to(device())
    safe_set_full_fp32_param(parameter, value)
    right["set"] = torch.equal(safe_get_full_fp32_param(parameter), value)
    right["set on all ranks"] = parameters_are_of_masters(engine)
    engine.optimizer.update_lp_params()
    right["update_lp_params"] = torch.equal(safe_get_full_fp32_param(parameter), value)

    with torch.no_grad():
        parameter.clamp_(-0.01, 0.01)
        parameter[0] = 0
    clamped = safe_get_full_fp32_param(parameter)
    right["a clamp stays"] = bool((clamped.abs() < 0.0101).all()) and bool((clamped[0].abs() < 1e-30).all())
    step_on_given(engine, run, 1)
    right["no NaN"] = all(master.isfinite().all() for master in masters(engine))
    # The learning rate is 0.02, and values before the clamp were up to 3.
    right["steps go on from the clamp"] = bool((parameter.detach().float() - clamped).abs().max() < 0.03)

    state = {name: torch.full_like(value, 0.3) for name, value in engine.module.state_dict().items()}
    engine.module.load_state_dict(state)
    engine.optimizer.refresh_fp32_params()
    third = torch.tensor(0.3, dtype=torch.bfloat16).float().item()
    right["refresh_fp32_params"] = all((master == third).all() for master in masters(engine))

    placeholder = engine.optimizer.single_partition_of_fp32_groups[0]
    right["an unknown read sees NaN"] = bool(placeholder.detach().isnan().all())
    right["an unknown write raises"] = outcome(placeholder.data.copy_, placeholder.data.clone()).startswith(
        "RuntimeError"
    )
    optimizer, expected = engine.optimizer, engine.optimizer.state_dict()["single_partition_of_fp32_groups"]
    engine.destroy()
    right["a state dict after the end"] = same(optimizer.state_dict()["single_partition_of_fp32_groups"], expected)
    return right


@pytest.mark.options("compile.store_param_remainders")
@vary("overlapped", [False, True])
def test_master_weights_are_read_and_written(ranks, overlapped):
    """A write that only the owner of a parameter sees would have ranks train on different parameters."""
    for right in ranks(2).run(write, run_of(accumulation=1, overlapped=overlapped)):
        assert all(right.values()), right


def halve(run):
    """Halves all parameters in place. Returns how far master weights that are read next are off the parameters."""
    _, engine = start(run)
    step_on_given(engine, run, 0)
    with torch.no_grad():
        for parameter in trained(engine):
            parameter.mul_(0.5)
    read = masters(engine)
    with whole(engine, run):
        error = relative_error(read, trained(engine))
        engine.destroy()
    return error


@vary("form", [{"sharded": True}, {"overlapped": True}])
def test_master_weights_are_read_after_a_change(ranks, form):
    """A parameter is a part of its master weight, and shards that a rank keeps elsewhere are those from before."""
    # A parameter rounds to the nearest bf16 number.
    assert max(ranks(2).run(halve, run_of(accumulation=1, model="OddSizes", **form))) < 2**-8


def set_beside_8_bits(run, steps_before):
    """Sets a master weight and a state of an engine that has begun with some steps of its run without DeepCompile."""
    engine, right = begin_plain(run), {}
    train(engine, run, range(steps_before))
    ask(engine, run)
    compile_engine(engine, run)
    step_on_given(engine, run, steps_before)
    parameter = trained(engine)[1]
    value = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)).to(device())
    said = outcome(safe_set_full_optimizer_state, parameter, value, "exp_avg")
    right["a state is refused"] = "leave compile.optimizer_states out" in (said or "")
    safe_set_full_fp32_param(parameter, value)
    right["a master weight is set"] = torch.equal(safe_get_full_fp32_param(parameter), value)
    right["on all ranks"] = parameters_are_of_masters(engine)
    engine.destroy()
    return right


@vary("steps_before", [0, 1])
def test_a_master_weight_is_set_beside_states_in_8_bits(ranks, steps_before):
    """Both parts set in place of the base. Who does so last depends on whether there are states at set-up."""
    run = run_of(EIGHT_BITS, accumulation=1)
    for right in ranks(2).run(set_beside_8_bits, run, steps_before):
        assert all(right.values()), right


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


def convert(run, at_once):
    """Reads and writes master weights in each way. Returns the most elements that were converted at once, by way."""
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
        right = {"set": torch.equal(note("get", safe_get_full_fp32_param, parameter), value)}
        state = note("save", optimizer.state_dict)
        safe_set_full_fp32_param(parameter, torch.zeros_like(value))
        note("load", optimizer.load_state_dict, [state], True, True)
        right["load"] = torch.equal(safe_get_full_fp32_param(parameter), value)
        engine.destroy()
    return most, right, parameter.numel()


def test_master_weights_are_converted_in_pieces(ranks):
    """To read the master weights of a large embedding would take several times their memory in tensors of integers."""
    at_once = 50
    ((most, right, numel),) = ranks(1).run(convert, run_of(accumulation=1), at_once)
    assert numel > 2 * at_once and numel % at_once
    assert set(most.values()) == {at_once}, most
    assert all(right.values()), right


def raise_in_set_up(run):
    """Trains an engine whose engine.compile() raised when the optimizer was to be attached. Returns what is right."""
    engine = begin(run, compiled=False)
    plain = begin_plain(run)
    with mock.patch.object(set_up, "attach", side_effect=Injected("no attach")):
        right = {"said": outcome(engine.compile, backend=run.backend) == "Injected: no attach"}
    for trainer in (engine, plain):
        train(trainer, run, [0, 1])
    expected = masters(plain)
    right["trains"] = same(masters(engine), expected) and all(master.isfinite().all() for master in expected)
    compile_engine(engine, run)
    right["compiled again"] = same(masters(engine), expected) and parameters_are_of_masters(engine)
    train(engine, run, [2])
    right["trains compiled"] = not same(masters(engine), expected) and parameters_are_of_masters(engine)
    engine.destroy()
    plain.destroy()
    return right


@vary("overlapped", [False, True])
def test_a_set_up_that_raises_leaves_the_master_weights(ranks, overlapped):
    """An engine that goes on without DeepCompile would step NaN."""
    for right in ranks(2).run(raise_in_set_up, run_of(accumulation=1, overlapped=overlapped)):
        assert all(right.values()), right


def fail_on_one_rank(run, rank):
    """Returns what a rank says of a set-up that fails on one rank after the optimizer was changed, and afterwards.

    Also whether a destroyed engine has all its master weights.
    """
    engine = begin(run, compiled=False)
    groups, set_masters = len(engine.optimizer.single_partition_of_fp32_groups), masters_module.Masters.set

    def fail_in_the_last(masters, group, *others):
        if group == groups - 1:
            raise Injected("no memory")
        set_masters(masters, group, *others)

    broken = mock.patch.object(masters_module.Masters, "set", fail_in_the_last)
    with broken if dist.get_rank() == rank else contextlib.nullcontext():
        said = outcome(engine.compile, backend=run.backend)
    loss = engine(sequences(run, 0, 0))
    later = [outcome(engine.backward, loss), outcome(engine.optimizer.state_dict)]
    again = outcome(engine.compile, backend=run.backend)
    engine.destroy()
    masters = engine.optimizer.single_partition_of_fp32_groups if dist.get_rank() == rank else []
    return said, later, again, all(master.isfinite().all() for master in masters)


@vary("rank", [0, 1])
def test_a_set_up_that_fails_late_on_one_rank(ranks, rank):
    """The other rank would wait for parameters that never come, or one rank train on without its master weights."""
    answers = ranks(2).run(fail_on_one_rank, run_of(accumulation=1), rank, timeout=300)
    assert answers[rank][0] == "Injected: no memory"
    assert f"rank {rank} could not convert optimizer states, so no rank goes on" in answers[1 - rank][0]
    for _, later, again, finite in answers:
        assert all("engine.compile() failed half-way (" in said and "); create a new engine" in said for said in later)
        assert "failed half-way" in again and "create a new engine" in again
        assert finite


class Interrupted(Exception):
    pass


def raise_half_way(run):
    """Returns what a step that raises in its second group says, what the next step says, and whether a load helps."""
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
        said = [outcome(step_on_given, engine, run, 1)]
    said.append(outcome(step_on_given, engine, run, 1))
    engine.optimizer.load_state_dict([state] * dist.get_world_size(), True, True)
    loaded = same(masters(engine), before)
    step_on_given(engine, run, 1)
    engine.destroy()
    return said, loaded


def test_a_step_that_raised_half_way(ranks):
    """A load that brings half of the master weights back would go on from two steps at once."""
    for (first, second), loaded in ranks(1).run(raise_half_way, run_of(accumulation=1)):
        assert first.startswith("Interrupted") and "step" in second and loaded, (first, second, loaded)


def take_over(run):
    """Trains a second engine on the parameters of a first one. Returns what is as it should be."""
    module, first = start(run)
    step_on_given(first, run, 0)
    kept = masters(first)
    second = make_engine(module, dataclasses.replace(run, adam=True))
    taken = [parameter.detach().float() for parameter in trained(second)]
    right = {
        "the second begins with the parameters": same(masters(second), taken),
        "the first is told": "later engine" in outcome(step_on_given, first, run, 1),
    }
    step_on_given(second, run, 1)
    right["the second trains"] = not same(masters(second), taken) and not same(masters(second), kept)
    right["parameters are of masters"] = parameters_are_of_masters(second)
    before = [parameter.detach().clone() for parameter in trained(second)]
    # It also drops the links of parameters that the second engine has made.
    first.destroy()
    train(second, run, [2])
    right["the second goes on"] = not same(trained(second), before)
    parameter = trained(second)[0]
    second.destroy()
    right["a write after the end"] = outcome(safe_set_full_fp32_param, parameter, parameter.detach().float()) is None
    return right


@vary("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_second_engine_and_the_end(ranks, world):
    """The parameters of a later engine would be joined with the remainders of an earlier one."""
    for right in ranks(world).run(take_over, run_of(accumulation=1, groups=1)):
        assert all(right.values()), right


def save_in_other_places(run, folder):
    """Saves and loads while states are on the host, parts of checkpoints, and the file that has all fp32 weights."""
    _, engine = start(run)
    step_on_given(engine, run, 0)
    expected, parameter, right = masters(engine), trained(engine)[0], {}
    engine.offload_states()
    engine.save_checkpoint(folder, tag="offloaded")
    right["no load"] = "call engine.reload_states() to load" in outcome(
        engine.load_checkpoint, folder, tag="offloaded"
    )
    right["no write"] = "call engine.reload_states() to set" in outcome(
        safe_set_full_fp32_param, parameter, torch.zeros_like(parameter)
    )
    engine.reload_states()
    right["reloaded"] = same(masters(engine), expected)
    for kind in OffloadStateTypeEnum:
        engine.offload_states(include=[kind])
        engine.reload_states()
        right[f"reloaded {kind}"] = same(masters(engine), expected)
    step_on_given(engine, run, 1)
    engine.offload_states(include=[OffloadStateTypeEnum.hp_params])
    engine.load_checkpoint(folder, tag="offloaded")
    engine.reload_states()
    right["loaded into remainders on the host"] = same(masters(engine), expected)
    step_on_given(engine, run, 1)
    engine.load_checkpoint(folder, tag="offloaded")
    right["loaded"] = same(masters(engine), expected)
    rounded = [split(master)[0].float() for master in expected]
    step_on_given(engine, run, 1)
    engine.load_checkpoint(folder, tag="offloaded", load_module_only=True)
    right["module alone"] = same(masters(engine), rounded)
    names = [engine.param_names[parameter] for parameter in trained(engine)]
    weights = get_fp32_state_dict_from_zero_checkpoint(folder, tag="offloaded")
    right["zero_to_fp32"] = same([weights[name].to(device()) for name in names], expected)
    engine.destroy()
    return right


@pytest.mark.follows("call engine.reload_states() to {}")
def test_saved_and_loaded_in_other_places(ranks, tmp_path):
    """What is saved while parameters are on the host, and the parts of a checkpoint, go ways of their own."""
    for right in ranks(2).run(save_in_other_places, run_of(accumulation=1), str(tmp_path)):
        assert all(right.values()), right


# Refusals -----------------------------------------------------------------------------------------------------------


class WithRows(BlocksWithin):
    """Reads rows of a further embedding, of a class that may scale them in its forward."""

    def __init__(self, kind, **arguments):
        super().__init__()
        self.rows = kind(VOCABULARY, 8, **arguments)

    def forward(self, ids):
        return super().forward(ids) + self.rows(ids).square().mean()


def scale_rows(run, kind):
    """Returns what is said of a trained embedding with a max_norm, and how an engine trains as that advises."""

    def make(variant):
        torch.manual_seed(0)
        module = WithRows(kind, max_norm=0.5).to(device())
        config = {"train_micro_batch_size_per_gpu": SEQUENCES // dist.get_world_size(), **variant.config}
        return module, dataclasses.replace(variant, config=config)

    module, with_key = make(run)
    said, right = outcome(make_engine, module, with_key), {}
    for name, variant in {"without the key": without(run), "without max_norm": run, "frozen": run}.items():
        module, variant = make(variant)
        if name == "without max_norm":
            module.rows.max_norm = None
        if name == "frozen":
            module.rows.requires_grad_(False)
        engine = make_engine(module, variant)
        before = [parameter.detach().clone() for parameter in trained(engine)]
        train(engine, variant, range(2))
        right[f"{name}: trains"] = not any(map(torch.equal, trained(engine), before))
        if variant.config["compile"]:
            right[f"{name}: parameters are of masters"] = parameters_are_of_masters(engine)
        engine.destroy()
    return said, right


@pytest.mark.options("compile.store_param_remainders")
@pytest.mark.follows("set its max_norm to None, or leave compile.{} out")
@vary("kind", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_embeddings_with_a_max_norm(ranks, kind):
    """Rows that other ranks than their owner scale would stay as they were, so training would depend on the ranks."""
    for said, right in ranks(2).run(scale_rows, run_of(accumulation=1, adam=True), kind):
        assert said == (
            "ValueError: DeepCompile with ZeRO stage 2: compile.store_param_remainders needs parameters that all "
            "ranks change alike, and the forward of rows scales the rows that a rank reads down to its max_norm; set "
            "its max_norm to None, or leave compile.store_param_remainders out"
        )
        assert all(right.values()), right


def train_by_configuration(options):
    """Trains with an optimizer that the configuration names; returns master weights of before and after."""
    torch._dynamo.reset()
    config = {"optimizer": ADAMS["AdamW"], "compile": options}
    case = Case("BlocksWithin", stage=2, dtype="bf16", config=config)
    module = build(case)
    engine = make_engine(module, case, model_parameters=module.parameters())
    before = masters(engine)
    for step in range(3):
        engine.backward(engine(batch(step, 0, dist.get_rank(), 4)))
        engine.step()
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


def steps_counted_by_torch(run):
    """Returns how many steps torch counts for a daemon that profiles, as it does where KINETO_USE_DAEMON is set."""
    _, engine = start(run)
    handle = register_optimizer_step_post_hook(torch.profiler._optimizer_post_hook)
    try:
        before = KinetoStepTracker.current_step()
        for number in range(2):
            step_on_given(engine, run, number)
        return KinetoStepTracker.current_step() - before
    finally:
        handle.remove()
        engine.destroy()


def test_torch_counts_steps(ranks):
    """A step would be refused beside torch's own hook of all optimizers, or the hook would not be called."""
    run = run_of(accumulation=1)
    counted = [
        ranks(1).run(steps_counted_by_torch, variant) for variant in (run, dataclasses.replace(run, deepcompile=False))
    ]
    assert counted[0] == counted[1] and counted[0][0] > 0


def says_in_a_step(run):
    """Returns what is said of a hook at set-up, of an optimizer that can be differentiated, and of a later hook."""
    engine = begin(run, compiled=False)
    inner = engine.optimizer.optimizer
    handle = inner.register_step_post_hook(lambda *_: None)
    said = [outcome(engine.compile, backend="eager")]
    handle.remove()
    for differentiable in (True, False):
        for group in inner.param_groups:
            group["differentiable"] = differentiable
        if differentiable:
            said.append(outcome(engine.compile, backend="eager"))
    compile_engine(engine, run)
    step_on_given(engine, run, 0)
    handle = engine.optimizer.optimizer.register_step_post_hook(lambda *_: None)
    said.append(outcome(step_on_given, engine, run, 1))
    handle.remove()
    before = masters(engine)
    step_on_given(engine, run, 1)
    moved = not same(masters(engine), before)
    engine.destroy()
    return said, moved


@pytest.mark.follows(
    "cannot be differentiated; set the optimizer's differentiable to false",
    "which has hooks or was replaced; undo that, or leave {} out",
    "works with a gradient scaler; undo that",
)
@vary("options", [REMAINDERS, EIGHT_BITS])
def test_a_step_that_others_have_changed_is_refused(ranks, options):
    """The optimizer's own step() would step NaN, or states in fp32, or a hook that a user gave to it not run."""
    ((name, value),) = options.items()
    asked = f"compile.{name}" if value is True else f"compile.{name}={value!r}"
    run = run_of(model="AlignedBlocksWithin", accumulation=1)
    run = dataclasses.replace(run, config={**run.config, "compile": options})
    for (at_set_up, differentiable, in_a_step), moved in ranks(1).run(says_in_a_step, run):
        refused, leaves_out = (
            "ValueError: DeepCompile with ZeRO stage 2",
            f"{asked} leaves the optimizer's own step() out",
        )
        assert at_set_up == (
            f"{refused}: {leaves_out}, which has hooks or was replaced; undo that, or leave compile.{name} out"
        )
        assert differentiable == (
            f"{refused}: {asked} cannot be differentiated; set the optimizer's differentiable to false, or leave "
            f"compile.{name} out"
        )
        assert in_a_step.startswith(f"RuntimeError: {leaves_out}")
        assert moved

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What the ranks do in ``test_checkpoints.py``. Each function runs on every rank and returns what it saw."""

import contextlib
import dataclasses
import gc
import os
import time
from typing import Optional

import torch
import torch.distributed as dist

import deepspeed
from deepspeed.runtime.lr_schedules import WarmupDecayLR
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_update_full_grad_vectorized,
)
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from support.models import VOCABULARY
from support.parameter_gather import DELAY, one_rank_late
from support.training import (
    Case,
    average_gradients,
    build,
    device,
    low_precision,
    parameter_groups,
    relative_error,
    total_error,
)

# Of a micro-batch, over all ranks: as many for each of two ranks as of three.
SEQUENCES = 6
OVERLAPPED = {"regional_compilation": True, "overlap_param_gather": True}


@dataclasses.dataclass(frozen=True)
class Run(Case):
    """What to train, and how. Ranks share the sequences of a batch, so that their number changes only rounding.

    ``schedule`` of the learning rate: a key of SCHEDULES, or None. ``overlapped``: parameters are gathered under the
    next forward where there is DeepCompile.
    """

    accumulation: int = 2
    optimizer: str = "AdamW"
    schedule: Optional[str] = None
    overlapped: bool = False


# Engines and plain loops ----------------------------------------------------------------------------------------

WARMUP_DECAY = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.02, "warmup_num_steps": 4, "total_num_steps": 12}


def halved_every_third_step(step):
    return 0.5 ** (step // 3)


# How to make each from an optimizer.
SCHEDULES = {
    "WarmupDecayLR": lambda optimizer: WarmupDecayLR(optimizer, **WARMUP_DECAY),
    "LambdaLR": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, halved_every_third_step),
    # Changes the betas too.
    "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.03, total_steps=250),
}


def make_optimizer(module, run):
    groups = parameter_groups(module, run.groups)
    if run.optimizer == "SGD":
        return torch.optim.SGD(groups, lr=0.2, momentum=0.5)
    # With a smaller eps, an element whose gradient is nothing but rounding would move as far as any other.
    return torch.optim.AdamW(groups, lr=0.02, eps=1e-4, weight_decay=0.1)


def make_engine(module, run):
    """Returns an engine, compiled if the run asks for that. Its schedule comes by one of the three ways there are."""
    config = {
        "train_micro_batch_size_per_gpu": SEQUENCES // dist.get_world_size(),
        "gradient_accumulation_steps": run.accumulation,
        "gradient_clipping": run.clipping,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": run.stage, "reduce_bucket_size": run.bucket},
        "compile": {"deepcompile": run.deepcompile, **(OVERLAPPED if run.overlapped and run.deepcompile else {})},
    }
    config.update(low_precision(run.dtype, loss_scale_window=3))
    for section, options in (run.config or {}).items():
        config[section] = {**config.get(section, {}), **options}
    optimizer, schedule = make_optimizer(module, run), None
    if run.schedule == "WarmupDecayLR":
        config["scheduler"] = {"type": run.schedule, "params": WARMUP_DECAY}
    elif run.schedule == "LambdaLR":
        schedule = SCHEDULES[run.schedule](optimizer)
    elif run.schedule:
        schedule = SCHEDULES[run.schedule]
    engine = deepspeed.initialize(model=module, optimizer=optimizer, lr_scheduler=schedule, config=config)[0]
    if run.deepcompile:
        engine.compile(backend=run.backend)
    return engine


def start(run, seed=0):
    """(module, engine), of which nothing has been compiled yet."""
    torch._dynamo.reset()
    module = build(run, seed)
    return module, make_engine(module, run)


class Plain:
    """A plain loop beside an engine."""

    def __init__(self, run, seed=0):
        self.run, self.module = run, build(run, seed)
        self.optimizer = make_optimizer(self.module, run)
        self.schedule = SCHEDULES[run.schedule](self.optimizer) if run.schedule else None

    def backward(self, number):
        """Leaves the averaged gradients of a whole step in ``grad``."""
        for micro_step in range(self.run.accumulation):
            (self.module(sequences(self.run, number, micro_step)) / self.run.accumulation).backward()
        average_gradients(self.module)

    def step(self):
        if self.run.clipping:
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.run.clipping)
        self.optimizer.step()
        if self.schedule:
            self.schedule.step()
        self.optimizer.zero_grad()

    def train(self, numbers):
        for number in numbers:
            self.backward(number)
            self.step()


def sequences(run, number, micro_step):
    """This rank's part of a micro-batch."""
    length = 3 + (5 * number + micro_step) % 4 if run.vary_length else 4
    generator = torch.Generator().manual_seed(1000 * number + 100 * micro_step)
    ids = torch.randint(0, VOCABULARY, (SEQUENCES, length), generator=generator)
    return ids.chunk(dist.get_world_size())[dist.get_rank()].to(device())


def backward(engine, run, number):
    """Runs the backwards of a step, and all of the step but for the optimizer's."""
    for micro_step in range(run.accumulation):
        engine.backward(engine(sequences(run, number, micro_step)))
        if micro_step < run.accumulation - 1:
            engine.step()


def train(engine, run, numbers):
    for number in numbers:
        backward(engine, run, number)
        engine.step()


def state(engine):
    """All that a checkpoint has to keep of this rank's engine: clones of tensors, and numbers, by name."""
    optimizer = engine.optimizer
    seen = {f"parameter {name}": value.clone() for name, value in engine.module.state_dict().items()}
    for index, (group, master) in enumerate(
        zip(optimizer.param_groups, optimizer.single_partition_of_fp32_groups, strict=True)
    ):
        seen[f"master {index}"] = master.detach().clone()
        for key, value in optimizer.state[master].items():
            seen[f"{key} {index}"] = torch.as_tensor(value).clone()
        for key in ("lr", "betas", "momentum"):
            if key in group:
                seen[f"{key} {index}"] = torch.tensor(group[key], dtype=torch.float64)
    for name in ("global_steps", "skipped_steps", "global_samples"):
        seen[name] = torch.tensor(getattr(engine, name))
    seen["loss scale"] = torch.tensor(float(optimizer.loss_scale))
    return seen


def differing(actual, expected):
    """Names of what is not bitwise the same, or not on the same device."""

    def same(name):
        if name not in actual or name not in expected or actual[name].device != expected[name].device:
            return False
        return torch.equal(actual[name], expected[name])

    return [name for name in sorted({*actual, *expected}) if not same(name)]


def compared(actual, expected, before):
    """(names of what differs, error of the parameters and masters, how far these went since ``before``)."""
    actual_ones, expected_ones, ones_before = (
        [value for name, value in sorted(seen.items()) if name.startswith(("parameter", "master"))]
        for seen in (actual, expected, before)
    )
    error, moved = total_error(actual_ones, expected_ones), total_error(expected_ones, ones_before)
    return differing(actual, expected), error, moved


# ZeRO checkpoints -----------------------------------------------------------------------------------------------


def train_and_save(run, folder, late=False):
    """Trains for four steps, saves right behind the last of them, and trains on.

    ``late``: each rank in turn sends its parameters late, so that they are on their way when they are saved.

    Returns (the state that was saved, that two steps later).
    """
    _, engine = start(run)
    train(engine, run, range(2))
    with one_rank_late(DELAY) if late else contextlib.nullcontext():
        train(engine, run, [2, 3])
        engine.save_checkpoint(folder, tag="saved")
    saved = state(engine)
    train(engine, run, [4, 5])
    after = state(engine)
    engine.destroy()
    return saved, after


def load_and_train(run, folder, **options):
    """Loads into a new engine and trains on; returns (the state that was loaded, that two steps later)."""
    _, engine = start(run, seed=1)
    engine.load_checkpoint(folder, tag="saved", **options)
    loaded = state(engine)
    train(engine, run, [4, 5])
    after = state(engine)
    engine.destroy()
    return loaded, after


def save_and_load(run, folder, late=False):
    """Saves, and loads with DeepCompile and without.

    Returns a dict: by whether there was DeepCompile when it was loaded, (names of what differs after loading, names of
    what differs at the end, error of the parameters and masters there); and ``moved``, how far the last steps went.
    """
    results = {}
    saved, expected = train_and_save(run, folder, late)
    for deepcompile in (True, False):
        loaded, after = load_and_train(dataclasses.replace(run, deepcompile=deepcompile), folder)
        at_the_end, error, results["moved"] = compared(after, expected, saved)
        results[deepcompile] = differing(loaded, saved), at_the_end, error
    return results


def roll_back(run, folder, late=False):
    """Saves, trains on, loads into the same engine what was saved, right behind a step, and trains the same again.

    ``late``: each rank in turn sends its parameters late, so that they are on their way when others are loaded.

    Returns (names of what differs after loading, names of what differs from the first time at the end, error of the
    parameters and masters there, how far the last steps went).
    """
    _, engine = start(run)
    train(engine, run, range(4))
    engine.save_checkpoint(folder, tag="saved")
    saved = state(engine)
    with one_rank_late(DELAY) if late else contextlib.nullcontext():
        train(engine, run, [4, 5])
        engine.load_checkpoint(folder, tag="saved")
    # Parameters that were still on their way would have arrived by now.
    time.sleep(2 * DELAY if late else 0)
    loaded = state(engine)
    train(engine, run, [4, 5])
    again = state(engine)
    engine.destroy()
    _, engine = start(run)
    train(engine, run, range(6))
    expected = state(engine)
    engine.destroy()
    return (differing(loaded, saved), *compared(again, expected, saved))


def stop_and_resume(run, folder, steps, stop):
    """Saves behind ``stop`` steps and trains on to the end; a new engine loads and trains to the end too.

    Returns (names of what differs, error of the parameters and masters, how far the steps behind the stop went, in
    fp32 the error against a plain loop).
    """
    module, engine = start(run)
    train(engine, run, range(stop))
    engine.save_checkpoint(folder, tag="saved")
    saved = state(engine)
    train(engine, run, range(stop, steps))
    expected, error = state(engine), None
    if run.dtype == "fp32":
        plain = Plain(run)
        plain.train(range(steps))
        error = total_error(module.parameters(), plain.module.parameters())
    engine.destroy()
    _, engine = start(run, seed=1)
    engine.load_checkpoint(folder, tag="saved")
    train(engine, run, range(stop, steps))
    resumed = state(engine)
    engine.destroy()
    return (*compared(resumed, expected, saved), error)


# Another number of ranks ----------------------------------------------------------------------------------------


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


def load_universal(run, folder):
    """Loads a universal checkpoint; returns (names of what differs after loading, error two steps later, moved)."""
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
    return (
        differing(loaded, seen["saved"]) + wrong,
        total_error(after.values(), seen["after"].values()),
        total_error(seen["after"].values(), seen["saved"].values()),
    )


def load_module_only(run, folder):
    """Loads parameters alone, and takes a step with them beside a plain loop that begins with the same.

    Returns (error of the parameters, of the masters made from them, of the masters after the step, how far it went).
    """
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
    return read, masters, stepped, moved


# Exports --------------------------------------------------------------------------------------------------------


def export(run, folder, late=False):
    """Exports right behind a step. Returns names of what is not bitwise the engine's own.

    The keys tell which export: that of 16 bits, the module's state dict, and fp32 from a ZeRO checkpoint.
    """
    module, engine = start(run)
    with one_rank_late(DELAY) if late else contextlib.nullcontext():
        # The last rank is late with the second step, and the first one writes the files.
        train(engine, run, [0, 1])
        engine.save_16bit_model(folder)
    engine.save_checkpoint(folder)
    dist.barrier()
    exported = {
        "16 bits": torch.load(os.path.join(folder, "pytorch_model.bin"), map_location=device()),
        "state dict": engine.module_state_dict(),
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
    return wrong


# States moved away and back -------------------------------------------------------------------------------------

INCLUDED = [
    None,
    [OffloadStateTypeEnum.lp_params],
    [OffloadStateTypeEnum.hp_params, OffloadStateTypeEnum.optim_states],
    [OffloadStateTypeEnum.lp_grads],
]


def move_away_and_back(engine, number):
    """Offloads and reloads states, others in each step. Meanwhile others use the memory that is free.

    Returns where a parameter was meanwhile.
    """
    # Each collects garbage several times over, which takes long among all that a compiler keeps.
    gc.freeze()
    try:
        engine.offload_states(include=INCLUDED[number % len(INCLUDED)])
        meanwhile = next(engine.module.parameters()).data_ptr()
        flat = engine.optimizer.bit16_groups_flat
        others = [torch.full(each.shape, torch.nan, device=device()) for each in flat for _ in range(8)]
        engine.reload_states(non_blocking=number % 2 == 1)
        del others
    finally:
        gc.unfreeze()
    return meanwhile


def train_with_states_moved(run, moment):
    """Trains one engine whose states stay and one whose do not.

    Returns (names of what differs, error of the parameters and masters, how far they went, in how many places of
    memory a parameter was).
    """
    _, engine = start(run)
    before = state(engine)
    train(engine, run, range(run.steps))
    expected = state(engine)
    engine.destroy()
    module, engine = start(run)
    places = set()
    for number in range(run.steps):
        for micro_step in range(run.accumulation):
            engine.backward(engine(sequences(run, number, micro_step)))
            last = micro_step == run.accumulation - 1
            if moment == "between backward and step" and last:
                places.add(move_away_and_back(engine, number))
            engine.step()
            if moment == ("between steps" if last else "between micro-batches"):
                places.add(move_away_and_back(engine, number))
            places.add(next(module.parameters()).data_ptr())
    actual = state(engine)
    engine.destroy()
    return (*compared(actual, expected, before), len(places))


# Reading and setting --------------------------------------------------------------------------------------------


def set_gradients(module, plain):
    for parameter, other in zip(module.parameters(), plain.module.parameters(), strict=True):
        gradient = safe_get_full_grad(parameter)
        safe_set_full_grad(parameter, gradient * 3 - 0.01)
        other.grad.mul_(3).sub_(0.01)


def set_gradients_vectorized(module, plain):
    safe_update_full_grad_vectorized(list(module.parameters()), lambda gradient, _: gradient * 3 - 0.01)
    for parameter in plain.module.parameters():
        parameter.grad.mul_(3).sub_(0.01)


def set_masters(module, plain):
    for parameter, other in zip(module.parameters(), plain.module.parameters(), strict=True):
        safe_set_full_fp32_param(parameter, safe_get_full_fp32_param(parameter) * 0.5 + 0.1)
        other.data.mul_(0.5).add_(0.1)


def set_optimizer_states(module, plain):
    for parameter, other in zip(module.parameters(), plain.module.parameters(), strict=True):
        for key in optimizer_keys(plain):
            safe_set_full_optimizer_state(parameter, safe_get_full_optimizer_state(parameter, key) * 2 + 0.01, key)
            plain.optimizer.state[other][key].mul_(2).add_(0.01)


def optimizer_keys(plain):
    return ["momentum_buffer"] if plain.run.optimizer == "SGD" else ["exp_avg", "exp_avg_sq"]


SETTERS = {
    setter.__name__: setter for setter in (set_gradients, set_gradients_vectorized, set_masters, set_optimizer_states)
}


def read_error(module, plain, gradients=False):
    """Largest relative error of what is read, against the plain loop's masters, optimizer states and gradients."""
    found, expected = [], []
    for parameter, other in zip(module.parameters(), plain.module.parameters(), strict=True):
        found.append(safe_get_full_fp32_param(parameter))
        expected.append(other)
        for key in optimizer_keys(plain):
            found.append(safe_get_full_optimizer_state(parameter, key))
            expected.append(plain.optimizer.state[other][key])
        if gradients:
            found.append(safe_get_full_grad(parameter))
            expected.append(other.grad)
    return relative_error(found, expected)


def set_beside_plain_loop(run, setter, moment):
    """Sets the same in an engine and in a plain loop.

    Returns (errors of what is read at each moment, how far from those of a plain loop in which nothing was set the
    parameters are after the step).
    """
    module, engine = start(run)
    plain, untouched = Plain(run), Plain(run)
    train(engine, run, range(2))
    plain.train(range(2))
    untouched.train(range(3))
    between_steps = moment == "between steps"
    if not between_steps:
        backward(engine, run, 2)
        plain.backward(2)
    errors = {"before": read_error(module, plain, gradients=not between_steps)}
    SETTERS[setter](module, plain)
    errors["set"] = read_error(module, plain, gradients=not between_steps)
    if between_steps:
        # What was set are the masters; the forward computes with the parameters.
        engine.optimizer.update_lp_params()
        backward(engine, run, 2)
        plain.backward(2)
    engine.step()
    plain.step()
    errors["after the step"] = read_error(module, plain)
    moved = total_error(plain.module.parameters(), untouched.module.parameters())
    train(engine, run, [3])
    plain.train([3])
    errors["after another step"] = read_error(module, plain)
    errors["parameters"] = relative_error(module.state_dict().values(), plain.module.state_dict().values())
    engine.destroy()
    return errors, moved


def set_all_between_backward_and_step(run):
    """Sets masters, optimizer states and gradients to numbers that bf16 can hold, in an engine and in a plain loop.

    So the step of either depends on what was set alone, whatever the engine computes in. Returns (error of the masters
    after the step, of the optimizer states, names of parameters that are not what the masters round to).
    """
    module, engine = start(run)
    plain = Plain(run)
    train(engine, run, [0])
    plain.train([0])
    backward(engine, run, 1)
    plain.backward(1)
    generator = torch.Generator().manual_seed(0)
    pairs = list(zip(module.parameters(), plain.module.parameters(), strict=True))
    for parameter, other in pairs:
        new = torch.rand(4, *other.shape, generator=generator).bfloat16().float().to(device())
        safe_set_full_fp32_param(parameter, new[0])
        other.data.copy_(new[0])
        for key, value in zip(optimizer_keys(plain), new[1:3]):
            safe_set_full_optimizer_state(parameter, value, key)
            plain.optimizer.state[other][key].copy_(value)
        safe_set_full_grad(parameter, new[3])
        other.grad.copy_(new[3])
    engine.step()
    plain.step()
    masters = [safe_get_full_fp32_param(parameter) for parameter, _ in pairs]
    states = [
        (safe_get_full_optimizer_state(parameter, key), plain.optimizer.state[other][key])
        for parameter, other in pairs
        for key in optimizer_keys(plain)
    ]
    written = module.state_dict()
    stale = [
        name
        for (name, _), master in zip(module.named_parameters(), masters, strict=True)
        if not torch.equal(written[name], master.to(written[name].dtype))
    ]
    engine.destroy()
    return relative_error(masters, plain.module.parameters()), relative_error(*zip(*states, strict=True)), stale


# Schedules ------------------------------------------------------------------------------------------------------


def train_with_schedule(run, folder):
    """Trains beside a plain loop with the same schedule, in an engine and then in one that loads what it saved.

    Returns (error of the parameters, learning rates of the engines' steps, those of the plain loop's).
    """
    module, engine = start(run)
    plain, rates, expected = Plain(run), [], []
    for number in range(10):
        if number == 5:
            engine.save_checkpoint(folder, tag="saved")
            engine.destroy()
            module, engine = start(run, seed=1)
            engine.load_checkpoint(folder, tag="saved")
        train(engine, run, [number])
        plain.train([number])
        rates.append(engine.get_lr()[0])
        expected.append(plain.optimizer.param_groups[0]["lr"])
    error = relative_error([safe_get_full_fp32_param(p) for p in module.parameters()], plain.module.parameters())
    engine.destroy()
    return error, rates, expected

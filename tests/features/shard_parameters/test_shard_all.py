# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Trained parameters that are sharded over ranks train to the same bits as whole ones."""

import contextlib
import datetime
import functools
import gc
import os
import time
import weakref
from typing import List, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.compile.features.shard_parameters import (
    feature,
    unit,
    unit_memory,
    unsharded_parameters,
    whole_units,
)
from deepspeed.compile.features.shard_parameters.at_rest import Resharded
from deepspeed.compile.features.shard_parameters.feature import sharded_blocks
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils import (
    logger,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)

from support.checkpoints import EXACT
from support.ends import in_processes_of_their_own
from support.faults import Injected
from support.frozen import (
    HIDING,
    MODELS,
    WIDTH,
    Adapted,
    AdaptedBlock,
    Body,
    beside_whole,
    late,
    model_of,
    trained_on,
)
from support.ids import vary
from support.lifetime import take_steps
from support.meeting import new_store
from support.models import VOCABULARY, qwen3_config
from support.on_ranks import on_ranks
from support.options import outcome
from support.sharded import (
    FROZEN,
    SHARDED,
    WHOLE,
    end,
    engine_of,
    losses_of,
    parameters_at_rest,
    same,
)
from support.training import Case, batch, device, make_engine, make_optimizer

pytestmark = pytest.mark.options("compile.shard_parameters")
SLOW = pytest.mark.slow


class Lion(torch.optim.Optimizer):
    """Steps by the sign of a mean of gradients, as an optimizer of a user's own."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                parameter.sub_(group["lr"] * torch.lerp(parameter.grad, mean, 0.9).sign())
                mean.lerp_(parameter.grad, 0.01)


OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.2, momentum=0.5),
    "Lion": lambda parameters: Lion(parameters, {"lr": 0.01}),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
}


class WithoutElements(Adapted):
    """Its blocks, and modules around them, end with a parameter without elements."""

    def __init__(self):
        super().__init__()
        for module in (*self.body.blocks, self.body, self.head):
            module.nothing = torch.nn.ParameterList([torch.empty(3, 0)])
        self.body.names = torch.nn.Embedding(0, WIDTH)


def beside_blocks(place, skipped):
    """Returns a model with a large layer at a place among its blocks, which leaves out some of all these."""

    class Beside(Body):
        def __init__(self):
            super().__init__()
            self.blocks.insert(place, torch.nn.Linear(WIDTH, WIDTH))

        def run(self, x, skip):
            for index, layer in enumerate(self.blocks):
                x = x if skip and index in skipped else self.run_block(layer, x)
            return x

    return type("Adapted", (Adapted,), {"of_body": Beside})


BESIDE = {
    "between": beside_blocks(2, (1, 3)),
    "before": beside_blocks(0, (1, 2)),
    "behind": beside_blocks(4, (2, 3)),
    "skipped": beside_blocks(2, (2,)),
}


def make(model, config, trained="all", optimizer=None, **case):
    models = {**MODELS, **HIDING, **BESIDE, "without elements": WithoutElements, "images": SeesImages}
    return engine_of(models[model], config, trained, optimizer=OPTIMIZERS.get(optimizer), **case)


class Trained(NamedTuple):
    losses: List[torch.Tensor]
    parameters: List[torch.Tensor]
    masters: List[torch.Tensor]
    at_rest: int


def train(model, config, steps=3, skips=False, **case):
    module, engine = make(model, config, **case)
    losses = losses_of(engine, steps, None, lambda step: engine(batch(step, 0, dist.get_rank(), 4)), skips)
    at_rest = parameters_at_rest(module)
    masters = [master.detach().clone() for master in engine.optimizer.single_partition_of_fp32_groups]
    return Trained(losses, end(engine, module), masters, at_rest)


def compare(model, delay=None, **more):
    """Trains with sharded and with whole parameters, to the same bits. Returns how many of the sharded are at rest."""
    with late(delay):
        sharded = train(model, SHARDED, **more)
    whole = train(model, WHOLE, **more)
    # On a GPU, generated code may add in another order.
    if EXACT or more.get("backend") != "inductor":
        check_same(sharded, whole)
    return sharded.at_rest


def check_same(sharded, whole, names=("losses", "parameters", "masters")):
    for name in names:
        assert same(getattr(sharded, name), getattr(whole, name)), name


TRAINABLE = [model for model in MODELS if model not in ("quantized", "casting")]


@vary("model", TRAINABLE)
@vary(
    "case",
    [{"stage": 1, "accumulation": 2}, {"stage": 2, "groups": 2, "dtype": "bf16"}],
    slow=[
        {"stage": 2, "accumulation": 2, "groups": 2, "trained": "some"},
        {"stage": 1, "dtype": "bf16", "trained": "some"},
        {"stage": 2, "dtype": "bf16", "offloaded": True},
        {"stage": 1, "dtype": "fp16", "adam": False, "clipping": 0.05},
    ],
)
@on_ranks(2)
def test_it_trains_to_the_same_bits(model, case):
    """A backward that read a block's memory before its owners had sent, or after a step, would differ in some bits."""
    assert compare(model, **case) >= 15


@pytest.mark.table
@vary("optimizer", OPTIMIZERS)
@on_ranks(2)
def test_other_optimizers(optimizer):
    """An optimizer that steps whole partitions would write its parameters where they no longer lie."""
    assert compare("plain", optimizer=optimizer, stage=2, steps=2) >= 15


@on_ranks(2)
def test_parameters_without_elements():
    """A parameter of which nobody owns anything would have no place, or stand at rest where nothing gathers it."""
    compare("without elements", stage=2, steps=2)


@vary("rank, method", [(0, "take_in"), (1, "take_in"), (0, "keep_own_part")])
@on_ranks(2, timeout=300)
def test_a_rank_that_cannot_shard(rank, method):
    """The other rank would wait in a gather for a rank that has raised."""
    broken = mock.patch.object(unit_memory.UnitMemory, method, side_effect=Injected("no memory"))
    with broken if dist.get_rank() == rank else contextlib.nullcontext():
        said = outcome(make, "plain", SHARDED)
    if dist.get_rank() == rank:
        assert said == "Injected: no memory"
    else:
        assert f"rank {rank} could not shard parameters, so no rank goes on" in said


@SLOW
@vary("model", ["plain", "non-reentrant"])
@on_ranks(2)
def test_generated_code(model):
    """What Inductor generates would read parameters where they lay when it was compiled, or past their unit's time."""
    compare(model, stage=2, groups=2, backend="inductor")


@SLOW
@vary("model", TRAINABLE)
@vary("world", [3, 4])
@on_ranks("world")
def test_several_owners(model, world):
    """Small partitions cut most parameters, some of them twice."""
    compare(model, stage=2)


@vary("model", ["plain"], slow=["non-reentrant", *HIDING])
@vary("world", [2], slow=[3])
@on_ranks("world")
def test_gathers_that_come_late(model, world):
    """A block that does not wait for its owners would compute with what its memory holds by then.

    So would one that is given back too early, or whose parameter of several owners is taken from before the last step.
    """
    compare(model, delay=0.01, groups=2, steps=2)


def both(option, case):
    """The options of the section, with and without sharded parameters."""
    return [{"compile": {**config["compile"], **option}} for config in (SHARDED, WHOLE)], case


OPTIONS = {
    "8bit": both({"optimizer_states": "8bit"}, {"dtype": "bf16", "stage": 2}),
    "remainders": both({"store_param_remainders": True}, {"dtype": "bf16", "stage": 1, "groups": 2}),
    "8bit and remainders": both(
        {"optimizer_states": "8bit", "store_param_remainders": True}, {"dtype": "bf16", "stage": 2}
    ),
    "budget": both({"activation_memory_budget": 0.0}, {"stage": 2, "accumulation": 2}),
    "chunks": both({"chunked_loss": True}, {"stage": 1}),
}


@vary("option", ["remainders"], slow=[option for option in OPTIONS if option != "remainders"])
@on_ranks(2)
def test_other_options(option):
    """An option that changes what lies in partitions, or what backwards read, would train to other bits."""
    (sharded, whole), case = OPTIONS[option]
    first, second = train("plain", sharded, **case), train("plain", whole, **case)
    check_same(first, second, ("losses", "parameters"))
    assert first.at_rest >= 15


@vary("model", ["between"], slow=[model for model in BESIDE if model != "between"])
@vary("kept", [None], slow=[2])
@on_ranks(2)
def test_a_large_layer_beside_blocks_that_are_left_out(model, kept):
    """The layer would be read before it came, or a block that stays whole would be taken for one that was left out."""
    with mock.patch.dict(SHARDED["compile"], {} if kept is None else {"keep_gathered": kept}):
        compare(model, skips=True, stage=2, steps=4)


class TurningBlock(AdaptedBlock):
    """Takes a parameter for complex numbers. Beside it are parameters of one number."""

    def __init__(self):
        super().__init__()
        self.one, self.turn = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.randn(WIDTH // 2, 2))
        self.other = torch.nn.ParameterList([torch.zeros(1)])

    @torch.compiler.disable
    def turned(self, x):
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.view_as_complex(self.turn)).flatten(-2)

    def forward(self, x):
        return super().forward(self.turned(x)) * self.one + self.other[0]


@on_ranks(2, timeout=100)
def test_a_parameter_taken_for_complex_numbers():
    """A backward would read the parameter in its own dtype, or another one: complex numbers have half the offset."""
    model = model_of(of_block=TurningBlock, __init__=functools.partialmethod(Body.__init__, depth=3))
    with mock.patch.dict(MODELS, turning=model):
        module, engine = make("turning", SHARDED)
        turned = [block.turn.storage_offset() for block in module.body.blocks]
        engine.destroy()
        compare("turning", stage=2, steps=2)
    # Complex numbers are looked for at another place of a unit than numbers of the parameter's dtype.
    assert all(turned)


def train_two(config, trained):
    """Trains two engines at the same time, by one loss and then each by its own, and then makes one anew."""
    (first, one), (second, other) = (make(model, config, trained) for model in ("plain", "breaking"))
    results = []
    for step in range(2):
        ids = batch(step, 0, dist.get_rank(), 4)
        losses = one(ids), other(ids)
        sum(losses).backward()
        other.step()
        one.step()
        results.extend(loss.detach() for loss in losses)
    for engine, module in ((one, first), (other, second)):
        results.extend(trained_on(engine, module))
        end(engine)
    again = make_engine(first, Case(config=config, adam=True))
    results.extend(trained_on(again, first))
    end(again)
    return results


@SLOW
@vary("shards", ["all", "frozen"])
@on_ranks(2)
def test_two_engines(shards):
    """One engine would wait for the gathers of the other, or give back its blocks."""
    config, trained = (SHARDED, "all") if shards == "all" else (FROZEN, "adapters")
    assert same(train_two(config, trained), train_two(WHOLE, trained))


# What works at rest ------------------------------------------------------------------------------------------------


def checkpointed(engine, module, folder):
    """A checkpoint brings back what was there, masters, states and frozen parameters too."""
    engine.save_checkpoint(folder, tag="one")
    trained_on(engine, module)
    with torch.no_grad():
        module.load_state_dict({name: torch.zeros(parameter.shape) for name, parameter in module.named_parameters()})
    engine.load_checkpoint(folder, tag="one")


def weights_alone(engine, module, folder):
    """A checkpoint's module without the optimizer's states: masters are the parameters."""
    engine.save_checkpoint(folder, tag="one")
    trained_on(engine, module)
    engine.load_checkpoint(folder, tag="one", load_module_only=True)


def exported(engine, module, folder):
    engine.save_16bit_model(folder, "weights.bin")
    dist.barrier()
    return [*torch.load(f"{folder}/weights.bin", map_location="cpu").values()]


def cloned(engine, module, folder):
    """As Accelerate and the trainers that are made of it take a model's weights."""
    clones = clone_tensors_for_torch_save(module.state_dict())
    sharded = feature.sharded_blocks(engine)
    held = sum(unit.memory.buffer.untyped_storage().nbytes() for unit in sharded.units) if sharded else 0
    return [*clones.values(), torch.tensor(held)] if dist.get_rank() == 0 else []


def moved(engine, module, folder):
    """As Lightning moves a module to the host at its end. There is nothing to move at rest."""
    if feature.sharded_blocks(engine):
        # What `module.cpu()` does to parameters on a GPU, also where tests have none.
        copies = []
        module.body.blocks._apply(lambda parameter: copies.append((parameter, parameter.to("meta"))) or parameter)
        for parameter, copied in copies:
            parameter.data = copied
    module.cpu()
    module.to(device())


class Pair(NamedTuple):
    """A caller's own tuple."""

    first: list
    second: tuple


def in_client_state(engine, module, folder):
    """As Lightning's WeightAveraging saves the model beside its average. The first rank saves, and may pass more."""
    state = module.state_dict()
    engine.save_checkpoint(folder, tag="one", client_state={"current": state})
    nested = {}
    if dist.get_rank() == 0:
        pair = Pair([1, module.body.blocks[1].up.weight.detach()], torch.Size([2]))
        nested = {"pair": pair, "again": pair.first, "itself": []}
        # Pickle takes what holds itself.
        nested["itself"].append(nested["itself"])
    engine.save_checkpoint(folder, tag="two", client_state=nested)
    if nested:
        # What the caller has stays as it is.
        assert nested["pair"] is pair and nested["again"] is pair.first
    found = [engine.load_checkpoint(folder, tag=tag)[1] for tag in ("one", "two")]
    assert found[0]["current"]._metadata == state._metadata
    (number, weight), size = found[1]["pair"]
    assert (number, type(size)) == (1, torch.Size)
    # What was shared is shared, and what holds itself does.
    assert found[1]["again"] is found[1]["pair"].first and found[1]["itself"][0] is found[1]["itself"]
    return [*found[0]["current"].values(), weight]


def without_frozen(engine, module, folder):
    engine.save_checkpoint(folder, tag="one", exclude_frozen_parameters=True)
    dist.barrier()
    saved = torch.load(f"{folder}/one/mp_rank_00_model_states.pt", weights_only=False, map_location="cpu")
    trained_on(engine, module)
    engine.load_checkpoint(folder, tag="one", load_module_strict=False)
    return [*saved["module"].values()]


def loaded(engine, module, folder):
    generator = torch.Generator().manual_seed(5)
    module.load_state_dict(
        {name: torch.rand(parameter.shape, generator=generator) - 0.5 for name, parameter in module.named_parameters()}
    )
    engine.optimizer.refresh_fp32_params()


def evaluated_by_one(engine, module, folder):
    found = []
    with unsharded_parameters(engine), torch.no_grad():
        if dist.get_rank() == 0:
            found.append(engine(batch(3, 3, 3, 5)))
            module.eval()
            found.append(module(batch(1, 1, 1, 5)))
            module.train()
    return found


def full_values(engine, module, folder):
    """DeepSpeed's functions for parameters, gradients and states."""
    found = []
    loss = engine(batch(9, 0, dist.get_rank(), 4))
    engine.backward(loss)
    for parameter in module.parameters():
        found += [safe_get_full_fp32_param(parameter), safe_get_full_grad(parameter)]
        found.append(safe_get_full_optimizer_state(parameter, "exp_avg"))
    engine.step()
    for parameter in module.parameters():
        safe_set_full_fp32_param(parameter, safe_get_full_fp32_param(parameter) * 0.5)
    engine.optimizer.update_lp_params()
    return found


def set_values(engine, module, folder):
    """DeepSpeed's functions that set states, and a gradient before the step."""
    parameters = [*module.parameters()]
    for parameter in parameters:
        safe_set_full_optimizer_state(parameter, safe_get_full_optimizer_state(parameter, "exp_avg") * 2, "exp_avg")
    engine.backward(engine(batch(9, 0, dist.get_rank(), 4)))
    for parameter in parameters:
        safe_set_full_grad(parameter, safe_get_full_grad(parameter) * 0.5)
    engine.step()


def partly_loaded(engine, module, folder):
    """From a file that lacks a parameter, and has one that the module lacks."""
    engine.save_checkpoint(folder, tag="one")
    dist.barrier()
    if dist.get_rank() == 0:
        path = f"{folder}/one/mp_rank_00_model_states.pt"
        saved = torch.load(path, weights_only=False)
        saved["module"]["other"] = saved["module"].pop("body.blocks.0.up.weight")
        torch.save(saved, path)
    dist.barrier()
    trained_on(engine, module)
    engine.load_checkpoint(folder, tag="one", load_module_strict=False, load_optimizer_states=False)
    engine.optimizer.refresh_fp32_params()


def averaged(engine, module, folder):
    """Average weights take the place of the parameters for an evaluation, as an EMA's."""
    with unsharded_parameters(engine):
        own = [parameter.detach().clone() for parameter in module.parameters()]
        for parameter, value in zip(module.parameters(), own, strict=True):
            parameter.data = value * 0.9
    engine.eval()
    with torch.no_grad():
        found = [engine(batch(3, 3, dist.get_rank(), 5))]
    with unsharded_parameters(engine):
        for parameter, value in zip(module.parameters(), own, strict=True):
            parameter.data = value
    engine.train()
    return found


def changed_within(engine, module, folder):
    """As where adapters are merged into weights."""
    with unsharded_parameters(engine), torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.5)
    module.body.blocks[0].up.weight.requires_grad_(False).requires_grad_(True)
    engine.optimizer.refresh_fp32_params()


def changed_by_blocks(engine, module, folder):
    """The same, where there is no room for all blocks at once."""
    before, blocks = [], list(module.body.blocks)
    for block in blocks:
        with unsharded_parameters(engine, block.parameters()), torch.no_grad():
            before += [parameter.detach().clone() for parameter in block.parameters()]
            for parameter in block.parameters():
                parameter.mul_(0.5)
            if sharded_blocks(engine) is not None:
                at_rest = [
                    sum(isinstance(parameter, Resharded) for parameter in other.parameters()) for other in blocks
                ]
                assert [other for other, number in zip(blocks, at_rest, strict=True) if not number] == [block]
    engine.optimizer.refresh_fp32_params()
    return before


def used_by_parts(engine, module, folder):
    """A context of a block stays while others come and go, and ends as it should where a rank raises in it."""
    block = module.body.blocks[0]
    with unsharded_parameters(engine, block.parameters()), torch.no_grad():
        for parameter in block.parameters():
            parameter.data.mul_(0.5)
        engine.save_checkpoint(folder, tag="within")
        with unsharded_parameters(engine):
            found = [parameter.detach().clone() for parameter in module.parameters()]
        found += [parameter.detach().clone() for parameter in block.parameters()]
    with contextlib.suppress(OSError), unsharded_parameters(engine, block.up.weight):
        found.append(block.up.weight.detach().clone())
        if dist.get_rank() == 0:
            raise OSError
    # Also on the rank that raised.
    assert sharded_blocks(engine) is None or any(isinstance(parameter, Resharded) for parameter in block.parameters())
    engine.optimizer.refresh_fp32_params()
    return found


def stepped_within(engine, module, folder):
    with unsharded_parameters(engine):
        loss = engine(batch(4, 0, dist.get_rank(), 4))
        engine.backward(loss)
        engine.step()
        return [parameter.detach().clone() for parameter in module.parameters()]


def sent_within(engine, module, folder):
    """As where weights are loaded, frozen ones too, before all of them are sent."""
    with unsharded_parameters(engine), torch.no_grad():
        for parameter in module.parameters():
            if not parameter.requires_grad:
                parameter.mul_(2)
        engine.optimizer.update_lp_params()
        return [parameter.detach().clone() for parameter in module.parameters()]


def states_moved(engine, module, folder):
    engine.offload_states(
        include=[OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params], pin_memory=False
    )
    engine.reload_states()


def held_by_others(engine, module, folder):
    """Views that are kept have the new values when the block has been gathered again."""
    with unsharded_parameters(engine):
        views = [block.up.weight.detach() for block in module.body.blocks]
    trained_on(engine, module)
    with unsharded_parameters(engine):
        return [view.clone() for view in views]


def hooked(engine, module, folder):
    """A hook that is registered at rest sees the gradient."""
    seen = []
    parameter = module.body.blocks[1].up.weight
    handle = parameter.register_hook(lambda gradient: seen.append(gradient.clone()))
    trained_on(engine, module)
    handle.remove()
    return seen


def interrupted(engine, module, folder):
    """A forward and a backward that raise on all ranks."""

    def fail(*_):
        raise ValueError

    for add in (module.body.blocks[1].register_forward_hook, module.body.blocks[1].register_full_backward_pre_hook):
        hook = add(fail)
        with pytest.raises(ValueError):
            engine.backward(engine(batch(0, 0, dist.get_rank(), 4)))
        hook.remove()


def dropped(engine, module, folder):
    """Forwards without a backward, and a backward without a step."""
    for step in range(2):
        loss = engine(batch(step, 0, dist.get_rank(), 4))
    engine.backward(engine(batch(2, 0, dist.get_rank(), 4)))
    engine.zero_grad()
    return [loss.detach()]


def trained_by_itself(engine, module, folder):
    """Without the engine's forward, and with a backward of the caller's."""
    module(batch(0, 0, dist.get_rank(), 4)).backward()
    engine.step()


def overflowed(engine, module, folder):
    """A step that is left out, because the gradients of a rank are not finite."""
    loss = engine(batch(0, 0, dist.get_rank(), 4))
    engine.backward(loss * (float("inf") if dist.get_rank() == 0 else 1.0))
    engine.step()
    assert engine.skipped_steps > 0


def accumulated_otherwise(engine, module, folder):
    """The number of micro-batches changes between steps, and the last ones are shorter, on one rank alone."""
    found = []
    for accumulation in (3, 1):
        engine.set_train_batch_size(2 * accumulation * dist.get_world_size())
        for micro_step in range(accumulation):
            ids = batch(0, micro_step, dist.get_rank(), 6 - 2 * micro_step)[: 2 - dist.get_rank()]
            found.append(engine(ids))
            engine.backward(found[-1])
            engine.step()
    return [loss.detach() for loss in found]


def done_between(engine, module, folder):
    """Evaluates, reads and saves between a forward and its backward."""
    loss = engine(batch(0, 0, dist.get_rank(), 4))
    engine.eval()
    with torch.inference_mode():
        found = [engine(batch(1, 0, dist.get_rank(), 5)).clone()]
    engine.train()
    with unsharded_parameters(engine):
        found += [parameter.detach().clone() for parameter in module.parameters()]
    engine.save_checkpoint(folder, tag="one")
    engine.backward(loss)
    engine.step()
    return found


def averaged_beside(engine, module, folder):
    """A copy has average weights, and the first rank alone calls it."""
    with unsharded_parameters(engine):
        mean = torch.optim.swa_utils.AveragedModel(module)
    for step in range(2):
        take_steps(engine, 1, first=step)
        with unsharded_parameters(engine):
            mean.update_parameters(module)
    with torch.no_grad():
        found = [mean(batch(1, 0, 0, 4))] if dist.get_rank() == 0 else []
    return [*found, *(parameter.detach() for parameter in mean.parameters())]


def of_several_forwards(engine, module, folder):
    """As in DPO: a loss of two forwards, and of one without gradients."""
    losses = [engine(batch(0, number, dist.get_rank(), 4 + number)) for number in range(2)]
    with torch.no_grad():
        losses.append(engine(batch(0, 2, dist.get_rank(), 4)))
    engine.backward(torch.nn.functional.softplus(losses[0] - losses[1]) + losses[0] * losses[2])
    engine.step()
    return [loss.detach() for loss in losses]


WORKS = {
    function.__name__: function
    for function in (
        *(checkpointed, weights_alone, exported, cloned, moved, loaded, evaluated_by_one, full_values),
        *(set_values, partly_loaded, averaged, without_frozen, in_client_state),
        *(
            changed_within,
            changed_by_blocks,
            used_by_parts,
            stepped_within,
            sent_within,
            states_moved,
            held_by_others,
            hooked,
            interrupted,
            dropped,
        ),
        *(trained_by_itself, overflowed, accumulated_otherwise, done_between, averaged_beside, of_several_forwards),
    )
}


def check_work(name, folder, configs=(SHARDED, WHOLE), **case):
    assert same(*beside_whole(make, configs, WORKS[name], folder, **case))


@pytest.mark.follows("leave compile.optimizer_states out to set states")
@vary("work", WORKS)
@vary("case", [{"stage": 2}], slow=[{"stage": 1, "dtype": "bf16", "groups": 2}])
@on_ranks(2)
def test_what_works_at_rest(tmp_path, work, case):
    """What users do beside training would read, or change, memory that no longer has the parameters."""
    if work == "overflowed":
        case = {**case, "dtype": "fp16"}
    check_work(work, tmp_path, **case)


AT_REST_WITH_REMAINDERS = [checkpointed.__name__, full_values.__name__]


@vary(
    "work",
    AT_REST_WITH_REMAINDERS,
    slow=[work for work in WORKS if work not in (*AT_REST_WITH_REMAINDERS, overflowed.__name__)],
)
@on_ranks(2)
def test_what_works_at_rest_with_remainders(tmp_path, work):
    """Master weights are made of a parameter's bits, so they would be made of memory that has no parameter."""
    configs, case = OPTIONS["remainders"]
    check_work(work, tmp_path, configs, **case)


@SLOW
@vary("work", [without_frozen.__name__, cloned.__name__, sent_within.__name__, used_by_parts.__name__])
@on_ranks(2)
def test_what_works_with_frozen_parameters(tmp_path, work):
    """Frozen parameters have no owner: a block's lie in parts on all ranks."""
    check_work(work, tmp_path, stage=1, trained="some")


AT_REST_WITH_ADAPTERS = (checkpointed, evaluated_by_one, interrupted, trained_by_itself, without_frozen)


@vary("work", [function.__name__ for function in AT_REST_WITH_ADAPTERS])
@vary("stage", [1, 2])
@on_ranks(2)
def test_what_works_where_frozen_parameters_alone_are_sharded(tmp_path, work, stage):
    """What users do beside training would read, or change, shares instead of parameters."""
    check_work(work, tmp_path, (FROZEN, WHOLE), stage=stage, trained="adapters")


@vary("destroys", [True], slow=[False])
@on_ranks(2)
def test_another_engine_of_a_module_at_rest(destroys):
    """Trainers make an engine for every call: training again, or validation after it, would find nothing."""
    results = []
    for config in (SHARDED, WHOLE):
        module, engine = make("plain", config)
        results.append(trained_on(engine, module))
        if destroys:
            engine.destroy()
            other = make_engine(module, Case(config=config, adam=True))
            results[-1] += trained_on(other, module)
            end(other)
        else:
            other = deepspeed.initialize(model=module, config={"train_micro_batch_size_per_gpu": 4})[0]
            other.eval()
            with torch.no_grad():
                results[-1].append(other(batch(3, 3, dist.get_rank(), 4)))
            engine.train()
            results[-1] += trained_on(engine, module)
            engine.destroy()
        results[-1].append(module(batch(2, 2, 2, 4)).detach())
    assert same(*results)


@on_ranks(2)
def test_another_engine_frees_the_memory_of_the_first():
    """Until Python collects the first engine's units, the model would be in memory twice while another one begins."""
    module, engine = make("plain", SHARDED)
    memories = [weakref.ref(unit.memory) for unit in sharded_blocks(engine).units]
    trained_on(engine, module)
    engine.destroy()
    del engine
    gc.collect()
    gc.disable()
    try:
        other = make_engine(module, Case(config=WHOLE, adam=True))
        assert memories and not any(memory() for memory in memories)
    finally:
        gc.enable()
    other.destroy()


class ModelOnTwoRanks:
    """An ``mpu`` of four ranks: ranks 0 and 2 train one part of a model, and ranks 1 and 3 the other."""

    def __init__(self):
        self._data, self._model = (
            [dist.new_group(ranks) for ranks in groups] for groups in (([0, 2], [1, 3]), ([0, 1], [2, 3]))
        )

    def get_data_parallel_group(self):
        return self._data[self.get_model_parallel_rank()]

    def get_data_parallel_rank(self):
        return dist.get_rank() // 2

    def get_model_parallel_group(self):
        return self._model[self.get_data_parallel_rank()]

    def get_model_parallel_rank(self):
        return dist.get_rank() % 2

    def get_data_parallel_world_size(self):
        return 2

    get_model_parallel_world_size = get_data_parallel_world_size


@SLOW
@on_ranks(4, timeout=100)
def test_a_checkpoint_of_two_parts_of_a_model(tmp_path):
    """The rank that saves the second part of a model would save parameters at rest."""
    # Both engines train on alike.
    mpu, results, folder = ModelOnTwoRanks(), [], str(tmp_path)
    for config in (SHARDED, WHOLE):
        torch._dynamo.reset()
        torch.manual_seed(mpu.get_model_parallel_rank())
        module, case = MODELS["plain"]().to(device()).requires_grad_(True), Case(config=config, adam=True, stage=2)
        engine = make_engine(module, case, optimizer=make_optimizer(module, case), mpu=mpu)
        if config is SHARDED:
            trained_on(engine, module)
            assert any(isinstance(parameter, Resharded) for parameter in module.parameters())
            engine.save_checkpoint(folder, tag="one")
        else:
            engine.load_checkpoint(folder, tag="one")
        results.append(trained_on(engine, module))
        end(engine)
    assert same(*results)


@pytest.mark.options("zero_optimization.round_robin_gradients", "zero_optimization.parameter_alignment")
@vary("stage", [2], slow=[1])
@vary("config, deepcompile", [(SHARDED, True), (WHOLE, True), ({}, False)])
@on_ranks(2)
def test_round_robin_order(tmp_path, config, stage, deepcompile):
    """Parameters would be linked with the master weights of others, and a load would cut memory that is not there."""
    config, folder = {**config, "zero_optimization": {"round_robin_gradients": True}}, str(tmp_path)
    module, engine = make("plain", config, stage=stage, deepcompile=deepcompile)
    take_steps(engine)
    masters = {name: safe_get_full_fp32_param(parameter).clone() for name, parameter in module.named_parameters()}
    engine.save_checkpoint(folder, tag="one")
    engine.load_checkpoint(folder, tag="one")
    wrong = []
    with unsharded_parameters(engine):
        for name, parameter in module.named_parameters():
            if not (
                torch.equal(masters[name], parameter) and torch.equal(safe_get_full_fp32_param(parameter), parameter)
            ):
                wrong.append(name)
        engine.destroy()
    assert wrong == []


# The core's tests of converted checkpoints load one of sharded parameters too.
@SLOW
@on_ranks(2)
def test_checkpoints_of_either_kind(tmp_path):
    """A checkpoint that has only this rank's parameters, or none, would load elsewhere as something else."""
    # Each trains on from a checkpoint of the other kind.
    results = []
    for kind, config, other in (("sharded", SHARDED, WHOLE), ("whole", WHOLE, SHARDED)):
        module, engine = make("plain", config, dtype="bf16")
        trained_on(engine, module)
        engine.save_checkpoint(f"{tmp_path}/{kind}", tag="one")
        end(engine)
        module, engine = make("plain", other, dtype="bf16")
        engine.load_checkpoint(f"{tmp_path}/{kind}", tag="one")
        results.append(trained_on(engine, module))
        end(engine)
    assert same(*results)


@pytest.mark.skipif(torch.cuda.is_available(), reason="two ranks whose local rank is 0 would have one device")
@vary("shards, trained", [("all", "all"), ("frozen", "alike")], slow=[("frozen", "some")])
@on_ranks(2, timeout=300)
def test_a_checkpoint_of_each_node(tmp_path, shards, trained):
    """A rank that saves beside the first one would save parameters at rest: it would raise, and others wait for it."""
    # As ranks of two nodes do that have no common storage. An engine with whole parameters loads the checkpoint.
    alone, results = {"checkpoint": {"use_node_local_storage": True}}, []
    folder = f"{tmp_path}/{dist.get_rank()}"
    sharded = {"compile": {**SHARDED["compile"], "shard_parameters": shards}}
    with mock.patch.dict(os.environ, LOCAL_RANK="0"):
        for config in (sharded, WHOLE):
            module, engine = make("plain", {**config, **alone}, trained=trained, stage=2)
            if config is sharded:
                trained_on(engine, module)
                engine.save_checkpoint(folder, tag="one")
                engine.save_16bit_model(folder, "weights.bin")
            else:
                engine.load_checkpoint(folder, tag="one")
            with unsharded_parameters(engine):
                frozen = {
                    name: parameter.detach().cpu()
                    for name, parameter in module.named_parameters()
                    if not parameter.requires_grad
                }
            results.append(trained_on(engine, module))
            end(engine)
    saved = torch.load(f"{folder}/one/mp_rank_00_model_states.pt", weights_only=False, map_location="cpu")
    fragments = saved["frozen_param_fragments"]
    assert fragments.keys() == frozen.keys() and same(frozen.values(), map(fragments.get, frozen))
    assert same(*results)
    exported = [*torch.load(f"{folder}/weights.bin").values()] if dist.get_rank() == 0 else []
    assert all(weight.isfinite().all() for weight in exported)


@vary("model", ["non-reentrant"], slow=["plain"])
@on_ranks(2)
def test_other_memory_in_a_backward(model):
    """What checkpointing computes again would save parameters in the caller's memory, where its forward had not."""
    # Parameters get other memory, with the same values, before the blocks' backward.
    results = []
    for config in (SHARDED, WHOLE):
        module, engine = make(model, config)
        body = module.body

        def move(_, body=body):
            for parameter in body.parameters():
                parameter.data = parameter.data.clone()

        handle = module.head.weight.register_hook(move)
        first = trained_on(engine, module)
        handle.remove()
        results.append([*first, *trained_on(engine, module)])
        end(engine)
    assert same(*results)


# What is refused ---------------------------------------------------------------------------------------------------


def evaluate(engine, steps=1):
    engine.eval()
    with torch.no_grad():
        for step in range(steps):
            engine(batch(step, 0, dist.get_rank(), 4))
    engine.train()


def evaluates_alone(engine, other):
    """Both ranks raise in their first forward."""
    if dist.get_rank() == 0:
        evaluate(engine)
    else:
        engine(batch(0, 0, 1, 4))


def drops_a_batch(engine, other):
    if dist.get_rank() == 0:
        engine(batch(0, 0, 0, 4))
    take_steps(engine, 2)


def has_less_data(engine, other):
    take_steps(engine, 1 + dist.get_rank())
    evaluate(engine, steps=2)


def runs_engines_in_another_order(engine, other):
    for evaluated in (engine, other) if dist.get_rank() == 0 else (other, engine):
        evaluate(evaluated)


class SeesImages(Adapted):
    """Blocks of another size look at images first, of which a rank may have none."""

    def __init__(self):
        super().__init__()
        self.tower = torch.nn.ModuleList(AdaptedBlock(2 * WIDTH) for _ in range(3))

    def forward(self, ids, skip=False):
        x = torch.ones(2, 2 * WIDTH, device=ids.device)
        for block in () if skip else self.tower:
            x = block(x)
        return super().forward(ids) + x.square().mean()


def has_no_images(engine, other):
    """The second rank has none."""
    loss = engine(batch(0, 0, 0, 4), dist.get_rank() == 1)
    engine.backward(loss)
    engine.step()


DIFFERS = {
    function.__name__: function
    for function in (evaluates_alone, drops_a_batch, has_less_data, runs_engines_in_another_order, has_no_images)
}


def differ(how, shards):
    """Returns what a rank says of ranks that differ."""
    config, trained = (SHARDED, "all") if shards == "all" else (FROZEN, "adapters")
    # Buckets are full from the first gradient on.
    _, engine = make("images" if "images" in how else "plain", config, trained, stage=2, bucket=1)
    other = make("plain", config, trained, stage=2)[1] if "engines" in how else None
    return outcome(DIFFERS[how], engine, other)


@pytest.mark.skipif(torch.cuda.is_available(), reason="an assertion on the device ends the processes")
@vary(
    "how, shards",
    [("evaluates_alone", "all"), ("has_no_images", "all")],
    slow=[
        *((name, "all") for name in DIFFERS if name not in ("evaluates_alone", "has_no_images")),
        ("has_no_images", "frozen"),
    ],
)
def test_ranks_that_differ(how, shards):
    """One rank would wait for parameters and the other for gradients until the time-out, or take another engine's.

    Gloo would end a rank that gets messages of another size, and name no cause.
    """
    for said in in_processes_of_their_own(differ, how, shards):
        assert said and said.startswith("DistBackendError: ranks gathered parameters of different blocks"), said


@on_ranks(2)
def test_a_rank_that_saves_alone_is_told():
    """A program that has the first rank alone save would hang to the timeout, and nobody knew why."""
    # The first rank takes a state dict to save it, and the other one comes when the first one was told.
    module, engine = make("plain", SHARDED)
    told, store, key = [], new_store(), "the first rank was told"

    def tell(message):
        told.append(message)
        store.set(key, "")

    # A busy machine has ranks wait for each other too.
    patience = 60 if dist.get_rank() else 1
    with mock.patch.object(whole_units, "PATIENCE", patience), mock.patch.object(logger, "warning", tell):
        if dist.get_rank() == 1:
            store.wait([key], datetime.timedelta(seconds=120))
        clone_tensors_for_torch_save(module.state_dict())
    end(engine)
    if dist.get_rank() == 1:
        assert told == []
    else:
        assert told[0].startswith("rank 0 has waited") and "all ranks must save a model" in told[0]


# Memory ------------------------------------------------------------------------------------------------------------


class Normed(Adapted):
    """Beside its blocks it has a norm, which is small and stays whole."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)

    def forward(self, ids, skip=False):
        logits = self.head(self.norm(self.body(ids, skip)))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


@on_ranks(2)
def test_views_of_what_stays_whole_cost_no_time():
    """A step on a CPU would take the caller's state dict for memory that gloo holds, and wait a second for it."""
    module = Normed().requires_grad_(True).to(device())
    engine = make_engine(module, Case(config=SHARDED))
    assert feature.sharded_blocks(engine).outside is not None
    kept = module.norm.state_dict()
    take_steps(engine, 1)
    engine.backward(engine(batch(0, 0, dist.get_rank(), 4)))
    with mock.patch.object(unit, "LONGEST_HELD", 30.0):
        begin = time.monotonic()
        engine.step()
        seconds = time.monotonic() - begin
    engine.destroy()
    assert seconds < 15 and all(tensor.isfinite().all() for tensor in kept.values())


def merged_by_peft(config, folder):
    """Trains adapters of a Qwen3; returns its weights with the adapters merged, without, and merged for good.

    Its layers are checkpointed, and it generates texts between and after the merges.
    """
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file
    from transformers import Qwen3ForCausalLM

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(qwen3_config(VOCABULARY))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    adapters = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(model, adapters).to(device())
    model.enable_input_require_grads()
    engine = make_engine(model, Case(adam=True, config=config))
    model.train()

    def weights(of):
        return [tensor.detach().clone() for tensor in of.state_dict().values()]

    def generated():
        engine.eval()
        prompt = {"input_ids": batch(0, 0, 0, 3), "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
        text = model.generate(**prompt)
        engine.train()
        return text

    found, at_rest = [], parameters_at_rest(model)
    for step in range(2):
        ids = batch(step, 0, dist.get_rank(), 8)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        with unsharded_parameters(engine):
            model.merge_adapter(safe_merge=step == 1)
            found += weights(model)
        found.append(generated())
        with unsharded_parameters(engine):
            model.unmerge_adapter()
            found += weights(model)
        found.append(generated())
    said = None
    own = f"{folder}/{dist.get_rank()}"
    if config["compile"].get("shard_parameters") == "frozen":
        # One rank alone saves adapters, which are whole, and no rank all weights.
        if dist.get_rank() == 0:
            model.save_pretrained(own)
        of_all = outcome(model.base_model.model.save_pretrained, f"{own}/at_rest")
        assert of_all is not None and "compile.shard_parameters" in of_all, of_all
    elif at_rest:
        # Adapters are sharded too. On a GPU safetensors copies them to the host, for which all ranks gather them.
        said = outcome(model.save_pretrained, own)
        assert said is None if torch.cuda.is_available() else "compile.shard_parameters" in str(said), said
    with unsharded_parameters(engine):
        if dist.get_rank() == 0:
            model.save_pretrained(folder)
            saved = load_file(f"{folder}/adapter_model.safetensors")
            found += saved.values()
            model.base_model.model.save_pretrained(f"{folder}/whole")
            found += load_file(f"{folder}/whole/model.safetensors").values()
            if at_rest and said is None:
                assert same(load_file(f"{own}/adapter_model.safetensors").values(), saved.values())
        merged = model.merge_and_unload()
        engine.destroy()
    found += weights(merged)
    assert not any("lora" in name for name, _ in merged.named_parameters())
    return found, at_rest


@SLOW
@vary("shards", ["all", "frozen"])
@on_ranks(2)
def test_adapters_that_peft_merges(tmp_path, shards):
    """A merge would add adapters to weights of which a rank has a part, or not be taken back."""
    pytest.importorskip("peft")
    overlapped = {"compile": {**FROZEN["compile"], "overlap_param_gather": True}}
    config = SHARDED if shards == "all" else overlapped
    (sharded, at_rest), (whole, _) = (merged_by_peft(options, str(tmp_path)) for options in (config, WHOLE))
    assert same(sharded, whole) and at_rest > 0


class Plain(Adapted):
    """Its blocks are large beside what is around them."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(True)


@on_ranks(2)
def test_a_rank_holds_its_part_and_two_blocks():
    """A flat tensor, or a block that is not given back, would keep a whole copy on every rank."""
    module = Plain().to(device())
    whole = sum(parameter.nbytes for parameter in module.parameters())
    engine = make_engine(module, Case(config=SHARDED, adam=True))
    sharded, counts = feature.sharded_blocks(engine), []
    optimizer = engine.optimizer

    def held(*_):
        storages = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
            for tensor in (
                *(parameter for parameter in module.parameters()),
                *optimizer.bit16_groups_flat,
                *optimizer.own_partitions.values(),
                *(unit.memory.buffer for unit in sharded.units),
            )
        }
        counts.append(sum(storages.values()))

    held()
    for block in module.body.blocks:
        block.register_forward_hook(lambda block, inputs, output: (held(), output.register_hook(held))[:0] or None)
    take_steps(engine)
    held()
    owned = sum(own.untyped_storage().nbytes() for own in optimizer.own_partitions.values())
    outside = 0 if sharded.outside is None else sharded.outside.memory.nbytes
    most = max(sum(parameter.nbytes for parameter in block.parameters()) for block in module.body.blocks) + 1024
    engine.destroy()
    assert owned < 0.65 * whole
    assert counts[0] == counts[-1] == owned + outside
    assert max(counts) <= owned + outside + 2 * most
    assert len(counts) > 8

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What the messages of sharded parameters advise works."""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.compile.features.shard_parameters import feature, unit_memory, unsharded_parameters
from deepspeed.compile.features.shard_parameters.at_rest import Resharded
from deepspeed.compile.zero_1_and_2.parameter.carrier import carrier_of
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

from support.beside import warnings_logged
from support.ends import in_processes_of_their_own
from support.frozen import MODELS, trained_on
from support.ids import vary
from support.on_ranks import on_ranks
from support.options import outcome
from support.sharded import end, engine_of, losses_of, section
from support.training import Case, batch, device, make_engine


def make(shards):
    return engine_of(MODELS["plain"], section(shards), "all" if shards == "all" else "adapters")


def another_engine(module, shards, **case):
    return make_engine(module, Case(config=section(shards), adam=True, **case))


def trains(engine, module):
    """Trains a step, and destroys the engine. Returns whether parameters are numbers, at rest, and others than before.

    The model is used without an engine afterwards.
    """
    with unsharded_parameters(engine):
        before = [parameter.detach().clone() for parameter in module.parameters()]
    after = trained_on(engine, module)[1:]
    at_rest = any(isinstance(parameter, Resharded) for parameter in module.parameters())
    end(engine)
    moved = any(not torch.equal(*pair) for pair in zip(before, after, strict=True))
    alone = module(batch(2, 2, 2, 4))
    return at_rest and moved and all(tensor.isfinite().all() for tensor in (*after, alone))


def another_dtype(folder):
    """A trained parameter gets another dtype, then other values, and then another dtype with another engine."""
    module, engine = make("all")
    weight, said = module.body.blocks[1].up.weight, []
    with unsharded_parameters(engine):
        before = weight.detach().clone()
    with mock.patch.object(unit_memory, "warn", said.append), unsharded_parameters(engine):
        weight.data = weight.data.double() * 2
    with unsharded_parameters(engine), torch.no_grad():
        is_as_before = torch.equal(weight, before)
        weight.mul_(2)
    with unsharded_parameters(engine):
        is_kept = torch.equal(weight, before * 2)
        engine.destroy()
    module.bfloat16()
    works = trains(another_engine(module, "all", dtype="bf16"), module)
    return said, is_as_before and is_kept and works and weight.dtype == torch.bfloat16


def used_after_the_end(folder):
    """A model whose engine was destroyed is called, and then by another engine."""
    module, engine = make("all")
    engine.destroy()
    said = [outcome(module, batch(0, 0, 0, 4)), outcome(module.head.weight.sum)]
    # Here another engine's end lets the model be used without one.
    return said, trains(another_engine(module, "all"), module)


def ended_in_a_forward(folder):
    """A hook destroys the engine while a forward runs. Its parameters are on their way or at rest."""
    said, works = [], []
    for shards in ("all", "frozen"):
        module, engine = make(shards)
        hook = module.body.blocks[1].register_forward_pre_hook(lambda *_, engine=engine: engine.destroy())
        said.append(outcome(engine, batch(0, 0, 0, 4)))
        hook.remove()
        works.append(trains(another_engine(module, shards), module))
    return said, all(works)


def ended_before_a_backward(folder):
    module, engine = make("frozen")
    loss = engine(batch(0, 0, 0, 4))
    engine.destroy()
    said = [outcome(loss.backward)]
    return said, trains(another_engine(module, "frozen"), module)


def whole_within_a_forward(folder):
    module, engine = make("all")

    def enter(*_):
        with unsharded_parameters(engine):
            pass

    hook = module.body.blocks[1].register_forward_pre_hook(enter)
    said = [outcome(engine, batch(0, 0, dist.get_rank(), 4))]
    hook.remove()
    enter()
    return said, trains(engine, module)


def trained_too_late(folder):
    """A frozen parameter is to be trained, first at rest, and then before another engine is made."""
    module, engine = make("frozen")
    weight = module.body.blocks[0].up.weight
    said = [outcome(weight.requires_grad_), outcome(setattr, weight, "requires_grad", True)]
    with torch.no_grad():
        weight.requires_grad_()
    said.append(outcome(losses_of, engine, 1))
    weight.requires_grad_(False)
    end(engine)
    before = weight.requires_grad_().detach().clone()
    works = trains(another_engine(module, "frozen"), module)
    return said, works and not torch.equal(before, weight)


def saved_elsewhere(folder):
    """Each rank saves what it has of a state dict, and then the first rank alone."""
    module, engine = make("all")
    clones, said = clone_tensors_for_torch_save(module.state_dict()), []
    file = os.path.join(folder, "model.pt")
    if dist.get_rank() > 0:
        said.append(outcome(torch.save, clones, f"{file}.{dist.get_rank()}"))
    else:
        torch.save(clones, file)
    dist.barrier()
    saved = torch.load(file, map_location=device())
    with unsharded_parameters(engine):
        same = all(torch.equal(saved[name], parameter) for name, parameter in module.named_parameters())
        engine.destroy()
    return said, same


def read_at_rest(folder):
    """A parameter's place is asked for at rest, and then within the context."""
    said, works = [], []
    for shards in ("frozen", "all"):
        module, engine = make(shards)
        weight = module.body.blocks[1].up.weight
        said += [outcome(weight.data_ptr), outcome(module.body.blocks[1].up.bfloat16)]
        with unsharded_parameters(engine):
            is_placed = weight.data_ptr() > 0
        works.append(trains(engine, module) and is_placed)
    # Who reads has nothing to save.
    return said, all(works) and not any("save" in text for text in said)


def read_by_compiled_code(folder):
    """Code that the caller compiles reads parameters, at rest and then within the context."""
    module, engine = make("all")
    norm = torch.compile(lambda weights: sum(weight.square().sum() for weight in weights), backend="eager")
    said = [outcome(norm, list(module.parameters()))]
    with unsharded_parameters(engine):
        expected = sum(weight.square().sum() for weight in module.parameters())
        works = torch.equal(norm(list(module.parameters())), expected)
    return said, trains(engine, module) and works


def saved_at_rest(folder):
    """A parameter is saved at rest, and then in each of the ways that the error names."""
    module, engine = make("all")
    weight = module.body.blocks[1].up.weight
    said = [outcome(torch.save, module.state_dict(), f"{folder}/{dist.get_rank()}.pt")]
    with unsharded_parameters(engine):
        own = weight.detach().clone()
        torch.save(module.state_dict(), f"{folder}/{dist.get_rank()}.pt")
    engine.save_checkpoint(folder, tag="one")
    engine.save_16bit_model(folder, "weights.bin")
    cloned = clone_tensors_for_torch_save(module.state_dict())  # as Accelerate's get_state_dict() does
    dist.barrier()
    files = (f"{folder}/one/mp_rank_00_model_states.pt", f"{folder}/weights.bin")
    saved, exported = (torch.load(file, weights_only=False, map_location=device()) for file in files)
    states = [saved["module"], exported, *([cloned] if dist.get_rank() == 0 else [])]
    same = all(torch.equal(state["body.blocks.1.up.weight"], own) for state in states)
    return said, trains(engine, module) and same


class Holder:
    """An object of a caller's own."""

    def __init__(self, weight):
        self.weight = weight


def saved_in_objects(folder):
    """A checkpoint's client state has a parameter in a set, in an object, and of another engine, and then whole."""
    module, engine = make("all")
    others, other = make("all")
    weight, others_weight = (model.body.blocks[1].up.weight for model in (module, others))
    states = {
        "set": (weight, engine, lambda tensor: {tensor}),
        "object": (weight, engine, Holder),
        "other": (others_weight, other, lambda tensor: [tensor]),
    }
    said, same = [], []
    for name, (parameter, owner, hold) in states.items():

        def save(name=name, parameter=parameter, hold=hold):
            # The first rank alone saves its state.
            state = {"held": hold(parameter.detach()), "again": [weight.detach()]} if dist.get_rank() == 0 else {}
            engine.save_checkpoint(folder, tag=name, client_state=state)

        said.append(outcome(save))
        with unsharded_parameters(owner):
            save()
            expected = parameter.detach().clone()
        held = engine.load_checkpoint(folder, tag=name)[1].get("held")
        if dist.get_rank() == 0:
            (loaded,) = [held.weight] if name == "object" else held
            same.append(torch.equal(loaded.to(expected.device), expected))
    end(other)
    # Each rank says what the first rank cannot pickle.
    state = {"call": lambda: 0, "held": Holder(weight.detach())} if dist.get_rank() == 0 else {}
    cannot = outcome(lambda: engine.save_checkpoint(folder, client_state=state))
    return said, trains(engine, module) and all(same) and "pickle" in str(cannot)


def another_engine_too_early(folder):
    """Another engine is to train the parameters of an engine that is alive, and then of one that was destroyed."""
    said, works = [], []
    for shards in ("all", "frozen"):
        module, engine = make(shards)
        said.append(outcome(another_engine, module, shards))
        trained_on(engine, module)
        engine.destroy()
        works.append(trains(another_engine(module, shards), module))
    return said, all(works)


def offloaded_whole(folder):
    """All states are to be moved to the host, and then those that the error leaves."""
    module, engine = make("all")
    said = [outcome(engine.offload_states)]
    others = [state for state in OffloadStateTypeEnum if state is not OffloadStateTypeEnum.lp_params]
    engine.offload_states(include=others, pin_memory=False)
    engine.reload_states()
    return said, trains(engine, module)


def beside_overlapped_gathers(folder):
    """Either option alone takes the module and the optimizer of the engine that was refused."""
    module, engine = make(None)
    engine.destroy()
    options = {"shard_parameters": "all", "overlap_param_gather": True}
    section = {"regional_compilation": True}
    said = [outcome(make_engine, module, Case(config={"compile": {**section, **options}}, adam=True))]
    losses = []
    for name, value in options.items():
        engine = make_engine(module, Case(config={"compile": {**section, name: value}}, adam=True))
        losses.append(trained_on(engine, module)[0])
        end(engine)
    return said, losses[1] < losses[0]


def taken_as_torch_does(folder):
    """Torch's functions for checkpoints take the parameters at rest, of the model and of its inner module."""
    module, engine = make("all")
    trained_on(engine, module)
    on_first = StateDictOptions(full_state_dict=True, cpu_offload=True)
    taken = [(module, None), (engine, on_first), (module.body, on_first)]
    said = [outcome(get_model_state_dict, model, options=options) for model, options in taken]
    with unsharded_parameters(engine):
        values = get_model_state_dict(module, options=on_first)
        expected = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    is_right = all(torch.equal(expected[name], value) for name, value in values.items())
    return said, is_right and len(values) == (0 if dist.get_rank() else len(expected)) and trains(engine, module)


# What ranks do -> what is said of it.
REMEDIES = {
    another_dtype: "change its values in place, or make another engine of the model",
    used_after_the_end: "and its engine was destroyed; make another engine of the model",
    ended_in_a_forward: "and its engine was destroyed; make another engine of the model",
    ended_before_a_backward: "or the forward again with another engine of the model",
    whole_within_a_forward: "was called within a forward or a backward; call it outside of them",
    taken_as_torch_does: "cannot be taken by get_model_state_dict() here; do it within `with unsharded_parameters(",
    trained_too_late: "and cannot be trained; set requires_grad before the engine is made",
    saved_elsewhere: "another rank was to save it; save it on rank 0 alone",
    read_at_rest: "here; do it within `with unsharded_parameters(engine):` of",
    read_by_compiled_code: "cannot gather it; call that code within `with unsharded_parameters(",
    saved_in_objects: "cannot be saved as a part of client_state here; do it within `with unsharded_parameters(",
    saved_at_rest: "which all ranks enter together, or save with engine.save_checkpoint()",
    another_engine_too_early: "call destroy() of that engine first, on all ranks",
    offloaded_whole: "offload_states() cannot move it to the host; name other states in include=[...]",
    beside_overlapped_gathers: "and compile.shard_parameters='all' a part of them; leave one of them out",
}


@pytest.mark.options("compile.shard_parameters")
@pytest.mark.follows(
    "and cannot be trained; set requires_grad before the engine is made",
    "and another rank was to save it; save it on rank 0 alone",
    "was called within a forward or a backward; call it outside of them",
    "change its values in place, or make another engine of the model",
    "and its engine was destroyed; make another engine of the model, or destroy",
    "run the backward before destroy(), or the forward again",
    "and cannot be {} here; do it within `with unsharded_parameters(engine):`",
    "and compiled code cannot gather it; call that code within `with unsharded_parameters(engine):`",
    ", or save with engine.save_checkpoint(), engine.save_16bit_model() or Accelerate's",
    "has sharded its parameters by compile.shard_parameters; call destroy() of that engine first",
    "cannot move it to the host; name other states in include=[...]",
    "and compile.shard_parameters='all' a part of them; leave one of them out",
)
@vary("remedy", REMEDIES)
@on_ranks(2, timeout=300)
def test_what_messages_advise(tmp_path, remedy):
    """Who does as a message says would meet the next error, or train a model without its values."""
    said, works = remedy(str(tmp_path))
    assert works
    assert all(REMEDIES[remedy] in text for text in said)
    assert said or (remedy is saved_elsewhere and dist.get_rank() == 0)


def gathers_that_cannot_begin():
    """Returns what two forwards say when gathers fail at once, and how many units are on their way."""
    _, engine = make("all")
    sharded = feature.sharded_blocks(engine)
    fails = RuntimeError("the process group has gone")
    with mock.patch.object(type(carrier_of(engine.optimizer, 0)), "gather", side_effect=fails):
        said = [outcome(engine, batch(0, 0, 0, 4)) for _ in range(2)]
    return said, len(sharded.whole._is_kept)


def test_a_gather_that_cannot_begin():
    """The second forward would say that the engine was destroyed, and send its user after something else."""
    for (first, second), begun in in_processes_of_their_own(gathers_that_cannot_begin):
        assert first is not None and first == second and "destroyed; make another" not in first
        assert begun == 0


@on_ranks(2, timeout=120)
def test_an_engine_that_one_rank_has_not_collected():
    """A rank that has would gather its parameters while the other raises."""
    module, engine = make("all")
    sharded = feature.sharded_blocks(engine)
    # As the end of an engine that Python collects leaves it.
    sharded.is_closed = dist.get_rank() == 0
    assert "another engine trains this model" in outcome(another_engine, module, "all")
    engine.destroy()
    another_engine(module, "all").destroy()


@on_ranks(2)
def test_the_end_of_a_program_warns_of_nothing(tmp_path):
    """Each rank of each program would end with a warning. Who uses the model afterwards gets an error that says so."""
    _, engine = make("all")
    engine.backward(engine(batch(0, 0, dist.get_rank(), 4)))
    engine.step()
    engine.save_checkpoint(str(tmp_path))
    with warnings_logged() as texts:
        engine.destroy()
    assert texts == []

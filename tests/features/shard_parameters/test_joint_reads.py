# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Sharded parameters that are read, and changed, between steps on all ranks, or on one rank alone."""

import copy
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.compile.features.shard_parameters import feature, joint_reads, unsharded_parameters
from deepspeed.utils import logger

from support.frozen import WIDTH, Adapted, beside_whole, trained_on
from support.ids import vary
from support.on_ranks import gathered, on_ranks
from support.options import outcome
from support.sharded import SHARDED, WHOLE, end, engine_of, same, section
from support.training import batch, device


def make(model, options, trained="all", **case):
    return engine_of(Adapted, options, trained, **case)


def by_reference_models(engine, module, folder):
    """TRL's callback moves a reference model towards the model."""
    from trl.trainer.callbacks import SyncRefModelCallback

    torch.manual_seed(1)
    reference = Adapted().to(device())
    for _ in range(2):
        SyncRefModelCallback._sync_target_model(module, reference, 0.25)
        trained_on(engine, module)
    return [parameter.detach() for parameter in reference.parameters()]


def by_bema(engine, module, folder):
    """TRL's callback of averages with a corrected bias takes the first weights, and later ones."""
    from trl import BEMACallback

    callback, state = BEMACallback(update_freq=1, device=str(device())), mock.Mock()
    # The callback makes a model from the configuration of one of transformers.
    callback.running_model = Adapted().to(device())
    callback.running_model.load_state_dict(module.state_dict())
    for name, parameter in module.named_parameters():
        callback.param_names.append(name)
        callback.thetat_params.append(parameter)
        callback.theta0_params.append(parameter.detach().clone().to(device()))
        callback.ema_params.append(callback.theta0_params[-1].clone())
    for step in range(3):
        state.global_step = step
        callback.on_step_end(None, state, None, model=module)
        trained_on(engine, module)
    return [parameter.detach() for parameter in callback.running_model.parameters()]


def by_averaged_models(engine, module, folder):
    """Torch's averages of a model, copied from the model at rest, take its place for an evaluation, as Lightning's."""
    averaged = torch.optim.swa_utils.AveragedModel(
        module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5), use_buffers=True
    )
    found = []

    def swap():
        for average, current in zip(averaged.module.parameters(), module.parameters(), strict=True):
            kept = average.data.clone()
            average.data.copy_(current.data)
            current.data.copy_(kept)

    for _ in range(3):
        trained_on(engine, module)
        averaged.update_parameters(module)
        swap()
        engine.eval()
        with torch.no_grad():
            found.append(engine(batch(3, 3, dist.get_rank(), 5)))
        engine.train()
        swap()
    return [*found, *(parameter.detach() for parameter in averaged.module.parameters())]


def by_shadows(engine, module, folder):
    """Copies of parameters are moved towards these, and change places with them, as diffusers' EMAModel does."""
    shadows, found = [parameter.clone().detach() for parameter in module.parameters()], []
    for _ in range(2):
        trained_on(engine, module)
        with torch.no_grad():
            for shadow, parameter in zip(shadows, module.parameters(), strict=True):
                shadow.sub_(0.5 * (shadow - parameter))
        kept = [parameter.detach().cpu().clone() for parameter in module.parameters()]
        for shadow, parameter in zip(shadows, module.parameters(), strict=True):
            parameter.data.copy_(shadow.to(parameter.device).data)
        with torch.no_grad():
            found.append(engine(batch(3, 3, dist.get_rank(), 5)))
        for stored, parameter in zip(kept, module.parameters(), strict=True):
            parameter.data.copy_(stored.data)
    return [*found, *shadows]


def by_foreach(engine, module, folder):
    """The same in functions of lists, of which one has parameters of all blocks, and of a state dict."""
    shadows = [tensor.detach().clone() for tensor in module.state_dict().values()]
    trained_on(engine, module)
    with torch.no_grad():
        torch._foreach_mul_(shadows, 0.5)
        torch._foreach_add_(shadows, [*module.parameters()], alpha=0.5)
        torch._foreach_lerp_(shadows, [*module.state_dict().values()], 0.25)
    return [*shadows, *torch._foreach_norm([*module.parameters()])]


def by_sending(engine, module, folder):
    """Weights are sent one by one, as to an engine that generates, with what describes them."""
    sent = []
    for _, parameter in module.named_parameters():
        weight = parameter.data
        assert weight.shape == parameter.shape and weight.dtype == parameter.dtype
        received = weight.contiguous().clone() if dist.get_rank() == 0 else torch.empty_like(weight)
        if dist.get_rank() > 0:
            weight.sum()
        dist.broadcast(received, src=0)
        sent.append(received)
    return sent


def by_changing(engine, module, folder):
    """Parameters are changed in each of the ways that there are."""
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            if index % 4 == 0:
                parameter.mul_(0.5)
            elif index % 4 == 1:
                parameter.data.mul_(0.5).add_(0.1)
            elif index % 4 == 2:
                parameter.view(-1)[:2].zero_()
            else:
                parameter.copy_(parameter.detach() * 0.5)
    engine.optimizer.refresh_fp32_params()


def by_a_penalty(engine, module, folder):
    """A term of the loss is made of parameters between forward and backward."""
    loss = engine(batch(9, 0, dist.get_rank(), 4))
    penalty = sum((parameter * parameter).sum() for parameter in module.parameters() if parameter.requires_grad)
    first = module.body.blocks[0].up.weight
    engine.backward(loss + 0.1 * penalty + (first @ first.T).tanh().mean())
    engine.step()


def by_copying(engine, module, folder):
    copied = copy.deepcopy(module)
    assert all(type(parameter) is torch.nn.Parameter for parameter in copied.parameters())
    trained_on(engine, module)
    return [parameter.detach() for parameter in copied.parameters()]


WORKS = (
    *(by_reference_models, by_bema, by_averaged_models, by_shadows, by_foreach, by_sending, by_changing),
    *(by_a_penalty, by_copying),
)


@pytest.mark.options("compile.shard_parameters")
@vary("work", WORKS)
@vary("shards", ["all", "frozen"])
@vary("case", [{}], slow=[{"stage": 2, "dtype": "bf16"}])
@on_ranks(2)
def test_all_ranks_read(tmp_path, work, shards, case):
    """Callbacks between steps would stop the training, or average what memory holds that was given back."""
    if work in (by_bema, by_reference_models):
        pytest.importorskip("trl")
    trained = "all" if shards == "all" else "adapters"
    assert same(*beside_whole(make, (section(shards), WHOLE), work, tmp_path, trained=trained, **case))


class WithKernel(Adapted):
    """A block has a parameter that may have another memory format."""

    def __init__(self):
        super().__init__()
        self.body.blocks[0].kernel = torch.nn.Parameter(torch.randn(4, 3, 2, 2))


def by_format(engine, module, folder):
    kernel, like = module.body.blocks[0].kernel, {"memory_format": torch.channels_last}
    found = [kernel.detach().clone(**like), kernel.detach().contiguous(**like)]
    assert all(value.is_contiguous(**like) for value in found)
    with torch.no_grad():
        kernel.copy_(other=found[0] * 0.5)
    engine.optimizer.refresh_fp32_params()
    return found


@on_ranks(2)
def test_memory_formats():
    """A copy of a kernel in another memory format would raise torch's error about a tensor of no elements."""

    def make(model, options):
        return engine_of(WithKernel, options)

    assert same(*beside_whole(make, (section("all"), WHOLE), by_format, ""))


def alone(engine, module, weight):
    """The first rank reads a parameter, goes on with the error, and reads it again."""
    said = [outcome(weight.norm), outcome(weight.detach().clone)] if dist.get_rank() == 0 else []
    trained_on(engine, module)
    return said


def late(engine, module, weight):
    """A rank reads a parameter when the other one waits no longer."""
    dist.barrier()
    time.sleep(3 * dist.get_rank())
    return [outcome(weight.norm), outcome(weight.norm)]


def others(engine, module, weight):
    """Ranks read different parameters."""
    return [outcome(module.body.blocks[dist.get_rank()].up.weight.sum)]


def raising(engine, module, weight):
    """A rank raises an error before the read."""
    return [outcome(weight.norm)] if dist.get_rank() == 0 else []


APART = {function.__name__: function for function in (alone, late, others, raising)}


@pytest.mark.options("compile.shard_parameters")
@pytest.mark.follows("by some ranks alone; do it on all ranks, or within")
@vary("how", APART)
@vary("shards", ["all"], slow=["frozen"])
@on_ranks(2)
def test_not_all_ranks_read(how, shards):
    """A rank that logs a norm alone would hang, or gather what the other rank sends for something else."""
    module, engine = make("plain", section(shards), trained="all" if shards == "all" else "adapters")
    told = []
    with mock.patch.multiple(joint_reads, PATIENCE=0.5, LONGEST_WAIT=1.5):
        with mock.patch.object(logger, "warning", told.append):
            begin = time.monotonic()
            said = APART[how](engine, module, module.body.blocks[0].up.weight)
            seconds = time.monotonic() - begin
    # Steps end what ranks did apart.
    trained_on(engine, module)
    norm = module.body.blocks[0].up.weight.norm()
    with unsharded_parameters(engine):
        works = torch.equal(norm, module.body.blocks[0].up.weight.norm())
        engine.destroy()
    assert all("cannot be read or changed" in text and "by some ranks alone" in text for text in said)
    assert works and seconds < 60
    if dist.get_rank() == 0:
        assert len(said) == {"alone": 2, "late": 2}.get(how, 1)
        assert any("has waited" in text and "for other ranks to read it too" in text for text in told)


def norm(state_dict):
    return sum(values.norm().item() for values in state_dict.values())


def average(weight):
    averages = torch.ones(weight.shape)
    averages += 0.1 * weight.detach()


# How a rank reads a state dict.
STATE_DICT_READS = {
    "norm": norm,
    "average": lambda saved: average(saved["head.weight"]),
    "product": lambda saved: torch.nn.functional.linear(torch.ones(1, WIDTH), saved["head.weight"]),
    "assignment": lambda saved: torch.ones(WIDTH).__setitem__(0, saved["head.weight"][0, 0]),
}


def prepared(state_dict):
    """Returns the shapes of what a trainer makes of a state dict that it saves."""
    copied = copy.deepcopy(clone_tensors_for_torch_save(state_dict))
    copied = {name: values.to(torch.bfloat16).clone().contiguous() for name, values in copied.items()}
    return {name: values.shape for name, values in copied.items()}


@pytest.mark.follows("another rank was to read it; read engine.module.state_dict() on all ranks")
@on_ranks(2)
def test_a_state_dict_that_one_rank_saves():
    """A rank without its values would wait for others a minute, or compute with memory that nobody has written."""
    module, engine = make("plain", SHARDED)
    first, saved = norm(module.state_dict()), engine.module_state_dict()
    said = {name: outcome(read, saved) for name, read in STATE_DICT_READS.items()}
    shapes = prepared(saved)
    with unsharded_parameters(engine):
        engine.destroy()
    assert gathered(first) == [first] * 2
    assert shapes == {name: parameter.shape for name, parameter in module.named_parameters()}
    if dist.get_rank() == 0:
        assert set(said.values()) == {None}, said
    else:
        wanted = "RuntimeError: with compile.shard_parameters only rank 0 gets the values"
        assert all(text.startswith(wanted) for text in said.values()), said


@on_ranks(2)
def test_reads_leave_no_keys():
    """A callback of every step would fill the memory of the process that has the store."""
    module, engine = make("plain", SHARDED)
    store, counts = distributed_c10d._get_process_group_store(feature.sharded_blocks(engine).process_group), []
    for number in (10, 90):
        for _ in range(number):
            module.body.blocks[0].up.weight.sum()
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    end(engine)
    # Barriers may leave some.
    assert counts[1] - counts[0] < 30

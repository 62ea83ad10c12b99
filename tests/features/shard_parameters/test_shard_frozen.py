# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Frozen parameters that are sharded over ranks train to the same bits as whole ones."""

import contextlib
import copy
import functools
import io
from typing import List, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef

from deepspeed.compile.features.shard_parameters import (
    feature,
    from_host,
    joint_reads,
    unit_memory,
    unsharded_parameters,
)
from deepspeed.compile.features.shard_parameters.at_rest import Resharded
from deepspeed.compile.features.shard_parameters.saved_tensors import saving_handles
from deepspeed.compile.fixes.base.subclasses import BROADCAST_LATER
from deepspeed.compile.zero_1_and_2.collectives import collective
from deepspeed.utils import logger

from support.beside import warnings_logged
from support.checkpoints import EXACT
from support.frozen import (
    CHANGING,
    HIDING,
    MODELS,
    AdaptedBlock,
    beside_whole,
    late,
    model_of,
    trained_on,
)
from support.graph_cache import shapes_no_graph
from support.ids import vary
from support.models import VOCABULARY, BlocksWithin, qwen3_config
from support.on_ranks import gathered, on_ranks
from support.options import outcome
from support.sharded import FROZEN, WHOLE, end, engine_of, losses_of, parameters_at_rest, same
from support.training import (
    BOUND,
    Case,
    batch,
    compile_backend,
    device,
    engine_by_configuration,
    make_engine,
    relative_error,
)

pytestmark = pytest.mark.options("compile.shard_parameters")
SHARDED = FROZEN


def build(model, seed=0):
    torch.manual_seed(seed)
    return {**MODELS, **HIDING, **CHANGING}[model]().to(device())


def make(model, config, seed=0, **case):
    return engine_of(functools.partial(build, model, seed), config, "adapters", **case)


class Trained(NamedTuple):
    losses: List[torch.Tensor]
    parameters: List[torch.Tensor]
    at_rest: int  # parameters that were at rest after the steps
    most_gathered: int  # units that were whole or on their way at a time


@contextlib.contextmanager
def watched(engine):
    """Yields a list to which it appends how many units are whole or on their way whenever one is begun."""
    counts, sharded = [], feature.sharded_blocks(engine)
    units = [] if sharded is None else sharded.units

    def counted(start, *args):
        start(*args)
        whole = {unit for unit in units if unit.is_gathered or unit._works is not None}
        # On a single rank, all are whole always.
        assert whole == set(sharded.whole._is_kept) or dist.get_world_size() == 1
        counts.append(len(whole))

    # Not of the class, because ranks look for no graphs in torch's cache where a class was changed.
    for unit in units:
        unit.start_gather = functools.partial(counted, unit.start_gather)
    try:
        yield counts
    finally:
        for unit in units:
            del unit.start_gather


def train(model, config, steps=3, skips=False, evaluates=False, **case):
    module, engine = make(model, config, **case)

    def evaluate(step):
        return engine(batch(step, 0, dist.get_rank(), 4))

    with watched(engine) as counts:
        losses = losses_of(engine, steps, None, evaluate if evaluates else None, skips)
    at_rest = parameters_at_rest(module)
    return Trained(losses, end(engine, module), at_rest, max(counts, default=0))


def compare(model, delay=None, **more):
    """Trains with sharded and with whole parameters, to the same bits. Returns what came of the sharded ones."""
    with late(delay):
        sharded = train(model, SHARDED, **more)
    whole = train(model, WHOLE, **more)
    assert whole.at_rest == 0
    if more.get("backend") == "inductor" and not EXACT:
        # On a GPU, generated code may add in another order where parameters begin elsewhere.
        numbers = [
            [tensor for tensor in (*run.losses, *run.parameters) if tensor.is_floating_point()]
            for run in (sharded, whole)
        ]
        assert relative_error(*numbers) < BOUND
    else:
        assert same(sharded.losses, whole.losses) and same(sharded.parameters, whole.parameters)
    return sharded


@vary("model, backward", [("upper", 2)], slow=[("plain", 4)])
@on_ranks(2)
def test_no_gather_where_no_gradient_flows(model, backward):
    """Blocks below the first adapter would be gathered for a backward that never comes to them."""
    module, engine = make(model, SHARDED)
    with watched(engine) as counts:
        loss = engine(batch(0, 0, 0, 4))
        forward = len(counts)
        engine.backward(loss)
    engine.destroy()
    assert (forward, len(counts) - forward) == (4, backward)


@vary(
    "model, backend",
    [("quantized", "eager"), ("again", "eager")],
    slow=[
        *((model, "eager") for model in MODELS if model not in ("quantized", "again")),
        *((model, "inductor") for model in ("plain", "non-reentrant")),
    ],
)
@vary("world, case", [(2, {}), (2, {"stage": 2})], slow=[(2, {"accumulation": 2, "steps": 3}), (3, {"stage": 2})])
@on_ranks("world")
def test_gathers_that_come_late(model, backend, world, case):
    """A unit that is read before it came, or after it was given back, has NaNs.

    A backward that computed with what a block's memory holds by then would differ in some bits.
    """
    sharded = compare(model, delay=0.002, evaluates=True, backend=backend, **{"steps": 2, **case})
    assert sharded.at_rest >= 18 and sharded.most_gathered == 2


@vary("model", ["slots"], slow=[model for model in HIDING if model != "slots"])
@vary("backend", ["eager"], slow=["inductor"])
@on_ranks(2)
def test_values_that_leave_a_block_unseen(model, backend):
    """Hooks on what a block returns would not gather its parameters for the backward."""
    sharded = compare(model, delay=0.002, backend=backend, steps=2)
    assert sharded.at_rest == 24 and sharded.most_gathered == 2


@on_ranks(1)
def test_one_rank_has_all():
    """A single rank would gather from nobody, block by block."""
    assert compare("plain").at_rest == 0


# What ranks do together.
REFUSED = {
    "moved": lambda module, weight, folder: module.half(),
    "saved": lambda module, weight, folder: torch.save(module.state_dict(), f"{folder}/{dist.get_rank()}.pt"),
    "made trainable": lambda module, weight, folder: setattr(weight, "requires_grad", True),
    "made trainable in place": lambda module, weight, folder: module.requires_grad_(True),
}
# What one does alone, and all may do together.
REFUSED_ALONE = {
    "read": lambda module, weight, folder: weight.sum(),
    "assigned": lambda module, weight, folder: setattr(weight, "data", torch.zeros_like(weight.data)),
    "filled": lambda module, weight, folder: torch.nn.init.zeros_(weight),
    "computed with": lambda module, weight, folder: F.linear(torch.ones(1, weight.shape[1]), weight),
    "deep copied": lambda module, weight, folder: copy.deepcopy(module),
    "as numpy": lambda module, weight, folder: module.state_dict()["body.blocks.0.up.weight"].numpy(),
    "forward of a block": lambda module, weight, folder: AdaptedBlock.forward(
        module.body.blocks[0], torch.ones(1, 12)
    ),
}


@vary("model", ["by data"], slow=["changing"])
@on_ranks(2)
def test_a_change_in_a_forward_is_kept(model):
    """What a forward writes into a gathered block would be lost when the block is given back."""
    assert compare(model, steps=2).at_rest == 24


@on_ranks(2)
def test_a_parameter_of_another_dtype_stays_whole():
    """A parameter that got another dtype would be read from its share in the old one."""
    module, engine = make("plain", SHARDED)
    block, lines = module.body.blocks[1], []
    with mock.patch.object(unit_memory, "warn", lines.append), unsharded_parameters(engine):
        block.up.weight.data = block.up.weight.data.double()
    at_rest = [name for name, parameter in block.named_parameters() if isinstance(parameter, Resharded)]
    loaded(engine, module, None)
    with unsharded_parameters(engine):
        kinds = {weight.dtype for weight in (block.up.weight, block.down.weight)}
        engine.destroy()
    assert at_rest == ["norm.weight", "norm.bias", "up.bias", "down.weight", "down.bias"]
    assert kinds == {torch.float32, torch.float64}
    assert lines == [unit_memory.ANOTHER_KIND.format("body.blocks.1.up.weight")]


@on_ranks(2)
def test_two_engines_with_one_loss():
    """Gathers of one engine would be awaited by the other, or its hooks would give back the other's blocks."""
    (_, one), (_, other) = make("plain", SHARDED), make("plain", SHARDED, seed=1)
    errors = []
    for backward in (True, False):
        ids = batch(0, 0, dist.get_rank(), 4)
        losses = [one(ids), other(ids)]
        if backward:
            sum(losses).backward()
        errors.append(relative_error(losses, [build("plain", seed)(ids) for seed in (0, 1)]))
    for engine in (one, other):
        end(engine)
    assert max(errors) < BOUND


@on_ranks(2)
def test_what_is_refused_at_rest(tmp_path):
    """Each of these would compute with, or save, memory that holds nothing."""
    module, engine = make("plain", SHARDED)
    weight = module.body.blocks[0].up.weight
    functions = REFUSED if dist.get_rank() else {**REFUSED, **REFUSED_ALONE}
    with mock.patch.object(joint_reads, "LONGEST_WAIT", 0.2):
        said = {name: outcome(function, module, weight, tmp_path) for name, function in functions.items()}
    engine.destroy()
    for name, text in said.items():
        assert text is not None and "compile.shard_parameters" in text and "body.blocks.0." in text, name


def described(engine, module, folder):
    """What needs no values works on every rank alone."""
    weight = module.body.blocks[1].up.weight
    if dist.get_rank() == 0:
        assert weight.shape == (24, 12) and weight.dtype == torch.float32 and not weight.requires_grad
        assert "blocks.1.up.weight" in repr(weight) if isinstance(weight, Resharded) else True
        state = module.state_dict()
        assert torch.isfinite(state["body.blocks.1.first.weight"]).all()
        assert state["body.blocks.1.up.weight"].cpu().detach().shape == (24, 12)
        assert {id(parameter) for parameter in module.parameters()} >= {id(weight)}


def loaded(engine, module, folder):
    """Each rank takes its part of what it loads."""
    generator = torch.Generator().manual_seed(5)
    values = {
        name: torch.rand(parameter.shape, generator=generator) - 0.5
        for name, parameter in module.named_parameters()
        if not parameter.requires_grad
    }
    module.load_state_dict(values, strict=False)


def merged(engine, module, folder):
    """Changes of frozen parameters within the context stay."""
    with unsharded_parameters(engine), torch.no_grad():
        for block in module.body.blocks:
            block.up.weight += 0.1 * block.second.weight @ block.first.weight


def called_by_itself(engine, module, folder):
    x = torch.ones(1, 3, 12, device=device(), requires_grad=True)
    module.body.blocks[2](x).sum().backward()
    engine.zero_grad()
    with torch.no_grad():
        module.body.blocks[1](x)


def read_later(engine, module, folder):
    """What was taken within the context may be read behind it."""
    with unsharded_parameters(engine), torch.no_grad():
        state = module.state_dict()
        weight = module.body.blocks[1].down.weight.detach()
        copied, pickled = copy.deepcopy(module), io.BytesIO()
        torch.save([parameter for parameter in module.parameters() if not parameter.requires_grad], pickled)
    trained_on(engine, module)
    pickled.seek(0)
    frozen = [parameter.detach() for parameter in torch.load(pickled, weights_only=False)]
    weight = weight.clone()
    module.load_state_dict({name: 0.5 * value for name, value in state.items()})
    return [weight, *frozen, copied(batch(3, 3, 3, 4)).detach()]


def assigned_within(engine, module, folder):
    """As peft does where it takes adapters out of weights."""
    with unsharded_parameters(engine):
        for block in module.body.blocks:
            block.up.weight.data = 0.5 * block.up.weight.data
    module.body.blocks[0].load_state_dict({"up.weight": torch.zeros(24, 12)}, strict=False)


def evaluated_between(engine, module, folder):
    """Between a forward and its backward."""
    loss = engine(batch(0, 0, dist.get_rank(), 4))
    with unsharded_parameters(engine), torch.no_grad():
        evaluated = module(batch(1, 1, dist.get_rank(), 5))
    engine.backward(loss)
    engine.step()
    return [evaluated]


def loaded_after_an_error(engine, module, folder):
    """A backward that raised has left blocks gathered."""

    def fail(*_):
        raise ValueError

    hook = module.body.blocks[1].register_full_backward_pre_hook(fail)
    with pytest.raises(ValueError):
        engine.backward(engine(batch(0, 0, dist.get_rank(), 4)))
    hook.remove()
    loaded(engine, module, folder)


def replaced_by_loading(engine, module, folder):
    """Loading with assign=True gives the module other parameters, which stay whole."""
    block = module.body.blocks[2]
    block.load_state_dict({"up.weight": torch.full((24, 12), 0.1, device=device())}, strict=False, assign=True)


def calibrated(engine, module, folder):
    """A hook changes a parameter in an evaluation, which torch does not count."""

    def scale(block, inputs):
        block.norm.weight.data.mul_(0.5)

    hook = module.body.blocks[1].register_forward_pre_hook(scale)
    evaluated_between(engine, module, folder)
    hook.remove()


def taken_at_rest(engine, module, folder):
    """A state dict that was taken at rest is read and written within the context."""
    state = module.state_dict()
    with unsharded_parameters(engine), torch.no_grad():
        state["body.blocks.1.up.weight"].copy_(torch.full((24, 12), 0.5))
        state["body.blocks.2.up.weight"].mul_(2)
        copied = copy.deepcopy(state["body.blocks.3.up.weight"])
        return [copied, state["body.blocks.1.up.weight"] + 1, module.body.blocks[2].up.weight.detach().clone()]


def given_other_memory(engine, module, folder):
    """Entries of a state dict that was taken at rest get other memory, or another shape. Parameters stay."""
    state = module.state_dict()
    first, second = state["body.blocks.1.up.weight"], state["body.blocks.2.up.weight"]
    with unsharded_parameters(engine):
        first.data = torch.full((24, 12), 0.5)
        second.unsqueeze_(0)
        first.add_(1)
    losses = trained_on(engine, module)
    return [*losses, first, second.clone()]


def written_later(engine, module, folder):
    """A state dict that was taken within the context is written after it, again after a step, and dropped."""
    with unsharded_parameters(engine):
        state = module.state_dict()
    state["body.blocks.1.up.weight"].fill_(0.5)
    losses = trained_on(engine, module)
    with torch.no_grad():
        state["body.blocks.1.up.weight"].mul_(2)
        module.load_state_dict({"body.blocks.2.up.weight": torch.zeros(24, 12)}, strict=False)
    return [*losses, state["body.blocks.2.up.weight"]]


def in_numpy(engine, module, folder):
    """Torch does not free memory of which a NumPy array was made."""
    with unsharded_parameters(engine):
        weights = [block.up.weight.detach().cpu().numpy() for block in module.body.blocks]
    trained_on(engine, module)
    values = torch.from_numpy(weights.pop()).clone()
    del weights
    trained_on(engine, module)
    return [values]


def in_inference_mode(engine, module, folder):
    with torch.inference_mode(), unsharded_parameters(engine):
        evaluated = module(batch(1, 1, dist.get_rank(), 5))
    with torch.inference_mode():
        again = module(batch(1, 1, dist.get_rank(), 5))
    return [evaluated.clone(), again.clone()]


def with_hooks_of_saved_tensors(engine, module, folder):
    """Hooks around the engine, and hooks within a block, which keep what they are given."""

    def run(block, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return AdaptedBlock.forward(block, x)

    module.body.blocks[1].forward = functools.partial(run, module.body.blocks[1])
    with torch.autograd.graph.save_on_cpu():
        loss = engine(batch(0, 0, dist.get_rank(), 4))
    engine.backward(loss)
    engine.step()
    del module.body.blocks[1].forward


WORKS = {
    function.__name__: function
    for function in (
        *(described, loaded, merged, called_by_itself, read_later, assigned_within, evaluated_between),
        *(loaded_after_an_error, replaced_by_loading, calibrated, taken_at_rest, given_other_memory, written_later),
        *(in_numpy, in_inference_mode, with_hooks_of_saved_tensors),
    )
}


@vary("work", WORKS)
@vary("stage", [1, 2])
@on_ranks(2)
def test_what_works_at_rest(tmp_path, work, stage):
    """What users do beside training would read, or change, shares instead of parameters."""
    assert same(*beside_whole(make, (SHARDED, WHOLE), WORKS[work], tmp_path, stage=stage))


@vary("kind", ["at rest"], slow=["within"])
@on_ranks(2)
def test_a_change_between_forward_and_backward(kind):
    """A backward would go on with other values than its forward had, which torch refuses."""
    said = []
    for config in (SHARDED, WHOLE):
        module, engine = make("breaking", config)
        loss = engine(batch(0, 0, dist.get_rank(), 4))
        with unsharded_parameters(engine) if kind == "within" else contextlib.nullcontext():
            module.load_state_dict({"body.blocks.2.down.weight": torch.zeros(12, 24)}, strict=False)
        said.append(outcome(engine.backward, loss))
        engine.destroy()
    sharded, whole = said
    assert "has been modified by an inplace operation" in sharded and "body.blocks.2.down.weight" in sharded
    assert "has been modified by an inplace operation" in whole


class Overwriting(AdaptedBlock):
    """Changes a tensor that it has saved."""

    @torch.compiler.disable
    def overwrite(self, x):
        y = x.sin()
        x.add_(1)
        return y

    def forward(self, x):
        return self.overwrite(super().forward(x))


@on_ranks(2)
def test_a_saved_tensor_that_a_block_changes():
    """Torch leaves to hooks of saved tensors to see that a tensor was changed."""
    with mock.patch.dict(MODELS, {"overwriting": model_of(of_block=Overwriting)}):
        module, engine = make("overwriting", SHARDED)
    said = outcome(engine.backward, engine(batch(0, 0, dist.get_rank(), 4)))
    engine.destroy()
    assert "has been modified by an inplace operation" in said


@pytest.mark.follows("so it has no values and cannot be {}; make it within `with unsharded_parameters(engine):`")
@on_ranks(2)
def test_copies_made_at_rest():
    """A copy of another dtype would say that it is as the parameter, and writing a copy would write the parameter."""
    module, engine = make("plain", SHARDED)
    weight, moved = module.body.blocks[1].up.weight, []

    def move(tensor):
        # Torch makes such copies where a module is moved.
        for copied in (tensor.to(torch.float16), tensor.clone()):
            if tensor is weight:
                moved.append(copied)
        return tensor

    module.body.blocks[1].up._apply(move)
    half, clone = moved
    said = [outcome(clone.copy_, torch.zeros(24, 12))]
    # Elsewhere copies have values.
    copied = module.state_dict()["body.blocks.1.up.weight"].to(torch.float64)
    with unsharded_parameters(engine):
        before = weight.clone()
        said.append(outcome(half.zero_))
        # As is advised: a copy that is made here has values.
        advised = outcome(copy.deepcopy(weight).zero_)
        after = weight.clone()
    engine.destroy()
    assert (half.dtype, half.shape, clone.dtype) == (torch.float16, (24, 12), torch.float32)
    assert torch.equal(copied, before.double()) and torch.equal(after, before) and advised is None
    for text in said:
        assert "a copy of parameter body.blocks.1.up.weight was made while compile.shard_parameters" in text
        assert "make it within `with unsharded_parameters(engine):`" in text
    # Nobody is sent into a context of an engine that is gone.
    said = outcome(lambda: weight.detach().to(torch.float16).zero_())
    assert "parameter body.blocks.1.up.weight is sharded" in said and "its engine was destroyed" in said


@pytest.mark.follows("drop it, or clone() it, to have them sharded by compile.shard_parameters")
@vary("more", [0], slow=[1])
@on_ranks(2)
def test_views_that_are_kept(more):
    """Memory of which someone has a view would be freed, or stay when no one has a view any more."""
    module, engine = make("attribute", SHARDED)
    units, whole = feature.sharded_blocks(engine).units, []
    # How many uses torch counts of each storage beside those that it counts now: ``more``.
    count = torch._C._storage_Use_Count
    with (
        warnings_logged() as lines,
        mock.patch.object(torch._C, "_storage_Use_Count", lambda storage: count(storage) + more),
    ):
        for keeps in (True, True, False):
            trained_on(engine, module)
            if not keeps:
                for block in module.body.blocks:
                    block.view = None
                with torch.no_grad():
                    engine(batch(0, 0, 0, 4))
                for block in module.body.blocks:
                    block.view = None
                feature.sharded_blocks(engine).whole.free_unviewed()
            whole.append(sum(unit.memory.buffer.untyped_storage().nbytes() > 0 for unit in units))
    engine.destroy()
    assert whole == [4, 4, 0]
    assert len(lines) == (dist.get_rank() == 0)
    assert all("parameter body.blocks.0.norm.weight among them, stay whole" in line for line in lines)


def compiled_in(mode):
    options = {**SHARDED["compile"], "deepcompile": True}
    module, engine = make("plain", {"compile": options}, deepcompile=False)
    with torch.inference_mode(mode):
        engine.compile(backend="eager")
        evaluated = module(batch(1, 1, dist.get_rank(), 5)).clone()
    results = [evaluated, *trained_on(engine, module), *trained_on(engine, module)]
    engine.destroy()
    return results


@pytest.mark.slow
@on_ranks(2)
def test_compiled_in_inference_mode():
    """Memory that is made in inference mode cannot be written in training."""
    assert same(compiled_in(True), compiled_in(False))


@pytest.mark.quick
def test_an_error_of_this_rank():
    """An error of this rank's own would send its user to other ranks."""
    with torch.inference_mode():
        made = torch.zeros(1)
    with pytest.raises(RuntimeError, match="^Inplace update to inference tensor"), collective("test it"):
        made.add_(1)


@vary("world", [2], slow=[3])
@on_ranks("world")
def test_a_rank_holds_its_part(world):
    """A view that stays of the whole parameters would keep their memory."""
    module, engine = make("plain", SHARDED)
    trained_on(engine, module)
    sharded = feature.sharded_blocks(engine)
    frozen = [parameter for parameter in module.body.blocks.parameters() if not parameter.requires_grad]
    held = sum(share.untyped_storage().nbytes() for share in sharded.shares)
    storages = {parameter.untyped_storage()._cdata: parameter.untyped_storage().nbytes() for parameter in frozen}
    engine.destroy()
    # Parameters begin at multiples of 64 bytes.
    assert held + sum(storages.values()) <= sum(parameter.nbytes for parameter in frozen) / world + 64 * 4 * 7


@on_ranks(2)
def test_a_gather_that_is_given_back_at_once():
    """Gloo's thread, which keeps the memory for a moment, would be taken for someone who has a view of it."""
    _, engine = make("plain", SHARDED)
    unit, lent = feature.sharded_blocks(engine).units[0], 0
    for _ in range(200):
        unit.start_gather()
        unit.finish_gather()
        unit.reshard()
        lent += unit.memory.has_external_views
    engine.destroy()
    assert lent == 0


@pytest.mark.slow
@on_ranks(2)
def test_from_the_host():
    """Parameters that wait on the host would all come to the device before they are sharded."""
    # What the first rank has is sharded, if frozen parameters of blocks have not been moved to the device.
    torch.manual_seed(dist.get_rank())
    module = MODELS["plain"]()
    with mock.patch.object(from_host, "is_elsewhere", shapes_no_graph(lambda *_: True)), compile_backend("eager"):
        engine = engine_by_configuration(module, True, **SHARDED)
        waits = sum(BROADCAST_LATER in vars(parameter) for parameter in module.parameters())
        with torch.no_grad():
            evaluated = engine(batch(0, 0, 0, 4))
    first, other = gathered((float(evaluated), [tensor.cpu() for tensor in trained_on(engine, module)[1:]]))
    assert waits == 24 or dist.get_rank() > 0
    assert first[0] == other[0] and same(first[1], other[1])


@on_ranks(2)
def test_a_model_without_blocks_is_refused_before_it_is_moved():
    """A device that cannot hold the whole model would run out of memory, and nobody read the sentence."""
    moves, to = [], torch.nn.Module.to
    with mock.patch.object(torch.nn.Module, "to", lambda *args, **kwargs: moves.append(args) or to(*args, **kwargs)):
        said = outcome(engine_by_configuration, torch.nn.Linear(4, 1), True, **SHARDED)
    assert "found no blocks that repeat in Linear" in said and moves == []


def train_checkpointed_by_transformers(config):
    """Trains a step of a Qwen3 that checkpoints its layers; returns loss and parameters, and the number of graphs."""
    from transformers import Qwen3ForCausalLM

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(qwen3_config(VOCABULARY, layers=2)).to(device())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or "embed" in name)
    engine = make_engine(model, Case(adam=True, config=config))
    model.train()
    ids = batch(0, 0, dist.get_rank(), 8)
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    end(engine)
    return [tensor.detach() for tensor in (loss, *model.parameters())], graphs


@pytest.mark.slow
@on_ranks(2)
def test_layers_that_transformers_checkpoints():
    """What a backward computes again would be compiled anew, for parameters that each rank has a part of."""
    sharded, whole = (train_checkpointed_by_transformers(config) for config in (SHARDED, WHOLE))
    assert same(sharded[0], whole[0]) and sharded[1] <= whole[1] + 1


@pytest.mark.quick
def test_a_forward_without_a_backward():
    """A graph whose backward never comes would keep its activations for ever, in a cycle through its own results."""
    with saving_handles():
        result = torch.ones(4, requires_grad=True).exp()
    memory = StorageWeakRef(result.untyped_storage())
    del result
    assert memory.expired()


@vary(
    "world, why",
    [
        (2, "no block has such parameters of its own"),
        (1, "a single rank has no other to share parameters with"),
    ],
    expects="why",
)
@on_ranks("world")
def test_without_frozen_parameters(world, why):
    """Who has nothing frozen, or one rank, would believe that the option saves memory, or look at the blocks."""
    lines = []
    with mock.patch.object(feature, "warn", lines.append):
        engine = make_engine(BlocksWithin().to(device()), Case(config=SHARDED))
    engine.destroy()
    assert f"compile.shard_parameters has no effect, because {why}" in lines


@on_ranks(2)
def test_a_refusal_leaves_parameters_whole():
    """An engine that is refused after it has sharded would leave its model without parameters."""
    from deepspeed.compile.features.update.blockwise import FORM, zeros

    options = {**SHARDED["compile"], "deepcompile": True, "optimizer_states": "8bit"}
    module, engine = make("plain", {"compile": options}, deepcompile=False)
    before, lines = [parameter.detach().clone() for parameter in module.parameters()], []
    (master,), states = engine.optimizer.single_partition_of_fp32_groups, engine.optimizer.optimizer.state
    states[master] = {**zeros(master), FORM: {"version": -1}}
    with mock.patch.object(logger, "warning", lines.append):
        said = outcome(engine.compile, backend="eager")
    whole = not any(isinstance(parameter, Resharded) for parameter in module.parameters())
    unchanged = whole and same(before, [parameter.detach() for parameter in module.parameters()])
    del states[master]
    engine.compile(backend="eager")
    trained_on(engine, module)
    at_rest = parameters_at_rest(module)
    engine.destroy()
    assert "8-bit optimizer states were loaded of the form" in said
    assert unchanged and lines == [] and at_rest == 24


class SwitchedBlock(AdaptedBlock):
    """Has a second adapter, frozen, for reference logits."""

    asks_reference = False

    def __init__(self):
        super().__init__()
        self.reference = torch.nn.Linear(self.up.in_features, self.up.out_features, bias=False).requires_grad_(False)

    def forward(self, x):
        if not self.asks_reference:
            return super().forward(x)
        x = self.norm(x)
        return x + self.down(F.gelu(self.up(x) + self.reference(x)))


def losses_beside_reference(config):
    """Takes the reference as peft's ``set_adapter()`` does: it asks for gradients of the adapter in use."""
    module, engine = engine_of(model_of(of_block=SwitchedBlock), config, "adapters")

    def ask(blocks, asks):
        for block in blocks:
            block.asks_reference = asks
            block.reference.weight.requires_grad_(asks)

    def forward(step, micro_step):
        ids = batch(step, micro_step, dist.get_rank(), 4)
        with torch.no_grad():
            ask(module.body.blocks, True)
            reference = engine(ids)
            ask(module.body.blocks, False)
        return engine(ids) * (1 + reference)

    return [*losses_of(engine, forward=forward), *end(engine, module)]


@on_ranks(2)
def test_a_reference_by_another_adapter():
    """TRL's DPO and GRPO that start from an adapter would be refused in their first step."""
    assert same(losses_beside_reference(SHARDED), losses_beside_reference(WHOLE))

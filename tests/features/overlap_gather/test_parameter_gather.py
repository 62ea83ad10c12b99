# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Parameters that are gathered under the next forward are new wherever they are read."""

import contextlib
import gc
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.convert_frame import FRAME_COMPILE_COUNTER

from deepspeed.compile.features.overlap_gather.feature import units_in_order
from deepspeed.compile.zero_1_and_2 import wait_for_parameters
from deepspeed.compile.zero_1_and_2.hooks import Hook
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

from support.ids import vary
from support.lifetime import take_steps
from support.models import WITH_BLOCKS, Block, BlocksWithin
from support.on_ranks import on_ranks
from support.parameter_gather import DELAY, MODELS, Around, EagerAround, TwoBodies, one_rank_late
from support.training import (
    BOUND,
    OVERLAPPED,
    Case,
    Pair,
    batch,
    device,
    make_engine,
    make_optimizer,
    relative_error,
    train_beside_plain_loop,
    train_plain,
)


@vary(
    "model, backend",
    [
        *((model, "eager") for model in WITH_BLOCKS),
        # What waits is around the generated code, so that of a few models shows it.
        *(pytest.param(model, "inductor", marks=pytest.mark.slow) for model in ("RepeatedLayers", "TiedEmbedding")),
    ],
)
@vary("stage, accumulation", [(1, 3), (2, 1)])
def test_overlapped_it_trains_as_a_plain_loop(ranks, model, backend, stage, accumulation):
    """A parameter that two blocks share, or none holds, would be awaited by neither."""
    case = Case(model=model, stage=stage, accumulation=accumulation, backend=backend, config=OVERLAPPED)
    for result in ranks(2).run(train_beside_plain_loop, case):
        assert result.error < BOUND
        assert result.moved > 1e-3


@pytest.mark.options("compile.overlap_param_gather")
@vary("model", ["OneGraph", "BlocksWithin"])
def test_a_model_that_calls_its_blocks_itself(ranks, model):
    """The option by itself, as the page of options has it, would be refused where the model's forward calls blocks."""
    case = Case(model=model, config={"compile": {"overlap_param_gather": True}})
    for result in ranks(2).run(train_beside_plain_loop, case):
        assert result.error < BOUND


@vary(
    "varied",
    [
        {"skip_on_odd_steps": True, "steps": 5},
        {"evaluate_between": True},
        {"groups": 3},
        {"dtype": "fp32", "clipping": 0.1},
    ],
)
@vary("world", [1, 2], slow=[3])
def test_variations_overlapped(ranks, world, varied):
    """A block that a step does not call leaves its parameters on their way, which the next step would send again."""
    for result in ranks(world).run(train_beside_plain_loop, Case(config=OVERLAPPED, **varied)):
        assert result.error < BOUND


def make(case, model):
    """Makes an engine of a model and a plain loop beside it."""
    torch._dynamo.reset()
    built = []
    for _ in range(2):
        torch.manual_seed(0)
        built.append(MODELS[model]().to(device()))
    module, plain = built
    return Pair(module, make_engine(module, case), plain, make_optimizer(plain, case))


@vary("model", MODELS)
@on_ranks(2)
def test_a_forward_waits_for_a_late_rank(model):
    """A forward that reads a parameter past what waits for it computes with the old one, or with half of the new."""
    module, engine, plain, optimizer = make(Case(config=OVERLAPPED), model)
    errors = []
    with one_rank_late(DELAY) as waited:
        loss = engine(batch(0, 0, dist.get_rank(), 4))
        for step in range(4):
            engine.backward(loss)
            engine.step()
            # Right behind the step: the plain loop's collectives would wait for the late rank too.
            loss = engine(batch(step + 1, 0, dist.get_rank(), 4))
            train_plain(plain, optimizer, step)
            errors.append(relative_error([loss], [plain(batch(step + 1, 0, dist.get_rank(), 4))]))
        wait_for_parameters(engine)
    errors.append(relative_error(module.parameters(), plain.parameters()))
    engine.destroy()
    dist.barrier()
    assert max(errors) < BOUND
    assert len(set(waited)) >= 4, "the forward did not find parameters on their way"


def clones(tensors):
    return [tensor.detach().clone() for tensor in tensors]


def after_offloading(engine, module):
    engine.offload_states()
    engine.reload_states()
    return clones(module.parameters())


def set_again(engine, module):
    for parameter in module.parameters():
        safe_set_full_fp32_param(parameter, safe_get_full_fp32_param(parameter))
    return [safe_get_full_fp32_param(parameter) for parameter in module.parameters()]


READS = {
    "wait_for_parameters": lambda engine, module: (wait_for_parameters(engine), clones(module.parameters()))[1],
    "state_dict of a block": lambda engine, module: clones(module.body.blocks[0].state_dict().values()),
    "offload_states": after_offloading,
    "safe_get_full_fp32_param": lambda engine, module: [
        safe_get_full_fp32_param(parameter) for parameter in module.parameters()
    ],
    "safe_set_full_fp32_param": set_again,
    "behind a forward": lambda engine, module: (
        engine(batch(9, 0, dist.get_rank(), 4)),
        clones(module.parameters()),
    )[1],
    "destroy": lambda engine, module: (engine.destroy(), clones(module.parameters()))[1],
}


def outputs(engine, module, how):
    ids = batch(9, 0, dist.get_rank(), 4)
    if how == "evaluate":
        engine.eval()
        with torch.no_grad():
            return engine(ids)
    with torch.no_grad() if how == "module without gradients" else contextlib.nullcontext():
        return module(ids)


FORWARDS = ["evaluate", "module", "module without gradients"]


def read_after_a_step(case, how, model="Around"):
    """Largest error of what ``how`` reads right behind a step in which another rank was late."""
    module, engine, plain, optimizer = make(case, model)
    worst = 0.0
    for step in range(2):
        engine.train()
        with one_rank_late(DELAY):
            take_steps(engine, first=step)
            # Right behind the step: the plain loop's collectives would wait for the late rank too.
            read = [outputs(engine, module, how)] if how in FORWARDS else READS[how](engine, module)
            train_plain(plain, optimizer, step)
            expected = [plain(batch(9, 0, dist.get_rank(), 4))] if how in FORWARDS else list(plain.parameters())
            if how == "state_dict of a block":
                expected = list(plain.body.blocks[0].state_dict().values())
            worst += relative_error(read, expected)  # NaN if one is
        if how == "destroy":
            break
    else:
        engine.destroy()
    dist.barrier()
    return worst


@pytest.mark.options("compile.overlap_param_gather")
@vary("how", [*READS, *FORWARDS])
def test_reads_after_a_step(ranks, how):
    """What reads flat tensors, past the parameters, has a wait of its own. Without it, it would read old values."""
    for error in ranks(2).run(read_after_a_step, Case(config=OVERLAPPED), how):
        assert error < BOUND


@vary("model", ["CallsForwards", "CallsForwardsInEvaluation"])
@vary("how", FORWARDS)
def test_forwards_of_blocks_after_a_step(ranks, model, how):
    """A block whose forward is called directly, past its hooks, would wait for nothing."""
    for error in ranks(2).run(read_after_a_step, Case(config=OVERLAPPED), how, model):
        assert error < BOUND


@on_ranks(2)
def test_each_block_waits_for_its_own():
    """A forward that waited for all parameters at once would overlap nothing."""
    module, engine, _, _ = make(Case(config=OVERLAPPED), "Around")
    in_use, pending = engine.optimizer._deepcompile.gather, []

    def watched(*_):
        pending.append(sorted(in_use._works))

    # A block has waited when its hooks run.
    for submodule in module.modules():
        if isinstance(submodule, Block):
            submodule.register_forward_pre_hook(watched)
    for step in range(2):
        pending.clear()
        before = sum(FRAME_COMPILE_COUNTER.values())
        loss = engine(batch(step, 0, dist.get_rank(), 4))
        pending.append(sorted(in_use._works))
        engine.backward(loss)
        engine.step()
        after_step = sorted(in_use._works)
        compilations = sum(FRAME_COMPILE_COUNTER.values()) - before
    hooks = [
        hook
        for submodule in module.modules()
        for hook in (*submodule._forward_pre_hooks.values(), *submodule._state_dict_pre_hooks.values())
    ]
    engine.destroy()
    # 0: what no block holds; 1 to 3: the blocks; 4: the head.
    assert after_step == [0, 1, 2, 3, 4]
    # When each block began, and when the forward was done.
    assert pending == [[2, 3, 4], [3, 4], [4], []]
    assert not any(isinstance(hook, Hook) for hook in hooks), "a read waits by itself"
    assert compilations == 0, "guards have met a parameter on its way"


@vary("model", ["Around", "HeadInFront", "TwoBodies"])
@on_ranks(2)
def test_code_around_blocks_is_compiled_once(model):
    """Its guards would find a parameter that waits for other code, and the compiler would trace it with its class."""
    _, engine, _, _ = make(Case(config=OVERLAPPED), model)
    compilations = []
    with one_rank_late(DELAY):
        for step in range(3):
            take_steps(engine, first=step)
            compilations.append(sum(FRAME_COMPILE_COUNTER.values()))
    engine.destroy()
    assert len(set(compilations)) == 1


def last_unit(change, caller=lambda module: module):
    """Names of the parameters that are sent behind the blocks of a changed model."""
    module = Around()
    change(module)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    model = caller(module)
    first, *units = units_in_order(list(model.parameters()), model, list(module.body.blocks))
    assert sum(map(len, [first, *units])) == len(list(model.parameters()))
    return {names[id(parameter)] for unit in units[len(module.body.blocks) :] for parameter in unit}


def put_in_front(module):
    module.front = torch.nn.Linear(2, 2)
    for name in ("body", "head"):
        module._modules[name] = module._modules.pop(name)


def share_with_a_block(module):
    module.head.weight = module.body.blocks[0].up.weight


def embed_behind(module):
    module.types = torch.nn.Embedding(2, 2)


@pytest.mark.quick
def test_what_a_forward_reads_last():
    """What a forward reads before the blocks would be sent behind them, so the forward would wait for everything."""
    assert last_unit(lambda module: None) == {"head.weight"}
    assert last_unit(put_in_front) == {"head.weight"}
    assert last_unit(embed_behind) == {"head.weight"}
    assert last_unit(share_with_a_block) == set()
    assert last_unit(lambda module: setattr(module.head, "weight", module.body.embedding.weight)) == set()
    assert last_unit(lambda module: None, lambda module: module.body) == set()
    two = TwoBodies()
    blocks = [*two.body.blocks, *two.second.blocks]
    units = units_in_order(list(two.parameters()), two, blocks)
    assert len(units) == 1 + len(blocks), "the bridge is read between the bodies"


@vary("section", [{"overlap_param_gather": True}, {"shard_parameters": "frozen"}, {"shard_parameters": "all"}])
@on_ranks(2)
def test_a_model_goes_with_its_engine(section):
    """Dynamo's caches keep an engine's parts for good: a part that holds a parameter would keep its memory."""
    module = BlocksWithin().to(device())
    engine = make_engine(module, Case(config={"compile": {"regional_compilation": True, **section}}))
    take_steps(engine)
    references = [weakref.ref(parameter) for parameter in module.parameters()]
    engine.destroy()
    del engine, module
    gc.collect()
    assert all(reference() is None for reference in references)


def test_hooks_can_be_pickled():
    """A module with our hooks could not be pickled, as it is to send it to other processes."""
    module = Around()
    module.register_state_dict_pre_hook(Hook(lambda *_: 1 / 0))
    pickle.loads(pickle.dumps(module)).state_dict()
    with pytest.raises(ZeroDivisionError):
        module.state_dict()


@on_ranks(2)
def test_a_script_module_among_the_others():
    """A module of torch.jit takes no hooks and raises, though its parameters need to be awaited too."""
    built = []
    for _ in range(2):
        torch.manual_seed(0)
        module = EagerAround()
        module.head = torch.jit.script(module.head)
        built.append(module.to(device()))
    module, plain = built
    engine, optimizer = make_engine(module, Case(config=OVERLAPPED)), make_optimizer(plain, Case())
    for step in range(2):
        take_steps(engine, first=step)
        train_plain(plain, optimizer, step)
    module.state_dict()
    assert relative_error(module.parameters(), plain.parameters()) < BOUND
    engine.destroy()

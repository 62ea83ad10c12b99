# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's own Muon, beside DeepSpeed without DeepCompile."""

import itertools
import logging

import pytest
import torch
import torch.nn as nn

import deepspeed
from deepspeed.compile.features.muon.muon import MOMENTUM, _update, norm_of_updates

from support.beside import logged
from support.ids import vary
from support.muon import Training, check, products_in_fp32, seen, start, train, train_beside
from support.options import compiled_outcome
from support.training import BOUND, as_traced, device, forget_autocast, relative_error

LARGE = {"depth": 3, "steps": 10, "compiled": True}
SCALE_STAYS = {"fp16": {"loss_scale_window": 1000}}


@pytest.mark.options("optimizer")
@pytest.mark.table
@vary(
    "world, varied",
    [
        (2, {"stage": 2, "accumulation": 2, "clipping": 1.0}),
        (2, {"stage": 1, "aligned": True, "method": "standard", "overlapped": True, "depth": 3}),
        (2, {"stage": 2, "per_head": True, "bucket": 2000}),
        (2, {"stage": 2, "clipping": 1.0, "dtype": "bf16"}),
        *(
            pytest.param(world, varied, marks=pytest.mark.slow)
            for world, varied in (
                (2, {**LARGE, "stage": 2, "accumulation": 2, "clipping": 1.0}),
                (3, {**LARGE, "stage": 1, "method": "standard", "overlapped": True}),
                (4, {**LARGE, "stage": 2, "depth": 1}),
                (2, {**LARGE, "stage": 1, "aligned": True}),
                (2, {**LARGE, "stage": 1, "accumulation": 2, "bucket": 10**6}),
                (2, {**LARGE, "stage": 2, "per_head": True, "bucket": 2000}),
                (3, {**LARGE, "stage": 2, "clipping": 1.0, "dtype": "bf16", "one_pass": True}),
                # Without DeepCompile, a step that raises the loss scale clips updates by a norm of the old scale.
                (2, {**LARGE, "stage": 1, "dtype": "fp16", "clipping": 1.0, "config": SCALE_STAYS}),
            )
        ),
    ],
)
def test_it_trains_as_without_deepcompile(ranks, world, varied):
    """An update of a part of a matrix, or of parts in the wrong order, would be no orthogonal matrix."""
    training = Training(**varied)
    results = check(ranks(world).run(train_beside, training), training.dtype)
    assert results[0].steps == {"OwnStep", *(["AdamStep"] if training.one_pass else [])}
    assert max(results[0].owners) > 1, "no boundary cuts a matrix"
    if world == 4:
        assert max(results[0].owners) > 2, "no matrix lies in three partitions"


SHAPES = [(16, 8), (8, 24), (4, 8), (8, 16), (24, 8)]  # of Qwen3, in small


@pytest.mark.parametrize(
    "limit, counts, shapes",
    [(1, (1,), SHAPES[:2]), pytest.param(8, (10, 4, 1), SHAPES, marks=pytest.mark.slow)],
    ids=["few", "torch's"],
)
def test_updates_of_all_kinds_of_batches_are_compiled(limit, counts, shapes):
    """Beyond torch's limit of compilations, updates would run uncompiled.

    Of two groups, whose batches have as many matrices as fit together, those that are left over, or one.
    """
    torch._dynamo.reset()
    with (
        as_traced(True),
        products_in_fp32(),
        torch.no_grad(),
        torch._dynamo.config.patch(recompile_limit=limit, fail_on_recompile_limit_hit=True),
    ):
        for momentum in (0.9, 0.95):
            for count, (rows, columns) in itertools.product(counts, shapes):
                gradient = torch.randn(count, rows, columns, device=device())
                _update(gradient, torch.zeros_like(gradient), {"momentum": momentum})
    torch._dynamo.reset()


# Overflow and checkpoints --------------------------------------------------------------------------------------------


def overflow(training):
    """Returns whether a step that overflows was skipped, and the errors of what it must leave as it was."""
    module, engine = start(training, deepcompile=True)
    train(engine, training, range(2))
    before = seen(module, engine)
    ids = torch.zeros((2, 5), dtype=torch.int64, device=device())
    # Only a gradient of Adam's: Muon's own function passes over a matrix whose gradient is not finite.
    engine.backward(engine(ids) + (module.lm_head.weight * torch.inf).sum())
    engine.step()
    skipped, after = engine.skipped_steps, seen(module, engine)
    engine.destroy()
    return skipped, [relative_error(*pair) for pair in zip(after, before, strict=True)]


def test_an_overflow_leaves_momentum_as_it_is(ranks):
    """Updates are computed before the norm is known, so a step that is skipped could change the momentum."""
    for skipped, errors in ranks(2).run(overflow, Training(dtype="fp16", stage=2)):
        assert skipped == 1
        assert errors == [0.0, 0.0, 0.0]


def save_and_load(training, folder, saves):
    """An engine with DeepCompile, or without, saves; one of the other kind loads, and both go on.

    Returns the errors of what was loaded, and of what came of it, and how far masters went.
    """
    module, engine = start(training, deepcompile=saves)
    train(engine, training, range(3))
    engine.save_checkpoint(folder)
    saved = seen(module, engine)
    train(engine, training, range(3, 6))
    expected = seen(module, engine)
    engine.destroy()
    module, engine = start(training, deepcompile=not saves, seed=1)
    engine.load_checkpoint(folder)
    loaded = seen(module, engine)
    train(engine, training, range(3, 6))
    actual = seen(module, engine)
    engine.destroy()
    return (
        [relative_error(*pair) for pair in zip(loaded, saved, strict=True)],
        [relative_error(*pair) for pair in zip(actual, expected, strict=True)],
        relative_error(expected[1], saved[1]),
    )


@pytest.mark.options("optimizer")
@vary("world", [2, pytest.param(3, marks=pytest.mark.slow)])
@vary("saves", ["DeepCompile", "DeepSpeed"])
def test_checkpoints_go_both_ways(ranks, tmp_path, world, saves):
    """Momentum that lay in another order, or in the partition alone, would be that of other matrices after a load."""
    training = Training(stage=2, **(LARGE if world == 3 else {}))
    results = ranks(world).run(save_and_load, training, str(tmp_path), saves == "DeepCompile")
    for loaded, ends, moved in results:
        assert loaded == [0.0, 0.0, 0.0]
        assert moved > 1e-2
        assert max(ends) < 10 * BOUND, ends


# What is said of it --------------------------------------------------------------------------------------------------


def norm_and_warnings(training):
    """Returns the norm of the last step, about which it should be, and what ``engine.compile()`` warned of."""
    with logged(logging.WARNING) as texts:
        _, engine = start(training, deepcompile=True)
    train(engine, training, range(2))
    about = norm_of_updates(engine.optimizer._deepcompile.transform.matrices)
    norm = float(engine.get_global_grad_norm())
    engine.destroy()
    return norm, about, [text for text in texts if "clipping" in text]


@pytest.mark.follows("set gradient_clipping to 0")
@vary("clipping, warned", [(1.0, True), (1000.0, False), (0.0, False)], expects="warned")
def test_clipping_is_told_with_its_number(ranks, clipping, warned):
    """The number of the warning would be far from the norm that the engine reports, or would miss the convolution.

    DeepSpeed without DeepCompile cannot train a convolution.
    """
    training = Training(convolution=True, clipping=clipping)
    for rank, (norm, about, texts) in enumerate(ranks(2).run(norm_and_warnings, training)):
        assert abs(norm / about - 1) < 0.2, (norm, about)
        assert len(texts) == (warned and rank == 0)
        assert not texts or f"about {about:.0f} in every step" in texts[0] and "gradient_clipping to 0" in texts[0]


def raised(module, optimizer=None, **config):
    """Returns what making an engine or compiling it raises. Muon of the configuration, if no optimizer is given."""
    zero = {"stage": 1, **config.pop("zero_optimization", {})}
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, **config}
    config |= {"compile": {"deepcompile": True}, "zero_allow_untested_optimizer": True}
    if optimizer is None:
        config["optimizer"] = {"type": "Muon", "params": {"lr": 0.01}}
    forget_autocast()
    arguments = {"model": module, "model_parameters": module.parameters(), "optimizer": optimizer}
    return compiled_outcome(lambda: deepspeed.initialize(**arguments, config=config)[0])


def refused():
    """Returns what engines with Muon raise that cannot train."""

    def layers():
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device())

    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    class Another(MuonWithAuxAdam):
        """A name that does not tell what it is."""

    def of_all(module, cls=MuonWithAuxAdam):
        return module, cls([{"params": list(module.parameters()), "use_muon": True}])

    with_heads = nn.Linear(8, 4, bias=False).to(device())
    with_heads.weight.muon_num_heads = 3
    return {
        "bias": raised(*of_all(layers())),
        "heads": raised(*of_all(with_heads)),
        "subclass": raised(*of_all(layers(), Another)),
    }


def as_advised():
    """Returns what the same engines raise when they are made as the refusals advise."""
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    module, with_heads = nn.Linear(4, 4).to(device()), nn.Linear(8, 4, bias=False).to(device())
    with_heads.weight.muon_num_heads = None
    groups = [{"params": [module.weight], "use_muon": True}, {"params": [module.bias], "use_muon": False}]
    return {
        "bias": raised(module, MuonWithAuxAdam(groups)),
        "heads": raised(with_heads, MuonWithAuxAdam([{"params": [with_heads.weight], "use_muon": True}])),
        "subclass, offload": raised(nn.Linear(4, 4).to(device())),
        "elastic": raised(nn.Linear(4, 4).to(device()), zero_optimization={"elastic_checkpoint": False}),
        "autocast": raised(nn.Linear(4, 4).to(device()), torch_autocast={"enabled": True, "dtype": "bfloat16"}),
    }


REFUSED = "ValueError: DeepCompile with ZeRO stage 1"


@pytest.mark.options("optimizer")
@pytest.mark.follows(
    "is not supported with Muon, whose updates are computed on the device; leave it out",
    "which has whole matrices, at the wrong places; set it to false",
    "by the scale; set torch_autocast.dtype to bfloat16",
    "has use_muon, and its {} is not a matrix; set it to false",
    "does not divide its shape {} into heads; set it to None",
    "needs whole matrices, which it does not get from ZeRO; use DeepSpeed's own",
)
def test_refused_with_muon(ranks):
    """Each of these would train wrongly, or raise in the first step, where nothing names what to change."""
    for said in ranks(1).run(refused):
        for name, part in {
            "bias": "use_muon, and its 0.bias is not a matrix",
            "heads": "muon_num_heads=3 of parameter weight does not divide its shape [4, 8] into heads; set it to",
            "subclass": "Another needs whole matrices, which it does not get from ZeRO; use DeepSpeed's own",
        }.items():
            assert said[name] and said[name].startswith(REFUSED), said
            assert part in said[name], said
    (said,) = ranks(1).run(as_advised)
    assert not any(said.values()), said


def one_matrix(adamw=False):
    module = nn.Linear(4, 4, bias=False).to(device())
    return raised(module, torch.optim.AdamW(module.parameters()) if adamw else None)


@pytest.mark.options("optimizer")
@pytest.mark.follows("because partitions are smaller than matrices; use fewer ranks, or AdamW")
@pytest.mark.slow
def test_partitions_smaller_than_matrices_are_refused(ranks):
    for said in ranks(3).run(one_matrix):
        assert said and said.startswith(REFUSED)
        assert "each of Muon's 1 matrices would be orthogonalized on 3.0 ranks on average" in said
    # As is advised.
    assert ranks(2).run(one_matrix) == [None, None]
    assert ranks(3).run(one_matrix, adamw=True) == [None, None, None]


def momentum_of_others(training, folder):
    """Goes on with momentum of other partitions, and then from a checkpoint of as many ranks, as is advised.

    Returns what the first raises, and the errors of what came of the second.
    """
    module, engine = start(training, deepcompile=True)
    train(engine, training, range(2))
    engine.save_checkpoint(folder)
    train(engine, training, range(2, 4))
    expected = seen(module, engine)
    engine.destroy()
    module, engine = start(training, deepcompile=True, seed=1)
    engine.load_checkpoint(folder)
    for states in engine.optimizer.optimizer.state.values():
        if MOMENTUM in states:
            states[MOMENTUM] = states[MOMENTUM][1:]
    try:
        train(engine, training, range(2, 4))
        told = ""
    except RuntimeError as error:
        told = str(error)
    engine.load_checkpoint(folder)
    train(engine, training, range(2, 4))
    actual = seen(module, engine)
    engine.destroy()
    return told, [relative_error(*pair) for pair in zip(actual, expected, strict=True)]


@pytest.mark.follows("because its checkpoint is of other partitions; load one of as many ranks")
def test_momentum_of_other_partitions(ranks, tmp_path):
    """Updates would be made of another matrix's momentum, or the checkpoint that is advised would not help."""
    for told, errors in ranks(2).run(momentum_of_others, Training(stage=2), str(tmp_path)):
        assert "its checkpoint is of other partitions; load one of as many ranks" in told
        assert max(errors) < 10 * BOUND, errors

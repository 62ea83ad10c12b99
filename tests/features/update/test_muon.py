# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's own Muon, beside DeepSpeed without DeepCompile."""

import itertools
import logging

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

import deepspeed
from deepspeed.compile.features.update.muon import MOMENTUM, _update, norm_of_updates

from support.beside import logged
from support.ids import vary
from support.muon import Training, check, products_in_fp32, seen, start, train, train_beside
from support.on_ranks import on_ranks
from support.options import ALSO_WARNED, compiled_outcome, outcome
from support.training import BOUND, as_traced, device, forget_autocast, relative_error

pytestmark = pytest.mark.options("optimizer")
LARGE = {"depth": 3, "steps": 10, "compiled": True}
SCALE_STAYS = {"fp16": {"loss_scale_window": 1000}}


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


@on_ranks(2)
def test_an_overflow_leaves_momentum_as_it_is():
    """Updates are computed before the norm is known, so a step that is skipped could change the momentum."""
    training = Training(dtype="fp16", stage=2)
    module, engine = start(training, deepcompile=True)
    train(engine, training, range(2))
    before = seen(module, engine)
    ids = torch.zeros((2, 5), dtype=torch.int64, device=device())
    # Only a gradient of Adam's: Muon's own function passes over a matrix whose gradient is not finite.
    engine.backward(engine(ids) + (module.lm_head.weight * torch.inf).sum())
    engine.step()
    assert engine.skipped_steps == 1
    after = seen(module, engine)
    engine.destroy()
    assert errors_of(after, before) == [0.0, 0.0, 0.0]


def errors_of(actual, expected):
    """Returns the errors of parameters, masters and momentum."""
    return [relative_error(*pair) for pair in zip(actual, expected, strict=True)]


@vary("world", [2], slow=[3])
@vary("saves", ["DeepCompile", "DeepSpeed"])
@on_ranks("world")
def test_checkpoints_go_both_ways(tmp_path, world, saves):
    """Momentum that lay in another order, or in the partition alone, would be that of other matrices after a load."""
    training = Training(stage=2, **(LARGE if world == 3 else {}))
    module, engine = start(training, deepcompile=saves == "DeepCompile")
    train(engine, training, range(3))
    engine.save_checkpoint(tmp_path)
    saved = seen(module, engine)
    train(engine, training, range(3, 6))
    expected = seen(module, engine)
    engine.destroy()
    module, engine = start(training, deepcompile=saves != "DeepCompile", seed=1)
    engine.load_checkpoint(tmp_path)
    assert errors_of(seen(module, engine), saved) == [0.0, 0.0, 0.0]
    train(engine, training, range(3, 6))
    actual = seen(module, engine)
    engine.destroy()
    assert relative_error(expected[1], saved[1]) > 1e-2
    assert max(errors_of(actual, expected)) < 10 * BOUND


# What is said of it --------------------------------------------------------------------------------------------------


@pytest.mark.follows("set gradient_clipping to 0")
@vary("clipping, warned", [(1.0, True), (1000.0, False), (0.0, False)], expects="warned")
@on_ranks(2)
def test_clipping_is_told_with_its_number(clipping, warned):
    """The number of the warning would be far from the norm that the engine reports, or would miss the convolution.

    DeepSpeed without DeepCompile cannot train a convolution.
    """
    training = Training(convolution=True, clipping=clipping)
    with logged(logging.WARNING) as texts:
        _, engine = start(training, deepcompile=True)
    train(engine, training, range(2))
    about = norm_of_updates(engine.optimizer._deepcompile.transform.matrices)
    norm = float(engine.get_global_grad_norm())
    engine.destroy()
    assert abs(norm / about - 1) < 0.2
    texts = [text for text in texts if "clipping" in text]
    assert len(texts) == (warned and dist.get_rank() == 0)
    assert not texts or f"about {about:.0f} in every step" in texts[0] and "gradient_clipping to 0" in texts[0]


def raised(module, optimizer=None, **config):
    """Returns what making an engine or compiling it raises. Muon of the configuration, if no optimizer is given."""
    zero = {"stage": 1, **config.pop("zero_optimization", {})}
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, **config}
    config = {"compile": {"deepcompile": True}, "zero_allow_untested_optimizer": True, **config}
    if optimizer is None:
        config["optimizer"] = {"type": "Muon", "params": {"lr": 0.01}}
    forget_autocast()
    arguments = {"model": module, "model_parameters": module.parameters(), "optimizer": optimizer}
    return compiled_outcome(lambda: deepspeed.initialize(**arguments, config=config)[0])


REFUSED = "ValueError: DeepCompile with ZeRO stage 1"


@pytest.mark.follows(
    "with Muon, whose updates are computed on the device; leave it out, or set compile.deepcompile to false",
    "which has whole matrices, at the wrong places; set it to false",
    "by the scale; set torch_autocast.dtype to bfloat16",
    "has use_muon, and its {} is not a matrix; set it to false",
    "does not divide its shape {} into heads; set it to None",
    "needs whole matrices, which it does not get from ZeRO; use DeepSpeed's own",
)
@on_ranks(1)
def test_refused_with_muon():
    """Each of these would train wrongly, or raise in the first step, where nothing names what to change."""
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    class Another(MuonWithAuxAdam):
        """A name that does not tell what it is."""

    def of_all(module, cls=MuonWithAuxAdam):
        return module, cls([{"params": list(module.parameters()), "use_muon": True}])

    def linear():
        return nn.Linear(4, 4).to(device())

    with_heads = nn.Linear(8, 4, bias=False).to(device())
    with_heads.weight.muon_num_heads = 3
    for said, part in (
        (raised(*of_all(nn.Sequential(linear(), linear()))), "use_muon, and its 0.bias is not a matrix"),
        (
            raised(*of_all(with_heads)),
            "muon_num_heads=3 of parameter weight does not divide its shape [4, 8] into heads; set it to",
        ),
        (
            raised(*of_all(nn.Sequential(linear(), linear()), Another)),
            "Another needs whole matrices, which it does not get from ZeRO; use DeepSpeed's own",
        ),
    ):
        assert said and said.startswith(REFUSED) and part in said
    # As is advised.
    module, with_heads = linear(), nn.Linear(8, 4, bias=False).to(device())
    with_heads.weight.muon_num_heads = None
    groups = [{"params": [module.weight], "use_muon": True}, {"params": [module.bias], "use_muon": False}]
    assert raised(module, MuonWithAuxAdam(groups)) is None
    assert raised(*of_all(with_heads)) is None
    assert raised(linear()) is None
    offloaded = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}, "zero_force_ds_cpu_optimizer": False}
    assert raised(linear(), **offloaded, compile={"deepcompile": False}) is None
    assert raised(linear(), zero_optimization={"elastic_checkpoint": False}) is None
    assert raised(linear(), torch_autocast={"enabled": True, "dtype": "bfloat16"}) is None


@pytest.mark.follows("because partitions are smaller than matrices; use fewer ranks, or AdamW, if that is too much")
@vary("world, stage, warned", [(2, 1, False)], slow=[(3, 1, True), (3, 2, True)], expects="warned")
@on_ranks("world")
def test_partitions_smaller_than_matrices(world, stage, warned):
    """Ranks that each compute the update of one matrix would differ, or nobody be told what that costs."""
    with logged(logging.WARNING) as texts:
        (result,) = check([train_beside(Training(model="OneMatrix", stage=stage))])
    assert result.owners == [world]
    texts = [text for text in texts if "of Muon's" in text]
    assert len(texts) == (warned and dist.get_rank() == 0)
    assert not texts or texts[0].endswith(ALSO_WARNED["optimizer"])


@pytest.mark.follows("because its checkpoint is of other partitions; load one of as many ranks")
@on_ranks(2)
def test_momentum_of_other_partitions(tmp_path):
    """Updates would be made of another matrix's momentum, or the checkpoint that is advised would not help."""
    training = Training(stage=2)
    module, engine = start(training, deepcompile=True)
    train(engine, training, range(2))
    engine.save_checkpoint(tmp_path)
    train(engine, training, range(2, 4))
    expected = seen(module, engine)
    engine.destroy()
    module, engine = start(training, deepcompile=True, seed=1)
    engine.load_checkpoint(tmp_path)
    for states in engine.optimizer.optimizer.state.values():
        if MOMENTUM in states:
            states[MOMENTUM] = states[MOMENTUM][1:]
    said = outcome(train, engine, training, range(2, 4))
    assert said.startswith("RuntimeError")
    assert "its checkpoint is of other partitions; load one of as many ranks" in said
    # As is advised.
    engine.load_checkpoint(tmp_path)
    train(engine, training, range(2, 4))
    actual = seen(module, engine)
    engine.destroy()
    assert max(errors_of(actual, expected)) < 10 * BOUND

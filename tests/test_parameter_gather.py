# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Parameters that are gathered under the next forward are new wherever they are read."""

import pickle

import pytest

from deepspeed.compile.config import CompileConfig

from support import parameter_gather
from support.ids import vary
from support.models import WITH_BLOCKS
from support.parameter_gather import FORWARDS, MODELS, READS, Around
from support.training import Case, train_beside_plain_loop

OVERLAPPED = {"compile": {"regional_compilation": True, "overlap_param_gather": True}}
BOUND = 1e-5


@vary(
    "model, backend",
    # What waits is around the generated code, so that of a few models shows it.
    [*((model, "eager") for model in WITH_BLOCKS), ("RepeatedLayers", "inductor"), ("TiedEmbedding", "inductor")],
)
@vary("stage, accumulation", [(1, 3), (2, 1)])
def test_trains_as_a_plain_loop(ranks, model, backend, stage, accumulation):
    case = Case(model=model, stage=stage, accumulation=accumulation, backend=backend, config=OVERLAPPED)
    for result in ranks(2).run(train_beside_plain_loop, case):
        assert result.error < BOUND
        assert result.moved > 1e-3


@vary(
    "varied",
    [
        {"skip_on_odd_steps": True, "steps": 5},
        {"evaluate_between": True},
        {"groups": 3},
        {"dtype": "fp32", "clipping": 0.1},
    ],
)
@vary("world", [2, 3])
def test_variations(ranks, world, varied):
    for result in ranks(world).run(train_beside_plain_loop, Case(config=OVERLAPPED, **varied)):
        assert result.error < BOUND


@vary("model", MODELS)
def test_a_forward_waits_for_a_late_rank(ranks, model):
    case = Case(config=OVERLAPPED, steps=4)
    for loss, parameters, waited in ranks(2).run(parameter_gather.train_with_a_late_rank, case, model):
        assert loss < BOUND and parameters < BOUND
        assert len(waited) >= 4, "the forward did not find parameters on their way"


def test_that_a_late_rank_is_seen(ranks):
    """Without waiting, the test above would find other losses."""
    case = Case(config=OVERLAPPED, steps=4)
    losses = [loss for loss, *_ in ranks(2).run(parameter_gather.train_with_a_late_rank, case, "Around", waits=False)]
    assert max(losses) > 100 * BOUND


@vary("how", [*READS, *FORWARDS])
def test_reads_after_a_step(ranks, how):
    for error in ranks(2).run(parameter_gather.read_after_a_step, Case(config=OVERLAPPED), how):
        assert error < BOUND


def test_each_block_waits_for_its_own(ranks):
    for pending, after_step, copied_in_peace, hooks in ranks(2).run(
        parameter_gather.order_of_waits, Case(config=OVERLAPPED)
    ):
        # 0: what no block holds; 1 to 3: the blocks.
        assert after_step == [0, 1, 2, 3]
        assert pending == [[2, 3], [3], [], []]
        assert copied_in_peace, "copying a module waited for its parameters"
        assert hooks == 0, "an engine that was destroyed left hooks"


def test_hooks_can_be_pickled():
    module = Around()
    module.register_state_dict_pre_hook(parameter_gather.parameter_gather._Hook(lambda: 1 / 0))
    pickle.loads(pickle.dumps(module)).state_dict()
    with pytest.raises(ZeroDivisionError):
        module.state_dict()


def test_a_script_module_among_the_others(ranks):
    for error in ranks(2).run(parameter_gather.train_with_a_script_module, Case(config=OVERLAPPED)):
        assert error < BOUND


def test_needs_regions():
    with pytest.raises(ValueError, match="overlap_param_gather needs blocks .* compile.regional_compilation to true"):
        CompileConfig(deepcompile=True, overlap_param_gather=True, regional_compilation=False)

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What messages advise works. Where a message has a test of its own, that test follows its advice."""

import torch
import torch.distributed as dist

from support.beside import Beside, check, warnings_logged
from support.models import VOCABULARY, BlocksWithin
from support.training import REGIONAL, Case, batch


def told_by(step, *args):
    """Returns the message of what a step raises, or an empty text."""
    try:
        step(*args)
    except RuntimeError as error:
        return str(error)
    return ""


def train_embedding(sparse):
    """Trains a model with an embedding whose gradient is sparse; returns what is said, or what training came to."""
    torch.manual_seed(0)
    module = BlocksWithin()
    module.body.embedding = torch.nn.Embedding(VOCABULARY, 8, sparse=sparse)
    pair = Beside(module, Case(config=REGIONAL))
    if sparse:
        told = told_by(pair.step, batch(0, 0, dist.get_rank(), 4))
        pair.engine.destroy()
        return told
    for step in range(2):
        pair.step(batch(step, 0, dist.get_rank(), 4))
    return pair.end()


def test_a_sparse_gradient(ranks):
    """The error would name no module, or a dense embedding would not train either."""
    (told,) = ranks(1).run(train_embedding, True)
    assert "'body.embedding.weight'" in told and "build the module with sparse=False" in told
    check(ranks(1).run(train_embedding, False))


def train_two_backwards(advised):
    """Two backwards of one step, of which the second replaces the first; or, as advised, both in one context."""
    torch.manual_seed(0)
    pair = Beside(BlocksWithin(), Case())

    def backwards():
        for index in range(2):
            loss = pair.engine(batch(0, index, dist.get_rank(), 4))
            pair.engine.backward(loss)

    with warnings_logged() as texts:
        if advised:
            with pair.engine.coalesce_grad_reduction():
                backwards()
        else:
            backwards()
    pair.engine.step()
    for index in range(0 if advised else 1, 2):
        pair.plain(batch(0, index, dist.get_rank(), 4)).backward()
    pair.step_plain()
    return pair.end(), [text for text in texts if "use engine.coalesce_grad_reduction()" in text]


def test_several_backwards_in_one_step(ranks):
    """Nobody would be told that gradients are replaced, or the context that is advised would replace them too."""
    for advised in (False, True):
        for outcome, told in ranks(2).run(train_two_backwards, advised):
            check([outcome])
            assert bool(told) != advised

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's own Muon steps sharded parameters to the same bits as whole ones."""

import dataclasses

import pytest
import torch

from support.ids import vary
from support.muon import Training, momenta, start, train
from support.on_ranks import on_ranks
from support.sharded import SHARDED, WHOLE, end, parameters_at_rest, same


@pytest.mark.options("compile.shard_parameters")
@vary(
    "world, varied",
    [(2, {"stage": 2, "accumulation": 2})],
    slow=[(3, {"stage": 1, "dtype": "bf16"}), (2, {"stage": 2, "model": "Tied", "aligned": True})],
)
@on_ranks("world", timeout=100)
def test_muon_steps_sharded_parameters(tmp_path, world, varied):
    """Muon, which computes an update of a whole matrix, would take the matrix from where nothing lies at rest."""
    training, results, at_rest = Training(depth=3, **varied), [], []
    for kind, made in (("sharded", SHARDED), ("whole", WHOLE)):
        torch._dynamo.reset()
        config = {**(training.config or {}), **made}
        module, engine = start(dataclasses.replace(training, config=config), deepcompile=True)
        train(engine, training, range(2))
        engine.save_checkpoint(f"{tmp_path}/{kind}", tag="one")
        train(engine, training, [2])
        engine.load_checkpoint(f"{tmp_path}/{kind}", tag="one")
        train(engine, training, [3, 4])
        at_rest.append(parameters_at_rest(module))
        states = [tensor.clone() for tensor in (*engine.optimizer.single_partition_of_fp32_groups, *momenta(engine))]
        results.append([*states, *end(engine, module)])
    assert same(*results) and at_rest[0] > 20

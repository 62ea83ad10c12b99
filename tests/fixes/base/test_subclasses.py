# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""An engine begins with parameters that are tensor subclasses as it begins with any others."""

import pytest
import torch

from deepspeed.compile.fixes.base.subclasses import plain_tensors, to_broadcast
from deepspeed.moe.utils import is_moe_param
from deepspeed.utils.debug import debug_param2name

from support.ids import vary
from support.on_ranks import gathered, on_ranks
from support.subclasses import Scaled
from support.training import Case, build, make_engine


@pytest.mark.quick
def test_the_tensors_that_have_memory():
    """A tensor within a tensor within a parameter would be left out, or one that has no memory be taken."""
    plain, inner = torch.ones(2), Scaled(torch.ones(3, 2, dtype=torch.int8), torch.ones(3, 1))
    outer = Scaled(inner, torch.ones(3, 1))
    found = list(plain_tensors([plain, outer]))
    assert all(a is b for a, b in zip(found, [plain, inner.rows, inner.scales, outer.scales], strict=True))


@pytest.mark.quick
def test_all_that_is_broadcast_can_be_viewed_as_bytes():
    """A scale without dimensions would be broadcast as it is, and cannot be viewed as bytes."""
    module = torch.nn.Linear(2, 3, bias=False)
    scale = torch.tensor(0.5)
    module.weight = torch.nn.Parameter(Scaled(torch.ones(3, 2, dtype=torch.int8), scale), requires_grad=False)
    for name, tensor in to_broadcast(module):
        assert name == "weight"
        tensor.view(torch.uint8).zero_()
    assert scale == 0 and module.weight.rows.sum() == 0


@pytest.mark.quick
def test_what_is_broadcast_goes_where_its_parameter_goes():
    """The parts of an expert's weight would be broadcast to ranks that have other experts."""
    module = torch.nn.Linear(2, 3, bias=False)
    module.weight = torch.nn.Parameter(Scaled.of(torch.ones(3, 2)), requires_grad=False)
    module.scale = torch.nn.Parameter(torch.tensor(1.0))
    for parameter in module.parameters():
        parameter.allreduce, parameter.group_name = False, "experts"
    sent = [tensor for _, tensor in to_broadcast(module)]
    assert len(sent) == 3 and all(is_moe_param(tensor) and tensor.group_name == "experts" for tensor in sent)


@vary("deepcompile", [True, False])
@vary("dtype", ["fp32", "bf16"])
@on_ranks(2)
def test_all_ranks_begin_with_the_weights_of_the_first(dtype, deepcompile):
    """Ranks would train beside frozen weights of their own, which no gradient makes alike."""
    case = Case(model="FrozenSubclass", dtype=dtype, deepcompile=deepcompile)
    # The weights of a rank are its own until the engine is made.
    module = build(case, seed=torch.distributed.get_rank())
    engine = make_engine(module, case)
    names = [debug_param2name(parameter) for parameter in module.parameters() if not isinstance(parameter, Scaled)]
    weights = [tensor.detach().cpu().clone() for tensor in plain_tensors(module.parameters())]
    engine.destroy()
    assert any(weight.dtype == torch.int8 for weight in weights)
    assert all(map(torch.equal, *gathered(weights)))
    # DeepSpeed knows the names of all other parameters.
    assert "unknown" not in names

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""A release of Liger that lacks what DeepCompile keeps out of graphs."""

import sys
import types

import pytest
import torch.distributed as dist

from deepspeed.compile.fixes.model_code import liger

from support.beside import Beside, check, warnings_logged
from support.models import BlocksWithin
from support.on_ranks import on_ranks
from support.training import REGIONAL, Case, batch


@pytest.mark.follows("compare losses with Liger turned off")
@on_ranks(1)
def test_a_liger_that_has_other_functions():
    """Nobody would be told that kernels may go wrong, or a loop with Liger off, as is advised, be no measure."""
    liger._keep_out.cache_clear()
    # Not mock.patch.dict(), which forgets modules that were imported meanwhile: torch registers its backends once.
    with pytest.MonkeyPatch.context() as patch, warnings_logged() as texts:
        patch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
        pair = Beside(BlocksWithin(), Case(config=REGIONAL))
        pair.step(batch(0, 0, dist.get_rank(), 4))
    liger._keep_out.cache_clear()
    lacking = [text for text in texts if text.endswith("compare losses with Liger turned off")]
    assert len(lacking) == len(liger._FUNCTIONS)
    (outcome,) = check([pair.end()])
    assert outcome.from_graphs[0] > 0

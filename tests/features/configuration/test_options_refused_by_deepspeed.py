# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Options that DeepSpeed itself refuses, under DeepCompile as without it."""

from typing import Any, Dict, NamedTuple

import pytest

from deepspeed.accelerator import get_accelerator

from support.on_ranks import on_ranks
from support.options import SMALL, outcome, prepare
from support.training import Case


class RefusedByDeepSpeed(NamedTuple):
    when: str  # "initialize" or "compile"
    says: str  # the beginning of what it raises
    config: Dict[str, Any]
    arguments: Dict[str, Any] = {}  # of engine.compile(), besides the backend


# By the name under which docs/reference/options.md has them.
REFUSED_BY_DEEPSPEED = {
    "gradient_allreduce_op": RefusedByDeepSpeed(
        "initialize",
        "ValueError: gradient_allreduce_op='sum' is not supported with DeepCompile",
        {"gradient_allreduce_op": "sum"},
    ),
    "managed_gradient_accumulation": RefusedByDeepSpeed(
        "initialize",
        "AssertionError: managed_gradient_accumulation=False is not supported with DeepCompile",
        {"managed_gradient_accumulation": False},
    ),
    "zero_optimization.legacy_stage1": RefusedByDeepSpeed(
        "initialize",
        "Exception: The deprecated version of ZeRO Stage 1 is not supported",
        {"zero_optimization": {"legacy_stage1": True}},
    ),
    "zero_optimization.allgather_bucket_size": RefusedByDeepSpeed(
        "initialize",
        "AssertionError: allgather_bucket_size must be a multiple of nccl_start_alignment_factor",
        {"zero_optimization": {"allgather_bucket_size": 3}},
    ),
    "zero_optimization.offload_optimizer": RefusedByDeepSpeed(
        "initialize",
        "ValidationError: 1 validation error for DeepSpeedZeroConfig",
        {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
    ),
    "zero_optimization.compute_grad_norm": RefusedByDeepSpeed(
        "initialize",
        "ValueError: zero_optimization.compute_grad_norm=false requires gradient_clipping=0",
        {"zero_optimization": {"compute_grad_norm": False}, "gradient_clipping": 1.0},
    ),
    "prescale_gradients": RefusedByDeepSpeed(
        "initialize",
        "AssertionError: pre-scale gradients is not yet supported with ZeRO-2 with reduce scatter enabled",
        {"prescale_gradients": True, "zero_optimization": {"stage": 2}},
    ),
    "bf16.bf16_master_weights_and_grads": RefusedByDeepSpeed(
        "initialize",
        "AssertionError: Master weights feature requires ZeRO-1 Offload with DeepSpeedCPUAdam",
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    ),
    "fp16.fp16_master_weights_and_grads": RefusedByDeepSpeed(
        "initialize",
        "AssertionError: Master weights feature requires ZeRO-1 Offload with DeepSpeedCPUAdam",
        {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
    ),
    "backend": RefusedByDeepSpeed(
        "compile",
        "AssertionError: Backend aot_eager is not supported for DeepCompile; use 'inductor' or 'eager'",
        {},
        {"backend": "aot_eager"},
    ),
}
ALSO_REFUSED_BY_DEEPSPEED = {
    "unknown-pass": RefusedByDeepSpeed(
        "compile", "AssertionError: Unknown pass fuse", {}, {"schedule": [(0, ["fuse"])]}
    ),
    "autotp-and-z1": RefusedByDeepSpeed(
        "compile",
        "NotImplementedError: The AutoTP compile pass cannot yet be combined with AutoSP or the ZeRO passes",
        {"compile": {"passes": ["autotp", "z1"]}},
    ),
}


@pytest.mark.follows("is not supported for DeepCompile; use 'inductor' or 'eager'")
@on_ranks(1)
def test_refused_by_deepspeed():
    """A new DeepSpeed would take an option that it refused, and of which DeepCompile does not know what to do."""
    get_accelerator().is_fp16_supported = lambda: True
    refusals, met = {**REFUSED_BY_DEEPSPEED, **ALSO_REFUSED_BY_DEEPSPEED}, {}
    for name, refusal in refusals.items():
        try:
            _, engine = prepare(Case(model=SMALL, config=refusal.config))
        except Exception as exception:
            when, raised = "initialize", f"{type(exception).__name__}: {exception}"
        else:
            when, raised = "compile", outcome(engine.compile, **{"backend": "eager", **refusal.arguments})
            if "backend" in refusal.arguments:
                # As is advised.
                engine.compile(backend="eager")
            engine.destroy()
        met[name] = (when, (raised or "")[: len(refusal.says)])
    assert met == {name: (refusal.when, refusal.says) for name, refusal in refusals.items()}

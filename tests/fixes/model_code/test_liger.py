# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Liger's kernels train right under DeepCompile, because those that go wrong in graphs are kept out of them.

Liger needs Triton, so all of this needs a GPU.
"""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.models import qwen3_config
from support.on_ranks import on_ranks
from support.training import compile_backend, device, engine_by_configuration, total_error

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="Liger's kernels need a GPU"),
    pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="needs liger-kernel"),
]
ROOT = Path(__file__).resolve().parents[3]
KERNELS = ("rope", "rms_norm", "swiglu", "fused_linear_cross_entropy")
VOCABULARY, WIDTH, LENGTH, STEPS = 512, 512, 256, 5


def train(kernels, deepcompile, checkpoints, options=None):
    """Returns the losses and the parameters after some steps. Some labels are ignored."""
    from liger_kernel.transformers import apply_liger_kernel_to_qwen3
    from transformers import Qwen3ForCausalLM

    torch._dynamo.reset()
    torch.manual_seed(0)
    config = qwen3_config(VOCABULARY, layers=3, width=WIDTH, use_cache=False, tie_word_embeddings=False)
    model = Qwen3ForCausalLM(config).to(device()).train()
    apply_liger_kernel_to_qwen3(model=model, **{name: name in kernels for name in KERNELS})
    if checkpoints:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine = engine_by_configuration(model, deepcompile, lr=0.2, zero_optimization={"stage": 1}, **(options or {}))
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator).to(device())
        labels = ids.masked_fill(torch.rand(ids.shape, generator=generator).to(device()) < 0.25, -100)
        loss = engine(input_ids=ids, labels=labels).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    parameters = [parameter.detach().clone() for parameter in model.parameters()]
    engine.destroy()
    return losses, parameters


@pytest.mark.parametrize("checkpoints", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("kernels", [*((name,) for name in KERNELS), KERNELS], ids=[*KERNELS, "all"])
@on_ranks(2)
def test_trains_as_without_deepcompile(kernels, checkpoints):
    """A kernel of Liger would go into a graph and read memory that it does not own, or be given wrong strides."""
    with compile_backend("inductor"):
        off, parameters = train(kernels, False, checkpoints)
        on, compiled = train(kernels, True, checkpoints)
    assert on == pytest.approx(off, rel=1e-4)
    assert total_error(compiled, parameters) < 1e-4


@pytest.mark.program("deepspeed/compile/fixes/model_code/liger.py", "docs/findings/liger_rms_norm.py")
def test_the_norm_still_goes_wrong():
    """If this fails, it was mended: take the norm out of ``_FUNCTIONS`` in ``fixes/model_code/liger.py``."""
    # In a process of its own, since a kernel that reads other memory ends all work on the GPU.
    program = [sys.executable, ROOT / "docs" / "findings" / "liger_rms_norm.py"]
    finished = subprocess.run(program, capture_output=True, text=True, timeout=240)
    if finished.returncode:
        assert "illegal memory access" in finished.stderr, finished.stderr[-2000:]
        return
    numbers = [float(match) for match in re.findall(r"[-+.\de]*\d", finished.stdout)]
    assert max(numbers) > 0.05, finished.stdout

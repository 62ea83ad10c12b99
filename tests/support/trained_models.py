# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Trains a model of transformers without DeepCompile and with it, by nothing but the configuration."""

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree

from deepspeed.compile.zero12 import gradient_counters, reset_gradient_counters

from support.architectures import ARCHITECTURES
from support.training import compile_backend, device, engine_by_configuration, held, total_error

# Rows of the micro-batches of each step; rank 0 has another number of them in the last.
STEPS = ((2, 2), (2, 2), (2, 3))

# torch's own aot_eager cannot run the graphs of these either: one views a tensor with other strides than were traced.
WITH_INDUCTOR = ("Qwen3Next", "OlmoHybrid")


def train(name, stage, deepcompile):
    """Trains for three steps of two micro-batches.

    Returns a dict: the losses, the parameters, how far they moved and, with DeepCompile, where the gradients of the
    last micro-batch came from, how many graphs were compiled, and the bytes held after the last step.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = ARCHITECTURES[name].make().to(device()).train()
    for parameter in model.parameters():
        if parameter.dim() == 0:
            # DeepSpeed 0.19.8 broadcasts parameters as bytes, as which torch cannot view one without dimensions.
            parameter.data = parameter.data.view(1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    more = {
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 20000},
    }
    engine = engine_by_configuration(model, deepcompile, lr=0.2, momentum=0.5, **more)
    losses, rank = [], dist.get_rank()
    for step, rows_of_each in enumerate(STEPS):
        for micro_step, rows in enumerate(rows_of_each):
            seed = 100 * step + 10 * micro_step + rank
            batch = ARCHITECTURES[name].batch(seed, rows if rank == 0 else 2)
            batch = pytree.tree_map_only(torch.Tensor, lambda each: each.to(device()), batch)
            if engine.is_compiled:
                reset_gradient_counters(engine)
            loss = engine(**batch).loss
            engine.backward(loss)
            counters = gradient_counters(engine) if engine.is_compiled else None
            engine.step()
            losses.append(float(loss.detach()))
    trained = [parameter.detach().clone() for parameter in model.parameters()]
    result = {"losses": losses, "parameters": trained, "moved": total_error(trained, before)}
    if counters is not None:
        result["from_graphs"], result["from_autograd"] = counters["from_graphs"], counters["from_autograd"]
        result["held"] = sum(held(gradient_counters(engine)).values())
        result["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    engine.destroy()
    return result


def off_and_on(name, stage):
    """Returns what there is to compare, and what the counters said with DeepCompile."""
    with compile_backend("inductor" if name in WITH_INDUCTOR else "eager"):
        off, on = (train(name, stage, deepcompile) for deepcompile in (False, True))
    return {
        "losses": (off.pop("losses"), on.pop("losses")),
        "error": total_error(on.pop("parameters"), off.pop("parameters")),
        **on,
    }

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""A language model's first step, in which its engine compiles itself because its configuration says so."""

import time
from typing import List, NamedTuple

import torch

from support.models import qwen3_config
from support.training import compile_backend, device, engine_by_configuration


def language_model(layers, width, use_cache):
    from transformers import Qwen3ForCausalLM

    more = {} if use_cache is None else {"use_cache": use_cache}
    config = qwen3_config(64, layers, width, intermediate_size=3 * width, **more)
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).to(device()).train()


class FirstStep(NamedTuple):
    graphs: int  # that were compiled for the step
    seconds: float
    loss: float
    cache_in_training: bool  # whether the outputs hold a cache
    cache_in_evaluation: bool
    use_cache: bool  # of the configuration, afterwards
    generated: List[List[int]]  # the text that the model generated


def first_step(use_cache, layers=6, width=32, backend="eager", asked=None):
    """Trains a language model for one step, behind which it evaluates and generates."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    module = language_model(layers, width, use_cache)
    engine = engine_by_configuration(module, True)
    ids = torch.arange(24, device=device()).view(2, 12)
    with compile_backend(backend):
        began = time.perf_counter()
        output = engine(input_ids=ids, labels=ids, **(asked or {}))
        engine.backward(output.loss)
        engine.step()
        if ids.is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    engine.eval()
    with torch.no_grad():
        evaluated = engine(input_ids=ids)
    result = FirstStep(
        graphs=graphs,
        seconds=seconds,
        loss=float(output.loss.detach()),
        cache_in_training=output.past_key_values is not None,
        cache_in_evaluation=evaluated.past_key_values is not None,
        use_cache=module.config.use_cache,
        generated=module.generate(ids, max_new_tokens=4, do_sample=False).tolist(),
    )
    engine.destroy()
    return result

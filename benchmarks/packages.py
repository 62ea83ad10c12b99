# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Times steps of a Qwen3 with Liger's kernels, or of adapters on a base in bf16 or NF4, with and without DeepCompile.

From the root of the repository, on one GPU, where the packages are installed::

    python -m benchmarks.packages lora on --nf4        DeepCompile; peft and bitsandbytes
    python -m benchmarks.packages lora off             DeepSpeed without DeepCompile, the base in bf16
    python -m benchmarks.packages liger chunked        DeepCompile with chunked_loss
    python -m benchmarks.packages liger on --kernels rope swiglu

It prints the mean seconds of the steps that count, tokens a second, MFU (see flops.py), the allocator's peak in GiB,
and losses.
"""

import argparse
import dataclasses
import os
import time

import torch

from . import flops
from .devices import on_gpus, synchronize
from .workload import SHAPES, build_model, replace_linear_layers

KERNELS = ("rope", "fused_linear_cross_entropy", "rms_norm", "swiglu")
LAYERS_WITH_ADAPTERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
WARM = 8


def in_nf4(model: torch.nn.Module, device: str) -> None:
    """Quantizes the linear layers of the blocks, as bitsandbytes does when it loads a model."""
    import bitsandbytes

    settings = {"compute_dtype": torch.bfloat16, "quant_type": "nf4", "bias": False}

    def quantized(linear):
        made = bitsandbytes.nn.Linear4bit(linear.in_features, linear.out_features, **settings)
        made.weight = bitsandbytes.nn.Params4bit(
            linear.weight.data.cpu(), requires_grad=False, quant_type="nf4", module=made
        )
        return made.to(device)

    replace_linear_layers(model, quantized)


def with_adapters(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the model with adapters of rank 16, which are all that is trained."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=LAYERS_WITH_ADAPTERS))
    model.enable_input_require_grads()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packages", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["liger", "lora"])
    parser.add_argument("how", choices=["on", "off", "chunked"], help="DeepCompile; chunked: with chunked_loss")
    parser.add_argument("--nf4", action="store_true", help="lora: the base in NF4 of bitsandbytes")
    parser.add_argument("--kernels", nargs="*", choices=KERNELS, default=KERNELS, help="liger: which; default: all")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=24)
    options = parser.parse_args()
    if options.steps <= WARM:
        parser.error(f"--steps must be more than {WARM}, after which steps count")
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    device = "cuda" if on_gpus() else "cpu"
    shape = dataclasses.replace(SHAPES[options.shape], num_hidden_layers=options.layers)
    model = build_model(shape, torch.bfloat16, device, False)
    if options.what == "lora":
        if options.nf4:
            in_nf4(model, device)
        model = with_adapters(model)
    elif options.kernels:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3

        apply_liger_kernel_to_qwen3(model=model, **{name: name in options.kernels for name in KERNELS})

    per_token = flops.per_token(model, options.seq)
    import deepspeed

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "log_level": "warning",
        "compile": {"deepcompile": options.how != "off"},
    }
    if options.how == "chunked":
        config["compile"]["chunked_loss"] = True
    rate = 1e-4 if options.what == "lora" else 1e-5
    optimizer = torch.optim.AdamW(trained, lr=rate, fused=True)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    generator = torch.Generator().manual_seed(1)
    tokens = min(2000, shape.vocab_size)
    batches = [torch.randint(tokens, (1, options.seq), generator=generator).to(device) for _ in range(options.steps)]
    losses = []
    for step, ids in enumerate(batches):
        if step == WARM:
            synchronize()
            if on_gpus():
                torch.cuda.reset_peak_memory_stats()
            begun = time.perf_counter()
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    synchronize()
    seconds = (time.perf_counter() - begun) / (options.steps - WARM)
    peak = f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB" if on_gpus() else "no peak on a CPU"
    rate = options.seq / seconds
    part = flops.mfu(per_token * rate, torch.cuda.get_device_name() if on_gpus() else "CPU", "bf16")
    speed = f"{rate:,.0f} tokens/s" + (f", MFU {part:.1%}" if part else "")
    print(f"{seconds:.4f} s a step, {speed}, {peak}; losses {losses[0]:.4f}, {losses[-1]:.4f}")
    engine.destroy()


if __name__ == "__main__":
    main()

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""A small Qwen3 of transformers whose linear layers are quantized, with adapters of peft.

Runs in the processes of ``support.pool``.
"""

import dataclasses
from typing import Optional

import torch
import torch.distributed as dist

import deepspeed

from support.models import qwen3_config
from support.training import batch, device, low_precision

# What the tests need, as names of modules.
PACKAGES = ("transformers", "accelerate", "peft", "bitsandbytes", "torchao")
VOCABULARY, LAYERS = 64, 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclasses.dataclass(frozen=True)
class Case:
    """What to train, and how.

    Attributes:
        kind: how weights are quantized, a key of KINDS.
        folder: with the model in full precision; see :func:`save_base`.
        checkpointing: how layers are checkpointed: "reentrant", "non-reentrant", or None.
        merges: whether the adapters are merged in the end.
    """

    kind: str
    folder: str
    stage: int = 1
    backend: str = "eager"
    checkpointing: Optional[str] = None
    dtype: str = "fp32"
    merges: bool = False
    deepcompile: bool = True


def _nf4(dtype, nested=False):
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_compute_dtype=dtype,
    )


def _bitsandbytes_int8(dtype):
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_8bit=True)


def _torchao_int8(dtype):
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig(set_inductor_config=False))


def _torchao_int4(dtype):
    # The numbers of 4 bits lie in 8 bits: what packs them needs other packages, and peft has no adapters for it.
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup
    from transformers import TorchAoConfig

    return TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)))


KINDS = {
    "nf4": _nf4,
    "nf4-nested": lambda dtype: _nf4(dtype, nested=True),
    "int8-bitsandbytes": _bitsandbytes_int8,
    "int8": _torchao_int8,
    "int4": _torchao_int4,
}


def save_base(folder):
    """Saves the model in full precision: only a model that is loaded can be quantized."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = qwen3_config(VOCABULARY, layers=LAYERS, width=64, tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)


def keep_gradients(model):
    """Keeps bitsandbytes from repacking weights where they evaluate.

    It does so on a CPU with AVX512-BF16. From then on no gradient goes through the layer, with an engine or without.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def make_model(case):
    """Loads the model quantized, and gives it adapters, which are the same every time."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM

    dtype = DTYPES[case.dtype]
    quantization = KINDS[case.kind](dtype)
    model = AutoModelForCausalLM.from_pretrained(
        case.folder, quantization_config=quantization, dtype=dtype, device_map={"": device()}
    )
    keep_gradients(model)
    model = prepare_model_for_kbit_training(
        model,
        use_gradient_checkpointing=case.checkpointing is not None,
        gradient_checkpointing_kwargs={"use_reentrant": case.checkpointing == "reentrant"},
    )
    torch.manual_seed(1)
    # Both matrices of each adapter are random, so both have gradients from the first step on.
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False))


def trained(model):
    """Lists the parameters of the adapters."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def make_optimizer(model):
    # With a small eps, a gradient that is rounding alone would move a parameter as far as any other.
    return torch.optim.AdamW(trained(model), lr=0.02, eps=0.1)


def make_engine(model, case):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": case.stage},
        "compile": {"deepcompile": case.deepcompile},
        **low_precision(case.dtype, loss_scale_window=4),
    }
    return deepspeed.initialize(model=model, optimizer=make_optimizer(model), config=config)[0]


def tokens(step):
    return batch(step, 0, dist.get_rank(), 8)


def evaluate(model):
    """Returns the loss in evaluation, fp32 [], and what the model continues a prompt with, [2, 6]."""
    training = model.training
    model.eval()
    with torch.no_grad():
        loss = model(input_ids=tokens(99), labels=tokens(99)).loss.float()
        generated = getattr(model, "module", model).generate(
            input_ids=tokens(99)[:, :3], max_new_tokens=3, do_sample=False, pad_token_id=0
        )
    model.train(training)
    return loss, generated

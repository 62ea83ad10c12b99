# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What is trained: a Qwen3 with random weights on text that every Python installation has."""

import collections
import dataclasses
import re
import sysconfig
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a Qwen3, under the names that transformers' ``Qwen3Config`` has for them, or ``Qwen3MoeConfig``."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    # Of a mixture of experts; 0: a dense model.
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0


SHAPES = {
    "qwen3-8b": Shape(36, 4096, 12288, 32, 8, 128, 151936, tie_word_embeddings=False),
    "qwen3-0.6b": Shape(28, 1024, 3072, 16, 8, 128, 151936, tie_word_embeddings=True),
    "qwen3-32b": Shape(64, 5120, 25600, 64, 8, 128, 151936, tie_word_embeddings=False),
    "qwen3-30b-a3b": Shape(48, 2048, 6144, 32, 4, 128, 151936, False, 128, 8, 768),
    # That of "benchmarks.exchanges sequences".
    "sequences": Shape(8, 2048, 6144, 16, 8, 128, 32000, tie_word_embeddings=False),
    # Many layers that compute little, so that the time of a step is the host's.
    "deep": Shape(28, 64, 192, 4, 2, 16, 1024, tie_word_embeddings=False),
    "tiny": Shape(2, 128, 384, 4, 2, 32, 1024, tie_word_embeddings=False),
    "tiny-experts": Shape(2, 128, 384, 4, 2, 32, 1024, False, 8, 2, 64),
}

# Recipes of torchao's float8. "tensorwise" has one scale for a tensor and is the fastest; "rowwise" has one for each
# row; "rowwise_with_gw_hp" also multiplies the gradients of weights in high precision.
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


class _DrawnOn(TorchFunctionMode):
    """Within it, random values are drawn on a device for tensors elsewhere, so that they are those of the device."""

    def __init__(self, device: str):
        super().__init__()
        self._device = device

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # Functions of torch.nn.init hand their tensor on by name, and what they call comes here no more.
        tensor = args[0] if args else kwargs.get("tensor")
        draws = function in (torch.Tensor.normal_, torch.Tensor.uniform_) or "torch.nn.init" == getattr(
            function, "__module__", ""
        )
        if not draws or not isinstance(tensor, torch.Tensor) or tensor.is_meta:
            return function(*args, **kwargs)
        with torch.no_grad():
            drawn = torch.empty_like(tensor, device=self._device)
            function(*((drawn, *args[1:]) if args else ()), **(kwargs if args else {**kwargs, "tensor": drawn}))
            return tensor.copy_(drawn)


def build_model(
    shape: Shape, dtype: torch.dtype, device: str, checkpoint: bool, drawn_on: str | None = None
) -> torch.nn.Module:
    """Returns a causal language model whose weights are the same on every rank, for every system.

    Args:
        shape: of the model.
        dtype: in which the weights are drawn.
        device: on which the weights lie.
        checkpoint: whether every layer keeps only its input and computes the rest again in the backward.
        drawn_on: on which device the weights are drawn, one after the other, if they are to lie elsewhere.
    """
    import transformers

    sizes, kind = dataclasses.asdict(shape), "Qwen3Moe" if shape.num_experts else "Qwen3"
    if shape.num_experts:
        # As in Qwen's own configuration. One kernel multiplies the tokens of all experts.
        sizes |= {"norm_topk_prob": True, "experts_implementation": "grouped_mm"}
    else:
        for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
            del sizes[name]
    config_class, model_class = (getattr(transformers, kind + name) for name in ("Config", "ForCausalLM"))
    config = config_class(**sizes, rope_theta=1e6, use_cache=False, attn_implementation="sdpa")
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), _DrawnOn(drawn_on) if drawn_on not in (None, device) else nullcontext():
            model = model_class(config)
    finally:
        torch.set_default_dtype(before)
    if checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def multiply_in_float8(model: torch.nn.Module, recipe: str, gathered: bool) -> None:
    """Makes torchao replace the linear layers of the blocks by layers that multiply in float8; the head stays.

    On a CPU the layers emulate that. The parameters stay, in their dtype, unless FSDP2 gathers them in float8.

    Args:
        model: what :func:`build_model` returned.
        recipe: one of ``RECIPES``.
        gathered: whether FSDP2 shall cast the shards of these layers to float8 before it gathers them. The parameters
            are fp32 then, as the shards are.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    emulated = next(model.parameters()).device.type == "cpu"
    if gathered:
        # torchao then wraps the weights, and a cast of a wrapper leaves the tensor in it as it is.
        model.model.layers.float()
    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(recipe), enable_fsdp_float8_all_gather=gathered, emulate=emulated
    )
    convert_to_float8_training(model.model.layers, config=config)


class Adapted(torch.nn.Module):
    """A frozen linear layer with an adapter (LoRA) that is trained."""

    def __init__(self, linear: torch.nn.Linear, rank: int):
        super().__init__()
        self.base = linear
        self.first, self.second = (
            torch.nn.Linear(*sizes, bias=False, device=linear.weight.device, dtype=linear.weight.dtype)
            for sizes in ((linear.in_features, rank), (rank, linear.out_features))
        )
        torch.nn.init.zeros_(self.second.weight)

    def forward(self, x):
        return self.base(x) + self.second(self.first(x))


def add_adapters(model: torch.nn.Module, rank: int) -> None:
    """Freezes a model, and gives each linear layer of the blocks an adapter of this rank."""
    model.requires_grad_(False)
    torch.manual_seed(1)
    replace_linear_layers(model, lambda linear: Adapted(linear, rank))


def replace_linear_layers(model: torch.nn.Module, make: Callable[[torch.nn.Linear], torch.nn.Module]) -> None:
    """Replaces each linear layer of the blocks by what ``make`` returns for it."""
    for layer in model.model.layers:
        # Convert one layer at a time, because the list keeps replaced layers in memory.
        for module in list(layer.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, torch.nn.Linear):
                    setattr(module, name, make(child))


def text(limit: int) -> str:
    """Returns the source of Python's standard library, cut after the file with which it reaches ``limit`` characters.

    Every call in one Python installation returns the same text.
    """
    folder, parts, length = Path(sysconfig.get_path("stdlib")), [], 0
    for file in sorted(folder.rglob("*.py")):
        if "site-packages" in file.parts or "dist-packages" in file.parts or length >= limit:
            continue
        parts.append(file.read_text(encoding="utf-8", errors="replace"))
        length += len(parts[-1])
    return "".join(parts)


def tokens(vocabulary: int, limit: int = 16_000_000) -> torch.Tensor:
    """Returns :func:`text` as token ids, an int64 tensor [n] on the CPU.

    A token is a word, a run of blanks or a sign. The most frequent token has id 0, the next one id 1, and so on. The
    last of the ``vocabulary`` ids stands for all tokens that are too rare to have an id of their own.
    """
    pieces = re.findall(r"\w+|\s+|[^\w\s]", text(limit))
    ids = {piece: rank for rank, (piece, _) in enumerate(collections.Counter(pieces).most_common(vocabulary - 1))}
    return torch.tensor([ids.get(piece, vocabulary - 1) for piece in pieces])


class Batches:
    """Draws the batches of one rank, the same in every run.

    Args:
        vocabulary: number of token ids.
        micro_batch: sequences in a batch.
        seq: tokens in a sequence.
        rank: whose batches these are; every rank has others.
        device: to which batches are copied.
    """

    def __init__(self, vocabulary: int, micro_batch: int, seq: int, rank: int, device: str):
        # A model with few token ids is a small one, which sees little text: do not read megabytes for it.
        self._tokens = tokens(vocabulary, limit=16_000_000 if vocabulary > 10_000 else 500_000)
        self._shape, self._rank, self._device = (micro_batch, seq), rank, device

    def draw(self, number: int) -> torch.Tensor:
        """Returns batch ``number``: token ids, int64 [micro_batch, seq], on the device."""
        micro_batch, seq = self._shape
        generator = torch.Generator().manual_seed(1_000_000 * self._rank + number)
        starts = torch.randint(0, len(self._tokens) - seq, (micro_batch,), generator=generator)
        ids = torch.stack([self._tokens[start : start + seq] for start in starts])
        # The host need not wait for a copy from pinned memory.
        return ids.pin_memory().to(self._device, non_blocking=True) if self._device != "cpu" else ids

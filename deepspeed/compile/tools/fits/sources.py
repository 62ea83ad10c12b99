# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Makes a model and a batch as tensors without memory: of transformers by its configuration, or by a function."""

import contextlib
import importlib
import inspect
import os
import sys
import threading
from pathlib import Path
from typing import Any, Callable, ContextManager, Dict, Iterable, List, Optional, Set
from unittest.mock import patch

import torch
from torch.nn import Embedding, Linear, Module, Parameter
from torch.utils import _pytree as pytree

# So many seconds the hub has to answer at all.
HUB_SECONDS = 10.0
# What models of transformers read beside text, and parts of the names of their arguments for it.
_NOT_TEXT = {"images": ("pixel_values",), "recordings": ("input_features", "input_values")}


class Unusable(ValueError):
    """A model that cannot be made. The text is a sentence with a remedy."""


def reason(error: BaseException) -> str:
    """Returns the first sentence of an error's text, in one line, or the error's class if the text is empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    while lines[0].endswith(":") and len(lines) > 1:
        lines[:2] = [" ".join(lines[:2])]
    # The text of a KeyError is the key alone.
    return f"{type(error).__name__}: {lines[0]}" if isinstance(error, KeyError) else lines[0]


def named(source: str) -> Callable[[], Module]:
    """Returns a function that makes a model.

    Args:
        source: ``module:function``, a folder, a ``config.json``, or the name of a model of transformers' hub.

    Raises:
        Unusable: if there is no such thing.
    """
    module, colon, function = source.partition(":")
    if module and colon and not os.path.exists(source):
        return _of_function(module, function)
    return _of_transformers(source)


def _of_function(module, function):
    folder = os.getcwd()
    adds = folder not in sys.path
    if adds:
        sys.path.insert(0, folder)
    try:
        found = getattr(importlib.import_module(module), function, None)
    except (Exception, SystemExit) as error:  # noqa: BLE001  whatever the module's code raises
        raise Unusable(
            f"{module} cannot be imported ({reason(error)}); name a module of this folder or of PYTHONPATH"
        ) from error
    finally:
        # Remove the folder by its name: the module may have put folders before it, or have removed it.
        if adds and folder in sys.path:
            sys.path.remove(folder)
    if not callable(found):
        raise Unusable(f"{module} has no function {function}; name one that returns a model")
    return found


def _of_transformers(source):
    try:
        import transformers
    except ImportError as error:
        raise Unusable(
            f"{source} is made by transformers, which is not installed: `pip install transformers`, or name a "
            "function that makes a model, as module:function"
        ) from error
    path = Path(source)
    if path.suffix == ".json" and not path.is_file():
        raise Unusable(f"there is no file {source}; name a config.json, a folder with one, or a model of the hub")
    try:
        config = _configuration(transformers.AutoConfig, source)
        kinds = [getattr(transformers, name, None) for name in config.architectures or ()]
    except Unusable:
        raise
    except Exception as error:  # noqa: BLE001  whatever the checks of a configuration's class raise
        raise Unusable(
            f"transformers reads no configuration of {source} ({reason(error)}); name a config.json that it reads, a "
            "folder with one, or a model of the hub"
        ) from error
    kind = next((kind for kind in kinds if kind is not None), None)

    def make() -> Module:
        # The fork trains without a cache, and with torch's attention.
        text = config.get_text_config()
        text.use_cache = False
        of = kind._from_config if kind else transformers.AutoModelForCausalLM.from_config
        # Some classes have only their own attention.
        for attention in ("sdpa", "eager"):
            config._attn_implementation = attention
            try:
                return of(config)
            except Exception as error:  # noqa: BLE001  a class divides by what the configuration says, and looks it up
                why = error
        raise Unusable(
            f"transformers makes no model of {source} ({reason(why)}); name a configuration whose parts suit each "
            "other and its class in architectures"
        ) from why

    return make


def _configuration(auto, source):
    """Returns a configuration of a folder or of the hub's cache, or else of the hub itself, if the hub answers."""
    import huggingface_hub

    try:
        return auto.from_pretrained(source, local_files_only=True)
    except OSError:
        if os.path.exists(source):
            raise
    hub = huggingface_hub.constants.ENDPOINT
    why = _why_silent(hub)
    if why is not None:
        raise Unusable(
            f"{source} is no folder and is not in transformers' cache, and {hub} cannot be reached ({why}); name a "
            "folder with its config.json, or a model of the cache"
        )
    return auto.from_pretrained(source)


def _why_silent(hub):
    """Returns the reason why the hub does not answer, or None. Transformers would ask it again for half a minute."""
    import huggingface_hub

    found: List[Optional[str]] = [f"no answer within {HUB_SECONDS:g} s"]

    def ask():
        try:
            huggingface_hub.get_session().head(hub, timeout=HUB_SECONDS)
            found[:] = [None]
        except Exception as error:  # noqa: BLE001  of requests or of httpx, by the release
            found[:] = [reason(error)]

    # In a thread, because the timeout is that of each address of the hub, and looking these up has none.
    asks = threading.Thread(target=ask, daemon=True)
    asks.start()
    asks.join(HUB_SECONDS)
    return found[0]


def unread(model: Module) -> List[str]:
    """Lists what a model reads that :func:`batch_for` does not make beside token ids, such as images."""
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        return []
    forwards = {type(module).forward for module in model.modules()}
    names = [name for forward in forwards for name in inspect.signature(forward).parameters]
    return [what for what, parts in _NOT_TEXT.items() if any(part in name for part in parts for name in names)]


def takes_images(model: Module) -> bool:
    """Whether a model of transformers takes images."""
    return getattr(model, "main_input_name", "input_ids") == "pixel_values"


def tokens_for(model: Module, wanted: Optional[int]) -> int:
    """Returns the tokens of a sequence: the wanted number, or at most 4096.

    Raises:
        Unusable: if the model has an embedding of fewer positions.
    """
    config = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    positions = getattr(text, "max_position_embeddings", None) or sys.maxsize
    # Some models have -1, which is no limit.
    positions = positions if positions > 0 else sys.maxsize
    # Some models have two rows before those of the positions. Rotary positions have no rows.
    rows = {module.num_embeddings for module in model.modules() if isinstance(module, Embedding)}
    if wanted is not None and wanted > positions and rows & {positions, positions + 2}:
        raise Unusable(f"{type(model).__name__} has {positions} positions; ask for a sequence of at most so many")
    return wanted or min(4096, positions)


def batch_for(model: Module, sequences: int, tokens: int) -> Dict[str, torch.Tensor]:
    """Returns arguments of a model in training.

    Args:
        model: a model of token ids or of images.
        sequences, tokens: of a micro-batch.

    Raises:
        Unusable: if the model takes something else.
    """
    config = getattr(model, "config", None)
    name = getattr(model, "main_input_name", "input_ids")
    if takes_images(model):
        if not hasattr(config, "image_size"):
            raise _takes(model, "images of no size")
        size, channels = config.image_size, getattr(config, "num_channels", 3)
        height, width = (size, size) if isinstance(size, int) else size
        dtype = next(model.parameters()).dtype
        return {
            "pixel_values": torch.empty(sequences, channels, height, width, dtype=dtype),
            "labels": torch.zeros(sequences, dtype=torch.long),
        }
    if name != "input_ids":
        raise _takes(model, name)
    ids = torch.zeros(sequences, tokens, dtype=torch.long)
    names = list(inspect.signature(model.forward).parameters)
    if not names:
        raise _takes(model, "no tokens")
    # A custom model may have another name for its tokens, and compute its loss from them.
    first = name if name in names else names[0]
    is_per_row = type(model).__name__.endswith("ForSequenceClassification")
    labels = torch.zeros(sequences, dtype=torch.long) if is_per_row else ids
    return {first: ids, **({"labels": labels} if "labels" in names else {})}


def _takes(model, what):
    return Unusable(f"{type(model).__name__} takes {what}; call fits(..., batch=...) with a function that makes it")


def loss_of(result: Any) -> torch.Tensor:
    """Returns the loss among a model's results: its ``loss``, its tensor [], or the mean of its first tensor."""
    loss = getattr(result, "loss", None)
    if loss is None:
        loss = result["loss"] if isinstance(result, dict) and "loss" in result else result
    if not isinstance(loss, torch.Tensor):
        tensors = [leaf for leaf in pytree.tree_leaves(loss) if isinstance(leaf, torch.Tensor)]
        if not tensors:
            raise Unusable(f"the model returns no tensor, but {type(result).__name__}; return its loss")
        loss = next((tensor for tensor in tensors if tensor.dim() == 0), tensors[0])
    return loss if loss.dim() == 0 else loss.float().mean()


def whole_rows() -> ContextManager[Any]:
    """Returns a context in which transformers takes each row for one sequence: tokens have no values to read."""
    masks, name = sys.modules.get("transformers.masking_utils"), "find_packed_sequence_indices"
    return patch.object(masks, name, lambda *_, **__: None) if hasattr(masks, name) else contextlib.nullcontext()


def without_memory(model: Module, dtype: torch.dtype) -> None:
    """Gives a model fake tensors on the CPU for its parameters and buffers, cast as the engine does.

    Call this in torch's mode of fake tensors. The model may be on the meta device.
    """
    made: Dict[int, Any] = {}
    for module in model.modules():
        for tensors, is_buffer in ((module._parameters, False), (module._buffers, True)):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    kind = dtype if tensor.is_floating_point() else tensor.dtype
                    like = torch.empty(tensor.shape, dtype=kind, device="cpu")
                    # DeepSpeed trains no parameter without elements.
                    trains = tensor.requires_grad and tensor.numel() > 0
                    # Keep the tensor too, so that no other tensor gets its id.
                    made[id(tensor)] = tensor, like if is_buffer else Parameter(like, trains)
                tensors[name] = made[id(tensor)][1]


class Adapted(Module):
    """A frozen linear layer with a trained adapter (LoRA)."""

    def __init__(self, linear: Module, inner: int, outer: int, rank: int):
        super().__init__()
        self.base = linear
        like = {"bias": False, "device": linear.weight.device, "dtype": linear.weight.dtype}
        self.first, self.second = Linear(inner, rank, **like), Linear(rank, outer, **like)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.second(self.first(x))


def adapt(model: Module, blocks: Iterable[Module], rank: int) -> Set[str]:
    """Freezes a model, and gives each linear layer of its blocks an adapter of this rank, which is trained.

    Returns the classes of other modules in blocks that have matrices, such as experts, and get no adapter.
    """
    model.requires_grad_(False)
    without = set()
    for block in blocks:
        for module in list(block.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, Linear):
                    setattr(module, name, Adapted(child, child.in_features, child.out_features, rank))
                elif type(child).__name__ == "Conv1D":
                    # Transformers' Conv1D: a linear layer with a transposed weight.
                    setattr(module, name, Adapted(child, child.weight.shape[0], child.weight.shape[1], rank))
                elif any(parameter.dim() > 1 for parameter in child.parameters(recurse=False)):
                    without.add(type(child).__name__)
    return without

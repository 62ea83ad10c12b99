# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Keeps texts of a row, and tokens that are far apart, from attending to each other where ranks share a sequence.

To DeepSpeed: ``UlyssesSPAttentionHF`` drops the mask of transformers. Only flash-attention then reads in
``position_ids`` where texts begin, and takes ``sliding_window``. With "sdpa" a packed row trains as one text, and each
layer attends to all tokens before. Please make a mask of the gathered positions. With "flex_attention" it is the same.
"""

from typing import TYPE_CHECKING, Any, Dict, Optional, Set
from weakref import WeakSet

import torch
from torch.nn import Module

from deepspeed.utils import logger

if TYPE_CHECKING:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

FLEX = (
    "a row holds several texts, which attend to each other where ranks share sequences and attn_implementation is "
    "'flex_attention'; use 'sdpa' or 'flash_attention_2'"
)


WINDOWS = (
    "where ranks share sequences and attn_implementation is 'flex_attention', layers with a sliding window attend to "
    "all tokens before; use 'sdpa' or 'flash_attention_2'"
)
MEMORY = (
    "where ranks share sequences and attn_implementation is 'sdpa', each layer makes a mask of {:.1f} GiB, a byte for "
    "each pair of tokens; use 'flash_attention_2'"
)
# The attention of all models that share sequences, each of which may get the rows of a loader.
ATTENTIONS: "WeakSet[UlyssesSPAttentionHF]" = WeakSet()
# The messages that this process has logged.
_SAID: Set[str] = set()
# What collators without padding tell of a row beside its positions.
_LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def without_lengths(batch: Dict[str, Any]) -> Dict[str, Any]:
    """Returns what DeepSpeed's loader can cut of a batch. TRL's packing adds lengths, which the positions tell too."""
    return {name: value for name, value in batch.items() if name not in _LENGTHS}


def count_own_heads(attention: "UlyssesSPAttentionHF", module: Module, query: torch.Tensor, key: torch.Tensor) -> None:
    """Called for a rank that evaluates alone: a training step has counted the heads that it has then.

    Args:
        query, key: [rows, heads, tokens, width].
    """
    if attention.kv_replication_factor > 1:
        module.num_key_value_groups = query.shape[1] // key.shape[1]


def warn_of_windows(implementation: str, config: Any) -> None:
    """Warns of a model whose sliding windows DeepSpeed drops. ``config``: the model's own of transformers."""
    of_text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if implementation == "flex_attention" and "sliding_attention" in (getattr(of_text, "layer_types", None) or ()):
        logger.warning(WINDOWS)


def look(position_ids: torch.Tensor) -> None:
    """Tells each attention if a row holds several texts. All ranks of a sequence call it with the same whole rows.

    Later rows count as such too, so that code that is compiled need not ask.

    Args:
        position_ids: int64 [rows, tokens].
    """
    untold = [attention for attention in ATTENTIONS if not attention.rows_are_packed]
    # A row may end in padding, of which all positions are 0.
    if untold and bool(((position_ids[:, 1:-1] == 0) & (position_ids[:, 2:] == 1)).any()):
        for attention in untold:
            attention.rows_are_packed = True
            if attention.core_attn_implementation == "flex_attention":
                _warn(FLEX)
    # Compiled code that makes the mask does not warn.
    if any(attention.rows_are_packed and attention.core_attn_implementation == "sdpa" for attention in ATTENTIONS):
        _warn_of_memory(position_ids.shape[0] * position_ids.shape[1] ** 2)


def _warn_of_memory(size):
    if size >= 2**30:
        _warn(MEMORY, size / 2**30)


def _warn(message, *values):
    if message not in _SAID:
        _SAID.add(message)
        logger.warning(message.format(*values))


def mask(
    attention: "UlyssesSPAttentionHF",
    module: Module,
    position_ids: torch.Tensor,
    given: Optional[torch.Tensor],
    window: Optional[int],
) -> Optional[torch.Tensor]:
    """Returns which tokens attend to which, bool [rows, 1, tokens, tokens], or ``given`` if that needs no saying.

    Args:
        module: the model's own attention. If its ``is_causal`` is false, tokens attend to later ones as to earlier.
        position_ids: of whole rows, int64 [rows, tokens].
        given: what DeepSpeed would take.
        window: to how many tokens a token attends, itself and those before it; None: to all.
    """
    packed, tokens = attention.rows_are_packed, position_ids.shape[1]
    if attention.core_attn_implementation != "sdpa" or not (packed or window is not None and tokens > window):
        return given
    if not torch.compiler.is_compiling():
        _warn_of_memory((position_ids.shape[0] if packed else 1) * tokens**2)
    places = torch.arange(tokens, device=position_ids.device)
    # Only bool has a value for each pair of tokens.
    query, farthest = places[:, None], tokens if window is None else window
    last = query if getattr(module, "is_causal", True) else query + farthest - 1
    seen = (places <= last)[None]
    if window is not None:
        seen &= places > query - window
    if packed:
        texts = (position_ids.diff(prepend=position_ids[:, :1] - 1) != 1).cumsum(1)
        seen = (texts[:, :, None] == texts[:, None]).logical_and_(seen)
    return seen[:, None]

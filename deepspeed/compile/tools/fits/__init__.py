# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Will it fit? Estimates the memory that a model needs on each GPU.

::

    python -m deepspeed.compile.fits --model Qwen/Qwen3-8B --gpus 8 --memory 80 --sequence 4096

It needs no GPU and no weights. Only transformers uses the network, to find a model by its name. The files, each of
which imports only from those above it:

=================  ==================================================================================
modes.py           the user's question, and the modes that are compared
configuration.py   reads a DeepSpeed configuration
liveness.py        the memory of a compiled graph at each moment
graphs.py          traces a function as training compiles it
head.py            whether a loss is in chunks or has a graph of its own, and its memory
long_sequences.py  inputs of layers on the host, MLPs and losses in tiles
activations.py     runs a model without memory, with the memory of its graphs
gradients.py       the gradients that the reducer holds, and the layout of partitions
fsdp2.py           the memory of FSDP2, by its published scheme
sources.py         makes a model and a batch
time_limit.py      ends what takes too long
estimate.py        adds up
advice.py          which mode to take, and the command's text
__main__.py        the command
=================  ==================================================================================

``python -m benchmarks.fits`` compares estimates with measurements.
"""

from typing import TYPE_CHECKING, Any, Callable, Dict, Optional, Sequence

if TYPE_CHECKING:
    from torch.nn import Module

    from .estimate import Answer
    from .modes import Mode

NEEDS = (
    "features.loss",
    "features.activation_budget",
    "features.blocks",
    "features.copy_engines",
    "features.shard_parameters",
    "features.update",
)


def fits(
    make_model: "Callable[[], Module]",
    config: Optional[Dict[str, Any]] = None,
    checkpoint: bool = False,
    modes: "Optional[Sequence[Mode]]" = None,
    say: Callable[[str], None] = lambda sentence: None,
    **question: Any,
) -> "Answer":
    """Estimates the memory that a model needs in each mode.

    Args:
        make_model: makes the model, as tensors without memory.
        config: a DeepSpeed configuration, which becomes a mode of its own.
        checkpoint: whether the configuration's mode computes each block again in the backward.
        modes: the modes to estimate, by default all that have a meaning.
        say: a function that gets a sentence about each step of the work.
        question: the fields of ``modes.Question``: ``gpus``, ``memory``, ``sequence`` and others.

    Raises:
        ValueError: if the model cannot be made, or if the question has an option that is not estimated.
    """
    from .estimate import fits_of
    from .modes import Question

    return fits_of(make_model, Question(**question), config, checkpoint, modes, say)

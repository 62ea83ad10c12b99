# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Will it fit? What a model needs on each GPU, before one is rented.

::

    python -m deepspeed.compile.features.fits --model Qwen/Qwen3-8B --gpus 8 --memory 80 --sequence 4096

It needs no GPU, no weights, and no network beyond what transformers asks for a name. The files, each of which imports
only from those above it:

=================  ==================================================================================
liveness.py        the memory of a compiled graph at each moment
graphs.py          traces a function as training compiles it
head.py            the memory of a loss in chunks
activations.py     runs a model without memory, with the memory of its graphs
gradients.py       what the reducer holds of gradients, and the layout of partitions
modes.py           the modes that are compared
fsdp2.py           what FSDP2 holds, by its published scheme
sources.py         makes a model and a batch
reckon.py          adds up
__main__.py        the command
=================  ==================================================================================

``python -m benchmarks.fits`` compares what is reckoned with what was measured.
"""

from typing import TYPE_CHECKING, Any, Callable, Dict, Optional, Sequence

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from .modes import Mode
    from .reckon import Answer

NEEDS = ("loss", "activation_budget", "blocks", "ranges", "one_pass_adam", "eight_bit")
# The line of ds_report.
COMMAND = ("fork: will it fit?", "python -m deepspeed.compile.features.fits --model NAME --gpus N --memory GIB")


def fits(
    make_model: "Callable[[], Module]",
    gpus: int = 1,
    memory: float = 80,
    sequence: int = 4096,
    micro_batch: int = 1,
    accumulation: int = 1,
    lora: Optional[int] = None,
    batch: "Optional[Callable[[int, int], Dict[str, torch.Tensor]]]" = None,
    config: Optional[Dict[str, Any]] = None,
    checkpoint: bool = False,
    dtype: "Optional[torch.dtype]" = None,
    modes: "Optional[Sequence[Mode]]" = None,
    say: Callable[[str], None] = lambda sentence: None,
) -> "Answer":
    """Reckons what a model needs in each mode.

    Args:
        make_model: makes the model, as tensors without memory.
        gpus: how many train it, with data in parallel.
        memory: of each GPU, GiB.
        sequence, micro_batch: tokens of a sequence, and sequences of a micro-batch.
        accumulation: micro-batches of a step.
        lora: the rank of adapters at all linear layers of the blocks; None: all is trained that the model trains.
        batch: returns the model's arguments for (micro_batch, sequence); by default token ids or images, as the
            model's configuration says.
        config: a DeepSpeed configuration, which becomes a mode of its own.
        checkpoint: whether that mode computes each block again in the backward.
        dtype: of parameters and activations, by default bf16. Masters and moments are fp32.
        modes: those to reckon, by default all that have a meaning.
        say: is told what is being done.

    Raises:
        ValueError: if the model cannot be made.
    """
    import torch

    from .reckon import fits_of

    arguments = (gpus, memory, sequence, micro_batch, accumulation, lora, batch, config, checkpoint)
    return fits_of(make_model, *arguments, dtype or torch.bfloat16, modes, say)

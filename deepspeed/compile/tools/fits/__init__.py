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

``python -m benchmarks.fits`` compares estimates with measurements. ``deepspeed.compile.fits`` has the public names.
"""

NEEDS = (
    "features.loss",
    "features.activation_budget",
    "features.blocks",
    "features.copy_engines",
    "features.shard_parameters",
    "features.update",
)

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of training: this fork, the DeepSpeed that it is built from (the base), and PyTorch's FSDP2.

Commands, from the root of the repository::

    python -m benchmarks.compare              measures several systems one after the other
    deepspeed --module benchmarks.measure     measures one system
    python -m benchmarks.tables FILE...       prints a line for each run of benchmarks.measure
    python -m benchmarks.pictures FOLDER      draws the results of benchmarks.compare once more
    deepspeed --module benchmarks.host        times the parts of a step with the optimizer on the host
    python -m benchmarks.parts                times the parts of a step on one device
    python -m benchmarks.packages             times steps with other packages' kernels, adapters and quantized weights
    deepspeed --module benchmarks.collectives times the collectives of a step
    torchrun -m benchmarks.copy_engines       times matrix products while a unit moves by NCCL or by copy engines
    python -m benchmarks.lengths              measures long sequences on one GPU, in several systems
    deepspeed --module benchmarks.exchanges   times steps with experts or sequences that lie on several ranks
    python -m benchmarks.idle TRACE           says where a traced step idles, and what communication slows
    python -m benchmarks.scale                computes what communication costs a step on many ranks

The files, each of which imports only from those below it:

==============  ========================================================================================
compare.py      the command: which systems in which cases; writes the results
lengths.py      the command that measures long sequences: which systems, at which lengths
processes.py    starts the rank processes of one run under DeepSpeed's launcher, and ends them
pictures.py     draws memory through one step, and losses
host.py         the command that times the parts of a step on the host
parts.py        the command that times the parts of a step on one device
packages.py     the command that times steps with other packages
collectives.py  the command that times collectives
copy_engines.py the command that times products beside collectives and beside copy engines
exchanges.py    the command that times steps in which ranks exchange tokens
idle.py         the command that reads a trace
scale.py        the command that computes what communication costs
messages.py     lists what a step sends on any number of ranks, without these ranks
measure.py      what each rank process runs: trains one system and collects its figures
tables.py       tables of one result and of several side by side, and the command that prints a line for each run
results.py      what a result holds, and how to read figures from it
steps.py        the training steps of a rank: to take their times, to read memory, to profile
systems.py      how DeepSpeed and FSDP2 train: forward, backward and step behind the same calls
tiles.py        inputs of layers on the host, MLPs and losses in tiles
settings.py     the settings of one run, and their command line
workload.py     the model and the batches
flops.py        the floating-point operations of a step, and the peaks of devices
recorder.py     records memory through one step: the code of this fork's compile.memory_picture
devices.py      whether to use GPUs, and which
==============  ========================================================================================
"""

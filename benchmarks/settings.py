# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The settings of one run, and the command line that gives them."""

import argparse
import dataclasses
import os
from typing import NamedTuple

from .workload import RECIPES, SHAPES

# "deepcompile" and "zero" are the installed DeepSpeed with and without DeepCompile.
SYSTEMS = ("deepcompile", "zero", "fsdp2-kept", "fsdp2-resharded", "fsdp2-fp32-reduce", "ddp")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What one run trains, and how.

    Attributes:
        system: one of ``SYSTEMS``. Of FSDP2, "kept" keeps parameters gathered from a step's first forward to its last
            backward, "resharded" gathers them for each forward and again for each backward, and "fp32-reduce" also
            reduces gradients in fp32, which is torchtitan's default.
        shape: a key of ``workload.SHAPES``.
        layers: number of layers; None: as many as the shape has.
        dtype: of parameters and activations, "bf16" (with fp32 master weights) or "fp32".
        seq: tokens in a sequence.
        micro_batch: sequences in a micro-batch, on each rank.
        accumulation: micro-batches in an optimizer step.
        stage: of ZeRO, 1 or 2, or 3 without DeepCompile. With 2, FSDP2 reduces gradients in every micro-batch; with 1,
            in the last one only.
        checkpoint: whether every layer keeps only its input and the backward computes the rest again.
        inputs_on_host: what keeps the inputs of checkpointed layers on the host: "deepspeed", its
            ``CheckpointHiddenStatesOffload``, or "torch", ``save_on_cpu`` around each layer, as transformers does it;
            None: they stay on the device.
        mlp_tiles: into how many tiles DeepSpeed's ``TiledMLP`` cuts the tokens of an MLP; None: it is computed whole.
        loss_tiles: into how many tiles of tokens the head and the loss are cut, by DeepSpeed's
            ``sequence_tiled_compute``, and in FSDP2 by checkpointing each tile; None: as the system does it.
        float8: the recipe of torchao by which the linear layers of the blocks multiply in float8, one of
            ``workload.RECIPES``; None: they multiply in ``dtype``.
        float8_gather: whether FSDP2 casts its shards to float8 before it gathers them, with scales that are computed
            after each step. Only for the recipe "tensorwise".
        lora: the rank of adapters at every linear layer of the blocks; all else is frozen. None: all is trained.
        shard: which parameters of the blocks DeepCompile shards, "frozen" or "all" (``shard_parameters``); None: none.
        keep: how many blocks stay whole until their backward, or "fit" (``keep_gathered``); None: as by default.
        model_on: where the model is before the system has it: on the "device", on the "host", or on the "meta" device
            on all ranks but the first, and there on the host.
        one_graph: whether DeepCompile compiles the whole model as one graph instead of block by block.
        overlap_gather: whether DeepCompile gathers parameters beside the next forward; None: as by default
            (``overlap_param_gather``).
        copy_engines: whether copy engines carry DeepCompile's gradients and parameters; None: where they can.
        chunked_loss: whether DeepCompile computes the loss in chunks of logits, "on", "off" or by "size"; None: as by
            default (``chunked_loss``).
        activation_budget: how much of their activations DeepCompile's graphs may keep, from 0 to 1; None: as by
            default (``activation_memory_budget``).
        offload: whether masters, optimizer states and the step are on the host.
        adam: torch's implementation of AdamW, "foreach" or "fused". With ``offload``, ZeRO has DeepSpeed's Adam for
            CPUs and FSDP2 has torch's fused one.
        optimizer: "adamw", or "muon" for DeepSpeed's own with its fused Adam for embeddings, head and vectors. Muon
            trains without clipping, which would divide its learning rates by the norm of its updates.
        states: the format of AdamW's states, None for fp32 or "8bit": ``compile.optimizer_states`` of this fork,
            bitsandbytes' AdamW8bit with ZeRO without DeepCompile, and torchao's AdamW8bit with FSDP2.
        remainders: whether DeepCompile keeps master weights as remainders (``store_param_remainders``).
        backend: "inductor", or "eager" for graphs without generated code.
        bucket: ZeRO's ``reduce_bucket_size``, in elements. FSDP2 reduces whole blocks instead.
        learning_rate: of AdamW.
        steps: optimizer steps whose times are taken, among them the first one, which compiles.
        warm: how many of these come before the steps that count for the median.
        brief: whether memory is read in the last of these steps instead of one of its own, and no timeline is
            recorded: for steps of many seconds.
    """

    system: str = "deepcompile"
    shape: str = "tiny"
    layers: int | None = None
    dtype: str = "bf16"
    seq: int = 4096
    micro_batch: int = 1
    accumulation: int = 1
    stage: int = 1
    checkpoint: bool = False
    inputs_on_host: str | None = None
    mlp_tiles: int | None = None
    loss_tiles: int | None = None
    float8: str | None = None
    float8_gather: bool = False
    lora: int | None = None
    shard: str | None = None
    keep: int | str | None = None
    model_on: str = "device"
    one_graph: bool = False
    overlap_gather: bool | None = None
    copy_engines: bool | None = None
    chunked_loss: str | None = None
    activation_budget: float | None = None
    offload: bool = False
    adam: str = "foreach"
    optimizer: str = "adamw"
    states: str | None = None
    remainders: bool = False
    backend: str = "inductor"
    bucket: int = 500_000_000
    learning_rate: float = 1e-5
    steps: int = 31
    warm: int = 10
    brief: bool = False

    @property
    def is_fsdp2(self) -> bool:
        return self.system.startswith("fsdp2")


class CommandLine(NamedTuple):
    """What the command line of benchmarks.measure asks for.

    Attributes:
        settings: of the run.
        json: the file for the result, or None.
        trace: the file for a trace of one step, or None.
    """

    settings: Settings
    json: str | None
    trace: str | None


def _blocks(text):
    return text if text == "fit" else int(text)


def parse_command_line(description: str) -> CommandLine:
    """Reads the command line of benchmarks.measure; ends the process with a sentence if something is wrong with it."""
    parser = argparse.ArgumentParser(prog="deepspeed --module benchmarks.measure", description=description)
    parser.add_argument(
        "--system",
        choices=SYSTEMS,
        help="zero: DeepSpeed without DeepCompile. FSDP2 keeps parameters from forward to backward, or reshards them, "
        "or reshards them and reduces gradients in fp32",
    )
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--layers", type=int, help="fewer or more than the shape has")
    parser.add_argument("--dtype", choices=("bf16", "fp32"))
    parser.add_argument("--seq", type=int, help="tokens in a sequence")
    parser.add_argument("--micro-batch", type=int, help="sequences per process")
    parser.add_argument("--accumulation", type=int, help="micro-batches in a step")
    parser.add_argument(
        "--stage", type=int, choices=(1, 2, 3), help="of ZeRO; 2: FSDP2 reduces in every micro-batch too"
    )
    parser.add_argument("--checkpoint", action="store_true", default=None, help="activations of every layer")
    parser.add_argument(
        "--inputs-on-host",
        choices=("deepspeed", "torch"),
        help="of checkpointed layers: by DeepSpeed's CheckpointHiddenStatesOffload, or by torch's save_on_cpu",
    )
    parser.add_argument("--mlp-tiles", type=int, metavar="N", help="cut the tokens of each MLP into N tiles")
    parser.add_argument("--loss-tiles", type=int, metavar="N", help="cut the tokens of head and loss into N tiles")
    parser.add_argument("--float8", choices=RECIPES, help="torchao's recipe for the linear layers of the blocks")
    parser.add_argument(
        "--float8-gather", action="store_true", default=None, help="FSDP2 gathers weights in float8, tensorwise only"
    )
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank and freeze all else")
    parser.add_argument("--shard", choices=("frozen", "all"), help="DeepCompile's shard_parameters")
    parser.add_argument("--keep", type=_blocks, help="DeepCompile's keep_gathered: a number of blocks, or fit")
    parser.add_argument(
        "--model-on",
        choices=("device", "host", "meta"),
        help="where the model is before DeepSpeed has it; meta: on the host of the first rank, on others on meta",
    )
    parser.add_argument(
        "--one-graph", action="store_true", default=None, help="DeepCompile with one graph for the whole model"
    )
    parser.add_argument(
        "--overlap-gather", action=argparse.BooleanOptionalAction, help="DeepCompile's overlap_param_gather"
    )
    parser.add_argument("--copy-engines", action=argparse.BooleanOptionalAction, help="DeepCompile's copy_engines")
    parser.add_argument("--chunked-loss", choices=("on", "off", "size"), help="DeepCompile's chunked_loss")
    parser.add_argument(
        "--activation-budget", type=float, metavar="PART", help="DeepCompile's activation_memory_budget, from 0 to 1"
    )
    parser.add_argument(
        "--offload", action="store_true", default=None, help="masters, optimizer states and the step on the host"
    )
    parser.add_argument("--adam", choices=("foreach", "fused"), help="which implementation of torch's AdamW")
    parser.add_argument("--optimizer", choices=("adamw", "muon"), help="muon: DeepSpeed's own, without clipping")
    parser.add_argument("--states", choices=("8bit",), help="the format of AdamW's states; fp32 if not given")
    parser.add_argument("--remainders", action="store_true", default=None, help="DeepCompile's store_param_remainders")
    parser.add_argument("--backend", choices=("inductor", "eager"), help="eager: graphs, but no generated code")
    parser.add_argument("--bucket", type=int, help="ZeRO's reduce_bucket_size, elements; FSDP2 sends blocks")
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--steps", type=int, help="steps in all, the compiling ones included")
    parser.add_argument("--warm", type=int, help="steps before those whose times count")
    parser.add_argument(
        "--brief",
        action="store_true",
        default=None,
        help="read memory in the last step, and record no timeline",
    )
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    parser.add_argument("--trace", metavar="FILE", help="write a trace of one step of rank 0 there, for Perfetto")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # given by the launcher
    # Arguments that were not given keep the defaults of Settings.
    arguments = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    arguments.pop("local_rank", None)
    files = [arguments.pop(name, None) for name in ("json", "trace")]
    settings = Settings(**arguments)
    positive = ("layers", "seq", "micro_batch", "accumulation", "bucket", "steps", "lora", "mlp_tiles", "loss_tiles")
    for name in positive:
        if getattr(settings, name) is not None and getattr(settings, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if not 1 <= settings.warm < settings.steps:
        parser.error("--warm must be at least 1 and less than --steps, so that a step is left to be timed")
    if settings.inputs_on_host and not settings.checkpoint:
        parser.error("--inputs-on-host goes with --checkpoint")
    if settings.mlp_tiles and (settings.is_fsdp2 or settings.system == "ddp"):
        parser.error("--mlp-tiles goes with DeepSpeed, whose TiledMLP tells ZeRO which tile is the last")
    if settings.loss_tiles and (settings.chunked_loss or settings.system == "ddp"):
        parser.error("--loss-tiles goes with DeepSpeed and FSDP2, and without --chunked-loss")
    of_ours = (settings.overlap_gather, settings.copy_engines)
    if (settings.one_graph or of_ours != (None, None)) and settings.system != "deepcompile":
        parser.error("--one-graph, --overlap-gather and --copy-engines go with --system deepcompile")
    if settings.shard and settings.system != "deepcompile":
        parser.error("--shard goes with --system deepcompile")
    if settings.keep is not None and not settings.shard:
        parser.error("--keep goes with --shard")
    if settings.shard == "frozen" and not settings.lora:
        parser.error("--shard frozen goes with --lora; without it no parameter is frozen")
    if settings.shard == "all" and (settings.overlap_gather or settings.one_graph):
        parser.error("--shard all goes with neither --overlap-gather nor --one-graph")
    if settings.model_on != "device" and (settings.is_fsdp2 or settings.system == "ddp" or settings.float8):
        parser.error("--model-on goes with DeepSpeed, without --float8")
    if settings.model_on == "meta" and not settings.shard:
        parser.error("--model-on meta goes with --shard")
    if settings.stage == 3 and settings.system != "zero":
        parser.error("--stage 3 goes with --system zero")
    if settings.chunked_loss and settings.system != "deepcompile":
        parser.error("--chunked-loss goes with --system deepcompile")
    if settings.activation_budget is not None and settings.system != "deepcompile":
        parser.error("--activation-budget goes with --system deepcompile")
    if settings.activation_budget is not None and not 0 <= settings.activation_budget <= 1:
        parser.error("--activation-budget must be from 0 to 1")
    if settings.states and settings.offload:
        parser.error("--states 8bit is for states on the device; leave --offload out")
    if settings.remainders and (settings.system != "deepcompile" or settings.dtype != "bf16" or settings.offload):
        parser.error("--remainders goes with --system deepcompile and --dtype bf16, without --offload")
    if settings.optimizer == "muon" and (settings.is_fsdp2 or settings.offload or settings.states):
        parser.error("--optimizer muon goes with DeepSpeed, without --offload and --states")
    if settings.float8_gather and not (settings.is_fsdp2 and settings.float8 == "tensorwise"):
        parser.error("--float8-gather goes with FSDP2 and --float8 tensorwise")
    if settings.system == "ddp" and (settings.dtype, settings.accumulation, settings.offload) != ("fp32", 1, False):
        parser.error("--system ddp goes with --dtype fp32, and with neither --accumulation nor --offload")
    if settings.one_graph and settings.overlap_gather:
        parser.error("--overlap-gather needs the graphs of blocks; leave --one-graph out")
    if "RANK" not in os.environ:
        parser.error("start this with DeepSpeed's launcher: deepspeed --module benchmarks.measure")
    return CommandLine(settings, *files)

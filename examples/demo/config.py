# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What the demo trains, and its command line."""

import argparse
import dataclasses
import os

from deepspeed.accelerator import get_accelerator


@dataclasses.dataclass
class Config:
    """The defaults suit two CPU cores: 3.2 million parameters."""

    steps: int = 20  # optimizer steps: the first compiles, the last is watched instead of timed
    layers: int = 4
    hidden: int = 256
    head_dim: int = 64
    vocabulary: int = 256  # the text is read byte by byte
    seq: int = 128  # tokens
    micro_batch: int = 4  # sequences per process
    accumulation: int = 1  # micro-batches per step
    stage: int = 1  # of ZeRO
    backend: str = "inductor"
    dtype: str = "fp32"
    optimizer: str = "adamw"  # or "muon", which leaves embedding and vectors to an Adam
    learning_rate: float = 1e-3  # of Adam
    bucket: int = 500_000  # elements
    pictures: str = ""  # a folder for pictures of the third step's memory


# 0.6 billion parameters: the shape of Qwen3-0.6B.
ON_GPUS = dict(layers=28, hidden=1024, head_dim=128, vocabulary=151936, seq=2048, micro_batch=2, dtype="bf16")
ON_GPUS |= dict(learning_rate=3e-4, bucket=50_000_000)


def on_gpus():
    return get_accelerator().device_name() == "cuda"


def parse_arguments(description, text_length):
    """Returns the Config and the file for the results, or None; ends the program if something does not fit.

    Args:
        description: of the program.
        text_length: bytes of the text to train on.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, help="optimizer steps, at least 3")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--hidden", type=int, help="width of the model, a multiple of 128")
    parser.add_argument("--seq", type=int, help="tokens in a sequence")
    parser.add_argument("--stage", type=int, choices=(1, 2), help="of ZeRO")
    parser.add_argument("--accumulation", type=int, help="micro-batches in a step")
    parser.add_argument("--backend", choices=("inductor", "eager"), help="eager: graphs, but no generated code")
    parser.add_argument("--optimizer", choices=("adamw", "muon"), help="muon: DeepSpeed's own")
    dtype = parser.add_mutually_exclusive_group()
    dtype.add_argument("--bf16", dest="dtype", action="store_const", const="bf16")
    dtype.add_argument("--fp32", dest="dtype", action="store_const", const="fp32")
    parser.add_argument(
        "--pictures", metavar="FOLDER", help="draw the memory of the third step, below FOLDER/on and /off"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # given by the launcher
    arguments = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    arguments.pop("local_rank", None)
    file = arguments.pop("json", None)

    config = Config(**{**(ON_GPUS if on_gpus() else {}), **arguments})
    for wrong, sentence in (
        (config.steps < 3, "--steps must be at least 3: one compiles, one is timed and one is watched."),
        (config.layers < 1 or config.accumulation < 1, "--layers and --accumulation must be at least 1."),
        (config.hidden < 128 or config.hidden % 128, "--hidden must be a multiple of 128."),
        (not 2 <= config.seq < text_length, f"--seq must be between 2 and {text_length - 1}, as long as the text."),
        ("RANK" not in os.environ, "Start this with DeepSpeed's launcher: deepspeed examples/demo/train_qwen3.py"),
    ):
        if wrong:
            raise SystemExit(sentence)
    return config, file

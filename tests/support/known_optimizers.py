# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Optimizers that people train with: torch's whole list, and some of other packages, which need not be installed."""

import importlib
import importlib.metadata
from typing import Any, Dict, List, Mapping, NamedTuple, Optional

import torch

# How DeepCompile steps a partition.
ONE_PASS, RANGES, WHOLE = "in one pass", "in ranges", "whole"


class Known(NamedTuple):
    """An optimizer, and what is known of it under ZeRO-1/2, where it gets a flat partition for a parameter.

    Attributes:
        module: that has its class.
        name: of the class.
        settings: arguments of the class besides the parameters.
        package: the distribution to install.
        of_groups: settings that only a parameter group may have.
        stepped: how DeepCompile steps a large partition: ONE_PASS, RANGES or WHOLE.
        groups: parameter groups to train with. Trainers make two, for weight decay.
        like_plain: whether it trains as in a plain loop. One that looks at whole parameters does not: it finds no
            matrices, and its sums and norms are those of a partition.
        fails: a part of the error with which the first step fails without DeepCompile, or "" if it does not.
        refused: a part of the error with which DeepCompile refuses it, or "" if the first step fails there, too.
    """

    module: str
    name: str
    settings: Dict[str, Any]
    package: str = "torch"
    of_groups: Mapping[str, Any] = {}
    stepped: str = WHOLE
    groups: int = 2
    like_plain: bool = True
    fails: str = ""
    refused: str = ""

    @property
    def version(self) -> Optional[str]:
        """Of the package, or None if it is not installed."""
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return None

    def make(self, groups: List[Dict[str, Any]]) -> torch.optim.Optimizer:
        """Makes one for parameter groups, ready to train."""
        cls = getattr(importlib.import_module(self.module), self.name)
        optimizer = cls([{**group, **self.of_groups} for group in groups], **self.settings)
        if hasattr(optimizer, "train"):
            # That of schedulefree raises in step() otherwise.
            optimizer.train()
        return optimizer


def _of_torch(name, lr=0.01, **more):
    return Known("torch.optim", name, {"lr": lr, **more.pop("settings", {})}, **{"stepped": RANGES, **more})


def _low_rank(module, name, package, **more):
    of_groups = {"rank": 4, "update_proj_gap": 50, "scale": 1.0, "proj_type": "std", **more}
    return Known(module, name, {"lr": 0.01}, package, of_groups, fails="index out of range")


# With one row for each in the table of `make optimizers`.
KNOWN: Dict[str, Known] = {
    "Adam": _of_torch("Adam", stepped=ONE_PASS),
    "AdamW": _of_torch("AdamW", stepped=ONE_PASS),
    "Adamax": _of_torch("Adamax"),
    "NAdam": _of_torch("NAdam"),
    "RAdam": _of_torch("RAdam"),
    "RMSprop": _of_torch("RMSprop", 0.001),
    # DeepSpeed makes one group of several, and fails in the first step.
    "Adagrad": _of_torch("Adagrad", groups=1),
    "Adadelta": _of_torch("Adadelta", 1.0),
    "ASGD": _of_torch("ASGD", 0.1, settings={"t0": 2}),
    "Rprop": _of_torch("Rprop"),
    "SGD": _of_torch("SGD", 0.1, settings={"momentum": 0.9}),
    "Adafactor": _of_torch("Adafactor", stepped=WHOLE, like_plain=False),
    "LBFGS": _of_torch("LBFGS", groups=1, fails="missing 1 required positional argument: 'closure'"),
    "Muon": _of_torch("Muon", fails="must be a 2D matrix", refused="optimizer torch.optim.Muon needs whole matrices"),
    "SparseAdam": _of_torch("SparseAdam", fails="does not support dense gradients"),
    "AdamWScheduleFree": Known("schedulefree", "AdamWScheduleFree", {"lr": 0.01}, "schedulefree"),
    "RAdamScheduleFree": Known("schedulefree", "RAdamScheduleFree", {"lr": 0.01}, "schedulefree"),
    "SGDScheduleFree": Known("schedulefree", "SGDScheduleFree", {"lr": 0.1}, "schedulefree"),
    "Lion": Known("lion_pytorch", "Lion", {"lr": 0.001}, "lion-pytorch"),
    # It computes its rate from sums over its parameters, so each rank has a rate of its own.
    "Prodigy": Known("prodigyopt", "Prodigy", {"d0": 1e-3}, "prodigyopt", like_plain=False),
    "CAME": Known("came_pytorch", "CAME", {"lr": 0.01}, "came-pytorch", like_plain=False),
    "AdamW8bit of torchao": Known("torchao.optim", "AdamW8bit", {"lr": 0.01}, "torchao"),
    "AdamW4bit of torchao": Known("torchao.optim", "AdamW4bit", {"lr": 0.01}, "torchao"),
    "AdamWFp8 of torchao": Known("torchao.optim", "AdamWFp8", {"lr": 0.01}, "torchao"),
    "AdamW8bit of bitsandbytes": Known("bitsandbytes.optim", "AdamW8bit", {"lr": 0.01}, "bitsandbytes"),
    "Lion8bit of bitsandbytes": Known("bitsandbytes.optim", "Lion8bit", {"lr": 0.001}, "bitsandbytes"),
    "Adafactor of transformers": Known(
        "transformers", "Adafactor", {"lr": 0.01, "relative_step": False}, "transformers", like_plain=False
    ),
    "GaLoreAdamW": _low_rank("galore_torch", "GaLoreAdamW", "galore-torch"),
    "APOLLOAdamW": _low_rank("apollo_torch", "APOLLOAdamW", "apollo-torch", proj="random", scale_type="channel"),
}
# Each way of stepping and of failing, and each package.
IN_EVERY_RUN = (
    *("AdamW", "ASGD", "Rprop", "Adafactor", "Muon", "LBFGS", "AdamWScheduleFree", "RAdamScheduleFree", "Lion"),
    *(
        "Prodigy",
        "CAME",
        "AdamW8bit of torchao",
        "AdamW8bit of bitsandbytes",
        "Adafactor of transformers",
        "GaLoreAdamW",
    ),
    *("APOLLOAdamW",),
)

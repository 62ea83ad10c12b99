# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``compile.copy_engines`` cannot do, and says before anything is changed."""

from support.refusals import Refusal

SAYS = "compile.copy_engines cannot be honoured here: {}; set it to null or false"
# By the name under which docs/reference/options.md has them.
REFUSED = {
    "compile.copy_engines": Refusal(
        SAYS.format("only NVIDIA GPUs have the copy engines for it"),
        config={"compile": {"copy_engines": True}},
        amends={"copy_engines": None},
    ),
}

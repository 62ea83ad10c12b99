# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``compile.overlap_param_gather`` cannot do, and says before anything is changed."""

from support.refusals import Refusal

# By the name under which docs/reference/options.md has them.
REFUSED = {
    "compile.overlap_param_gather": Refusal(
        "compile.overlap_param_gather works on blocks, and the model is compiled as a "
        "whole, because no blocks repeat in FillsPartition; name its blocks' classes in compile.regional_compilation, "
        "or leave this out",
        config={"compile": {"overlap_param_gather": True}},
        amends={"regional_compilation": ["Linear"]},
    ),
}

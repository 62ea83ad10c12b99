# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``compile.shard_parameters`` cannot do, and says before anything is changed."""

from support.refusals import Refusal

# By the name under which docs/reference/options.md has them.
REFUSED = {
    "compile.shard_parameters": Refusal(
        "compile.shard_parameters works on blocks, and the model is compiled as a whole, "
        "because no blocks repeat in FillsPartition; name its blocks' classes in compile.regional_compilation, or "
        "leave this out",
        config={"compile": {"shard_parameters": "frozen"}},
        amends={"shard_parameters": None},
    ),
}

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``compile.regional_compilation`` cannot do, and says before anything is changed."""

from support.refusals import Refusal

# By the name under which docs/reference/options.md has them.
REFUSED = {
    "compile.regional_compilation": Refusal(
        "compile.regional_compilation=true found no blocks that repeat in FillsPartition; name their classes in a "
        "list, or set it to false",
        config={"compile": {"regional_compilation": True}},
        amends={"regional_compilation": ["Linear"]},
    ),
}

# The same option in other words.
ALSO_REFUSED = {
    "regional_compilation-unknown-class": Refusal(
        "compile.regional_compilation names ['Layer'], but FillsPartition has no such module outside of another "
        "block; use the names of its blocks' classes",
        config={"compile": {"regional_compilation": ["Linear", "Layer"]}},
        amends={"regional_compilation": ["Linear"]},
    ),
    "regional_compilation-fullgraph": Refusal(
        "compile_kwargs['fullgraph'] contradicts compile.regional_compilation, which makes a graph of every block; "
        "leave one of them out",
        config={"compile": {"regional_compilation": ["Linear"]}},
        arguments={"backend": "eager", "compile_kwargs": {"fullgraph": True}},
        amends={"regional_compilation": False},
    ),
}

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``setup.py`` changes in DeepSpeed: (file, name of the edit, anchor, replacement)."""

FX = "deepspeed/compile/fx.py"
RELEASE = "from deepspeed.compile.features.zero3.release import is_last_that_reduces"
EDITS = (
    (
        FX,
        "output of a graph",
        '    for v in graph.nodes:\n        if v.target == "output":\n            return v\n'
        '    raise ValueError("No output node found")\n',
        '    # By what it is: an input may be called "output".\n    return graph.output_node()\n',
    ),
    (
        FX,
        "graph that releases the buckets",
        "    backward_graph_ids = [g_id for g_id, needs_backward in graph_order if needs_backward]\n"
        "    return not backward_graph_ids or graph_id == backward_graph_ids[0]\n",
        f"    {RELEASE}\n    return is_last_that_reduces(graph_order, graph_id)\n",
    ),
)

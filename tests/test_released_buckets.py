# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Of several graphs, only the one that reduces last sends the bucket that is being filled."""

from test_graphs import backward_graphs

from support.training import Case


def test_the_first_of_several_graphs_releases(ranks):
    """Each graph would send what it has, in more and smaller messages."""
    for graphs, _ in ranks(2).run(backward_graphs, Case(model="SeveralGraphs")):
        reducing = [graph.graph_id for graph in graphs if graph.reductions]
        releasing = [graph.graph_id for graph in graphs if any(end.releases for end in graph.ends)]
        assert len(reducing) > 1 and releasing == [min(reducing)]

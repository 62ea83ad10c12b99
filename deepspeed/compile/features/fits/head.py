# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The memory of a head and its loss as the part ``loss`` has them: in chunks, or in graphs of their own."""

import copy
from typing import Optional, Tuple

from ..loss.chunked_loss import chunks
from ..loss.find_loss import MANY_LOGITS
from ..loss.own_graph import LARGE_NUMEL
from .graphs import TracedGraphs
from .liveness import Moment

_FP32 = 4


def as_trained(graphs: TracedGraphs, chunked_loss: Optional[bool], unused: int) -> Tuple[TracedGraphs, int]:
    """Gives the graphs around the blocks the backward that training has.

    Args:
        graphs: of what is around the blocks.
        chunked_loss: ``compile.chunked_loss``.
        unused: bytes of what the model returns beside the loss and what has gradients.

    Returns:
        The graphs, and the bytes of the logits, or 0 if there are none.
    """
    product = graphs.product
    if not graphs.backward:
        return graphs, 0
    numel = product.rows * product.columns if product is not None else 0
    logits = numel * product.element_size if product is not None else 0
    graphs = copy.copy(graphs)
    if chunked_loss or (chunked_loss is None and numel >= MANY_LOGITS):
        graphs.backward = _in_chunks(graphs)
    elif unused and numel < LARGE_NUMEL:
        # The graph is not cut, so autograd passes zeros for the gradients of what the caller does not use.
        graphs.backward = [
            each._replace(most=each.most + unused, after=each.after + unused) for each in graphs.backward
        ]
        graphs.backward[-1] = graphs.backward[-1]._replace(after=graphs.backward[-1].after - unused)
    return graphs, logits


def _in_chunks(graphs):
    """Returns the life of the backward in ``loss/chunked_loss.py``."""
    product = graphs.product
    hidden, rows = product.rows * product.inner, chunks(product.rows, product.columns)[0]
    chunk = product.rows * (rows.stop - rows.start) * product.element_size
    is_trained = any(each.gradient == product.parameter for each in graphs.backward)
    weight = product.inner * product.columns * product.element_size if is_trained else 0
    # The sum over chunks is in fp32.
    most = chunk + _FP32 * hidden + weight
    rest = [each._replace(most=min(each.most, most)) for each in graphs.backward if each.gradient is not None]
    rest = [each for each in rest if each.gradient != product.parameter]
    complete = Moment(most, _FP32 * hidden, product.parameter if is_trained else None)
    return [complete, *rest, Moment(_FP32 * hidden, -sum(each.bytes for each in graphs.saved))]

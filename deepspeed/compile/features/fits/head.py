# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The memory of a head and its loss in chunks, which are code of the part ``loss`` and no graph."""

import copy
from typing import Optional, Tuple

from ..loss.chunked_loss import chunks
from ..loss.find_loss import MANY_LOGITS
from .graphs import Graphs
from .liveness import Moment

_FP32 = 4


def chunked(graphs: Graphs, option: Optional[bool]) -> Tuple[Graphs, int]:
    """Gives the graphs around the blocks the backward of :mod:`..loss.chunked_loss` if training would have that one.

    Args:
        graphs: of what is around the blocks.
        option: ``compile.chunked_loss``.

    Returns:
        The graphs, and the bytes of the logits, or 0 if there are none.
    """
    product = graphs.product
    if product is None or not graphs.backward:
        return graphs, 0
    numel = product.rows * product.columns
    if option or (option is None and numel >= MANY_LOGITS):
        hidden, rows = product.rows * product.inner, chunks(product.rows, product.columns)[0]
        chunk = product.rows * (rows.stop - rows.start) * product.element_size
        weight = product.inner * product.columns * product.element_size
        # The sum over chunks is in fp32.
        complete = Moment(chunk + _FP32 * hidden + weight, _FP32 * hidden, product.parameter)
        rest = [each for each in graphs.backward if each.gradient not in (None, product.parameter)]
        end = -sum(each.bytes for each in graphs.saved)
        rest = [each._replace(most=min(each.most, complete.most)) for each in rest]
        graphs = copy.copy(graphs)
        graphs.backward = [complete, *rest, Moment(_FP32 * hidden, end)]
    return graphs, numel * product.element_size

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Says in Dynamo's own words why a frame is compiled again, and where the graph of a frame ends too early."""

import contextlib
import re
from pathlib import Path

import torch
from torch.fx import GraphModule

# Matches Dynamo's names of the calls that block_calls.py gives to modules.
_OWN_CALL = re.compile(r"<function (Module|BlockParent|Block)Call\.")
_TORCH = str(Path(torch.__file__).parent)


def failed_guard() -> str:
    """Returns the guard whose failure makes Dynamo compile a frame again, or "" if none is known.

    For example ``self.count == 3  # x = x * self.count  # model.py:12 in forward``.
    """
    with _what_dynamo_lacks():
        reason = torch._dynamo.utils.get_metrics_context()._metrics.get("recompile_reason") or ""
        # It begins with Dynamo's number of the code that did not fit, and may go on with a stack trace.
        _, _, guard = reason.partition("\n")[0].partition(": ")
        return " ".join(guard.split())
    return ""


def graph_break(gm: GraphModule) -> str:
    """Returns file, line and cause if Dynamo ended a frame's graph in the middle of the frame, and otherwise ""."""
    with _what_dynamo_lacks():
        return _described(gm.compile_subgraph_reason)
    return ""


def _what_dynamo_lacks():
    """Context that ignores attributes of Dynamo that this torch lacks: they shape warnings only."""
    return contextlib.suppress(AttributeError)


def _described(reason):
    # Dynamo must end a graph at a module with a Call.
    if not reason.graph_break or _OWN_CALL.search(reason.reason):
        return ""
    stack = [frame for frame in reason.user_stack if not frame.filename.startswith(_TORCH)] or reason.user_stack
    lines = [line.strip() for line in reason.reason.splitlines()]
    explained = [line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")]
    cause = (explained or lines or [""])[0]
    return f"{stack[-1].filename}:{stack[-1].lineno} ({cause.rstrip('.')})" if stack else cause

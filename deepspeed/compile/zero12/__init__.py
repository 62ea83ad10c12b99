# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""DeepCompile for ZeRO-1 and ZeRO-2. What users import is here; ``docs/architecture.md`` has a map of the rest."""

from typing import Dict

from .optimizer import is_attached

__all__ = ["gradient_counters", "reset_gradient_counters", "wait_for_parameters"]


def gradient_counters(engine) -> Dict[str, int]:
    """Returns what an engine's reducer holds on this rank.

    Bytes: ``bound`` of gradient targets, ``pending`` of gradients on their way to their owners, ``bucket`` of memory
    allocated for those, ``unreduced`` of gradients kept between the micro-batches of ZeRO-1 or until the last of
    several contributions to a parameter has come, and ``peak_...`` for the highest of each. Counts: ``registered``
    parameters; gradients received ``from_graphs`` that reduce and ``from_autograd``, for code that was not compiled;
    ``buckets_sent``, and ``messages_sent`` in them, each to one owner. Peaks, gradients, buckets and messages count
    since ``reset_gradient_counters()``.

    Raises:
        ValueError: if the engine has not been compiled with DeepCompile ZeRO-1/2.
    """
    return _reducer_of(engine).counters()


def reset_gradient_counters(engine) -> None:
    """Makes the peaks of :func:`gradient_counters` start from what is held now, and its other counts from zero."""
    _reducer_of(engine).reset_counters()


def wait_for_parameters(engine) -> None:
    """Makes every parameter of an engine current: whatever the current stream reads from now on has its new value.

    Needed before parameters are read or written directly between ``engine.step()`` and the next forward, and only
    with ``compile.overlap_param_gather``; without that option this does nothing. Does not wait for the device.
    """
    if is_attached(engine.optimizer):
        engine.optimizer._zero12.gather.wait_all()


def _reducer_of(engine):
    if not is_attached(engine.optimizer):
        raise ValueError(
            "gradient counters need an engine on which engine.compile() has set up DeepCompile ZeRO-1 or "
            "ZeRO-2, and which has not been destroyed"
        )
    return engine.optimizer._zero12.reducer

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""DeepCompile for ZeRO-1 and ZeRO-2: the functions for users. ``docs/internals/architecture.md`` maps the rest."""

from typing import TYPE_CHECKING, Dict

from .engine.state import state_of
from .parameter.carrier import mapped_memory

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

__all__ = ["gradient_counters", "mapped_memory", "reset_gradient_counters", "wait_for_parameters"]


def gradient_counters(engine: "DeepSpeedEngine") -> Dict[str, int]:
    """Returns the counters of an engine's reducer on this rank: name -> value.

    Bytes that the reducer holds now. With the prefix ``peak_``, the most bytes since ``reset_gradient_counters()``:

    - ``bound``: gradient targets on the device, also while ``engine.offload_states()`` has moved them to the host.
    - ``on_host``: gradient targets in host memory, if the optimizer is there.
    - ``pending``: gradients that wait in a bucket or are being reduced.
    - ``bucket``: memory that was allocated for pending gradients.
    - ``unreduced``: gradients that stay on this rank, between the micro-batches of ZeRO-1 or until their turn comes.

    Numbers since ``reset_gradient_counters()``, except the first:

    - ``registered``: registered parameters.
    - ``from_graphs``: gradients received from graphs that reduce.
    - ``from_autograd``: gradients received from code that was not compiled.
    - ``out_of_turn``: gradients that came before their turn or after it.
    - ``buckets_sent``: buckets.
    - ``messages_sent``: messages in these buckets, each one reduction in which every rank gets its shards.

    Raises:
        ValueError: if the engine has not been compiled with DeepCompile ZeRO-1/2.
    """
    return _reducer_of(engine).counters()


def reset_gradient_counters(engine: "DeepSpeedEngine") -> None:
    """Restarts the peaks of :func:`gradient_counters` from the current bytes, and the other numbers from zero.

    Raises:
        ValueError: if the engine has not been compiled with DeepCompile ZeRO-1/2.
    """
    _reducer_of(engine).reset_counters()


def wait_for_parameters(engine: "DeepSpeedEngine") -> None:
    """Makes the current stream wait for every updated parameter of an engine. The host does not wait for the device.

    Code that uses a parameter waits by itself. ``docs/reference/options.md`` lists what does not.
    """
    deepcompile = state_of(engine)
    if deepcompile is not None:
        deepcompile.gather.wait_all()


def _reducer_of(engine):
    deepcompile = state_of(engine)
    if deepcompile is None:
        raise ValueError(
            "gradient counters need an engine on which engine.compile() has set up DeepCompile ZeRO-1 or "
            "ZeRO-2, and which has not been destroyed"
        )
    return deepcompile.reducer

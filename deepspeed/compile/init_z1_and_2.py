# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The entry of DeepCompile for ZeRO-1 and ZeRO-2, which the base's ``engine.compile()`` calls."""

from .zero12.engine import compile_engine


def init_z1_and_2(engine, backend, compile_config, compile_kwargs, schedule=None, use_z2=False):
    """Calls ``compile_engine()``, which prepares an engine and returns the backend that compiles its module."""
    return compile_engine(engine, backend, compile_config, compile_kwargs, schedule, stage=2 if use_z2 else 1)

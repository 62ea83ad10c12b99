# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Entry of DeepCompile for ZeRO-1 and ZeRO-2, called by ``engine.compile()`` of the base."""

from .zero12.engine import compile_engine


def init_z1_and_2(engine, backend, compile_config, compile_kwargs, schedule=None, use_z2=False):
    """Prepares an engine and returns the backend with which its module is to be compiled: ``compile_engine()``."""
    return compile_engine(engine, backend, compile_config, compile_kwargs, schedule, stage=2 if use_z2 else 1)

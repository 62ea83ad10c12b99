# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Builders of DeepCompile's native code: this fork's for ZeRO-1/2, the base's for ZeRO-3.

Both define torch operators and both serve only their own stages, so they are separate modules, built
when first used (or at installation with ``DS_BUILD_DEEP_COMPILE=1``, ``DS_BUILD_DEEP_COMPILE_ZERO3=1``).
"""

import os

from .builder import CUDAOpBuilder, OpBuilder


class DeepCompileBuilder(OpBuilder):
    """Builds ``csrc/compile``: plain C++ on ATen and c10d, the same on CPU and CUDA."""

    BUILD_VAR = "DS_BUILD_DEEP_COMPILE"
    NAME = "dc"

    def __init__(self):
        super().__init__(name=self.NAME)

    def absolute_name(self):
        return f"deepspeed.ops.{self.NAME}_op"

    def sources(self):
        return [f"csrc/compile/{name}.cpp" for name in ("reducer", "agreement", "registry", "ops", "bindings")]

    def include_paths(self):
        return ["csrc/includes"]

    def cxx_args(self):
        return ["-O2", "-g0"]

    def load_reducer(self):
        """Builds (at first use) and returns the module that holds ``Reducer``."""
        return super().load(verbose=False)

    def load(self, verbose=False):
        """Returns the handle that the base's callers expect of ``get_deepcompile_handle()``."""
        from deepspeed.compile.native import DeepCompileHandle

        return DeepCompileHandle()


class DeepCompileZero3Builder(CUDAOpBuilder):
    """Builds ``csrc/compile_zero3``: the base's native code, unchanged, for ZeRO-3."""

    BUILD_VAR = "DS_BUILD_DEEP_COMPILE_ZERO3"
    NAME = "dc_zero3"

    def __init__(self):
        super().__init__(name=self.NAME)

    def absolute_name(self):
        return f"deepspeed.ops.{self.NAME}_op"

    def sources(self):
        folder = "csrc/compile_zero3"
        return [f"{folder}/{name}.cpp" for name in ("deepcompile", "init", "util", "z1", "z2", "z3")]

    def include_paths(self):
        import torch.utils.cpp_extension as cpp_extension

        toolkit = cpp_extension.ROCM_HOME if self.is_rocm_pytorch() else cpp_extension.CUDA_HOME
        headers = [os.path.join(toolkit, "include")] if toolkit and not self.build_for_cpu else []
        # The base's own deepcompile.h lies beside its sources and is found before this fork's.
        return ["csrc/compile_zero3", "csrc/includes", *headers]

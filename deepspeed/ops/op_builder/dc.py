# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
# Names of DeepCompileBuilder, of its methods and of its module are those of the base's dc.py, which is
# Copyright (c) Microsoft Corporation.
# SPDX-License-Identifier: Apache-2.0
"""Builders of DeepCompile's native code: this fork's for ZeRO-1/2, the base's for ZeRO-3.

Each builder builds a module with its own torch operators, which serves only its own stages. A module is built when
first used, or at installation with ``DS_BUILD_DEEP_COMPILE=1`` or ``DS_BUILD_DEEP_COMPILE_ZERO3=1``.
"""

import sysconfig
import tempfile
from pathlib import Path
from typing import Any, List

# Import the file and not its class: DeepSpeed takes each name here that ends with Builder for another operator. Of the
# two classes called DeepCompileBuilder, DeepSpeed takes the one here, because it reads dc.py before dc_base.py.
from . import build_folder, dc_base
from .builder import OpBuilder

# Where setup.py keeps the base's native code.
ZERO3_FOLDER = "csrc/compile_zero3"


class DeepCompileBuilder(OpBuilder):
    """Builds ``csrc/compile``: plain C++ on ATen and c10d, the same on CPU and CUDA."""

    BUILD_VAR = "DS_BUILD_DEEP_COMPILE"
    NAME = "dc"

    def __init__(self):
        super().__init__(name=self.NAME)

    def absolute_name(self) -> str:
        return f"deepspeed.ops.{self.NAME}_op"

    def sources(self) -> List[str]:
        return ["csrc/compile/all.cpp"]

    def include_paths(self) -> List[str]:
        return ["csrc/includes"]

    def cxx_args(self) -> List[str]:
        return ["-O2", "-g0"]

    def jit_load(self, verbose: bool = True) -> Any:
        """Called by the base unless the module was built at installation."""
        self._loaded_ops[self.name] = module = build_folder.load(**self._build(), verbose=verbose)
        return module

    def _build(self):
        """Returns the arguments of the build. The base's ``jit_load()`` would look for flags of CUDA too."""
        (source,), (headers,) = self.sources(), self.include_paths()
        return {
            "name": self.NAME,
            "sources": [str(self.deepspeed_src_path(source))],
            "extra_include_paths": [str(self.deepspeed_src_path(headers))],
            "extra_cflags": [*self.cxx_args(), "-UC10_USE_GLOG"],
        }

    def is_built(self) -> bool:
        """Whether the native module need not be compiled: it was at installation, or at an earlier use."""
        if installed := self._torch_of_installed():
            # DeepSpeed loads what was installed with this torch, and builds no other.
            return installed == self._torch()
        try:
            return bool(build_folder.name_of_built(build_folder.folder_of(**self._build())))
        except (OSError, ImportError):
            return False

    def _torch_of_installed(self):
        """Returns the release of torch for which the installation built the module, or "" if it built none."""
        from deepspeed.accelerator import get_accelerator
        from deepspeed.git_version_info import accelerator_name, installed_ops, torch_info

        installed = installed_ops.get(self.NAME, False) and accelerator_name == get_accelerator()._name
        return torch_info["version"] if installed else ""

    def _torch(self):
        # The base's setup.py imports this file where there may be no torch.
        import torch

        return ".".join(torch.__version__.split(".")[:2])

    def _unwritable(self):
        """Returns why the build's folder cannot be written, or "" if it can."""
        try:
            with tempfile.TemporaryDirectory(dir=build_folder.folder_of(**self._build())):
                return ""
        except OSError as error:
            return str(error)

    def lacking(self) -> str:
        """Returns the missing requirements of the build, and how to install them; "" if the module is built."""
        from torch.utils import cpp_extension

        if self.is_built():
            return ""
        if installed := self._torch_of_installed():
            return f"an installation with torch {self._torch()}: it has native code for torch {installed}"
        # Torch looks there too, whatever the default scheme of paths is.
        header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
        no_compiler, unwritable = build_folder.without_compiler(), self._unwritable()
        needs = {
            no_compiler: not no_compiler,
            f"a folder for native code that it can write ({unwritable}; name one in TORCH_EXTENSIONS_DIR)": (
                not unwritable
            ),
            "ninja (`pip install ninja`, and the environment's bin in PATH)": cpp_extension.is_ninja_available(),
            f"Python's headers (there is no {header}; `apt-get install python3-dev`)": header.is_file(),
        }
        return " and ".join(need for need, found in needs.items() if not found)

    def load_reducer(self) -> Any:
        """Returns the native module that holds ``Reducer``, built at first use."""
        return super().load(verbose=False)

    def load(self, verbose: bool = False) -> "DeepCompileHandle":
        """Returns the handle that the base's callers expect of ``get_deepcompile_handle()``."""
        return DeepCompileHandle()


class DeepCompileZero3Builder(dc_base.DeepCompileBuilder):
    """Builds ``csrc/compile_zero3``: the base's native code, unchanged, for ZeRO-3."""

    BUILD_VAR = "DS_BUILD_DEEP_COMPILE_ZERO3"
    NAME = "dc_zero3"

    def sources(self) -> List[str]:
        return [source.replace("csrc/compile/", f"{ZERO3_FOLDER}/") for source in super().sources()]

    def include_paths(self) -> List[str]:
        # The base's own deepcompile.h lies beside its sources and is found before this fork's.
        return [ZERO3_FOLDER, *(path for path in super().include_paths() if path != "csrc/compile")]


class DeepCompileHandle:
    """The result of ``deepspeed.compile.util.get_deepcompile_handle()`` for the base's code.

    The base calls ``start_backward()`` in all stages. Every other call belongs to ZeRO-3, and the first of these calls
    builds and loads ZeRO-3's native module. ZeRO-1/2 keeps its state in reducers and needs no call.
    """

    def __init__(self):
        self._zero3 = None

    def start_backward(self, is_gradient_accumulation_boundary: bool) -> None:
        """Called by the base when a backward begins. Does nothing unless the native module of ZeRO-3 is loaded."""
        if self._zero3 is not None:
            self._zero3.start_backward(is_gradient_accumulation_boundary)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self._zero3 is None:
            self._zero3 = DeepCompileZero3Builder().load()
        return getattr(self._zero3, name)

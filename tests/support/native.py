# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""A folder that looks as if native code had been built there."""

from deepspeed.ops.op_builder import build_folder
from deepspeed.ops.op_builder.dc import DeepCompileBuilder


def look_built():
    """Writes files into ``TORCH_EXTENSIONS_DIR`` by which the native code seems to be built."""
    folder = build_folder.folder_of(**DeepCompileBuilder()._build())
    (folder / "dc.so").write_text("")
    (folder / "built").write_text("dc")

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""A folder that looks as if native code had been built there."""

from deepspeed.ops.op_builder.dc import DeepCompileBuilder


def look_built(extensions):
    """Writes files into a folder for ``TORCH_EXTENSIONS_DIR`` by which the native code seems to be current."""
    folder, builder = extensions / "dc", DeepCompileBuilder()
    folder.mkdir(exist_ok=True)
    (folder / "build.ninja").write_text("\n".join(builder.deepspeed_src_path(each) for each in builder.sources()))
    # Newer than every source.
    (folder / "dc.so").write_text("")

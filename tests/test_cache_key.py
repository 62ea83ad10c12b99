# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The keys of torch's caches change with the source that shapes generated code."""

from pathlib import Path
from unittest import mock

import pytest

from deepspeed.compile.zero12.graph.backend import cache_key


@pytest.mark.quick
@pytest.mark.parametrize("name", ["reductions.py", "split.py", "lowering.py", "chunked_loss.py", "native.py", "fx.py"])
def test_source_that_was_edited(name):
    """Generated code of the source before would be used, and would reduce as that source did."""
    read = Path.read_bytes
    before = cache_key.__wrapped__()
    with mock.patch.object(Path, "read_bytes", lambda path: read(path) + b"#" * (path.name == name)):
        assert cache_key.__wrapped__() != before

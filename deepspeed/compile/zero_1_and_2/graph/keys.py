# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""This fork's share in the keys of torch's caches, so that the caches return no code of another version."""

import functools
import hashlib
from pathlib import Path


@functools.cache
def hash_of_source(*paths: Path) -> str:
    """Hashes files, and the Python files of folders."""
    files = [file for path in paths for file in (sorted(path.glob("*.py")) if path.is_dir() else [path])]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@functools.cache
def cache_key() -> str:
    """Hashes the source of the core that shapes generated code. An optional part hashes its own."""
    folder = Path(__file__).parent
    return hash_of_source(folder, folder.parent / "gradient" / "native.py")

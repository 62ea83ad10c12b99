# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What of this fork the keys of torch's caches have, so that the caches return no code of another version."""

import functools
import hashlib
from pathlib import Path

_FOLDER = Path(__file__).parent


@functools.cache
def hash_of_source(*paths: Path) -> str:
    """Hashes files, and the Python files of folders."""
    files = [file for path in paths for file in (sorted(path.glob("*.py")) if path.is_dir() else [path])]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@functools.cache
def cache_key() -> str:
    """Hashes the source of the core that shapes generated code. An optional part hashes its own."""
    return hash_of_source(
        _FOLDER, _FOLDER.parent / "gradient" / "native.py", *sorted(_FOLDER.parents[1].glob("fx*.py"))
    )

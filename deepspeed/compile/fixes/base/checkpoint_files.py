# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Files of a checkpoint get their names when they are whole, and an error names a file that is not.

To DeepSpeed: ``TorchCheckpointEngine`` writes each file under its name. If a rank is killed while it writes, the file
is cut off, and an earlier checkpoint of the same tag, which trainers write again and again, is lost. Please write
under another name, and rename in ``commit()``, which the engine calls when all ranks have written. For a file that is
missing or cut off, ``load()`` raises what pickle or a zip reader says: please name the file, and a checkpoint that is
whole.
"""

import contextlib
import errno
import glob
import os
import pickle
import shutil
import zipfile
from typing import TYPE_CHECKING, Dict, Iterator, Optional, Set

import torch

if TYPE_CHECKING:
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

LATEST = "latest"
# What a rename raises where a mount, such as that of an object store, knows none, or none of this file.
_NO_RENAME = {errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV}
# The devices where a rename has raised this.
_without_renames: Set[int] = set()


class Written:
    """What a rank has written since its checkpoint engine's ``create()``.

    Attributes:
        names: the file's own name, by the name under which it was written.
        error: what writing the first file that could not be written has raised.
    """

    def __init__(self):
        self.names: Dict[str, str] = {}
        self.error: Optional[Exception] = None


def unfinished(path: str) -> str:
    """Returns the name under which this rank writes a file. DeepSpeed looks for files by a prefix, or by a suffix.

    With ``use_node_local_storage`` several ranks write a file of one name, and may do so in one folder.
    """
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    folder, name = os.path.split(path)
    return os.path.join(folder, f"unfinished_{name}.{rank}.tmp")


def begin(writer: "TorchCheckpointEngine") -> None:
    """Called by ``create()``. What an interrupted save of this process has left is removed."""
    drop(writer)
    writer.written, writer.overwrites = Written(), False


def keeps_earlier(writer: "CheckpointEngine") -> bool:
    """Whether files of an earlier checkpoint with the same tag stay until all are written. Others are overwritten."""
    return hasattr(writer, "written") and not getattr(writer, "overwrites", False)


def drop(writer: "CheckpointEngine") -> None:
    """Removes files that have not got their names."""
    if not hasattr(writer, "written"):
        return
    written, writer.written = writer.written, None
    for name in written.names if written else ():
        with contextlib.suppress(OSError):
            os.unlink(name)


@contextlib.contextmanager
def replacing(path: str) -> Iterator[str]:
    """Context in which a file is written under the name that this yields, and gets its own name in the end."""
    other = unfinished(path)
    try:
        yield other
        _rename(other, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(other)
        raise


@contextlib.contextmanager
def writing(writer: "TorchCheckpointEngine", path: str) -> Iterator[str]:
    """Context in which a file is written under the name that this yields. ``commit()`` gives the file its own."""
    written = getattr(writer, "written", None)
    if _is_written_in_place(path):
        # Not in `written`, which is gone when a save that has failed says what is whole.
        writer.overwrites = True
        with noting_error(writer):
            yield path
        return
    if written is None:
        # Nobody has called create(), so nobody may call commit().
        with replacing(path) as other:
            yield other
        return
    other = unfinished(path)
    # First, so that drop() removes what is left of it.
    written.names[other] = path
    with noting_error(writer):
        yield other


def _is_written_in_place(path):
    # A program that replaces torch.save() may write later, under the name that it was given.
    if torch.save is not torch.serialization.save:
        return True
    folder = os.path.dirname(path) or os.curdir
    return os.path.isdir(folder) and os.stat(folder).st_dev in _without_renames


@contextlib.contextmanager
def noting_error(writer: "CheckpointEngine") -> Iterator[None]:
    """Context in which a rank writes. ``commit()`` raises the error, because other ranks may wait for this rank in a
    collective until then."""
    written = getattr(writer, "written", None)
    try:
        yield
    except Exception as error:
        if written is None:
            raise
        written.error = written.error or error


def raise_error(writer: "CheckpointEngine") -> None:
    """Raises what writing a file has raised."""
    written = getattr(writer, "written", None)
    if written is not None and written.error is not None:
        # Forgotten, because its traceback keeps the state dict.
        error, written.error = written.error, None
        raise error


def give_names(writer: "CheckpointEngine") -> None:
    """Called before and by ``commit()``, which a subclass may override. Gives the files that were written their own
    names, in place of earlier ones."""
    raise_error(writer)
    written = getattr(writer, "written", None)
    if written is not None:
        for other, path in written.names.items():
            _rename(other, path)
        writer.written = None


def _rename(other, path):
    """Puts a file in place of an earlier one. Copies it where that is the only way, and remembers the device."""
    try:
        os.replace(other, path)
    except OSError as error:
        if error.errno not in _NO_RENAME:
            raise
        shutil.copyfile(other, path)
        _without_renames.add(os.stat(path).st_dev)
        # Such a mount may refuse to delete, too.
        with contextlib.suppress(OSError):
            os.unlink(other)


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Context in which a file is read. If the file is not whole, its error says so, and which checkpoint may be."""
    try:
        yield
    except Exception as error:
        if not os.path.exists(path):
            raise FileNotFoundError(f"{path} is missing{_instead(path)}") from error
        # Of a file that is no zip file, torch says so without a class of its own.
        ends = isinstance(error, (EOFError, pickle.UnpicklingError)) or "unexpected EOF" in str(error)
        if ends or _is_cut_off(path):
            raise RuntimeError(f"{path} is not whole: it was cut off, or changed{_instead(path)}") from error
        raise


def _is_cut_off(path):
    """Whether a file begins as torch's zip files do, and does not end as they do."""
    with open(path, "rb") as file:
        return file.read(2) == b"PK" and not zipfile.is_zipfile(path)


def read_latest(folder: str, name: str = LATEST) -> Optional[str]:
    """Returns the tag that a folder's file ``latest`` names; None if there is no such file."""
    with contextlib.suppress(OSError):
        with open(os.path.join(folder, name)) as file:
            return file.read().strip()
    return None


def _instead(path):
    """Returns the end of a sentence about a file that is not whole: another checkpoint that may be loaded."""
    checkpoint, name = os.path.split(os.path.abspath(path))
    folder, tag = os.path.split(checkpoint)
    latest = read_latest(folder)
    if latest is None or os.path.isdir(os.path.join(checkpoint, "zero")):
        # Not a folder of checkpoints, or a universal checkpoint, which latest_universal names.
        return ""
    if latest != tag and os.path.isdir(os.path.join(folder, latest)):
        return f"; load the last whole checkpoint in {folder}, whose tag is {latest!r}"
    # The latest one is gone, or is this one, saved by a DeepSpeed that names a checkpoint before all ranks have
    # written it.
    files = glob.glob(os.path.join(glob.escape(folder), "*", name))
    others = [file for file in files if os.path.dirname(file) != checkpoint]
    if others:
        newest = os.path.basename(os.path.dirname(max(others, key=os.path.getmtime)))
        return f"; load another checkpoint in {folder}, such as the one with the tag {newest!r}"
    return ""

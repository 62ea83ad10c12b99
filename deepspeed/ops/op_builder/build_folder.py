# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Builds native code at first use, once for each set of inputs, in one process at a time.

Torch builds a module in a folder of the module's name. Environments that share ``TORCH_EXTENSIONS_DIR`` would rebuild
it in turn: paths of the sources are part of ninja's commands, and pip gives sources a new time. So the folder's name
has a hash of the build's inputs without paths and times, and a module there is used without another check. The
compiler and the C library are inputs, and so is the processor if the code is built for it: machines of several kinds
may share a home directory. The name has no hash of files that are not DeepSpeed's, so torch checks these each time.
"""

import contextlib
import functools
import hashlib
import math
import os
import platform
import re
import shlex
import shutil
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import IO, Any, Iterator, List, Sequence

# The folder of csrc. Not resolved: an editable install has links here.
ROOT = Path(__file__).absolute().parents[1]
# After so many seconds, a waiting process logs the reason.
SILENT_SECONDS = 10
_BUILT = "built"


def folder_of(name: str, sources: Sequence[str], extra_include_paths: Sequence[str], **flags: Any) -> Path:
    """Returns the folder in which a module is built, and makes it if there is none.

    Args:
        name: of the module.
        sources, extra_include_paths: absolute paths.
        flags: further arguments of ``torch.utils.cpp_extension.load()``.
    """
    import torch
    from torch.utils.cpp_extension import CUDA_HOME, _get_build_directory, get_cxx_compiler

    kernels = any(source.endswith(".cu") for source in sources)
    variables = ("CUDA_HOME", "TORCH_CUDA_ARCH_LIST", "PYTORCH_ROCM_ARCH") if kernels or flags.get("with_cuda") else ()
    environment = {variable: os.environ.get(variable) for variable in variables}
    paths = [*sources, *extra_include_paths]
    # A flag such as -march=native.
    processor = _processor() if "=native" in repr(flags) else ""
    versions = (torch.__version__, sysconfig.get_config_var("SOABI"), platform.libc_ver(), processor)
    told = repr((versions, paths, sorted(flags.items()), environment))
    key = hashlib.sha256(told.replace(str(ROOT), "").encode())
    for file in _files(sources, extra_include_paths):
        key.update(str(file.relative_to(ROOT)).encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    compilers = [(shlex.split(get_cxx_compiler()) or [""])[0]]
    if kernels:
        compilers.append(f"{CUDA_HOME}/bin/nvcc")
    # These variables may hold flags too.
    named = repr((os.environ.get("CXX"), os.environ.get("CC"), *map(_compiler, compilers)))
    compiler = hashlib.sha256(named.encode()).hexdigest()[:8]
    folder = Path(_get_build_directory(f"{name}-{key.hexdigest()[:16]}-{compiler}", verbose=False))
    if not all(map(_compiler, compilers)) and not name_of_built(folder):
        # A machine without a compiler uses a module of another machine, built by any compiler.
        alike = sorted(folder.parent.glob(f"{name}-{key.hexdigest()[:16]}-*"))
        return next(filter(name_of_built, alike), folder)
    return folder


@functools.lru_cache(maxsize=1)
def _processor() -> str:
    """Returns the properties of the processor on which the compiler's code depends."""
    told = [platform.machine(), platform.processor()]
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        # Read the first processor, without its clock and number, which change.
        first = file.read(2**14).partition("\n\n")[0]
        told += re.findall(
            r"(?m)^(?:vendor_id|cpu|cpu family|model|model name|flags|Features|CPU .*|isa)\s*:.*", first
        )
    return "\n".join(told)


def _compiler(command: str) -> str:
    """Returns name and size of a compiler, which change with its version, or "" if there is none.

    Every start asks, so this starts no process.
    """
    path = shutil.which(command)
    return f"{Path(path).resolve().name} {os.stat(path).st_size}\n" if path else ""


def without_compiler() -> str:
    """Says which C++ compiler the machine lacks, and how to install it; "" if the machine has it."""
    from torch.utils.cpp_extension import get_cxx_compiler

    command = get_cxx_compiler()
    if _compiler((shlex.split(command) or [command])[0]):
        return ""
    return f"a C++ compiler (there is no {command}; `apt-get install g++`, or name one in CXX)"


def _files(sources, include_paths):
    """Lists the sources and DeepSpeed's headers that they include, not all headers of these folders."""
    found, left = set(), [Path(source) for source in sources]
    while left:
        file = left.pop()
        if file not in found and file.is_relative_to(ROOT) and file.is_file():
            found.add(file)
            for name in re.findall(r'(?m)^\s*#\s*include\s*[<"]([^>"]+)', file.read_text(errors="replace")):
                left.extend(Path(os.path.normpath(os.path.join(path, name))) for path in (file.parent, *include_paths))
    return sorted(found)


def _has_files_of_others(sources, include_paths):
    """Whether a build may read files that are neither DeepSpeed's nor a toolkit's."""
    from torch.utils.cpp_extension import CUDA_HOME, ROCM_HOME

    toolkits = [Path(home, "include") for home in (CUDA_HOME, ROCM_HOME) if home]
    others = [*sources, *(path for path in include_paths if not any(map(Path(path).is_relative_to, toolkits)))]
    return not all(Path(path).is_relative_to(ROOT) for path in others)


def name_of_built(folder: Path) -> str:
    """Returns the name of the module that was built in a folder, to its end, or "" if there is none.

    Where a process builds several modules of one name, torch adds a number to the names of all but the first.
    """
    from torch.utils.cpp_extension import LIB_EXT

    file = folder / _BUILT
    name = file.read_text() if file.exists() else ""
    # A cleared cache may lack one of the two.
    return name if (folder / f"{name}{LIB_EXT}").exists() else ""


def load(name: str, sources: List[str], extra_include_paths: List[str], verbose: bool = False, **flags: Any) -> Any:
    """Returns a module of native code, built at first use. Takes the place of ``torch.utils.cpp_extension.load()``.

    Raises:
        RuntimeError: if the module cannot be built.
    """
    from torch.utils import cpp_extension

    folder = folder_of(name, sources, extra_include_paths, **flags)
    more = {"extra_include_paths": extra_include_paths, "verbose": verbose, **flags}
    if not name_of_built(folder):
        with _alone_in(folder) as is_alone:
            if not name_of_built(folder):
                lacking = without_compiler()
                if lacking:
                    # Torch would quote the command, and say that the shell knows no such program.
                    raise RuntimeError(f"DeepSpeed cannot build {name}, because this machine lacks {lacking}")
                if _has_files_of_others(sources, extra_include_paths):
                    if is_alone:
                        # Torch would wait for a process that was killed in its build.
                        (folder / "lock").unlink(missing_ok=True)
                    return cpp_extension.load(name, sources, build_directory=str(folder), **more)
                # Build in a folder of its own: if locks hold on one host only, another host may build at this time.
                with tempfile.TemporaryDirectory(dir=folder) as own:
                    module = cpp_extension.load(name, sources, build_directory=own, **more)
                    library = f"{module.__name__}{cpp_extension.LIB_EXT}"
                    os.replace(Path(own, library), folder / library)
                    Path(own, _BUILT).write_text(module.__name__)
                    os.replace(Path(own, _BUILT), folder / _BUILT)
                return module
    return cpp_extension._import_module_from_library(name_of_built(folder), str(folder), True)


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[bool]:
    """Context in which no other process builds in ``folder``, if it yields true. The kernel ends a killed one's lock.

    The package filelock does without the kernel where a file system has no locks: it waits for ever, or leaves a file
    that outlives its process.
    """
    with contextlib.ExitStack() as held:
        is_alone = False
        # If the system or its files have no locks, processes may build at the same time.
        with contextlib.suppress(ImportError, OSError):
            _lock(held.enter_context(open(folder / "building", "w")), folder)
            is_alone = True
        yield is_alone


def _lock(file: IO[str], folder: Path) -> None:
    """Locks a file until it is closed, as soon as no other process does.

    Raises:
        ImportError: on Windows.
        OSError: if the file has no locks.
    """
    import fcntl

    from deepspeed.utils import logger

    silent_until = time.monotonic() + SILENT_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > silent_until:
                logger.warning(f"DeepSpeed waits for another process, which builds native code in {folder}")
                silent_until = math.inf
            time.sleep(0.1)

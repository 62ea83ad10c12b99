# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The rank processes of ``make sanitize``: the native code is instrumented, Python and torch are not.

An instrumented library that is loaded late needs its sanitizer's runtime from the start, so that is preloaded, into
the ranks only. ``tests/sanitizers/g++`` instruments.
"""

import ctypes
import os
import re
import subprocess
from pathlib import Path

# As in the compiler's report of a place in the native code, or in the module where it has no debugging information.
OURS = ("/csrc/compile/", "/csrc/includes/", "/dc.so+")

# What LeakSanitizer writes around its leaks.
LEAK_FRAME = re.compile(r"ERROR: LeakSanitizer: detected memory leaks\s*$|^SUMMARY: AddressSanitizer: .* leaked in")

OPTIONS = {
    "address": {
        "ASAN_OPTIONS": {
            "detect_stack_use_after_return": 1,
            "check_initialization_order": 1,
            "strict_init_order": 1,
            # Where memory runs out, torch is to raise.
            "allocator_may_return_null": 1,
            # At the end ranks are killed; look_for_leaks() asks.
            "detect_leaks": 1,
            "leak_check_at_exit": 0,
        },
        "LSAN_OPTIONS": {"print_suppressions": 0},
    },
    "thread": {
        "TSAN_OPTIONS": {
            "halt_on_error": 1,
            "allocator_may_return_null": 1,
            "second_deadlock_stack": 1,
            "history_size": 7,
            # Torch and Python order accesses by atomics too, which it cannot see; their locks it sees.
            "ignore_noninstrumented_modules": 1,
        }
    },
    "undefined": {"UBSAN_OPTIONS": {"print_stacktrace": 1, "halt_on_error": 1}},
}
PRELOADED = {"address": "libasan.so", "thread": "libtsan.so"}
CALLED = {"address": b"__asan_report", "thread": b"__tsan_", "undefined": b"__ubsan_"}


def library(name):
    """Path of one of gcc's libraries, or None."""
    found = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    # gcc answers with the bare name where it has none.
    return str(Path(found).resolve()) if os.path.isabs(found) else None


def environment(sanitizer, reports):
    """Variables for the ranks; what the sanitizer reports is written into files in ``reports``."""
    variables = {
        name: ":".join(f"{key}={value}" for key, value in {**options, "log_path": reports / sanitizer}.items())
        for name, options in OPTIONS[sanitizer].items()
    }
    if sanitizer in PRELOADED:
        # libstdc++ too: the runtime looks for its functions that throw when it starts, and Python has not loaded it.
        variables["LD_PRELOAD"] = f"{library(PRELOADED[sanitizer])} {library('libstdc++.so')}"
    # Python's own allocator would hide from the sanitizer what Python's objects refer to.
    return {**variables, "PYTHONMALLOC": "malloc"}


def compile_native_code(sanitizer):
    """Runs on the ranks before the first test, because it takes longer than a test may."""
    from deepspeed.compile.zero_1_and_2.gradient.native import reducer_module

    file = Path(reducer_module().__file__)
    # Whoever builds the file loads it before it is moved to where others find it, one folder above.
    file = file if file.exists() else file.parent.parent / file.name
    if CALLED[sanitizer] not in file.read_bytes():
        raise RuntimeError("the native code was compiled without the sanitizer: start this with make sanitize")


def look_for_leaks():
    """Runs on the ranks behind the last test: has memory that nothing refers to written into the reports."""
    ctypes.CDLL(None).__lsan_do_recoverable_leak_check()


def found(reports):
    """What the sanitizer reported: file -> text. Of leaks only the native code's: Python has some too."""
    texts = {}
    for path in sorted(reports.iterdir()):
        parts = [part for part in path.read_text(errors="replace").split("\n\n") if part.strip()]
        kept = [part for part in parts if "leak of" not in part or _is_ours(part)]
        kept = [part for part in kept if not LEAK_FRAME.search(part)]
        # Said where a test has memory run out.
        kept = [part for part in kept if "Sanitizer failed to allocate" not in part]
        if kept:
            texts[path] = "\n\n".join(kept)
    return texts


def _is_ours(leak):
    # Frame 0 is the allocator; those behind it asked for the memory, through templates of the C++ library.
    asked = [line for line in leak.splitlines() if re.match(r"\s*#([1-9]|1[0-2]) ", line)]
    return any(place in line for line in asked for place in OURS)


def summary(sanitizer, passed, texts):
    """Lines for people."""
    name = {"address": "AddressSanitizer", "thread": "ThreadSanitizer", "undefined": "UndefinedBehaviorSanitizer"}
    yield f"{name[sanitizer]}: {passed} tests passed, {f'{len(texts)} reports' if texts else 'no reports'}"
    for path, text in texts.items():
        first = re.search(r".*(ERROR: |WARNING: |runtime error: |leak of ).*", text)
        yield f"{path}: {(first[0] if first else text.strip().splitlines()[0])[:200]}"

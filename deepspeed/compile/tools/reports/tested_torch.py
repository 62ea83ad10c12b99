# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The releases of torch with which the fork was tested, and a warning of a newer one."""

from typing import Iterator, Sequence

from packaging.version import Version

# The kind of device -> the tested releases, oldest first. A release is tested when `make test`, or on GPUs `make
# test-gpu`, ran with it: docs/internals/verification.md says when, and what failed. A test compares what the
# documentation, the warning and the Makefile say with this table.
TESTED = {"cpu": ("2.11", "2.13", "2.15"), "cuda": ("2.11",)}
UNTRIED = (
    "torch {} is newer than {}, the newest with which this fork of DeepSpeed was tested on {}; compare the first "
    "losses with those of a run with compile.deepcompile set to false"
)


def name_of(device: str) -> str:
    """Returns how a sentence names a kind of device: "cpu" as CPU, and "cuda" as GPUs."""
    return "GPUs" if device == "cuda" else device.upper()


def untried(version: str, device: str) -> Iterator[str]:
    """Yields a sentence if a version of torch is newer than those that were tested on this kind of device.

    On other devices than CPUs and GPUs nothing was tested, so there is no release to compare with.
    """
    if device in TESTED and Version(version).release[:2] > Version(TESTED[device][-1]).release:
        yield UNTRIED.format(version, TESTED[device][-1], name_of(device))


def tested() -> str:
    """Describes the tested releases, as in "2.11, 2.13 and 2.15 on CPU, and 2.11 on GPUs"."""
    return ", and ".join(f"{listed(releases)} on {name_of(device)}" for device, releases in TESTED.items())


def listed(releases: Sequence[str]) -> str:
    """Returns names as a sentence lists them, as in "2.11, 2.13 and 2.15"."""
    *others, last = releases
    return f"{', '.join(others)} and {last}" if others else last

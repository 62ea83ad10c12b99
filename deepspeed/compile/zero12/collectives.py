# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What a collective's error says to whoever reads it."""

import contextlib

import torch


@contextlib.contextmanager
def collective(purpose):
    """Around a collective: raises its error anew, as DistBackendError, with what this rank could not do.

    gloo's errors are plain RuntimeErrors, from which others that arise there are not told. The native code does the
    same around its own collectives (``throw_for_other_ranks()``).
    """
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        # This rank's own.
        raise
    except RuntimeError as error:
        raise torch.distributed.DistBackendError(
            f"DeepCompile could not {purpose}, because another rank has died, hangs or raised; look for the first "
            f"error of any rank, and start the processes again from a checkpoint: {error}"
        ) from error

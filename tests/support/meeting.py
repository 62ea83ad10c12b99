# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Where ranks meet without a collective: one waits for a key that another one sets when it has come to some place."""

import itertools

import torch.distributed as dist

_CALLS = itertools.count()


def new_store():
    """Returns a store of the ranks that has no keys. All ranks call this equally often.

    The store of the process group lives as long as its ranks, so keys of an earlier test would be there.
    """
    return dist.PrefixStore(f"meeting {next(_CALLS)}", dist.distributed_c10d._get_default_store())

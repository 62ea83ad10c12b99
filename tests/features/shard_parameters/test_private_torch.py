# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``compile.shard_parameters`` asks the installed torch for, before it leans on what torch does not promise."""

from unittest import mock

import pytest
import torch

from deepspeed.compile.features.shard_parameters import private_torch

from support.ids import vary

pytestmark = pytest.mark.quick

_C = torch._C
# What another torch would do: (object, name, what stands there, None for nothing; what is said to be needed).
OTHERWISE = {
    "class": (private_torch, "change_class", lambda tensor, kind: None, "given another class"),
    "subclasses": (_C, "DisableTorchFunctionSubclass", None, "given another class"),
    "version": (private_torch, "version_of", lambda tensor: 0, "count changes in place"),
    "copies": (_C, "_swap_tensor_impl", lambda tensor, other: tensor.copy_(other), "on the meta device"),
    "all moved": (torch.nn.Module, "_apply", lambda module, function: module.double(), "some of their tensors"),
    "no count": (_C, "_storage_Use_Count", None, "say who has them"),
    "one count": (_C, "_storage_Use_Count", lambda address: 2, "say who has them"),
    "views go": (torch.UntypedStorage, "resize_", lambda storage, nbytes: None, "find memory again"),
    "never in a backward": (_C, "_current_graph_task_id", lambda: -1, "backwards that say"),
    "called at once": (private_torch, "call_after_backward", lambda function: function(), "backwards that say"),
    "no hooks": (_C._autograd, "_top_saved_tensors_default_hooks", lambda traced: None, "hooks can be asked for"),
    "always hooks": (_C._autograd, "_saved_tensors_hooks_is_enabled", lambda: True, "hooks can be asked for"),
    "no store": (torch.distributed.distributed_c10d, "_get_process_group_store", None, "that writes a key decides"),
    "never wrong": (torch, "_assert_async", lambda condition, message: None, "assertions"),
    "another restart": (private_torch, "trace_again", RuntimeError, "traces a frame again"),
}


def test_the_installed_torch_is_taken():
    """A check would ask for what torch need not do, or fail in a caller's context, and nobody could set the option."""
    with torch.inference_mode(), torch.device("meta"):
        assert [*private_torch.lacking()] == []
    with torch.autograd.graph.disable_saved_tensors_hooks("on purpose"):
        assert [*private_torch.lacking()] == []


def test_checks_draw_no_random_numbers():
    """Dropout and sampling would differ from those with whole parameters."""
    before = torch.get_rng_state()
    assert [*private_torch.lacking()] == [] and torch.equal(torch.get_rng_state(), before)


@vary("name", [*OTHERWISE])
def test_another_torch_is_refused(name):
    """Training would read memory that was given back, or wait for ever, in a torch that does something else."""
    where, what, stands, needed = OTHERWISE[name]
    with mock.patch.object(where, what, stands):
        (said,) = private_torch.lacking()
    assert needed in said and f"which torch {torch.__version__} does not do" in said


def test_each_check_can_say_no():
    """A check would say yes of every torch."""
    needed = {needed for *_, needed in OTHERWISE.values()}
    assert {what for what, _ in private_torch._CHECKS if not any(each in what for each in needed)} == set()

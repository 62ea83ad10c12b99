# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The installed torch does what ``compile.shard_parameters`` takes for granted, though torch does not promise it.

Without that, training would read memory that was given back, or ranks would wait for ever.
"""

import weakref

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.distributed import distributed_c10d
from torch.nn import Parameter

from deepspeed.compile.features.shard_parameters.saved_tensors import _keep_from_compiler
from deepspeed.compile.zero_1_and_2.gradient.backward import in_backward
from deepspeed.compile.zero_1_and_2.gradient.native import users_of

pytestmark = pytest.mark.quick


def test_a_tensor_gets_another_class():
    """Code would read a parameter at rest without anybody seeing it."""
    calls = []

    class Sees(Parameter):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            calls.append(function)
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))

    parameter = Parameter(torch.ones(2))
    parameter.__class__ = Sees
    torch.nn.functional.linear(torch.ones(2), parameter)
    assert calls == [torch.nn.functional.linear]
    parameter.__class__ = Parameter
    assert torch.sum(parameter) == 2 and len(calls) == 1


def test_a_tensor_counts_changes():
    """A rank would not keep what a forward has changed in a parameter."""
    tensor = torch.zeros(1)
    detached, before = tensor.detach(), tensor._version
    tensor.add_(1)
    torch.autograd.graph.increment_version(tensor)
    assert tensor._version == detached._version == before + 2


def test_a_tensor_on_meta_becomes_another():
    """An optimizer would have parameters that the model has not."""
    tensor, other = Parameter(torch.empty(2, device="meta")), Parameter(torch.ones(2))
    reference, place = weakref.ref(tensor), other.data_ptr()
    torch._C._swap_tensor_impl(tensor, other)
    assert reference() is tensor and tensor.data_ptr() == place and tensor.tolist() == [1, 1]


def test_a_module_moves_some_of_its_tensors():
    """A model that does not fit on a device would come there as a whole."""
    module = torch.nn.LayerNorm(1)
    weight, bias = module.weight, module.bias
    module._apply(lambda tensor: tensor if tensor is weight else tensor.double())
    assert module.weight is weight and module.bias is bias
    assert (weight.dtype, bias.dtype) == (torch.float32, torch.float64)


@pytest.mark.parametrize("takes", [torch.Tensor.numpy, torch.Tensor.detach], ids=["numpy", "view"])
def test_a_storage_says_how_many_have_it(takes):
    """Memory would be given back while somebody reads it, or never."""
    tensor = torch.zeros(1)
    storage = tensor.untyped_storage()
    assert users_of(storage) == 1
    taken = takes(tensor)
    assert users_of(storage) == 2 or (users_of(storage) > 1 and takes is torch.Tensor.numpy)
    del taken
    assert users_of(storage) == 1


@pytest.mark.parametrize("trains", [True, False])
def test_a_tensor_says_how_many_keep_it(trains):
    """Memory would be given back that autograd has saved without a view of it, or never."""
    parameter, other = Parameter(torch.ones(1), requires_grad=trains), torch.ones(1, requires_grad=True)
    # The node that accumulates the gradient keeps the parameter too, and the reducer keeps the node.
    node = parameter.view_as(parameter).grad_fn
    before, users = parameter._use_count(), users_of(parameter.untyped_storage())
    another_variable = parameter
    assert another_variable._use_count() == before
    product = parameter * other
    assert parameter._use_count() > before and users_of(parameter.untyped_storage()) == users
    product.sum().backward()
    del product
    assert parameter._use_count() == before and (node is None) != trains


def test_views_find_memory_again():
    """Parameters are views of a buffer whose memory comes and goes."""
    tensor = torch.zeros(4)
    view, storage, other = tensor[2:], tensor.untyped_storage(), torch.zeros(4).untyped_storage()
    address, nbytes = storage._cdata, storage.nbytes()
    storage.resize_(0)
    assert storage.nbytes() == 0 and view.shape == (2,)
    storage.resize_(nbytes)
    tensor.fill_(3)
    assert view.untyped_storage()._cdata == address != other._cdata
    assert view.tolist() == [3, 3]


def test_a_backward_says_that_it_runs_and_calls_at_its_end():
    """A unit would be given back before the backward has read it."""
    events = []

    def reached(_):
        events.append(in_backward())
        torch.autograd.Variable._execution_engine.queue_callback(lambda: events.append("ended"))

    parameter = torch.ones((), requires_grad=True)
    between = parameter * 2
    parameter.register_hook(lambda _: events.append("last"))
    between.register_hook(reached)
    between.backward()
    assert events == [True, "last", "ended"] and not in_backward()


def test_hooks_of_saved_tensors_can_be_asked_for():
    """A caller's hooks would not be called, or be registered where torch refuses them."""
    hooks = (lambda tensor: tensor, lambda packed: packed)
    with saved_tensors_hooks(*hooks):
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) == hooks
        assert torch._C._autograd._saved_tensors_hooks_is_enabled()
    with disable_saved_tensors_hooks("on purpose"):
        assert not torch._C._autograd._saved_tensors_hooks_is_enabled()


def test_dynamo_leaves_a_function_and_what_it_calls_alone():
    """Dynamo would compile the hooks of saved tensors wherever a block's graph ends early."""
    counts = CompileCounter()

    def inner(tensor):
        return tensor + 1

    @_keep_from_compiler
    def outer(tensor):
        return inner(tensor)

    assert torch.compile(outer, backend=counts)(torch.ones(1)) == 2
    assert counts.frame_count == 0


def test_the_first_rank_that_writes_a_key_decides():
    """Ranks would read a parameter that others do not read, and wait for these."""
    store = torch.distributed.HashStore()
    assert [store.compare_set("key", "", value) for value in ("first", "second")] == [b"first"] * 2
    assert callable(distributed_c10d._get_process_group_store)


def test_an_assertion_raises():
    """Ranks that gather different blocks would go on."""
    torch._assert_async(torch.tensor(True), "right")
    with pytest.raises(RuntimeError, match="wrong"):
        torch._assert_async(torch.tensor(False), "wrong")


def test_dynamo_takes_an_error_as_a_reason_to_trace_again():
    """A program would end with that error."""
    error = torch._dynamo.exc.UnspecializeRestartAnalysis(restart_reason="asked")
    assert isinstance(error, torch._dynamo.exc.RestartAnalysis) and error.restart_reason == "asked"

# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``compile.shard_parameters`` uses of torch that torch does not promise, and asks torch for beforehand.

Each function says why no public one serves, and the check behind it asks the installed torch whether the function
does what this part takes for granted. ``deepspeed.initialize()`` refuses the option where a check says no. All were
tested with the releases in ``TESTED_TORCH`` of ``tools/report``. What the fork's other parts use too is imported
where it is used (``torch.utils._pytree``). So is what ``rewrite.py`` uses of torch's compiler, because the source of
that file is in the keys of torch's caches.
"""

import contextlib
import weakref
from typing import Any, Callable, ContextManager, Iterator, List, Optional, Tuple, Type

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module, Parameter

from ...zero_1_and_2.own_thread import in_own_thread
from ..overlap_gather.arriving import is_traced

# What torch must do -> whether it does.
_CHECKS: List[Tuple[str, Callable[[], bool]]] = []


def lacking() -> Iterator[str]:
    """Yields a sentence for each thing that the installed torch does not do."""
    # Callers may have opened contexts in which torch does something else, such as hooks of saved tensors.
    for what in in_own_thread(_lacking):
        yield (
            f"compile.shard_parameters needs {what}, which torch {torch.__version__} does not do; install a release "
            "of torch that ds_report names as tested, or leave this out"
        )


def _lacking():
    lacks = []
    for what, does in _CHECKS:
        try:
            is_done = does()
        except Exception:
            is_done = False
        if not is_done:
            lacks.append(what)
    return lacks


def _must(what):
    def note(does):
        _CHECKS.append((what, does))
        return does

    return note


# Tensors -----------------------------------------------------------------------------------------------------------


def change_class(tensor: torch.Tensor, kind: Type[torch.Tensor]) -> None:
    """Gives a tensor another class, for example one whose ``__torch_function__`` sees every call.

    Modules, optimizers and callers hold the tensor, so it must stay the same object. ``as_subclass()`` makes another
    one, and ``torch.utils.swap_tensors()`` refuses a tensor to which anything has a weak reference, as DeepSpeed has.
    """
    tensor.__class__ = kind


def without_torch_function() -> ContextManager[Any]:
    """Returns a context in which torch's functions take tensors of all classes as plain ones.

    Torch documents this context for writers of subclasses, under this private name alone.
    """
    return torch._C.DisableTorchFunctionSubclass()


@_must("tensors that can be given another class")
def _classes_change():
    calls = []

    class Sees(Parameter):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            calls.append(function)
            with without_torch_function():
                return function(*args, **(kwargs or {}))

    parameter = Parameter(torch.ones(2))
    change_class(parameter, Sees)
    torch.nn.functional.linear(torch.ones(2), parameter)
    sees = calls == [torch.nn.functional.linear]
    change_class(parameter, Parameter)
    return bool(sees and torch.sum(parameter) == 2 and len(calls) == 1)


def version_of(tensor: torch.Tensor) -> int:
    """Returns how often a tensor, or another one of the same values, was changed in place.

    Torch documents this attribute by its private name alone, and ``torch.autograd.graph`` can only add to it.
    """
    return tensor._version


@_must("tensors that count changes in place")
def _versions_count():
    tensor = torch.zeros(1)
    detached, before = tensor.detach(), version_of(tensor)
    tensor.add_(1)
    torch.autograd.graph.increment_version(tensor)
    return version_of(tensor) == version_of(detached) == before + 2


def become(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Has a tensor on the meta device have the values, the device and the place of another one.

    ``data`` cannot be assigned from the host to the meta device, and for ``swap_tensors()`` see :func:`change_class`.
    """
    torch._C._swap_tensor_impl(tensor, other)


@_must("tensors on the meta device that become others")
def _metas_become_others():
    tensor, other = Parameter(torch.empty(2, device="meta")), Parameter(torch.ones(2))
    reference, place = weakref.ref(tensor), other.data_ptr()
    become(tensor, other)
    return reference() is tensor and tensor.data_ptr() == place and tensor.tolist() == [1, 1]


def apply_to_tensors(module: Module, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Has a function return what takes the place of each parameter and buffer of a module.

    Modules such as RNNs override what ``Module.to()`` calls for this. ``Module.to()`` itself leaves out no tensor.
    """
    module._apply(function)


@_must("modules that move some of their tensors")
def _modules_apply():
    # Draws no random numbers, which training would lack.
    module = torch.nn.LayerNorm(1)
    weight, bias = module.weight, module.bias
    apply_to_tensors(module, lambda tensor: tensor if tensor is weight else tensor.double())
    moved = weight.dtype, bias.dtype
    return module.weight is weight and module.bias is bias and moved == (torch.float32, torch.float64)


# Storages ----------------------------------------------------------------------------------------------------------


def address_of(storage: torch.UntypedStorage) -> int:
    """Returns a number that no other storage has while this one lives.

    ``data_ptr()`` is 0 of every storage whose memory was given back, and Python's object of a storage comes and goes.
    """
    return storage._cdata


def users_of(storage: torch.UntypedStorage) -> int:
    """Counts the tensors, NumPy arrays, collectives and others that have a storage.

    Callers may keep views of a parameter, and no public function tells that they do: memory that is given back while
    somebody has it is read as garbage, without an error. The caller has one variable of Python with the storage.
    """
    tensor = torch.empty(0)
    alone = tensor.untyped_storage()
    # How often torch counts one variable, which differs by release.
    of_variable = torch._C._storage_Use_Count(alone._cdata) - 1
    return torch._C._storage_Use_Count(storage._cdata) - of_variable


@_must("storages that say who has them")
def _users_count():
    tensor = torch.zeros(1)
    storage, counts = tensor.untyped_storage(), []
    for takes in (torch.Tensor.numpy, torch.Tensor.detach):
        counts.append(users_of(storage))
        taken = takes(tensor)
        counts.append(users_of(storage))
        del taken
    return counts[0] == counts[2] == 1 and counts[1] > 1 and counts[3] == 2


# resize_() is public, but not what becomes of views.
@_must("views that find memory again which was given back")
def _views_stay():
    tensor = torch.zeros(4)
    view, storage, other = tensor[2:], tensor.untyped_storage(), torch.zeros(4).untyped_storage()
    address, nbytes = address_of(storage), storage.nbytes()
    storage.resize_(0)
    is_empty = storage.nbytes() == 0 and view.shape == (2,)
    storage.resize_(nbytes)
    tensor.fill_(3)
    is_same = address_of(view.untyped_storage()) == address != address_of(other)
    return is_empty and is_same and view.tolist() == [3, 3]


# Autograd ----------------------------------------------------------------------------------------------------------


def in_backward() -> bool:
    """Whether this thread runs a backward. No public function says so."""
    return torch._C._current_graph_task_id() != -1


def call_after_backward(function: Callable[[], None]) -> None:
    """Calls a function when the backward is through that this thread runs.

    Hooks of tensors run when their gradients are there, and nothing public tells which is the last one. DeepSpeed and
    torch's own FSDP use this too.
    """
    torch.autograd.Variable._execution_engine.queue_callback(function)


@_must("backwards that say that they run, and call what was queued at their end")
def _backwards_call():
    events: List[Any] = []

    def reached(_):
        events.append(in_backward())
        call_after_backward(lambda: events.append("ended"))

    parameter = torch.ones((), requires_grad=True)
    between = parameter * 2
    parameter.register_hook(lambda _: events.append("last"))
    between.register_hook(reached)
    between.backward()
    return events == [True, "last", "ended"] and not in_backward()


def saving_hooks() -> Optional[Tuple[Callable, Callable]]:
    """Returns the hooks of saved tensors that were registered last, or None.

    Torch calls these alone, so hooks that are put above a caller's must call these, and nothing public returns them.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def takes_saving_hooks() -> bool:
    """Whether hooks of saved tensors may be registered. ``disable_saved_tensors_hooks()`` forbids it."""
    return torch._C._autograd._saved_tensors_hooks_is_enabled()


@_must("saved tensors whose hooks can be asked for")
def _hooks_are_told():
    hooks = (lambda tensor: tensor, lambda packed: packed)
    with saved_tensors_hooks(*hooks):
        is_on_top = saving_hooks() == hooks
    with torch.autograd.graph.disable_saved_tensors_hooks("on purpose"):
        return is_on_top and not takes_saving_hooks()


# Process groups ----------------------------------------------------------------------------------------------------


def store_of(process_group: "torch.distributed.ProcessGroup") -> torch.distributed.Store:
    """Returns the store through which the ranks of a process group found each other.

    Ranks that may not all come cannot ask each other in a collective, and a store of its own would need a free port.
    """
    return torch.distributed.distributed_c10d._get_process_group_store(process_group)


@_must("stores in which the first rank that writes a key decides")
def _stores_decide():
    store = torch.distributed.HashStore()
    written = [store.compare_set("key", "", value) for value in ("first", "second")]
    return written == [b"first"] * 2 and callable(torch.distributed.distributed_c10d._get_process_group_store)


# Other -------------------------------------------------------------------------------------------------------------


def assert_later(condition: torch.Tensor, message: str) -> None:
    """Raises if a condition is false: on a GPU when that comes to it, for which the host does not wait.

    Public functions such as ``torch.testing`` read the condition, for which the host would wait in each block.
    """
    torch._assert_async(condition, message)


@_must("assertions for which the host does not wait")
def _assertions_raise():
    assert_later(torch.tensor(True), "right")
    with contextlib.suppress(RuntimeError):
        assert_later(torch.tensor(False), "wrong")
        return False
    return True


def trace_again(reason: str) -> Exception:
    """Returns the error upon which Dynamo traces a frame from its beginning.

    Dynamo has looked at a tensor that has another class now. Any other error ends the program or compiles nothing.
    """
    return torch._dynamo.exc.UnspecializeRestartAnalysis(restart_reason=reason)


@_must("a compiler that traces a frame again")
def _frames_are_traced_again():
    import torch._dynamo.exc

    error = trace_again("asked")
    return isinstance(error, torch._dynamo.exc.RestartAnalysis) and error.restart_reason == "asked" and not is_traced()

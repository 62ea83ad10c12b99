# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""What ``compile.shard_parameters`` uses of torch that torch does not promise.

Each function says why no public one serves. ``tests/features/shard_parameters/test_private_torch.py`` shows that each
does what this part takes for granted, and ``tools/reports/`` warns of a torch newer than the tested ones. What the
fork's other parts use too is imported where it is used (``torch.utils._pytree``). So is what ``rewrite.py`` uses of
torch's compiler, because the source of that file is in the keys of torch's caches.
"""

from typing import Any, Callable, ContextManager, Optional, Tuple, Type, TypeVar

import torch
from torch._C._dynamo import eval_frame
from torch.nn import Module

# Tensors -----------------------------------------------------------------------------------------------------------


def change_class(tensor: torch.Tensor, kind: Type[torch.Tensor]) -> None:
    """Gives a tensor another class, for example one whose ``__torch_function__`` sees every call.

    Modules, optimizers and callers hold the tensor, so it must stay the same object. ``as_subclass()`` makes another
    one, and ``torch.utils.swap_tensors()`` refuses a tensor that has weak references, as those of DeepSpeed.
    """
    tensor.__class__ = kind


def without_torch_function() -> ContextManager[Any]:
    """Returns a context in which torch's functions take tensors of all classes as plain ones.

    Torch documents this context for writers of subclasses, under this private name alone.
    """
    return torch._C.DisableTorchFunctionSubclass()


def version_of(tensor: torch.Tensor) -> int:
    """Returns how often a tensor, or another one of the same values, was changed in place.

    Torch documents this attribute by its private name alone, and ``torch.autograd.graph`` can only add to it.
    """
    return tensor._version


def become(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Gives a tensor on the meta device the values, the device and the place of another tensor.

    ``data`` cannot be assigned from the host to the meta device, and for ``swap_tensors()`` see :func:`change_class`.
    """
    torch._C._swap_tensor_impl(tensor, other)


def apply_to_tensors(module: Module, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replaces each parameter and buffer of a module by what a function returns for it.

    Modules such as RNNs override what ``Module.to()`` calls for this. ``Module.to()`` itself leaves out no tensor.
    """
    module._apply(function)


def holders_of(tensor: torch.Tensor) -> int:
    """Counts what keeps a tensor, where all variables of Python count as one: autograd and torch's C++ objects.

    Outside of hooks autograd saves a leaf itself, and not a view of its memory, so ``users_of()`` does not count it.
    Torch uses this count itself, for ``swap_tensors()``.
    """
    return tensor._use_count()


# Storages ----------------------------------------------------------------------------------------------------------


def address_of(storage: torch.UntypedStorage) -> int:
    """Returns a number that no other storage has while this one lives.

    ``data_ptr()`` is 0 of every storage whose memory was given back, and Python's object of a storage comes and goes.
    """
    return storage._cdata


# Autograd ----------------------------------------------------------------------------------------------------------


def call_after_backward(function: Callable[[], None]) -> None:
    """Calls a function when the backward is through that this thread runs.

    Hooks of tensors run when their gradients are there, and nothing public tells which is the last one. DeepSpeed and
    torch's own FSDP use this too.
    """
    torch.autograd.Variable._execution_engine.queue_callback(function)


def saving_hooks() -> Optional[Tuple[Callable, Callable]]:
    """Returns the hooks of saved tensors that were registered last, or None.

    Torch calls these alone, so hooks that are put above a caller's must call these, and nothing public returns them.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def takes_saving_hooks() -> bool:
    """Whether hooks of saved tensors may be registered. ``disable_saved_tensors_hooks()`` forbids it."""
    return torch._C._autograd._saved_tensors_hooks_is_enabled()


_Function = TypeVar("_Function", bound=Callable)


def keep_from_compiler(function: _Function) -> _Function:
    """Makes Dynamo run a function, and all that it calls, as they are. Returns the function itself.

    Autograd calls hooks of saved tensors from C++. Where a graph has ended early, Dynamo takes such a hook for code to
    compile. ``torch.compiler.disable()`` returns a wrapper, which takes 3 us for each saved tensor.
    """
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function


# Process groups ----------------------------------------------------------------------------------------------------


def store_of(process_group: "torch.distributed.ProcessGroup") -> torch.distributed.Store:
    """Returns the store through which the ranks of a process group found each other.

    Ranks that may not all come cannot ask each other in a collective, and a store of its own would need a free port.
    """
    return torch.distributed.distributed_c10d._get_process_group_store(process_group)


# Other -------------------------------------------------------------------------------------------------------------


def assert_later(condition: torch.Tensor, message: str) -> None:
    """Raises if a condition is false. On a GPU the GPU itself asserts when it comes to it, and the host does not wait.

    Public functions such as ``torch.testing`` read the condition on the host, which would wait in each block.
    """
    torch._assert_async(condition, message)


def trace_again(reason: str) -> Exception:
    """Returns the error that makes Dynamo trace a frame again from its beginning.

    Dynamo has looked at a tensor that has another class now. Any other error ends the program or compiles nothing.
    """
    return torch._dynamo.exc.UnspecializeRestartAnalysis(restart_reason=reason)

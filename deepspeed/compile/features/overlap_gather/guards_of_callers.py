# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Guards of code that a caller compiles and that reads parameters on their way. Guards run each time before the code.

They wait, because compiled code reads memory past the class of parameters: Dynamo asks that class for ``cat([p])``,
and not for ``cat((p,))``. They also read that class, which torch before 2.13 leaves out for parameters of modules.
"""

import contextlib
import weakref
from typing import Any, Iterator, Protocol

import torch
from torch.torch_version import TorchVersion

_OPTION = "skip_tensor_guards_with_matching_dict_tags"


class Awaited(Protocol):
    """What has parameters on their way, and waits for them by unit."""

    def arrive(self, unit: int) -> None:
        """Waits for the parameters of a unit, and gives them their own class back if no other stream can read them
        before they are there."""

    def receive(self, unit: int) -> None:
        """Waits for the parameters of a unit. They keep their class."""

    def mark_again(self, parameter: torch.Tensor, arrival: Any) -> None:
        """Marks a parameter whose unit is still on its way for other streams."""

    def receive_all(self) -> None:
        """Does the same for all units."""


class _Gate:
    """What guards ask for."""

    def __init__(self):
        self.awaited: "weakref.WeakSet[Awaited]" = weakref.WeakSet()
        # How many gathers need all guards, and the option before the first one of these.
        self.users, self.option_before = 0, True

    @property
    def passed(self) -> bool:
        for gather in list(self.awaited):
            gather.receive_all()
        return True


gate = _Gate()


def wait_in_guards() -> None:
    """Called when Dynamo traces code that has a parameter on its way. Its guards wait, whichever parameters it reads.

    Guards read the class of parameters too, so these keep it.
    """
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource
    from torch._dynamo.symbolic_convert import InstructionTranslator, tls

    # Nobody has guards where the compiler behind Dynamo runs by itself.
    if getattr(tls, "current_tx", None) is not None:
        here = InstructionTranslator.current_tx().import_source(__name__)
        install_guard(AttrSource(AttrSource(here, "gate"), "passed").make_guard(GuardBuilder.CONSTANT_MATCH))


def _are_left_out(dynamo):
    """Whether guards leave out the class of a parameter as long as its module holds the same object."""
    return TorchVersion(torch.__version__) < "2.13" or dynamo.use_recursive_dict_tags_for_guards


@contextlib.contextmanager
def all_guards() -> Iterator[None]:
    """Within it, guards of compiled code read the class of parameters."""
    dynamo = torch._dynamo.config
    if gate.users == 0:
        gate.option_before = getattr(dynamo, _OPTION)
    if _are_left_out(dynamo):
        if gate.users == 0 and gate.option_before:
            # Guards of code that was compiled before leave the class out. Compile that code anew at its next call.
            torch._dynamo.reset_code_caches()
        setattr(dynamo, _OPTION, False)
    gate.users += 1
    try:
        yield
    finally:
        gate.users -= 1
        if gate.users == 0:
            setattr(dynamo, _OPTION, gate.option_before)

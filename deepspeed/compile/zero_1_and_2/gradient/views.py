# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""The entries of ``averaged_gradients`` between the last backward of a step and the step."""

import functools
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from ..layout import ViewSpec
from .native import HandedOver


class _NotMade:
    """The placeholder of each view in a PartitionViews, until code reads an entry."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        # Torch's functions read a list without its methods, and find placeholders: make the views, and call again.
        for argument in (*args, *(kwargs or {}).values()):
            if isinstance(argument, PartitionViews):
                argument.make()
        return function(*args, **(kwargs or {}))


_NOT_MADE = _NotMade()


class PartitionViews(list):
    """``averaged_gradients[group]``: views of the targets in this rank's partition, in partition order.

    The list also has an entry without elements for each run of padding. The first read of an entry makes the views.
    Until then only the reducer holds the targets, and their memory is free as soon as the reducer forgets them.

    Attributes and methods have the names of the base's own entries, because the base's code and users' code look these
    names up. As in the base, a caller may put other tensors into the list: the step calls :meth:`read` first.

    Args:
        handed_over: the targets by their offset in the partition, in elements, each 1-D in the gradient accumulation
            dtype, and the 1-D tensor of ``partition_numel`` elements in which all targets lie, if they share one.
        specs: what ``Layout.view_specs()`` returned for the group.
        padding: a tensor without elements, in the dtype of the targets and on their device.
        release: a function that makes the reducer forget the targets.
        is_fixed: whether targets must not move. They lie in host memory then, which the step overwrites with new
            parameters.
    """

    def __init__(
        self,
        handed_over: HandedOver,
        specs: List[ViewSpec],
        padding: torch.Tensor,
        release: Callable[[], None],
        is_fixed: bool = False,
    ):
        super().__init__([_NOT_MADE] * len(specs))
        self._handed_over: Optional[HandedOver] = handed_over
        # Offset -> target, in place of `_handed_over`, once the caller has replaced a gradient.
        self._replaced: Dict[int, torch.Tensor] = {}
        self._specs = specs
        self._padding = padding
        self._release = release
        self._is_fixed = is_fixed
        self._is_made = False  # whether the views exist: the caller may have changed the list since

    @property
    def flat_partition(self) -> Optional[torch.Tensor]:
        """The tensor in which all targets lie, if they share one."""
        return None if self._handed_over is None else self._handed_over.flat_partition

    def targets(self) -> List[torch.Tensor]:
        """Lists the 1-D gradients of the parameters in this rank's partition, as :meth:`read` has found them."""
        targets = self._targets()
        return [targets[spec.offset] for spec in self._specs if not spec.is_padding]

    def by_offset(self) -> List[Tuple[int, torch.Tensor]]:
        """Lists (offset in elements, 1-D gradient) in ascending order."""
        return sorted(self._targets().items(), key=lambda entry: entry[0])

    def without_padding(self) -> List[torch.Tensor]:
        """Lists the views without the padding, one for each parameter in this rank's partition."""
        return [view for view, spec in zip(self, self._specs, strict=True) if not spec.is_padding]

    def _targets(self):
        return self._replaced if self._handed_over is None else self._handed_over.targets()

    # Views, made at the first read ---------------------------------------------------------------------------------

    def make(self) -> None:
        """Makes the views, unless they exist."""
        if not self._is_made:
            targets = self._targets()
            super().__setitem__(slice(None), [self._view(targets.get(spec.offset), spec) for spec in self._specs])
            self._is_made = True

    def __radd__(self, other: List) -> List:
        return other + list(self)

    def _view(self, target, spec):
        if spec.is_padding:
            # Padding has no target, but an entry must keep its place: the base finds parameters by position.
            entry = self._padding.detach()
            # The base's norm skips views with this mark, so that the other views pair up with the parameters.
            entry._zero_padding = True
            return entry
        if target is None:
            raise RuntimeError("these gradients were dropped, because a later backward raised")
        return target.view((spec.numel,) if spec.shape is None else spec.shape)

    def _forget_views(self):
        super().__setitem__(slice(None), [_NOT_MADE] * len(self._specs))
        self._is_made = False

    # Changes of the caller ------------------------------------------------------------------------------------------

    def read(self, entries: Any, name: str) -> None:
        """Makes each entry that lies in other memory than its target the new target. Called before a step.

        ``entries`` is this list, to which the caller may have assigned, or the object with which the caller has
        replaced it. ``name`` is for an error.

        Raises:
            ValueError: if ``entries`` is not a list of tensors with as many elements as their targets.
        """
        if entries is self and not self._is_made:
            return
        if not isinstance(entries, (list, tuple)) or len(entries) != len(self._specs):
            raise ValueError(
                f"{name} is not a list of {len(self._specs)} tensors; assign a tensor to an entry of the list"
            )
        found = [(spec, entry) for spec, entry in zip(self._specs, entries, strict=True) if not spec.is_padding]
        for spec, entry in found:
            if not isinstance(entry, torch.Tensor) or entry.numel() != spec.numel:
                index = self._specs.index(spec)
                raise ValueError(f"{name}[{index}] is not a tensor of {spec.numel} elements; assign one")
        # One native call compares all entries.
        handed_over = self._handed_over
        if entries is self and handed_over is not None and handed_over.are_views([entry for _, entry in found]):
            return
        targets, flat, changed = self._targets(), self.flat_partition, {}
        for spec, entry in found:
            if flat is None:
                place = targets[spec.offset].data_ptr()
            else:
                place = flat.data_ptr() + spec.offset * flat.element_size()
            # Assigning `.data`, of the entry or of the tensor that it is a view of, gives it other memory.
            if entry.data_ptr() != place or entry.dtype != self._padding.dtype or not entry.is_contiguous():
                # The step writes new parameters over fixed targets, whose memory this entry may share: copy.
                target = entry.detach().to(self._padding.device, self._padding.dtype, copy=self._is_fixed)
                changed[spec.offset] = target.contiguous().view(-1)
        if changed:
            self._replaced, self._handed_over = {**targets, **changed}, None
        if changed or entries is not self:
            self._forget_views()

    # The targets' end -----------------------------------------------------------------------------------------------

    def move_flat_partition(self, device: torch.device, non_blocking: bool = False) -> None:
        """Moves the gradients to ``device``. The base calls this in ``offload_states()`` and ``reload_states()``."""
        if self._is_fixed:
            return
        self.read(self, "averaged_gradients")
        self._padding = self._padding.to(device)
        flat, targets = self.flat_partition, self._targets()
        if flat is not None:
            flat.data = flat.data.to(device, non_blocking=non_blocking)
        for offset, target in targets.items():
            if flat is None:
                target.data = target.data.to(device, non_blocking=non_blocking)
            else:
                target.data = flat.data.narrow(0, offset, target.numel())
        self._forget_views()

    def take(self) -> List[Tuple[int, torch.Tensor]]:
        """Returns (offset in elements, 1-D target) for each target in ascending order, and leaves this list empty.

        This object and the reducer drop their references: a target's memory is free when the caller drops the target.
        """
        targets = self.by_offset()
        self.release_grad_buffers()
        return targets

    def release_grad_buffers(self) -> None:
        """Makes this object and the reducer drop the gradients. Repeated calls are allowed."""
        super().clear()
        self._handed_over, self._replaced, self._is_made = None, {}, True
        self._release()


def _after_views_are_made(name):
    method = getattr(list, name)

    @functools.wraps(method)
    def made_first(self, *args, **kwargs):
        self.make()
        return method(self, *args, **kwargs)

    return made_first


# The other methods that read or change entries of a list. The length needs no views.
for _name in (
    *("__add__", "__contains__", "__delitem__", "__getitem__", "__iadd__", "__imul__", "__iter__", "__mul__"),
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__repr__", "__reversed__", "__rmul__"),
    *("__setitem__", "append", "clear", "copy", "count", "extend", "index", "insert", "pop", "remove", "reverse"),
    "sort",
):
    setattr(PartitionViews, _name, _after_views_are_made(_name))

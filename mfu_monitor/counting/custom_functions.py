"""Tells forward products that a custom ``autograd.Function`` runs again in its backward, with gradients off.

Nothing marks them, so two things are followed. Operands: a repeated product takes an operand that the same operator
took in the same place in a custom forward. Gradients: what depends on an incoming gradient is new in backward, also
where it meets a weight as an activation did before (the gradient through a tied weight).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from mfu_monitor.counting.frames import CallSite
from mfu_monitor.counting.storages import ByStorage

__all__ = ["FunctionRepeats"]

Use = tuple[Any, ...]
"""Operator, place among its operands, and the part of the storage that was taken."""


class FunctionRepeats:
    """Follows operands and gradients through the custom functions of a step."""

    def __init__(self) -> None:
        self._uses: ByStorage[set[Use]] = ByStorage()
        self._gradients: ByStorage[bool] = ByStorage()

    def saw(self, op: str, site: CallSite, operands: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> bool:
        """An operator ran; True if it is a forward one that a custom backward runs again."""
        if site.in_custom_backward:
            return self._repeats(op, site, operands, outputs)
        if site.function_forwards:
            self._remember(op, operands)
        return False

    def _remember(self, op: str, operands: Sequence[torch.Tensor]) -> None:
        for place, tensor in enumerate(operands):
            uses = self._uses.get(tensor)
            if uses is None:
                self._uses.set(tensor, uses := set())
            uses.add(_use(op, place, tensor))

    def _repeats(
        self, op: str, site: CallSite, operands: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> bool:
        self._mark(t for t in site.incoming_gradients if isinstance(t, torch.Tensor))
        read = [t for t in operands if not any(t is result for result in outputs)]
        if self._gradients.first(read) or not any(t.numel() for t in read) or _makes_room(op):
            self._mark(outputs)  # room is mostly made for a kernel that nobody sees to write a gradient there
            return False
        return any(_use(op, i, t) in (self._uses.get(t) or ()) for i, t in enumerate(operands))

    def _mark(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if self._gradients.get(tensor) is None:
                self._gradients.set(tensor, True)


def _use(op: str, place: int, tensor: torch.Tensor) -> Use:
    strides = tensor.stride() if tensor.layout == torch.strided and not tensor.is_nested else ()
    offset = tensor.storage_offset() if strides else 0
    return op, place, offset, tuple(tensor.shape) if not tensor.is_nested else (), strides


def _makes_room(op: str) -> bool:
    return op.rpartition("::")[2].startswith(("empty", "new_empty"))

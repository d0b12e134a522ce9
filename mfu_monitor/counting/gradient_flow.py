"""Follows gradients out of the backward pass: into hooks, and into updates that are written by hand.

A gradient is what the engine computed or started from, and what was made of it. Two questions follow. A product that
takes a gradient outside of any graph and of any module updates parameters: it is not a forward of the model. A module
that a hook calls is a forward run again where the module ran in forward and no gradient enters it; else it is work of
its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from mfu_monitor.counting.frames import CallSite
from mfu_monitor.counting.storages import ByStorage

__all__ = ["GradientFlow"]


class GradientFlow:
    """Which storages hold gradients, and which modules ran in forward."""

    def __init__(self) -> None:
        self._gradients: ByStorage[bool] = ByStorage()
        self._parameters: ByStorage[bool] = ByStorage()
        self._ran: set[int] = set()
        self._zeros: ByStorage[bool] = ByStorage()

    def saw_accumulation(self, parameter: torch.Tensor) -> None:
        """A gradient of this parameter was accumulated; the parameter, once updated, is not one itself."""
        self._parameters.set(parameter, True)

    def is_with_zero_tangent(self, op: str, operands: Iterable[torch.Tensor], outputs: Iterable[torch.Tensor]) -> bool:
        """An operator ran; True where it takes a zero that autograd expanded to a tangent that nobody gave.

        Forward-mode derivatives of constants are such zeros: one element in memory, of which no result depends.
        """
        if op == "aten::zeros":
            for output in outputs:
                if output.numel() == 1:
                    self._zeros.set(output, True)
            return False
        return bool(self._zeros) and any(t.numel() > 1 and self._zeros.get(t) for t in operands)

    def updates(
        self, site: CallSite, operands: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], *, in_backward: bool
    ) -> bool:
        """An operator ran; True where it works on a gradient outside of backward, of any graph and of any module."""
        takes = self._takes_gradient(site, operands)
        if in_backward:
            if takes or not site.in_hook:
                self._mark(outputs)
            return False
        self._ran.update(id(module) for module in site.modules)
        if not takes or site.modules or site.function_forwards or site.in_transform:
            return False
        if torch.is_grad_enabled() and any(t.requires_grad for t in operands):
            return False
        self._mark(t for t in (*outputs, *_written(operands, outputs)) if self._parameters.get(t) is None)
        return True

    def repeats_module(self, site: CallSite, operands: Sequence[torch.Tensor]) -> bool:
        """True where a hook runs a module's forward again."""
        return any(id(m) in self._ran for m in site.modules) and not self._takes_gradient(site, operands)

    def _takes_gradient(self, site: CallSite, operands: Sequence[torch.Tensor]) -> bool:
        if site.in_hook:
            self._mark(t for t in site.root_gradients if isinstance(t, torch.Tensor))
        return self._gradients.first(operands) is not None

    def _mark(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if not tensor.requires_grad or tensor.grad_fn is not None:
                self._gradients.set(tensor, True)


def _written(operands: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """What an operator without a result (``_foreach_add_``) wrote: any of its operands."""
    return () if outputs else operands

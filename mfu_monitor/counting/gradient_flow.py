"""Follows gradients out of the backward pass: into hooks, and into updates that are written by hand.

A gradient is what the engine computed or started from, and what was made of it. Two questions follow. A product that
takes a gradient outside of any graph and of any module updates parameters: it is not a forward of the model. A module
that a hook calls is a forward run again where the module ran in forward and no gradient enters it; else it is work of
its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from mfu_monitor.counting.calls import Call
from mfu_monitor.counting.frames import CallSite
from mfu_monitor.counting.storages import StorageFacts, Storages

__all__ = ["GradientFlow"]


class GradientFlow:
    """Which storages hold gradients, and which modules ran in forward.

    Args:
        storages: of the step.
    """

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._ran: set[int] = set()
        self._has_zeros = False
        """Some storage holds a zero that autograd may expand."""

    def saw_accumulation(self, parameter: torch.Tensor) -> None:
        """A gradient of this parameter was accumulated; the parameter, once updated, is not one itself."""
        self._storages.of(parameter).got_gradient = True

    def saw_modules(self, modules: Iterable[nn.Module]) -> None:
        """These modules run in forward."""
        self._ran.update(map(id, modules))

    def is_with_zero_tangent(self, call: Call) -> bool:
        """An operator ran; True where it takes a zero that autograd expanded to a tangent that nobody gave.

        Forward-mode derivatives of constants are such zeros: one element in memory, of which no result depends.
        """
        if call.operator.name == "aten::zeros":
            for output, facts in zip(call.outputs, call.given, strict=True):
                if output.numel() == 1:
                    facts.is_zero_tangent = self._has_zeros = True
            return False
        if not self._has_zeros:
            return False
        return any(f.is_zero_tangent and t.numel() > 1 for t, f in zip(call.operands, call.taken, strict=True))

    def updates(self, call: Call, site: CallSite, *, in_backward: bool) -> bool:
        """An operator ran; True where it works on a gradient outside of backward, of any graph and of any module."""
        takes = self._takes_gradient(call, site) if site.in_hook else call.takes_gradient
        if in_backward:
            if takes or not site.in_hook:
                _mark(call.outputs, call.given)
            return False
        if not takes or site.modules or site.function_forwards or site.in_transform:
            return False
        if call.asks_gradients and torch.is_grad_enabled():
            return False
        _mark(call.outputs, call.given, but_parameters=True)
        if not call.outputs:  # an operator without a result (``_foreach_add_``) wrote any of its operands
            _mark(call.operands, call.taken, but_parameters=True)
        return True

    def repeats_module(self, call: Call, site: CallSite) -> bool:
        """True where a hook runs a module's forward again."""
        return any(id(m) in self._ran for m in site.modules) and not self._takes_gradient(call, site)

    def _takes_gradient(self, call: Call, site: CallSite) -> bool:
        if site.in_hook:
            roots = site.root_gradients
            _mark(roots, self._storages.of_all(roots))
        return any(facts.is_gradient for facts in call.taken)


def _mark(tensors: Sequence[torch.Tensor], facts: Sequence[StorageFacts], *, but_parameters: bool = False) -> None:
    for tensor, known in zip(tensors, facts, strict=True):
        if but_parameters and known.got_gradient:
            continue
        if not tensor.requires_grad or tensor.grad_fn is not None:
            known.is_gradient = True

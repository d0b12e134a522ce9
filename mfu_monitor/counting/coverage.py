"""Parameters that got a gradient although no operator we saw used them: a kernel hidden from the dispatcher ran.

A parameter is used where a product takes it, or where it meets other data (a norm's scale, an embedding's rows). An
operator that takes parameters only (a cast, a copy) makes another form of them and is not a use of its own: the kernel
that gets the cast weight may be hidden all the same. ``empty_like`` makes room, often for the gradient to come.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mfu_monitor.counting.calls import Call
from mfu_monitor.counting.module_names import clean_fqn
from mfu_monitor.counting.step_record import UncoveredParameter
from mfu_monitor.counting.storages import Storages
from mfu_monitor.internals.tensors import storage_id

__all__ = ["ParameterCoverage"]


class ParameterCoverage:
    """Which parameters of a model were used by seen operators, and which got a gradient."""

    def __init__(self, model: nn.Module | None) -> None:
        named = [] if model is None else list(model.named_parameters())
        self._sizes = {clean_fqn(name): p.numel() for name, p in named if not is_lazy(p)}
        self._owner = {address: clean_fqn(name) for name, p in named for address in _addresses(p)}
        """Parameter by the storages it is made of: one, or the local parts of a wrapper such as a DTensor."""
        self._multiplied_by = _multiplied_by(model)
        self._touched: set[str] = set()
        self._with_gradient: set[str] = set()
        self.storages = Storages(self._owner)

    def module_of(self, tensor: torch.Tensor) -> str | None:
        """Name of the module that multiplies by a parameter; None for any other tensor."""
        return self._multiplied_by.get(storage_id(tensor))

    def saw(self, call: Call) -> None:
        """An operator of the forward or backward pass ran."""
        if not call.takes_parameters or call.operator.has_shape_only:
            return
        names = frozenset[str]().union(*(facts.parameters for facts in call.taken))
        meets_data = any(not f.parameters and t.numel() > 1 for t, f in zip(call.operands, call.taken, strict=True))
        if call.operator.formula is not None or meets_data or all(t.numel() <= 1 for t in call.outputs):
            self._touched |= names
            return
        for facts in call.given:
            if not facts.is_parameter:
                facts.parameters = names

    def touch(self, tensors: Iterable[torch.Tensor]) -> None:
        """What is known to be counted as a whole used these tensors."""
        if self._owner:
            self._touched.update(name for facts in self.storages.of_all(tensors) for name in facts.parameters)

    def saw_gradient(self, parameter: torch.Tensor) -> None:
        """The autograd engine accumulates a gradient."""
        owners = (self._owner.get(address) for address in _addresses(parameter))
        self._with_gradient.update(name for name in owners if name is not None)

    def cover(self, module: nn.Module) -> None:
        """A formula counted this module as a whole."""
        for parameter in module.parameters():
            self._touched.update(self._owner[a] for a in _addresses(parameter) if a in self._owner)

    def uncovered(self) -> tuple[UncoveredParameter, ...]:
        """Parameters with a gradient that nothing touched."""
        total = sum(self._sizes.values()) or 1
        return tuple(
            UncoveredParameter(name=name, numel=numel, share_of_parameters=numel / total)
            for name, numel in self._sizes.items()
            if name in self._with_gradient - self._touched
        )


def _multiplied_by(model: nn.Module | None) -> dict[int, str]:
    """Module name by a parameter's storage. What is tied to an embedding is multiplied by the other layer."""
    found: dict[int, tuple[bool, str]] = {}
    for name, module in () if model is None else model.named_modules():
        is_embedding = isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False):
            for address in _addresses(parameter):
                if address not in found or (found[address][0] and not is_embedding):
                    found[address] = (is_embedding, clean_fqn(name))
    return {address: name for address, (_, name) in found.items()}


def _addresses(tensor: torch.Tensor) -> list[int]:
    if is_lazy(tensor):
        return []  # of a lazy module before its first forward: it has neither shape nor storage
    if not hasattr(type(tensor), "__tensor_flatten__"):
        return [storage_id(tensor)]
    parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])  # type: ignore[attr-defined]
    return [address for part in parts if isinstance(part, torch.Tensor) for address in _addresses(part)]

"""Parameters that got a gradient although no operator we saw touched them: a kernel hidden from the dispatcher ran."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mfu_monitor.counting.records import UncoveredParameter
from mfu_monitor.counting.scope import clean_fqn

__all__ = ["ParameterCoverage"]


class ParameterCoverage:
    """Which parameters of a model were touched by seen operators, and which got a gradient."""

    def __init__(self, model: nn.Module | None) -> None:
        named = [] if model is None else list(model.named_parameters())
        self._sizes = {clean_fqn(name): p.numel() for name, p in named if not is_lazy(p)}
        self._owner = {address: clean_fqn(name) for name, p in named for address in _addresses(p)}
        """Parameter by the storages it is made of: one, or the local parts of a wrapper such as a DTensor."""
        self._multiplied_by = _multiplied_by(model)
        self._touched: set[int] = set()
        self._with_gradient: set[str] = set()

    def module_of(self, tensor: torch.Tensor) -> str | None:
        """Name of the module that multiplies by a parameter; None for any other tensor."""
        return self._multiplied_by.get(_address(tensor))

    def touch(self, tensors: Iterable[torch.Tensor]) -> None:
        """An operator of the forward or backward pass used these tensors."""
        if self._owner:
            self._touched.update(_address(t) for t in tensors)

    def saw_gradient(self, node: object) -> None:
        """The autograd engine accumulates a gradient; ``node`` is an ``AccumulateGrad`` or anything else."""
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            owners = (self._owner.get(address) for address in _addresses(variable))
            self._with_gradient.update(name for name in owners if name is not None)

    def cover(self, module: nn.Module) -> None:
        """A formula counted this module as a whole."""
        for parameter in module.parameters():
            self._touched.update(_addresses(parameter))

    def uncovered(self) -> tuple[UncoveredParameter, ...]:
        """Parameters with a gradient that nothing touched."""
        total = sum(self._sizes.values()) or 1
        touched = {self._owner[address] for address in self._touched & self._owner.keys()}
        return tuple(
            UncoveredParameter(name=name, numel=numel, share_of_parameters=numel / total)
            for name, numel in self._sizes.items()
            if name in self._with_gradient - touched
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
        return [_address(tensor)]
    parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])  # type: ignore[attr-defined]
    return [address for part in parts if isinstance(part, torch.Tensor) for address in _addresses(part)]


def _address(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse layouts and some wrapper subclasses have no storage
        return id(tensor)

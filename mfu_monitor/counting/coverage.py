"""Parameters that got a gradient although no operator we saw touched them: a kernel hidden from the dispatcher ran."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from mfu_monitor.counting.records import UncoveredParameter
from mfu_monitor.counting.scope import clean_fqn

__all__ = ["ParameterCoverage"]


class ParameterCoverage:
    """Which parameters of a model were touched by seen operators, and which got a gradient."""

    def __init__(self, model: nn.Module | None) -> None:
        named = [] if model is None else list(model.named_parameters())
        self._names = {_address(p): clean_fqn(name) for name, p in named}
        self._sizes = {_address(p): p.numel() for _, p in named}
        self._touched: set[int] = set()
        self._with_gradient: set[int] = set()

    def module_of(self, tensor: torch.Tensor) -> str | None:
        """Name of the module that owns a parameter; None for any other tensor."""
        name = self._names.get(_address(tensor))
        return None if name is None else name.rpartition(".")[0]

    def touch(self, tensors: Iterable[torch.Tensor]) -> None:
        """An operator of the forward or backward pass used these tensors."""
        if self._names:
            self._touched.update(_address(t) for t in tensors)

    def saw_gradient(self, node: object) -> None:
        """The autograd engine accumulates a gradient; ``node`` is an ``AccumulateGrad`` or anything else."""
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            self._with_gradient.add(_address(variable))

    def cover(self, module: nn.Module) -> None:
        """A formula counted this module as a whole."""
        self._touched.update(_address(p) for p in module.parameters())

    def uncovered(self) -> tuple[UncoveredParameter, ...]:
        """Parameters with a gradient that nothing touched."""
        total = sum(self._sizes.values()) or 1
        missing = (self._with_gradient & self._names.keys()) - self._touched
        return tuple(
            UncoveredParameter(
                name=self._names[address],
                numel=self._sizes[address],
                share_of_parameters=self._sizes[address] / total,
            )
            for address in self._names
            if address in missing
        )


def _address(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse layouts and some wrapper subclasses have no storage
        return id(tensor)

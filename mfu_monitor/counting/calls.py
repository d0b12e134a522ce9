"""One operator that ran, and what is the same in all its calls: asked of torch once, not at every call."""

from __future__ import annotations

from typing import Any

import torch

from mfu_monitor.counting.eager_attention import FOLLOWED
from mfu_monitor.counting.storages import StorageFacts, Storages
from mfu_monitor.formulas.nested import is_strided_nested
from mfu_monitor.formulas.registry import Formula, find_formula, formulas_version, is_ignored, operator_name
from mfu_monitor.formulas.traffic import traffic_of
from mfu_monitor.internals.dispatcher import is_composite
from mfu_monitor.internals.tensors import collect_tensors, tensors_in
from mfu_monitor.internals.traces import may_write

__all__ = ["Call", "Operator", "operator_of"]

_MANY_OPERATORS = 20_000
"""Higher-order operators and those of tests may come and go."""


class Operator:
    """What the dispatcher calls: an overload or a higher-order operator.

    Args:
        func: it.
    """

    __slots__ = (
        "formula",
        "func",
        "has_shape_only",
        "is_followed",
        "is_ignored",
        "is_view",
        "makes_room",
        "may_decompose",
        "may_write",
        "name",
        "raises_versions",
        "traffic",
        "version",
        "wraps_memory",
    )

    def __init__(self, func: Any) -> None:
        self.version = formulas_version()
        self.func = func
        self.name = operator_name(func)
        bare = self.name.rpartition("::")[2]
        self.formula: Formula | None = find_formula(self.name)
        self.is_ignored = is_ignored(self.name)
        self.may_decompose = self.formula is None and is_composite(func)
        self.is_view = bool(getattr(func, "is_view", False))
        self.may_write = may_write(func)
        self.raises_versions = not func.__name__.startswith("_foreach")
        self.wraps_memory = func.__name__.startswith("lift_fresh")
        """Of memory that is not torch's: nothing is computed."""
        self.makes_room = bare.startswith(("empty", "new_empty"))
        """For somebody else to write to."""
        self.has_shape_only = bare.endswith("_like") or bare.startswith("new_")
        """Of its operand: that is not a use."""
        self.traffic = traffic_of(func)
        self.is_followed = self.name in FOLLOWED


_operators: dict[int, Operator] = {}


def operator_of(func: Any) -> Operator:
    """What is known of an operator, found again when a formula came or went."""
    found = _operators.get(id(func))
    if found is not None and found.version == formulas_version():
        return found
    if len(_operators) > _MANY_OPERATORS:
        _operators.clear()
    found = _operators[id(func)] = Operator(func)  # which keeps the operator, and with it the number
    return found


class Call:
    """One operator that ran, its tensors, and what is known of their storages.

    What each part of the counter asks first of the operands is found in one pass over them.

    Args:
        operator: which.
        args: positional arguments as dispatched.
        kwargs: keyword arguments as dispatched.
        output: what it gave.
        storages: of the step.
    """

    __slots__ = (
        "args",
        "asks_gradients",
        "given",
        "kwargs",
        "node",
        "operands",
        "operator",
        "output",
        "outputs",
        "taken",
        "takes_gradient",
        "takes_parameters",
        "takes_unknown",
    )

    def __init__(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, storages: Storages
    ) -> None:
        self.operator = operator
        self.args = args
        self.kwargs = kwargs
        self.output = output
        self.operands: list[torch.Tensor] = []
        collect_tensors(args, self.operands)
        if kwargs:
            collect_tensors(kwargs.values(), self.operands)
        self.outputs = [output] if isinstance(output, torch.Tensor) else tensors_in(output)
        self.taken: list[StorageFacts] = storages.of_all(self.operands)
        """Of the operands, in their order."""
        self.given: list[StorageFacts] = storages.of_all(self.outputs)
        """Of the results, in their order."""
        self.node: Any = None
        """What the engine executes; None outside of backward."""
        self.asks_gradients = self.takes_gradient = self.takes_parameters = self.takes_unknown = False
        for tensor in self.operands:
            if tensor.requires_grad:
                self.asks_gradients = True
        for facts in self.taken:
            if facts.is_gradient:
                self.takes_gradient = True
            if facts.parameters:
                self.takes_parameters = True
            if not facts.is_known:
                self.takes_unknown = True

    def moved_bytes(self) -> int:
        """Bytes that the call must move at least."""
        return self.operator.traffic.moved(self.args, self.kwargs, self.output, self.operands, self.outputs)

    @property
    def written(self) -> list[StorageFacts]:
        """What may have been written in place."""
        return self.taken if self.operator.may_write else []

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the operands; a strided nested tensor has none and goes by (sequences, values)."""
        try:
            return tuple([t.shape for t in self.operands])
        except RuntimeError:
            return tuple([_shape(t) for t in self.operands])


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    if is_strided_nested(tensor):
        return (int(tensor.size(0)), tensor.numel())
    return tuple(tensor.shape)

"""Which operator costs what: formulas by operator name, and the operators that are ignored by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mfu_monitor.formulas.cost import OpCost, OperatorCall

__all__ = ["Formula", "find_formula", "formula", "is_ignored", "register_flop_formula", "register_module_formula"]

Formula = Callable[[OperatorCall], OpCost]


def formula(*names: str) -> Callable[[Formula], Formula]:
    """Register an own formula for qualified operator names such as ``"aten::mm"``."""
    raise NotImplementedError


def find_formula(name: str) -> Formula | None:
    """The formula of a qualified operator name, the user's before ours."""
    raise NotImplementedError


def is_ignored(name: str) -> bool:
    """True for operators that count 0 by convention (elementwise, norms, look-ups, copies)."""
    raise NotImplementedError


def register_flop_formula(op: Any) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Public: shapes -> FLOPs for an operator the library does not know."""
    raise NotImplementedError


def register_module_formula(target: type | str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Public: forward FLOPs of a module class the dispatcher cannot see."""
    raise NotImplementedError

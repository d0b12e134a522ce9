"""The answer of a formula: the FLOPs of one operator call, split by convention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["OpCost", "OperatorCall"]


@dataclass(frozen=True, slots=True)
class OpCost:
    """FLOPs of one call; one multiply-add is 2 FLOPs.

    What the hardware executes is ``flops + masked_flops + kernel_recompute_flops``.
    """

    flops: int
    """What the mathematics needs: attended query-key pairs only, no recomputation."""
    palm_flops: int | None = None
    """The same with attention as its full square; None where it equals ``flops``."""
    masked_flops: int = 0
    """Products of masked-out pairs that the kernel runs all the same (a mask handed over as a dense tensor)."""
    kernel_recompute_flops: int = 0
    """What the kernel redoes inside itself: flash attention's backward computes Q K^T once more."""
    precision: str | None = None
    """Set where the operands' dtype does not say it (packed fp4, int8 accumulations); else None."""


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """One operator call as a formula sees it: arguments by their schema names, defaults filled in.

    Formulas read shapes, dtypes and scalar arguments; the few that must read contents (masks, document lengths) do so
    because the shapes do not hold the answer, and they run on counted steps only.
    """

    name: str
    """Qualified operator name without overload: ``"aten::mm"``."""
    arguments: Mapping[str, Any]
    output: Any

    def __getitem__(self, argument: str) -> Any:
        return self.arguments[argument]

    def get(self, argument: str, default: Any = None) -> Any:
        """The argument, or ``default`` where this version of the operator has none of that name."""
        return self.arguments.get(argument, default)

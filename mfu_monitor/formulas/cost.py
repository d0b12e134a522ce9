"""The answer of a formula: the FLOPs of one operator call, split by convention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mfu_monitor.errors import MFUMonitorError
from mfu_monitor.internals.tensors import is_fake

__all__ = ["OpCost", "OperatorCall", "UncountableCallError", "read_integers"]


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
    note: str | None = None
    """An assumption made because contents could not be read; belongs into the step record's notes. Else None."""


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

    @property
    def result(self) -> torch.Tensor:
        """The result: the first of several, or the ``out`` argument of an operator that returns nothing."""
        out = self.arguments.get("out")
        if isinstance(out, torch.Tensor):
            return out
        result = self.output[0] if isinstance(self.output, (tuple, list)) else self.output
        if not isinstance(result, torch.Tensor):
            raise UncountableCallError(f"{self.name} returned {type(result).__name__}, where a tensor was expected")
        return result

    def get(self, argument: str, default: Any = None) -> Any:
        """The argument, or ``default`` where this version of the operator has none of that name."""
        return self.arguments.get(argument, default)


class UncountableCallError(MFUMonitorError):
    """This call of a known operator cannot be counted; the counter reports it as unsupported."""


def read_integers(tensor: Any) -> list[int] | None:
    """The contents of a small integer tensor (document ends, group offsets), or None where there are none to read.

    None for meta and fake tensors, and while a CUDA graph is being captured, where reading would break the capture.
    Reading waits for the device, so only formulas whose answer shapes do not hold may use it:
    they run on counted steps.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta" or is_fake(tensor):
        return None
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    return [int(value) for value in tensor.tolist()]

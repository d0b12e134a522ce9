"""One row of the conformance table, and how to run it.

A row's expected values are arithmetic on its shapes, written as text, so that the same row can be read in the table,
checked by the tests and printed in the documentation. One multiply-add is 2 FLOPs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from mfu_monitor.counting.counter import FlopCounter
from mfu_monitor.counting.step_record import StepRecord

__all__ = ["Case", "Phase", "Workload", "build", "evaluate", "perform", "run"]

Phase = Literal["inference", "training", "step"]

Workload = tuple[Callable[..., Any], tuple[Any, ...]]
"""A module or function, and its inputs."""


def triangle(S: int) -> int:
    """Pairs of a causal square: S (S + 1) / 2."""
    return S * (S + 1) // 2


def window(S: int, W: int) -> int:
    """Pairs of a causal window of W <= S keys, the query's own included: W S - W (W - 1) / 2."""
    return W * S - W * (W - 1) // 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """A call whose FLOPs were derived by hand.

    The counts are Python expressions over numbers, ``triangle(S)`` and ``window(S, W)``.
    """

    id: str
    description: str
    build: Callable[[], Workload]
    """Makes the workload, on whatever the default device is; inputs that need a gradient say so."""
    phase: Phase
    """``"training"``: forward and backward of the sum of the outputs. ``"inference"``: forward without gradients.
    ``"step"``: the function itself is the whole step."""
    model_flops: str
    hardware_flops: str | None = None
    """What the kernels of the first device execute; None where that is ``model_flops``."""
    forward_flops: str | None = None
    """Model FLOPs of the forward alone, where the row is a training one; the rest is backward."""
    palm_flops: str | None = None
    """With attention as its full square; None where that is ``model_flops``."""
    recompute_flops: str = "0"
    optimizer_flops: str = "0"
    unsupported_ops: tuple[str, ...] = ()
    """What has no formula and must be reported."""
    devices: tuple[str, ...] = ("cpu",)
    """``"meta"`` where shapes suffice: no mask contents, nothing that a meta tensor cannot do."""
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Entered around the run: a kernel choice, an autocast."""
    covers: tuple[str, ...] = ()
    """Cases from the field that this row is a form of."""


def evaluate(expression: str) -> int:
    """The value of a row's arithmetic."""
    names = {"triangle": triangle, "window": window, "prod": math.prod, "sum": sum, "range": range}
    value = eval(expression, {"__builtins__": {}}, names)  # the rows are our own source text
    assert isinstance(value, int), expression
    return value


def run(case: Case, device: str = "cpu") -> StepRecord:
    """Build the row's workload on a device and count it."""
    function, inputs = build(case, device)
    counter = FlopCounter(function if isinstance(function, nn.Module) else None)
    perform(case, function, inputs, counter)
    return counter.record


def build(case: Case, device: str) -> Workload:
    """The row's workload on a device."""
    with torch.device(device):
        return case.build()


def perform(
    case: Case, function: Callable[..., Any], inputs: Sequence[Any], counter: AbstractContextManager[Any]
) -> None:
    """Run a workload as the row says, inside a counter."""
    with torch.set_grad_enabled(case.phase != "inference"), case.context(), counter:
        output = function(*inputs)
        if case.phase == "training":
            _scalar(output).backward()


def _scalar(output: Any) -> torch.Tensor:
    """A sum of everything that can be differentiated: a loss without products of its own."""
    return sum((t.sum() for t in _differentiable(output)), start=torch.zeros((), device=_first_device(output)))


def _differentiable(output: Any) -> Iterable[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        values = output.values() if output.is_nested and output.layout == torch.jagged else output
        return [values] if values.requires_grad else []
    if isinstance(output, dict):
        output = output.values()
    if isinstance(output, (list, tuple)) or not isinstance(output, (str, bytes, int, float, type(None))):
        return [tensor for part in output for tensor in _differentiable(part)]
    return []


def _first_device(output: Any) -> torch.device:
    found = next(iter(_differentiable(output)), None)
    assert found is not None, "a training row needs an output with a gradient"
    return found.device

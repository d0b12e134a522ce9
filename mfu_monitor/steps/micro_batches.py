"""Whether a step ran several micro-batches while it was given one: its tokens are those of one then. Pure."""

from __future__ import annotations

import math

from mfu_monitor.counting.step_record import OpRecord, Phase, StepRecord
from mfu_monitor.steps.batch import BatchCounts

__all__ = ["unseen_micro_batches"]


def unseen_micro_batches(record: StepRecord, counts: BatchCounts) -> int:
    """How many batches of this size the step ran; 1 where it ran the one that it was given, or that is not known.

    Every product of the forward ran so many times, and one run of it took all the tokens of the batch.

    Args:
        record: what the step ran.
        counts: what the batch holds that the step was given.

    Example:
        >>> unseen_micro_batches(record, BatchCounts(tokens=4096, samples=4))
        4
    """
    rows = counts.tokens or counts.samples
    forward = [op for op in record.ops if op.phase is Phase.FORWARD and op.totals.hardware_flops]
    if not rows or not any(_takes(op, rows) for op in forward):
        return 1
    calls: dict[tuple[str, str], int] = {}
    for op in forward:
        calls[op.op, op.module_fqn] = calls.get((op.op, op.module_fqn), 0) + op.calls
    return math.gcd(*calls.values())


def _takes(op: OpRecord, rows: int) -> bool:
    return any(shape and rows in (shape[0], math.prod(shape[:2])) for shape in op.shapes)

"""A run on a clock of its own, written as JSON lines: a drop by waiting for data, its recovery, another kind of step.

The recorded file is what users' disks hold. It is made once and read ever after: `write.py` leaves it alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import mfu_monitor as mm
from mfu_monitor.counting.step_record import FlopTotals, OpRecord, Phase, StepRecord

__all__ = ["record_run"]

PEAK_FLOPS_PER_S = 1e12
FORWARD_FLOPS = 150 * 10**9
"""One batch: 150 forward, 300 backward, 60 recomputed, in units of 1e9; at one second 45% of the peak, HFU 51%."""


class Clock:
    """Moves only when told."""

    name = "golden"

    def __init__(self) -> None:
        self.now_s = 100.0

    def mark(self) -> float:
        return self.now_s

    def elapsed_s(self, start: float, end: float) -> float | None:
        return end - start


class Counter:
    """Gives a record by the batch that is running."""

    def __init__(self, scale: int) -> None:
        self._scale = scale
        self.record: Any = None

    def __enter__(self) -> Counter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.record = step_record(self._scale)


def step_record(scale: int) -> StepRecord:
    flops = FORWARD_FLOPS * scale

    def op(phase: Phase, **totals: int) -> OpRecord:
        return OpRecord(op="aten::mm", phase=phase, precision="bf16", totals=FlopTotals(**totals))

    ops = (
        op(Phase.FORWARD, model_flops=flops, palm_model_flops=flops),
        op(Phase.BACKWARD, model_flops=2 * flops, palm_model_flops=2 * flops),
        op(Phase.RECOMPUTE, recompute_flops=2 * flops // 5),
    )
    return StepRecord(ops=ops, is_training=True)


def record_run(path: Path, sink: Any = None) -> None:
    """Train 320 steps and log each window of four to ``path``."""
    clock, scale = Clock(), [1]
    monitor = mm.Monitor(
        jsonl=str(path),
        sinks=[sink] if sink is not None else [],
        clock=clock,
        host_clock=clock,
        counter_factory=lambda model: Counter(scale[0]),
        compile_counter=lambda: 0,
        log_every_n_steps=4,
        max_overhead=0.0,
        peak=PEAK_FLOPS_PER_S,
    )
    for step in range(320):
        scale[0] = 2 if step >= 240 else 1
        monitor.mark_phase("data_wait")
        clock.now_s += 0.5 if 120 <= step < 180 else 0.05 + 0.001 * (step % 3)
        with monitor.step(torch.zeros(2 * scale[0], 8, dtype=torch.long)):
            for phase, share in (("forward", 0.3), ("backward", 0.6), ("optimizer", 0.05)):
                monitor.mark_phase(phase)
                clock.now_s += share * scale[0]
        if step % 100 == 99:
            with monitor.paused("validation"):
                clock.now_s += 7.0
    monitor.close()

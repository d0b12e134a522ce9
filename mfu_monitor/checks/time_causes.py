"""Causes that lie in the time: a host's clock around queued work, warm-up in the window, a clock that ran backwards."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence

from mfu_monitor.checks.case import Case
from mfu_monitor.checks.diagnosis import Diagnosis
from mfu_monitor.checks.hypothesis import DIRECT, Hypothesis, judge

__all__ = ["clock_went_backwards", "unsynced_timer", "warmup_in_window"]

_HOST_AHEAD = 0.5
"""A loop that queues work runs ahead of the device by as much as the queue holds, a small part of a window; below half
of the device's time it is the window's own work that the host did not wait for."""


def unsynced_timer(case: Case) -> Iterator[Diagnosis | None]:
    """The host's clock stopped when the work was queued, not when it was done: the step looks many times faster."""
    host_s, device_s = _host_and_device_s(case)
    if host_s is None or device_s is None or not 0 < host_s < _HOST_AHEAD * device_s:
        return
    elapsed_s, mfu = _elapsed_behind(case), case.bounded_mfu
    is_host = elapsed_s is not None and math.isclose(elapsed_s, host_s, rel_tol=0.05)
    corrected = mfu * host_s / device_s if mfu is not None and is_host else mfu
    diagnosis = judge(
        case,
        Hypothesis(
            code="unsynced_timer",
            quantity="Seconds of the window by the host's clock",
            observed=host_s,
            predicted=host_s,
            expected=device_s,
            corrected_mfu=corrected,
            # A reading that used the device's clock stands, however high: the two clocks are the finding.
            highest_mfu=math.inf if not is_host else 0.80,
            witness=f"the device's own clock says {device_s:.4g} s for the same steps",
            strength=DIRECT,
            cause="The host only queues the work: its clock stopped before the device had finished."
            + ("" if is_host else " The reading used the device's clock and stands; a host timer would not."),
            fix="Time with device events (the default on an accelerator); never time.time() around queued work.",
            figures={"host_elapsed_s": host_s, "device_elapsed_s": device_s, "steps": case.window.steps},
        ),
    )
    if diagnosis is not None:
        yield diagnosis if is_host else dataclasses.replace(diagnosis, severity="note")


def _host_and_device_s(case: Case) -> tuple[float | None, float | None]:
    window, device_s = case.window, case.evidence.device_elapsed_s
    if device_s is not None:
        return window.host_elapsed_s if window.host_elapsed_s is not None else window.elapsed_s, device_s
    return window.host_elapsed_s, window.elapsed_s


def _elapsed_behind(case: Case) -> float | None:
    """The seconds that the reading's MFU was made with, by its own FLOPs and peak; the window's where unknown."""
    mfu, computed = case.exact_mfu, case.computed_mfu
    if mfu and computed and mfu > 0:
        return case.window.elapsed_s * computed / mfu
    return case.window.elapsed_s


_SLOW_FIRST = 3.0
"""A first step this many times the median is a warm-up: compilation, autotuning, allocation, a cold data cache."""
_WARMUP_SHARE = 0.10
"""Below a tenth of the window's time it does not matter."""


def warmup_in_window(case: Case) -> Iterator[Diagnosis | None]:
    """The first steps of the window compile or warm up, and pull the average down."""
    steps_s = [s for s in case.evidence.step_times_s if math.isfinite(s)]
    if len(steps_s) < 3 or min(steps_s) <= 0:
        return
    usual_s, total_s = statistics.median(steps_s), sum(steps_s)
    slow = _slow_start(steps_s, usual_s)
    steady_s = usual_s * len(steps_s)
    if not slow or total_s - steady_s < _WARMUP_SHARE * total_s:
        return
    mfu = case.bounded_mfu
    yield judge(
        case,
        Hypothesis(
            code="warmup_in_window",
            quantity="Seconds of the window",
            observed=total_s,
            predicted=sum(slow) + usual_s * (len(steps_s) - len(slow)),
            expected=steady_s,
            corrected_mfu=mfu * total_s / steady_s if mfu is not None else None,
            witness=f"the first {len(slow)} of {len(steps_s)} steps took up to {max(slow):.4g} s, the median "
            f"{usual_s:.4g} s",
            strength=DIRECT,
            tolerance=0.10,
            cause="Compilation, autotuning or a cold start fell into the window and was averaged in.",
            fix="Leave the first steps out of the window (warm-up), as the monitor does with compile time.",
            figures={"median_step_s": usual_s, "first_step_s": steps_s[0], "recompiles": case.window.recompiles},
        ),
    )


def _slow_start(steps_s: Sequence[float], usual_s: float) -> list[float]:
    """The steps at the window's start that are far slower than the median, up to the first usual one."""
    slow: list[float] = []
    for step_s in steps_s:
        if step_s < _SLOW_FIRST * usual_s:
            break
        slow.append(step_s)
    return slow


def clock_went_backwards(case: Case) -> Iterator[Diagnosis | None]:
    """A negative time: a clock that was set while it was read (time.time() under NTP), or marks in the wrong order."""
    evidence, window = case.evidence, case.window
    negative = [s for s in (window.elapsed_s, window.wall_s, *evidence.step_times_s) if s < 0]
    falls = [b - a for a, b in zip(evidence.timestamps_s, evidence.timestamps_s[1:], strict=False) if b < a]
    if not negative and not falls:
        return
    worst_s = min(negative + falls)
    yield Diagnosis(
        code="clock_went_backwards",
        severity="error",
        message=f"A time of {worst_s:.4g} s was seen ({len(negative) + len(falls)} such); at least 0 was expected.",
        evidence={"worst_s": worst_s, "count": len(negative) + len(falls), "strength": DIRECT, "distance": 0.0},
        likely_cause="The wall clock was set back in the run (NTP, a suspended machine), or two logs were joined.",
        fix="Time with a monotonic clock (time.perf_counter, device events), and leave this window out.",
    )

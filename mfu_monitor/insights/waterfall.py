"""Where the rest went: from 100% of peak down to the measured MFU, in named steps that add up exactly.

Everything is first expressed in seconds of one step. The model FLOPs at the active precision's peak take
``model_time_s``; each step adds the seconds of one cause; together they are the measured time of the step. Divided by
that measured time the seconds become shares of the peak:

    1 - sum(step.seconds / step_time_s) = model_time_s / step_time_s = MFU

A share is therefore a share of the measured time and does not depend on the order of the steps (the alternative,
lowering MFU cause by cause, gives every cause another size in another order).

Modelled steps come from the roofline: what the operators of a kind would cost on an ideal device. Measured steps come
from the window's clocks. What the two leave over is the remainder: launch overhead, communication, kernels slower than
ideal. It is negative where the ideal time exceeds the measured one, and then says so instead of hiding it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from mfu_monitor.counting.step_record import OpRecord, Phase, StepRecord
from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.insights.roofline import RooflinePoint, StepRoofline, operator_point, step_roofline
from mfu_monitor.timing.step_window import StepWindow

__all__ = ["STEP_LABELS", "Waterfall", "WaterfallStep", "waterfall"]

STEP_LABELS = {
    "products_below_ridge": "products below the ridge",
    "memory_bound_operators": "memory-bound operators",
    "other_precision": "other precision",
    "recompute": "recompute",
    "kernel_recompute": "kernel recompute",
    "optimizer_and_other": "optimizer and other hardware work",
    "data_wait": "data wait",
    "host_to_device": "host-to-device copies",
    "between_steps": "between steps",
    "remainder": "measured remainder",
}
"""Name in the metrics (``waterfall/<name>``) and label on charts, from the top of the waterfall down."""

_MODELLED = tuple(STEP_LABELS)[:6]
_NEEDS_BANDWIDTH = ("products_below_ridge", "memory_bound_operators")


@dataclass(frozen=True, slots=True, kw_only=True)
class WaterfallStep:
    """One step down: ``share`` (a fraction of peak, and of the measured time) and the seconds behind it."""

    name: str
    seconds: float
    """Of one training batch."""
    share: float
    """``seconds / step_time_s``; negative only where ``note`` says why."""
    origin: str
    """``"modelled"`` (roofline) or ``"measured"`` (clock); the remainder is the measured time less all the others."""
    note: str = ""

    @property
    def label(self) -> str:
        """The words for a chart."""
        return STEP_LABELS[self.name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Waterfall:
    """From 1 to the measured MFU of this rank: ``1 - sum(step.share for step in steps) == mfu`` within 1e-9."""

    steps: tuple[WaterfallStep, ...] = ()
    mfu: float | None = None
    """model FLOPs / (measured time * peak at ``precision``), of this rank's own device."""
    step_time_s: float | None = None
    model_time_s: float | None = None
    """Seconds of the model FLOPs at the peak of the active precision."""
    precision: str | None = None
    reason: str | None = None
    """Why there are no steps: what is missing and what to do."""
    notes: tuple[str, ...] = ()

    def metrics(self) -> dict[str, float]:
        """Shares of peak for a logger: ``waterfall/<name>`` and ``waterfall/mfu``; empty where unknown."""
        if self.mfu is None:
            return {}
        return {**{f"waterfall/{step.name}": step.share for step in self.steps}, "waterfall/mfu": self.mfu}

    def markdown(self) -> str:
        """A table for a text card, from the peak down to the MFU, with the notes; the reason where there is none."""
        if self.mfu is None:
            return f"No waterfall: {self.reason}"
        rows = [f"| {step.label} | {-100 * step.share:+.1f} | {step.origin} |" for step in self.steps]
        lines = [
            f"| from {self.precision} peak to MFU | points | |",
            "|---|--:|---|",
            "| dense peak | 100.0 | |",
            *rows,
            f"| **MFU** | **{100 * self.mfu:.1f}** | measured |",
        ]
        notes = [*(f"{step.label}: {step.note}" for step in self.steps if step.note), *self.notes]
        return "\n".join([*lines, *(["", *(f"- {note}" for note in notes)] if notes else [])])

    def step(self, name: str) -> WaterfallStep | None:
        """The step of that name; None where it was neither measured nor modelled."""
        return next((step for step in self.steps if step.name == name), None)


@dataclass(slots=True)
class _Seconds:
    """Sums of modelled seconds by step, and what could not be modelled."""

    parts: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in _MODELLED})
    unknown_precisions: set[str] = field(default_factory=set)

    def add(self, name: str, seconds: float) -> None:
        self.parts[name].append(seconds)


def waterfall(
    record: StepRecord,
    peak: DevicePeak | None,
    window: StepWindow,
) -> Waterfall:
    """From 100% of peak to the measured MFU of one window.

    Args:
        record: the counted step that stands for the window's steps. Where the window's mean model FLOPs differ (several
            shapes of batch), the modelled seconds are scaled by their ratio, with a note.
        peak: dense peaks of this rank's device.
        window: the measured seconds, sums over ``window.steps``.

    Returns:
        The steps; where MFU itself is unknown, no steps and the ``reason``.

    Example:
        >>> for step in waterfall(record, peak, reading.window).steps:
        ...     print(f"{step.label:36} {step.share:6.1%}  {step.origin}")
    """
    roofline = step_roofline(record, peak)
    reason = _why_no_mfu(roofline, peak, window)
    rate = roofline.peak_flops_per_s
    if reason is not None or rate is None or peak is None:
        return Waterfall(precision=roofline.precision, reason=reason)
    scale = _scale(record, window)
    model_s, step_s = record.model_flops * scale / rate, window.elapsed_s / window.steps
    if not (step_s > 0 and math.isfinite(model_s / step_s)):
        return Waterfall(
            precision=roofline.precision,
            reason=f"a peak of {rate:g} FLOP/s over {window.elapsed_s:g} s gives no finite MFU: correct the peak",
        )
    modelled = _modelled_seconds(record.ops, peak, rate)
    steps = [
        *_steps(_known_parts(modelled, roofline), step_s, "modelled", scale),
        *_steps(_measured_seconds(window), step_s, "measured", 1 / window.steps),
    ]
    steps.append(_remainder(steps, model_s, step_s))
    return Waterfall(
        steps=tuple(steps),
        mfu=model_s / step_s,
        step_time_s=step_s,
        model_time_s=model_s,
        precision=roofline.precision,
        notes=(*_notes(record, roofline, modelled, scale), *_bad_times(window)),
    )


def _why_no_mfu(roofline: StepRoofline, peak: DevicePeak | None, window: StepWindow) -> str | None:
    if window.invalid_reason is not None:
        return window.invalid_reason
    if window.steps <= 0 or not math.isfinite(window.elapsed_s) or window.elapsed_s <= 0:
        return f"the window holds {window.steps} steps in {window.elapsed_s} s: no time was measured"
    if roofline.peak_flops_per_s is None:
        name = peak.device_name if peak else "this device"
        return roofline.reason or f"no dense peak of {name} is known for {roofline.precision}: give one with peak="
    return None if roofline.model_flops else roofline.reason


def _scale(record: StepRecord, window: StepWindow) -> float:
    if not window.model_flops:
        return 1.0
    return window.model_flops / window.steps / record.model_flops


def _modelled_seconds(ops: Iterable[OpRecord], peak: DevicePeak, rate: float) -> _Seconds:
    seconds = _Seconds()
    for op in ops:
        point = operator_point(op, peak)
        if point.compute_time_s is None:
            seconds.unknown_precisions.add(op.precision or "unknown precision")
        elif (name := _step_of_phase(op.phase)) is not None:
            seconds.add(name, max(point.compute_time_s, point.memory_time_s or 0.0))
        else:
            _split_operator(seconds, op, point, rate)
    return seconds


def _step_of_phase(phase: Phase) -> str | None:
    """Recompute, optimizer and other work belong to their own step whole, bytes included; None: model work."""
    if phase is Phase.RECOMPUTE:
        return "recompute"
    return "optimizer_and_other" if phase in (Phase.OPTIMIZER, Phase.OTHER) else None


def _split_operator(seconds: _Seconds, op: OpRecord, point: RooflinePoint, rate: float) -> None:
    """One forward or backward operator: its ideal time less model FLOPs at the active peak, by cause."""
    compute_s = point.compute_time_s or 0.0
    below_ridge = "products_below_ridge" if op.totals.hardware_flops else "memory_bound_operators"
    seconds.add(below_ridge, max(0.0, (point.memory_time_s or 0.0) - compute_s))
    if point.peak_flops_per_s is None:
        return
    totals, own = op.totals, point.peak_flops_per_s
    seconds.add("other_precision", totals.model_flops / own - totals.model_flops / rate)
    seconds.add("recompute", totals.recompute_flops / own)
    seconds.add("kernel_recompute", totals.kernel_recompute_flops / own)
    seconds.add("optimizer_and_other", (totals.optimizer_flops + totals.other_flops) / own)


def _known_parts(modelled: _Seconds, roofline: StepRoofline) -> dict[str, float]:
    without = () if roofline.peak_bytes_per_s else _NEEDS_BANDWIDTH
    return {name: math.fsum(parts) for name, parts in modelled.parts.items() if name not in without}


def _measured_seconds(window: StepWindow) -> dict[str, float]:
    wait_s, copies_s = _time(window.data_wait_s), _time(window.h2d_copy_s)
    if wait_s is not None and copies_s is not None and copies_s <= wait_s:
        # Trainers copy the batch between two steps, where the copies are part of the wait (``StepWindow.h2d_copy_s``):
        # counted once, as copies.
        wait_s -= copies_s
    values = {"data_wait": wait_s, "host_to_device": copies_s, "between_steps": _time(window.between_s)}
    return {name: value for name, value in values.items() if value is not None}


def _time(value: float | None) -> float | None:
    """A reading of a clock; None for what no clock can have read."""
    return value if value is not None and 0 <= value < math.inf else None


def _steps(seconds: dict[str, float], step_s: float, origin: str, factor: float) -> list[WaterfallStep]:
    return [_step(name, value * factor, step_s, origin) for name, value in seconds.items()]


def _step(name: str, value: float, step_s: float, origin: str) -> WaterfallStep:
    note = ""
    if name == "other_precision" and value < 0:
        note = "a gain: part of the work ran in a precision faster than the active one"
    return WaterfallStep(name=name, seconds=value, share=value / step_s, origin=origin, note=note)


def _remainder(steps: list[WaterfallStep], model_s: float, step_s: float) -> WaterfallStep:
    rest = math.fsum([step_s, -model_s, *(-step.seconds for step in steps)])
    note = ""
    if rest < 0 and rest / step_s < -1e-9:  # below that it is rounding
        note = (
            f"ideal time and measured waits are {1 - rest / step_s:.2f} times the measured time: the peak or the "
            "bandwidth is too low for this device, or its caches held what the model reads from memory"
        )
    return WaterfallStep(name="remainder", seconds=rest, share=rest / step_s, origin="measured", note=note)


def _bad_times(window: StepWindow) -> list[str]:
    parts = {"data_wait": window.data_wait_s, "host_to_device": window.h2d_copy_s, "between_steps": window.between_s}
    return [
        f"{STEP_LABELS[name]} was given as {value} s, which is not a time; what it took is part of the remainder"
        for name, value in parts.items()
        if value is not None and _time(value) is None
    ]


def _notes(record: StepRecord, roofline: StepRoofline, modelled: _Seconds, scale: float) -> tuple[str, ...]:
    notes = []
    if roofline.peak_bytes_per_s is None:
        notes.append("the memory bandwidth is unknown, so what memory costs is part of the remainder")
    if modelled.unknown_precisions:
        names = ", ".join(sorted(modelled.unknown_precisions))
        notes.append(
            f"no peak is known for {names}, so what those products cost beyond the active peak is in the remainder"
        )
    if abs(scale - 1) > 1e-9:
        notes.append(
            f"the window's steps hold {scale:.3g} times the counted step's FLOPs; modelled steps are scaled by it"
        )
    if record.is_lower_bound:
        notes.append("something ran that could not be counted; what it took is part of the remainder")
    return tuple(notes)

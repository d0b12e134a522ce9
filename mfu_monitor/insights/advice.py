"""What to change first: at most three lines, each with the gain it predicts from the waterfall's own values.

A cause that costs s of the step's T seconds gives ``s / (T - s)`` more throughput when it is gone, and the MFU rises by
that factor. Modelled seconds are ideal ones. Work that the hardware would no longer do (recompute, a slower precision)
costs at least its ideal time, so its gain is "at least"; traffic that can be avoided only in part is "up to".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mfu_monitor.counting.step_record import Phase, StepRecord
from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.insights.roofline import RooflinePoint, StepRoofline, group_points, step_roofline
from mfu_monitor.insights.waterfall import Waterfall

__all__ = ["Advice", "advise"]

MIN_GAIN = 0.01
"""Gains below one percent of throughput are noise of a window and not worth a change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One line of advice with its prediction."""

    code: str
    """The waterfall's step that it is about: ``"recompute"``."""
    text: str
    """One sentence: the values, the change, the gain."""
    gain: float
    """Predicted rise of throughput as a fraction: 0.12 is 12% more tokens per second."""
    mfu_after: float
    """The MFU that the change would give by that prediction, 0..1."""
    is_lower_bound: bool
    """True: at least this gain; False: at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finding:
    seconds: float
    text: str
    is_lower_bound: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Evidence:
    record: StepRecord
    roofline: StepRoofline
    waterfall: Waterfall
    free_memory_bytes: int | None

    def seconds(self, name: str) -> float:
        step = self.waterfall.step(name)
        return step.seconds if step else 0.0

    def share(self, name: str) -> str:
        step = self.waterfall.step(name)
        return f"{step.share:.1%}" if step else "0%"


def advise(
    record: StepRecord,
    peak: DevicePeak | None,
    steps: Waterfall,
    *,
    free_memory_bytes: int | None = None,
    limit: int = 3,
) -> tuple[Advice, ...]:
    """The changes that promise most, largest predicted gain first.

    Args:
        record: the counted step.
        peak: dense peaks of the device.
        steps: ``waterfall(record, peak, window)``.
        free_memory_bytes: device memory that is free now; it decides whether less checkpointing would fit.
        limit: at most this many lines.

    Returns:
        Advice with a gain of at least one percent; empty where the waterfall is unknown.

    Example:
        >>> for line in advise(record, peak, waterfall(record, peak, window)):
        ...     print(line.text)
    """
    if steps.mfu is None or steps.step_time_s is None:
        return ()
    evidence = _Evidence(
        record=record, roofline=step_roofline(record, peak), waterfall=steps, free_memory_bytes=free_memory_bytes
    )
    found = [(code, finding) for code, rule in _RULES.items() if (finding := rule(evidence)) is not None]
    lines = [_advice(code, finding, steps.mfu, steps.step_time_s) for code, finding in found]
    worthwhile = sorted((line for line in lines if line.gain >= MIN_GAIN), key=lambda line: -line.gain)
    return tuple(worthwhile[:limit])


def _advice(code: str, finding: _Finding, mfu: float, step_s: float) -> Advice:
    # Where the model says more than was measured, no more than all but the model work itself can be won.
    seconds = min(finding.seconds, step_s * (1 - min(mfu, 1.0)))
    gain = seconds / (step_s - seconds) if seconds < step_s else 0.0
    after = mfu * (1 + gain)
    bound = "at least" if finding.is_lower_bound else "up to"
    return Advice(
        code=code,
        text=f"{finding.text}: {bound} {gain:.1%} more throughput, MFU {mfu:.1%} -> {after:.1%}",
        gain=gain,
        mfu_after=after,
        is_lower_bound=finding.is_lower_bound,
    )


def _recompute(evidence: _Evidence) -> _Finding | None:
    seconds = evidence.seconds("recompute")
    free = evidence.free_memory_bytes
    memory = "" if free is None else f" (memory now free: {free / 2**30:.1f} GiB)"
    flops_share = evidence.record.recompute_flops / max(1, evidence.record.hardware_flops)
    text = (
        f"activation checkpointing costs {evidence.share('recompute')} of the step ({flops_share:.1%} of its FLOPs); "
        f"checkpoint fewer layers or save the products{memory}"
    )
    return _Finding(seconds=seconds, text=text, is_lower_bound=True) if seconds > 0 else None


def _other_precision(evidence: _Evidence) -> _Finding | None:
    """The slower precision that costs most: what its products would save at the active peak, bytes unchanged."""
    roofline = evidence.roofline
    rate = roofline.peak_flops_per_s
    slower = [p for p in _model_points(roofline.points) if rate and p.peak_flops_per_s and p.peak_flops_per_s < rate]
    groups = group_points(slower, lambda point: point.precision)
    savings = {name: math.fsum(_saving_s(p, rate or math.inf) for p in group.points) for name, group in groups.items()}
    if not savings or not roofline.ideal_time_s:
        return None
    worst = max(savings, key=lambda name: savings[name])
    group = groups[worst]
    flops = group.hardware_flops / max(1, evidence.record.hardware_flops)
    time = (group.ideal_time_s or 0.0) / roofline.ideal_time_s
    text = (
        f"{worst} products are {flops:.0%} of FLOPs and {time:.0%} of ideal time; run them in {roofline.precision} "
        f"({_top_module(group.points)})"
    )
    return _Finding(seconds=savings[worst] * _scale(evidence), text=text, is_lower_bound=True)


def _below_ridge(evidence: _Evidence) -> _Finding | None:
    """The kind of products that loses most below the ridge, with its intensity and the size that is too small."""
    points = [p for p in _model_points(evidence.roofline.points) if p.hardware_flops and p.bound == "memory"]
    groups = group_points(points, _is_attention)
    lost = {kind: math.fsum(map(_excess_s, group.points)) for kind, group in groups.items()}
    if not lost:
        return None
    attention = max(lost, key=lambda kind: lost[kind])
    group = groups[attention]
    cause = "sequence too short: attention" if attention else "batch too small: matrix"
    remedy = "pack or lengthen sequences" if attention else "use a larger micro-batch"
    ridge = group.points[0].ridge_point or 0.0
    text = (
        f"{cause} products at {group.arithmetic_intensity or 0.0:.0f} FLOP/byte, ridge {ridge:.0f}; {remedy} "
        f"({_top_module(group.points)})"
    )
    return _Finding(seconds=lost[attention] * _scale(evidence), text=text)


def _memory_bound(evidence: _Evidence) -> _Finding | None:
    points = [p for p in _model_points(evidence.roofline.points) if not p.hardware_flops and p.bytes_accessed]
    if not points or (seconds := evidence.seconds("memory_bound_operators")) <= 0:
        return None
    by_op = group_points(points, lambda point: point.op)
    names = sorted(by_op, key=lambda name: -by_op[name].bytes_accessed)[:2]
    text = (
        f"operators without products move {sum(p.bytes_accessed for p in points) / 1e9:.3g} GB a step, "
        f"{evidence.share('memory_bound_operators')} of its time, most of it in {' and '.join(map(_short, names))}; "
        "fuse them with torch.compile"
    )
    return _Finding(seconds=seconds, text=text)


def _optimizer(evidence: _Evidence) -> _Finding | None:
    phases = evidence.record.by_phase()
    work = phases.get(Phase.OPTIMIZER.value)
    if work is None or not work.bytes_accessed or (seconds := evidence.seconds("optimizer_and_other")) <= 0:
        return None
    if (other := phases.get(Phase.OTHER.value)) and other.bytes_accessed > work.bytes_accessed:
        return None
    text = (
        f"the optimizer moves {work.bytes_accessed / 1e9:.3g} GB a step, {evidence.share('optimizer_and_other')} of "
        "its time; use fused=True, or more gradient accumulation"
    )
    return _Finding(seconds=seconds, text=text)


def _measured(name: str, text: str) -> Callable[[_Evidence], _Finding | None]:
    def rule(evidence: _Evidence) -> _Finding | None:
        seconds = evidence.seconds(name)
        return _Finding(seconds=seconds, text=text.format(share=evidence.share(name))) if seconds > 0 else None

    return rule


def _remainder(evidence: _Evidence) -> _Finding | None:
    seconds = evidence.seconds("remainder")
    ideal_s = (evidence.roofline.ideal_time_s or 0.0) * _scale(evidence)
    if seconds <= 0 or not ideal_s:
        return None
    text = (
        f"kernels, launches and communication take {(seconds + ideal_s) / ideal_s:.1f}x the ideal time "
        f"({evidence.share('remainder')} of the step); profile it, then torch.compile or larger kernels"
    )
    return _Finding(seconds=seconds, text=text)


_RULES: dict[str, Callable[[_Evidence], _Finding | None]] = {
    "recompute": _recompute,
    "other_precision": _other_precision,
    "products_below_ridge": _below_ridge,
    "memory_bound_operators": _memory_bound,
    "optimizer_and_other": _optimizer,
    "data_wait": _measured(
        "data_wait", "the device waits {share} of the step for data; add loader workers or prefetch more batches"
    ),
    "host_to_device": _measured(
        "host_to_device", "copies to the device take {share} of the step; pin memory and copy with non_blocking=True"
    ),
    "between_steps": _measured(
        "between_steps", "callbacks and logging between steps take {share} of the step; run them less often"
    ),
    "remainder": _remainder,
}


def _model_points(points: Iterable[RooflinePoint]) -> list[RooflinePoint]:
    return [point for point in points if point.phase in (Phase.FORWARD, Phase.BACKWARD)]


def _saving_s(point: RooflinePoint, rate: float) -> float:
    now_s = max(point.compute_time_s or 0.0, point.memory_time_s or 0.0)
    return now_s - max(point.hardware_flops / rate, point.memory_time_s or 0.0)


def _excess_s(point: RooflinePoint) -> float:
    return max(0.0, (point.memory_time_s or 0.0) - (point.compute_time_s or 0.0))


def _is_attention(point: RooflinePoint) -> bool:
    return "attention" in point.op or "flash" in point.op


def _scale(evidence: _Evidence) -> float:
    """Counted step to mean step of the window, as in the waterfall."""
    rate, model_s = evidence.roofline.peak_flops_per_s, evidence.waterfall.model_time_s
    return model_s * rate / evidence.record.model_flops if rate and model_s and evidence.record.model_flops else 1.0


def _top_module(points: Iterable[RooflinePoint]) -> str:
    groups = group_points(points, lambda point: point.module_fqn)
    largest = max(groups, key=lambda name: groups[name].ideal_time_s or 0.0)
    return f"most of it in {largest or 'the root module'}"


def _short(op: object) -> str:
    return str(op).removeprefix("aten::")

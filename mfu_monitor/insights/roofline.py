"""What a step could have reached: arithmetic intensity, bound and ideal time of every operator, and the attainable MFU.

The roofline model (Williams, Waterman, Patterson, "Roofline: an insightful visual performance model for multicore
architectures", CACM 52(4), 2009, https://doi.org/10.1145/1498765.1498785): a kernel of intensity I FLOP/byte runs at
``min(peak, I * bandwidth)`` at best. Bytes are ideal (each operand read once, each result written once), so the ideal
time is a floor for data that comes from the device's memory. Caches can hold a small model's tensors and beat it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from mfu_monitor.counting.step_record import OpRecord, Phase, StepRecord
from mfu_monitor.hardware.device_peak import DevicePeak

__all__ = [
    "OperatorGroup",
    "RooflinePoint",
    "StepRoofline",
    "attainable_mfu",
    "group_points",
    "operator_point",
    "step_roofline",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflinePoint:
    """One operator under the roof: FLOPs and ideal bytes (totals over ``calls``) against one device's peaks.

    Example:
        >>> point = RooflinePoint(op="aten::mm", hardware_flops=2 * 4096**3, bytes_accessed=6 * 4096**2,
        ...                       precision="bf16", peak_flops_per_s=989.4e12, peak_bytes_per_s=3.35e12)
        >>> point.bound, round(point.arithmetic_intensity)
        ('compute', 1365)
    """

    op: str
    hardware_flops: int
    """Executed FLOPs; 0 for elementwise operators, norms, look-ups: they count by their bytes."""
    bytes_accessed: int
    precision: str | None = None
    peak_flops_per_s: float | None = None
    """Dense peak at ``precision``; None where the device has no such unit or it is not known."""
    peak_bytes_per_s: float | None = None
    phase: Phase = Phase.FORWARD
    module_fqn: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    calls: int = 1

    @property
    def arithmetic_intensity(self) -> float | None:
        """FLOPs per byte; None where nothing was moved."""
        return self.hardware_flops / self.bytes_accessed if self.bytes_accessed else None

    @property
    def ridge_point(self) -> float | None:
        """FLOPs per byte above which compute is the bound at this precision."""
        if self.peak_flops_per_s is None or self.peak_bytes_per_s is None:
            return None
        return self.peak_flops_per_s / self.peak_bytes_per_s

    @property
    def attainable_flops_per_s(self) -> float | None:
        """``min(peak, intensity * bandwidth)``; 0.0 for an operator without products; None where a peak is unknown."""
        if self.arithmetic_intensity is None:
            return self.peak_flops_per_s
        if self.hardware_flops == 0:
            return 0.0
        if self.peak_flops_per_s is None or self.peak_bytes_per_s is None:
            return None
        return min(self.peak_flops_per_s, self.arithmetic_intensity * self.peak_bytes_per_s)

    @property
    def bound(self) -> str | None:
        """``"compute"`` from the ridge upwards, ``"memory"`` below it; None where that cannot be said."""
        if self.hardware_flops == 0:
            return "memory" if self.bytes_accessed else None
        if self.arithmetic_intensity is None or self.ridge_point is None:
            return None
        return "compute" if self.arithmetic_intensity >= self.ridge_point else "memory"

    @property
    def compute_time_s(self) -> float | None:
        """Seconds of the FLOPs at peak."""
        if self.hardware_flops == 0:
            return 0.0
        return None if self.peak_flops_per_s is None else self.hardware_flops / self.peak_flops_per_s

    @property
    def memory_time_s(self) -> float | None:
        """Seconds of the bytes at full bandwidth."""
        if self.bytes_accessed == 0:
            return 0.0
        return None if self.peak_bytes_per_s is None else self.bytes_accessed / self.peak_bytes_per_s

    @property
    def ideal_time_s(self) -> float | None:
        """``max(FLOPs / peak, bytes / bandwidth)``: equal shapes, so the sum over calls is the maximum of the sums."""
        if self.compute_time_s is None or self.memory_time_s is None:
            return None
        return max(self.compute_time_s, self.memory_time_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRoofline:
    """All operators of one step under one device's roof."""

    points: tuple[RooflinePoint, ...]
    model_flops: int
    precision: str | None = None
    """The precision that carries the most model FLOPs; MFU is taken against its peak."""
    peak_flops_per_s: float | None = None
    peak_bytes_per_s: float | None = None
    ideal_time_s: float | None = None
    """Sum of the operators' ideal times: operators run one after the other."""
    attainable_mfu: float | None = None
    """model_flops / (ideal time * peak): the MFU this step could reach on this device; above 1 only where a faster
    precision than the active one carries part of the work."""
    reason: str | None = None
    """Why ``attainable_mfu`` is None: what is missing and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorGroup:
    """Operators taken together: same operator and shapes, or one module."""

    points: tuple[RooflinePoint, ...]

    @property
    def hardware_flops(self) -> int:
        """Sum of the executed FLOPs."""
        return sum(point.hardware_flops for point in self.points)

    @property
    def bytes_accessed(self) -> int:
        """Sum of the ideal bytes."""
        return sum(point.bytes_accessed for point in self.points)

    @property
    def arithmetic_intensity(self) -> float | None:
        """FLOPs per byte of all together."""
        return self.hardware_flops / self.bytes_accessed if self.bytes_accessed else None

    @property
    def ideal_time_s(self) -> float | None:
        """Sum of the ideal times; None where one is unknown."""
        return _sum_known(point.ideal_time_s for point in self.points)

    @property
    def bound(self) -> str | None:
        """Where most of the ideal time goes: ``"compute"`` or ``"memory"``; None where a time is unknown."""
        total, memory = self.ideal_time_s, _sum_known(p.ideal_time_s for p in self.points if p.bound == "memory")
        if not total or memory is None:
            return None
        return "memory" if memory > total / 2 else "compute"


def operator_point(op: OpRecord, peak: DevicePeak | None) -> RooflinePoint:
    """One operator record under the roof of ``peak``; unknown or impossible peaks (0, inf) count as unknown."""
    rates = peak.flops_per_s_by_precision if peak else {}
    return RooflinePoint(
        op=op.op,
        hardware_flops=op.totals.hardware_flops,
        bytes_accessed=op.totals.bytes_accessed,
        precision=op.precision,
        peak_flops_per_s=_usable(rates.get(op.precision)) if op.precision else None,
        peak_bytes_per_s=_usable(peak.bytes_per_s) if peak else None,
        phase=op.phase,
        module_fqn=op.module_fqn,
        shapes=op.shapes,
        calls=op.calls,
    )


def step_roofline(record: StepRecord, peak: DevicePeak | None) -> StepRoofline:
    """Every operator of a step under the roof, the step's ideal time and its attainable MFU.

    Args:
        record: what the step ran.
        peak: dense peaks of the device; None where unknown.

    Returns:
        The roofline; where a peak or the bandwidth is missing, times are None and ``reason`` names what is missing.
    """
    points = tuple(operator_point(op, peak) for op in record.ops)
    precision = record.active_precision
    rate = _usable(peak.flops_per_s_by_precision.get(precision)) if peak and precision else None
    reason = _what_is_missing(points, record.model_flops, peak, precision)
    ideal_s = _sum_known(point.ideal_time_s for point in points)
    known = reason is None and bool(rate) and bool(ideal_s)
    return StepRoofline(
        points=points,
        model_flops=record.model_flops,
        precision=precision,
        peak_flops_per_s=rate,
        peak_bytes_per_s=_usable(peak.bytes_per_s) if peak else None,
        ideal_time_s=ideal_s if points else None,
        attainable_mfu=record.model_flops / (ideal_s * rate) if known and ideal_s and rate else None,
        reason=reason,
    )


def attainable_mfu(record: StepRecord, peak: DevicePeak | None) -> float | None:
    """The MFU that the roofline allows for this step on this device, 0..1; None where it cannot be said.

    ``step_roofline(record, peak).reason`` says why it is None.
    """
    return step_roofline(record, peak).attainable_mfu


def group_points(
    points: Iterable[RooflinePoint], key: Callable[[RooflinePoint], Hashable]
) -> dict[Hashable, OperatorGroup]:
    """Points by any key, in the order of first appearance.

    Example:
        >>> by_op = group_points(step_roofline(record, peak).points, lambda point: (point.op, point.shapes))
    """
    parts: dict[Hashable, list[RooflinePoint]] = {}
    for point in points:
        parts.setdefault(key(point), []).append(point)
    return {name: OperatorGroup(points=tuple(group)) for name, group in parts.items()}


def _what_is_missing(
    points: tuple[RooflinePoint, ...], model_flops: int, peak: DevicePeak | None, precision: str | None
) -> str | None:
    if not model_flops or precision is None:
        return "no model FLOPs were counted in this step, so there is nothing to reach a peak with"
    if peak is None:
        return 'the peak of this device is unknown: give one with peak=<FLOP/s> or measure it with peak="measure"'
    if _usable(peak.bytes_per_s) is None:
        return (
            f"the memory bandwidth of {peak.device_name} is unknown: give bytes_per_s with the peak, or measure it "
            "with `mfu-monitor bench`"
        )
    without = sorted({p.precision or "unknown precision" for p in points if p.compute_time_s is None})
    if without:
        return (
            f"no dense peak of {peak.device_name} is known for {', '.join(without)}, in which products of this step "
            "ran: give the peaks by dtype"
        )
    return None


def _usable(rate: float | None) -> float | None:
    return rate if rate is not None and math.isfinite(rate) and rate > 0 else None


def _sum_known(values: Iterable[float | None]) -> float | None:
    total: list[float] = []
    for value in values:
        if value is None:
            return None
        total.append(value)
    return math.fsum(total)

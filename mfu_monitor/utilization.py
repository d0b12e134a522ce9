"""From a window and a peak to a reading: pure arithmetic on frozen records."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.timing.step_window import StepWindow

__all__ = ["UtilizationReading", "active_precision", "metrics_of", "read_utilization"]

MIXED_PRECISION_SHARE = 0.01
"""Above this share of FLOPs in another precision the weighted reading is given (DESIGN: 1%); below, it cannot move
MFU by more than the ratio of two peaks times a hundredth."""

ROUNDING = 1e-9
"""Means of sampled counts are rounded to whole FLOPs, so a window's parts may differ from their sum by a few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UtilizationReading:
    """How well the hardware was used over one window. Fractions are 0..1; unknown is None and ``reason`` says why.

    Example:
        >>> reading = monitor.reading
        >>> reading.mfu, reading.peak_source, reading.exactness
    """

    window: StepWindow
    mfu: float | None = None
    """model_flops / (elapsed_s * world peak)."""
    hfu: float | None = None
    """hardware_flops / (elapsed_s * world peak)."""
    mfu_weighted: float | None = None
    """sum_i(F_i / P_i) / elapsed_s over precisions i; given when more than 1% of FLOPs ran in another precision."""
    hfu_weighted: float | None = None
    mfu_palm: float | None = None
    """MFU with every attention call counted as its full square."""
    goodput_mfu: float | None = None
    """MFU over all wall time, what was left out of the window included."""
    attainable_mfu: float | None = None
    """The MFU that the roofline allows for this step on this device."""
    achievable_fraction: float | None = None
    """model FLOP/s over the best *measured* product on this device, where one was measured."""
    reason: str | None = None
    """Why ``mfu`` is None: what is missing and what to do."""
    tokens_per_s: float | None = None
    """The world's."""
    device_tokens_per_s: float | None = None
    samples_per_s: float | None = None
    device_samples_per_s: float | None = None
    device_model_flops_per_s: float | None = None
    device_hardware_flops_per_s: float | None = None
    device_name: str = ""
    precision: str | None = None
    """The precision that carries the most model FLOPs: ``"bf16"``."""
    peak_flops_per_s: float | None = None
    """Dense peak of this rank's device at ``precision``."""
    peak_source: str | None = None
    peak_is_dense: bool | None = None
    peak_bytes_per_s: float | None = None
    peak_flops_per_s_by_precision: Mapping[str, float] = field(default_factory=dict)
    world_peak_flops_per_s: float | None = None
    convention: str = "exact"
    exactness: str = "exact"
    """``"exact"``, ``"lower_bound"`` (something uncounted ran) or ``"sampled"``; both: ``"lower_bound+sampled"``."""

    @property
    def first_step(self) -> int:
        """First training batch of the window."""
        return self.window.first_step

    @property
    def last_step(self) -> int:
        """Last training batch of the window; the step at which the reading is logged."""
        return self.window.last_step

    @property
    def elapsed_s(self) -> float:
        """Seconds of the window's steps."""
        return self.window.elapsed_s

    def to_dict(self) -> dict[str, Any]:
        """Plain types for JSON, the window nested."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "window"}
        plain = {name: dict(v) if isinstance(v, Mapping) else v for name, v in values.items()}
        return {**plain, "window": self.window.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> UtilizationReading:
        """The inverse of ``to_dict``; unknown keys of a later version are ignored."""
        names = {f.name for f in dataclasses.fields(cls)} - {"window"}
        known = {name: value for name, value in values.items() if name in names}
        return cls(window=StepWindow.from_dict(values["window"]), **known)


def active_precision(window: StepWindow) -> str | None:
    """The precision that carries the most model FLOPs of the window; None where nothing was counted."""
    flops = window.model_flops_by_precision
    return max(flops, key=lambda name: flops[name]) if any(flops.values()) else None


def read_utilization(
    window: StepWindow,
    peak: DevicePeak | None,
    *,
    precision: str | None = None,
    convention: str = "exact",
    goodput_mfu: float | None = None,
    attainable_mfu: float | None = None,
    achievable_flops_per_s: float | None = None,
) -> UtilizationReading:
    """Make the reading of one window. Never raises on figures it cannot use: they become None, and a reason.

    Args:
        window: time, tokens and FLOPs of the same steps.
        peak: dense peak of this rank's device; None if unknown.
        precision: overrules the active precision of the window.
        convention: ``"exact"``, or ``"palm"`` to give ``mfu`` with attention as its full square.
        goodput_mfu: MFU over all wall time, if known.
        attainable_mfu: what the roofline allows, if known.
        achievable_flops_per_s: the best measured product on this device, if one was measured.

    Example:
        >>> window = StepWindow(first_step=0, last_step=9, steps=10, elapsed_s=2.0, wall_s=2.0, model_flops=8 * 10**14,
        ...                     model_flops_by_precision={"bf16": 8 * 10**14})
        >>> read_utilization(window, DevicePeak(device_name="x", flops_per_s_by_precision={"bf16": 1e15})).mfu
        0.4
    """
    precision = precision or active_precision(window)
    rate = _device_rate(peak, precision)
    world_peak = _world_peak(window, rate)
    reason = _reason(window, peak, precision, rate, world_peak)
    exact = _fraction(_world(window, "model_flops"), window.elapsed_s, world_peak, reason)
    palm = _scaled(exact, window.palm_model_flops, window.model_flops)
    return UtilizationReading(
        window=window,
        mfu=palm if convention == "palm" else exact,
        hfu=_fraction(_world(window, "hardware_flops"), window.elapsed_s, world_peak, reason),
        mfu_palm=palm,
        **_weighted(window, peak, precision, reason),
        **_rates(window),
        goodput_mfu=goodput_mfu,
        attainable_mfu=attainable_mfu,
        achievable_fraction=_fraction(window.model_flops, window.elapsed_s, achievable_flops_per_s, reason),
        reason=reason,
        precision=precision,
        peak_flops_per_s=rate,
        world_peak_flops_per_s=world_peak,
        convention=convention,
        exactness=_exactness(window),
        **_peak_fields(peak),
    )


def _is_positive(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0


def _device_rate(peak: DevicePeak | None, precision: str | None) -> float | None:
    rate = peak.flops_per_s(precision) if peak is not None and precision is not None else None
    return rate if _is_positive(rate) else None


def _world_peak(window: StepWindow, rate: float | None) -> float | None:
    if window.world_size == 1:
        return rate
    world_peak = window.world_peak_flops_per_s
    return world_peak if _is_positive(world_peak) else None


def _world(window: StepWindow, name: str) -> int | None:
    """The world's sum of a figure; this rank's own in a world of one."""
    own: int | None = getattr(window, name)
    gathered: int | None = getattr(window, f"world_{name}")
    return own if window.world_size == 1 else gathered


def _reason(
    window: StepWindow,
    peak: DevicePeak | None,
    precision: str | None,
    rate: float | None,
    world_peak: float | None,
) -> str | None:
    """The first thing that is missing, with what to do; None if MFU can be given."""
    if window.invalid_reason is not None:
        return window.invalid_reason
    if not _is_positive(window.elapsed_s):
        return (
            f"the window's time is {window.elapsed_s} s, so there is no rate; expected more than 0. Use a longer window"
        )
    if window.world_size < 1:
        return f"the world size is {window.world_size}; expected 1 or more. Check how the process group was set up"
    if window.model_flops is None:
        return (
            "no step of this shape was counted, so its FLOPs are unknown; see the warning given when counting stopped"
        )
    if precision is None:
        return "no product was counted in this window, so there is no active precision and no peak to compare with"
    if peak is None:
        return "no dense peak is known for this device: pass peak=<FLOP/s> or peak='measure'"
    if rate is None:
        return _no_rate(peak, precision)
    if world_peak is None or _world(window, "model_flops") is None:
        return f"the figures of the other {window.world_size - 1} ranks are not known for this window"
    return None


def _no_rate(peak: DevicePeak, precision: str) -> str:
    why = peak.missing_reason(precision) or f"it is given as {peak.flops_per_s_by_precision.get(precision)} FLOP/s"
    device = peak.device_name or "the device"
    return f"{device} has no usable {precision} peak: {why}. Pass peak={{{precision!r}: <FLOP/s>}}"


def _fraction(flops: float | None, elapsed_s: float, rate: float | None, reason: str | None) -> float | None:
    if reason is not None or flops is None or rate is None or not _is_positive(rate):
        return None
    return flops / (elapsed_s * rate)


def _scaled(value: float | None, numerator: int | None, denominator: int | None) -> float | None:
    return value * numerator / denominator if value is not None and numerator is not None and denominator else None


def _weighted(window: StepWindow, peak: DevicePeak | None, precision: str | None, reason: str | None) -> dict[str, Any]:
    """This rank's ideal seconds, each precision at its own peak, over its elapsed seconds."""
    kinds = {
        "mfu_weighted": (window.model_flops, window.model_flops_by_precision),
        "hfu_weighted": (window.hardware_flops, window.hardware_flops_by_precision),
    }
    if (
        reason is not None
        or peak is None
        or precision is None
        or not any(_is_mixed(*k, precision) for k in kinds.values())
    ):
        return dict.fromkeys(kinds)
    return {name: _ideal_share(window, peak, *kind) for name, kind in kinds.items()}


def _is_mixed(total: int | None, by_precision: Mapping[str, int], precision: str) -> bool:
    return bool(total) and total - by_precision.get(precision, 0) > MIXED_PRECISION_SHARE * total  # type: ignore[operator]


def _ideal_share(
    window: StepWindow, peak: DevicePeak, total: int | None, by_precision: Mapping[str, int]
) -> float | None:
    # Products of unknown precision have no peak of their own; a sum without them would pass for the whole.
    if total is None or not math.isclose(sum(by_precision.values()), total, rel_tol=ROUNDING):
        return None
    return _fraction(total, window.elapsed_s, peak.weighted_flops_per_s(by_precision), None)


def _rates(window: StepWindow) -> dict[str, Any]:
    usable = window.invalid_reason is None and _is_positive(window.elapsed_s)
    amounts = {
        "tokens_per_s": _world(window, "tokens"),
        "device_tokens_per_s": window.tokens,
        "samples_per_s": _world(window, "samples"),
        "device_samples_per_s": window.samples,
        "device_model_flops_per_s": window.model_flops,
        "device_hardware_flops_per_s": window.hardware_flops,
    }
    return {name: n / window.elapsed_s if usable and n is not None else None for name, n in amounts.items()}


def _exactness(window: StepWindow) -> str:
    flags = [
        name for name, is_set in (("lower_bound", window.is_lower_bound), ("sampled", window.is_sampled)) if is_set
    ]
    return "+".join(flags) or "exact"


def _peak_fields(peak: DevicePeak | None) -> dict[str, Any]:
    if peak is None:
        return {}
    return {
        "device_name": peak.device_name,
        "peak_source": peak.source,
        "peak_is_dense": peak.is_dense,
        "peak_bytes_per_s": peak.bytes_per_s,
        "peak_flops_per_s_by_precision": dict(peak.flops_per_s_by_precision),
    }


def metrics_of(reading: UtilizationReading, *, names: str = "mfu_monitor") -> dict[str, float]:
    """Scalars for a logger by their public names; what is unknown is left out.

    Args:
        reading: one window's reading.
        names: ``"mfu_monitor"``, or ``"throughput_monitor"`` for the names of Lightning's ThroughputMonitor.

    Example:
        >>> metrics_of(reading)["utilization/mfu"]
    """
    metrics = _throughput_monitor_metrics(reading) if names == "throughput_monitor" else _own_metrics(reading)
    return {name: float(value) for name, value in metrics.items() if value is not None and math.isfinite(value)}


def _own_metrics(reading: UtilizationReading) -> dict[str, Any]:
    window = reading.window
    return {
        "utilization/mfu": reading.mfu,
        "utilization/hfu": reading.hfu,
        "utilization/mfu_weighted": reading.mfu_weighted,
        "utilization/attainable_mfu": reading.attainable_mfu,
        "utilization/of_measured_peak": _of_measured_peak(reading),
        "utilization/goodput_mfu": reading.goodput_mfu,
        "throughput/tokens_per_s": reading.tokens_per_s,
        "throughput/device/tokens_per_s": reading.device_tokens_per_s,
        "throughput/samples_per_s": reading.samples_per_s,
        "throughput/device/samples_per_s": reading.device_samples_per_s,
        "throughput/device/model_flops_per_s": reading.device_model_flops_per_s,
        "throughput/device/hardware_flops_per_s": reading.device_hardware_flops_per_s,
        **_step_times(window),
        "step_time/rank_spread": window.rank_spread,
        "flops_per_step/model": _per_step(window, window.model_flops),
        "flops_per_step/hardware": _per_step(window, window.hardware_flops),
        "flops_per_step/recompute": _per_step(window, window.recompute_flops),
    }


def _of_measured_peak(reading: UtilizationReading) -> float | None:
    """Against the best measured product; where the peak itself was measured, MFU says the same."""
    is_measured = (reading.peak_source or "").startswith("measured")
    return None if is_measured else reading.achievable_fraction


def _step_times(window: StepWindow) -> dict[str, Any]:
    if window.invalid_reason is not None:
        return {}
    seconds = {
        "total_s": window.elapsed_s,
        "data_wait_s": window.data_wait_s,
        "forward_s": window.forward_s,
        "backward_s": window.backward_s,
        "optimizer_s": window.optimizer_s,
        "h2d_copy_s": window.h2d_copy_s,
        "between_s": window.between_s,
        "other_s": window.other_s,
    }
    return {f"step_time/{name}": _per_step(window, value) for name, value in seconds.items()}


def _per_step(window: StepWindow, value: float | None) -> float | None:
    return value / window.steps if value is not None and window.steps > 0 else None


def _throughput_monitor_metrics(reading: UtilizationReading) -> dict[str, Any]:
    """The names that Lightning's ThroughputMonitor logs in training; the world's only where there is more than one."""
    window = reading.window
    usable = window.invalid_reason is None and _is_positive(window.elapsed_s)
    batches = window.steps / window.elapsed_s if usable else None
    device = {
        "train/device/mfu": reading.mfu,
        "train/device/flops_per_sec": reading.device_model_flops_per_s,
        "train/device/items_per_sec": reading.device_tokens_per_s,
        "train/device/samples_per_sec": reading.device_samples_per_s,
        "train/device/batches_per_sec": batches,
    }
    if window.world_size <= 1:
        return device
    world_flops = window.world_model_flops
    return {
        **device,
        "train/flops_per_sec": world_flops / window.elapsed_s if usable and world_flops is not None else None,
        "train/items_per_sec": reading.tokens_per_s,
        "train/samples_per_sec": reading.samples_per_s,
        "train/batches_per_sec": None if batches is None else batches * window.world_size,
    }

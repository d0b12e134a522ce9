"""From a window and a peak to a reading: pure arithmetic on frozen records."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mfu_monitor import metric_names
from mfu_monitor.counting.plain_types import PlainTypes
from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.timing.step_window import StepWindow

__all__ = [
    "RunSummary",
    "RunTally",
    "UtilizationReading",
    "goodput",
    "metrics_of",
    "read_utilization",
]

MIXED_PRECISION_SHARE = 0.01
"""Above this share of FLOPs in another precision the weighted reading is given (DESIGN: 1%); below, it cannot move
MFU by more than the ratio of two peaks times a hundredth."""

ROUNDING = 1e-9
"""Means of sampled counts are rounded to whole FLOPs, so a window's parts may differ from their sum by a few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UtilizationReading(PlainTypes):
    """How well the hardware was used over one window. Fractions are 0..1; unknown is None and ``reason`` says why.

    Example:
        >>> reading = monitor.reading
        >>> reading.mfu, reading.peak_source, reading.exactness
    """

    window: StepWindow
    mfu: float | None = None
    """The world's model_flops / (elapsed_s * world peak): the same on all ranks."""
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
    """``"exact"``, ``"presumed"`` (counted once or twice), ``"sampled"`` (counts differ), ``"lower_bound"`` (something
    uncounted ran), ``"upper_bound"`` or ``"unknown"``; two of them: ``"lower_bound+sampled"``."""
    coverage: str | None = None
    """``"15/16"``: the ranks that the sums are of, where some took no part; None where all did."""
    not_known: str | None = None
    """Why the reading of a world of several ranks is a bound or less; None in a world of one, and where its ranks' work
    and batches were compared."""

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
        """Seconds that ``mfu`` is over: of the window's steps, in a world of several ranks the slowest rank's."""
        return self.window.rate_s


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
    """Make the reading of one window. Never raises on values it cannot use: they become None, and a reason.

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
    precision = precision or window.active_precision
    rate = _device_rate(peak, precision)
    world_peak = _world_peak(window, rate)
    reason = _reason(window, peak, precision, rate, world_peak)
    exact = _fraction(_world(window, "model_flops"), window.rate_s, world_peak, reason)
    if exact is None and reason is None:
        reason = f"{window.model_flops} FLOPs in {window.rate_s} s at {world_peak} FLOP/s leave the range of numbers"
    palm = _scaled(exact, _world(window, "palm_model_flops"), _world(window, "model_flops"))
    mfu = palm if convention == "palm" else exact
    if mfu is None and reason is None:
        reason = "attention as its full square was not counted, or its FLOPs leave the range of numbers"
    return UtilizationReading(
        window=window,
        mfu=mfu,
        hfu=_fraction(_world(window, "hardware_flops"), window.rate_s, world_peak, reason),
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
        coverage=f"{window.ranks_present}/{window.world_size}" if window.ranks_present else None,
        not_known=_not_known(window),
        **_peak_fields(peak),
    )


def _is_positive(value: float | None) -> bool:
    """True for what can be divided by: 0 < value <= the largest float; integers may be larger than that."""
    return value is not None and 0 < value <= sys.float_info.max


def _device_rate(peak: DevicePeak | None, precision: str | None) -> float | None:
    rate = peak.flops_per_s(precision) if peak is not None and precision is not None else None
    return rate if _is_positive(rate) else None


def _world_peak(window: StepWindow, rate: float | None) -> float | None:
    if window.world_size == 1:
        return rate
    world_peak = window.world_peak_flops_per_s
    return world_peak if _is_positive(world_peak) else None


def _world(window: StepWindow, name: str) -> int | None:
    """The world's sum of a value; this rank's own in a world of one."""
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
        return f"the values of the other {window.world_size - 1} ranks are not known for this window"
    return None


def _no_rate(peak: DevicePeak, precision: str) -> str:
    why = peak.missing_reason(precision) or f"it is given as {peak.flops_per_s_by_precision.get(precision)} FLOP/s"
    device = peak.device_name or "the device"
    return f"{device} has no usable {precision} peak: {why}. Pass peak={{{precision!r}: <FLOP/s>}}"


def _fraction(flops: float | None, elapsed_s: float, rate: float | None, reason: str | None) -> float | None:
    if reason is not None or flops is None or rate is None or not _is_positive(rate):
        return None
    return _quotient(flops, elapsed_s * rate)


def _scaled(value: float | None, numerator: int | None, denominator: int | None) -> float | None:
    if value is None or numerator is None or not denominator:
        return None
    return _quotient(value * numerator, denominator) if _is_positive(numerator) else 0.0 * value


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
    is_whole = window.ranks_present is None  # a rate of some ranks would pass for the world's
    amounts = {
        "tokens_per_s": (_world(window, "tokens") if is_whole else None, window.rate_s),
        "device_tokens_per_s": (window.tokens, window.elapsed_s),
        "samples_per_s": (_world(window, "samples") if is_whole else None, window.rate_s),
        "device_samples_per_s": (window.samples, window.elapsed_s),
        "device_model_flops_per_s": (window.model_flops, window.elapsed_s),
        "device_hardware_flops_per_s": (window.hardware_flops, window.elapsed_s),
    }
    return {name: _rate(*amount) if usable else None for name, amount in amounts.items()}


def _exactness(window: StepWindow) -> str:
    """The label of a reading: never better than what is known of its counts."""
    if window.model_flops is None:
        return "unknown"
    label = window.counts_label or ("sampled" if window.is_sampled else "exact")
    if window.is_lower_bound and label not in ("lower_bound", "upper_bound", "unknown"):
        label = "lower_bound+sampled" if label == "sampled" else "lower_bound"
    if window.world_size == 1:
        return label
    is_compared = bool(window.world_repeats_known)
    return _exactness_of_world(label, window.world_counts_label, is_compared=is_compared)


def _exactness_of_world(own: str, weakest: str | None, *, is_compared: bool) -> str:
    """The weakest label of a rank, where the ranks' work and batches were compared; else an upper bound at best.

    A sum over ranks that nobody compared holds repeated work once a rank. Where work of some rank is missing as well,
    or nobody knows, it can lie on either side of the truth.
    """
    labels = {*own.split("+"), weakest or "unknown"}
    if is_compared and "unknown" not in labels:
        weakest_label = max(labels, key=_LABELS.index)
        return "lower_bound+sampled" if {"lower_bound", "sampled"} <= labels else weakest_label
    if labels & {"lower_bound", "unknown"}:
        return "unknown"
    return "upper_bound+sampled" if "sampled" in labels else "upper_bound"


REPEATS_UNKNOWN = (
    "whether ranks repeat each other's work or read the same batch is not known: work and tokens that several ranks "
    "share are in the world's sums once per rank, so these are upper bounds"
)
SOME_RANKS = "only {} of {} ranks take part, so this is the MFU of their devices, without the others; "
MISSING_WORK = "; some rank also ran work that was not counted, so the sums can lie on either side of the truth"


def _not_known(window: StepWindow) -> str | None:
    if window.world_size == 1 or window.world_counts_label is None:
        return None  # nothing to say, or no sums: the reading has a reason for that
    if window.world_repeats_known:
        return None
    has_gaps = _exactness(window) == "unknown"
    some = SOME_RANKS.format(window.ranks_present, window.world_size) if window.ranks_present else ""
    return some + REPEATS_UNKNOWN + (MISSING_WORK if has_gaps else "") + "."


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


def metrics_of(reading: UtilizationReading, *, names: str = "mfu_monitor", batches: int = 1) -> dict[str, float]:
    """Scalars for a logger by their public names; what is unknown is left out.

    Args:
        reading: one window's reading.
        names: ``"mfu_monitor"``, or ``"throughput_monitor"`` for the names of Lightning's ThroughputMonitor.
        batches: training batches of a step, for the times and FLOPs of a step.

    Example:
        >>> metrics_of(reading)["utilization/mfu"]
    """
    metrics = _throughput_monitor_metrics(reading) if names == "throughput_monitor" else _own_metrics(reading, batches)
    return {name: float(value) for name, value in metrics.items() if value is not None and math.isfinite(value)}


def _own_metrics(reading: UtilizationReading, batches: int) -> dict[str, Any]:
    window = reading.window
    times = {} if window.invalid_reason is not None else metric_names.STEP_TIME
    return {
        **{tag: getattr(reading, name) for name, tag in metric_names.OF_READING.items()},
        metric_names.IS_EXACT: None if reading.mfu is None else float(reading.exactness == "exact"),
        metric_names.OF_MEASURED_PEAK: _of_measured_peak(reading),
        metric_names.RANK_SPREAD: window.rank_spread,
        **{tag: _per_step(window, getattr(window, name), batches) for name, tag in times.items()},
        **{tag: _per_step(window, getattr(window, name), batches) for name, tag in metric_names.FLOPS_PER_STEP.items()},
    }


def _of_measured_peak(reading: UtilizationReading) -> float | None:
    """Against the best measured product; where the peak itself was measured, MFU says the same."""
    is_measured = (reading.peak_source or "").startswith("measured")
    return None if is_measured else reading.achievable_fraction


def _per_step(window: StepWindow, value: float | None, batches: int) -> float | None:
    return _quotient(batches * value, window.steps) if value is not None and window.steps > 0 else None


def _throughput_monitor_metrics(reading: UtilizationReading) -> dict[str, Any]:
    """The names that Lightning's ThroughputMonitor logs in training; the world's only where there is more than one."""
    window = reading.window
    usable_s = window.elapsed_s if window.invalid_reason is None else None
    world_s = None if usable_s is None else window.rate_s
    batches = _rate(window.steps, usable_s)
    extra = {
        "device_batches_per_s": batches,
        "batches_per_s": _rate((window.world_steps or window.steps) * window.world_size, world_s),
        "model_flops_per_s": _rate(window.world_model_flops, world_s),
    }
    names = {
        **metric_names.THROUGHPUT_MONITOR,
        **(metric_names.THROUGHPUT_MONITOR_WORLD if window.world_size > 1 else {}),
    }
    return {tag: extra[name] if name in extra else getattr(reading, name) for name, tag in names.items()}


def _rate(amount: float | None, seconds: float | None) -> float | None:
    """An amount per second; None where either is not known, or where the quotient is not a finite number."""
    if amount is None or seconds is None or not _is_positive(seconds):
        return None
    return _quotient(amount, seconds)


def _quotient(numerator: float, denominator: float) -> float | None:
    """None where the arithmetic leaves the range of floats: a product that underflows to 0, a huge integer."""
    try:
        value = numerator / denominator
    except (ZeroDivisionError, OverflowError):
        return None
    return value if math.isfinite(value) else None


def goodput(run_model_flops: int | None, wall_s: float, rate: float | None) -> float | None:
    """MFU of the run so far over all its wall time.

    Args:
        run_model_flops: of this rank, over all steps.
        wall_s: seconds since the first step, whatever they went into.
        rate: dense peak of this rank's device, FLOP/s.
    """
    if run_model_flops is None or rate is None or not (_is_positive(rate) and _is_positive(wall_s)):
        return None
    return _quotient(run_model_flops, wall_s * rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What a whole run reached; ``str()`` of it is one sentence. Unknown is None.

    Example:
        >>> print(monitor.summary)
    """

    windows: int = 0
    """Windows with a reading."""
    steps: int = 0
    """Training batches in them; counted and compiling ones are in no window."""
    elapsed_s: float = 0.0
    """Seconds of these windows."""
    mfu: float | None = None
    """Over the sum of all windows that have one."""
    mfu_median: float | None = None
    """Of the windows' MFU: what a usual window reached."""
    hfu: float | None = None
    exactness: str | None = None
    """The weakest label of a window; None before the first."""
    reason: str | None = None
    """Why there is no MFU."""

    def __str__(self) -> str:
        if not self.windows:
            return f"MFU: nothing was measured{f' ({self.reason})' if self.reason else ''}."
        measured = f"over {self.steps:,} steps in {self.windows:,} windows"
        if self.mfu is None or self.mfu_median is None:
            return f"MFU: not known {measured}: {self.reason or 'no window had one'}."
        label = "" if self.exactness == "exact" else f", {str(self.exactness).replace('_', ' ')}"
        return (
            f"MFU {100 * self.mfu:.3g}% in total, {100 * self.mfu_median:.3g}% in the median window, {measured}{label}."
        )


_KEPT_WINDOWS = 8192
"""MFUs kept for the median; a longer run keeps every second, fourth, ... window."""
_LABELS = ("exact", "presumed", "sampled", "upper_bound", "lower_bound", "unknown")
"""From the strongest to the weakest."""


class RunTally:
    """Sums of a run's readings, in a bounded memory.

    Example:
        >>> tally = RunTally()
        >>> tally.add(reading)
        >>> tally.summary().mfu_median
    """

    def __init__(self) -> None:
        self._windows = self._steps = 0
        self._elapsed_s = self._known_s = 0.0
        self._ideal_s = {"mfu": 0.0, "hfu": 0.0}
        self._mfus: list[float] = []
        self._stride = 1
        self._label: str | None = None
        self._reason: str | None = None

    def add(self, reading: UtilizationReading) -> None:
        """Take one window's reading as it was shown: what was withheld is in no sum."""
        self._windows += 1
        self._steps += reading.window.steps
        self._elapsed_s += reading.elapsed_s
        if reading.mfu is None:
            self._reason = reading.reason
            return
        self._label = max((self._label or "exact", *reading.exactness.split("+")), key=_weakness)
        self._known_s += reading.elapsed_s
        self._ideal_s["mfu"] += reading.mfu * reading.elapsed_s
        self._ideal_s["hfu"] += (reading.hfu or 0.0) * reading.elapsed_s
        if self._windows % self._stride == 0:
            self._mfus.append(reading.mfu)
            if len(self._mfus) > _KEPT_WINDOWS:
                self._mfus, self._stride = self._mfus[::2], 2 * self._stride

    def summary(self) -> RunSummary:
        """The run so far."""
        return RunSummary(
            windows=self._windows,
            steps=self._steps,
            elapsed_s=self._elapsed_s,
            mfu=_rate(self._ideal_s["mfu"], self._known_s),
            mfu_median=statistics.median(self._mfus) if self._mfus else None,
            hfu=_rate(self._ideal_s["hfu"], self._known_s),
            exactness=self._label,
            reason=self._reason,
        )


def _weakness(label: str) -> int:
    return _LABELS.index(label) if label in _LABELS else len(_LABELS)

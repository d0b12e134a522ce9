"""What a run achieved and where it lost time: readings and alerts to one summary. Pure arithmetic."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mfu_monitor.alerts import Alert, AlertConfig, AlertDetector
from mfu_monitor.utilization import UtilizationReading

__all__ = ["IncidentSummary", "RunSummary", "WindowPoint", "replay_alerts", "summarize_run"]

_LOSSES = ("drop", "sag", "floor")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Notice:
    """An alert, and its place among the readings: steps alone do not say which, as a resumed run repeats some."""

    alert: Alert
    begin: int
    """Index of the first reading that it speaks of; the number of readings where none was made any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPoint:
    """The MFU of one window, and its last step."""

    step: int
    mfu: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentSummary:
    """One alert, how long it lasted, and what it cost."""

    alert: Alert
    last_step: int
    """Last step before the recovery, the change that closed it, or the end of the log."""
    recovered: bool
    wall_s: float
    lost_gpu_hours: float
    """Hours of the devices that the lost MFU stands for, over the incident's windows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One run in numbers. Fractions 0..1; unknown is None.

    GPU-hours are wall time times ranks, from the first window's steps to the last's: start-up is not in the log.
    """

    name: str
    source: str = ""
    device_name: str = ""
    precision: str | None = None
    world_size: int = 1
    windows: int = 0
    first_step: int | None = None
    last_step: int | None = None
    median_mfu: float | None = None
    median_hfu: float | None = None
    best: WindowPoint | None = None
    worst: WindowPoint | None = None
    goodput_mfu: float | None = None
    """MFU over all wall time, what was left out of the windows included."""
    median_tokens_per_s: float | None = None
    tokens: int | None = None
    """Of the whole world, in the windows' steps."""
    wall_s: float = 0.0
    gpu_hours: float = 0.0
    incidents: tuple[IncidentSummary, ...] = ()
    changes: tuple[Alert, ...] = ()
    lost_gpu_hours_by_cause: dict[str, float] = field(default_factory=dict)
    """Of the incidents, shared out by the causes' shares of each loss; largest first."""
    outside_gpu_hours: dict[str, float] = field(default_factory=dict)
    """Time that no window holds, by reason (``"validation"``, ``"checkpoint"``, ...); largest first."""
    data_wait_gpu_hours: float | None = None
    """Waiting for data in all windows, in incidents or not."""
    exactness: tuple[str, ...] = ()
    """Every kind that the readings have: ``"exact"``, ``"lower_bound"``, ``"sampled"``; none where it is not known."""
    format: str = ""
    """How a log of another tool was read; empty for ours."""
    claimed_mfu: float | None = None
    """The median of what another tool logged as its MFU, by its own convention."""
    replayed: bool = False
    """Whether the alerts were found from the readings now, as the log has none."""

    def to_dict(self) -> dict[str, Any]:
        """Plain types for JSON."""
        return dataclasses.asdict(self)


def replay_alerts(readings: Sequence[UtilizationReading], config: AlertConfig | None = None) -> tuple[Alert, ...]:
    """The alerts that a detector would have given while the readings were made.

    Example:
        >>> replay_alerts(read_jsonl("run/mfu.jsonl").readings, AlertConfig(drop=0.05))
    """
    return tuple(alert for _, alert in _replayed(readings, config))


def _replayed(readings: Sequence[UtilizationReading], config: AlertConfig | None) -> list[tuple[int, Alert]]:
    """Each alert with the number of readings made until then."""
    detector = AlertDetector(config)
    return [(made, alert) for made, reading in enumerate(readings, start=1) for alert in detector.update(reading)]


def summarize_run(
    name: str,
    readings: Sequence[UtilizationReading],
    alerts: Sequence[Alert] | None = None,
    *,
    readings_before: Sequence[int] | None = None,
    source: str = "",
    config: AlertConfig | None = None,
) -> RunSummary:
    """Sum a run up.

    Args:
        name: what the run is called in tables.
        readings: its readings in order of time.
        alerts: its alerts as logged; None or none at all replays the detection over the readings.
        readings_before: for each of the alerts how many readings had been made, its own included; None takes the
            alerts' steps for it, which a resumed run has twice.
        source: where the readings come from, to be shown.
        config: thresholds of the replay.

    Example:
        >>> run = read_jsonl("run/mfu.jsonl")
        >>> summarize_run("run", run.readings).median_mfu
    """
    if not readings:
        return RunSummary(name=name, source=source)
    if not alerts:
        placed = _replayed(readings, config)
    elif readings_before is None:
        placed = [(sum(reading.last_step <= alert.step for reading in readings), alert) for alert in alerts]
    else:
        placed = list(zip(readings_before, alerts, strict=True))
    notices = [_Notice(alert=alert, begin=_begin(readings, made, _first_step(alert))) for made, alert in placed]
    incidents = _incidents(readings, notices)
    last = readings[-1]
    return RunSummary(
        name=name,
        source=source,
        device_name=last.device_name,
        precision=last.precision,
        world_size=last.window.world_size,
        windows=len(readings),
        first_step=readings[0].first_step,
        last_step=last.last_step,
        incidents=incidents,
        changes=tuple(notice.alert for notice in notices if notice.alert.kind == "change"),
        lost_gpu_hours_by_cause=_by_cause(incidents),
        exactness=tuple(sorted({reading.exactness for reading in readings if reading.exactness})),
        replayed=not alerts and bool(notices),
        **_levels(readings),
        **_amounts(readings),
    )


def _levels(readings: Sequence[UtilizationReading]) -> dict[str, Any]:
    points = [WindowPoint(step=r.last_step, mfu=r.mfu) for r in readings if r.mfu is not None]
    return {
        "median_mfu": _median([point.mfu for point in points]),
        "median_hfu": _median([r.hfu for r in readings]),
        "median_tokens_per_s": _median([r.tokens_per_s for r in readings]),
        "best": max(points, key=lambda point: point.mfu, default=None),
        "worst": min(points, key=lambda point: point.mfu, default=None),
        "goodput_mfu": _goodput(readings),
    }


def _amounts(readings: Sequence[UtilizationReading]) -> dict[str, Any]:
    outside: dict[str, float] = {}
    for reading in readings:
        for reason, seconds in reading.window.excluded_s.items():
            outside[reason] = outside.get(reason, 0.0) + _gpu_hours(seconds, reading)
    waits = [_gpu_hours(r.window.data_wait_s, r) for r in readings if r.window.data_wait_s is not None]
    tokens = [r.window.world_tokens or r.window.tokens for r in readings]
    return {
        "wall_s": sum(r.window.wall_s for r in readings),
        "gpu_hours": sum(_gpu_hours(r.window.wall_s, r) for r in readings),
        "outside_gpu_hours": _largest_first(outside),
        "data_wait_gpu_hours": sum(waits) if waits else None,
        "tokens": sum(t for t in tokens if t is not None) if any(t is not None for t in tokens) else None,
    }


def _goodput(readings: Sequence[UtilizationReading]) -> float | None:
    """MFU by wall time; windows without MFU count neither way, so a run without a peak has none."""
    known = [(r.mfu * r.elapsed_s, r.window.wall_s) for r in readings if r.mfu is not None]
    wall_s = sum(wall for _, wall in known)
    return sum(useful for useful, _ in known) / wall_s if wall_s > 0 else None


def _begin(readings: Sequence[UtilizationReading], made: int, first_step: int) -> int:
    """From the reading that an alert was made at back to the first of its windows, but not beyond a restart."""
    index = made
    while index > 0 and readings[index - 1].last_step >= first_step:
        if index < made and readings[index - 1].last_step >= readings[index].last_step:
            break
        index -= 1
    return index


def _incidents(readings: Sequence[UtilizationReading], notices: Sequence[_Notice]) -> tuple[IncidentSummary, ...]:
    found, full = [], None
    for index, notice in enumerate(notices):
        if notice.alert.kind in _LOSSES:
            full = full or notice.alert.baseline  # a further drop is measured by the level before the first
            found.append(_incident(readings, notice, notices[index + 1 :], full))
        else:
            full = None
    return tuple(found)


def _incident(
    readings: Sequence[UtilizationReading], notice: _Notice, later: Sequence[_Notice], full: float | None
) -> IncidentSummary:
    end = next((other for other in later if other.alert.kind in ("recovery", "change")), None)
    inside = range(notice.begin, len(readings) if end is None else end.begin)
    further = [other for other in later if other.alert.kind in _LOSSES and other.begin in inside]
    lost = [_step_gpu_hours(readings[i]) * _lost_share(readings[i], i, notice.alert, further, full) for i in inside]
    return IncidentSummary(
        alert=notice.alert,
        last_step=readings[-1].last_step if end is None else _first_step(end.alert) - 1,
        recovered=end is not None and end.alert.kind == "recovery",
        wall_s=sum(readings[i].window.wall_s for i in inside),
        lost_gpu_hours=sum(lost),
    )


def _first_step(alert: Alert) -> int:
    return alert.first_step if alert.first_step is not None else alert.step


def _step_gpu_hours(reading: UtilizationReading) -> float:
    """Device hours of the window's steps, those that recompiled too."""
    return _gpu_hours(reading.elapsed_s + reading.window.excluded_s.get("compile", 0.0), reading)


def _lost_share(
    reading: UtilizationReading, index: int, alert: Alert, further: Sequence[_Notice], full: float | None
) -> float:
    """The share of the work that is missing: from the alert's baseline down to the window, as a part of ``full``.

    Where a further drop began meanwhile, this incident's part ends at that one's baseline.
    """
    if not (alert.baseline and full and reading.mfu is not None and _is_loss_of_mfu(alert)):
        return alert.loss or 0.0
    begun = [notice.alert.baseline for notice in further if notice.begin <= index]
    level = max([reading.mfu, *(baseline for baseline in begun if baseline is not None)])
    return max(0.0, alert.baseline - level) / full


def _is_loss_of_mfu(alert: Alert) -> bool:
    """False where tokens became padding or time went into compiling: the windows' MFU does not show that loss."""
    if alert.loss is None or alert.mfu is None or not alert.baseline:
        return alert.loss is None
    return math.isclose(1 - alert.mfu / alert.baseline, alert.loss, abs_tol=0.03)


def _by_cause(incidents: Sequence[IncidentSummary]) -> dict[str, float]:
    lost: dict[str, float] = {}
    for incident in incidents:
        shares = {cause.name: cause.share_of_loss for cause in incident.alert.causes if cause.share_of_loss}
        for name, share in (shares or {"unknown": 1.0}).items():
            lost[name] = lost.get(name, 0.0) + share * incident.lost_gpu_hours
    return _largest_first(lost)


def _largest_first(amounts: dict[str, float]) -> dict[str, float]:
    return dict(sorted(amounts.items(), key=lambda item: -item[1]))


def _gpu_hours(seconds: float, reading: UtilizationReading) -> float:
    return seconds * reading.window.world_size / 3600


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None

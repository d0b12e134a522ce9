"""From a window to what is told of it: the reading, whether it can be right, whether it fell, what was attainable."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from mfu_monitor.alerts import Alert
from mfu_monitor.alerts.alerting import BAD_NEWS, Alerting, alert_event
from mfu_monitor.checks.run_facts import RunFacts, by_users_figure
from mfu_monitor.checks.verdicts import Verdict, Verdicts
from mfu_monitor.config import MonitorConfig
from mfu_monitor.counting.step_record import StepRecord
from mfu_monitor.guard import Stages, guarded
from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.hardware.peak_source import PeakSource
from mfu_monitor.insights.outlook import Outlook
from mfu_monitor.sinks.base import Event
from mfu_monitor.timing.pipeline import RunSoFar
from mfu_monitor.timing.step_window import StepWindow
from mfu_monitor.utilization import UtilizationReading, active_precision, metrics_of, read_utilization

__all__ = ["Told", "WindowReader"]


@dataclass(frozen=True, slots=True)
class Told:
    """All that one window brings."""

    reading: UtilizationReading
    """As it is shown: without utilization where that is impossible."""
    events: tuple[Event, ...]
    """The reading, then diagnoses, then alerts."""
    is_impossible: bool
    has_bad_news: bool
    """An alert that is no recovery and no mere change."""


class WindowReader:
    """Makes readings of windows, judges them, and watches them for a drop.

    Args:
        config: the options.
        stages: where failures are kept.
        paused: leaves time out of the windows: ``with paused("peak"): ...``.
    """

    def __init__(
        self, config: MonitorConfig, stages: Stages, paused: Callable[[str], AbstractContextManager[Any]]
    ) -> None:
        self._config = config
        self._stages = stages
        self._paused = paused
        self._verdicts = Verdicts()
        self._outlook = Outlook(total_steps=config.total_steps, price_per_device_hour=config.price_per_device_hour)
        self._peaks: PeakSource | None = None
        self._facts: RunFacts | None = None
        self._record: StepRecord | None = None
        self._has_shown_outlook = False
        self.alerting = Alerting(config)

    def start(self, model: nn.Module | None, device: torch.device) -> None:
        """Training begins: collect what stays the same."""
        self._peaks = PeakSource(self._config.peak, device)
        self._collect_facts(model, device)

    @guarded("facts")
    def _collect_facts(self, model: nn.Module | None, device: torch.device) -> None:
        self._facts = RunFacts(model, self._config, device)

    # The peak.

    @property
    def peak(self) -> DevicePeak | None:
        """The device's peak as far as it was asked for."""
        return None if self._peaks is None else self._peaks.known

    def take_record(self, record: StepRecord) -> None:
        """A step was counted: what it ran explains the windows to come, and says in which precision."""
        self._record = record
        precisions = {name: totals.model_flops for name, totals in record.by_dtype().items()}
        self._find_peak(max(precisions, key=precisions.__getitem__) if any(precisions.values()) else None)

    def peak_rate_of(self, window: StepWindow) -> float | None:
        """The peak at the window's active precision; None where it is not known."""
        peak, precision = self._peak_of(window), active_precision(window)
        return None if peak is None or precision is None else peak.flops_per_s(precision)

    def _peak_of(self, window: StepWindow) -> DevicePeak | None:
        precision = active_precision(window)
        return self.peak if precision is None else self._find_peak(precision)

    @guarded("peak")
    def _find_peak(self, precision: str | None) -> DevicePeak | None:
        if precision is None or self._peaks is None:
            return None
        if not self._peaks.is_resolved(precision):
            with self._paused("peak"):  # measuring takes seconds that are not the training's
                return self._peaks.for_precision(precision)
        return self._peaks.for_precision(precision)

    @guarded("peak")
    def _measure_again(self, precision: str | None) -> bool:
        """A product ran faster than the best one measured, so the machine was busy when the peak was measured."""
        with self._paused("peak"):
            is_better = self._peaks is not None and self._peaks.measure_again(precision)
        if self._facts is not None:
            self._facts.forget_measurements()
        return is_better

    # The reading.

    def on(self, window: StepWindow, so_far: RunSoFar) -> Told:
        """Everything that one window brings.

        Args:
            window: its steps, time and FLOPs.
            so_far: the run up to its end, for goodput.
        """
        reading = self._read(window, so_far)
        if reading.peak_source == "measured" and (reading.hfu or 0.0) > 1.0 and self._measure_again(reading.precision):
            reading = self._read(window, so_far)
        verdict = self._judge(reading) or Verdict(reading)
        shown = verdict.reading
        alerts = self._alerts_of(shown) or ()
        event = Event(
            kind="reading",
            step=shown.last_step,
            metrics=self._metrics(shown, verdict, so_far.wall_s),
            payload=shown.to_dict(),
        )
        return Told(
            shown,
            (event, *verdict.events, *map(alert_event, alerts)),
            verdict.is_impossible,
            any(alert.kind in BAD_NEWS for alert in alerts),
        )

    def on_empty(self, window: StepWindow, so_far: RunSoFar) -> Told:
        """A window whose steps were all left out is no reading; that it lasts (every step compiles) can be an alert."""
        reading = self._read(window, so_far)
        alerts = self._alerts_of(reading) or ()
        return Told(reading, tuple(map(alert_event, alerts)), False, any(alert.kind in BAD_NEWS for alert in alerts))

    def _read(self, window: StepWindow, so_far: RunSoFar) -> UtilizationReading:
        facts = self._facts
        if facts is not None and facts.uses_own_figure and facts.flops_per_batch is not None:
            window = by_users_figure(window, facts.flops_per_batch)
        peak, precision = self._peak_of(window), active_precision(window)
        reading = read_utilization(
            window,
            peak,
            convention=self._config.convention,
            attainable_mfu=self._attainable(peak),
            achievable_flops_per_s=None if facts is None else facts.achievable_flops_per_s(precision),
        )
        return replace(reading, goodput_mfu=_goodput(so_far, reading.peak_flops_per_s))

    @guarded("outlook")
    def _attainable(self, peak: DevicePeak | None) -> float | None:
        return self._outlook.attainable(self._record, peak)

    @guarded("checks")
    def _judge(self, reading: UtilizationReading) -> Verdict:
        evidence = {} if self._facts is None else self._facts.evidence(reading.window, reading.precision)
        return self._verdicts.on(reading, self._record, self.peak, evidence=evidence)

    @guarded("alerts")
    def _alerts_of(self, reading: UtilizationReading) -> tuple[Alert, ...]:
        return self.alerting.on(reading)

    def _metrics(self, reading: UtilizationReading, verdict: Verdict, wall_s: float) -> dict[str, float]:
        metrics = metrics_of(reading, names=self._config.names)
        if self._config.names == "mfu_monitor":
            metrics |= self._outlook_metrics(reading, wall_s) or {}
            metrics["alerts/active"] = float(verdict.is_impossible or self.alerting.is_active)
        return metrics

    # The outlook.

    @guarded("outlook")
    def _outlook_metrics(self, reading: UtilizationReading, wall_s: float) -> dict[str, float]:
        return self._outlook.metrics(reading, self._record, self.peak, wall_s=wall_s)

    def first_outlook(self, step: int) -> Iterator[Event]:
        """The waterfall of the first window that has one; nothing after that."""
        if not self._has_shown_outlook:
            for event in self.outlook(step):
                self._has_shown_outlook = True
                yield event

    def outlook(self, step: int) -> Iterable[Event]:
        """The waterfall, its advice and its pictures as they are now; nothing before the first reading."""
        event = self._outlook_event(step)
        return () if event is None else (event,)

    @guarded("outlook")
    def _outlook_event(self, step: int) -> Event | None:
        with self._paused("outlook"):  # drawing takes a second that is not the training's
            return self._outlook.card(self._record, self.peak, step)


def _goodput(so_far: RunSoFar, rate: float | None) -> float | None:
    flops, wall_s = so_far.model_flops, so_far.wall_s
    return flops / (wall_s * rate) if flops is not None and wall_s > 0 and rate is not None else None

"""From a window to what is reported: the reading, whether it can be right, whether it fell, what was attainable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from mfu_monitor.alerts import Alert, AlertDetector
from mfu_monitor.checks import Diagnosis, diagnosis_text
from mfu_monitor.checks.run_facts import RunFacts, by_users_figure
from mfu_monitor.checks.verdicts import Verdict, Verdicts
from mfu_monitor.config import MonitorConfig, resolve_alerts
from mfu_monitor.counting.step_record import StepRecord
from mfu_monitor.errors import Stages, guarded
from mfu_monitor.hardware.detect import properties_of
from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.hardware.resolve import PeakSource
from mfu_monitor.insights.outlook import Outlook
from mfu_monitor.metric_names import ALERTS_ACTIVE
from mfu_monitor.sinks.base import Event
from mfu_monitor.sinks.run_identity import RunIdentity, identity_of_this_process
from mfu_monitor.timing.pipeline import WindowPipeline
from mfu_monitor.timing.step_window import ClosedWindow, StepWindow
from mfu_monitor.utilization import (
    RunTally,
    UtilizationReading,
    goodput,
    metrics_of,
    read_utilization,
)

__all__ = ["WindowReader", "WindowReport"]

_LOSSES = ("drop", "floor", "sag")
"""Kinds of alerts that can stop a run: neither a recovery nor a mere change."""


@dataclass(frozen=True, slots=True)
class WindowReport:
    """All that one window brings."""

    reading: UtilizationReading
    """As it is shown: without utilization where that is impossible."""
    events: tuple[Event, ...]
    """The reading, then diagnoses, then alerts."""
    is_impossible: bool
    is_loss: bool
    """True with an alert of a loss."""


class WindowReader:
    """Makes readings of windows, judges them, and watches them for a drop.

    Args:
        config: the options.
        stages: where failures are kept.
        windows: where time is left out that is not the training's.
    """

    def __init__(self, config: MonitorConfig, stages: Stages, windows: WindowPipeline) -> None:
        self._config = config
        self._stages = stages
        self._windows = windows
        self._verdicts = Verdicts()
        self._outlook = Outlook(total_steps=config.total_steps, price_per_device_hour=config.price_per_device_hour)
        self._peaks: PeakSource | None = None
        self._facts: RunFacts | None = None
        self._device: torch.device | None = None
        self._record: StepRecord | None = None
        thresholds = resolve_alerts(config.alerts)
        self.detector = None if thresholds is None else AlertDetector(thresholds)
        self.tally = RunTally()
        self._identity = identity_of_this_process(config.run_name)

    @guarded("facts")
    def start(self, model: nn.Module | None, device: torch.device) -> None:
        """Training begins: collect what stays the same."""
        config = self._config
        self._peaks = PeakSource(config.peak, device)
        self._device = device
        self._facts = RunFacts(
            model,
            device,
            promised_precision=config.promised_precision,
            flops_per_batch=config.flops_per_batch,
            use_flops_per_batch=config.use_flops_per_batch,
        )

    @property
    def device_name(self) -> str:
        """The device's name, as messages about its peak have it; empty where it is not known."""
        return self.peak.device_name if self.peak is not None else self._own_name() or ""

    @guarded("facts")
    def _own_name(self) -> str:
        found = None if self._device is None else properties_of(self._device)
        return "" if found is None else found.name

    # The peak.

    @property
    def peak(self) -> DevicePeak | None:
        """The device's peak as far as it was asked for."""
        return None if self._peaks is None else self._peaks.known

    def take_record(self, record: StepRecord) -> None:
        """A step was counted: it says in which precision the peak is wanted."""
        self._record = record
        precisions = {name: totals.model_flops for name, totals in record.by_dtype().items()}
        self._find_peak(max(precisions, key=precisions.__getitem__) if any(precisions.values()) else None)

    def peak_rate_of(self, window: StepWindow) -> float | None:
        """The peak at the window's active precision; None where it is not known."""
        peak, precision = self._peak_of(window), window.active_precision
        return None if peak is None or precision is None else peak.flops_per_s(precision)

    def _peak_of(self, window: StepWindow) -> DevicePeak | None:
        precision = window.active_precision
        return self.peak if precision is None else self._find_peak(precision)

    @guarded("peak")
    def _find_peak(self, precision: str | None) -> DevicePeak | None:
        if precision is None or self._peaks is None:
            return None
        if not self._peaks.is_resolved(precision):
            with self._windows.paused("peak"):  # measuring takes seconds that are not the training's
                return self._peaks.for_precision(precision)
        return self._peaks.for_precision(precision)

    @guarded("peak")
    def _measure_again(self, precision: str | None) -> bool:
        """A product ran faster than the best one measured, so the machine was busy when the peak was measured."""
        with self._windows.paused("peak"):
            is_better = self._peaks is not None and self._peaks.measure_again(precision)
        if self._facts is not None:
            self._facts.forget_measurements()
        return is_better

    # The reading.

    def on(self, closed: ClosedWindow) -> WindowReport:
        """Everything that one window brings.

        Args:
            closed: its steps, time and FLOPs, the count that explains them, and the run up to its end.
        """
        record = closed.record or self._record
        reading = self._read(closed, record)
        if not reading.window.steps:
            # No reading; that it lasts (every step recompiles) can be an alert.
            return self._report(reading, Verdict(reading), (), self._alerts_of(reading) or ())
        if reading.peak_source == "measured" and (reading.hfu or 0.0) > 1.0 and self._measure_again(reading.precision):
            reading = self._read(closed, record)
        verdict = self._judge(reading, record) or Verdict(reading)
        self.tally.add(verdict.reading)
        alerts = self._alerts_of(verdict.reading) or ()
        metrics = metrics_of(verdict.reading, names=self._config.names, batches=self._config.micro_batches_per_step)
        if self._config.names == "mfu_monitor":
            metrics |= self._outlook_metrics(verdict.reading, record, closed.run_wall_s) or {}
            metrics[ALERTS_ACTIVE] = float(verdict.is_impossible or self._has_incident)
        return self._report(reading, verdict, (_reading_event(verdict.reading, metrics),), alerts)

    def _report(
        self, computed: UtilizationReading, verdict: Verdict, events: tuple[Event, ...], alerts: Sequence[Alert]
    ) -> WindowReport:
        diagnosed = (_diagnosis_event(verdict.fresh, computed),) if verdict.fresh else ()
        return WindowReport(
            verdict.reading,
            (*events, *diagnosed, *(_alert_event(alert, self._identity) for alert in alerts)),
            verdict.is_impossible,
            any(alert.kind in _LOSSES for alert in alerts),
        )

    @property
    def _has_incident(self) -> bool:
        return self.detector is not None and self.detector.active

    def _read(self, closed: ClosedWindow, record: StepRecord | None) -> UtilizationReading:
        facts, window = self._facts, closed.window
        if facts is not None and facts.uses_own_figure and facts.flops_per_batch is not None:
            window = by_users_figure(window, facts.flops_per_batch)
        peak, precision = self._peak_of(window), window.active_precision
        reading = read_utilization(
            window,
            peak,
            convention=self._config.convention,
            attainable_mfu=self._attainable(record, peak),
            achievable_flops_per_s=None if facts is None else facts.achievable_flops_per_s(precision),
        )
        return replace(
            reading, goodput_mfu=goodput(closed.run_model_flops, closed.run_wall_s, reading.peak_flops_per_s)
        )

    @guarded("outlook")
    def _attainable(self, record: StepRecord | None, peak: DevicePeak | None) -> float | None:
        return self._outlook.attainable(record, peak)

    @guarded("checks")
    def _judge(self, reading: UtilizationReading, record: StepRecord | None) -> Verdict:
        evidence = {} if self._facts is None else self._facts.evidence(reading.window, reading.precision)
        return self._verdicts.on(reading, record, self.peak, evidence=evidence)

    @guarded("alerts")
    def _alerts_of(self, reading: UtilizationReading) -> tuple[Alert, ...]:
        return () if self.detector is None else self.detector.update(reading)

    # The outlook.

    @guarded("outlook")
    def _outlook_metrics(
        self, reading: UtilizationReading, record: StepRecord | None, wall_s: float
    ) -> dict[str, float]:
        return self._outlook.metrics(reading, record, self.peak, wall_s=wall_s)

    @guarded("outlook")
    def outlook(self, step: int, *, draw: bool) -> Event | None:
        """The waterfall and its advice as they are now, with pictures where asked; None before the first reading."""
        with self._windows.paused("outlook"):  # drawing takes a second that is not the training's
            card = self._outlook.card(self.peak, draw=draw)
        if card is None:
            return None
        return Event(
            kind="outlook", step=step, title="waterfall", text=card.text, payload=card.payload, figures=card.figures
        )


def _reading_event(reading: UtilizationReading, metrics: dict[str, float]) -> Event:
    return Event(kind="reading", step=reading.last_step, metrics=metrics, payload=reading.to_dict())


def _diagnosis_event(fresh: tuple[Diagnosis, ...], reading: UtilizationReading) -> Event:
    payload = {"diagnoses": [d.to_dict() for d in fresh], "reading": reading.to_dict()}
    text = diagnosis_text(fresh)
    return Event(kind="diagnosis", step=reading.last_step, payload=payload, text=text, title="diagnosis")


def _alert_event(alert: Alert, run: RunIdentity) -> Event:
    payload = {**alert.to_dict(), "run": run.to_dict()}
    lost = f" Lost: {alert.lost_s:,.3g} s." if alert.lost_s else ""
    text = f"{alert.message}{lost} Run: {run}."
    return Event(kind="alert", step=alert.step, payload=payload, text=text, title=f"alert/{alert.kind}")

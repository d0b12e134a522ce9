"""Readings in, alerts out: an explicit state and one update a window. No clock, no I/O, no torch."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from mfu_monitor.alerts.causes import attribute_loss
from mfu_monitor.alerts.changes import changed_factors, is_other_kind
from mfu_monitor.alerts.config import AlertConfig
from mfu_monitor.alerts.figures import WindowFigures, figures_of, mean_figures
from mfu_monitor.alerts.levels import (
    Level,
    drop_boundary,
    recovery_boundary,
    robust_level,
    sag_boundary,
    time_level,
    weak_boundary,
)
from mfu_monitor.alerts.messages import change_message, drop_message, floor_message, recovery_message
from mfu_monitor.alerts.records import Alert
from mfu_monitor.alerts.state import BestLevel, DetectorState, Incident
from mfu_monitor.utilization import UtilizationReading

__all__ = ["AlertDetector"]

_STATE_VERSION = 1


class AlertDetector:
    """Follows one run's readings and says, once an incident, that the level fell, and why.

    The baseline is the median of the trailing healthy windows with their noise (median absolute deviation). A drop is
    told when ``sustain`` windows in a row are low and their median is ``drop`` below the baseline; a slow sag when the
    long level is below its own best; an absolute ``floor`` on its own. After an alert the level starts anew, so that a
    further drop is another incident. Other FLOPs per step start a new baseline and are told as a change.

    Args:
        config: the thresholds.

    Example:
        >>> detector = AlertDetector(AlertConfig(drop=0.10))
        >>> alerts = [alert for reading in read_jsonl("run/mfu.jsonl").readings for alert in detector.update(reading)]
    """

    def __init__(self, config: AlertConfig | None = None) -> None:
        self.config = config or AlertConfig()
        self._state = DetectorState(ignore=self.config.warmup)
        self._last: WindowFigures | None = None

    @property
    def active(self) -> bool:
        """Whether an incident is open (the metric ``alerts/active``)."""
        return self._state.incident is not None

    def update(self, reading: UtilizationReading) -> tuple[Alert, ...]:
        """Take the next reading; returns the notices that it leads to, mostly none."""
        figures = figures_of(reading, self._last)
        if figures is None:
            return ()
        self._last = figures
        state = self._state
        if state.ignore > 0:
            state.ignore -= 1
            return ()
        if self._is_fragment(figures):
            return ()
        state.quiet = max(0, state.quiet - 1)
        state.quiet_change = max(0, state.quiet_change - 1)
        if is_other_kind(figures, state.history, self.config.change):
            return self._take_other_kind(figures)
        state.other_kind.clear()
        return self._judge(figures)

    def state_dict(self) -> dict[str, Any]:
        """The state as numbers, strings, lists, dicts and None, for a checkpoint."""
        return {"version": _STATE_VERSION, **self._state.to_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint: the levels and an open incident are kept, the next windows are warm-up again.

        A state of an unknown version is left alone: detection then starts anew.
        """
        if state.get("version") != _STATE_VERSION:
            return
        self._state = DetectorState.from_dict(state)
        self._state.ignore = self.config.warmup
        self._last = self._state.history[-1] if self._state.history else None

    # One window.

    def _is_fragment(self, figures: WindowFigures) -> bool:
        """A window cut short by the end of an epoch: too few steps to be compared. Many in a row are the rule."""
        state = self._state
        if not state.history or 2 * figures.steps >= statistics.median_low(w.steps for w in state.history[-9:]):
            state.fragments = 0
            return False
        state.fragments += 1
        return state.fragments <= self.config.sustain

    def _judge(self, figures: WindowFigures) -> tuple[Alert, ...]:
        state, config = self._state, self.config
        state.recent = [*state.recent[-2 * config.long_windows + 1 :], figures]
        level = self._baseline()
        if level is None:
            state.history.append(figures)
        else:
            self._sort(figures, level)
        alert = self._recovery() or self._drop(level) or self._sag(level) or self._recurring(level) or self._floor()
        return (alert,) if alert else ()

    def _baseline(self) -> Level | None:
        history = self._state.history
        if len(history) < self.config.min_baseline:
            return None
        return robust_level([window.signal for window in history])

    def _sort(self, figures: WindowFigures, level: Level) -> None:
        """Into the run of low windows, or with that run into the baseline: it was a dip."""
        state, config = self._state, self.config
        if figures.signal < weak_boundary(level, config):
            state.pending.append(figures)
            if len(state.pending) > 4 * config.sustain and state.quiet == 0:
                state.history.append(state.pending.pop(0))  # low, but not by `drop`: the baseline follows slowly
        else:
            state.history += [*state.pending, figures]
            state.pending.clear()
        del state.history[: -config.baseline_windows]

    # The five notices.

    def _drop(self, level: Level | None) -> Alert | None:
        state, config = self._state, self.config
        low = state.pending[-config.sustain :]
        if level is None or state.quiet or len(low) < config.sustain:
            return None
        if statistics.median(window.signal for window in low) >= drop_boundary(level, config):
            return None
        weak = weak_boundary(level, config)
        healthy = [window for window in state.history if window.signal >= weak]
        return self._open("drop", "drop", mean_figures(healthy), state.pending, level.median, 2 * config.sustain)

    def _sag(self, level: Level | None) -> Alert | None:
        state, config = self._state, self.config
        if level is None or len(state.recent) < config.long_windows:
            return None
        windows = state.recent[-config.long_windows :]
        median = statistics.median(window.signal for window in windows)
        best = state.best_median
        if best is None or median > best.level:
            state.best_median = BestLevel(level=median, figures=mean_figures(windows))
            return None
        if state.quiet or median >= sag_boundary(best.level, level, config):
            return None
        return self._open("sag", "sag", best.figures, windows, best.level, config.long_windows)

    def _recurring(self, level: Level | None) -> Alert | None:
        state, config = self._state, self.config
        if level is None or len(state.recent) < 2 * config.long_windows:
            return None
        share = _steadiness(state.recent)
        best = state.best_time
        if best is None or share > best.level:
            state.best_time = BestLevel(level=share, figures=mean_figures(state.recent))
            return None
        if state.quiet or share >= best.level * (1 - config.drop):
            return None
        return self._open("drop", "recurring", best.figures, state.recent, best.level, 2 * config.long_windows)

    def _floor(self) -> Alert | None:
        state, config = self._state, self.config
        low = [window.mfu for window in state.recent[-config.sustain :] if window.mfu is not None]
        if config.floor is None or state.incident or state.quiet or len(low) < config.sustain:
            return None
        if max(low) >= config.floor:
            return None
        after = mean_figures(state.recent[-config.sustain :])
        message = floor_message(config.floor, after, ())
        reference = config.floor * (1 + config.drop) * after.signal / (after.mfu or after.signal)
        return self._start("floor", message, None, after, reference, 2 * config.sustain)

    def _recovery(self) -> Alert | None:
        state, incident = self._state, self._state.incident
        if incident is None or len(state.recent) < incident.windows:
            return None
        windows = state.recent[-incident.windows :]
        if not _level_of(incident.kind, windows) >= incident.recover_above:
            return None
        after = mean_figures(windows[len(windows) // 2 :])
        alert = Alert(
            kind="recovery",
            step=after.step,
            first_step=after.first_step,
            mfu=after.mfu,
            baseline=_mfu_of(incident.healthy),
            message=recovery_message(incident.step, after, _mfu_of(incident.healthy)),
            incident=incident.number,
        )
        self._state = DetectorState(
            ignore=0, quiet=self.config.cooldown, incidents=state.incidents, history=incident.healthy or windows
        )
        return alert

    # Opening an incident.

    def _open(
        self,
        kind: str,
        detail: str,
        before: WindowFigures,
        windows: Sequence[WindowFigures],
        reference: float,
        recover_windows: int,
    ) -> Alert:
        after = mean_figures(windows)
        causes = attribute_loss(before, after)
        loss = 1 - _level_of(detail, windows) / reference
        message = drop_message(detail, before, after, loss, causes)
        alert = self._start(detail, message, before, after, reference, recover_windows)
        return dataclasses.replace(alert, kind=kind, causes=causes, loss=loss)

    def _start(
        self,
        kind: str,
        message: str,
        before: WindowFigures | None,
        after: WindowFigures,
        reference: float,
        recover_windows: int,
    ) -> Alert:
        state, config = self._state, self.config
        number = state.incidents + 1
        first = state.incident
        # A further drop keeps the level, and the baseline, to which the run has to come back.
        incident = first or Incident(
            number=number,
            kind=kind,
            step=after.step,
            reference=reference,
            recover_above=recovery_boundary(reference, config),
            windows=recover_windows,
            healthy=list(state.history) if kind == "drop" else [],
        )
        history = list(state.pending) if kind == "drop" else list(state.recent[-config.sustain :])
        self._state = DetectorState(
            ignore=0, quiet=config.cooldown, incidents=number, history=history, incident=incident
        )
        baseline = before.mfu if before is not None else None
        return Alert(
            kind=kind,
            step=after.step,
            first_step=after.first_step,
            mfu=after.mfu,
            baseline=baseline,
            message=message,
            incident=number,
        )

    # Another kind of step.

    def _take_other_kind(self, figures: WindowFigures) -> tuple[Alert, ...]:
        state, config = self._state, self.config
        if state.other_kind and is_other_kind(figures, state.other_kind, config.change):
            state.other_kind.clear()
        state.other_kind.append(figures)
        if len(state.other_kind) < config.sustain:
            return ()
        before, after = mean_figures(state.history), mean_figures(state.other_kind)
        causes = changed_factors(before, after, config.change)
        closed = state.incident.step if state.incident else None
        told = bool(causes) and state.quiet_change == 0
        self._state = DetectorState(
            ignore=0,
            quiet=state.quiet,
            quiet_change=config.cooldown if told else state.quiet_change,
            incidents=state.incidents,
            history=list(state.other_kind),
            recent=list(state.other_kind),
        )
        if not told:
            return ()
        return (
            Alert(
                kind="change",
                step=after.step,
                first_step=after.first_step,
                mfu=after.mfu,
                baseline=before.mfu,
                message=change_message(before, after, causes, closed),
                causes=causes,
            ),
        )


def _level_of(kind: str, windows: Sequence[WindowFigures]) -> float:
    return _steadiness(windows) if kind == "recurring" else statistics.median(window.signal for window in windows)


def _steadiness(windows: Sequence[WindowFigures]) -> float:
    """The level by time over the median level: 1 where no window is slow, whatever the level is."""
    signals = [window.signal for window in windows]
    return time_level(signals) / statistics.median(signals)


def _mfu_of(windows: Sequence[WindowFigures]) -> float | None:
    known = [window.mfu for window in windows if window.mfu is not None]
    return statistics.median(known) if known else None

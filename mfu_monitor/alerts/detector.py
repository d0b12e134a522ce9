"""Readings in, alerts out: an explicit state and one update a window. No clock, no I/O, no torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mfu_monitor.alerts.alert import Alert, CauseShare
from mfu_monitor.alerts.causes import attribute_loss, next_action, part_cause
from mfu_monitor.alerts.changes import changed_factors, is_other_kind
from mfu_monitor.alerts.figures import WindowFigures, figures_of, mean_figures, typical_figures
from mfu_monitor.alerts.levels import (
    Level,
    drop_boundary,
    recovery_boundary,
    robust_level,
    sag_boundary,
    steadiness,
    weak_boundary,
)
from mfu_monitor.alerts.messages import change_message, drop_message, floor_message, part_message, recovery_message
from mfu_monitor.alerts.parts import GrownPart, grown_part
from mfu_monitor.alerts.rank_tests import fallen_spans, reference_windows
from mfu_monitor.alerts.state import BestLevel, DetectorState, Incident
from mfu_monitor.alerts.thresholds import AlertConfig
from mfu_monitor.utilization import UtilizationReading

__all__ = ["AlertDetector"]

_STATE_VERSION = 1
_LOOK = "see where the step's time goes (step_time/*)"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finding:
    """A level that fell, and what it takes to recover."""

    detail: str
    """``"drop"``, ``"sag"``, ``"recurring"``, ``"part"`` or ``"floor"``."""
    before: WindowFigures | None
    windows: Sequence[WindowFigures]
    loss: float | None
    recover_above: float
    recover_windows: int
    slow_below: float | None = None
    part: GrownPart | None = None

    @property
    def after(self) -> WindowFigures:
        """The windows as one, by the measure that the finding compared: ``loss`` is what lies between both."""
        return mean_figures(self.windows) if self.detail in ("recurring", "floor") else typical_figures(self.windows)


class AlertDetector:
    """Follows one run's readings and says, once an incident, that the level fell, and why.

    The baseline is the median of the trailing healthy windows with their noise (median absolute deviation). A drop is
    reported when ``sustain`` windows in a row are low and their median is ``drop`` below the baseline; a slow decline
    when the long level is below its own best; an absolute ``floor`` on its own. After an alert the level starts again,
    so that a further drop is another incident. Other FLOPs per step start a new baseline and are reported as a change.

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

        A state of an unknown version is left alone: detection then starts again.
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
        state.recent = [*state.recent[1 - reference_windows(config) - config.long_windows :], figures]
        level = self._baseline()
        if level is None:
            state.history.append(figures)
        else:
            self._sort(figures, level)
        self._count_loss(figures)
        if recovery := self._recovery():
            return (recovery,)
        # Every long level is looked at, also in the cooldown: it learns its best.
        findings = (
            self._drop(level),
            self._collapse(level),
            self._sag(level),
            self._recurring(level),
            self._part(level),
            self._floor(),
        )
        finding = next((found for found in findings if found is not None), None)
        return (self._open(finding),) if finding is not None and not state.quiet else ()

    def _count_loss(self, figures: WindowFigures) -> None:
        incident = self._state.incident
        if incident is not None and incident.reference:
            missing = max(0.0, 1 - figures.signal / incident.reference)
            incident.lost_s += missing * figures.step_s * figures.steps

    def _baseline(self) -> Level | None:
        history, config = self._state.history, self.config
        # The level after a drop is known sooner: it is `sustain` windows old already, and may be falling on.
        needed = min(config.min_baseline, 2 * config.sustain) if self._state.incident else config.min_baseline
        if len(history) < needed:
            return None
        return robust_level([window.signal for window in history], self.config.sustain)

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

    # What can be found: each returns it, or None.

    def _drop(self, level: Level | None) -> _Finding | None:
        state, config = self._state, self.config
        low = state.pending[-config.sustain :]
        if level is None or len(low) < config.sustain:
            return None
        if statistics.median(window.signal for window in low) >= drop_boundary(level, config):
            return None
        weak = weak_boundary(level, config)
        before = typical_figures([window for window in state.history if window.signal >= weak])
        loss, error = 1 - _median(low) / before.signal, level.error(2 * config.sustain)
        return _Finding(
            detail="drop",
            before=before,
            windows=low,  # the run may have begun with windows that were low for another reason
            loss=loss,
            recover_above=recovery_boundary(level.median, config, error=error, loss=loss),
            recover_windows=2 * config.sustain,
        )

    def _collapse(self, level: Level | None) -> _Finding | None:
        """A fall of ``drop`` that the ranks of the windows prove, where the noise is too large for ``_drop``."""
        state, config = self._state, self.config
        if level is None or state.recent[-1].signal >= level.median:
            return None
        signals = [window.signal for window in state.recent]
        for count in fallen_spans(signals, config):
            before, windows = state.recent[:-count][-reference_windows(config) :], state.recent[-count:]
            reference = _median(before)
            loss, error = 1 - _median(windows) / reference, level.error(2 * config.sustain)
            return _Finding(
                detail="drop",
                before=typical_figures(before),
                windows=windows,
                loss=loss,
                recover_above=recovery_boundary(reference, config, error=error, loss=loss),
                recover_windows=2 * config.sustain,
            )
        return None

    def _part(self, level: Level | None) -> _Finding | None:
        """A part of the step that takes ``drop`` of the time more, also where the noise of the others hides it."""
        state, config = self._state, self.config
        before = state.recent[: -config.sustain][-reference_windows(config) :]
        if level is None or len(before) < config.min_baseline:
            return None
        windows = state.recent[-config.sustain :]
        grown = grown_part(before, windows, config)
        if grown is None:
            return None
        return _Finding(
            detail="part",
            before=typical_figures(before),
            windows=windows,
            loss=grown.loss,
            recover_above=-(grown.before_s + grown.after_s) / 2,
            recover_windows=2 * config.sustain,
            part=grown,
        )

    def _sag(self, level: Level | None) -> _Finding | None:
        state, config = self._state, self.config
        if level is None or len(state.recent) < config.long_windows:
            return None
        windows = state.recent[-config.long_windows :]
        median, best = _median(windows), state.best_median
        if best is None or median > best.level:
            state.best_median = BestLevel(level=median, figures=typical_figures(windows))
            return None
        if median >= sag_boundary(best.level, level, config):
            return None
        return _Finding(
            detail="sag",
            before=best.figures,
            windows=windows,
            loss=1 - median / best.level,
            recover_above=recovery_boundary(best.level, config),
            recover_windows=config.long_windows,
        )

    def _recurring(self, level: Level | None) -> _Finding | None:
        state, config = self._state, self.config
        if level is None or len(state.recent) < 2 * config.long_windows:
            return None
        recent, slow_below = state.recent[-2 * config.long_windows :], drop_boundary(level, config)
        share, best = steadiness([w.signal for w in recent], slow_below), state.best_steadiness
        if best is None or share > best.level:
            state.best_steadiness = BestLevel(level=share, figures=mean_figures(recent))
            return None
        if share >= best.level * (1 - config.drop):
            return None
        return _Finding(
            detail="recurring",
            before=best.figures,
            windows=recent,
            loss=1 - min(share / best.level, mean_figures(recent).signal / best.figures.signal),
            recover_above=recovery_boundary(best.level, config),
            recover_windows=2 * config.long_windows,
            slow_below=slow_below,
        )

    def _floor(self) -> _Finding | None:
        state, config = self._state, self.config
        windows = state.recent[-config.sustain :]
        low = [window.mfu for window in windows if window.mfu is not None]
        if config.floor is None or state.incident or len(low) < config.sustain or max(low) >= config.floor:
            return None
        after = mean_figures(windows)
        signal_per_mfu = after.signal / (after.mfu or after.signal)
        return _Finding(
            detail="floor",
            before=None,
            windows=windows,
            loss=None,
            recover_above=recovery_boundary(config.floor * (1 + config.drop) * signal_per_mfu, config),
            recover_windows=2 * config.sustain,
        )

    # From a finding to an alert, and the end of its incident.

    def _open(self, finding: _Finding) -> Alert:
        state, config = self._state, self.config
        after, number = finding.after, state.incidents + 1
        causes = self._causes(finding, after)
        is_new_level = finding.detail in ("drop", "part")
        # A further drop keeps the level, and the baseline, to which the run has to come back.
        incident = state.incident or Incident(
            number=number,
            kind=finding.detail,
            step=after.step,
            recover_above=finding.recover_above,
            windows=finding.recover_windows,
            slow_below=finding.slow_below,
            reference=None if finding.before is None else finding.before.signal,
            part=None if finding.part is None else finding.part.name,
            healthy=list(state.history) if is_new_level else [],
        )
        lost_s = None if finding.loss is None else finding.loss * sum(w.step_s * w.steps for w in finding.windows)
        incident.lost_s += lost_s or 0.0
        history = list(finding.windows) if is_new_level else state.history
        self._state = DetectorState(quiet=config.cooldown, incidents=number, history=history, incident=incident)
        return Alert(
            kind="drop" if finding.detail in ("recurring", "part") else finding.detail,
            step=after.step,
            first_step=after.first_step,
            mfu=after.mfu,
            baseline=finding.before.mfu if finding.before is not None else None,
            message=self._message(finding, after, causes),
            causes=causes,
            loss=finding.loss,
            level=str(after.label[0]),
            before=None if finding.before is None else finding.before.signal,
            after=after.signal,
            lost_s=lost_s,
            next_action=next_action(causes[0].name) if causes else _LOOK,
            incident=number,
        )

    def _message(self, finding: _Finding, after: WindowFigures, causes: Sequence[CauseShare]) -> str:
        if finding.before is None or finding.loss is None:
            return floor_message(self.config.floor or 0.0, after)
        if finding.part is not None:
            return part_message(finding.part, finding.before, after, causes[0])
        return drop_message(finding.detail, finding.before, after, finding.loss, causes)

    def _causes(self, finding: _Finding, after: WindowFigures) -> tuple[CauseShare, ...]:
        if finding.before is None:
            return ()
        if finding.part is not None:
            return (part_cause(finding.part.name, finding.before, after),)
        return attribute_loss(finding.before, after)

    def _recovery(self) -> Alert | None:
        state, incident = self._state, self._state.incident
        if incident is None or len(state.recent) < incident.windows:
            return None
        windows = state.recent[-incident.windows :]
        signals = [window.signal for window in windows]
        is_recurring = incident.kind == "recurring"
        level = steadiness(signals, incident.slow_below or 0.0) if is_recurring else statistics.median(signals)
        if incident.part is not None:
            level = -statistics.median(getattr(window, incident.part) or 0.0 for window in windows)
        if level < incident.recover_above:
            return None
        after = typical_figures(windows[len(windows) // 2 :])
        baseline = typical_figures(incident.healthy).mfu if incident.healthy else None
        history = incident.healthy or state.history
        self._state = DetectorState(quiet=self.config.cooldown, incidents=state.incidents, history=history)
        return Alert(
            kind="recovery",
            step=after.step,
            first_step=after.first_step,
            mfu=after.mfu,
            baseline=baseline,
            message=recovery_message(incident.step, after, baseline),
            level=str(after.label[0]),
            before=incident.reference,
            after=after.signal,
            lost_s=incident.lost_s or None,
            incident=incident.number,
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
        # An incident never ends unsaid, also where only another value is known now.
        told = bool(state.incident) or (bool(causes) and state.quiet_change == 0)
        self._state = DetectorState(
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
                level=str(after.label[0]),
                before=before.signal,
                after=after.signal,
                causes=causes,
            ),
        )


def _median(windows: Sequence[WindowFigures]) -> float:
    return statistics.median(window.signal for window in windows)

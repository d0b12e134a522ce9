"""A part of the step that grew by itself, found in its own series: clean where MFU is noisy. Pure arithmetic."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from mfu_monitor.alerts.figures import WindowFigures
from mfu_monitor.alerts.levels import robust_level
from mfu_monitor.alerts.rank_tests import lies_below
from mfu_monitor.alerts.thresholds import AlertConfig

__all__ = ["GrownPart", "grown_part"]

_PARTS = (
    "gc_pause_s",
    "h2d_copy_s",
    "data_wait_s",
    "between_s",
    "optimizer_s",
    "forward_s",
    "backward_s",
    "other_s",
)
"""Fields of ``WindowFigures``; what may lie inside another one comes first."""

_FAR = 8.0
"""Standard deviations that no wandering noise reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrownPart:
    """Medians of one part's seconds a step, and the share of the step that it takes more than before."""

    name: str
    before_s: float
    after_s: float
    loss: float


def grown_part(
    before: Sequence[WindowFigures], after: Sequence[WindowFigures], config: AlertConfig
) -> GrownPart | None:
    """The first part that took longer in every window, by at least ``drop`` of the step; None where there is none.

    What a part took over from the rest of the step (a wait that moved) is not a loss.

    Example:
        >>> grown_part(before, after, AlertConfig()).name
        'data_wait_s'
    """
    step_s = statistics.median(window.step_s for window in before)
    for name in _PARTS:
        earlier = [value for window in before if (value := getattr(window, name)) is not None]
        later = [value for window in after if (value := getattr(window, name)) is not None]
        if len(earlier) < config.min_baseline or len(later) < len(after):
            continue
        before_s, after_s = statistics.median(earlier), statistics.median(later)
        more_s = after_s - before_s
        if more_s < config.drop * (step_s + more_s) or not _is_proven(earlier, later, step_s, config):
            continue
        if _rest_s(name, before) - _rest_s(name, after) <= more_s / 2:
            return GrownPart(name=name, before_s=before_s, after_s=after_s, loss=more_s / (step_s + more_s))
    return None


def _is_proven(earlier: list[float], later: list[float], step_s: float, config: AlertConfig) -> bool:
    if not lies_below([-value for value in earlier], [-value for value in later]):
        return False
    # Away from 0, so that a part that mostly takes no time has a relative noise too.
    level = robust_level([step_s + value for value in earlier], config.sustain)
    more_s = statistics.median(later) - statistics.median(earlier)
    return level.correlation == 1.0 or more_s > _FAR * level.correlation * level.noise * level.median


def _rest_s(name: str, windows: Sequence[WindowFigures]) -> float:
    return statistics.median(window.step_s - (getattr(window, name) or 0.0) for window in windows)

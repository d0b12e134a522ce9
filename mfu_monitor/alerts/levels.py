"""Robust levels of a noisy series, and the boundaries below which it counts as fallen. Pure arithmetic."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from mfu_monitor.alerts.thresholds import AlertConfig

__all__ = ["Level", "drop_boundary", "recovery_boundary", "robust_level", "sag_boundary", "steadiness", "weak_boundary"]

_MAD_TO_SIGMA = 1.4826
"""Standard deviation of a normal series over its median absolute deviation: 1 / Phi^-1(3/4)."""
_MEDIAN_EFFICIENCY = 1.2533
"""Standard error of a median over that of a mean, for a normal series: sqrt(pi / 2)."""
_LONE_DIPS = 3
"""Runs of slow windows that are not a pattern yet."""


_CORRELATED = 1.3
"""Medians of neighbouring windows that scatter by so much more than independent windows would show correlated noise (a
neighbour's load, the network); less is chance."""


@dataclass(frozen=True, slots=True)
class Level:
    """Median of a series and its noise, relative to the median."""

    median: float
    noise: float
    """Standard deviation from window to window, without outliers."""
    correlation: float = 1.0
    """How much more medians of neighbouring windows scatter than those of independent ones: at least 1."""

    def error(self, windows: int) -> float:
        """Relative standard error of the median of so many neighbouring windows."""
        return self.correlation * _MEDIAN_EFFICIENCY * self.noise / math.sqrt(windows)


def robust_level(signals: Sequence[float], block: int | None = None) -> Level:
    """Median and relative noise (from the median absolute deviation) of at least one signal.

    Args:
        signals: the level of each window, in order.
        block: length of the medians whose scatter separates correlated from independent noise; None takes it as
            independent.

    Example:
        >>> robust_level([0.44, 0.45, 0.46, 0.10]).median
        0.445
    """
    median = statistics.median(signals)
    level = Level(median, _scatter(signals, median))
    expected = level.error(block) if block and len(signals) >= 5 * block else 0.0
    if not block or expected <= 0:
        return level
    medians = [statistics.median(signals[start : start + block]) for start in range(0, len(signals) - block + 1, 2)]
    ratio = _scatter(medians, median) / expected
    return Level(median, level.noise, ratio if ratio > _CORRELATED else 1.0)


def _scatter(values: Sequence[float], median: float) -> float:
    return _MAD_TO_SIGMA * statistics.median(abs(value - median) for value in values) / median


def steadiness(signals: Sequence[float], slow_below: float) -> float:
    """Time of the windows without what recurring slow ones cost, over their time: 1 where nothing recurs.

    A median does not see one slow window in ten, though half of the time may go there. The costliest ``_LONE_DIPS``
    runs of slow windows are left out: lone stalls do not recur, and a drop that begins now is one run.

    Args:
        signals: the level of each window, in order.
        slow_below: a window below it is slow.
    """
    median = statistics.median(signals)
    costs, is_slow = [], False
    for signal in signals:
        if signal < slow_below:
            costs += [0.0] if not is_slow else []
            costs[-1] += median / signal - 1
        is_slow = signal < slow_below
    recurring = sum(sorted(costs)[:-_LONE_DIPS])
    return len(signals) / (len(signals) + recurring)


def weak_boundary(level: Level, config: AlertConfig) -> float:
    """A window below it may belong to a drop; above it, the drop (if it was one) is over.

    Near the healthy side, so that noise seldom interrupts a real drop of ``config.drop``.
    """
    return level.median * (1 - 0.35 * config.drop)


def drop_boundary(level: Level, config: AlertConfig) -> float:
    """The median of ``config.sustain`` windows below it is a drop of ``config.drop``, within its own noise.

    Half of the medians around an exact 10% drop are above 90%: so 2.5 standard errors are allowed, at most 0.4 of the
    drop. At least 5.5 standard errors below the baseline, so that plain noise never gets there.
    """
    error = level.error(config.sustain)
    # A run without noise that falls by exactly the drop has fallen by it, whatever the last digit says.
    told = config.drop - min(max(2.5 * error, 1e-6), 0.4 * config.drop)
    return level.median * (1 - max(told, 5.5 * error))


def sag_boundary(best: float, level: Level, config: AlertConfig) -> float:
    """The long level below it has sagged from its best.

    0.7 of the drop: both ends are medians over ``long_windows`` of a slope, which hides part of a slow fall. At least 7
    standard errors, as the best of many levels lies above the usual one; more with correlated noise, which shows more
    in long medians than in the short ones that it was measured by.
    """
    noise = 7 * level.correlation * level.error(config.long_windows)
    return best * (1 - max(0.7 * config.drop, noise))


def recovery_boundary(reference: float, config: AlertConfig, *, error: float = 0.0, loss: float = 1.0) -> float:
    """A level above it has recovered. Well above ``drop_boundary``, so that one incident is not reported twice.

    Args:
        reference: the level before the incident.
        config: the thresholds.
        error: relative standard error of the level that is compared; two of them are allowed for.
        loss: relative loss of the incident; at least half of it must be made good.
    """
    allowed = max(0.3 * config.drop, 2 * error)
    return reference * (1 - min(allowed, 0.5 * loss))

"""Whether a series fell, judged by ranks alone: no size and no shape of its noise is assumed. Pure arithmetic.

Where nothing changed, every order of the windows is equally likely, whatever their noise looks like: so the probability
of a false alert is known from the number of windows alone, at 1% of noise as at 50%.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

from mfu_monitor.alerts.levels import robust_level
from mfu_monitor.alerts.thresholds import AlertConfig

__all__ = ["fallen_spans", "lies_below", "rank_shift", "reference_windows"]

_CHANCE = 5e-8
"""Probability of a false finding in one window: a thousandth in 20,000 windows."""
_LEAST_Z = 4.65
_LEAST_Z_LONG = 5.1
"""Standard errors of the rank sum. Measured on independent windows against 200 earlier ones, a run of 2,000 windows
gets there by chance four times in 10,000 runs with 18 newest windows, and less than once with 50."""


def lies_below(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether all of ``after`` lie below all but a few of ``before``, which chance does once in 20 million windows.

    How few: among ``n + m`` windows in random order the last ``m`` all are among the lowest ``m + k`` with probability
    ``C(m + k, m) / C(n + m, m)``. So a hundredth of dips in the baseline hides nothing, and a short baseline needs more
    windows after it.

    Example:
        >>> lies_below([0.40, 0.45, 0.50] * 30, [0.30] * 6)
        True
    """
    n, m = len(before), len(after)
    allowed = _CHANCE * math.comb(n + m, m)
    if not n or not m or allowed < 1:
        return False
    highest = max(after)
    lower = sum(value <= highest for value in before)
    return math.comb(m + lower, m) <= allowed


def rank_shift(before: Sequence[float], after: Sequence[float]) -> float:
    """Standard errors by which ``after`` ranks below ``before`` (Mann and Whitney); 0 or less where it does not.

    Example:
        >>> rank_shift([0.5, 0.4] * 25, [0.3] * 18) > 4.65
        True
    """
    n, m = len(before), len(after)
    if not n or not m:
        return 0.0
    ranked = sorted(before)
    above = sum(n - (bisect_left(ranked, value) + bisect_right(ranked, value)) / 2 for value in after)
    return (above - n * m / 2) / math.sqrt(n * m * (n + m + 1) / 12)


def fallen_spans(signals: Sequence[float], config: AlertConfig) -> Iterator[int]:
    """The numbers of newest windows that fell by ``drop`` from those before, shortest first.

    Noise that remembers its past asks for more windows, and for more standard errors.

    Args:
        signals: the level of each window, in order.
        config: the thresholds.
    """
    for count, least_z in (
        (config.sustain, None),
        (3 * config.sustain, _LEAST_Z),
        (config.long_windows, _LEAST_Z_LONG),
    ):
        before = signals[:-count][-reference_windows(config) :]
        if len(before) < config.min_baseline:
            return
        if statistics.median(signals[-count:]) >= (1 - config.drop) * statistics.median(before):
            continue
        correlation = robust_level(before, config.sustain).correlation
        if least_z is None:
            span = math.ceil(count * correlation**2)
            if lies_below(signals[:-span][-reference_windows(config) :], signals[-span:]):
                yield count
        elif rank_shift(before, signals[-count:]) > least_z * correlation:
            yield count


def reference_windows(config: AlertConfig) -> int:
    """Windows before the newest ones that these are ranked among: the more, the smaller the fall that is found."""
    return 2 * config.baseline_windows

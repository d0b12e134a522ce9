"""Another kind of step (sequence length, batch size, unfreezing, precision): reported as a change, never as a drop."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from mfu_monitor.alerts.alert import CauseShare
from mfu_monitor.alerts.figures import WindowFigures
from mfu_monitor.metric_names import written

__all__ = ["changed_factors", "is_other_kind"]


def is_other_kind(figures: WindowFigures, history: Sequence[WindowFigures], change: float) -> bool:
    """Whether a window's steps are of another kind than those of ``history``.

    Model FLOPs per step moved by more than ``change`` (and more than they vary anyway), and the hardware's with them.
    Where the hardware does the same work for fewer model FLOPs, more is masked or padded: that is a loss, no change.
    Recompute that is switched on moves only the hardware's FLOPs: a loss too.
    """
    if not history:
        return False
    if figures.label != history[-1].label:
        return True
    amount = "model_flops" if figures.model_flops else "tokens"
    moved = _moved(figures, history, amount, change)
    if not moved or amount == "tokens":
        return moved
    hardware_known = figures.hardware_flops is not None and history[-1].hardware_flops is not None
    return not hardware_known or _moved(figures, history, "hardware_flops", 0.5 * change)


def _moved(figures: WindowFigures, history: Sequence[WindowFigures], name: str, change: float) -> bool:
    value = getattr(figures, name)
    known = [getattr(window, name) for window in history if getattr(window, name)]
    if not value or not known:
        return False
    if known[0] == known[-1] == value:
        return False  # the common case, without sorting
    median = statistics.median(known)
    spread = statistics.median(abs(other - median) for other in known)
    return bool(abs(value - median) > max(change * median, 6 * spread))


_LEAST_PADDING_CHANGE = 0.02
"""Of the tokens; less comes from the lengths that happen to meet in a batch."""

_FACTORS = (
    ("model_flops", "model FLOPs per step", "FLOPs/step"),
    ("tokens", "tokens per step", "tokens/step"),
    ("samples", "samples per step", "samples/step"),
    ("padding_share", "padding", "fraction of tokens"),
)


def changed_factors(before: WindowFigures, after: WindowFigures, change: float) -> tuple[CauseShare, ...]:
    """What is different, for the notice of a change; no share, as nothing was lost."""
    found = [
        _factor(name, b, a, unit, words)
        for name, words, unit in _FACTORS
        if _differs(b := getattr(before, name), a := getattr(after, name), change)
    ]
    if before.model_flops and after.model_flops and before.tokens and after.tokens:
        b, a = before.model_flops / before.tokens, after.model_flops / after.tokens
        if _differs(b, a, change):
            words = "model FLOPs per token (longer sequences, more parameters that train, or fewer)"
            found.append(_factor("flops_per_token", b, a, "FLOPs/token", words))
    return (*found, *_label_factors(before, after))


def _label_factors(before: WindowFigures, after: WindowFigures) -> list[CauseShare]:
    found = []
    for index, words in ((1, "precision"), (2, "ranks"), (3, "peak of the device")):
        b, a = before.label[index], after.label[index]
        if b != a and before.label[0] == after.label[0]:
            words = f"{words} ({_shown(b)} -> {_shown(a)})"
            found.append(
                CauseShare(
                    name=words.split(" (")[0], before=None, after=None, unit="", share_of_loss=None, description=words
                )
            )
    return found


def _shown(value: object) -> str:
    if value is None:
        return "unknown"
    return written(value) if isinstance(value, float) else str(value)


def _factor(name: str, before: float, after: float, unit: str, words: str) -> CauseShare:
    return CauseShare(name=name, before=before, after=after, unit=unit, share_of_loss=None, description=words)


def _differs(before: float | None, after: float | None, change: float) -> bool:
    if before is None or after is None:
        return False
    if max(before, after) < 1:  # a share of the tokens; the other factors are counts
        return abs(after - before) > max(change * max(before, after), _LEAST_PADDING_CHANGE)
    return abs(after - before) > change * max(abs(before), abs(after))

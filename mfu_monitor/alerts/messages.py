"""The words of an alert: what was seen, what was expected, the likely cause, the next action."""

from __future__ import annotations

from collections.abc import Sequence

from mfu_monitor.alerts.alert import CauseShare
from mfu_monitor.alerts.causes import next_action
from mfu_monitor.alerts.figures import WindowFigures
from mfu_monitor.alerts.parts import GrownPart
from mfu_monitor.metric_names import written

__all__ = ["change_message", "describe_cause", "drop_message", "floor_message", "part_message", "recovery_message"]

_NAMED = 3
_LEAST_NAMED_SHARE = 0.05
"""At most so many causes in one message, and no small ones after the first; all are in ``Alert.causes``."""

_AGREE = 0.015
"""Losses that differ by less are the same in whole percent, or the next."""


def drop_message(
    kind: str, before: WindowFigures, after: WindowFigures, loss: float, causes: Sequence[CauseShare]
) -> str:
    """A drop, a gradual decline or slow windows that recur, with the causes."""
    name, levels = _signal(before, after, loss)
    seen = {
        "drop": f"{name} fell by {loss:.0%}: {levels}",
        "sag": f"{name} declined gradually by {loss:.0%}: {levels}",
        "recurring": f"Slow windows keep coming back and cost {loss:.0%} of the time: {name} {levels}",
    }[kind]
    return f"{seen} (steps {_steps(after)}).{_because(causes)}"


def part_message(part: GrownPart, before: WindowFigures, after: WindowFigures, cause: CauseShare) -> str:
    """A part of the step that grew while the level is too noisy to show it."""
    what = cause.description.split(" (")[0]
    levels = f": {before.mfu:.1%} -> {after.mfu:.1%}" if before.mfu and after.mfu else ""
    return (
        f"{what[0].upper()}{what[1:]} grew from {_seconds(part.before_s)} to {_seconds(part.after_s)} a step and costs "
        f"{part.loss:.0%} of the time (steps {_steps(after)}). MFU alone does not prove it{levels}. "
        f"Next: {next_action(cause.name)}."
    )


def floor_message(floor: float, after: WindowFigures) -> str:
    """A level below the absolute floor."""
    mfu = f"{after.mfu:.1%}" if after.mfu is not None else "unknown"
    return (
        f"MFU {mfu} is below the floor of {floor:.1%} (steps {_steps(after)}). No drop led to it, so there is no cause "
        "to name. Next: see where the step's time goes (step_time/*), or lower the floor if the model reaches no more."
    )


def recovery_message(opened_step: int, after: WindowFigures, baseline: float | None) -> str:
    """The end of an incident."""
    level = f"MFU is {after.mfu:.1%} (steps {_steps(after)})" if after.mfu is not None else f"Steps {_steps(after)}"
    before = f", {baseline:.1%} before" if baseline is not None else ""
    return f"Recovered: {level}{before}. The incident reported at step {opened_step} is over."


def change_message(
    before: WindowFigures, after: WindowFigures, causes: Sequence[CauseShare], closed: int | None
) -> str:
    """Another kind of step: no drop, a new baseline."""
    seen = "; ".join(describe_cause(cause) for cause in causes) or "other values are known of them than before"
    levels = f" MFU {before.mfu:.1%} -> {after.mfu:.1%}." if before.mfu and after.mfu else ""
    end = (
        f" The alert of step {closed} is closed: the levels cannot be compared any more." if closed is not None else ""
    )
    return f"The steps changed at step {after.first_step}: {seen}.{levels} A new baseline starts here.{end}"


def describe_cause(cause: CauseShare) -> str:
    """One factor in words, with its figures.

    Example:
        >>> describe_cause(alert.causes[0])
        'waiting for data (2% -> 25% of the step), 0.01 -> 0.125 s/step'
    """
    if cause.before is None or cause.after is None:
        return cause.description
    return f"{cause.description}, {written(cause.before)} -> {written(cause.after)} {cause.unit}"


def _signal(before: WindowFigures, after: WindowFigures, loss: float) -> tuple[str, str]:
    """Which value fell, and from what to what: one that says the same as the loss."""
    name = str(before.label[0])
    if name != "mfu":
        words = {"model_flops_per_s": "Model FLOP/s", "tokens_per_s": "Tokens per second"}[name]
        return words, f"{written(before.signal)} -> {written(after.signal)}"
    useful = f"{before.signal:.1%} -> {after.signal:.1%} of the peak"
    if before.mfu is None or after.mfu is None:
        return "Useful work (time not spent compiling)", useful
    levels = f"{before.mfu:.1%} -> {after.mfu:.1%}"
    mfu_loss = 1 - after.mfu / before.mfu
    if abs(mfu_loss - loss) <= _AGREE:
        return "MFU", levels
    # A part of the loss is not in the windows' MFU but beside it.
    how = "itself stays" if abs(mfu_loss) <= _AGREE else "itself goes"
    return (
        "Useful work (tokens that are not padding, time not spent compiling)",
        f"{useful}, while MFU {how} ({levels})",
    )


def _because(causes: Sequence[CauseShare]) -> str:
    if not causes:
        return " Cause: unknown, no factor that is measured got worse."
    told = [cause for n, cause in enumerate(causes) if n == 0 or _is_worth_naming(cause)][:_NAMED]
    parts = "; ".join(f"{describe_cause(cause)}: {cause.share_of_loss or 0.0:.0%} of the loss" for cause in told)
    return f" Cause: {parts}. Next: {next_action(told[0].name)}."


def _is_worth_naming(cause: CauseShare) -> bool:
    return (cause.share_of_loss or 0.0) >= _LEAST_NAMED_SHARE or cause.name == "straggler"


def _steps(figures: WindowFigures) -> str:
    return f"{figures.first_step}-{figures.step}"


def _seconds(value: float) -> str:
    """Seconds as people write them: 0.2 ms, 24 ms, 1.5 s.

    Example:
        >>> _seconds(0.024)
        '24 ms'
    """
    scale, unit = next(((s, u) for s, u in _UNITS_OF_TIME if value >= 0.9995 * s), (1e-6, "us"))
    return f"{value / scale:.3g} {unit}"


_UNITS_OF_TIME = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))

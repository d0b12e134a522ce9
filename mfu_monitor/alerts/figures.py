"""From a reading to the few figures per step that detection and cause work with."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mfu_monitor.counting.plain_types import PlainTypes
from mfu_monitor.timing.step_window import StepWindow
from mfu_monitor.utilization import UtilizationReading

__all__ = ["WindowFigures", "figures_of", "mean_figures", "typical_figures"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowFigures(PlainTypes):
    """One window, per training batch. Seconds, FLOPs and tokens are means over its steps; unknown is None.

    Steps that were left out of the window because they recompiled count here, as time lost to ``compile_s``: a run that
    recompiles all the time is slow, though no window of settled steps shows it.
    """

    step: int
    first_step: int
    steps: int
    signal: float
    """The level that is watched: MFU (or model FLOP/s without a peak), times the share of tokens that are not padding,
    over the time with recompiling."""
    label: tuple[str | int | float | bool | None, ...]
    """What must be equal for two signals to be compared: name of the signal, precision, ranks, peak, padding known."""
    mfu: float | None = None
    step_s: float
    """Seconds a step, recompiling included."""
    compile_s: float = 0.0
    data_wait_s: float | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    optimizer_s: float | None = None
    other_s: float | None = None
    gc_pause_s: float | None = None
    h2d_copy_s: float | None = None
    between_s: float | None = None
    cpu_wait_s: float | None = None
    model_flops: float | None = None
    hardware_flops: float | None = None
    recompute_flops: float | None = None
    optimizer_flops: float | None = None
    tokens: float | None = None
    samples: float | None = None
    recompiles: float = 0.0
    allocation_retries: float | None = None
    padding_share: float | None = None
    sm_clock_mhz: float | None = None
    temperature_c: float | None = None
    rank_spread: float | None = None
    slowest_rank: int | None = None
    throttle_reasons: tuple[str, ...] | None = None


_PER_STEP = (
    "data_wait_s",
    "forward_s",
    "backward_s",
    "optimizer_s",
    "other_s",
    "gc_pause_s",
    "h2d_copy_s",
    "between_s",
    "cpu_wait_s",
    "allocation_retries",
)
_FLOPS = ("model_flops", "hardware_flops", "recompute_flops", "optimizer_flops", "tokens", "samples")
_AS_IS = ("sm_clock_mhz", "temperature_c", "rank_spread", "slowest_rank", "throttle_reasons")


def figures_of(reading: UtilizationReading, last: WindowFigures | None = None) -> WindowFigures | None:
    """The figures of one reading, or None where nothing can be judged (no step, no FLOPs, no time).

    Args:
        reading: one window's reading.
        last: the figures before; a window whose every step recompiled has no FLOPs of its own and takes those.

    Example:
        >>> figures_of(reading).data_wait_s  # seconds a step
    """
    window = reading.window
    recompiled = _recompiled_steps(window)
    compile_s = float(window.excluded_s.get("compile", 0.0)) if recompiled else 0.0
    if window.steps == 0:
        return _all_recompiled(window, recompiled, compile_s, last)
    rate, name = _rate(reading)
    if rate is None or not _positive(window.elapsed_s):
        return None
    steps = window.steps + recompiled
    step_s = (window.elapsed_s + compile_s) / steps
    padding = _padding_share(window)
    figures: dict[str, Any] = {
        **{name: _over(getattr(window, name), steps) for name in _PER_STEP},
        **{name: _over(getattr(window, name), window.steps) for name in _FLOPS},
        **{name: getattr(window, name) for name in _AS_IS},
    }
    return WindowFigures(
        step=window.last_step,
        first_step=window.first_step,
        steps=steps,
        signal=rate * (window.elapsed_s / window.steps) / step_s * (1 - (padding or 0.0)),
        label=(name, reading.precision, window.world_size, reading.peak_flops_per_s, padding is not None),
        mfu=reading.mfu,
        step_s=step_s,
        compile_s=compile_s / steps,
        recompiles=window.recompiles / steps,
        padding_share=padding,
        **figures,
    )


def mean_figures(windows: Sequence[WindowFigures]) -> WindowFigures:
    """Several windows as one: means over those that know the figure. Needs at least one window.

    Figures per step are weighted by steps; rates (``mfu``, ``signal``) by time, which is all FLOPs over all seconds.
    """
    values: dict[str, Any] = {}
    for field in dataclasses.fields(WindowFigures):
        known = [(v, _weight(field.name, w)) for w in windows if (v := getattr(w, field.name)) is not None]
        values[field.name] = _mean(field.name, known) if known else None
    first, last = windows[0], windows[-1]
    return WindowFigures(**values | {"first_step": first.first_step, "step": last.step, "label": last.label})


def typical_figures(windows: Sequence[WindowFigures]) -> WindowFigures:
    """The same, with the medians of ``mfu`` and ``signal``: the levels that a fall of the median is told by."""
    mfus = [window.mfu for window in windows if window.mfu is not None]
    signal = statistics.median(window.signal for window in windows)
    return dataclasses.replace(mean_figures(windows), signal=signal, mfu=statistics.median(mfus) if mfus else None)


def _weight(name: str, window: WindowFigures) -> float:
    return window.steps * window.step_s if name in ("mfu", "signal") else window.steps


def _mean(name: str, known: list[tuple[Any, float]]) -> Any:
    if name == "steps":
        return sum(steps for steps, _ in known)
    if name in ("slowest_rank", "throttle_reasons", "label"):
        return _commonest(name, known)
    return sum(value * weight for value, weight in known) / sum(weight for _, weight in known)


def _commonest(name: str, known: list[tuple[Any, float]]) -> Any:
    if name != "throttle_reasons":
        return Counter(value for value, _ in known).most_common(1)[0][0]
    counts = Counter(reason for reasons, _ in known for reason in reasons)
    return tuple(reason for reason, count in counts.most_common() if 2 * count >= len(known))


def _recompiled_steps(window: StepWindow) -> int:
    """Steps left out because they compiled; steps left out to be counted are not among them."""
    return min(window.excluded_steps, window.recompiles) if window.excluded_s.get("compile") else 0


def _all_recompiled(
    window: StepWindow, steps: int, compile_s: float, last: WindowFigures | None
) -> WindowFigures | None:
    if last is None or steps == 0 or not _positive(compile_s):
        return None
    step_s = compile_s / steps
    unknown: dict[str, Any] = dict.fromkeys(_PER_STEP)
    return dataclasses.replace(
        last,
        step=window.last_step,
        first_step=window.first_step,
        steps=steps,
        signal=last.signal * last.step_s / step_s,
        mfu=None,
        step_s=step_s,
        compile_s=step_s,
        recompiles=window.recompiles / steps,
        **unknown,
    )


def _rate(reading: UtilizationReading) -> tuple[float | None, str]:
    """MFU where it is known, else the model FLOP/s of this device, else its tokens per second."""
    if _positive(reading.mfu):
        return reading.mfu, "mfu"
    window = reading.window
    for amount, name in ((window.model_flops, "model_flops_per_s"), (window.tokens, "tokens_per_s")):
        if _positive(amount) and _positive(window.elapsed_s):
            return float(amount or 0) / window.elapsed_s, name
    return None, ""


def _padding_share(window: StepWindow) -> float | None:
    if window.padding_share is not None:
        return window.padding_share if 0 <= window.padding_share < 1 else None
    if window.tokens and window.tokens_not_padding:
        return 1 - window.tokens_not_padding / window.tokens
    return None


def _positive(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0


def _over(value: float | None, steps: int) -> float | None:
    return None if value is None else value / steps

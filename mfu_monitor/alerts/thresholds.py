"""When to speak: the thresholds of drop detection."""

from __future__ import annotations

from dataclasses import dataclass

from mfu_monitor.errors import ConfigurationError

__all__ = ["AlertConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertConfig:
    """Thresholds of ``AlertDetector``. Counts are windows, fractions are 0..1.

    The defaults were chosen on synthetic series (docs/alerts.md): noise of up to 2.5% from window to window. On a
    noisier run raise ``sustain`` (later, surer) or ``drop``.

    Raises:
        ConfigurationError: a value is of the wrong type or out of range.

    Example:
        >>> AlertConfig(drop=0.15, sustain=10, floor=0.30)
    """

    drop: float = 0.10
    """Relative fall of the level that is told: 0.10 tells 45% to 40.5%."""
    sustain: int = 6
    """Windows for which the fall must last. Shorter dips (a slow batch, the start of an epoch) are not reported."""
    floor: float | None = None
    """MFU below which an alert is given whatever the baseline was."""
    cooldown: int = 20
    """Windows after an alert or a recovery without a new alert."""
    warmup: int = 10
    """Windows left out at the start and after a resume: caches, autotuning, clocks settle."""
    min_baseline: int = 20
    """Windows that a level needs before a fall from it can be reported."""
    baseline_windows: int = 100
    """Trailing healthy windows that make the baseline."""
    long_windows: int = 50
    """Windows of the long level, which is held against its own best: finds what falls too slowly for the baseline."""
    change: float = 0.05
    """Relative change of the FLOPs per step that counts as another kind of step, and starts a new baseline."""

    def __post_init__(self) -> None:
        for name in ("drop", "change"):
            _require_fraction(name, getattr(self, name))
        if self.floor is not None:
            _require_fraction("floor", self.floor)
        for name, least in _LEAST.items():
            _require_count(name, getattr(self, name), least)
        if self.min_baseline > self.baseline_windows:
            raise ConfigurationError(
                f"min_baseline={self.min_baseline} is more than baseline_windows={self.baseline_windows}, so no "
                "baseline could ever be complete. Give min_baseline <= baseline_windows, for example 20 and 100."
            )


_LEAST = {"sustain": 2, "cooldown": 0, "warmup": 0, "min_baseline": 5, "baseline_windows": 5, "long_windows": 10}
"""A median of fewer than five windows does not resist outliers; one window alone must never be an alert."""


def _require_fraction(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1:
        raise ConfigurationError(
            f"{name}={value!r} was given; a fraction between 0 and 1 is expected (10% is 0.10). "
            f"Example: AlertConfig({name}=0.10)."
        )


def _require_count(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigurationError(
            f"{name}={value!r} was given; a whole number of windows, at least {least}, is expected. "
            f"Example: AlertConfig({name}={AlertConfig.__dataclass_fields__[name].default})."
        )

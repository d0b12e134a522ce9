"""From a window and a peak to a reading: pure arithmetic on frozen records."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mfu_monitor.timing.records import StepWindow

__all__ = ["UtilizationReading"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UtilizationReading:
    """How well the hardware was used over one window. Fractions are 0..1; unknown is None and ``reason`` says why.

    Example:
        >>> reading = monitor.reading
        >>> reading.mfu, reading.peak_source, reading.exactness
    """

    window: StepWindow
    mfu: float | None = None
    """model_flops / (elapsed_s * world peak)."""
    hfu: float | None = None
    """hardware_flops / (elapsed_s * world peak)."""
    mfu_weighted: float | None = None
    """sum_i(F_i / P_i) / elapsed_s over precisions i; given when more than 1% of FLOPs ran in another precision."""
    hfu_weighted: float | None = None
    mfu_palm: float | None = None
    """MFU with every attention call counted as its full square."""
    goodput_mfu: float | None = None
    """MFU over all wall time, what was left out of the window included."""
    attainable_mfu: float | None = None
    """The MFU that the roofline allows for this step on this device."""
    achievable_fraction: float | None = None
    """model FLOP/s over the best *measured* product on this device, where one was measured."""
    reason: str | None = None
    """Why ``mfu`` is None: what is missing and what to do."""
    tokens_per_s: float | None = None
    """The world's."""
    device_tokens_per_s: float | None = None
    samples_per_s: float | None = None
    device_samples_per_s: float | None = None
    device_model_flops_per_s: float | None = None
    device_hardware_flops_per_s: float | None = None
    device_name: str = ""
    precision: str | None = None
    """The precision that carries the most model FLOPs: ``"bf16"``."""
    peak_flops_per_s: float | None = None
    """Dense peak of this rank's device at ``precision``."""
    peak_source: str | None = None
    peak_is_dense: bool | None = None
    peak_bytes_per_s: float | None = None
    peak_flops_per_s_by_precision: Mapping[str, float] = field(default_factory=dict)
    world_peak_flops_per_s: float | None = None
    convention: str = "exact"
    exactness: str = "exact"
    """``"exact"``, ``"lower_bound"`` (something uncounted ran) or ``"sampled"``; both: ``"lower_bound+sampled"``."""

    @property
    def first_step(self) -> int:
        """First training batch of the window."""
        return self.window.first_step

    @property
    def last_step(self) -> int:
        """Last training batch of the window; the step at which the reading is logged."""
        return self.window.last_step

    @property
    def elapsed_s(self) -> float:
        """Seconds of the window's steps."""
        return self.window.elapsed_s

    def to_dict(self) -> dict[str, Any]:
        """Plain types for JSON, the window nested."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "window"}
        plain = {name: dict(v) if isinstance(v, Mapping) else v for name, v in values.items()}
        return {**plain, "window": self.window.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> UtilizationReading:
        """The inverse of ``to_dict``; unknown keys of a later version are ignored."""
        names = {f.name for f in dataclasses.fields(cls)} - {"window"}
        known = {name: value for name, value in values.items() if name in names}
        return cls(window=StepWindow.from_dict(values["window"]), **known)

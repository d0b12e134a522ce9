"""Dense peaks of one device: FLOP/s by precision and bytes/s, with where they come from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from mfu_monitor.hardware.precision import matmuls_allow_tf32, precision_of

LEAST_PEAK_FLOPS_PER_S = 1e6
"""Below a megaflop per second nobody trains: the number was meant in TFLOP/s."""

__all__ = ["LEAST_PEAK_FLOPS_PER_S", "DevicePeak", "weighted_flops_per_s", "world_peak_flops_per_s"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeak:
    """What one torch device can do at best. All rates are dense and per device; FMA = 2 FLOPs.

    Example:
        >>> peak = mm.device_peak("NVIDIA H100 80GB HBM3")
        >>> peak.flops_per_s(torch.bfloat16), round(peak.ridge_point("bf16"))
        (989400000000000.0, 295)
    """

    device_name: str
    flops_per_s_by_precision: Mapping[str, float] = field(default_factory=dict)
    """FLOP/s by ``"fp64" "fp32" "tf32" "fp16" "bf16" "fp8" "fp4" "int8"``; a missing key: the part has no such unit."""
    bytes_per_s: float | None = None
    source: str = ""
    """Where they come from: ``"table: <datasheet>"``, ``"measured"``, ``"user"``, ``"derived: <assumptions>"``."""
    confidence: str = ""
    is_dense: bool = True
    max_clock_ratio: float | None = None
    """Maximum clock over the clock of the datasheet's tensor peak: how far a reading can really exceed 1."""
    notes: tuple[str, ...] = ()
    key: str = ""
    """The row of the packaged table that the device was recognised as; empty where it was not."""
    sparse_flops_per_s_by_precision: Mapping[str, float] = field(default_factory=dict)
    """The 2:4 sparse values of that row, kept to recognise them when somebody uses one; never a denominator here."""
    missing_reason_by_precision: Mapping[str, str] = field(default_factory=dict)
    """Why a precision has no value."""

    def flops_per_s(self, dtype: torch.dtype | str) -> float | None:
        """Dense FLOP/s for a torch dtype or a precision name; None if the part has no such unit.

        ``torch.float32`` asks torch's matmul setting at this moment: TF32 where that allows it and the part has it.
        Strings are literal: ``"fp32"`` and ``"tf32"`` never change their meaning.
        """
        precision = self.precision(dtype)
        return None if precision is None else self.flops_per_s_by_precision.get(precision)

    def precision(self, dtype: torch.dtype | str) -> str | None:
        """The precision that products of this dtype run in on this device at this moment; None if not defined."""
        precision = precision_of(dtype)
        is_switched = precision == "fp32" and isinstance(dtype, torch.dtype)
        if is_switched and "tf32" in self.flops_per_s_by_precision and matmuls_allow_tf32():
            return "tf32"
        return precision

    def sparse_flops_per_s(self, dtype: torch.dtype | str) -> float | None:
        """The 2:4 structured-sparsity value, for diagnosis only; None where the part has none."""
        precision = self.precision(dtype)
        return None if precision is None else self.sparse_flops_per_s_by_precision.get(precision)

    def missing_reason(self, dtype: torch.dtype | str) -> str | None:
        """Why ``flops_per_s`` is None; None if it is known."""
        precision = self.precision(dtype)
        if precision is None:
            return f"products of {dtype} have no precision of their own"
        if precision in self.flops_per_s_by_precision:
            return None
        default = f"no {precision} peak is known for {self.device_name} ({self.source or 'no source'})"
        return self.missing_reason_by_precision.get(precision, default)

    def ridge_point(self, dtype: torch.dtype | str) -> float | None:
        """FLOP per byte above which a kernel is bound by compute; None where peak or bandwidth is unknown."""
        rate = self.flops_per_s(dtype)
        return None if rate is None or not self.bytes_per_s else rate / self.bytes_per_s

    def weighted_flops_per_s(self, flops_by_precision: Mapping[str, float]) -> float | None:
        """``weighted_flops_per_s`` over this device's own peaks."""
        return weighted_flops_per_s(flops_by_precision, self.flops_per_s_by_precision)


def weighted_flops_per_s(flops_by_precision: Mapping[str, float], peaks: Mapping[str, float]) -> float | None:
    """The highest rate a mix of precisions allows: ``sum(F_i) / sum(F_i / P_i)``, the harmonic mean weighted by FLOPs.

    Args:
        flops_by_precision: FLOPs (or shares of them) by precision.
        peaks: Dense FLOP/s by precision.

    Returns:
        FLOP/s, or None if nothing ran or a precision that ran has no peak.

    Example:
        >>> weighted_flops_per_s({"fp8": 0.7, "bf16": 0.3}, {"fp8": 1979e12, "bf16": 989.5e12}) / 1e12  # about 1522
    """
    ran = {precision: flops for precision, flops in flops_by_precision.items() if flops > 0}
    if not ran or any(not peaks.get(precision) for precision in ran):
        return None
    try:
        return sum(ran.values()) / sum(flops / peaks[precision] for precision, flops in ran.items())
    except (ZeroDivisionError, OverflowError):  # beyond the range of floats
        return None


def world_peak_flops_per_s(peaks: Iterable[float | None]) -> float | None:
    """The world's peak: the sum of every rank's own device; None if there is no rank or any is unknown.

    Example:
        >>> world_peak_flops_per_s([989.4e12, 756.5e12])
        1745900000000000.0
    """
    known = list(peaks)
    if not known or any(not peak for peak in known):
        return None
    return sum(peak for peak in known if peak)

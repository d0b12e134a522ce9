"""Dense peaks of one device: FLOP/s by precision and bytes/s, with where they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

__all__ = ["DevicePeak"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeak:
    """What one torch device can do at best. All rates are dense and per device; FMA = 2 FLOPs."""

    device_name: str
    flops_per_s_by_precision: Mapping[str, float] = field(default_factory=dict)
    """FLOP/s by ``"fp64" "fp32" "tf32" "fp16" "bf16" "fp8" "fp4" "int8"``; a missing key: the part has no such unit."""
    bytes_per_s: float | None = None
    source: str = ""
    """Where the figures come from: ``"table: <vendor sheet>"``, ``"measured"``, ``"user"``, ``"derived: <assumptions>"``."""
    confidence: str = ""
    is_dense: bool = True
    max_clock_ratio: float | None = None
    """Maximum clock over the clock the sheet's tensor figure uses: the factor by which a reading can really exceed 1."""
    notes: tuple[str, ...] = ()

    def flops_per_s(self, dtype: torch.dtype | str) -> float | None:
        """Dense FLOP/s for a torch dtype or a precision name; None if the part has no such unit."""
        raise NotImplementedError

    def ridge_point(self, dtype: torch.dtype | str) -> float | None:
        """FLOP per byte above which a kernel is bound by compute; None where peak or bandwidth is unknown."""
        raise NotImplementedError

"""A peak for a device that no table knows, from SM count, clock and FMA rate by architecture, assumptions spelled out.

``peak = SM count x clock x FMA per clock and SM x 2``, dense. The rates are NVIDIA's architecture whitepapers'
(V100, Turing, GA100, GA102, Ada, GH100, RTX Blackwell; https://www.nvidia.com/en-us/data-center/resources/) and AMD's
CDNA whitepapers' (https://www.amd.com/en/technologies/cdna.html).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mfu_monitor.errors import PeakUnknownWarning
from mfu_monitor.hardware.cpu import CpuPeakRange, cpu_peak_range, read_cpu
from mfu_monitor.hardware.detect import properties_of, unknown_peak_message
from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.hardware.lookup import parse_name, rows_by_name
from mfu_monitor.hardware.properties import DeviceProperties
from mfu_monitor.hardware.table import PeakRow, load_table

__all__ = ["derive_from_properties", "derive_peak"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rates:
    """FMA per clock and SM (NVIDIA) or CU (AMD), by precision."""

    fma: Mapping[str, float]
    half_rate_fma: Mapping[str, float] | None = None
    """Parts that accumulate in FP32 at half rate: GeForce, and a few others by name."""
    clock_ratio: float = 1.0
    """Clock of the datasheet's tensor values over the maximum clock."""

    def clock_of(self, precision: str) -> float:
        """The clock behind the peak over the maximum; datasheets lower it for tensor peaks, not for fp32 and fp64."""
        return 1.0 if precision in ("fp64", "fp32") else self.clock_ratio


_AMPERE_PRO = {"fp64": 2, "fp32": 128, "tf32": 256, "fp16": 512, "bf16": 512, "int8": 1024}
_AMPERE_HALF = {"fp64": 2, "fp32": 128, "tf32": 128, "fp16": 256, "bf16": 256, "int8": 1024}
_HOPPER = {"fp64": 128, "fp32": 128, "tf32": 1024, "fp16": 2048, "bf16": 2048, "fp8": 4096, "int8": 4096}
_BLACKWELL = {
    "fp64": 64, "fp32": 128, "tf32": 2048, "fp16": 4096, "bf16": 4096, "fp8": 8192, "fp4": 16384, "int8": 8192,
}  # fmt: skip
_BLACKWELL_ULTRA = {**_BLACKWELL, "fp64": 2, "fp4": 24576, "int8": 270}

_NVIDIA: Mapping[tuple[int, int], _Rates] = {
    (6, 0): _Rates(fma={"fp64": 32, "fp32": 64, "fp16": 128}),
    (6, 1): _Rates(fma={"fp64": 4, "fp32": 128, "fp16": 128, "int8": 512}),  # FP16 products run through FP32
    (7, 0): _Rates(fma={"fp64": 32, "fp32": 64, "fp16": 512}),
    (7, 5): _Rates(
        fma={"fp64": 2, "fp32": 64, "fp16": 512, "int8": 1024},
        half_rate_fma={"fp64": 2, "fp32": 64, "fp16": 256, "int8": 1024},
    ),
    (8, 0): _Rates(fma={"fp64": 64, "fp32": 64, "tf32": 512, "fp16": 1024, "bf16": 1024, "int8": 2048}),
    (8, 6): _Rates(fma=_AMPERE_PRO, half_rate_fma=_AMPERE_HALF),
    (8, 9): _Rates(fma={**_AMPERE_PRO, "fp8": 1024}, half_rate_fma={**_AMPERE_HALF, "fp8": 512}),
    # Data-center datasheets since Hopper rate the tensor cores below the maximum SM clock: 1830 of 1980 MHz (H100 SXM),
    # 1856 of 1965 (B200), 1856 of 2032 (B300).
    (9, 0): _Rates(fma=_HOPPER, clock_ratio=0.92),
    (10, 0): _Rates(fma=_BLACKWELL, clock_ratio=0.945),
    (10, 3): _Rates(fma=_BLACKWELL_ULTRA, clock_ratio=0.913),
    (12, 0): _Rates(
        fma={**_AMPERE_PRO, "fp8": 1024, "fp4": 2048},
        half_rate_fma={**_AMPERE_HALF, "fp8": 512, "fp4": 2048},
    ),
}
_AMD: Mapping[str, _Rates] = {
    "gfx908": _Rates(fma={"fp64": 32, "fp32": 128, "fp16": 512, "bf16": 256, "int8": 512}),
    "gfx90a": _Rates(fma={"fp64": 128, "fp32": 128, "fp16": 512, "bf16": 512, "int8": 512}),
    "gfx942": _Rates(
        fma={"fp64": 128, "fp32": 128, "tf32": 512, "fp16": 1024, "bf16": 1024, "fp8": 2048, "int8": 2048}
    ),
    "gfx950": _Rates(fma={"fp64": 64, "fp32": 128, "fp16": 2048, "bf16": 2048, "fp8": 4096, "fp4": 8192, "int8": 4096}),
    "gfx1100": _Rates(fma={"fp32": 128, "fp16": 256, "bf16": 256, "int8": 256}),
    "gfx1201": _Rates(fma={"fp32": 128, "fp16": 512, "bf16": 512, "fp8": 1024, "int8": 1024}),
    "gfx1101": _Rates(fma={"fp32": 128, "fp16": 256, "bf16": 256, "int8": 256}),
}
# Not GeForce, but FP32 accumulation at half rate all the same, and INT8 at half rate too.
_HALF_RATE_WORDS = frozenset({"A10G", "L40", "L20"})
# Sold with rates capped by firmware: by compute capability and SM count they look like the full part.
_CAPPED_WORDS = frozenset({"H20", "H20Z", "B20", "B30", "B30A", "L2", "MI308X", "MI308", "5880"})


def derive_peak(device: torch.device | str | DeviceProperties, *, warn: bool = True) -> DevicePeak | None:
    """Derive a device's peak from what it says of itself; see ``derive_from_properties``.

    Args:
        device: A torch device or its string, or properties.
        warn: Give one ``PeakUnknownWarning`` with the reason when nothing can be derived.

    Example:
        >>> derive_peak("cuda:0").source
        'derived: 76 SMs x 2.010 GHz x FMA per clock and SM of compute capability 8.9 x 2, half-rate ...'
    """
    found = properties_of(device)
    peak, reason = derive_from_properties(found) if found is not None else (None, "the device could not be asked")
    if peak is None and warn:
        name = found.name if found is not None else str(device)
        warnings.warn(unknown_peak_message(name, reason), PeakUnknownWarning, stacklevel=2)
    return peak


def derive_from_properties(device: DeviceProperties) -> tuple[DevicePeak, str] | tuple[None, str]:
    """The derived peak, or None and the reason.

    Refused for export-capped parts and vGPU profiles, whose rates do not follow from their silicon, and where the
    device says neither SM count nor clock nor architecture.
    """
    if device.device_type == "cpu":
        return _derived_cpu_peak(cpu_peak_range(read_cpu()))
    refusal = _refusal(device)
    rates = _rates_of(device)
    if refusal is not None or rates is None or not device.sm_count or not device.clock_khz:
        return None, refusal or "SM count, clock or a known architecture is missing, so nothing can be derived"
    is_half_rate = rates.half_rate_fma is not None and _accumulates_at_half_rate(device.name)
    fma = _fma_of(rates, device.name) if is_half_rate else rates.fma
    cycles_per_s = device.sm_count * device.clock_khz * 1e3
    return (
        DevicePeak(
            device_name=device.name,
            flops_per_s_by_precision={
                p: 2 * per_clock * cycles_per_s * rates.clock_of(p) for p, per_clock in fma.items()
            },
            source=_source(device, rates, is_half_rate=is_half_rate),
            confidence="low",
            max_clock_ratio=1 / rates.clock_ratio if rates.clock_ratio < 1 else None,
            notes=("derived, not a vendor value; bandwidth unknown",),
        ),
        "",
    )


def _derived_cpu_peak(found: CpuPeakRange | None) -> tuple[DevicePeak, str] | tuple[None, str]:
    """The upper end of a CPU's range, since a peak is a bound; None where that end is not known."""
    if found is None or found.high_flops_per_s_by_precision is None:
        return None, "a CPU's cores, boost clock or vector units are not known here, so nothing can be derived"
    low = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in found.low_flops_per_s_by_precision.items())
    return (
        DevicePeak(
            device_name=found.device_name,
            flops_per_s_by_precision=dict(found.high_flops_per_s_by_precision),
            source=found.source,
            confidence=found.confidence,
            notes=(f"upper end of a range that starts at {low} GFLOP/s", *found.notes),
        ),
        "",
    )


def _refusal(device: DeviceProperties) -> str | None:
    parsed = parse_name(device.name)
    words = set(parsed.words)
    named = rows_by_name(device.name)
    is_d_variant = "RTX" in words and "D" in words and not named
    if words & _CAPPED_WORDS or is_d_variant or any(row.export_capped for row in named):
        return "it is sold with rates capped for export, which SM count and clock do not show"
    if (capped := _capped_twin(device)) is not None and not named:
        return f"by its silicon it may be the {capped.name}, whose rates are capped for export"
    if parsed.is_vgpu:
        return "it is a vGPU profile, which shares a card in time slices"
    return None


def _capped_twin(device: DeviceProperties) -> PeakRow | None:
    """A capped part with this architecture and number of SMs or CUs: a name that no table knows may be that part's."""
    silicon = (device.compute_capability, device.gcn_arch, device.sm_count)
    rows = (row for row in load_table() if row.export_capped and row.sm_count is not None)
    return next((row for row in rows if (row.compute_capability, row.gfx, row.sm_count) == silicon), None)


def _rates_of(device: DeviceProperties) -> _Rates | None:
    if device.gcn_arch is not None:
        return _AMD.get(device.gcn_arch)
    return _NVIDIA.get(device.compute_capability) if device.compute_capability is not None else None


def _accumulates_at_half_rate(name: str) -> bool:
    words = set(parse_name(name).words)
    return "GEFORCE" in words or bool(words & _HALF_RATE_WORDS)


def _fma_of(rates: _Rates, name: str) -> Mapping[str, float]:
    half = dict(rates.half_rate_fma or rates.fma)
    if set(parse_name(name).words) & _HALF_RATE_WORDS and "int8" in half:
        half["int8"] /= 2
    return half


def _source(device: DeviceProperties, rates: _Rates, *, is_half_rate: bool) -> str:
    unit = "CU" if device.gcn_arch else "SM"
    arch = device.gcn_arch or "compute capability {}.{}".format(*(device.compute_capability or ()))
    clock_ghz = (device.clock_khz or 0) / 1e6
    parts = [f"derived: {device.sm_count} {unit}s x {clock_ghz:.3f} GHz x FMA per clock and {unit} of {arch} x 2"]
    if rates.clock_ratio < 1:
        parts.append(f"tensor clock taken as {rates.clock_ratio} of the maximum")
    if rates.half_rate_fma is not None:
        parts.append(
            "half-rate FP32 accumulation by its name" if is_half_rate else "full-rate FP32 accumulation assumed"
        )
    if re.search(r"LAPTOP|MAX-Q|MOBILE", device.name.upper()):
        parts.append("the clock of a laptop part depends on its power setting")
    return ", ".join(parts)

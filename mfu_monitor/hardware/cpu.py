"""A CPU's theoretical peak: a range with low confidence, given only on request.

``cores usable x clock x FLOP per cycle and core``. The flags do not state the width of every unit, and no operating
system reports the clock that all cores hold under vector load, so this is a bracket; a measured product is the better
denominator.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mfu_monitor.errors import must_pass

__all__ = ["CpuDescription", "CpuPeakRange", "cpu_peak_range", "describe_cpu", "read_cpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuDescription:
    """What /proc and /sys say of the processor."""

    model_name: str = ""
    vendor: str = ""
    family: int | None = None
    model: int | None = None
    arm_part: str | None = None
    flags: frozenset[str] = frozenset()
    cores: int | None = None
    """Physical cores that this process may use."""
    low_clock_hz: float | None = None
    """Base clock, or the one /proc/cpuinfo shows, which in a virtual machine is the nominal one."""
    high_clock_hz: float | None = None
    """Single-core boost clock; None where the system does not say (virtual machines)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuPeakRange:
    """Theoretical FLOP/s of all usable cores together, from the base clock to the boost clock."""

    device_name: str
    low_flops_per_s_by_precision: Mapping[str, float]
    high_flops_per_s_by_precision: Mapping[str, float] | None
    """None where the boost clock is unknown: the true peak then lies somewhere above the low value."""
    source: str
    confidence: str = "low"
    notes: tuple[str, ...] = field(default=())


# FLOP per cycle and core as (fp64, fp32, bf16). Sources: https://stackoverflow.com/q/15655835 (Haswell to Skylake),
# https://en.wikichip.org/wiki/flops (AMD Zen, Skylake-SP, Arm), https://en.wikipedia.org/wiki/Advanced_Matrix_Extensions
# (512 bf16 multiply-adds a cycle). BF16 of Neoverse and Zen 5 are inferred from the width of the units.
_AMX = (32, 64, 1024)
_ARM_PARTS: Mapping[str, tuple[int, int, int | None]] = {
    "0xd0c": (8, 16, None),  # Neoverse N1, 2 x 128-bit NEON
    "0xd49": (8, 16, 64),  # Neoverse N2
    "0xd40": (16, 32, 128),  # Neoverse V1, 2 x 256-bit SVE
    "0xd4f": (16, 32, 128),  # Neoverse V2: Grace, Graviton4, Axion
}
_AVX2 = (16, 32, None)
_ZEN_1_MODELS = range(0x30)  # family 0x17: Zen and Zen+ have 128-bit units, Zen 2 starts at model 0x30
_ZEN_5_MOBILE = re.compile(r"Ryzen AI (?!Max)", re.IGNORECASE)
_ONE_UNIT_XEON = re.compile(r"Bronze|Silver|Gold 5", re.IGNORECASE)


def flop_per_cycle(cpu: CpuDescription) -> tuple[tuple[int, int, int | None], str] | None:
    """FLOP per cycle and core as (fp64, fp32, bf16) with the reading of the chip, or None if it is not known."""
    if cpu.arm_part is not None and cpu.arm_part in _ARM_PARTS:
        return _ARM_PARTS[cpu.arm_part], f"Arm part {cpu.arm_part}"
    if "amx_bf16" in cpu.flags:
        return _AMX, "AMX"
    if cpu.vendor == "AuthenticAMD":
        return _amd_flop_per_cycle(cpu)
    if "avx512f" in cpu.flags:
        if _ONE_UNIT_XEON.search(cpu.model_name) and "avx512_vnni" in cpu.flags and "avx512_bf16" not in cpu.flags:
            return (16, 32, None), "AVX-512, one unit by its model name"
        return (32, 64, 128 if "avx512_bf16" in cpu.flags else None), "AVX-512, two units assumed"
    return (_AVX2, "AVX2 with two FMA units assumed") if {"avx2", "fma"} <= cpu.flags else None


def _amd_flop_per_cycle(cpu: CpuDescription) -> tuple[tuple[int, int, int | None], str] | None:
    if cpu.family == 0x1A:  # Zen 5: 512-bit units in servers and desktops, 256-bit in mobile parts
        if _ZEN_5_MOBILE.search(cpu.model_name):
            return (16, 32, 64), "Zen 5 mobile, AVX-512 on 256-bit units"
        return (32, 64, 128), "Zen 5 with full-width AVX-512 assumed"
    if "avx512_bf16" in cpu.flags:  # Zen 4: 512-bit instructions on 256-bit units
        return (16, 32, 64), "Zen 4, AVX-512 on 256-bit units"
    if cpu.family == 0x17 and cpu.model in _ZEN_1_MODELS:
        return (8, 16, None), "Zen 1, 128-bit units"
    return (_AVX2, "Zen 2 or 3, 256-bit units") if {"avx2", "fma"} <= cpu.flags else None


def cpu_peak_range(cpu: CpuDescription) -> CpuPeakRange | None:
    """The range, or None where chip, cores or clock are not known.

    Example:
        >>> cpu_peak_range(read_cpu()).low_flops_per_s_by_precision["fp32"]
    """
    rates = flop_per_cycle(cpu)
    if rates is None or not cpu.cores or not cpu.low_clock_hz:
        return None
    (fp64, fp32, bf16), reading = rates
    per_cycle = {"fp64": fp64, "fp32": fp32, **({"bf16": bf16} if bf16 else {})}

    def at(clock_hz: float) -> dict[str, float]:
        return {precision: flop * cpu.cores * clock_hz for precision, flop in per_cycle.items() if cpu.cores}

    boost = f"{cpu.high_clock_hz / 1e9:.2f} GHz" if cpu.high_clock_hz else "an unknown boost clock"
    clocks = f"{cpu.low_clock_hz / 1e9:.2f} GHz to {boost}"
    return CpuPeakRange(
        device_name=cpu.model_name or "CPU",
        low_flops_per_s_by_precision=at(cpu.low_clock_hz),
        high_flops_per_s_by_precision=at(cpu.high_clock_hz) if cpu.high_clock_hz else None,
        source=f"derived: {cpu.cores} cores x {clocks} x {fp32} FLOP per cycle in fp32 ({reading})",
        notes=(
            "the clock that all cores hold under vector load is not known: peak='measure' is the better denominator",
        ),
    )


def describe_cpu(cpuinfo: str, *, allowed_cpus: set[int], high_clock_hz: float | None = None) -> CpuDescription:
    """Read the text of /proc/cpuinfo.

    Args:
        cpuinfo: The file's text.
        allowed_cpus: Logical processors that this process may run on; SMT siblings count as one core.
        high_clock_hz: Boost clock, where cpufreq reports it.
    """
    blocks = [_fields(block) for block in cpuinfo.strip().split("\n\n")]
    first = blocks[0] if blocks else {}
    own = [block for block in blocks if int(block.get("processor") or -1) in allowed_cpus]
    cores = {(block.get("physical id"), block.get("core id") or block.get("processor")) for block in own}
    return CpuDescription(
        model_name=first.get("model name", ""),
        vendor=first.get("vendor_id", ""),
        family=_whole(first.get("cpu family")),
        model=_whole(first.get("model")),
        arm_part=first.get("CPU part"),
        flags=frozenset((first.get("flags") or first.get("Features") or "").split()),
        cores=len(cores) or None,
        low_clock_hz=_low_clock_hz(first),
        high_clock_hz=high_clock_hz,
    )


def _fields(block: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in block.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None


def _low_clock_hz(fields: Mapping[str, str]) -> float | None:
    base = re.search(r"@\s*([\d.]+)\s*GHz", fields.get("model name", ""))
    if base:
        return float(base[1]) * 1e9
    shown = fields.get("cpu MHz")
    return float(shown) * 1e6 if shown else None


def read_cpu() -> CpuDescription:
    """Describe this machine's processor; an empty description where the system does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError as error:
        if must_pass(error):
            raise
        return CpuDescription()
    allowed = set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cpu = describe_cpu(text, allowed_cpus=allowed, high_clock_hz=_boost_clock_hz())
    quota = _cgroup_cores()
    if quota is None or cpu.cores is None:
        return cpu
    return dataclasses.replace(cpu, cores=max(1, min(cpu.cores, int(quota))))


def _boost_clock_hz() -> float | None:
    try:
        return float(Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").read_text(encoding="utf-8")) * 1e3
    except (OSError, ValueError) as error:
        if must_pass(error):
            raise
        return None


def _cgroup_cores() -> float | None:
    """Cores by the cgroup's quota: cpu.max of version 2, cpu.cfs_quota_us of version 1."""
    root = Path("/sys/fs/cgroup")
    try:
        quota, period = (root / "cpu.max").read_text(encoding="utf-8").split()[:2]
        return None if quota == "max" else float(quota) / float(period)
    except (OSError, ValueError) as error:
        if must_pass(error):
            raise
    try:
        quota_us = float((root / "cpu/cpu.cfs_quota_us").read_text(encoding="utf-8"))
        period_us = float((root / "cpu/cpu.cfs_period_us").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        if must_pass(error):
            raise
        return None
    return quota_us / period_us if quota_us > 0 else None

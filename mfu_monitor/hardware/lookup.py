"""From what a device says of itself to a row of the table: whole words first, then checked against the silicon.

Nothing here guesses: a name that fits no row, fits two, or contradicts compute capability, gfx name or SM count gives
no row and the reason.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mfu_monitor.hardware.names import ParsedName, parse_name
from mfu_monitor.hardware.properties import DeviceProperties
from mfu_monitor.hardware.table import PeakRow, load_table

__all__ = ["TableMatch", "find_row", "rows_by_name"]

# CDNA only: their gfx name with CU count and memory (or clock) is one product; gfx906 and gfx11xx are many.
_IDENTIFIED_BY_SILICON = frozenset({"gfx908", "gfx90a", "gfx942", "gfx950"})
_GENERIC_AMD_NAME = re.compile(
    r"^(AMD )?(RADEON |INSTINCT )?(GRAPHICS|INSTINCT|RADEON|GPU)?$|^GFX\w+$|^(DEVICE )?(0X)?[0-9A-F]{4}$"
)
_MEMORY_TOLERANCE = 0.08  # what the driver reserves, and GB against GiB
_CLOCK_TOLERANCE = 0.01
_LARGEST_SCALE_UP = 1.25  # above it the name is another product's


@dataclass(frozen=True, slots=True, kw_only=True)
class TableMatch:
    """The row a device was recognised as, or why not."""

    row: PeakRow | None = None
    sm_ratio: float = 1.0
    """SMs of this device over the row's: below 1 for a MIG slice or a partition."""
    mig_profile: str | None = None
    notes: tuple[str, ...] = ()
    reason: str = ""
    """Why ``row`` is None."""


def rows_by_name(name: str) -> tuple[PeakRow, ...]:
    """All rows that carry this device name, product name or key, by whole words; longest reading first."""
    by_key = tuple(row for row in load_table() if row.key == name.strip())
    parsed = parse_name(name)
    index = _index()
    return by_key or index.get(parsed.words, ()) or index.get(parsed.without_amd_suffixes(), ())


@functools.cache
def _index() -> dict[tuple[str, ...], tuple[PeakRow, ...]]:
    rows: dict[tuple[str, ...], dict[str, PeakRow]] = {}
    for row in load_table():
        for name in (*row.device_names, row.name):
            rows.setdefault(parse_name(name).words, {})[row.key] = row
    return {words: tuple(found.values()) for words, found in rows.items()}


def find_row(device: DeviceProperties) -> TableMatch:
    """Recognise a device.

    Example:
        >>> find_row(DeviceProperties(name="NVIDIA H100 80GB HBM2e", sm_count=114)).row.key
        'h100-pcie'
    """
    parsed = parse_name(device.name)
    if parsed.is_vgpu:
        return TableMatch(
            reason="it is a vGPU profile, which shares a card with others in time slices and has no peak of its own"
        )
    candidates = rows_by_name(device.name) or _rows_by_silicon(device)
    if not candidates:
        return TableMatch(reason=_why_unknown(parsed))
    agreeing = [row for row in candidates if _agrees_with_silicon(row, device)]
    if not agreeing:
        return TableMatch(reason=_contradiction(candidates[0], device))
    chosen = _choose(agreeing, device)
    if len(chosen) > 1:
        return TableMatch(reason=_ambiguity(chosen))
    return _checked_sm_count(chosen[0], device, parsed)


def _why_unknown(parsed: ParsedName) -> str:
    if parsed.is_mobile:
        return "laptop and Max-Q parts share a desktop card's number with a smaller chip, at a clock the vendor sets"
    return "its name is in no row of the table"


def _rows_by_silicon(device: DeviceProperties) -> tuple[PeakRow, ...]:
    """AMD without amdgpu.ids: the driver reports a generic name, the gfx name and the CU count still tell."""
    is_generic = _GENERIC_AMD_NAME.match(" ".join(device.name.upper().split())) is not None
    if not is_generic or device.gcn_arch not in _IDENTIFIED_BY_SILICON:
        return ()
    same = [row for row in load_table() if row.gfx == device.gcn_arch and row.sm_count == device.sm_count]
    by_memory = [row for row in same if _close(row.memory_gb, _gigabytes(device), _MEMORY_TOLERANCE)]
    return tuple(_one_of_equals(by_memory))


def _one_of_equals(rows: Sequence[PeakRow]) -> Sequence[PeakRow]:
    """Rows with the same figures (MI210 and one GCD of an MI250) need not be told apart."""
    figures = {(tuple(row.tflops.items()), row.memory_bandwidth_tb_s) for row in rows}
    return rows[:1] if len(figures) == 1 else rows


def _agrees_with_silicon(row: PeakRow, device: DeviceProperties) -> bool:
    capability, arch = device.compute_capability, device.gcn_arch
    if capability is not None and (row.vendor != "NVIDIA" or row.compute_capability not in (None, capability)):
        return False
    return arch is None or (row.vendor == "AMD" and row.gfx in (None, arch))


def _contradiction(row: PeakRow, device: DeviceProperties) -> str:
    seen = device.gcn_arch or "compute capability {}.{}".format(*(device.compute_capability or ("?", "?")))
    expected = row.gfx or "compute capability {}.{}".format(*(row.compute_capability or ("?", "?")))
    return f"its name is that of {row.name} ({expected}), but the device reports {seen}"


def _choose(rows: list[PeakRow], device: DeviceProperties) -> list[PeakRow]:
    """Narrow rows of one name by SM count, memory, clock, in that order; a variant only if something points at it."""
    tests: tuple[Callable[[PeakRow], bool], ...] = (
        lambda row: row.sm_count == device.sm_count,
        lambda row: _close(row.memory_gb, _gigabytes(device), _MEMORY_TOLERANCE),
        lambda row: _close(row.boost_clock_mhz, _megahertz(device), _CLOCK_TOLERANCE),
        lambda row: row.variant_of is None,
    )
    for fits in tests:
        rows = [row for row in rows if fits(row)] or rows
    return rows


def _ambiguity(rows: list[PeakRow]) -> str:
    kinds = "; ".join(
        f"{row.name} ({row.sm_count} {'CUs' if row.vendor == 'AMD' else 'SMs'}, {row.memory_gb or '?'} GB)"
        for row in rows
    )
    return f"its name is shared by different parts, and nothing else tells them apart here: {kinds}"


def _checked_sm_count(row: PeakRow, device: DeviceProperties, parsed: ParsedName) -> TableMatch:
    """Accept the row, scaled if this device has another number of SMs than the row."""
    if not row.flops_per_s_by_precision():
        return TableMatch(reason=f"no trustworthy peak of {row.name} is published ({row.notes})")
    if parsed.mig_profile is not None and not device.sm_count:
        return TableMatch(reason="it is a MIG slice and its SM count is not known")
    if not device.sm_count or row.sm_count is None or device.sm_count == row.sm_count:
        return TableMatch(row=row, mig_profile=parsed.mig_profile)
    ratio = device.sm_count / row.sm_count
    counts = f"{device.sm_count} SMs where {row.name} has {row.sm_count}"
    if row.export_capped or ratio > _LARGEST_SCALE_UP:
        return TableMatch(reason=f"it reports {counts}, and that part's rates cannot be scaled to another chip")
    cause = "a MIG slice" if parsed.mig_profile is not None else "another SKU, a partition or a custom part"
    note = f"scaled by SM count: {counts} ({cause})"
    return TableMatch(row=row, sm_ratio=ratio, mig_profile=parsed.mig_profile, notes=(note,))


def _gigabytes(device: DeviceProperties) -> float | None:
    """Nearest reading of the memory size: sheets count GB and GiB as they like, so compare in GiB and GB both."""
    return None if device.memory_bytes is None else device.memory_bytes / 2**30


def _megahertz(device: DeviceProperties) -> float | None:
    return None if device.clock_khz is None else device.clock_khz / 1000


def _close(expected: float | None, seen: float | None, tolerance: float) -> bool:
    return expected is not None and seen is not None and abs(seen - expected) <= tolerance * expected

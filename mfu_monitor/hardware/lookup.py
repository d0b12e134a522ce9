"""From what a device says of itself to a row of the table: whole words first, then checked against the silicon.

Device names are compared as words: whole tokens without vendor prefixes, with the suffixes that change what the device
is. Drivers order the words as they like (``A100-PCIE-40GB`` but ``A100 80GB PCIe``), older ones drop ``NVIDIA`` or say
``Tesla``. A name matches only if all its words do: ``A10`` is in ``A100`` and ``RTX 4090`` in ``RTX 4090 D``, and
neither is the other.

Nothing here guesses: a name that fits no row, fits two, or contradicts compute capability, gfx name or SM count gives
no row and the reason.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mfu_monitor.hardware.properties import DeviceProperties
from mfu_monitor.hardware.table import PeakRow, load_table

__all__ = ["ParsedName", "TableMatch", "find_row", "labels_of", "parse_name", "rows_by_name", "rows_by_product"]

# CDNA only: their gfx name with CU count and memory (or clock) is one product; gfx906 and gfx11xx are many.
_IDENTIFIED_BY_SILICON = frozenset({"gfx908", "gfx90a", "gfx942", "gfx950"})
_GENERIC_AMD_NAME = re.compile(
    r"^(AMD )?(RADEON |INSTINCT )?(GRAPHICS|INSTINCT|RADEON|GPU)?$|^GFX\w+$|^(DEVICE )?(0X)?[0-9A-F]{4}$"
)
# SMs of a slice by its compute slices, https://docs.nvidia.com/datacenter/tesla/mig-user-guide/, "Supported Profiles"
# (nvidia-smi mig -lgip); by compute capability and SMs of the whole part.
_MIG_SMS = {
    ((8, 0), 108): {1: 14, 2: 28, 3: 42, 4: 56, 7: 98},
    ((8, 0), 56): {1: 14, 2: 28, 4: 56},
    ((9, 0), 132): {1: 16, 2: 32, 3: 60, 4: 64, 7: 132},
}
_MIG_WIDE = {((9, 0), 132): 26}
"""A slice of one with two shares of the memory (1g.20gb) has more SMs there."""
# Of a product's key: form, memory, and families of which the number is in no other.
_LEFT_UNSAID = re.compile(
    r"SXM\d?|PCIE|OAM|NVL\d*|HBM\w*|\d+GB|GCD|NVIDIA|GEFORCE|RTX|GTX|TESLA|RX|ARC|TPU|APPLE|CHIP|CORE|BW|WS|MAXQ|SERVER"
)
_VENDORS = frozenset({"NVIDIA", "AMD", "INTEL", "GOOGLE", "AWS", "TESLA"})
_UNUSUAL = re.compile(r"custom|China", re.IGNORECASE)  # parts that a bare product name does not mean
_MEMORY_TOLERANCE = 0.08  # what the driver reserves, and GB against GiB
_CLOCK_TOLERANCE = 0.01
_PARTS_SHOWN = 6
_LARGEST_SCALE_UP = 1.25  # above it the name is another product's
# Words that vendors and drivers add or drop without naming another product.
_SILENT_WORDS = frozenset({"NVIDIA", "TESLA", "AMD", "INTEL", "INSTINCT", "GRAPHICS", "GPU"})
# AMD: module form factor and SR-IOV virtual function of a whole card; the CU count is checked in any case.
_AMD_SUFFIXES = frozenset({"OAM", "VF", "HF"})
_MIG = re.compile(r"\bMIG\b\s*(?P<profile>\d+C\.\d+G\.\d+GB|\d+G\.\d+GB)?.*$")
# Time-sliced profiles: https://docs.nvidia.com/vgpu/, "Virtual GPU Types" (A10-24Q, A100-40C, A16-8A, M60-2B).
_VGPU = re.compile(r"^(NVIDIA\s+)?GRID\b|-\d+[ABCQ]\b")
# The export variants' D (and its V2) is written apart or on the number: RTX 4090 D, RTX 5090D V2.
_GLUED_D = re.compile(r"\b(\d{4})D(V\d)?\b")
_MOBILE = re.compile(r"\bLAPTOP GPU\b|\bMAX-Q\b|\bMOBILE\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedName:
    """A device name taken apart."""

    words: tuple[str, ...]
    """Sorted, upper-case, without vendor words; what names are compared by."""
    mig_profile: str | None = None
    """``"1G.10GB"`` of a MIG slice; empty if the name says MIG and no more."""
    is_vgpu: bool = False
    is_mobile: bool = False
    """A laptop or Max-Q part, whose clock is the vendor's power setting."""

    def without_amd_suffixes(self) -> tuple[str, ...]:
        """The words less OAM, VF and HF."""
        return tuple(word for word in self.words if word not in _AMD_SUFFIXES)


def parse_name(name: str) -> ParsedName:
    """Take a device name apart.

    Example:
        >>> parse_name("NVIDIA A100-SXM4-80GB MIG 1g.10gb")
        ParsedName(words=('80GB', 'A100', 'SXM4'), mig_profile='1G.10GB', is_vgpu=False, is_mobile=False)
    """
    upper = " ".join(name.upper().split())
    mig = _MIG.search(upper)
    base = upper[: mig.start()] if mig else upper
    return ParsedName(
        words=_words(base),
        mig_profile=(mig["profile"] or "") if mig else None,
        is_vgpu=_VGPU.search(base) is not None,
        is_mobile=_MOBILE.search(base) is not None,
    )


def _words(upper: str) -> tuple[str, ...]:
    plain = _GLUED_D.sub(r"\1 D \2", re.sub(r"\((R|TM|C)\)", " ", upper))
    return tuple(sorted(word for word in re.split(r"[\s\-_/,()]+", plain) if word and word not in _SILENT_WORDS))


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
    candidates: tuple[PeakRow, ...] = ()
    """The parts that the name may mean, where it is the name of several."""
    is_by_product: bool = False
    """True where a person wrote words of a product's name, not the driver's name."""


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


def rows_by_product(name: str) -> list[PeakRow]:
    """The products that the words of ``name`` fit; none, one, or several that differ.

    Example:
        >>> [row.key for row in rows_by_product("H100 SXM")]
        ['h100-sxm5']
    """
    words = [word for word in _product_words(name) if word not in _VENDORS]
    has_model = any(char.isdigit() for word in words for char in word)
    rows = [row for row in load_table() if has_model and _fits(words, row)]
    meant = [row for row in rows if set(_product_words(row.key)) == set(words)]  # "RTX 4090" is not "RTX 4090 D"
    usual = [row for row in rows if not _UNUSUAL.search(row.name)]
    return meant or usual or rows


def _fits(words: list[str], row: PeakRow) -> bool:
    """Every word is the row's, and what was left unsaid names no other product: ``GTX 1080`` is not the 1080 Ti."""
    known = {*_product_words(row.name), *_product_words(row.key)}
    unsaid = {other for other in _product_words(row.key) if not any(_is_word(word, other) for word in words)}
    is_named = all(any(_is_word(word, other) for other in known) for word in words)
    return is_named and all(_LEFT_UNSAID.fullmatch(word) for word in unsaid)


def _is_word(written: str, known: str) -> bool:
    """Equal, or letters whose generation number is left out: SXM for SXM5, but never H1 for H100."""
    return written == known or (written.isalpha() and known.startswith(written) and known[len(written) :].isdigit())


def _has_vendor(name: str) -> bool:
    return not _VENDORS.isdisjoint(_product_words(name))


def _product_words(name: str) -> list[str]:
    return [word for word in re.split(r"[^A-Z0-9]+", name.upper()) if word]


def find_row(device: DeviceProperties) -> TableMatch:
    """Recognise a device by the driver's name, a key, or, where no driver named it, words of a product's name.

    Example:
        >>> find_row(DeviceProperties(name="NVIDIA H100 80GB HBM2e", sm_count=114)).row.key
        'h100-pcie'
        >>> find_row(DeviceProperties(name="H100 SXM")).row.key
        'h100-sxm5'
    """
    parsed = parse_name(device.name)
    if parsed.is_vgpu:
        return TableMatch(
            reason="it is a vGPU profile, which shares a card with others in time slices and has no peak of its own"
        )
    named = rows_by_name(device.name) or _rows_by_silicon(device)
    is_drivers = device.device_type or device.gcn_arch or device.compute_capability or len(named) == 1
    products = () if is_drivers or (named and _has_vendor(device.name)) else tuple(rows_by_product(device.name))
    candidates, is_by_product = products or named, bool(products)
    if not candidates:
        return TableMatch(reason=_why_unknown(parsed))
    agreeing = [row for row in candidates if _agrees_with_silicon(row, device)]
    if not agreeing:
        return TableMatch(reason=_contradiction(candidates[0], device))
    chosen = _choose(agreeing, device, is_by_product=is_by_product)
    if len(chosen) > 1:
        return TableMatch(
            reason=_ambiguity(chosen, is_by_product), candidates=tuple(chosen), is_by_product=is_by_product
        )
    return dataclasses.replace(_checked_sm_count(chosen[0], device, parsed), is_by_product=is_by_product)


def _why_unknown(parsed: ParsedName) -> str:
    if parsed.is_mobile:
        return "laptop and Max-Q parts share a desktop card's number with a smaller chip, at a clock the vendor sets"
    return "its name is in no row of the table"


def _rows_by_silicon(device: DeviceProperties) -> tuple[PeakRow, ...]:
    """AMD without amdgpu.ids: the driver reports a generic name, the gfx name and the CU count still identify it."""
    is_generic = _GENERIC_AMD_NAME.match(" ".join(device.name.upper().split())) is not None
    if not is_generic or device.gcn_arch not in _IDENTIFIED_BY_SILICON:
        return ()
    same = [row for row in load_table() if row.gfx == device.gcn_arch and row.sm_count == device.sm_count]
    by_memory = [row for row in same if _close(row.memory_gb, _gigabytes(device), _MEMORY_TOLERANCE)]
    return tuple(_one_of_equals(by_memory))


def _one_of_equals(rows: Sequence[PeakRow]) -> Sequence[PeakRow]:
    """Rows with the same values (MI210 and one GCD of an MI250) need not be distinguished."""
    kinds = {(tuple(row.tflops.items()), row.memory_bandwidth_tb_s) for row in rows}
    return rows[:1] if len(kinds) == 1 else rows


def _agrees_with_silicon(row: PeakRow, device: DeviceProperties) -> bool:
    capability, arch = device.compute_capability, device.gcn_arch
    if capability is not None and (row.vendor != "NVIDIA" or row.compute_capability not in (None, capability)):
        return False
    return arch is None or (row.vendor == "AMD" and row.gfx in (None, arch))


def _contradiction(row: PeakRow, device: DeviceProperties) -> str:
    seen = device.gcn_arch or "compute capability {}.{}".format(*(device.compute_capability or ("?", "?")))
    expected = row.gfx or "compute capability {}.{}".format(*(row.compute_capability or ("?", "?")))
    return f"its name is that of {row.name} ({expected}), but the device reports {seen}"


def _choose(rows: list[PeakRow], device: DeviceProperties, *, is_by_product: bool) -> list[PeakRow]:
    """Narrow rows of one name by SM count, memory, clock, in that order; a variant only if something points at it.

    A product's words may mean a variant as well as the part that a driver's name stands for.
    """
    tests: tuple[Callable[[PeakRow], bool], ...] = (
        lambda row: row.sm_count == device.sm_count,
        lambda row: _close(row.memory_gb, _gigabytes(device), _MEMORY_TOLERANCE),
        lambda row: _close(row.boost_clock_mhz, _megahertz(device), _CLOCK_TOLERANCE),
        lambda row: is_by_product or row.variant_of is None,
    )
    for fits in tests:
        rows = [row for row in rows if fits(row)] or rows
    return rows


def _ambiguity(rows: Sequence[PeakRow], is_by_product: bool) -> str:
    if is_by_product:
        return f"the products of that name differ, choose one of: {labels_of(rows)}"
    kinds = "; ".join(
        f"{row.name} ({row.sm_count} {'CUs' if row.vendor == 'AMD' else 'SMs'}, {row.memory_gb or '?'} GB)"
        for row in rows
    )
    return f"its name is shared by different parts, and nothing else distinguishes them here: {kinds}"


def labels_of(rows: Sequence[PeakRow]) -> str:
    """The products' names, the first few of many."""
    more = f" and {len(rows) - _PARTS_SHOWN} more" if len(rows) > _PARTS_SHOWN else ""
    return ", ".join(row.label for row in rows[:_PARTS_SHOWN]) + more


def _checked_sm_count(row: PeakRow, device: DeviceProperties, parsed: ParsedName) -> TableMatch:
    """Accept the row, scaled if this device has another number of SMs than the row."""
    if not row.flops_per_s_by_precision():
        return TableMatch(reason=f"no trustworthy peak of {row.name} is published ({row.notes})")
    sm_count = device.sm_count or _mig_sm_count(row, parsed.mig_profile)
    if parsed.mig_profile is not None and not sm_count:
        return TableMatch(reason="it is a MIG slice and its SM count is not known")
    if not sm_count or row.sm_count is None or sm_count == row.sm_count:
        return TableMatch(row=row, mig_profile=parsed.mig_profile)
    ratio = sm_count / row.sm_count
    counts = f"{sm_count} SMs where {row.name} has {row.sm_count}"
    if row.export_capped or ratio > _LARGEST_SCALE_UP:
        return TableMatch(reason=f"it reports {counts}, and that part's rates cannot be scaled to another chip")
    cause = "a MIG slice" if parsed.mig_profile is not None else "another SKU, a partition or a custom part"
    note = f"scaled by SM count: {counts} ({cause})"
    return TableMatch(row=row, sm_ratio=ratio, mig_profile=parsed.mig_profile, notes=(note,))


def _mig_sm_count(row: PeakRow, profile: str | None) -> int | None:
    """SMs of a slice by its profile, where the driver did not say; None where the profile is not a documented one."""
    found = re.fullmatch(r"(\d)G\.(\d+)GB", profile or "")
    part = (row.compute_capability or (0, 0), row.sm_count or 0)
    if found is None or part not in _MIG_SMS:
        return None
    slices, memory_gb = int(found[1]), int(found[2])
    is_wide = slices == 1 and row.memory_gb is not None and memory_gb > 1.5 * row.memory_gb / 8
    return _MIG_WIDE.get(part) if is_wide else _MIG_SMS[part].get(slices)


def _gigabytes(device: DeviceProperties) -> float | None:
    """Nearest reading of the memory size: datasheets count GB and GiB as they like, so compare in GiB and GB both."""
    return None if device.memory_bytes is None else device.memory_bytes / 2**30


def _megahertz(device: DeviceProperties) -> float | None:
    return None if device.clock_khz is None else device.clock_khz / 1000


def _close(expected: float | None, seen: float | None, tolerance: float) -> bool:
    return expected is not None and seen is not None and abs(seen - expected) <= tolerance * expected

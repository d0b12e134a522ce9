"""The packaged table of peaks, one row per product: dense TFLOP/s by precision, bandwidth, clocks, and the source.

``fp64``/``fp32`` are kept with and without matrix unit; GeForce rates are those with FP32 accumulation. A blank cell is
"no such unit" or "no value found", never zero.
"""

from __future__ import annotations

import csv
import difflib
import functools
import importlib.resources
import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["PeakRow", "load_table", "nearest_names", "neighbours", "row_by_key", "rows_with_rate"]

# https://docs.nvidia.com/cuda/cuda-c-programming-guide/, "Compute Capabilities": the first one with such units.
_FIRST_COMPUTE_CAPABILITY = {
    "fp16": (7, 0),
    "bf16": (8, 0),
    "tf32": (8, 0),
    "fp8": (8, 9),
    "fp4": (10, 0),
    "int8": (6, 1),
}
_BOOSTING = re.compile(r"\b(GeForce|TITAN|RTX|Radeon RX|Arc)\b")
_BOOST_MARGIN = 1.25
"""Highest clock over the datasheet's boost clock of cards that boost as far as power and cooling let them: an RTX 5090
was measured at 240 of 209.5 TFLOP/s, an RTX 4090 runs up to 3105 of 2520 MHz (NVML's maximum)."""
_LEAST_LIKENESS = 0.5  # below it a name does not help
_SPARSE_PRECISIONS = ("tf32", "fp16", "bf16", "fp8", "fp4", "int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakRow:
    """One product. Rates are dense, of the whole product as its datasheet gives them; ``torch_devices`` share it."""

    key: str
    vendor: str
    architecture: str
    name: str
    device_names: tuple[str, ...]
    """Device names that drivers report for it."""
    variant_of: str | None
    """Key of the row that has the same device name and is meant when nothing but the name is known."""
    compute_capability: tuple[int, int] | None
    gfx: str | None
    sm_count: int | None
    boost_clock_mhz: float | None
    tensor_clock_mhz: float | None
    """The clock that reproduces the datasheet's tensor values, where it is below the maximum."""
    fma16_per_clk_sm: int | None
    """16-bit FMAs with FP32 accumulation, per clock and SM."""
    tflops: Mapping[str, float]
    """By column without its unit: ``fp64 fp64_matrix fp32 fp32_matrix tf32 fp16 fp16_vector ...``"""
    sparsity_factor: float
    sparsity_exceptions: Mapping[str, float]
    memory_gb: float | None
    memory_bandwidth_tb_s: float | None
    nvlink_gb_s: float | None
    tdp_w: float | None
    torch_devices: int
    """How many torch devices share the values of this row: 2 for a TPU v3 chip, whose device is one core."""
    torch_device_unit: str
    export_capped: bool
    """Rates are capped by firmware below what SM count and clock give; no derivation, no scaling."""
    source: str
    verified_by: str
    confidence: str
    notes: str

    @property
    def max_clock_ratio(self) -> float | None:
        """Maximum clock over the clock of the datasheet's tensor values; None where the datasheet uses the maximum."""
        if self.tensor_clock_mhz is None or self.boost_clock_mhz is None:
            return None
        return self.boost_clock_mhz / self.tensor_clock_mhz

    @property
    def boost_margin(self) -> float | None:
        """How far above the datasheet's values a consumer or workstation card can boost; None for other parts."""
        return _BOOST_MARGIN if _BOOSTING.search(self.name) and not self.export_capped else None

    @property
    def label(self) -> str:
        """What the row's values belong to: the product, or one of the torch devices that share it."""
        if self.torch_devices == 1:
            return self.name
        return f"{self.name.removesuffix(' (chip)')}, one torch device (1/{self.torch_devices} chip)"

    @property
    def bytes_per_s(self) -> float | None:
        """Memory bandwidth of one torch device."""
        rate = self.memory_bandwidth_tb_s
        return None if rate is None else rate * 1e12 / self.torch_devices

    def flops_per_s_by_precision(self) -> dict[str, float]:
        """Dense FLOP/s of one torch device, the matrix unit's where there is one."""
        choice = {
            "fp64": ("fp64_matrix", "fp64"),
            "fp32": ("fp32_matrix", "fp32"),
            "tf32": ("tf32",),
            # Without a tensor unit FP16 products run on the vector units, or, where those are a fraction of FP32
            # (compute capability 6.1), through FP32.
            "fp16": ("fp16", "fp32") if self.compute_capability == (6, 1) else ("fp16", "fp16_vector"),
            "bf16": ("bf16",),
            "fp8": ("fp8",),
            "fp4": ("fp4",),
            "int8": ("int8",),
        }
        found = {
            name: next((self.tflops[c] for c in columns if c in self.tflops), None) for name, columns in choice.items()
        }
        return {name: rate * 1e12 / self.torch_devices for name, rate in found.items() if rate is not None}

    def sparse_flops_per_s_by_precision(self) -> dict[str, float]:
        """The 2:4 structured-sparsity values that datasheets like to print; never a training denominator."""
        dense = self.flops_per_s_by_precision()
        factors = {p: self.sparsity_exceptions.get(p, self.sparsity_factor) for p in _SPARSE_PRECISIONS if p in dense}
        return {precision: dense[precision] * factor for precision, factor in factors.items() if factor > 1}

    def missing_reason(self, precision: str) -> str:
        """Why there is no value for ``precision``."""
        first = _FIRST_COMPUTE_CAPABILITY.get(precision)
        if self.compute_capability is not None and first is not None and self.compute_capability < first:
            has, needs = (f"{major}.{minor}" for major, minor in (self.compute_capability, first))
            emulated = ": torch emulates it" if precision == "bf16" else ""
            return (
                f"{self.name} has no {precision} unit (compute capability {has}; {precision} needs {needs}){emulated}"
            )
        return f"no dense {precision} value is published for {self.name}, or the part has no such unit"


def _number(text: str) -> float | None:
    return float(text) if text else None


def _whole(text: str) -> int | None:
    return int(text) if text else None


def _pair(text: str) -> tuple[int, int] | None:
    major, _, minor = text.partition(".")
    return (int(major), int(minor)) if text else None


def _factors(text: str) -> dict[str, float]:
    return {name: float(factor) for name, _, factor in (item.partition("=") for item in text.split(";") if item)}


def _rates(cells: Mapping[str, str]) -> dict[str, float]:
    names = {column: column.removesuffix("_tflops").removesuffix("_tops") for column in cells}
    return {name: float(cells[c]) for c, name in names.items() if c.endswith(("_tflops", "_tops")) and cells[c]}


def _row(cells: Mapping[str, str]) -> PeakRow:
    return PeakRow(
        key=cells["key"],
        vendor=cells["vendor"],
        architecture=cells["architecture"],
        name=cells["name"],
        device_names=tuple(cells["device_names"].split("|")),
        variant_of=cells["variant_of"] or None,
        compute_capability=_pair(cells["compute_capability"]),
        gfx=cells["gfx"] or None,
        sm_count=_whole(cells["sm_count"]),
        boost_clock_mhz=_number(cells["boost_clock_mhz"]),
        tensor_clock_mhz=_number(cells["tensor_clock_mhz"]),
        fma16_per_clk_sm=_whole(cells["fma16_per_clk_sm"]),
        tflops=_rates(cells),
        sparsity_factor=float(cells["sparsity_factor"]),
        sparsity_exceptions=_factors(cells["sparsity_exceptions"]),
        memory_gb=_number(cells["memory_gb"]),
        memory_bandwidth_tb_s=_number(cells["memory_bandwidth_tb_s"]),
        nvlink_gb_s=_number(cells["nvlink_gb_s"]),
        tdp_w=_number(cells["tdp_w"]),
        torch_devices=int(cells["torch_devices"]),
        torch_device_unit=cells["torch_device_unit"],
        export_capped=cells["export_capped"] == "yes",
        source=cells["source"],
        verified_by=cells["verified_by"],
        confidence=cells["confidence"],
        notes=cells["notes"],
    )


@functools.cache
def load_table() -> tuple[PeakRow, ...]:
    """Every row of the packaged table, in its order."""
    text = importlib.resources.files(__package__).joinpath("peaks.csv").read_text(encoding="utf-8")
    return tuple(_row(cells) for cells in csv.DictReader(text.splitlines()))


def row_by_key(key: str) -> PeakRow | None:
    """The row with this key (``"h100-sxm5"``), or None."""
    return next((row for row in load_table() if row.key == key), None)


def neighbours(key: str) -> tuple[PeakRow, ...]:
    """Rows that a careless lookup confuses with ``key``: same vendor, one model number a substring of the other.

    Example:
        >>> [row.key for row in neighbours("l40s")]
        ['l4', 'l40', ...]
    """
    row = row_by_key(key)
    if row is None:
        return ()
    return tuple(other for other in load_table() if other.key != key and _look_alike(row, other))


def rows_with_rate(
    flops_per_s: float, precision: str, *, is_sparse: bool = False, tolerance: float = 0.01
) -> tuple[PeakRow, ...]:
    """Rows whose dense (or 2:4 sparse) value at ``precision`` is ``flops_per_s`` within a relative tolerance.

    Finds whose value a wrong peak is: 1979e12 at bf16 is the sparse value of an H100 SXM.
    """
    found = []
    for row in load_table():
        rates = row.sparse_flops_per_s_by_precision() if is_sparse else row.flops_per_s_by_precision()
        rate = rates.get(precision)
        if rate is not None and abs(rate - flops_per_s) <= tolerance * rate:
            found.append(row)
    return tuple(found)


def _look_alike(row: PeakRow, other: PeakRow) -> bool:
    if row.vendor != other.vendor:
        return False
    mine, theirs = _model_word(row.key), _model_word(other.key)
    return mine in theirs or theirs in mine


def _model_word(key: str) -> str:
    """The word of a key that carries the model number: ``rtx-4090-d`` -> ``4090``."""
    words = [word for word in key.split("-") if any(c.isdigit() for c in word)]
    return words[0] if words else key


def nearest_names(name: str, count: int = 5) -> list[str]:
    """Names in the table most like ``name``, for error messages: first those that share its model number."""
    asked = _bare(name)
    likeness = {known: _likeness(asked, _bare(known)) for row in load_table() for known in row.device_names[:1]}
    close = [known for known, score in likeness.items() if score >= _LEAST_LIKENESS]
    return sorted(close, key=lambda known: -likeness[known])[:count]


def _likeness(one: str, other: str) -> float:
    """Shared words with a digit in them, then likeness of the letters (0..1)."""
    shared = {word for word in set(one.split()) & set(other.split()) if any(c.isdigit() for c in word)}
    return len(shared) + difflib.SequenceMatcher(None, one, other).ratio()


def _bare(name: str) -> str:
    """In lower case without the vendor, which is the same for half the table."""
    words = name.lower().replace("-", " ").split()
    return " ".join(word for word in words if word not in ("nvidia", "amd", "tesla", "instinct"))

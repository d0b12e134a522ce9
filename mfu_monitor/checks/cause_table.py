"""What the packaged table of peaks says of a device, in the few figures that the causes need."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from mfu_monitor.hardware.lookup import find_row
from mfu_monitor.hardware.properties import DeviceProperties
from mfu_monitor.hardware.table import PeakRow, load_table, neighbours

__all__ = ["TableRow", "devices_with_peak", "table_row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One product of the table and its look-alikes; FLOP/s of the whole device by precision."""

    key: str
    name: str
    dense: Mapping[str, float] = field(default_factory=dict)
    sparse: Mapping[str, float] = field(default_factory=dict)
    sm_count: int | None = None
    max_clock_ratio: float | None = None
    sheet_clock_mhz: float | None = None
    """The clock behind the sheet's figures of the matrix unit."""
    neighbours: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Dense FLOP/s by precision of the devices that a careless lookup confuses with this one, by their names."""


@functools.lru_cache(maxsize=256)
def table_row(device_name: str) -> TableRow | None:
    """The row of a device by the name its driver reports; a slice (MIG) has its parent's row. None if it is not known.

    Never warns: whoever made the reading has said already that the peak is unknown.
    """
    parent = device_name.split(" MIG")[0].strip()
    row = find_row(DeviceProperties(name=parent)).row if parent else None
    return None if row is None else _table_row(row)


def _table_row(row: PeakRow) -> TableRow:
    return TableRow(
        key=row.key,
        name=row.name,
        dense=row.flops_per_s_by_precision(),
        sparse=row.sparse_flops_per_s_by_precision(),
        sm_count=row.sm_count,
        max_clock_ratio=row.max_clock_ratio,
        sheet_clock_mhz=row.tensor_clock_mhz or row.boost_clock_mhz,
        neighbours={other.name: other.flops_per_s_by_precision() for other in neighbours(row.key)},
    )


def devices_with_peak(precision: str, flops_per_s: float, *, rel_tol: float) -> tuple[str, ...]:
    """Names of the products whose dense peak at this precision is the given one: whose figure may have been copied."""
    rates = ((row.name, row.flops_per_s_by_precision().get(precision)) for row in load_table())
    return tuple(name for name, rate in rates if rate and math.isclose(rate, flops_per_s, rel_tol=rel_tol))

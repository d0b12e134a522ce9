"""Devices as people write them on a command line: ``"H100 SXM"``, ``"A100"``, or the driver's own name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from mfu_monitor.errors import ConfigurationError
from mfu_monitor.hardware.detect import device_peak
from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.hardware.lookup import rows_by_product
from mfu_monitor.hardware.precision import PRECISIONS
from mfu_monitor.hardware.table import PeakRow, nearest_names

__all__ = ["find_device", "override_peak"]

_PRODUCTS_SHOWN = 6
# Above these a figure was given in FLOP/s or bytes/s: no device of the table has a thousandth of them.
_MOST_TFLOPS = 1e8
_MOST_TB_S = 1e6


def find_device(
    name: str,
    *,
    precision: str | None = None,
    needs_bandwidth: bool = False,
    option: str = "--device",
    instead: str | None = None,
) -> DevicePeak:
    """The peak of a device by the driver's name, a key of the table, or the words of a product name.

    A name that fits several products (``"A100"``: 40 GB and 80 GB, SXM and PCIe) is good enough where they agree on
    what is asked for, and refused where they do not: never one of them by chance.

    Args:
        name: what the user wrote.
        precision: the peak that is needed, such as ``"bf16"``.
        needs_bandwidth: the memory bandwidth is needed too.
        option: named in the message.
        instead: what the command takes in place of a device of the table, for the message.

    Raises:
        ConfigurationError: no product of that name, several that differ, or no such peak; with names to choose from.

    Example:
        >>> find_device("H100 SXM", precision="bf16").flops_per_s("bf16")
        989400000000000.0
    """
    exact = device_peak(name, warn=False)
    peak = exact or _merged(name, _rows_named(name, option, instead))
    if precision is not None and peak.flops_per_s(precision) is None:
        raise ConfigurationError(f"{option} {name!r}: {_missing(peak, precision)}")
    if needs_bandwidth and peak.bytes_per_s is None:
        raise ConfigurationError(f"{option} {name!r}: {_missing(peak, None)}")
    return peak


def override_peak(
    peak: DevicePeak | None, *, precision: str, peak_tflops: float | None, bandwidth_tb_s: float | None
) -> DevicePeak:
    """The device with the user's own figures (TFLOP/s at ``precision``, TB/s) in place of the table's."""
    for option, value, limit, example in (
        ("--peak-tflops", peak_tflops, _MOST_TFLOPS, "989"),
        ("--bandwidth-tb-s", bandwidth_tb_s, _MOST_TB_S, "3.35"),
    ):
        if value is not None and value > limit:
            raise ConfigurationError(f"{option} is {value:.3g}; expected units of 10^12 a second, such as {example}")
    base = peak or DevicePeak(device_name="the given peak", source="user")
    if peak_tflops is not None:
        rates = {**base.flops_per_s_by_precision, precision: peak_tflops * 1e12}
        base = dataclasses.replace(base, flops_per_s_by_precision=rates, source="user")
    if bandwidth_tb_s is not None:
        base = dataclasses.replace(base, bytes_per_s=bandwidth_tb_s * 1e12)
    return base


def _rows_named(name: str, option: str, instead: str | None) -> list[PeakRow]:
    rows = rows_by_product(name)
    if not rows:
        near = nearest_names(name)
        hint = f"; nearest names: {', '.join(near)}" if near else ""
        way_out = f"; for another device give {instead}" if instead else ""
        raise ConfigurationError(
            f"{option} {name!r} is no device in the table{hint}. `mfu-monitor peaks` lists all of them{way_out}"
        )
    return rows


def _merged(name: str, rows: list[PeakRow]) -> DevicePeak:
    """What all products of that name agree on."""
    first, rates = rows[0], [row.flops_per_s_by_precision() for row in rows]
    agreed = {p: rate for p, rate in rates[0].items() if all(other.get(p) == rate for other in rates)}
    bandwidths = {row.bytes_per_s for row in rows}
    products = _products(rows)
    choose = f"the products of that name differ, choose one of: {products}"
    differing = {precision for other in rates for precision in other} - set(agreed)
    one = len(rows) == 1
    return DevicePeak(
        device_name=first.label if one else name,
        flops_per_s_by_precision=agreed,
        bytes_per_s=bandwidths.pop() if len(bandwidths) == 1 else None,
        source=f"table: {first.source}",
        confidence=first.confidence if one else "",
        max_clock_ratio=first.max_clock_ratio if one else None,
        notes=() if one else (f"what these have in common: {products}",),
        key=first.key if one else "",
        sparse_flops_per_s_by_precision=first.sparse_flops_per_s_by_precision() if one else {},
        missing_reason_by_precision={
            **{precision: first.missing_reason(precision) for precision in PRECISIONS if precision not in agreed},
            **dict.fromkeys(differing, choose),
        },
    )


def _products(rows: Iterable[PeakRow]) -> str:
    names = [row.label for row in rows]
    more = f" and {len(names) - _PRODUCTS_SHOWN} more" if len(names) > _PRODUCTS_SHOWN else ""
    return ", ".join(names[:_PRODUCTS_SHOWN]) + more


def _missing(peak: DevicePeak, precision: str | None) -> str:
    if precision is not None:
        return peak.missing_reason(precision) or f"no {precision} peak is known"
    several = f": choose one of {peak.notes[0].partition(': ')[2]}" if peak.notes and not peak.key else ""
    return f"its memory bandwidth is not known, or differs between the products of that name{several}"

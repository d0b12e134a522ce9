"""Devices as people write them on a command line: ``"H100 SXM"``, ``"A100"``, or the driver's own name."""

from __future__ import annotations

import dataclasses

from mfu_monitor.errors import ConfigurationError
from mfu_monitor.hardware.detect import look_up_peak, properties_of
from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.hardware.table import nearest_names

__all__ = ["find_device", "override_peak"]

# Above these a value was given in FLOP/s or bytes/s: no device of the table has a thousandth of them.
_MOST_TFLOPS = 1e8
_MOST_TB_S = 1e6


def find_device(
    name: str,
    *,
    precision: str | None = None,
    needs_bandwidth: bool = False,
    option: str = "--gpu",
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
    peak, reason = look_up_peak(properties_of(name))
    if peak is None:
        near = nearest_names(name)
        hint = f". Nearest names: {', '.join(near)}" if near else ""
        way_out = f"; for another device give {instead}" if instead else ""
        raise ConfigurationError(
            f"{option} {name!r} is not in the table of peaks: {reason}{hint}. `mfu-monitor peaks` lists all of them"
            f"{way_out}"
        )
    if precision is not None and peak.flops_per_s(precision) is None:
        raise ConfigurationError(f"{option} {name!r}: {_missing(peak, precision)}")
    if needs_bandwidth and peak.bytes_per_s is None:
        raise ConfigurationError(f"{option} {name!r}: {_missing(peak, None)}")
    return peak


def override_peak(
    peak: DevicePeak | None, *, precision: str, peak_tflops: float | None, bandwidth_tb_s: float | None
) -> DevicePeak:
    """The device with the user's own values (TFLOP/s at ``precision``, TB/s) in place of the table's."""
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


def _missing(peak: DevicePeak, precision: str | None) -> str:
    if precision is not None:
        return peak.missing_reason(precision) or f"no {precision} peak is known"
    several = f": choose one of {peak.notes[0].partition(': ')[2]}" if peak.notes and not peak.key else ""
    return f"its memory bandwidth is not known, or differs between the products of that name{several}"

"""``device_peak``: the dense peak of a device, or None with one warning that says what to do."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import torch

from mfu_monitor.errors import ConfigurationError, PeakUnknownWarning, users_stacklevel
from mfu_monitor.hardware.custom import find_custom_device
from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.hardware.lookup import TableMatch, find_row, labels_of, parse_name
from mfu_monitor.hardware.precision import PRECISIONS
from mfu_monitor.hardware.properties import DeviceProperties, read_properties
from mfu_monitor.hardware.table import PeakRow, nearest_names

__all__ = ["device_peak", "look_up_peak", "peak_of_match", "properties_of", "unknown_peak_message"]

_DEVICE_STRING = re.compile(r"^(cpu|cuda|mps|xpu|hpu|npu|xla|meta)(:\d+)?$")
_LONGEST_NAME = 256
_MIG_MEMORY_SLICES = (
    8  # https://docs.nvidia.com/datacenter/tesla/mig-user-guide/, "Partitioning": memory comes in eighths
)

CPU_REASON = "a CPU has no dense peak that a datasheet states"


def device_peak(
    device: torch.device | str | DeviceProperties,
    *,
    properties: DeviceProperties | None = None,
    custom_devices: str | Path | None = None,
    warn: bool = True,
) -> DevicePeak | None:
    """The dense peak of one torch device by the packaged table, or None.

    Args:
        device: A device name as the driver reports it (``"NVIDIA H100 80GB HBM3"``) or a product's (``"H100 SXM"``), a
            ``torch.device`` or its string (``"cuda:0"``), or the properties themselves. A product name of several
            parts (``"A100"``) gives what they have in common, and nothing where they have no peak in common.
        properties: What the device says of itself, where ``device`` is only a name: separates parts that share it.
        custom_devices: A YAML file of devices (see ``configs/custom_device.yaml``), searched before the table.
        warn: Give one ``PeakUnknownWarning`` with the reason and the way out when the answer is None.

    Returns:
        The peak with its source, or None for an unknown, ambiguous, virtual or contradictory device, and for a CPU.

    Raises:
        ConfigurationError: ``device`` is none of these types, or the YAML file is wrong.

    Example:
        >>> mm.device_peak("NVIDIA H100 80GB HBM3").flops_per_s(torch.bfloat16)
        989400000000000.0
    """
    found = properties if properties is not None else properties_of(device)
    peak, reason = look_up_peak(found, custom_devices)
    if peak is None and warn:
        name = found.name if found is not None else str(device)
        warnings.warn(unknown_peak_message(name, reason), PeakUnknownWarning, stacklevel=users_stacklevel())
    return peak


def look_up_peak(
    device: DeviceProperties | None, custom_devices: str | Path | None = None
) -> tuple[DevicePeak, str] | tuple[None, str]:
    """As ``device_peak``, without a warning: the peak, or None and the reason."""
    if device is None:
        return None, "the device could not be asked for its name"
    custom = find_custom_device(custom_devices, device.name) if custom_devices is not None else None
    if custom is not None:
        return custom, ""
    if device.device_type in ("cpu", "meta"):
        return None, CPU_REASON
    match = find_row(device)
    peak = peak_of_match(match, device)
    return (peak, "") if peak is not None else (None, match.reason)


def properties_of(device: torch.device | str | DeviceProperties) -> DeviceProperties | None:
    """What is known of ``device``; for a plain name, the name alone."""
    if isinstance(device, DeviceProperties):
        return device
    if isinstance(device, torch.device):
        return read_properties(device)
    if not isinstance(device, str):
        raise ConfigurationError(
            f"device_peak needs a device name, a torch.device or DeviceProperties, got {device!r} of type "
            f"{type(device).__name__}; example: device_peak('NVIDIA H100 80GB HBM3')"
        )
    if len(device) > _LONGEST_NAME:
        raise ConfigurationError(
            f"a device name of {len(device)} characters was given ({device[:40]!r}...); expected at most "
            f"{_LONGEST_NAME}, such as 'NVIDIA H100 80GB HBM3'"
        )
    is_device_string = _DEVICE_STRING.match(device.strip().lower()) is not None
    return read_properties(torch.device(device.strip().lower())) if is_device_string else DeviceProperties(name=device)


def peak_of_match(match: TableMatch, device: DeviceProperties) -> DevicePeak | None:
    """The peak of a recognised device, scaled where its SM count says so."""
    row = match.row
    if row is None:
        return None if device.device_type else _common_peak(device.name, match.candidates)
    # A TPU or Trainium chip is several torch devices: the row is one device, and the chip is meant where it is named.
    devices = row.torch_devices if "CHIP" in parse_name(device.name).words else 1
    factor = match.sm_ratio * devices
    rates = {name: rate * factor for name, rate in row.flops_per_s_by_precision().items()}
    sparse = {name: rate * factor for name, rate in row.sparse_flops_per_s_by_precision().items()}
    scaled, bandwidth = match.sm_ratio != 1.0, _bandwidth(match)
    return DevicePeak(
        device_name=row.label if match.is_by_product else device.name or row.name,
        flops_per_s_by_precision=rates,
        bytes_per_s=None if bandwidth is None else bandwidth * devices,
        source=f"table: {row.source}" + (f"; {match.notes[0]}" if scaled else ""),
        confidence="low" if scaled and match.mig_profile is None else row.confidence,
        max_clock_ratio=row.max_clock_ratio,
        notes=(*match.notes, *_device_unit_note(row, devices), *filter(None, [row.notes])),
        key=row.key,
        sparse_flops_per_s_by_precision=sparse,
        missing_reason_by_precision={p: row.missing_reason(p) for p in PRECISIONS if p not in rates},
    )


def _common_peak(name: str, rows: tuple[PeakRow, ...]) -> DevicePeak | None:
    """What all parts of that name agree on; None where that is no peak."""
    rates = [row.flops_per_s_by_precision() for row in rows]
    agreed = {p: r for p, r in rates[0].items() if all(o.get(p) == r for o in rates)} if rows else {}
    if not agreed:
        return None
    first, bandwidths = rows[0], {row.bytes_per_s for row in rows}
    parts = labels_of(rows)
    differing = {precision for other in rates for precision in other} - set(agreed)
    return DevicePeak(
        device_name=name,
        flops_per_s_by_precision=agreed,
        bytes_per_s=bandwidths.pop() if len(bandwidths) == 1 else None,
        source=f"table: {first.source}",
        notes=(f"what these have in common: {parts}",),
        missing_reason_by_precision={
            **{precision: first.missing_reason(precision) for precision in PRECISIONS if precision not in agreed},
            **dict.fromkeys(differing, f"the products of that name differ, choose one of: {parts}"),
        },
    )


def _bandwidth(match: TableMatch) -> float | None:
    """The row's, a MIG slice's share of it, or None for a part that is not quite the row's."""
    row = match.row
    if row is None or row.bytes_per_s is None or match.sm_ratio == 1.0:
        return None if row is None else row.bytes_per_s
    slice_gb = re.search(r"(\d+)GB$", match.mig_profile or "")
    if slice_gb is None or row.memory_gb is None:
        return None
    slices = round(_MIG_MEMORY_SLICES * int(slice_gb[1]) / row.memory_gb)
    return row.bytes_per_s * slices / _MIG_MEMORY_SLICES


def _device_unit_note(row: PeakRow, devices: int) -> tuple[str, ...]:
    if row.torch_devices == 1:
        return ()
    if devices > 1:
        return (f"the whole chip, which is {devices} torch devices ({row.torch_device_unit})",)
    return (f"one torch device is 1/{row.torch_devices} of the product on the datasheet ({row.torch_device_unit})",)


def unknown_peak_message(name: str, reason: str) -> str:
    """The whole warning: what was seen, why there is no peak, what to do."""
    if reason == CPU_REASON:
        return (
            f"no dense peak is known for device {name!r}: {reason}. No MFU is reported; everything else still is. "
            f"Measure it: peak='measure'."
        )
    near = nearest_names(name)
    hint = f" Nearest names in the table: {', '.join(near)}." if near else ""
    return (
        f"no dense peak is known for device {name!r}: {reason}. No MFU is reported; everything else still is. "
        f"Give the peak (peak=989.4e12 in dense FLOP/s, peak={{'bf16': 989.4e12}}, or a YAML file of devices), "
        f"measure it (peak='measure'), or derive it from SM count and clock (peak='derive').{hint}"
    )

"""Devices that a user adds in a YAML file; the format is explained in ``configs/custom_device.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as _short
from typing import Any

import yaml

from mfu_monitor.errors import ConfigurationError
from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.hardware.lookup import parse_name
from mfu_monitor.hardware.precision import literal_precision

__all__ = ["find_custom_device", "load_custom_devices", "positive_rate"]

_REQUIRED = ("device_names", "flops_per_s")
_ALLOWED = (*_REQUIRED, "bytes_per_s", "source", "notes")
_LONGEST_TEXT, _LONGEST_NAME = 2000, 200
_MOST_BYTES = 2**20  # a device takes some hundred bytes
_EXAMPLE = "devices: [{device_names: ['My Card'], flops_per_s: {bf16: 400.0e+12}, bytes_per_s: 2.0e+12}]"


def find_custom_device(path: str | Path, name: str) -> DevicePeak | None:
    """The device of the file whose names include ``name``, compared by whole words as the table's are."""
    words = parse_name(name).words
    for names, peak in load_custom_devices(path):
        if any(parse_name(known).words == words for known in names):
            return peak
    return None


def load_custom_devices(path: str | Path) -> list[tuple[tuple[str, ...], DevicePeak]]:
    """Every device of a YAML file with its names.

    Raises:
        ConfigurationError: The file cannot be read, or an entry is not as ``configs/custom_device.yaml`` explains.
    """
    entries = _entries(path)
    return [_device(entry, f"{path}, device {number}") for number, entry in enumerate(entries, start=1)]


def _entries(path: str | Path) -> list[Any]:
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise ConfigurationError(f"the device file {str(path)!r} is larger than 1 MiB; example: {_EXAMPLE}")
        content = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigurationError(f"cannot read the device file {str(path)!r}: {error}; example: {_EXAMPLE}") from error
    entries = content.get("devices") if isinstance(content, Mapping) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigurationError(f"{path}: expected a list under 'devices', got {_short(content)}; example: {_EXAMPLE}")
    return entries


def _device(entry: Any, where: str) -> tuple[tuple[str, ...], DevicePeak]:
    _check_keys(entry, where)
    names = entry["device_names"]
    if not isinstance(names, list) or not names or not all(_is_name(name) for name in names):
        raise ConfigurationError(
            f"{where}: device_names must be a list of names of up to {_LONGEST_NAME} characters, got {_short(names)}; "
            f"example: {_EXAMPLE}"
        )
    rates = entry["flops_per_s"]
    if not isinstance(rates, Mapping) or not rates:
        raise ConfigurationError(
            f"{where}: flops_per_s must map precisions to FLOP/s, got {_short(rates)}; example: {_EXAMPLE}"
        )
    bandwidth = entry.get("bytes_per_s")
    source, notes = _text(entry, "source", where), _text(entry, "notes", where)
    return tuple(names), DevicePeak(
        device_name=names[0],
        flops_per_s_by_precision={
            literal_precision(p): positive_rate(rate, f"{where}, {p}") for p, rate in rates.items()
        },
        bytes_per_s=None if bandwidth is None else positive_rate(bandwidth, f"{where}, bytes_per_s"),
        source=f"user file: {source or where}",
        confidence="user",
        notes=(notes,) if notes else (),
    )


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and 0 < len(name) <= _LONGEST_NAME


def _text(entry: Mapping[str, Any], key: str, where: str) -> str:
    """Text and numbers alone: the text of a list of aliases of lists can be larger than any memory."""
    value = entry.get(key)
    if not isinstance(value, str | int | float | None):
        raise ConfigurationError(f"{where}: {key} must be a text, got {_short(value)}; example: {_EXAMPLE}")
    return "" if value is None else str(value)[:_LONGEST_TEXT]


def _check_keys(entry: Any, where: str) -> None:
    if not isinstance(entry, Mapping):
        raise ConfigurationError(f"{where}: expected a mapping, got {_short(entry)}; example: {_EXAMPLE}")
    unknown = sorted(set(map(str, entry)) - set(_ALLOWED))
    missing = [key for key in _REQUIRED if key not in entry]
    if unknown or missing:
        raise ConfigurationError(
            f"{where}: unknown keys {_short(unknown)}, missing keys {missing}; allowed are {', '.join(_ALLOWED)}; "
            f"example: {_EXAMPLE}"
        )


def positive_rate(value: Any, where: str) -> float:
    """A finite number above zero; numeric strings too, since YAML 1.1 reads ``989.4e12`` as one.

    Raises:
        ConfigurationError: It is anything else.
    """
    try:
        rate = float(value) if not isinstance(value, bool) else float("nan")
    except (TypeError, ValueError, OverflowError):
        rate = float("nan")
    if not 0 < rate < float("inf"):
        raise ConfigurationError(
            f"{where}: expected a finite number above zero in units per second, got {_short(value)}; example: 989.4e12"
        )
    return rate

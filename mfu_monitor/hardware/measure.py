"""``peak="measure"``: the best matrix product this device does in a second or so, as a stand-in for a vendor's peak.

A measured peak is a floor of the true one: a fraction of it says by its source that it is of the best product seen.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import platformdirs
import torch

from mfu_monitor.errors import ConfigurationError, PeakUnknownWarning, ignored, must_pass
from mfu_monitor.hardware.detect import device_peak
from mfu_monitor.hardware.device_peak import LEAST_PEAK_FLOPS_PER_S, DevicePeak
from mfu_monitor.hardware.matmul_rate import (
    MEASURABLE_PRECISIONS,
    ProductRate,
    Shape,
    best_product_rate,
    copy_rate,
)
from mfu_monitor.hardware.nvml import NvmlReading, read_nvml
from mfu_monitor.hardware.precision import literal_precision, matmul_precision
from mfu_monitor.hardware.properties import read_properties

__all__ = [
    "cache_directory",
    "cached_peak",
    "load_measurement",
    "measure_peak",
    "remeasure_peak",
    "save_measurement",
]

CACHE_VARIABLE = "MFU_MONITOR_CACHE_DIR"
"""Environment variable that moves the cache."""

_BANDWIDTH_SHARE = 0.25  # of the time that the product gets
_MOST_CPU_FLOPS_PER_CYCLE = 4096
"""Of a core: AMX does 1,024 multiply-adds a cycle (Intel 64 Optimization Reference Manual, chapter 20); doubled."""
_MOST_CPU_CYCLES_PER_S = 6e9
_MOST_FLOPS_PER_S = 1e18
_MOST_BYTES_PER_S = 1e15
"""Of one device: fifty times the fastest parts of the table."""

_log = logging.getLogger("mfu_monitor")


def measure_peak(
    device: torch.device | str,
    precision: torch.dtype | str = "fp32",
    *,
    cache: bool = True,
    seconds: float = 1.0,
    shapes: Sequence[Shape] | None = None,
    warn: bool = True,
) -> DevicePeak | None:
    """Measure the best matrix product and the streaming bandwidth of a device; about ``1.3 * seconds`` in all.

    Gradients off, autocast off, own random generator; every setting it needs is put back. It waits for the device, so
    it belongs before training, not into a step.

    Args:
        device: A torch device or its string.
        precision: A precision name, or a dtype (``torch.float32`` by torch's TF32 setting at this moment).
        cache: Read a saved value if there is one for this device name, precision, torch version and thread count, and
            save a new one.
        seconds: Time for the products.
        shapes: (M, K, N) of the products to try; squares by default.
        warn: Give one ``PeakUnknownWarning`` when the device cannot run such a product.

    Returns:
        A peak with ``source="measured"``, or None.

    Raises:
        ConfigurationError: ``precision`` is not a precision, ``device`` not a device, or ``seconds`` not positive.

    Example:
        >>> measure_peak("cpu", torch.bfloat16).flops_per_s("bf16")
    """
    place, name = as_device(device), as_precision(precision, device)
    if not seconds > 0:
        raise ConfigurationError(f"seconds={seconds!r}: expected a number above zero; example: seconds=1.0")
    key = measurement_key(place, name)
    found = load_measurement(key) if cache else None
    if found is None:
        rate = best_product_rate(place, name, seconds=seconds, shapes=shapes)
        if rate is None:
            _warn_not_measurable(key["device_name"], name, warn=warn)
            return None
        conditions = read_nvml(place)  # while the device is still warm from the products
        bytes_per_s = copy_rate(place, seconds=seconds * _BANDWIDTH_SHARE)
        found = measurement(rate, bytes_per_s=bytes_per_s, conditions=conditions)
        if cache:
            save_measurement(key, found)
    return peak_of_measurement(key, found)


def remeasure_peak(
    device: torch.device | str, precision: torch.dtype | str = "fp32", *, seconds: float = 1.0
) -> DevicePeak | None:
    """Measure once more, and keep the better of this and the saved value: a busy machine only ever measures too low.

    Args:
        device: A torch device or its string.
        precision: A precision name, or a dtype.
        seconds: Time for the products.

    Returns:
        The better measurement, saved; None where nothing can be measured.
    """
    place, name = as_device(device), as_precision(precision, device)
    key = measurement_key(place, name)
    saved = load_measurement(key)
    rate = best_product_rate(place, name, seconds=seconds)
    if rate is None or (saved is not None and float(saved["flops_per_s"]) >= rate.flops_per_s):
        return None if saved is None else peak_of_measurement(key, saved)
    conditions = read_nvml(place)
    found = measurement(rate, bytes_per_s=copy_rate(place, seconds=seconds * _BANDWIDTH_SHARE), conditions=conditions)
    save_measurement(key, found)
    return peak_of_measurement(key, found)


def cached_peak(device: torch.device | str, precision: torch.dtype | str) -> DevicePeak | None:
    """The measured peak of an earlier run or of ``mfu-monitor bench``, measuring nothing; None if there is none."""
    key = measurement_key(as_device(device), as_precision(precision, device))
    found = load_measurement(key)
    return peak_of_measurement(key, found) if found is not None else None


def as_device(device: torch.device | str) -> torch.device:
    """A device that something can be measured on.

    Raises:
        ConfigurationError: torch does not know the device.
    """
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ConfigurationError(
            f"cannot measure on {device!r}: expected a torch device such as 'cpu' or 'cuda:0' ({error})"
        ) from error


def as_precision(precision: torch.dtype | str, device: torch.device | str) -> str:
    """The literal precision of a name, or of a dtype on this device at this moment."""
    if isinstance(precision, str):
        return literal_precision(precision)
    return matmul_precision(precision, as_device(device).type) or literal_precision(precision)


def measurement_key(device: torch.device, precision: str) -> dict[str, Any]:
    """What a saved value depends on."""
    properties = read_properties(device)
    is_cpu = device.type == "cpu"
    return {
        "device_name": properties.name if properties is not None else str(device),
        "sm_count": properties.sm_count
        if properties is not None
        else None,  # distinguishes MIG slices from their parent
        "precision": precision,
        "torch_version": torch.__version__,
        "threads": torch.get_num_threads() if is_cpu else None,
        # On a CPU this setting alone decides whether float32 products run in bfloat16.
        "cpu_fp32_precision": _cpu_fp32_precision() if is_cpu else None,
    }


def _cpu_fp32_precision() -> str:
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    return str(getattr(matmul, "fp32_precision", "none"))


def measurement(rate: ProductRate, *, bytes_per_s: float | None, conditions: NvmlReading | None) -> dict[str, Any]:
    """A measurement with its conditions, in plain types."""
    return {
        "flops_per_s": rate.flops_per_s,
        "shape": list(rate.shape),
        "bytes_per_s": bytes_per_s,
        "measured_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "conditions": conditions.to_dict() if conditions is not None else None,
    }


def peak_of_measurement(key: dict[str, Any], found: dict[str, Any]) -> DevicePeak:
    """A measurement as a peak, its conditions among the notes."""
    m, k, n = found["shape"]
    threads = f", {key['threads']} threads" if key["threads"] else ""
    how = f"best {key['precision']} product: ({m}, {k}) x ({k}, {n}), torch {key['torch_version']}{threads}"
    conditions = {name: value for name, value in (found.get("conditions") or {}).items() if value not in (None, [])}
    return DevicePeak(
        device_name=key["device_name"],
        flops_per_s_by_precision={key["precision"]: float(found["flops_per_s"])},
        bytes_per_s=found.get("bytes_per_s"),
        source="measured",
        confidence="measured",
        notes=(f"{how}, measured {found['measured_at']}", *(f"{name}: {value}" for name, value in conditions.items())),
    )


def _warn_not_measurable(device_name: str, precision: str, *, warn: bool) -> None:
    if warn:
        warnings.warn(
            f"{precision} products cannot be measured on {device_name!r} with torch {torch.__version__}: it has no "
            f"such kernel here, or no memory for it. No MFU is reported at {precision}; give the peak in dense FLOP/s "
            f"(peak={{'{precision}': ...}}) or train in one of {', '.join(MEASURABLE_PRECISIONS)}",
            PeakUnknownWarning,
            stacklevel=3,
        )


def cache_directory() -> Path:
    """Where measurements are kept: ``$MFU_MONITOR_CACHE_DIR`` or the user's cache directory of the platform."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen) if chosen else platformdirs.user_cache_path("mfu-monitor", appauthor=False) / "measured_peaks"


def load_measurement(key: Mapping[str, Any]) -> dict[str, Any] | None:
    """The measurement saved under exactly this key; None if there is none, or none that this device can have made."""
    try:
        content = json.loads(_path(key).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if must_pass(error):
            raise
        return None
    is_ours = isinstance(content, dict) and content.get("key") == dict(key) and _is_sound(key, content)
    return content if is_ours else None


def _is_sound(key: Mapping[str, Any], content: Mapping[str, Any]) -> bool:
    """Whether a file that anybody can have written holds a measurement: its types, and figures that can be."""
    shape, conditions = content.get("shape"), content.get("conditions")
    return (
        _is_between(LEAST_PEAK_FLOPS_PER_S, content.get("flops_per_s"), _most_flops_per_s(key))
        and (content.get("bytes_per_s") is None or _is_between(1.0, content["bytes_per_s"], _MOST_BYTES_PER_S))
        and isinstance(shape, list)
        and len(shape) == 3
        and all(isinstance(n, int) and n > 0 for n in shape)
        and isinstance(content.get("measured_at"), str)
        and (conditions is None or isinstance(conditions, dict))
    )


def _is_between(least: float, value: Any, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _most_flops_per_s(key: Mapping[str, Any]) -> float:
    """More than the device can do: half above its datasheet, as clocks boost; without one by what no part reaches."""
    threads = key.get("threads")
    if isinstance(threads, int):
        return threads * _MOST_CPU_FLOPS_PER_CYCLE * _MOST_CPU_CYCLES_PER_S
    known = device_peak(str(key.get("device_name")), warn=False)
    rate = None if known is None else known.flops_per_s(str(key.get("precision")))
    return _MOST_FLOPS_PER_S if rate is None else 1.5 * rate * (known.max_clock_ratio or 1.0)  # type: ignore[union-attr]


def save_measurement(key: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    """Save a measurement in one atomic step, since several ranks may do so at once; False where it cannot be.

    A better one that is there stays, and that is logged: a shorter benchmark or a busy machine measures too low.
    """
    path = _path(key)
    saved = load_measurement(key)
    if saved is not None and saved["flops_per_s"] > values["flops_per_s"]:
        _log.warning(
            "The measured peak of an earlier run is kept: %.4g FLOP/s, of %s; this one measured %.4g FLOP/s. Where the "
            "device has become slower for good, delete %s.",
            saved["flops_per_s"],
            saved["measured_at"],
            values["flops_per_s"],
            path,
        )
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    except OSError as error:
        if must_pass(error):
            raise
        return False
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({**values, "key": dict(key)}, file, indent=1)
        os.replace(temporary, path)
    except OSError as error:
        if must_pass(error):
            raise
        with ignored(OSError):
            os.unlink(temporary)
        return False
    return True


def _path(key: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()
    return cache_directory() / f"{digest[:24]}.json"

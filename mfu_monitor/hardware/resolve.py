"""The user's ``peak=`` argument: what it may be, and the peak that comes of it."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch

from mfu_monitor.errors import ConfigurationError, MFUMonitorWarning
from mfu_monitor.hardware.custom import load_custom_devices, positive_rate
from mfu_monitor.hardware.detect import device_peak, properties_of
from mfu_monitor.hardware.device_peak import LEAST_PEAK_FLOPS_PER_S, DevicePeak
from mfu_monitor.hardware.precision import PRECISIONS, literal_precision

__all__ = ["LEAST_PEAK_FLOPS_PER_S", "PeakSource", "PeakSpec", "resolve_peak", "validate_peak_spec"]

PeakSpec: TypeAlias = "str | float | int | Path | Mapping[Any, Any] | DevicePeak | None"
"""``"auto"``, ``"measure"``, ``"derive"``, FLOP/s, ``{precision: FLOP/s}``, a YAML file of devices, or a peak."""

PEAK_WORDS = ("auto", "measure", "derive")
_YAML_SUFFIXES = (".yaml", ".yml")
_BANDWIDTH_KEY = "bytes_per_s"
_ALLOWED = (
    "allowed are 'auto' (the table), 'measure' (a short benchmark), 'derive' (from SM count and clock), a number in "
    "dense FLOP/s, a mapping of precisions to FLOP/s, a YAML file of devices, or a DevicePeak; examples: "
    "peak=989.4e12, peak={'bf16': 989.4e12, 'fp8': 1978.9e12}, peak='custom_device.yaml'"
)


def validate_peak_spec(spec: PeakSpec) -> None:
    """Check a ``peak=`` argument without any device; for constructors.

    Raises:
        ConfigurationError: It is none of the allowed kinds; says what was given, what is allowed and an example.
    """
    if spec is None or isinstance(spec, DevicePeak):
        return
    if isinstance(spec, Mapping):
        _rates_of_mapping(spec)
    elif isinstance(spec, (str, Path)) and _is_yaml(spec):
        load_custom_devices(spec)
    elif not (isinstance(spec, str) and spec in PEAK_WORDS):
        _number(spec)


def resolve_peak(
    spec: PeakSpec,
    device: torch.device | str,
    precision: str | torch.dtype | None = None,
    *,
    use_cache: bool = True,
    warn: bool = True,
) -> DevicePeak | None:
    """The peak that a ``peak=`` argument means on this device.

    Args:
        spec: See ``PeakSpec``. None means that no peak is wanted.
        device: The device that the products run on.
        precision: The active precision; what ``"measure"`` measures (float32 if not given).
        use_cache: Let ``"measure"`` read and write its cache on disk.
        warn: Give one ``PeakUnknownWarning`` when there is no peak.

    Returns:
        The peak, or None where the device is not known ("auto" on a CPU is None by design).

    Raises:
        ConfigurationError: ``spec`` is none of the allowed kinds.

    Example:
        >>> resolve_peak({"bf16": 989.4e12}, "cuda:0").flops_per_s(torch.bfloat16)
        989400000000000.0
    """
    validate_peak_spec(spec)
    if spec is None or isinstance(spec, DevicePeak):
        return spec
    if isinstance(spec, Mapping):
        return _user_peak(_rates_of_mapping(spec), device)
    if isinstance(spec, (str, Path)) and _is_yaml(spec):
        return device_peak(device, custom_devices=spec, warn=warn)
    if isinstance(spec, str) and spec in PEAK_WORDS:
        return _peak_by_word(spec, device, precision, use_cache=use_cache, warn=warn)
    return _user_peak(dict.fromkeys(PRECISIONS, _number(spec)), device)


def _peak_by_word(
    word: str, device: torch.device | str, precision: str | torch.dtype | None, *, use_cache: bool, warn: bool
) -> DevicePeak | None:
    # Imported here: measuring and deriving are only paid for by those who ask for them.
    if word == "measure":
        from mfu_monitor.hardware.measure import measure_peak

        return measure_peak(device, precision or "fp32", cache=use_cache, warn=warn)
    if word == "derive":
        from mfu_monitor.hardware.derive import derive_peak

        return derive_peak(device, warn=warn)
    return device_peak(device, warn=warn)


def _user_peak(rates: Mapping[str, float], device: torch.device | str) -> DevicePeak:
    """The user's rates; what they left out (bandwidth, other precisions) comes from the table if it has the device."""
    known = device_peak(device, warn=False)
    flops = {name: rate for name, rate in rates.items() if name != _BANDWIDTH_KEY}
    found = properties_of(device)
    base = known or DevicePeak(device_name=found.name if found else str(device))
    rest = sorted(set(base.flops_per_s_by_precision) - set(flops))
    source = "user" if not rest else f"user ({', '.join(flops)}); {base.source} ({', '.join(rest)})"
    return dataclasses.replace(
        base,
        flops_per_s_by_precision={**base.flops_per_s_by_precision, **flops},
        bytes_per_s=rates.get(_BANDWIDTH_KEY, base.bytes_per_s),
        source=source,
        confidence="user",
        missing_reason_by_precision={},
    )


def _rates_of_mapping(spec: Mapping[Any, Any]) -> dict[str, float]:
    if not spec:
        raise ConfigurationError(f"peak={{}} names no precision; {_ALLOWED}")
    rates: dict[str, float] = {}
    for name, rate in spec.items():
        key = _BANDWIDTH_KEY if name == _BANDWIDTH_KEY else literal_precision(name)
        rates[key] = positive_rate(rate, f"peak[{str(name)!r}]")
    if set(rates) == {_BANDWIDTH_KEY}:
        raise ConfigurationError(f"peak={dict(spec)!r} gives a bandwidth and no FLOP/s; {_ALLOWED}")
    return rates


def _number(spec: Any) -> float:
    try:
        rate = positive_rate(spec, "peak")
    except ConfigurationError as error:
        raise ConfigurationError(f"peak={spec!r} is not a peak: {_ALLOWED}") from error
    if rate < LEAST_PEAK_FLOPS_PER_S:
        warnings.warn(
            f"peak={spec!r} is less than a megaflop per second: was it meant in TFLOP/s? The unit is FLOP/s, so "
            f"989.4 TFLOP/s is peak=989.4e12",
            MFUMonitorWarning,
            stacklevel=4,
        )
    return rate


def _is_yaml(spec: str | Path) -> bool:
    return isinstance(spec, Path) or spec.lower().endswith(_YAML_SUFFIXES)


MOST_REMEASUREMENTS = 3
"""A second of measuring each; a machine that is busy all the time gives no good peak however often it is asked."""


class PeakSource:
    """Resolves ``peak=`` when first asked, and again only where a new precision has to be measured.

    Args:
        spec: the ``peak`` of the configuration.
        device: whose peak.

    Example:
        >>> PeakSource("auto", torch.device("cuda")).for_precision("bf16")
    """

    def __init__(self, spec: Any, device: torch.device) -> None:
        self._spec = spec
        self._device = device
        self._peak: DevicePeak | None = None
        self._asked: set[str | None] = set()
        self._remeasured = 0

    @property
    def known(self) -> DevicePeak | None:
        """The peak as far as it was asked for."""
        return self._peak

    def is_resolved(self, precision: str | None) -> bool:
        """True if ``for_precision`` will answer at once."""
        return bool(self._asked) and (self._spec != "measure" or precision in self._asked)

    def for_precision(self, precision: str | None) -> DevicePeak | None:
        """The device's peak with a value for this precision, where there is one; None if the device is not known."""
        if not self.is_resolved(precision):
            self._asked.add(precision)
            self._peak = _merged(self._peak, self._resolve(precision))
        return self._peak

    def measure_again(self, precision: str | None) -> bool:
        """Measure once more after a reading above a measured peak; True if that found a higher one."""
        known = None if self._peak is None or precision is None else self._peak.flops_per_s(precision)
        if known is None or self._remeasured >= MOST_REMEASUREMENTS:
            return False
        self._remeasured += 1
        from mfu_monitor.hardware.measure import remeasure_peak  # here: few runs measure

        better = remeasure_peak(self._device, precision)  # type: ignore[arg-type]
        rate = None if better is None else better.flops_per_s(precision)  # type: ignore[arg-type]
        if rate is None or rate <= known:
            return False
        self._peak = _merged(self._peak, better)
        return True

    def _resolve(self, precision: str | None) -> DevicePeak | None:
        # Measuring fills matrices with random numbers; the training's generators must not notice.
        is_accelerator = self._device.type not in ("cpu", "meta")
        devices = [self._device] if is_accelerator else []
        kind = self._device.type if is_accelerator else "cuda"
        with torch.random.fork_rng(devices=devices, device_type=kind, enabled=self._spec == "measure"):
            return resolve_peak(self._spec, self._device, precision)


def _merged(known: DevicePeak | None, new: DevicePeak | None) -> DevicePeak | None:
    if known is None or new is None:
        return new or known
    rates = {**known.flops_per_s_by_precision, **new.flops_per_s_by_precision}
    return dataclasses.replace(new, flops_per_s_by_precision=rates)

"""The peak of the monitored device, found once it is known in which precision the model computes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.hardware.measure import remeasure_peak
from mfu_monitor.hardware.resolve import resolve_peak

__all__ = ["PeakSource"]


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
        """The device's peak with a figure for this precision, where there is one; None if the device is not known."""
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

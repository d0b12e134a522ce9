"""Clock, power limit, temperature and throttle reasons of an NVIDIA device, where the extra ``nvml`` is installed."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mfu_monitor.errors import must_pass

__all__ = ["NvmlReading", "read_nvml"]

# Bits of nvmlClocksEventReasons; https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html
_CLOCK_REASONS = {
    0x0000000000000001: "gpu_idle",
    0x0000000000000002: "applications_clocks_setting",
    0x0000000000000004: "sw_power_cap",
    0x0000000000000008: "hw_slowdown",
    0x0000000000000010: "sync_boost",
    0x0000000000000020: "sw_thermal_slowdown",
    0x0000000000000040: "hw_thermal_slowdown",
    0x0000000000000080: "hw_power_brake_slowdown",
    0x0000000000000100: "display_clock_setting",
}
_THROTTLING = frozenset(_CLOCK_REASONS.values()) - {"gpu_idle", "display_clock_setting"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlReading:
    """The device's state at one moment; None where the driver does not say."""

    sm_clock_mhz: float | None = None
    max_sm_clock_mhz: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    temperature_c: float | None = None
    clock_reasons: tuple[str, ...] = ()
    """Why the clock is where it is: ``"sw_power_cap"``, ``"hw_thermal_slowdown"``, ..."""

    @property
    def throttle_reasons(self) -> tuple[str, ...]:
        """Those of ``clock_reasons`` that hold the clock below what the device could do."""
        return tuple(reason for reason in self.clock_reasons if reason in _THROTTLING)

    def to_dict(self) -> dict[str, Any]:
        """Plain types for JSON."""
        return {**dataclasses.asdict(self), "clock_reasons": list(self.clock_reasons)}


def read_nvml(device: torch.device) -> NvmlReading | None:
    """Read a CUDA device's state through NVML; None without the extra, without a driver, or for another device.

    The device is found by its UUID, since NVML's numbering ignores ``CUDA_VISIBLE_DEVICES``. Reading takes host calls
    only and never waits for the device.
    """
    if device.type != "cuda":
        return None
    try:
        nvml: Any = importlib.import_module("pynvml")
        uuid = torch.cuda.get_device_properties(device).uuid
        nvml.nvmlInit()
    except Exception as error:  # no extra, no driver, no such property: all mean "unknown"
        if must_pass(error):
            raise
        return None
    try:
        return _reading(nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
    except Exception as error:  # NVMLError derives from Exception only
        if must_pass(error):
            raise
        return None
    finally:
        nvml.nvmlShutdown()


def _reading(nvml: Any, handle: Any) -> NvmlReading:
    def ask(function: str, *arguments: Any) -> float | None:
        return _or_none(lambda: float(getattr(nvml, function)(handle, *arguments)))

    milliwatts = {
        "power_w": ask("nvmlDeviceGetPowerUsage"),
        "power_limit_w": ask("nvmlDeviceGetEnforcedPowerLimit"),
        "default_power_limit_w": ask("nvmlDeviceGetPowerManagementDefaultLimit"),
    }
    return NvmlReading(
        sm_clock_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        max_sm_clock_mhz=ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        temperature_c=ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        clock_reasons=_reasons(ask("nvmlDeviceGetCurrentClocksThrottleReasons")),
        **{name: None if value is None else value / 1000 for name, value in milliwatts.items()},
    )


def _or_none(ask: Callable[[], float]) -> float | None:
    try:
        return ask()
    except Exception as error:  # a query this driver or part does not support
        if must_pass(error):
            raise
        return None


def _reasons(mask: float | None) -> tuple[str, ...]:
    return tuple(name for bit, name in _CLOCK_REASONS.items() if int(mask or 0) & bit)

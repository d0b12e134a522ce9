"""How well is the training hardware really used: exact MFU and HFU, live."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mfu_monitor.checks import Diagnosis, check
    from mfu_monitor.config import MonitorConfig
    from mfu_monitor.counting.counter import FlopCounter
    from mfu_monitor.counting.step_record import StepRecord
    from mfu_monitor.formulas.registry import register_flop_formula, register_module_formula
    from mfu_monitor.hardware.detect import device_peak
    from mfu_monitor.hardware.device_peak import DevicePeak
    from mfu_monitor.monitor import Monitor
    from mfu_monitor.utilization import UtilizationReading

__version__ = "0.1.0"

_PUBLIC = {
    "DevicePeak": "mfu_monitor.hardware.device_peak",
    "Diagnosis": "mfu_monitor.checks",
    "FlopCounter": "mfu_monitor.counting.counter",
    "Monitor": "mfu_monitor.monitor",
    "MonitorConfig": "mfu_monitor.config",
    "StepRecord": "mfu_monitor.counting.step_record",
    "UtilizationReading": "mfu_monitor.utilization",
    "check": "mfu_monitor.checks",
    "device_peak": "mfu_monitor.hardware.detect",
    "register_flop_formula": "mfu_monitor.formulas.registry",
    "register_module_formula": "mfu_monitor.formulas.registry",
}

__all__ = [
    "DevicePeak",
    "Diagnosis",
    "FlopCounter",
    "Monitor",
    "MonitorConfig",
    "StepRecord",
    "UtilizationReading",
    "__version__",
    "check",
    "device_peak",
    "register_flop_formula",
    "register_module_formula",
]


def __getattr__(name: str) -> Any:
    """Load a public name on first use, so that importing the package costs nothing but itself."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

"""Adapters for trainers, each loaded on first use: importing this package needs no trainer to be installed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .fabric import FabricMFUMonitor
    from .lightning_callback import MFUMonitor
    from .transformers_callback import MFUCallback

__all__ = ["FabricMFUMonitor", "MFUCallback", "MFUMonitor"]

_HOMES = {
    "FabricMFUMonitor": "fabric",
    "MFUCallback": "transformers_callback",
    "MFUMonitor": "lightning_callback",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

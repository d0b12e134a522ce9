"""Measured peaks on disk, one small JSON file a device, precision, torch version and thread count."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import platformdirs

__all__ = ["cache_directory", "load_measurement", "save_measurement"]

CACHE_VARIABLE = "MFU_MONITOR_CACHE_DIR"
"""Environment variable that moves the cache."""


def cache_directory() -> Path:
    """Where measurements are kept: ``$MFU_MONITOR_CACHE_DIR`` or the user's cache directory of the platform."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen) if chosen else platformdirs.user_cache_path("mfu-monitor", appauthor=False) / "measured_peaks"


def load_measurement(key: Mapping[str, Any]) -> dict[str, Any] | None:
    """The measurement saved under exactly this key; None if there is none or the file is not one of ours."""
    try:
        content = json.loads(_path(key).read_text(encoding="utf-8"))
        is_ours = content["key"] == dict(key) and float(content["flops_per_s"]) > 0
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return dict(content) if is_ours else None


def save_measurement(key: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    """Save a measurement in one atomic step, since several ranks may do so at once; False where it cannot be."""
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    except OSError:
        return False
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({**values, "key": dict(key)}, file, indent=1)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        return False
    return True


def _path(key: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()
    return cache_directory() / f"{digest[:24]}.json"

"""Whether something was compiled: dynamo's own counters, read and never changed."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["compiled_frames", "latest_recompile"]

_NOTHING: Mapping[str, Any] = {}


def compiled_frames() -> int:
    """A number that changes when dynamo traces a frame or makes a graph; 0 while nobody has imported dynamo.

    Reads ``torch._dynamo.utils.counters``, present in torch 2.9 to 2.13; where it is missing no compile is seen.
    Lazily compiled backward graphs are made in the step of their forward, so the forward's change covers them.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    counters = getattr(utils, "counters", None)
    if counters is None:
        return 0
    # `get` twice: counters is a defaultdict, and asking it by key would add the key.
    frames: int = counters.get("frames", _NOTHING).get("total", 0)
    graphs: int = counters.get("stats", _NOTHING).get("unique_graphs", 0)
    return frames + graphs


def latest_recompile() -> str | None:
    """What dynamo recompiled last, and why: ``"forward (model.py): tensor 'x' size mismatch ..."``; None if unknown.

    Reads ``torch._dynamo.utils.get_compilation_metrics()``, present in torch 2.9 to 2.13.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    metrics: list[Any] = getattr(utils, "get_compilation_metrics", list)()
    latest = next((m for m in reversed(metrics) if getattr(m, "recompile_reason", None)), None)
    if latest is None:
        return None
    return f"{latest.co_name} ({os.path.basename(str(latest.co_filename))}): {latest.recompile_reason}"

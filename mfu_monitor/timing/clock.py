"""Clocks: a mark now, the seconds between two marks later. Never a call that waits for the device."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Protocol

import torch

__all__ = ["Clock", "CudaEventClock", "HostClock", "Mark", "clock_for"]

Mark = Any
"""An opaque point in time of one clock: a float of the host's, an event of a device's."""


class Clock(Protocol):
    """A source of marks. ``elapsed_s`` may answer None: the device has not reached the mark yet."""

    name: str

    def mark(self) -> Mark:
        """The present moment, without waiting for anything."""

    def elapsed_s(self, start: Mark, end: Mark) -> float | None:
        """Seconds from ``start`` to ``end``, or None while ``end`` is not reached. Never waits."""


class HostClock:
    """The host's monotonic clock, right for work that runs on the CPU. Marks are seconds as floats."""

    name = "host"

    mark = staticmethod(time.perf_counter)

    @staticmethod
    def elapsed_s(start: float, end: float) -> float:
        """Seconds from ``start`` to ``end``."""
        return end - start


class CudaEventClock:
    """Timing events of an accelerator, recorded on the current stream and read once the device has passed them.

    Works with every device module of torch that has timing events (``torch.cuda``, also for ROCm, ``torch.xpu``).
    Events are kept and used again: making one allocates on the driver's side.

    Args:
        device: the device whose streams are timed.
        event_factory: makes an event with timing; for tests.
    """

    def __init__(self, device: torch.device | str = "cuda", *, event_factory: Any = None) -> None:
        self.device = torch.device(device)
        self.name = f"{self.device.type} events"
        self._make_event = event_factory or self._timing_event
        self._free: list[Any] = []

    def _timing_event(self) -> Any:
        return torch.get_device_module(self.device).Event(enable_timing=True)

    def mark(self) -> Any:
        """An event recorded now on the current stream; the host goes on at once."""
        event = self._free.pop() if self._free else self._make_event()
        event.record()
        return event

    def elapsed_s(self, start: Any, end: Any) -> float | None:
        """Seconds on the device between two events, or None while it has not passed both."""
        if not (start.query() and end.query()):
            return None
        return float(start.elapsed_time(end)) / 1e3  # events answer in milliseconds

    def release(self, marks: Iterable[Any]) -> None:
        """Take back events that nobody will read again."""
        self._free.extend(marks)


def clock_for(device: torch.device | str | None) -> Clock:
    """The clock that is right for work on ``device``: events where its torch module has them, else the host's.

    Raises:
        Nothing: an accelerator without timing events gets the host's clock.
    """
    kind = torch.device(device).type if device is not None else "cpu"
    if kind in ("cpu", "meta"):
        return HostClock()
    return CudaEventClock(torch.device(device)) if _has_timing_events(kind) else HostClock()  # type: ignore[arg-type]


def _has_timing_events(kind: str) -> bool:
    try:
        module = torch.get_device_module(kind)
        if not module.is_available():
            return False
        module.Event(enable_timing=True)
    except (AttributeError, RuntimeError, TypeError, NotImplementedError):
        return False
    return hasattr(module.Event, "elapsed_time")

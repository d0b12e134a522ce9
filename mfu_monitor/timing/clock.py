"""Clocks: a mark now, the seconds between two marks later. Never a call that waits for the device."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Clock", "Mark"]

Mark = Any
"""An opaque point in time of one clock: a float of the host's, an event of a device's."""


class Clock(Protocol):
    """A source of marks. ``elapsed_s`` may answer None: the device has not reached the mark yet."""

    name: str

    def mark(self) -> Mark:
        """The present moment, without waiting for anything."""

    def elapsed_s(self, start: Mark, end: Mark) -> float | None:
        """Seconds from ``start`` to ``end``, or None while ``end`` is not reached. Never waits."""

"""A sink that drops every event."""

from __future__ import annotations

from mfu_monitor.sinks.base import Event

__all__ = ["NullSink"]


class NullSink:
    """Takes events and forgets them: for ranks that do not report, and for runs that only read ``monitor.reading``."""

    def emit(self, event: Event) -> None:
        """Drop the event."""

    def close(self) -> None:
        """Nothing to release."""

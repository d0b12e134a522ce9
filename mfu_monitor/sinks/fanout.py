"""One sink that passes events to several, and keeps the failure of one away from the others."""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Callable, Iterable
from functools import partial

from mfu_monitor.errors import StageDisabledWarning
from mfu_monitor.sinks.base import Event, Sink

__all__ = ["FanOutSink"]


class FanOutSink:
    """Passes each event to every sink. A sink that raises is turned off, with one warning that carries the traceback.

    Args:
        sinks: the receivers, in the order in which they are served.

    Example:
        >>> sink = FanOutSink([ConsoleSink(), JsonlSink("runs/mfu.jsonl")])
        >>> sink.emit(event)
    """

    def __init__(self, sinks: Iterable[Sink] = ()) -> None:
        self._sinks: list[Sink] = list(sinks)

    @property
    def sinks(self) -> tuple[Sink, ...]:
        """The sinks that still receive events."""
        return tuple(self._sinks)

    def add(self, sink: Sink) -> None:
        """Serve one more sink from the next event on."""
        self._sinks.append(sink)

    def emit(self, event: Event) -> None:
        """Pass the event on; never raises."""
        for sink in self.sinks:
            self._guarded(sink, partial(sink.emit, event))

    def close(self) -> None:
        """Close every sink, also when one of them fails to."""
        for sink in self.sinks:
            self._guarded(sink, sink.close)
        self._sinks.clear()

    def _guarded(self, sink: Sink, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:  # noqa: BLE001  # a sink of the user's may raise anything; training must not see it
            self._sinks.remove(sink)
            with contextlib.suppress(StageDisabledWarning):  # where warnings are errors
                warnings.warn(_message(sink), StageDisabledWarning, stacklevel=3)


def _message(sink: Sink) -> str:
    return (
        f"The sink {type(sink).__name__} failed and is turned off for the rest of the run; the other sinks and the "
        f"training go on. Fix the cause below, or leave the sink out.\n{traceback.format_exc()}"
    )

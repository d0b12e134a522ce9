"""Alerts to people in the process itself: Python's logging, and a function of the user's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from mfu_monitor.errors import ConfigurationError
from mfu_monitor.sinks.base import Event

__all__ = ["CallableSink", "LoggingSink"]


class LoggingSink:
    """Logs alerts: losses as warnings, recoveries and changes as information.

    Args:
        logger: the logger; by default ``mfu_monitor``, which the user's logging configuration can route.

    Example:
        >>> LoggingSink(logging.getLogger("training"))
    """

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self.logger = logger or logging.getLogger("mfu_monitor")

    def emit(self, event: Event) -> None:
        """Log one alert; other kinds of events are not for people's eyes."""
        if event.kind == "alert":
            good = event.payload.get("kind") in ("recovery", "change")
            self.logger.log(logging.INFO if good else logging.WARNING, "%s", event.text)

    def close(self) -> None:
        """Nothing is held."""


class CallableSink:
    """Calls a function with each event of some kinds, in the training process: it must return quickly.

    Args:
        function: takes an ``Event``; ``event.payload`` is the alert's ``to_dict()``.
        kinds: kinds of events that it is called with.

    Raises:
        ConfigurationError: ``function`` cannot be called.

    Example:
        >>> CallableSink(lambda event: pager.notify(event.text))
    """

    def __init__(self, function: Callable[[Event], object], *, kinds: Sequence[str] = ("alert",)) -> None:
        if not callable(function):
            raise ConfigurationError(
                f"{function!r} ({type(function).__name__}) was given as the function for alerts and cannot be called. "
                "Give a function of one argument, the event: CallableSink(lambda event: print(event.text))."
            )
        self._function = function
        self.kinds = tuple(kinds)

    def emit(self, event: Event) -> None:
        """Call the function, if the kind is wanted."""
        if event.kind in self.kinds:
            self._function(event)

    def close(self) -> None:
        """Nothing is held."""

"""Where alerts go beside the sinks of the readings: Python's logging, a function of the user's, a webhook."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

from mfu_monitor.errors import ConfigurationError, StageDisabledWarning, warn
from mfu_monitor.sinks.base import Event, Sink
from mfu_monitor.sinks.console import printable
from mfu_monitor.sinks.webhook import WEBHOOK_URL_VARIABLE, WebhookSink

__all__ = ["CallableSink", "LoggingSink", "alert_sinks"]


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
            self.logger.log(logging.INFO if good else logging.WARNING, "%s", printable(event.text))

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


def alert_sinks(function: Callable[[Event], object] | None, webhook: str | None) -> list[Sink]:
    """The sinks that alerts go to.

    Args:
        function: called with each alert's event; None for none.
        webhook: address that alerts are posted to; None: the environment variable MFU_MONITOR_WEBHOOK_URL, if set.
    """
    sinks: list[Sink] = [LoggingSink()]
    if function is not None:
        sinks.append(CallableSink(function))
    if webhook is not None:
        sinks.append(WebhookSink(webhook))
    elif os.environ.get(WEBHOOK_URL_VARIABLE):
        sinks += _webhook_of_the_environment()
    return sinks


def _webhook_of_the_environment() -> list[Sink]:
    """A variable is set far from the script, often for a cluster: a wrong one must not cost the run its metrics."""
    try:
        return [WebhookSink()]
    except ConfigurationError as error:
        warn(f"{WEBHOOK_URL_VARIABLE}: {error} Alerts go to the other sinks only.", StageDisabledWarning)
        return []

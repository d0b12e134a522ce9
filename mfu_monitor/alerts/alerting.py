"""The alerting stage of the monitor: readings in, alert events out, and the sinks that alerts need of their own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from mfu_monitor.alerts import Alert, AlertDetector
from mfu_monitor.config import MonitorConfig, resolve_alerts, resolve_callable
from mfu_monitor.errors import ConfigurationError, StageDisabledWarning
from mfu_monitor.guard import warn
from mfu_monitor.sinks.base import Event, Sink
from mfu_monitor.sinks.notify import CallableSink, LoggingSink
from mfu_monitor.sinks.webhook import WEBHOOK_URL_VARIABLE, WebhookSink
from mfu_monitor.utilization import UtilizationReading

__all__ = ["Alerting", "alert_sinks"]

BAD_NEWS = ("drop", "floor", "sag")


class Alerting:
    """Watches readings for a drop.

    Args:
        config: the options; ``alerts=False`` makes it silent.
    """

    def __init__(self, config: MonitorConfig) -> None:
        thresholds = resolve_alerts(config.alerts)
        self._detector = None if thresholds is None else AlertDetector(thresholds)

    @property
    def is_active(self) -> bool:
        """True during an incident."""
        return self._detector is not None and self._detector.active

    def on(self, reading: UtilizationReading) -> tuple[Alert, ...]:
        """The alerts that this reading brings; most bring none."""
        return () if self._detector is None else self._detector.update(reading)

    def state_dict(self) -> dict[str, Any]:
        """Plain types, for a checkpoint."""
        return {} if self._detector is None else self._detector.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict()``; an empty one changes nothing."""
        if self._detector is not None and state:
            self._detector.load_state_dict(state)


def alert_event(alert: Alert) -> Event:
    """The event of one alert."""
    return Event(
        kind="alert", step=alert.step, payload=alert.to_dict(), text=alert.message, title=f"alert/{alert.kind}"
    )


def alert_sinks(config: MonitorConfig) -> list[Sink]:
    """Where alerts go beside the sinks of the readings: Python's logging, a function of the user's, a webhook."""
    if resolve_alerts(config.alerts) is None:
        return []
    sinks: list[Sink] = [LoggingSink()]
    if (function := resolve_callable("on_alert", config.on_alert)) is not None:
        sinks.append(CallableSink(function))
    if config.webhook is not None:
        sinks.append(WebhookSink(config.webhook))
    elif os.environ.get(WEBHOOK_URL_VARIABLE):
        sinks += _webhook_of_the_environment()
    return sinks


def _webhook_of_the_environment() -> list[Sink]:
    """A variable is set far from the script, often for a cluster: a wrong one must not cost the run its figures."""
    try:
        return [WebhookSink()]
    except ConfigurationError as error:
        warn(f"{WEBHOOK_URL_VARIABLE}: {error} Alerts go to the other sinks only.", StageDisabledWarning)
        return []

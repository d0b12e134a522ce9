"""Where readings go: one small protocol, and the events that cross it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["Event", "Sink"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing to report: a reading, a counted record, a diagnosis, an alert or a text card.

    ``kind`` is one of ``"reading"``, ``"record"``, ``"diagnosis"``, ``"alert"``, ``"card"``, ``"run"``,
    ``"outlook"`` (the waterfall and its advice).
    """

    kind: str
    step: int
    run_id: str = ""
    """Of the monitor that reports, another one in each process and run; empty for an event of nobody's."""
    rank: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Scalars by their public metric name (``"utilization/mfu"``), ready for a logger."""
    payload: Mapping[str, Any] = field(default_factory=dict)
    """Plain types for JSON: the record itself."""
    text: str = ""
    """Markdown for people (text cards, diagnoses, alerts)."""
    title: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Pictures by tag: matplotlib figures, for sinks that show them."""


class Sink(Protocol):
    """Receives events; must not block training. An exception turns the sink off, with one warning.

    A sink that shows pictures says so with ``shows_figures = True``; without such a sink none are drawn. One that is
    slow is called from a thread of its own, unless it says ``stays_on_thread = True``.
    """

    def emit(self, event: Event) -> None:
        """Take one event."""

    def close(self) -> None:
        """Flush and release; called once."""

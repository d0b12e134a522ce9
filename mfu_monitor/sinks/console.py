"""One line per window on a console. The only sink that writes percent."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TextIO

from mfu_monitor.sinks.base import Event

__all__ = ["ConsoleSink", "format_reading", "printable"]


class ConsoleSink:
    """Prints one line for each reading, and the text of diagnoses and alerts.

    Args:
        stream: where to; None is the standard output of the moment, so that redirections are followed.

    Example:
        >>> monitor = mm.Monitor(model, sinks=[ConsoleSink()])
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream

    def emit(self, event: Event) -> None:
        """Print the event if it is a reading, a diagnosis or an alert; cards and records are too long for a console."""
        if event.kind == "reading":
            self._print(format_reading(event.payload))
        elif event.kind in ("diagnosis", "alert"):
            self._print(f"mfu-monitor: {event.title or event.kind} (step {event.step}): {event.text}")

    def close(self) -> None:
        """The stream is not ours to close."""

    def _print(self, line: str) -> None:
        print(printable(line), file=self._stream or sys.stdout, flush=True)


def format_reading(values: Mapping[str, Any]) -> str:
    """One line for one reading.

    Args:
        values: what ``UtilizationReading.to_dict()`` gives.

    Returns:
        For example ``mfu-monitor steps 11-20: MFU 38.1%  HFU 42%  51,200 tokens/s  0.160 s/step``. An unknown value
        is left out; an unknown MFU is replaced by the reason.
    """
    window = values["window"]
    parts = [*_fractions(values), *_rates(values), *_step_time(window)]
    if values.get("exactness", "exact") != "exact":
        parts.append(f"[{values['exactness'].replace('_', ' ')}]")
    if values.get("mfu") is None:
        parts.append(f"(no MFU: {values.get('reason') or 'the reason is not known'})")
    return f"mfu-monitor steps {window['first_step']}-{window['last_step']}: " + "  ".join(parts)


def printable(text: str) -> str:
    """The text with every control character but line breaks and tabs made visible: names may hold terminal commands.

    Example:
        >>> printable("layer\x1b[2J")
        'layer\\x1b[2J'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def _fractions(values: Mapping[str, Any]) -> list[str]:
    return [f"{name.upper()} {100 * values[name]:.3g}%" for name in ("mfu", "hfu") if values.get(name) is not None]


def _rates(values: Mapping[str, Any]) -> list[str]:
    for name, unit in (("tokens_per_s", "tokens/s"), ("samples_per_s", "samples/s")):
        if (rate := values.get(name)) is not None:
            return [f"{rate:,.0f} {unit}" if rate >= 100 else f"{rate:.3g} {unit}"]
    return []


def _step_time(window: Mapping[str, Any]) -> list[str]:
    return [f"{window['elapsed_s'] / window['steps']:.3g} s/step"] if window["steps"] else []

"""Events as JSON lines: append-only, one event a line, readable while the run goes on and after a crash."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from typing import Any, TextIO, TypeVar

from mfu_monitor.counting.plain_types import PlainTypes
from mfu_monitor.counting.step_record import StepRecord
from mfu_monitor.errors import ConfigurationError, MFUMonitorWarning
from mfu_monitor.sinks.base import Event
from mfu_monitor.utilization import UtilizationReading

__all__ = ["JSONL_SCHEMA_VERSION", "JsonlRun", "JsonlSink", "read_jsonl"]

_Made = TypeVar("_Made", bound=PlainTypes)

JSONL_SCHEMA_VERSION = 1
"""Raised when a key changes its meaning; new keys alone do not raise it."""


class JsonlSink:
    """Appends each event to a file as one JSON object and flushes it.

    The file is opened for a moment in the constructor, to find a bad path before training; it is then held open from
    the first event on.

    Args:
        path: the file; its directory is made if needed. An existing file is continued.

    Raises:
        ConfigurationError: the path cannot be written.

    Example:
        >>> monitor = mm.Monitor(model, sinks=[JsonlSink("runs/mfu.jsonl")])
        >>> read_jsonl("runs/mfu.jsonl").readings[-1].mfu
    """

    def __init__(self, path: str | Path) -> None:
        self.path = _writable(path)
        self._file: TextIO | None = None

    def emit(self, event: Event) -> None:
        """Append one line."""
        if self._file is None:
            self._file = self.path.open("a", encoding="utf-8")
            if _ends_within_a_line(self.path):  # a run that was killed while it wrote: its half line ends here
                self._file.write("\n")
        self._file.write(json.dumps(_to_json(event), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; a later event opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}  # an open file cannot travel to a spawned process


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonlRun:
    """What a JSONL file holds, in the order written."""

    events: tuple[Event, ...] = ()
    readings: tuple[UtilizationReading, ...] = ()
    records: tuple[StepRecord, ...] = ()
    notes: tuple[str, ...] = ()
    """Lines that were left out, and why."""

    @property
    def reading_events(self) -> tuple[Event, ...]:
        """The events that the readings came with."""
        return tuple(event for event in self.events if event.kind == "reading")


def read_jsonl(path: str | Path) -> JsonlRun:
    """Read a file that ``JsonlSink`` wrote.

    A line that was cut off (a run that was killed, and perhaps resumed, or one that is writing now) is left out with a
    warning.

    Args:
        path: the file.

    Returns:
        Its events, with the readings and the records of counted steps as the frozen records they were.

    Raises:
        ConfigurationError: the file cannot be read, holds no event, a field has a wrong type (file, line and field are
            named), or a later version wrote it.
    """
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigurationError(
            f"{str(path)!r} cannot be read ({type(error).__name__}: {error}). "
            "Give a file that the monitor wrote, the path that was passed as jsonl=."
        ) from error
    run = read_events(str(path), text)
    for note in run.notes:
        warnings.warn(f"{path}, {note}", MFUMonitorWarning, stacklevel=2)
    return run


def read_events(source: str, text: str) -> JsonlRun:
    """The same from text; ``source`` is named in messages."""
    events, notes = [], []
    readings: list[UtilizationReading] = []
    records: list[StepRecord] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        values = _loads(line)
        if values is None:
            notes.append(f"line {number} is cut off and left out: the run was killed while it wrote, or still writes.")
            continue
        where = f"{source}, line {number}"
        event = _event(where, values)
        events.append(event)
        if event.kind == "reading":
            readings.append(_made(UtilizationReading, event.payload, where))
        elif event.kind == "record":
            records.append(_made(StepRecord, event.payload.get("record", event.payload), where))
    if notes and not events:
        raise _not_an_event(f"{source}, line 1", "no line of it is JSON")
    return JsonlRun(events=tuple(events), readings=tuple(readings), records=tuple(records), notes=tuple(notes))


def _loads(line: str) -> Any:
    """None for what is not JSON, or nested deeper than any event is; another writer's NaN is unknown."""
    try:
        return json.loads(line, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None


def _made(kind: type[_Made], payload: Any, where: str) -> _Made:
    try:
        return kind.from_dict(payload)
    except (ConfigurationError, ArithmeticError) as error:
        raise ConfigurationError(f"{where}: {error}. Give a file that was written through jsonl=, unedited.") from error


def _writable(path: str | Path) -> Path:
    target = Path(path).expanduser()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.open("a", encoding="utf-8").close()
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(
            f"jsonl={str(path)!r} cannot be written ({type(error).__name__}: {reason}). Give the "
            "path of a file, in a directory where this process may write, for example jsonl='runs/mfu.jsonl'."
        ) from error
    return target


def _ends_within_a_line(path: Path) -> bool:
    if not path.is_file() or not path.stat().st_size:  # a pipe has no end to look at
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _to_json(event: Event) -> dict[str, Any]:
    return {
        "schema": JSONL_SCHEMA_VERSION,
        "kind": event.kind,
        "step": event.step,
        "title": event.title,
        "text": event.text,
        "metrics": _finite(event.metrics),
        "payload": _finite(event.payload),
    }


def _finite(value: Any) -> Any:
    """Not-a-number and infinity are not JSON: they are unknown, which is null."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _event(where: str, values: Any) -> Event:
    is_event = isinstance(values, dict) and {"schema", "kind", "step"} <= values.keys()
    if not is_event or not isinstance(values["schema"], int):
        raise _not_an_event(where, "an object with the keys 'schema', 'kind' and 'step' was expected")
    if values["schema"] > JSONL_SCHEMA_VERSION:
        raise ConfigurationError(
            f"{where}: schema version {values['schema']} was written by a later mfu-monitor; this one reads up to "
            f"{JSONL_SCHEMA_VERSION}. Upgrade mfu-monitor to read the file."
        )
    kept = {name: values[name] for name, kind in _EVENT_FIELDS.items() if isinstance(values.get(name), kind)}
    wrong = next((name for name in _EVENT_FIELDS if values.get(name) is not None and name not in kept), None)
    if wrong is not None or not {"kind", "step"} <= kept.keys():
        name = wrong or "step"
        raise _not_an_event(where, f"{name} is {short(values[name])}; expected {_EVENT_FIELDS[name].__name__}")
    numbers = kept.get("metrics", {})
    return Event(**{**kept, "metrics": {name: v for name, v in numbers.items() if isinstance(v, int | float)}})


_EVENT_FIELDS: Mapping[str, type] = {
    "kind": str,
    "step": int,
    "metrics": dict,
    "payload": dict,
    "text": str,
    "title": str,
}


def _not_an_event(where: str, seen: str) -> ConfigurationError:
    return ConfigurationError(
        f"{where}: not an event of mfu-monitor ({seen}). Give a file that was written through jsonl=, unedited."
    )

"""Events as JSON lines: append-only, one event a line, readable while the run goes on and after a crash."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar

from mfu_monitor.counting.step_record import StepRecord
from mfu_monitor.errors import ConfigurationError, MFUMonitorWarning
from mfu_monitor.sinks.base import Event
from mfu_monitor.utilization import UtilizationReading

__all__ = ["JSONL_SCHEMA_VERSION", "JsonlRun", "JsonlSink", "read_jsonl"]

_Made = TypeVar("_Made")

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


def read_jsonl(path: str | Path) -> JsonlRun:
    """Read a file that ``JsonlSink`` wrote.

    A last line that was cut off (a run that was killed, or one that is writing now) is left out with a warning.

    Args:
        path: the file.

    Returns:
        Its events, with the readings and the records of counted steps as the frozen records they were.

    Raises:
        ConfigurationError: the file cannot be read, a line is not an event, or a later version wrote it.
    """
    events = tuple(_events(Path(path)))
    return JsonlRun(
        events=events,
        readings=tuple(_made(UtilizationReading.from_dict, path, e) for e in events if e.kind == "reading"),
        records=tuple(_made(_record, path, e) for e in events if e.kind == "record"),
    )


def _made(make: Callable[[Mapping[str, Any]], _Made], path: str | Path, event: Event) -> _Made:
    try:
        return make(event.payload)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{path}: the {event.kind} of step {event.step} is not complete ({type(error).__name__}: {error}). "
            "Give a file that was written through jsonl=, unedited."
        ) from error


def _record(payload: Mapping[str, Any]) -> StepRecord:
    return StepRecord.from_dict(dict(payload.get("record", payload)))


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
    """Not-a-number and infinity are no JSON: they are unknown, which is null."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _events(path: Path) -> Iterator[Event]:
    lines = _lines(path)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line, parse_constant=lambda _: None)  # another writer's NaN is unknown
        except json.JSONDecodeError as error:
            if number == len(lines):
                warnings.warn(_cut_off(path, number), MFUMonitorWarning, stacklevel=4)
                return
            raise _not_an_event(path, number, str(error)) from error
        yield _event(path, number, values)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{str(path)!r} cannot be read ({type(error).__name__}: {error}). "
            "Give a file that the monitor wrote, the path that was passed as jsonl=."
        ) from error


def _event(path: Path, number: int, values: Any) -> Event:
    is_event = isinstance(values, dict) and {"schema", "kind", "step"} <= values.keys()
    if not is_event or not isinstance(values["schema"], int):
        raise _not_an_event(path, number, "an object with the keys 'schema', 'kind' and 'step' was expected")
    if values["schema"] > JSONL_SCHEMA_VERSION:
        raise ConfigurationError(
            f"{path}, line {number}: schema version {values['schema']} was written by a later mfu-monitor; this one "
            f"reads up to {JSONL_SCHEMA_VERSION}. Upgrade mfu-monitor to read the file."
        )
    return Event(
        kind=values["kind"],
        step=values["step"],
        metrics=values.get("metrics", {}),
        payload=values.get("payload", {}),
        text=values.get("text", ""),
        title=values.get("title", ""),
    )


def _not_an_event(path: Path, number: int, seen: str) -> ConfigurationError:
    return ConfigurationError(
        f"{path}, line {number}: not an event of mfu-monitor ({seen}). "
        "Give a file that was written through jsonl=, unedited."
    )


def _cut_off(path: Path, number: int) -> str:
    return f"{path}, line {number} is cut off and left out: the run is still writing, or was killed while it wrote."

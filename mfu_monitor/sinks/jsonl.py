"""Events as JSON lines: append-only, one event a line, readable while the run goes on and after a crash."""

from __future__ import annotations

import json
import math
import os
import stat
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from typing import Any, TypeVar

from mfu_monitor.counting.plain_types import PlainTypes
from mfu_monitor.counting.step_record import StepRecord
from mfu_monitor.errors import ConfigurationError, MFUMonitorWarning
from mfu_monitor.sinks.base import Event
from mfu_monitor.sinks.behind import WriteBehind
from mfu_monitor.utilization import UtilizationReading

__all__ = ["JSONL_SCHEMA_VERSION", "JsonlRun", "JsonlSink", "is_of_other_rank", "path_of_rank", "read_jsonl"]

_Made = TypeVar("_Made", bound=PlainTypes)

JSONL_SCHEMA_VERSION = 1
"""Raised when a key changes its meaning; new keys alone do not raise it."""


class JsonlSink:
    """Appends each event to a file as one JSON object, from a thread of its own.

    A line is written by one call of the system, so that several ranks or processes may share a file; ``run_id`` and
    ``rank`` in each line tell them apart. What the system refuses (a full disk, a pipe without a reader) is tried
    again, and a file or directory that was deleted is made anew, with one warning; training never waits for it.

    Args:
        path: the file; its directory is made if needed. An existing file is continued.

    Raises:
        ConfigurationError: the path cannot be written.

    Example:
        >>> monitor = mm.Monitor(model, sinks=[JsonlSink("runs/mfu.jsonl")])
        >>> read_jsonl("runs/mfu.jsonl").readings[-1].mfu
    """

    stays_on_thread = True  # it has one of its own

    def __init__(self, path: str | Path) -> None:
        self.path = _writable(path)
        self._start()

    def _start(self) -> None:
        self._file = _Lines(self.path)
        self._behind = WriteBehind(self._file.write, f"jsonl={str(self.path)!r}")
        self._file.on_trouble = self._behind.note

    def emit(self, event: Event) -> None:
        """Append one line."""
        self._behind.put((json.dumps(_to_json(event), allow_nan=False) + "\n").encode())

    def close(self) -> None:
        """Write what waits and close the file; a later event opens it again."""
        self._behind.close()
        self._file.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}  # an open file and a thread cannot travel to a spawned process

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path = state["path"]
        self._start()


class _Lines:
    """A file that lines are appended to, each whole: what was cut short is gone on with, or ended first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._line, self._sent = b"", 0
        self._is_within_a_line = False
        self.on_trouble: Callable[[str], None] = lambda _: None

    def write(self, line: bytes) -> None:
        """Append one line; after an OSError call it again with the same one."""
        descriptor = self._opened()
        if line is not self._line or not self._sent:
            if self._is_within_a_line:
                os.write(descriptor, b"\n")
                self._is_within_a_line = False
            self._line, self._sent = line, 0
        while self._sent < len(line):
            self._sent += os.write(descriptor, line[self._sent :])
            self._is_within_a_line = self._sent < len(line)
        self._line, self._sent = b"", 0

    def close(self) -> None:
        """May be called again."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _opened(self) -> int:
        if self._descriptor is not None and not self._is_there(self._descriptor):
            self.on_trouble("it was deleted or replaced while the run wrote it, and is begun anew")
            self.close()
        if self._descriptor is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._sent = 0
            # A run that was killed while it wrote left half a line.
            self._is_within_a_line = _ends_within_a_line(self._path)
            self._descriptor = os.open(self._path, _APPEND | (_NO_WAIT if _is_pipe(self._path) else 0), 0o666)
        return self._descriptor

    def _is_there(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self._path.stat())
        except OSError:
            return False


_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)


def path_of_rank(path: str | os.PathLike[str], rank: int) -> Path:
    """Where a rank writes: rank 0 to the file itself, with the world's readings, the others beside it.

    Example:
        >>> path_of_rank("runs/mfu.jsonl", 3)
        PosixPath('runs/mfu.rank3.jsonl')
    """
    target = Path(path)
    is_special = target.exists() and not target.is_file()  # a pipe, a device
    return target if rank == 0 or is_special else target.with_name(f"{target.stem}.rank{rank}{target.suffix}")


def is_of_other_rank(path: Path) -> bool:
    """Whether another file beside this one holds the same run's readings of the world."""
    stem, _, rank = path.stem.rpartition(".rank")
    return bool(stem) and rank.isdigit() and path.with_name(stem + path.suffix).is_file()


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonlRun:
    """What a JSONL file holds, in the order written."""

    events: tuple[Event, ...] = ()
    readings: tuple[UtilizationReading, ...] = ()
    records: tuple[StepRecord, ...] = ()
    notes: tuple[str, ...] = ()
    """Lines that were left out, and why."""

    def of_rank(self, rank: int) -> JsonlRun:
        """What one rank wrote."""
        parts = [part for part in self.writers if part.events[0].rank == rank]
        if len(parts) == len(self.writers):
            return self
        return JsonlRun(
            events=tuple(event for part in parts for event in part.events),
            readings=tuple(reading for part in parts for reading in part.readings),
            records=tuple(record for part in parts for record in part.records),
            notes=self.notes,
        )

    @property
    def writers(self) -> tuple[JsonlRun, ...]:
        """The same by who wrote it, in the order of first lines: several ranks, runs or processes may share a file."""
        parts: dict[tuple[str, int], tuple[list[Event], list[UtilizationReading], list[StepRecord]]] = {}
        readings, records = iter(self.readings), iter(self.records)
        for event in self.events:
            part = parts.setdefault((event.run_id, event.rank), ([], [], []))
            part[0].append(event)
            if event.kind == "reading":
                part[1].append(next(readings))
            elif event.kind == "record":
                part[2].append(next(records))
        return tuple(JsonlRun(events=tuple(e), readings=tuple(r), records=tuple(c)) for e, r, c in parts.values())

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
        if not _is_pipe(target):  # to open one waits for its reader
            target.open("a", encoding="utf-8").close()
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(
            f"jsonl={str(path)!r} cannot be written ({type(error).__name__}: {reason}). Give the "
            "path of a file, in a directory where this process may write, for example jsonl='runs/mfu.jsonl'."
        ) from error
    return target


def _is_pipe(path: Path) -> bool:
    try:
        return stat.S_ISFIFO(path.stat().st_mode)
    except OSError:
        return False


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
        "run_id": event.run_id,
        "rank": event.rank,
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
    "run_id": str,
    "rank": int,
    "metrics": dict,
    "payload": dict,
    "text": str,
    "title": str,
}


def _not_an_event(where: str, seen: str) -> ConfigurationError:
    return ConfigurationError(
        f"{where}: not an event of mfu-monitor ({seen}). Give a file that was written through jsonl=, unedited."
    )

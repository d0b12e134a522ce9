"""Logs of other tools and our own as columns of numbers: CSV, JSON lines, TensorBoard. Nonsense is refused by line."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mfu_monitor.cli.audit.claims import LogSeries
from mfu_monitor.cli.units import SUFFIXES, parse_quantity
from mfu_monitor.errors import ConfigurationError
from mfu_monitor.utilization import UtilizationReading

__all__ = ["Cell", "ColumnNames", "Log", "read_log", "read_mfu", "read_seconds", "series_of"]

KNOWN_TOKENS_PER_S = (
    "throughput/tokens_per_s",
    "throughput/device/tokens_per_s",
    "train/tokens_per_sec",
    "tokens_per_s",
    "tokens_per_sec",
    "tokens_per_second",
    "tokens/s",
    "tok/s",
    "tok_per_sec",
    "throughput/tokens_per_sec",
    "throughput/device/tokens_per_sec",
)
KNOWN_STEP_S = ("step_time/total_s", "step_time_s", "step_s", "step_time", "iter_time", "iteration_time", "time/step")
KNOWN_MFU = ("utilization/mfu", "mfu", "train/mfu", "train/device/mfu", "device/mfu", "perf/mfu", "mfu(%)")
KNOWN_STEPS = ("step", "global_step", "trainer/global_step", "iteration", "iter", "_step")
KNOWN_TIMES = ("timestamp", "_timestamp", "wall_time", "time_s", "_runtime")
"""Names that our own and common loggers write; anything else must be named on the command line."""

_PERCENT_WORDS = ("percent", "pct", "%")
_LARGEST_FRACTION = 1.5
"""Above it a number may be a percentage (46.2) or an impossible fraction (152% as 1.52): the unit must be given."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One value as it stands in the file, with the line (or step) that it stands in."""

    line: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnNames:
    """Columns (or tags) by what they hold; None: one of the known names, if it is there."""

    tokens_per_s: str | None = None
    step_s: str | None = None
    mfu: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """A file as columns. Numbers are read later, so that only columns in use are judged."""

    source: str
    where: str = "line"
    """What a cell's number counts: ``"line"``, or ``"step"`` for TensorBoard, which has no lines."""
    columns: Mapping[str, tuple[Cell, ...]] = field(default_factory=dict)
    readings: tuple[UtilizationReading, ...] = ()
    """Of our own log; they know device, precision and ranks."""


def read_log(path: Path) -> Log:
    """A CSV or JSON lines file, or a TensorBoard directory or file.

    Raises:
        ConfigurationError: it is not there, empty, or none of these.
    """
    if not path.exists():
        raise ConfigurationError(f"{path} does not exist; give a CSV or JSON lines file or a TensorBoard directory")
    if path.is_dir() or "tfevents" in path.name:
        return _read_tensorboard(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{path} cannot be read as text ({type(error).__name__}); give a CSV or JSON lines file in UTF-8, or a "
            "TensorBoard directory"
        ) from None
    if not text.strip():
        raise ConfigurationError(f"{path} is empty; expected a header and at least one row of numbers")
    if text.lstrip().startswith("["):
        raise ConfigurationError(
            f"{path} is a JSON array; expected one object a line, which `jq -c '.[]' {path.name}` makes of it"
        )
    log = _read_jsonl(path, text) if text.lstrip().startswith("{") else _read_csv(path, text)
    if not any(log.columns.values()):
        raise ConfigurationError(f"{path} has no row of numbers below its header; is the run still starting?")
    return log


def _read_csv(path: Path, text: str) -> Log:
    lines = text.splitlines()
    first = next(line for line in lines if line.strip())
    delimiter = max(",;\t", key=first.count)
    reader = csv.reader(lines, delimiter=delimiter)
    header: list[str] = []
    columns: dict[str, list[Cell]] = {}
    for row in reader:
        if not any(cell.strip() for cell in row):
            continue
        if not header:
            header = _distinct([name.strip() for name in row])
            columns = {name: [] for name in header}
            continue
        for name, text_of_cell in zip(header, row, strict=False):
            columns[name].append(Cell(reader.line_num, text_of_cell.strip()))
    return Log(source=str(path), columns={name: tuple(cells) for name, cells in columns.items()})


def _distinct(header: list[str]) -> list[str]:
    """Names that occur twice get their column's number, so that neither column is taken for the other."""
    return [name if header.count(name) == 1 else f"{name} (column {i})" for i, name in enumerate(header, start=1)]


def _read_jsonl(path: Path, text: str) -> Log:
    columns: dict[str, list[Cell]] = {}
    readings: list[UtilizationReading] = []
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        values = _object(path, number, line, is_last=number == len(lines))
        if {"schema", "kind", "payload"} <= values.keys():
            values = _own_event(path, number, values, readings)
        for name, value in _flat(values):
            columns.setdefault(name, []).append(Cell(number, value))
    cells = {name: tuple(column) for name, column in columns.items()}
    return Log(source=str(path), columns=cells, readings=tuple(readings))


def _object(path: Path, number: int, line: str, *, is_last: bool) -> dict[str, Any]:
    if not line.strip():
        return {}
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        if is_last and number > 1:
            return {}  # a run that is still writing, or was killed while it wrote
        raise ConfigurationError(f"{path}, line {number}: not JSON ({error.msg}); expected one object a line") from None
    if not isinstance(values, dict):
        raise ConfigurationError(f'{path}, line {number}: expected an object such as {{"step": 10, "mfu": 0.41}}')
    return values


def _own_event(path: Path, number: int, event: Mapping[str, Any], readings: list[UtilizationReading]) -> dict[str, Any]:
    """A reading of ours: its metrics, and its MFU even where that was withheld from the metrics."""
    if event["kind"] != "reading":
        return {}
    try:
        reading = UtilizationReading.from_dict(event["payload"])
    except (KeyError, TypeError, AttributeError, ConfigurationError) as error:
        raise ConfigurationError(f"{path}, line {number}: a reading of ours was expected ({error})") from None
    reading = _with_withheld(reading)
    readings.append(reading)
    return {**event.get("metrics", {}), "step": event.get("step"), "utilization/mfu": reading.mfu}


def _with_withheld(reading: UtilizationReading) -> UtilizationReading:
    """The monitor writes no impossible MFU, but all that it was made of: FLOPs, seconds and peak."""
    window, ranks = reading.window, max(reading.window.world_size, 1)
    flops = window.world_model_flops or (window.model_flops or 0) * ranks
    peak = reading.world_peak_flops_per_s or (reading.peak_flops_per_s or 0.0) * ranks
    is_timed = window.invalid_reason is None and window.elapsed_s > 0
    if reading.mfu is not None or not (flops and peak and is_timed):
        return reading
    mfu = flops / (window.elapsed_s * peak)
    hardware = window.hardware_flops / window.model_flops if window.hardware_flops and window.model_flops else None
    return dataclasses.replace(reading, mfu=mfu, hfu=mfu * hardware if hardware else None, reason=None)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested objects as ``a/b``; texts stay texts, nulls are left out."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
        elif value is not None and not isinstance(value, list):
            yield f"{prefix}{name}", str(value)


def _read_tensorboard(path: Path) -> Log:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        raise ConfigurationError(
            f"{path} is a TensorBoard log and tensorboard is not installed; pip install 'tensorboard>=2.16', or export "
            "the run as CSV"
        ) from None
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*tfevents*") if file.is_file())
    if not files:
        raise ConfigurationError(f"{path} holds no TensorBoard event file; give the directory of one run")
    directories = sorted({file.parent for file in files})
    if path.is_dir() and len(directories) > 1:
        names = ", ".join(str(d) for d in directories[:5])
        raise ConfigurationError(f"{path} holds {len(directories)} runs; give one of them: {names}")
    events = EventAccumulator(str(path if path.is_file() else directories[0]), size_guidance={"scalars": 0}).Reload()
    columns: dict[str, tuple[Cell, ...]] = {}
    times: dict[int, float] = {}
    for tag in events.Tags()["scalars"]:
        scalars = events.Scalars(tag)
        columns[tag] = tuple(Cell(scalar.step, repr(float(scalar.value))) for scalar in scalars)
        times.update((scalar.step, scalar.wall_time) for scalar in scalars)
    if not columns:
        raise ConfigurationError(f"{path} holds no scalar; is the run still starting?")
    # In the order of time: steps that a resumed run wrote again are no clock that ran backwards.
    in_order = sorted(times.items(), key=lambda pair: pair[1])
    columns.setdefault("wall_time", tuple(Cell(step, repr(time)) for step, time in in_order))
    return Log(source=str(path), where="step", columns=columns)


def series_of(
    log: Log, names: ColumnNames, *, gpus: int = 1, mfu_unit: str | None = None, skip_invalid: bool = False
) -> LogSeries:
    """The columns that an audit needs, as numbers.

    Args:
        log: the file.
        names: columns by name; those left out are found by their known names.
        gpus: multiplies a rate that is of one device by its name (``.../device/...``).
        mfu_unit: ``"fraction"`` or ``"percent"``; None: by the name and the size of the numbers.
        skip_invalid: leave rows without a usable number out, and count them, instead of refusing.

    Raises:
        ConfigurationError: a column is not there (with those that are), or a cell is no number (with its line).
    """
    tokens = _column(log, names.tokens_per_s, KNOWN_TOKENS_PER_S, "--tokens-per-s-column")
    step_s = _column(log, names.step_s, KNOWN_STEP_S, "--step-time-column")
    mfu = _column(log, names.mfu, KNOWN_MFU, "--mfu-column")
    if not (tokens or step_s or mfu):
        raise ConfigurationError(
            f"{log.source} has no column of tokens/s, step time or MFU by a known name. It has: {_listed(log)}. Name "
            "one with --tokens-per-s-column, --step-time-column or --mfu-column"
        )
    if log.readings and mfu == "utilization/mfu":
        mfu_unit = mfu_unit or "fraction"  # our own: never a percentage
    numbers = _Numbers(log, skip_invalid)
    fractions = numbers.of(mfu, read_mfu)
    rates = numbers.of(tokens, _read_quantity)
    seconds = numbers.of(step_s, read_seconds)
    per_device = gpus if tokens and "device/" in tokens else 1
    return LogSeries(
        source=log.source,
        steps=_steps(log, numbers, mfu or tokens or step_s or ""),
        tokens_per_s=tuple(value * per_device for value in rates),
        step_s=seconds,
        mfu=_as_fractions(log, mfu, fractions, mfu_unit),
        timestamps_s=_times(log),
        readings=log.readings,
        skipped_rows=numbers.skipped,
    )


def _column(log: Log, given: str | None, known: Iterable[str], option: str) -> str | None:
    if given is None:
        lower = {name.lower(): name for name in log.columns}
        return next((lower[name] for name in known if name in lower), None)
    if given not in log.columns:
        raise ConfigurationError(f"{option} {given!r} is not in {log.source}. It has: {_listed(log)}")
    return given


def _listed(log: Log, most: int = 30) -> str:
    names = sorted(log.columns)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


class _Numbers:
    """Reads columns as numbers; an empty cell is no number and no fault, anything else that is none is refused."""

    def __init__(self, log: Log, skip_invalid: bool) -> None:
        self.log = log
        self.skip_invalid = skip_invalid
        self.skipped = 0
        self._read: dict[str, dict[int, float]] = {}

    def of(self, column: str | None, parse: Callable[[str], float]) -> tuple[float, ...]:
        """The column's numbers, empty cells left out."""
        if column is None:
            return ()
        read = ((i, self._number(column, cell, parse)) for i, cell in enumerate(self.log.columns[column]))
        values = {i: value for i, value in read if value is not None}
        self._read[column] = values
        if not values:
            raise ConfigurationError(
                f"{self.log.source}: column {column!r} has no number in any row; expected one at least"
            )
        return tuple(values.values())

    def rows(self, column: str) -> list[int]:
        """Indices of the rows of a column, read before, that hold a number."""
        return list(self._read[column])

    def _number(self, column: str, cell: Cell, parse: Callable[[str], float]) -> float | None:
        if not cell.text:
            return None
        try:
            return parse(cell.text)
        except ValueError as error:
            if self.skip_invalid:
                self.skipped += 1
                return None
            raise ConfigurationError(self._refusal(column, cell, str(error))) from None

    def _refusal(self, column: str, cell: Cell, expected: str) -> str:
        return (
            f"{self.log.source}, {self.log.where} {cell.line}, column {column!r}: {cell.text!r} is no usable number; "
            f"{expected}. --skip-invalid leaves such rows out"
        )


_EXPECTED_NUMBER = f"expected a number above zero with an optional suffix {', '.join(SUFFIXES)}, such as 3000 or 3k"


def _read_quantity(text: str) -> float:
    try:
        return parse_quantity(text, name="")
    except ConfigurationError:
        raise ValueError(_EXPECTED_NUMBER) from None


_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0, "": 1.0}


def read_seconds(text: str) -> float:
    """``1.25``, ``1.25s``, ``250ms``; above zero."""
    number = text.rstrip("nuµmsechi ").strip()
    unit = text[len(number) :].strip()
    try:
        value = float(number) * _SECONDS[unit]
    except (KeyError, ValueError):
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ValueError("expected a time above zero in seconds, such as 1.25, 1.25s or 250ms")
    return value


def read_mfu(text: str) -> float:
    """``0.462`` or ``46.2%``; zero and above, since a log may begin with 0."""
    bare = text.removesuffix("%").strip()
    try:
        value = float(bare)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise ValueError("expected a fraction such as 0.462, or a percentage such as 46.2%")
    return value / 100 if bare != text.strip() else value


def _as_fractions(log: Log, column: str | None, values: tuple[float, ...], unit: str | None) -> tuple[float, ...]:
    """Percentages divided by 100; what could be either is refused."""
    if column is None:
        return ()
    has_sign = any(cell.text.endswith("%") for cell in log.columns[column])
    if unit == "percent" or (unit is None and not has_sign and any(word in column.lower() for word in _PERCENT_WORDS)):
        return tuple(value / 100 for value in values)
    largest = max(values)
    if unit is None and not has_sign and largest > _LARGEST_FRACTION:
        raise ConfigurationError(
            f"{log.source}, column {column!r}: its numbers go up to {largest:.4g}, which may be a percentage or an "
            "impossible fraction; say which with --mfu-unit percent or --mfu-unit fraction"
        )
    return values


def _steps(log: Log, numbers: _Numbers, main: str) -> tuple[float, ...]:
    """The steps of the main column's rows; counted from 0 where the log has none."""
    rows, cells = numbers.rows(main), log.columns[main]
    if log.where == "step":
        return tuple(float(cells[i].line) for i in rows)
    column = _column(log, None, KNOWN_STEPS, "")
    by_line = {cell.line: cell.text for cell in log.columns[column]} if column else {}
    try:
        return tuple(float(by_line[cells[i].line]) for i in rows)
    except (KeyError, ValueError):
        return tuple(float(i) for i in range(len(rows)))


def _times(log: Log) -> tuple[float, ...]:
    column = _column(log, None, KNOWN_TIMES, "")
    if column is None:
        return ()
    try:
        return tuple(float(cell.text) for cell in log.columns[column] if cell.text)
    except ValueError:
        return ()  # a date as text: nothing here depends on it

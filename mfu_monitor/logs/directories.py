"""Logs that are directories or binary files: TensorBoard's events, MLflow's file store, W&B's offline history."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mfu_monitor.errors import ConfigurationError
from mfu_monitor.logs.layouts_of_text import Table

__all__ = ["event_folders", "read_directory", "tensorboard_scalars"]


def read_directory(path: Path) -> tuple[Table, str]:
    """Its columns, and what the number of a cell counts.

    Raises:
        ConfigurationError: it holds no run, or several.
    """
    if path.suffix == ".wandb":
        return _wandb(path), "line"
    if path.is_dir() and (path / "metrics").is_dir():
        return _mlflow(path), "step"
    if path.is_dir() and not event_folders(path):
        return _inside(path)
    return _tensorboard(path), "step"


def _inside(path: Path) -> tuple[Table, str]:
    """A directory above one run of W&B or MLflow."""
    found = sorted(path.rglob("*.wandb")) or sorted(p.parent for p in path.rglob("metrics") if p.is_dir())
    if len(found) == 1:
        return read_directory(found[0])
    if found:
        raise ConfigurationError(f"{path} holds {len(found)} runs; give one of them: {_listed(found)}")
    files = [f for pattern in ("*.jsonl", "*.csv", "*.log", "trainer_state.json") for f in path.glob(pattern)]
    also = f"; give one of its files: {_listed(files)}" if files else ""
    raise ConfigurationError(
        f"{path} holds no TensorBoard event file, no MLflow run and no W&B history"
        f"{also or '; give the directory of one run'}"
    )


def _listed(paths: list[Path]) -> str:
    return ", ".join(str(p) for p in sorted(paths)[:5])


# TensorBoard.


def event_folders(path: Path) -> list[Path]:
    """Directories with event files, at any depth."""
    return sorted({file.parent for file in path.rglob("*tfevents*") if file.is_file()}) if path.is_dir() else []


def tensorboard_scalars(path: Path) -> dict[str, list[Any]]:
    """The scalar events of an event file or of a directory that holds one run's, by tag.

    Raises:
        ConfigurationError: tensorboard is not installed.
    """
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        raise ConfigurationError(
            f"{path} is a TensorBoard log and tensorboard is not installed; pip install 'tensorboard>=2.16', or export "
            "the run as CSV"
        ) from None
    events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
    return {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}


def _tensorboard(path: Path) -> Table:
    folders = event_folders(path)
    if len(folders) > 1:
        raise ConfigurationError(f"{path} holds {len(folders)} runs; give one of them: {_listed(folders)}")
    table = Table(layout="TensorBoard")
    times: dict[int, float] = {}
    for tag, scalars in tensorboard_scalars(folders[0] if folders else path).items():
        table.rows = max(table.rows, len(scalars))
        for scalar in scalars:
            table.add(scalar.step, tag, repr(float(scalar.value)))
            times[scalar.step] = scalar.wall_time
    if not table.columns:
        raise ConfigurationError(f"{path} holds no scalar; is the run still starting?")
    # In the order of time: steps that a resumed run wrote again do not mean a clock that ran backwards.
    for step, time in sorted(times.items(), key=lambda pair: pair[1]):
        table.add(step, "wall_time", repr(time))
    return table


# MLflow.


def _mlflow(path: Path) -> Table:
    """``metrics/NAME`` with a line ``timestamp value step`` for each value."""
    table = Table(layout="MLflow file store")
    for file in sorted(p for p in (path / "metrics").rglob("*") if p.is_file()):
        name = file.relative_to(path / "metrics").as_posix()
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            parts = line.split()
            if len(parts) < 2:
                table.unusable.append((0, f"{name}: {line!r}"))
                continue
            step = int(parts[2]) if len(parts) > 2 and parts[2].lstrip("-").isdigit() else 0
            table.add(step, name, parts[1])
            table.rows += 1
    if not table.columns:
        raise ConfigurationError(f"{path / 'metrics'} holds no metric; is the run still starting?")
    return table


# W&B.

_BLOCK = 32768
_HISTORY, _ITEM, _KEY, _NESTED_KEY, _VALUE = 2, 1, 1, 2, 16
"""Field numbers of wandb/proto/wandb_internal.proto: Record.history, HistoryRecord.item, HistoryItem's."""


def _wandb(path: Path) -> Table:
    """The records of an offline run: a LevelDB log of protobuf messages; those of history are read."""
    raw = path.read_bytes()
    if raw[:4] != b":W&B":
        raise ConfigurationError(f"{path} is not a W&B run file; export the history: run.history().to_csv('log.csv')")
    table = Table(layout="W&B offline history")
    for number, record in enumerate(_records(raw), start=1):
        try:
            items = [i for f, history in _fields(record) if f == _HISTORY for f2, i in _fields(history) if f2 == _ITEM]
            for item in items:
                _add_item(table, number, item)
        except (IndexError, struct.error, TypeError):
            table.unusable.append((number, "a damaged record"))
            continue
        table.rows += bool(items)
    if not table.columns:
        raise ConfigurationError(
            f"{path} holds no history that can be read; export it: run.history().to_csv('log.csv')"
        )
    return table


def _add_item(table: Table, number: int, item: bytes) -> None:
    fields = list(_fields(item))
    keys = [v.decode() for f, v in fields if f in (_KEY, _NESTED_KEY)]
    for field, value in fields:
        if field == _VALUE and keys and isinstance(plain := json.loads(value), int | float | str):
            table.add(number, "/".join(keys), str(plain))


def _records(raw: bytes) -> Iterator[bytes]:
    """LevelDB's log: blocks of 32 KiB, records whole or in parts, each behind crc (4), length (2) and type (1)."""
    at, parts = 7, b""
    while at + 7 <= len(raw):
        left = _BLOCK - at % _BLOCK
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", raw, at + 4)
        if kind == 0 or at + 7 + length > len(raw):
            return
        parts += raw[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Protobuf's fields that hold bytes: number and content."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == 0:
            _, at = _varint(message, at)
        elif kind == 2:
            length, at = _varint(message, at)
            yield tag >> 3, message[at : at + length]
            at += length
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise TypeError(kind)


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value, shift = 0, 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at

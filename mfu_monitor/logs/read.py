"""The one reader of logs: a file, a directory or standard input to columns with their meaning, and our own records."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mfu_monitor.errors import ConfigurationError
from mfu_monitor.logs.columns import Column, Overrides, recognise, words_of
from mfu_monitor.logs.directories import read_directory
from mfu_monitor.logs.layouts_of_text import Table, read_layout
from mfu_monitor.logs.sources import STDIN, read_text
from mfu_monitor.sinks.jsonl import JsonlRun, read_events
from mfu_monitor.utilization import UtilizationReading

__all__ = ["Log", "is_ours", "read_log"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """A tool whose logs are known by their columns' names, and what its columns mean beyond their names."""

    name: str
    marks: tuple[str, ...]
    """Words that all must be among the columns' names."""
    scopes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """By quantity; the tool's source says so."""
    convention: str = ""
    advice: str = ""
    """What to do where nothing of it can be judged."""


_PER_DEVICE = {"tokens_per_s": "device", "flops_per_s": "device"}
_OF_ALL = {"tokens_per_s": "world", "samples_per_s": "world", "flops_per_s": "device"}
WRITERS = (
    Writer(name="Megatron-LM", marks=("elapsed time per iteration (ms)",), convention="Megatron-LM's own formula"),
    Writer(name="MaxText", marks=("tflop/s/device",), convention="MaxText's own formula"),
    Writer(name="llm-foundry", marks=("# gpus", "throughput (t/s/gpu)"), scopes=_OF_ALL, convention="palm"),
    Writer(name="torchtitan", marks=("tps", "tflops"), scopes=_PER_DEVICE, convention="torchtitan's own formula"),
    Writer(name="torchtitan", marks=("throughput(tps)",), scopes=_PER_DEVICE, convention="torchtitan's own formula"),
    Writer(name="nanochat", marks=("dt", "tok/sec", "mfu"), scopes=_OF_ALL, convention="palm"),
    Writer(name="nanoGPT", marks=("iter", "time", "mfu"), convention="palm"),
    Writer(name="llm.c", marks=("tok/s", "bf16 mfu"), scopes=_OF_ALL),
    Writer(name="llm.c's main.log", marks=("s", "trl"),
           advice="it holds losses alone; give the console's output, which has the time of a step, MFU and tok/s"),
    Writer(name="OLMo", marks=("throughput/device/tps",), convention="palm"),
    Writer(name="Hugging Face Trainer", marks=("train runtime",), scopes=_OF_ALL, convention="6nd"),
    Writer(name="Lightning's ThroughputMonitor", marks=("device/items per sec",)),
    Writer(name="Lightning's ThroughputMonitor", marks=("train/device/items per sec",)),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """A log as columns in SI units.

    Example:
        >>> log = read_log(Path("train.log"))
        >>> log.format, log.column("mfu").median
    """

    source: str
    format: str
    """``"nanoGPT, console text"``: who wrote it, where that is known, and its layout."""
    where: str = "line"
    """What a cell's number counts: lines, or steps for TensorBoard and MLflow."""
    columns: tuple[Column, ...] = ()
    unused: tuple[str, ...] = ()
    """Names that mean nothing here: losses, learning rates."""
    texts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Device and precision, where the log names them."""
    writer: Writer | None = None
    readings: tuple[UtilizationReading, ...] = ()
    """Of our own log; they know device, precision and ranks."""
    run: JsonlRun | None = None
    rows: int = 0
    notes: tuple[str, ...] = ()

    def column(self, *quantities: str, scope: str | None = None) -> Column | None:
        """The fullest column of a quantity; the first of equals."""
        found = [c for c in self.columns if c.quantity in quantities and c.values and scope in (None, c.scope)]
        return max(found, key=lambda c: (len(c.values), not re.search(r"\bval|eval", c.name)), default=None)

    def constant(self, quantity: str) -> float | None:
        """The value of a column that has one: parameters, GPUs."""
        column = self.column(quantity)
        return column.values[-1] if column and len(set(column.values)) == 1 else None


def read_log(path: Path, overrides: Overrides | None = None) -> Log:
    """Read anybody's log; its format is recognised by its content.

    Args:
        path: a file, also packed; a TensorBoard, MLflow or W&B directory; ``-`` for standard input.
        overrides: what the user says of its columns.

    Raises:
        ConfigurationError: nothing that can be read, or a column was named that is not there.
    """
    overrides = overrides or Overrides()
    if path != STDIN and not path.exists():
        raise ConfigurationError(f"{path} does not exist; give a log's file, or - for standard input")
    if path != STDIN and (path.is_dir() or "tfevents" in path.name or path.suffix == ".wandb"):
        table, where = read_directory(path)
        return _log(str(path), table, overrides, where=where)
    text = read_text(path)
    if _OURS.search(text):
        return _own(path, text, overrides)
    return _log(str(path), read_layout(text), overrides)


_OURS = re.compile(r'^\s*\{(?=[^\n]*"schema"\s*:)(?=[^\n]*"kind"\s*:)[^\n]*"payload"\s*:', re.M)


def is_ours(path: Path) -> bool:
    """Whether a file was written through ``jsonl=``, by its first lines."""
    try:
        with path.open("rb") as file:
            return bool(_OURS.search(file.read(1 << 16).decode("utf-8", errors="replace")))
    except OSError:
        return False


def _log(source: str, table: Table, overrides: Overrides, *, where: str = "line", **more: Any) -> Log:
    _check_names(source, table, overrides)
    words = {re.sub(r"\s+", " ", words_of(name)) for name in table.columns}
    writer = next((w for w in WRITERS if all(mark in words for mark in w.marks)), None)
    columns = []
    for name, cells in table.columns.items():
        column = recognise(name, cells, overrides)
        if column is not None:
            columns.append(_as_written(column, writer, overrides))
    used = {column.name for column in columns}
    return Log(
        source=source,
        format=f"{writer.name}, {table.layout}" if writer else table.layout,
        where=where,
        columns=tuple(columns),
        unused=tuple(name for name in table.columns if name not in used),
        texts=_texts(table, columns),
        writer=writer,
        rows=table.rows,
        notes=(*table.notes, *_lost(table, columns, where)),
        **more,
    )


def _check_names(source: str, table: Table, overrides: Overrides) -> None:
    for flag, names in (("--ignore-column", overrides.ignore), ("--unit", overrides.units), ("", overrides.quantities)):
        for name in names:
            if name not in table.columns:
                listed = ", ".join(list(table.columns)[:30])
                raise ConfigurationError(f"{flag or 'column'} {name!r} is not in {source}. It has: {listed}")


def _as_written(column: Column, writer: Writer | None, overrides: Overrides) -> Column:
    """What the tool's source says where the name says nothing."""
    if writer is None:
        return column
    if not column.is_scope_stated and column.quantity in writer.scopes and overrides.per_gpu is None:
        # Still not stated: another tool may use the same few names.
        column = dataclasses.replace(column, scope=writer.scopes[column.quantity], scope_from=writer.name)
    if column.quantity in ("mfu", "hfu", "flops_per_s", "total_flops") and writer.convention:
        column = dataclasses.replace(column, convention=writer.convention)
    return column


def _texts(table: Table, columns: list[Column]) -> dict[str, str]:
    wanted = {c.quantity: c.name for c in columns if c.quantity in ("device_name", "precision")}
    found = {quantity: {text for _, text in table.columns[name] if text} for quantity, name in wanted.items()}
    return {quantity: next(iter(texts)) for quantity, texts in found.items() if len(texts) == 1}


def _lost(table: Table, columns: list[Column], where: str) -> list[str]:
    """What was left out, counted."""
    notes = []
    if table.unusable:
        line, why = table.unusable[0]
        notes.append(f"{len(table.unusable)} lines cannot be used, the first is {where} {line}: {why}")
    for column in columns:
        if column.unusable:
            line, text = column.unusable[0]
            notes.append(
                f"column {column.name!r}: {len(column.unusable)} cells are not usable numbers and are left out, the "
                f"first at {where} {line}: {text!r}"
            )
        if column.sentinels and column.quantity != "step":
            left_out = "" if column.values else "; the column is left out"
            total = column.sentinels + len(column.values)
            notes.append(f"column {column.name!r}: no value in {column.sentinels} of {total} cells{left_out}")
    return notes


# Our own.


def _own(path: Path, text: str, overrides: Overrides) -> Log:
    """Our own JSON lines: metrics by their public names, and MFU even where that was withheld from them."""
    run = read_events(str(path), text)
    rank = min((event.rank for event in run.events), default=0)  # what others of its world wrote, it has as well
    run = run.of_rank(rank)
    readings = tuple(with_withheld(reading) for reading in run.readings)
    table = Table(layout="JSON lines", rows=len(readings), notes=list(run.notes))
    for number, reading, event in zip(range(1, len(readings) + 1), readings, run.reading_events, strict=True):
        values = {**event.metrics, "step": event.step, "utilization/mfu": reading.mfu}
        for name, value in values.items():
            if value is not None:
                table.add(number, name, str(value))
    log = _log(str(path), table, overrides, readings=readings, run=run)
    columns = tuple(
        c if c.is_unit_stated else dataclasses.replace(c, is_unit_stated=True, note="") for c in log.columns
    )
    return dataclasses.replace(log, format="mfu-monitor, JSON lines", columns=columns)


def with_withheld(reading: UtilizationReading) -> UtilizationReading:
    """The monitor writes no impossible MFU, but all that it was made of: FLOPs, seconds and peak."""
    window, ranks = reading.window, max(reading.window.world_size, 1)
    flops = window.world_model_flops or (window.model_flops or 0) * ranks
    peak = reading.world_peak_flops_per_s or (reading.peak_flops_per_s or 0.0) * ranks
    is_timed = window.invalid_reason is None and window.elapsed_s > 0
    if reading.mfu is not None or not (flops and peak and is_timed):
        return reading
    mfu = flops / (window.rate_s * peak)
    hardware = window.hardware_flops / window.model_flops if window.hardware_flops and window.model_flops else None
    return dataclasses.replace(reading, mfu=mfu, hfu=mfu * hardware if hardware else None, reason=None)

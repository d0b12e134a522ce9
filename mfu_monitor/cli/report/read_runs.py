"""Find the logs of a run and read them: JSON lines as the monitor wrote them, or TensorBoard's files."""

from __future__ import annotations

import itertools
import math
import statistics
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mfu_monitor.alerts import Alert
from mfu_monitor.cli.report.foreign_runs import Model, read_foreign
from mfu_monitor.errors import ConfigurationError, MFUMonitorWarning
from mfu_monitor.logs.directories import event_folders, tensorboard_scalars
from mfu_monitor.logs.read import is_ours
from mfu_monitor.metric_names import FLOPS_PER_STEP, MFU, OF_READING, STEP_TIME, THROUGHPUT_MONITOR, TOTAL_S
from mfu_monitor.sinks.base import Event
from mfu_monitor.sinks.console import printable
from mfu_monitor.sinks.jsonl import JsonlRun, is_of_other_rank, read_jsonl
from mfu_monitor.timing.step_window import StepWindow
from mfu_monitor.utilization import UtilizationReading

__all__ = ["RunLog", "read_runs"]

_MFU_TAGS = (MFU, THROUGHPUT_MONITOR["mfu"])
"""Ours, and Lightning's ThroughputMonitor's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLog:
    """The readings and the alerts of one run, and the file or directory that they came from."""

    name: str
    source: str
    readings: tuple[UtilizationReading, ...]
    alerts: tuple[Alert, ...] = ()
    readings_before: tuple[int, ...] = ()
    """For each alert, the readings made until then."""
    format: str = ""
    """How a log of another tool was read; empty for ours."""
    claimed_mfu: float | None = None
    """The median of what another tool logged."""


def read_runs(path: Path, model: Model | None = None) -> list[RunLog]:
    """The runs under a path: our JSONL files or TensorBoard's at any depth, or anybody's log.

    Where a directory has both, the JSON lines are read: they hold more.

    Args:
        path: a file or a directory.
        model: parameters and device of runs that other tools logged.

    Raises:
        ConfigurationError: nothing there, or nothing in it that can be read.
    """
    if not path.exists():
        raise ConfigurationError(
            f"{str(path)!r} does not exist. Give the directory that the run logged to (it holds a .jsonl file of the "
            "monitor, or events.out.tfevents... files), or the .jsonl file itself."
        )
    found = [path] if path.is_file() else sorted(path.rglob("*.jsonl"))
    files = [file for file in found if file == path or not is_of_other_rank(file)]  # ranks of one run are one run
    ours = [file for file in files if is_ours(file)]
    logs, refused = _from_files(ours, path)
    if logs:
        refused += [ConfigurationError(f"{file} was not written through jsonl=") for file in files if file not in ours]
    logs = logs or [log for folder in event_folders(path) if (log := _from_tensorboard(folder, path)) is not None]
    if not logs and not refused:
        logs, refused = _from_others(path, files, model or Model())
        if not logs and path.is_dir():
            raise ConfigurationError(_nothing_found(path, files) + "".join(f" {error}." for error in refused[:1]))
    if not logs:
        raise refused[0] if refused else ConfigurationError(_nothing_found(path, files))
    for error in refused:  # data sets and other programs' logs have the same ending
        warnings.warn(printable(f"Left out: {error}"), MFUMonitorWarning, stacklevel=2)
    return logs


def _from_files(files: Sequence[Path], root: Path) -> tuple[list[RunLog], list[ConfigurationError]]:
    """The runs in the files, and why others could not be read."""
    logs: list[RunLog] = []
    refused: list[ConfigurationError] = []
    for file in files:
        try:
            logs += _from_jsonl(file, root)
        except ConfigurationError as error:
            refused.append(error)
    return logs, refused


def _from_others(path: Path, files: list[Path], model: Model) -> tuple[list[RunLog], list[ConfigurationError]]:
    """Logs of other tools: the file, the directory as a whole, or the files in it."""
    patterns = ("*.log", "*.csv", "*.tsv", "trainer_state.json", "*.wandb")
    found = files if path.is_file() else [*files, *(f for pattern in patterns for f in sorted(path.rglob(pattern)))]
    logs: list[RunLog] = []
    refused: list[ConfigurationError] = []
    if not found and not any(path.rglob("metrics")):
        return [], []
    for file in found or [path]:
        try:
            run = read_foreign(file, model)
        except ConfigurationError as error:
            refused.append(error)
            continue
        for note in run.notes:
            warnings.warn(printable(f"{file}: {note}"), MFUMonitorWarning, stacklevel=3)
        logs.append(
            RunLog(
                name=_name(file, path), source=f"{file} ({run.format})", readings=run.readings, format=run.format,
                claimed_mfu=run.claimed_mfu,
            )
        )  # fmt: skip
    return logs, refused


def _nothing_found(path: Path, files: list[Path]) -> str:
    seen = ", ".join(file.name for file in files[:5]) or "no .jsonl file"
    return (
        f"No readings in {str(path)!r} ({seen}; no TensorBoard scalars {' or '.join(_MFU_TAGS)}). "
        "Log with MFUMonitor(jsonl='runs/mfu.jsonl') or with a TensorBoard logger, and let at least one window end."
    )


def _from_jsonl(file: Path, root: Path) -> list[RunLog]:
    """The runs of one file: it is continued by a resumed run, and by another run from the start; ranks may share it."""
    run = read_jsonl(file)
    ranks = {event.rank for event in run.events}
    parts = [(rank, *part) for rank in sorted(ranks) for part in _parts(file, _of_rank(run, rank))]
    return [
        RunLog(
            name=_name(file, root) + (which := _which(number, rank, len(parts), len(ranks))),
            source=str(file) + which,
            readings=tuple(made),
            alerts=tuple(alert for _, alert in alerts),
            readings_before=tuple(before for before, _ in alerts),
        )
        for number, (rank, made, alerts) in enumerate(parts, start=1)
    ]


def _of_rank(run: JsonlRun, rank: int) -> Iterator[tuple[Event, UtilizationReading | None]]:
    """The events of one rank, each process's together; several may have written at the same time."""
    for writer in run.writers:
        readings = iter(writer.readings)
        if writer.events[0].rank == rank:
            yield from ((event, next(readings) if event.kind == "reading" else None) for event in writer.events)


def _parts(
    file: Path, events: Iterator[tuple[Event, UtilizationReading | None]]
) -> list[tuple[list[UtilizationReading], list[tuple[int, Alert]]]]:
    """A run and its continuations; another run where the steps begin again."""
    parts: list[tuple[list[UtilizationReading], list[tuple[int, Alert]]]] = [([], [])]
    for event, reading in events:
        if reading is not None:
            if parts[-1][0] and reading.first_step <= parts[-1][0][0].first_step:
                parts.append(([], []))
            parts[-1][0].append(reading)
        elif event.kind == "alert" and "message" in event.payload:
            parts[-1][1].append((len(parts[-1][0]), _alert(file, event)))
    return [part for part in parts if part[0]]


def _which(number: int, rank: int, parts: int, ranks: int) -> str:
    names = [*([f"run {number}"] if parts > ranks else []), *([f"rank {rank}"] if ranks > 1 else [])]
    return f" ({', '.join(names)})" if names else ""


def _alert(file: Path, event: Event) -> Alert:
    try:
        return Alert.from_dict(event.payload)
    except (AttributeError, KeyError, TypeError, ConfigurationError) as error:
        raise ConfigurationError(
            f"{file}, step {event.step}: not an alert of mfu-monitor ({error}). "
            "Give a file that was written through jsonl=, unedited."
        ) from error


def _name(found: Path, root: Path) -> str:
    """The given directory's name, with the way down to the file where there may be several."""
    if found == root:
        return root.stem
    inside = found.relative_to(root).with_suffix("") if found.is_file() else found.relative_to(root)
    return "/".join([root.resolve().name, *inside.parts[: len(inside.parts) - found.is_file()]])


# TensorBoard.


def _from_tensorboard(folder: Path, root: Path) -> RunLog | None:
    scalars = tensorboard_scalars(folder)
    tag = next((tag for tag in _MFU_TAGS if tag in scalars), None)
    if tag is None:
        return None
    readings = tuple(_readings_of_scalars(scalars, tag))
    return RunLog(name=_name(folder, root), source=f"{folder} (TensorBoard)", readings=readings)


_READING_TAGS = {name: tag for name, tag in OF_READING.items() if name != "mfu"}
_PER_STEP_TAGS = {name: tag for name, tag in (*STEP_TIME.items(), *FLOPS_PER_STEP.items()) if name != "elapsed_s"}
_RATE_TAGS = (
    ("throughput/tokens_per_s", "throughput/device/tokens_per_s"),
    ("throughput/samples_per_s", "throughput/device/samples_per_s"),
    ("train/samples_per_sec", "train/device/samples_per_sec"),
)


def _readings_of_scalars(scalars: Mapping[str, list[Any]], mfu_tag: str) -> Iterator[UtilizationReading]:
    """Readings as far as scalars hold them: windows end where MFU was logged; wall time is the events' own."""
    by_step = {
        tag: {event.step: event.value for event in events if math.isfinite(event.value)}
        for tag, events in scalars.items()
    }
    world_size = _ranks(by_step)
    events = sorted(scalars[mfu_tag], key=lambda event: event.step)
    gaps = [later.wall_time - earlier.wall_time for earlier, later in itertools.pairwise(events)]
    step_before, wall_before = 0, None
    for event in events:
        # The first window began before its first event: the usual distance of two events stands for it.
        wall_s = event.wall_time - wall_before if wall_before is not None else (statistics.median(gaps) if gaps else 0)
        steps = max(1, event.step - step_before)
        edges = {"steps": steps, "first_step": step_before + 1, "world_size": world_size}
        yield _reading(event, by_step, wall_s=max(0.0, wall_s), **edges)
        step_before, wall_before = event.step, event.wall_time


def _ranks(by_step: Mapping[str, Mapping[int, float]]) -> int:
    """The world's rate over a device's; 1 where the rates are not known."""
    for world_tag, device_tag in _RATE_TAGS:
        world, device = by_step.get(world_tag, {}), by_step.get(device_tag, {})
        ratios = [world[step] / device[step] for step in world.keys() & device.keys() if device[step] > 0]
        if ratios:
            return max(1, round(statistics.median(ratios)))
    return 1


def _reading(
    event: Any,
    by_step: Mapping[str, Mapping[int, float]],
    *,
    steps: int,
    first_step: int,
    wall_s: float,
    world_size: int,
) -> UtilizationReading:
    def at(tag: str) -> float | None:
        return by_step.get(tag, {}).get(event.step)

    total_s = at(TOTAL_S)
    fields = {name: value * steps for name, tag in _PER_STEP_TAGS.items() if (value := at(tag)) is not None}
    window = StepWindow(
        first_step=min(first_step, event.step),
        last_step=event.step,
        steps=steps,
        elapsed_s=total_s * steps if total_s is not None else wall_s,
        wall_s=wall_s,
        world_size=world_size,
        **{name: round(value) if name in FLOPS_PER_STEP else value for name, value in fields.items()},  # type: ignore[arg-type]
    )
    known = {name: at(tag) for name, tag in _READING_TAGS.items()}
    mfu = event.value if math.isfinite(event.value) else None
    # No scalar says whether the counts were exact, so nothing is claimed.
    return UtilizationReading(window=window, mfu=mfu, exactness="", **known)  # type: ignore[arg-type]

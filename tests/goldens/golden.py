"""What the program answers today, as plain data: numbers and structure in `.json`, wording in `.txt` beside it."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

import mfu_monitor as mm
from mfu_monitor import callbacks
from mfu_monitor.alerts import Alert, AlertConfig, AlertDetector
from mfu_monitor.cli import build_app, main
from mfu_monitor.counting.step_record import FlopTotals
from mfu_monitor.sinks.jsonl import read_jsonl
from mfu_monitor.timing.step_window import StepWindow
from mfu_monitor.utilization import metrics_of

from .questions import QUESTIONS, answer
from .record import record_run

__all__ = ["GOLDENS", "RUN", "rounded"]

HERE = Path(__file__).parent
RUN = HERE / "run.jsonl"
"""Recorded once by `record.py`: never written again, so that files on users' disks stay readable."""

WORDS = ("message", "likely_cause", "fix", "description", "text", "title", "source")
"""Keys whose values are sentences for people."""


def rounded(value: Any) -> Any:
    """Floats to nine digits, so that another order of additions is no difference; infinities as text."""
    if isinstance(value, dict):
        return {str(key): rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else str(value)
    return value if isinstance(value, int | str | None) else str(value)


def _without_words(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_words(item) for key, item in value.items() if key not in WORDS}
    return [_without_words(item) for item in value] if isinstance(value, list | tuple) else value


def _replayed_alerts() -> list[Alert]:
    detector = AlertDetector(AlertConfig())
    return [alert for reading in read_jsonl(RUN).readings for alert in detector.update(reading)]


def _shown(arguments: list[str]) -> str:
    """What a command prints."""
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream), contextlib.suppress(SystemExit):
        main(arguments)
    return stream.getvalue()


# The recorded run, replayed through every later stage.


def replay_readings() -> Any:
    """The metrics of every eighth recorded reading, made from the record again."""
    return {str(reading.last_step): metrics_of(reading) for reading in read_jsonl(RUN).readings[::8]}


def replay_checks() -> Any:
    """Severity and code by step, of every eighth reading as it is and as if its peak had been a third."""
    readings = read_jsonl(RUN).readings[::8]
    tripled = [dataclasses.replace(r, mfu=3 * (r.mfu or 0), hfu=3 * (r.hfu or 0)) for r in readings]
    return [
        {str(r.last_step): [[d.severity, d.code] for d in mm.check(r)] for r in group} for group in (readings, tripled)
    ]


def replay_alerts() -> Any:
    """The alerts of the recorded readings, without their sentences."""
    return [_without_words(alert.to_dict()) for alert in _replayed_alerts()]


def replay_alerts_wording() -> str:
    """The messages of the same alerts."""
    return "\n\n".join(f"[{alert.kind} at {alert.step}]\n{alert.message}" for alert in _replayed_alerts())


def replay_report() -> Any:
    """`mfu-monitor report run.jsonl --json`."""
    return _without_words(json.loads(_shown(["report", str(RUN), "--json"])))


def live_metrics() -> Any:
    """The same run again, live on its own clock: what a logger gets, every eighth window."""
    with tempfile.TemporaryDirectory() as folder:
        record_run(Path(folder) / "run.jsonl")
        lines = (Path(folder) / "run.jsonl").read_text(encoding="utf-8").splitlines()
    readings = [event for event in map(json.loads, lines) if event["kind"] == "reading"]
    return {str(event["step"]): event["metrics"] for event in readings[::8]}


# The answers of mm.check.


def check_answers() -> Any:
    """Severity, code and evidence of each diagnosis, by question."""
    return {
        name: [{"severity": d.severity, "code": d.code, "evidence": dict(d.evidence)} for d in answer(question)]
        for name, question in QUESTIONS.items()
    }


def check_wording() -> str:
    """The sentences of the same diagnoses."""
    parts = [f"## {name}\n" + "\n".join(map(str, answer(question))) for name, question in QUESTIONS.items()]
    return "\n\n".join(parts)


# The command line.


def _commands() -> dict[str, Any]:
    return dict(sorted(typer.main.get_command(build_app()).commands.items()))  # type: ignore[attr-defined]


def _leaves(prefix: str, command: Any) -> list[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        return [(prefix, command)]
    return [leaf for name, sub in sorted(command.commands.items()) for leaf in _leaves(f"{prefix} {name}", sub)]


def commands() -> Any:
    """Every command with each spelling of its arguments and options, hidden ones too."""
    leaves = [leaf for name, command in _commands().items() for leaf in _leaves(name, command)]
    return {
        name: {
            spelling: {"required": p.required, "is_flag": bool(getattr(p, "is_flag", False))}
            for p in command.params
            if p.name != "help"
            for spelling in (*p.opts, *p.secondary_opts)
        }
        for name, command in leaves
    }


def help_wording() -> str:
    """The sentences of every `--help`, independent of how wide a terminal is."""
    leaves = [leaf for name, command in _commands().items() for leaf in _leaves(name, command)]
    return "\n\n".join(_help_of(name, command) for name, command in leaves)


def _help_of(name: str, command: Any) -> str:
    lines = [f"# mfu-monitor {name}", inspect.cleandoc(command.help or "")]
    shown = [p for p in command.params if p.name != "help" and not getattr(p, "hidden", False)]
    lines += [f"{' '.join(p.opts + p.secondary_opts)}: {getattr(p, 'help', None) or ''}".rstrip(": ") for p in shown]
    return "\n".join(lines)


# Names that others rely on.


def public_names() -> Any:
    """Names, the fields of records, the options with their defaults."""
    records = (mm.UtilizationReading, mm.StepRecord, mm.Diagnosis, mm.DevicePeak, StepWindow, Alert, FlopTotals)
    return {
        "mfu_monitor": sorted(mm.__all__),
        "mfu_monitor.callbacks": sorted(callbacks.__all__),
        **{cls.__name__: [f.name for f in dataclasses.fields(cls)] for cls in records},
        "options": {f.name: repr(f.default) for f in dataclasses.fields(mm.MonitorConfig)},
        "Monitor": sorted(name for name in vars(mm.Monitor) if not name.startswith("_")),
        "StepRecord (all)": sorted(name for name in dir(mm.StepRecord) if not name.startswith("_")),
        "metrics": sorted({tag for metrics in live_metrics().values() for tag in metrics}),
        "metrics of ThroughputMonitor": sorted(metrics_of(read_jsonl(RUN).readings[0], names="throughput_monitor")),
    }


GOLDENS: dict[str, Callable[[], Any]] = {
    "replay_readings.json": replay_readings,
    "replay_checks.json": replay_checks,
    "replay_alerts.json": replay_alerts,
    "replay_alerts.txt": replay_alerts_wording,
    "replay_report.json": replay_report,
    "live_metrics.json": live_metrics,
    "check_answers.json": check_answers,
    "check_answers.txt": check_wording,
    "commands.json": commands,
    "commands.txt": help_wording,
    "public_names.json": public_names,
}
"""By file name. `.json` is behaviour: a change needs a reason. `.txt` is wording: write it again and read the diff."""

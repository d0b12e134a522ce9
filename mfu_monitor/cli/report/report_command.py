"""``mfu-monitor report``: what runs achieved, their incidents with the cause, and where their GPU-hours went."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape as escape_markup
from rich.table import Table

from mfu_monitor.alerts import AlertConfig
from mfu_monitor.cli.devices import find_device
from mfu_monitor.cli.options import JSON, add_command, count, quantity
from mfu_monitor.cli.report.foreign_runs import Model
from mfu_monitor.cli.report.html_page import write_page
from mfu_monitor.cli.report.read_runs import RunLog, read_runs
from mfu_monitor.cli.report.rows import format_hours, summary_rows
from mfu_monitor.cli.report.run_summary import IncidentSummary, RunSummary, summarize_run
from mfu_monitor.errors import ConfigurationError
from mfu_monitor.hardware.precision import literal_precision
from mfu_monitor.sinks.console import printable

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    add_command(app, "report", ReportOptions, _report)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """What the command line gave; the model and the device are those of other tools' runs."""

    run_dirs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Directories that runs logged to, or anybody's logs.")
    ]
    params: Annotated[float | None, quantity("--params", "Of other tools' runs: 7B.")] = None
    gpu: Annotated[str | None, typer.Option("--gpu", help='Of other tools\' runs: "H100 SXM".')] = None
    gpus: Annotated[int | None, count("--gpus", "Of other tools' runs.")] = None
    precision: Annotated[str, typer.Option("--precision", help="Of other tools' runs.")] = "bf16"
    html: Annotated[Path | None, typer.Option("--html", help="Write one self-contained page with plots.")] = None
    as_json: JSON = False
    drop: Annotated[
        float | None, typer.Option("--drop", help="Detect again, with this relative drop: 0.05; ignores logged alerts.")
    ] = None


def _report(given: ReportOptions) -> None:
    """Median, best and worst MFU, goodput, GPU-hours, incidents with their causes, runs side by side.

    Reads the monitor's JSON lines, TensorBoard's files where there are none, and other tools' logs: MFU by 6 N D on
    one scale (--params, --gpu), beside what each claimed.
    """
    used = literal_precision(given.precision)
    peak = find_device(given.gpu, precision=used) if given.gpu else None
    model = Model(parameters=given.params, peak=peak, precision=used, gpus=given.gpus)
    logs = _named_apart([log for path in given.run_dirs for log in read_runs(path, model)])
    config = AlertConfig(drop=given.drop) if given.drop is not None else None
    summaries = [_summary(log, config) for log in logs]
    html = given.html
    if html is not None:
        _write(html, lambda: write_page(html, logs, summaries))
    if given.as_json:
        print(json.dumps([summary.to_dict() for summary in summaries]))
    else:
        _print(summaries, html)


def _summary(log: RunLog, config: AlertConfig | None) -> RunSummary:
    alerts = log.alerts if config is None else None
    summary = summarize_run(
        log.name, log.readings, alerts, readings_before=log.readings_before, source=log.source, config=config
    )
    return dataclasses.replace(summary, format=log.format, claimed_mfu=log.claimed_mfu)


def _named_apart(logs: Sequence[RunLog]) -> list[RunLog]:
    """Runs whose directories have the same name are distinguished by their source."""
    names = [log.name for log in logs]
    return [dataclasses.replace(log, name=log.source) if names.count(log.name) > 1 else log for log in logs]


def _write(path: Path, write: Callable[[], None]) -> None:
    try:
        write()
    except OSError as error:
        raise ConfigurationError(
            f"--html {str(path)!r} cannot be written ({error.strerror or error}). "
            "Give a file in a directory that exists and that you may write to, for example --html report.html."
        ) from error


def _terminal(text: str) -> str:
    """Text for a terminal, whatever a log put into it: no markup, no control character."""
    return escape_markup(printable(text))


def _print(summaries: Sequence[RunSummary], html: Path | None) -> None:
    console = Console()
    table = Table(title="Runs side by side" if len(summaries) > 1 else None)
    table.add_column("")
    for summary in summaries:
        table.add_column(_terminal(summary.name), overflow="fold")
    for title, cells in summary_rows(summaries):
        table.add_row(title, *map(_terminal, cells))
    console.print(table)
    for summary in summaries:
        for incident in summary.incidents:
            console.print(f"\n[bold]{_terminal(_heading(summary.name, incident))}[/bold]")
            console.print(_terminal(incident.alert.message))
        for change in summary.changes:
            console.print(f"\n[bold]{_terminal(summary.name)}, change at step {change.step}[/bold]")
            console.print(_terminal(change.message))
    if html is not None:
        console.print(f"\nPage with plots: {_terminal(str(html))}")


def _heading(name: str, incident: IncidentSummary) -> str:
    first = incident.alert.first_step if incident.alert.first_step is not None else incident.alert.step
    end = "recovered" if incident.recovered else "not recovered"
    lost = format_hours(incident.lost_gpu_hours)
    return f"{name}, {incident.alert.kind}, steps {first}-{incident.last_step}, {end}, {lost} of devices lost"

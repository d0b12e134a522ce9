"""``mfu-monitor bench``: what this device can really do, by the best measured product and the best copy."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from mfu_monitor.cli.options import Command
from mfu_monitor.errors import ConfigurationError
from mfu_monitor.hardware.bench import (
    BenchReport,
    bench_shapes,
    default_precisions,
    present_device,
    run_bench,
    write_report,
)
from mfu_monitor.hardware.precision import literal_precision

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""

    @app.command("bench", cls=Command)
    def bench(
        gpu: Annotated[
            str | None, typer.Option("--gpu", "--device", help="cuda:0, cpu, ...; the accelerator if there is one.")
        ] = None,
        precision: Annotated[
            list[str] | None, typer.Option(help="Precision to measure, may be repeated; all usual ones by default.")
        ] = None,
        seconds: Annotated[float, typer.Option(help="Time for all products together.")] = 60.0,
        output: Annotated[Path, typer.Option(help="Where to save the report as JSON.")] = Path(
            "mfu_monitor_bench.json"
        ),
        as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON too.")] = False,
    ) -> None:
        """Measure the achievable peak: the best product by precision over many shapes, and the streaming bandwidth."""
        try:
            _check_can_write(output)
            report = _run(gpu or _default_device(), precision, seconds=seconds)
            write_report(report, output)
        except ConfigurationError as error:
            typer.echo(f"mfu-monitor bench: {error}", err=True)
            raise typer.Exit(code=2) from None
        if as_json:
            typer.echo(json.dumps(report.to_dict(), indent=1))
        else:
            _print(report, output)


def _check_can_write(output: Path) -> None:
    """Before the minutes of measuring, not after them."""
    if output.is_dir():
        raise ConfigurationError(f"--output {str(output)!r} is a folder; expected a file, such as bench.json")
    folder = next(parent for parent in output.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(output if output.exists() else folder, os.W_OK):
        raise ConfigurationError(f"--output {str(output)!r} cannot be written; example: --output bench.json")


def _default_device() -> str:
    accelerator = torch.accelerator.current_accelerator()
    return accelerator.type if accelerator is not None and torch.accelerator.is_available() else "cpu"


def _run(device: str, precisions: list[str] | None, *, seconds: float) -> BenchReport:
    place = present_device(device)
    names = tuple(literal_precision(name) for name in precisions or default_precisions(place))
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=Console(stderr=True), transient=True
    )
    with bar:
        task = bar.add_task("measuring", total=len(names) * len(bench_shapes(place.type)))

        def on_progress(what: str) -> None:
            bar.update(task, advance=1, description=what)

        return run_bench(place, names, seconds=seconds, on_progress=on_progress)


def _print(report: BenchReport, output: Path) -> None:
    table = Table(title=f"{report.device_name} ({report.device}): best measured products, dense")
    for column in ("precision", "TFLOP/s", "shape M x K x N", "of the table's peak"):
        table.add_column(column, justify="left" if column == "precision" else "right")
    for bench in report.precisions:
        best, known = bench.best, bench.table_flops_per_s
        shape = " x ".join(str(size) for size in best.shape) if best else "not possible here"
        share = f"{best.flops_per_s / known:.1%}" if best and known else "-"
        table.add_row(bench.precision, f"{best.flops_per_s / 1e12:.4g}" if best else "-", shape, share)
    console = Console()
    console.print(table)
    bandwidth = f"{report.bytes_per_s / 1e9:.4g} GB/s" if report.bytes_per_s else "not measurable here"
    typer.echo(f"streaming bandwidth: {bandwidth}")
    for bench in report.precisions:
        state = bench.conditions.to_dict() if bench.conditions is not None else {}
        told = ", ".join(f"{name} {value}" for name, value in state.items() if value)
        if told:
            typer.echo(f"conditions after {bench.precision}: {told}")
    typer.echo(f"saved to {output}; peak='measure' uses these values from now on")

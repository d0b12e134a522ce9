"""``mfu-monitor audit``: can a run's figures be right? From numbers on the command line, or from anybody's log."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from mfu_monitor.cli.audit.claims import AuditReport, LogSeries, RunFacts, audit_run
from mfu_monitor.cli.audit.metrics_log import ColumnNames, Log, read_log, read_mfu, read_seconds, series_of
from mfu_monitor.cli.devices import find_device, override_peak
from mfu_monitor.cli.units import count_parser, format_quantity, quantity_parser
from mfu_monitor.errors import ConfigurationError
from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.hardware.precision import literal_precision

__all__ = ["register"]

EXIT_IMPOSSIBLE = 1
_LEAST_PEAK_FLOPS_PER_S = 1e6
"""As ``peak=`` has it: below a megaflop per second the number was meant in TFLOP/s."""
_LARGEST_BARE_MFU = 10.0
"""A bare 46.2 may mean 46.2% or 4620%: it is refused. 1.52 is read as 152%, as public trackers show it."""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("audit")(_audit)


def _quantity(flag: str, text: str, *aliases: str) -> Any:
    return typer.Option(flag, *aliases, parser=quantity_parser(flag), metavar="N", help=text)


def _count(flag: str, text: str, *aliases: str) -> Any:
    return typer.Option(flag, *aliases, parser=count_parser(flag), metavar="N", help=text)


def _mfu(text: str) -> float:
    try:
        value = read_mfu(str(text))
    except ValueError as error:
        raise typer.BadParameter(f"--reported-mfu is {text!r}; {error}") from None
    if value == 0 or (value > _LARGEST_BARE_MFU and "%" not in str(text)):
        raise typer.BadParameter(f"--reported-mfu is {text!r}; expected a fraction such as 0.462, or 46.2%")
    return value


def _seconds(flag: str) -> Any:
    def parse(text: str) -> float:
        try:
            return read_seconds(str(text))
        except ValueError as error:
            raise typer.BadParameter(f"{flag} is {text!r}; {error}") from None

    return parse


def _recompute(text: str) -> float | str:
    """``none``, ``full``, ``selective``, or the share of the forward that runs again."""
    words: dict[str, float | str] = {"none": 0.0, "full": 1.0, "selective": "selective"}
    if text.lower() in words:
        return words[text.lower()]
    try:
        share = read_mfu(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ConfigurationError(f"--recompute is {text!r}; allowed are none, full, selective, or a share such as 0.75")
    return share


def _audit(
    log: Annotated[
        Path | None, typer.Argument(help="A CSV or JSON lines file, or a TensorBoard directory; ours or any other.")
    ] = None,
    params: Annotated[float | None, _quantity("--params", "Parameters: 70B.", "--parameters")] = None,
    active_params: Annotated[
        float | None, _quantity("--active-params", "Mixture of experts: parameters that work on a token.")
    ] = None,
    tokens_per_s: Annotated[float | None, _quantity("--tokens-per-s", "Tokens/s of all GPUs together: 3k.")] = None,
    tokens_per_s_per_gpu: Annotated[
        float | None, _quantity("--tokens-per-s-per-gpu", "Tokens/s of one GPU, instead.")
    ] = None,
    tokens_per_step: Annotated[
        float | None, _quantity("--tokens-per-step", "Tokens of one optimizer step of all GPUs: 4M.")
    ] = None,
    step_time: Annotated[
        float | None,
        typer.Option("--step-time", parser=_seconds("--step-time"), metavar="T", help="Of a step: 1.25, 250ms."),
    ] = None,
    flops_per_s_per_gpu: Annotated[
        float | None, _quantity("--flops-per-s-per-gpu", "Reported model FLOP/s of one GPU: 430T.")
    ] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", "--device", help='Such as "H100 SXM".')] = None,
    gpus: Annotated[int | None, _count("--gpus", "How many.", "--devices")] = None,
    precision: Annotated[str | None, typer.Option("--precision", help="bf16 (default), fp16, fp8, fp32, tf32.")] = None,
    peak: Annotated[
        float | None, _quantity("--peak-flops-per-s", "Dense peak of one GPU instead of the table's: 989T.")
    ] = None,
    layers: Annotated[int | None, _count("--layers", "For attention.")] = None,
    heads: Annotated[int | None, _count("--heads", "For attention: query heads.")] = None,
    head_width: Annotated[int | None, _count("--head-width", "For attention; default: width / heads.")] = None,
    width: Annotated[int | None, _count("--width", "For attention: heads x head width.")] = None,
    sequence_length: Annotated[int | None, _count("--sequence-length", "For attention: tokens.")] = None,
    causal: Annotated[bool, typer.Option("--causal/--bidirectional", help="Which pairs attention attends.")] = True,
    recompute: Annotated[
        str | None, typer.Option("--recompute", help="none, full, selective, or a share of the forward: gives HFU.")
    ] = None,
    reported_mfu: Annotated[
        float | None,
        typer.Option("--reported-mfu", parser=_mfu, metavar="X", help="What was reported: 0.462 or 46.2%."),
    ] = None,
    reported_peak: Annotated[
        float | None, _quantity("--reported-peak", "Peak, in FLOP/s, that the reported MFU was made with: 1979T.")
    ] = None,
    accumulate: Annotated[int | None, _count("--accumulate", "Micro-batches of an optimizer step.")] = None,
    tokens: Annotated[float | None, _quantity("--tokens", "Tokens trained so far: 15T.")] = None,
    hours: Annotated[float | None, _quantity("--hours", "Wall-clock hours so far.")] = None,
    gpu_hours: Annotated[float | None, _quantity("--gpu-hours", "GPU-hours so far: 6.4M.")] = None,
    price: Annotated[float | None, _quantity("--price", "Price of one GPU for one hour.")] = None,
    tokens_per_s_column: Annotated[
        str | None, typer.Option("--tokens-per-s-column", help="Column or tag of the log.")
    ] = None,
    step_time_column: Annotated[str | None, typer.Option("--step-time-column", help="Column or tag, seconds.")] = None,
    mfu_column: Annotated[str | None, typer.Option("--mfu-column", help="Column or tag of reported MFU.")] = None,
    mfu_unit: Annotated[str | None, typer.Option("--mfu-unit", help="fraction or percent.")] = None,
    skip_invalid: Annotated[bool, typer.Option("--skip-invalid", help="Leave unusable rows out.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Can a run's figures be right? MFU by 6ND and by PaLM's formula, the verdict, suspected faults, GPU-hours, cost.

    Exit code 0: plausible. 1: impossible. 2: bad input.

    Examples:

      mfu-monitor audit --params 70e9 --tokens-per-s 3000 --gpu "H100 SXM" --precision bf16 --gpus 1

      mfu-monitor audit runs/metrics.csv --tokens-per-s-column train/tps --params 7B --gpu "A100" --gpus 8
    """
    _check_choice("--mfu-unit", mfu_unit, ("fraction", "percent"))
    table = read_log(log) if log is not None else None
    told = table.readings[-1] if table is not None and table.readings else None
    count = gpus or (told.window.world_size if told else 0) or 1
    series = _series(
        table,
        ColumnNames(tokens_per_s=tokens_per_s_column, step_s=step_time_column, mfu=mfu_column),
        count,
        mfu_unit,
        skip_invalid,
    )
    used = literal_precision(precision or (told.precision if told else None) or "bf16")
    facts = RunFacts(
        peak=_peak(gpu or (told.device_name if told else None), used, peak, is_told=gpu is None),
        precision=used,
        gpus=count,
        parameters=params,
        active_parameters=_active(params, active_params),
        layers=layers,
        sequence_length=sequence_length,
        is_causal=causal,
        recompute=None if recompute is None else _recompute(recompute),
        tokens_per_s=_rate(tokens_per_s, tokens_per_s_per_gpu, count),
        tokens_per_step=tokens_per_step,
        step_s=step_time,
        device_flops_per_s=flops_per_s_per_gpu,
        reported_mfu=reported_mfu,
        reported_peak_flops_per_s=reported_peak,
        tokens=tokens,
        elapsed_s=None if hours is None else hours * 3600.0,
        gpu_hours=gpu_hours,
        price_per_gpu_hour=price,
        accumulate_grad_batches=accumulate,
        series=series,
        **_heads(heads, head_width, width),
    )
    _checked_shape(facts)
    report = audit_run(facts)
    _print_json(report) if as_json else _print(report)
    if report.is_impossible:
        raise typer.Exit(EXIT_IMPOSSIBLE)


def _check_choice(flag: str, value: str | None, allowed: tuple[str, ...]) -> None:
    if value is not None and value not in allowed:
        raise ConfigurationError(f"{flag} is {value!r}; allowed are {' and '.join(allowed)}")


def _series(
    log: Log | None, names: ColumnNames, gpus: int, mfu_unit: str | None, skip_invalid: bool
) -> LogSeries | None:
    if log is not None:
        return series_of(log, names, gpus=gpus, mfu_unit=mfu_unit, skip_invalid=skip_invalid)
    given = [name for name, value in dataclasses.asdict(names).items() if value is not None]
    if given:
        raise ConfigurationError(
            f"a column of {given[0]} was named and no log was given; for example: mfu-monitor audit metrics.csv ..."
        )
    return None


def _peak(name: str | None, precision: str, given: float | None, *, is_told: bool) -> DevicePeak | None:
    """The table's, or the given one. A device that our own log names may be one that no table knows."""
    if given is not None:
        if given < _LEAST_PEAK_FLOPS_PER_S:
            raise ConfigurationError(
                f"--peak-flops-per-s is {given:g} FLOP/s, which no device is as slow as; the unit is FLOP/s: expected "
                "such as 989T or 9.89e14"
            )
        known = None if name is None or is_told else find_device(name, option="--gpu")
        return override_peak(known, precision=precision, peak_tflops=given / 1e12, bandwidth_tb_s=None)
    if not name:
        return None
    try:
        return find_device(name, precision=precision, option="--gpu", instead="--peak-flops-per-s 989T (dense)")
    except ConfigurationError:
        if is_told:
            return None
        raise


def _active(params: float | None, active: float | None) -> float | None:
    if params is not None and active is not None and active > params:
        raise ConfigurationError(
            f"--active-params is {format_quantity(active)} of --params {format_quantity(params)}; expected at "
            "most as many"
        )
    return active


def _rate(total: float | None, per_gpu: float | None, gpus: int) -> float | None:
    if total is not None and per_gpu is not None:
        raise ConfigurationError("--tokens-per-s and --tokens-per-s-per-gpu were both given; give one of them")
    return per_gpu * gpus if per_gpu is not None else total


def _heads(heads: int | None, head_width: int | None, width: int | None) -> dict[str, int | None]:
    """Heads and head width; a width alone is one head of that width, which costs the same."""
    if width is None:
        return {"heads": heads, "head_width": head_width}
    if heads is None:
        return {"heads": 1, "head_width": width}
    if head_width is not None and heads * head_width != width:
        raise ConfigurationError(
            f"--heads {heads} x --head-width {head_width} is {heads * head_width}, and --width is {width}; give two "
            "of the three"
        )
    if width % heads:
        raise ConfigurationError(f"--width is {width}, which --heads {heads} does not divide; give --head-width")
    return {"heads": heads, "head_width": width // heads}


def _checked_shape(facts: RunFacts) -> None:
    """All of attention's shapes, or none."""
    given = {
        "--layers": facts.layers,
        "--heads (or --width)": facts.heads,
        "--head-width (or --width)": facts.head_width,
        "--sequence-length": facts.sequence_length,
    }
    missing = [flag for flag, value in given.items() if value is None]
    if missing and len(missing) < len(given):
        raise ConfigurationError(f"attention needs all of its shapes; missing: {', '.join(missing)}")


def _print_json(report: AuditReport) -> None:
    typer.echo(json.dumps(report.to_dict(), indent=1))


_STYLES = {"plausible": "green", "suspicious": "yellow", "impossible": "bold red"}


def _print(report: AuditReport) -> None:
    console = Console(highlight=False, soft_wrap=True)
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, text in _lines(report):
        table.add_row(name, text)
    console.print(table)
    console.print(f"verdict: [{_STYLES[report.verdict]}]{report.verdict}[/]")
    for diagnosis in report.diagnoses:
        console.print(f"\n{diagnosis.severity}: {diagnosis.code}", markup=False)
        for text in (diagnosis.message, diagnosis.likely_cause, diagnosis.fix):
            console.print(f"  {text}", markup=False)
    for note in report.notes:
        console.print(f"note: {note}", markup=False)


def _lines(report: AuditReport) -> list[tuple[str, str]]:
    peak = report.peak_flops_per_s
    rows = (
        ("MFU by 6 N D", _percent(report.mfu_6nd)),
        ("MFU by PaLM's formula", _percent(report.mfu_palm)),
        ("MFU, attended pairs only", _percent(report.mfu_exact)),
        ("MFU by the FLOP/s given", _percent(report.mfu) if report.mfu_6nd is None else None),
        ("HFU", _percent(report.hfu)),
        ("MFU as reported", _percent(report.reported_mfu)),
        ("tokens/s", f"{report.tokens_per_s:,.6g}" if report.tokens_per_s else None),
        (
            "model FLOP/s a GPU",
            f"{report.device_flops_per_s / 1e12:,.4g} TFLOP/s" if report.device_flops_per_s else None,
        ),
        ("peak a GPU", f"{peak / 1e12:,.5g} TFLOP/s {report.precision} dense, {report.device_name}" if peak else None),
        ("peak from", report.peak_source or None),
        ("GPUs", f"{report.gpus:,}"),
        ("GPU-hours", _amount(report.gpu_hours)),
        ("cost", _amount(report.cost)),
        ("rows of the log", f"{report.rows:,}" if report.rows else None),
        ("impossible rows", _impossible_rows(report)),
    )
    return [(name, text) for name, text in rows if text is not None]


def _amount(value: float | None) -> str | None:
    """In full and with a suffix; three digits of what is small."""
    if not value:
        return None
    return f"{value:,.0f} ({format_quantity(value)})" if value >= 1000 else f"{value:.3g}"


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.1f}%"


def _impossible_rows(report: AuditReport) -> str | None:
    if not report.impossible_rows:
        return None
    first = report.first_impossible_step
    return f"{report.impossible_rows:,}" + (f", the first at step {first:g}" if first is not None else "")

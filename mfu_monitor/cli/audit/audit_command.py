"""``mfu-monitor audit``: can a run's figures be right? From numbers on the command line, or from anybody's log."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mfu_monitor.cli.audit.claim_table import Claim
from mfu_monitor.cli.audit.claims import AuditReport, CannotJudgeError, LogSeries, RunFacts, audit_run
from mfu_monitor.cli.audit.log_series import Known, series_of
from mfu_monitor.cli.devices import find_device, override_peak
from mfu_monitor.cli.units import count_parser, format_quantity, quantity_parser
from mfu_monitor.errors import ConfigurationError
from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.hardware.precision import PRECISIONS, literal_precision
from mfu_monitor.logs import Log, Overrides, read_log
from mfu_monitor.logs.numerals import read_numeral
from mfu_monitor.sinks.console import printable

__all__ = ["register"]

EXIT_IMPOSSIBLE = 1
EXIT_NOT_JUDGED = 3
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


def read_mfu(text: str) -> float:
    """``0.462`` or ``46.2%``."""
    numeral = read_numeral(text)
    if numeral is None or numeral[1] not in ("", "%") or not (math.isfinite(numeral[0]) and numeral[0] >= 0):
        raise ValueError("expected a fraction such as 0.462, or a percentage such as 46.2%")
    return numeral[0] / 100 if numeral[1] else numeral[0]


_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0, "": 1.0}


def read_seconds(text: str) -> float:
    """``1.25``, ``1.25s``, ``250ms``; above zero."""
    numeral = read_numeral(text)
    factor = _SECONDS.get(numeral[1]) if numeral else None
    if numeral is None or factor is None or not (math.isfinite(numeral[0]) and numeral[0] > 0):
        raise ValueError("expected a time above zero in seconds, such as 1.25, 1.25s or 250ms")
    return numeral[0] * factor


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
        Path | None,
        typer.Argument(
            help="Anybody's log: console text, CSV, JSON, Markdown, TensorBoard, MLflow, W&B; - is standard input."
        ),
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
    hardware_flops_per_s_per_gpu: Annotated[
        float | None,
        _quantity("--hardware-flops-per-s-per-gpu", "Reported FLOP/s of one GPU, recomputation counted in."),
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
    reported_hfu: Annotated[
        float | None, typer.Option("--reported-hfu", parser=_mfu, metavar="X", help="The same for HFU.")
    ] = None,
    reported_peak: Annotated[
        float | None, _quantity("--reported-peak", "Peak, in FLOP/s, that the reported MFU was made with: 1979T.")
    ] = None,
    accumulate: Annotated[int | None, _count("--accumulate", "Micro-batches of an optimizer step.")] = None,
    tokens: Annotated[float | None, _quantity("--tokens", "Tokens trained so far: 15T.")] = None,
    hours: Annotated[float | None, _quantity("--hours", "Wall-clock hours so far.")] = None,
    days: Annotated[float | None, _quantity("--days", "The same in days.")] = None,
    gpu_hours: Annotated[float | None, _quantity("--gpu-hours", "GPU-hours so far: 6.4M.")] = None,
    price: Annotated[float | None, _quantity("--price", "Price of one GPU for one hour.")] = None,
    tokens_per_s_column: Annotated[
        str | None, typer.Option("--tokens-per-s-column", help="Column or tag of the log.")
    ] = None,
    step_time_column: Annotated[str | None, typer.Option("--step-time-column", help="Column or tag, seconds.")] = None,
    mfu_column: Annotated[str | None, typer.Option("--mfu-column", help="Column or tag of reported MFU.")] = None,
    ignore_column: Annotated[
        list[str] | None, typer.Option("--ignore-column", help="Leave a column out; may be repeated.")
    ] = None,
    unit: Annotated[
        list[str] | None,
        typer.Option("--unit", metavar="COLUMN=UNIT", help="step_time=ms, mfu=percent; may be repeated."),
    ] = None,
    per_gpu: Annotated[
        bool | None, typer.Option("--per-gpu/--all-gpus", help="Rates of the log are of one GPU, or of all together.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Can a run's figures be right? MFU by each convention, each claim against what the others imply, the verdict.

    Exit code 0: plausible. 1: impossible, or contradicted by its own inputs. 2: bad input. 3: nothing could be judged.

    Examples:

      mfu-monitor audit --params 70e9 --tokens-per-s 3000 --gpu "H100 SXM" --precision bf16 --gpus 1

      mfu-monitor audit train.log --params 7B --gpu "A100" --gpus 8
    """
    overrides = _overrides(ignore_column, unit, per_gpu, tokens_per_s_column, step_time_column, mfu_column)
    if log is None and (overrides.quantities or overrides.ignore or overrides.units):
        raise ConfigurationError(
            "a column was named and no log was given; for example: mfu-monitor audit metrics.csv ..."
        )
    table = read_log(log, overrides) if log is not None else None
    told = table.readings[-1] if table is not None and table.readings else None
    count = gpus or _gpus_of(table) or 1
    used = literal_precision(precision or (told.precision if told else None) or _precision_of(table) or "bf16")
    device = _peak(gpu or (told.device_name if told else None), used, peak, is_told=gpu is None)
    n = params or (table.constant("parameters") if table else None)
    series = None
    if table is not None:
        rate = device.flops_per_s_by_precision.get(used) if device else None
        series = series_of(
            table,
            Known(
                gpus=count, peak_flops_per_s=rate, parameters=_active(n, active_params) or n,
                tokens_per_step=tokens_per_step, sequence_length=sequence_length, per_gpu=per_gpu,
            ),
        )  # fmt: skip
    facts = RunFacts(
        peak=device,
        precision=used,
        gpus=count,
        parameters=n,
        active_parameters=_active(n, active_params),
        layers=layers,
        sequence_length=sequence_length,
        is_causal=causal,
        recompute=None if recompute is None else _recompute(recompute),
        tokens_per_s=_rate(tokens_per_s, tokens_per_s_per_gpu, count),
        tokens_per_step=tokens_per_step,
        step_s=step_time,
        device_flops_per_s=flops_per_s_per_gpu,
        device_hardware_flops_per_s=hardware_flops_per_s_per_gpu,
        reported_mfu=reported_mfu,
        reported_hfu=reported_hfu,
        reported_peak_flops_per_s=reported_peak,
        tokens=tokens,
        elapsed_s=_elapsed_s(hours, days),
        gpu_hours=gpu_hours,
        price_per_gpu_hour=price,
        accumulate_grad_batches=accumulate,
        series=series,
        **_heads(heads, head_width, width),
    )
    _checked_shape(facts)
    _judge(facts, table, as_json=as_json)


def _judge(facts: RunFacts, log: Log | None, *, as_json: bool) -> None:
    """Print the verdict and end with its exit code."""
    try:
        report = audit_run(facts)
    except CannotJudgeError as error:
        about = _about(log, facts.series) if log is not None else ""
        print(printable(f"mfu-monitor: {about}{error}"), file=sys.stderr)
        raise typer.Exit(EXIT_NOT_JUDGED) from None
    _print_json(report, log) if as_json else _print(report, log)
    if report.verdict in ("impossible", "contradicted"):
        raise typer.Exit(EXIT_IMPOSSIBLE)


def _about(log: Log, series: LogSeries | None) -> str:
    """What a log is in which nothing could be judged, and what to do."""
    if series is not None and (series.tokens_per_s or series.mfu or series.step_s or series.device_flops_per_s):
        return f"{log.source} ({log.format}): "
    advice = (
        log.writer.advice if log.writer else ""
    ) or "no column of tokens/s, step time, FLOP/s or MFU is known in it"
    names = ", ".join((*(c.name for c in log.columns), *log.unused)[:30]) or "no column of numbers"
    return (
        f"{log.source} looks like {log.format}; {advice}."
        f" It has: {names}. Name one with --tokens-per-s-column, --step-time-column or --mfu-column. "
        + "".join(f"{note}. " for note in log.notes)
    )


def _overrides(
    ignore: list[str] | None,
    units: list[str] | None,
    per_gpu: bool | None,
    rate: str | None,
    step: str | None,
    mfu: str | None,
) -> Overrides:
    by_column = {}
    for text in units or ():
        name, sign, unit = text.rpartition("=")
        if not sign or not name:
            raise ConfigurationError(f"--unit is {text!r}; expected COLUMN=UNIT such as step_time=ms or mfu=percent")
        by_column[name] = unit
    named = {rate: "tokens_per_s", step: "step_s", mfu: "mfu"}
    return Overrides(
        ignore=tuple(ignore or ()),
        units=by_column,
        quantities={name: quantity for name, quantity in named.items() if name is not None},
        per_gpu=per_gpu,
    )


def _gpus_of(log: Log | None) -> int | None:
    """Ranks of our own log, or a column or line that says how many."""
    if log is None:
        return None
    if log.readings:
        return log.readings[-1].window.world_size
    gpus = log.constant("gpus")
    return int(gpus) if gpus else None


def _precision_of(log: Log | None) -> str | None:
    """``amp_bf16`` is bf16; what is no precision of ours says nothing."""
    text = log.texts.get("precision", "") if log else ""
    return next((p for p in re.split(r"[^a-z0-9]+", text.lower()) if p in PRECISIONS), None)


def _elapsed_s(hours: float | None, days: float | None) -> float | None:
    if hours is not None and days is not None:
        raise ConfigurationError("--hours and --days were both given; give one of them")
    return hours * 3600.0 if hours is not None else days * 86400.0 if days is not None else None


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


def _print_json(report: AuditReport, log: Log | None) -> None:
    about = {} if log is None else {"log": {"source": log.source, "format": log.format, "unused": list(log.unused)}}
    typer.echo(json.dumps({**report.to_dict(), **about}, indent=1))


_STYLES = {"plausible": "green", "suspicious": "yellow", "contradicted": "bold red", "impossible": "bold red"}


def _print(report: AuditReport, log: Log | None) -> None:
    console = Console(highlight=False, soft_wrap=True)
    if log is not None:
        console.print(escape(f"{printable(log.source)}: {log.format}, {log.rows:,} rows"))
        _print_table(console, ("column", "is", "unit", "of"), report.understood)
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, text in _lines(report):
        table.add_row(name, text)
    console.print(table)
    _print_table(
        console, ("claim", "claimed", "implied", "ratio", "convention"), [_claim_row(c) for c in report.claims]
    )
    for claim in report.claims:
        if claim.is_nearest and not claim.agrees:
            console.print(escape(claim.sentence()))
    console.print(f"verdict: [{_STYLES[report.verdict]}]{report.verdict}[/]")
    for diagnosis in report.diagnoses:
        console.print(f"\n{diagnosis.severity}: {diagnosis.code}", markup=False)
        for text in (diagnosis.message, diagnosis.likely_cause, diagnosis.fix):
            console.print(f"  {text}", markup=False)
    for note in report.notes:
        console.print(f"note: {printable(note)}", markup=False)


def _print_table(console: Console, head: tuple[str, ...], rows: Sequence[Sequence[str]]) -> None:
    if not rows:
        return
    table = Table(box=None, pad_edge=False)
    for name in head:
        table.add_column(name)
    for row in rows:
        table.add_row(*(escape(printable(cell)) for cell in row))
    console.print(table)


def _claim_row(claim: Claim) -> tuple[str, str, str, str, str]:
    def say(value: float) -> str:
        if "MFU" in claim.name or "HFU" in claim.name:
            return f"{100 * value:.1f}%"
        return (
            f"{value / 1e12:,.4g} TFLOP/s" if "FLOP/s" in claim.name or claim.name == "peak" else format_quantity(value)
        )

    return claim.name, say(claim.claimed), say(claim.implied), f"{claim.ratio:.3g}", claim.convention


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

"""``mfu-monitor audit``: can a run's reported numbers be right? From options, or from anybody's log."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mfu_monitor.cli.audit.audit_run import AuditFacts, AuditReport, CannotJudgeError, LogSeries, audit_run
from mfu_monitor.cli.audit.claims import Claim
from mfu_monitor.cli.audit.log_series import Known, series_of
from mfu_monitor.cli.audit.model_config import ModelConfig, read_model_config
from mfu_monitor.cli.devices import find_device, override_peak
from mfu_monitor.cli.options import GPU, JSON, active_parameters, add_command, count, quantity, seconds, share
from mfu_monitor.cli.units import format_quantity, parse_fraction
from mfu_monitor.errors import ConfigurationError
from mfu_monitor.formulas.analytic import AttentionShape, Layers
from mfu_monitor.hardware.detect import device_peak
from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.hardware.precision import PRECISIONS, literal_precision
from mfu_monitor.hardware.properties import DeviceProperties
from mfu_monitor.hardware.resolve import LEAST_PEAK_FLOPS_PER_S
from mfu_monitor.logs import Log, Overrides, read_log
from mfu_monitor.sinks.console import printable

__all__ = ["register"]

EXIT_IMPOSSIBLE = 1
EXIT_NOT_JUDGED = 3
_LARGEST_BARE_MFU = 10.0
"""A bare 46.2 may mean 46.2% or 4620%: it is refused. 1.52 is read as 152%, as public trackers show it."""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    add_command(app, "audit", AuditOptions, _audit)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOptions:
    """What the command line gave."""

    log: Annotated[
        Path | None,
        typer.Argument(
            help="Anybody's log: console text, CSV, JSON, Markdown, TensorBoard, MLflow, W&B; - is standard input."
        ),
    ] = None
    params: Annotated[float | None, quantity("--params", "Parameters: 70B.", "--parameters")] = None
    active_params: Annotated[
        float | None,
        quantity("--active-params", "Mixture of experts: parameters that work on a token.", "--active-parameters"),
    ] = None
    tokens_per_s: Annotated[float | None, quantity("--tokens-per-s", "Tokens/s of all GPUs together: 3k.")] = None
    tokens_per_s_per_gpu: Annotated[
        float | None, quantity("--tokens-per-s-per-gpu", "Tokens/s of one GPU, instead.")
    ] = None
    tokens_per_step: Annotated[
        float | None, quantity("--tokens-per-step", "Tokens of one optimizer step of all GPUs: 4M.")
    ] = None
    step_time: Annotated[float | None, seconds("--step-time", "Of a step: 1.25, 250ms.")] = None
    flops_per_s_per_gpu: Annotated[
        float | None, quantity("--flops-per-s-per-gpu", "Reported model FLOP/s of one GPU: 430T.")
    ] = None
    hardware_flops_per_s_per_gpu: Annotated[
        float | None,
        quantity("--hardware-flops-per-s-per-gpu", "Reported FLOP/s of one GPU, recomputation counted in."),
    ] = None
    gpu: GPU = None
    gpus: Annotated[int | None, count("--gpus", "How many.", "--devices")] = None
    precision: Annotated[
        str | None,
        typer.Option(
            "--precision", help="bf16 (default), fp16, fp8, fp32, tf32; of a mix its shares: fp8:70%,bf16:30%."
        ),
    ] = None
    peak_flops_per_s: Annotated[
        float | None, quantity("--peak-flops-per-s", "Dense peak of one GPU instead of the table's: 989T.")
    ] = None
    config: Annotated[
        Path | None, typer.Option("--config", help="A Hugging Face config.json: parameters and attention's shapes.")
    ] = None
    layers: Annotated[int | None, count("--layers", "For attention.")] = None
    heads: Annotated[int | None, count("--heads", "For attention: query heads.")] = None
    head_width: Annotated[int | None, count("--head-width", "For attention; default: width / heads.")] = None
    v_head_width: Annotated[
        int | None, count("--v-head-width", "For attention: of values, where it is another (MLA).")
    ] = None
    width: Annotated[int | None, count("--width", "For attention: heads x head width.")] = None
    window: Annotated[int | None, count("--window", "For attention: keys that a sliding window keeps.")] = None
    window_layers: Annotated[int | None, count("--window-layers", "How many of the layers have it; default: all.")] = (
        None
    )
    sequence_length: Annotated[int | None, count("--sequence-length", "For attention: tokens.")] = None
    causal: Annotated[bool, typer.Option("--causal/--bidirectional", help="Which pairs attention attends.")] = True
    recompute: Annotated[
        str | None, typer.Option("--recompute", help="none, full, selective, or a share of the forward: gives HFU.")
    ] = None
    reported_mfu: Annotated[
        float | None, share("--reported-mfu", "What was reported: 0.462 or 46.2%.", most=_LARGEST_BARE_MFU)
    ] = None
    reported_hfu: Annotated[float | None, share("--reported-hfu", "The same for HFU.", most=_LARGEST_BARE_MFU)] = None
    reported_peak: Annotated[
        float | None, quantity("--reported-peak", "Peak, in FLOP/s, that the reported MFU was made with: 1979T.")
    ] = None
    accumulate: Annotated[int | None, count("--accumulate", "Micro-batches of an optimizer step.")] = None
    tokens: Annotated[float | None, quantity("--tokens", "Tokens trained so far: 15T.")] = None
    hours: Annotated[float | None, quantity("--hours", "Wall-clock hours so far.")] = None
    days: Annotated[float | None, quantity("--days", "The same in days.")] = None
    gpu_hours: Annotated[float | None, quantity("--gpu-hours", "GPU-hours so far: 6.4M.")] = None
    price: Annotated[float | None, quantity("--price", "Price of one GPU for one hour.")] = None
    tokens_per_s_column: Annotated[
        str | None, typer.Option("--tokens-per-s-column", help="Column or tag of the log.")
    ] = None
    step_time_column: Annotated[str | None, typer.Option("--step-time-column", help="Column or tag, seconds.")] = None
    mfu_column: Annotated[str | None, typer.Option("--mfu-column", help="Column or tag of reported MFU.")] = None
    ignore_column: Annotated[
        list[str] | None, typer.Option("--ignore-column", help="Leave a column out; may be repeated.")
    ] = None
    unit: Annotated[
        list[str] | None,
        typer.Option("--unit", metavar="COLUMN=UNIT", help="step_time=ms, mfu=percent; may be repeated."),
    ] = None
    per_gpu: Annotated[
        bool | None, typer.Option("--per-gpu/--all-gpus", help="Rates of the log are of one GPU, or of all together.")
    ] = None
    as_json: JSON = False


def _audit(given: AuditOptions) -> None:
    """Can a run's reported numbers be right? MFU by each convention, each claim against the others, the verdict.

    Exit code 0: plausible. 1: impossible, or contradicted by its own inputs. 2: bad input. 3: nothing could be judged.

    Examples:

      mfu-monitor audit --params 70e9 --tokens-per-s 3000 --gpu "H100 SXM" --precision bf16 --gpus 1

      mfu-monitor audit train.log --params 7B --gpu "A100" --gpus 8
    """
    log = _log(given)
    facts = _facts(given, log)
    if facts.attention is None:
        _checked_shape(facts)
    _judge(facts, log, as_json=given.as_json)


def _log(given: AuditOptions) -> Log | None:
    overrides = _overrides(given)
    if given.log is None and (overrides.quantities or overrides.ignore or overrides.units):
        raise ConfigurationError(
            "a column was named and no log was given; for example: mfu-monitor audit metrics.csv ..."
        )
    return read_log(given.log, overrides) if given.log is not None else None


def _facts(given: AuditOptions, log: Log | None) -> AuditFacts:
    """What was given; what our own log says stands in for what was not."""
    own = log.readings[-1] if log is not None and log.readings else None
    gpus = given.gpus or _gpus_of(log) or 1
    shares = _shares(given.precision)
    told = max(shares, key=lambda name: shares[name]) if shares else given.precision
    precision = literal_precision(told or (own.precision if own else None) or _precision_of(log) or "bf16")
    peak = _peak(given, precision, own.device_name if own else None)
    config = read_model_config(given.config, _sequence_length(given, log)) if given.config else None
    parameters, active = _parameters(given, log, config)
    return AuditFacts(
        peak=peak,
        precision=precision,
        gpus=gpus,
        parameters=parameters,
        active_parameters=active,
        attention=config.attention if config else _attention(given),
        precision_shares=shares,
        layers=given.layers,
        sequence_length=given.sequence_length,
        is_causal=given.causal,
        recompute=None if given.recompute is None else _recompute(given.recompute),
        tokens_per_s=_rate(given.tokens_per_s, given.tokens_per_s_per_gpu, gpus),
        tokens_per_step=given.tokens_per_step,
        step_s=given.step_time,
        device_flops_per_s=given.flops_per_s_per_gpu,
        device_hardware_flops_per_s=given.hardware_flops_per_s_per_gpu,
        reported_mfu=given.reported_mfu,
        reported_hfu=given.reported_hfu,
        reported_peak_flops_per_s=given.reported_peak,
        tokens=given.tokens,
        elapsed_s=_elapsed_s(given.hours, given.days),
        gpu_hours=given.gpu_hours,
        price_per_gpu_hour=given.price,
        accumulate_grad_batches=given.accumulate,
        series=_series(given, log, gpus, _rate_of(peak, precision, shares), active or parameters, config),
        **_heads(given.heads, given.head_width, given.width),
    )


def _series(
    given: AuditOptions, log: Log | None, gpus: int, peak: float | None, parameters: float | None,
    config: ModelConfig | None,
) -> LogSeries | None:  # fmt: skip
    notes = config.notes if config else ()
    if config is not None and given.params is None:
        notes = (*notes, "parameters are those that take part in a product: embedding tables are left out")
    if log is None:
        return LogSeries(notes=notes) if notes else None
    known = Known(
        gpus=gpus,
        peak_flops_per_s=peak,
        parameters=parameters,
        tokens_per_step=given.tokens_per_step,
        sequence_length=given.sequence_length,
        per_gpu=given.per_gpu,
    )
    series = series_of(log, known)
    return dataclasses.replace(series, notes=(*series.notes, *notes))


def _sequence_length(given: AuditOptions, log: Log | None) -> int:
    length = given.sequence_length or (log.constant("sequence_length") if log else None)
    if not length:
        raise ConfigurationError(
            "--config needs --sequence-length, the tokens of a training sequence: the file knows the longest only"
        )
    return int(length)


def _parameters(given: AuditOptions, log: Log | None, config: ModelConfig | None) -> tuple[float | None, float | None]:
    """N and, of a mixture of experts, those that work on a token: given, else the log's, else the configuration's."""
    parameters, active = given.params or (log.constant("parameters") if log else None), given.active_params
    if config is not None and parameters is None and active is None:
        parameters, active = config.parameters()
    active_parameters(parameters, active)
    return parameters, active


def _shares(text: str | None) -> dict[str, float]:
    """``fp8:70%,bf16:30%``; none of a single precision."""
    if text is None or ":" not in text:
        return {}
    parts = [part.partition(":") for part in text.split(",")]
    shares = {literal_precision(name.strip()): parse_fraction(part, name="--precision") for name, _, part in parts}
    if abs(sum(shares.values()) - 1) > 0.01:
        raise ConfigurationError(f"--precision is {text!r}; expected shares that add up to 100%: fp8:70%,bf16:30%")
    return shares


def _rate_of(peak: DevicePeak | None, precision: str, shares: dict[str, float]) -> float | None:
    if peak is None:
        return None
    return peak.weighted_flops_per_s(shares) if shares else peak.flops_per_s(precision)


def _attention(given: AuditOptions) -> AttentionShape | None:
    """Only where values have a width of their own or layers differ; the plain shapes need no more than the facts."""
    layers, windowed = given.layers, given.window_layers or given.layers
    if given.v_head_width is None and given.window is None and given.window_layers is None:
        return None
    heads = _heads(given.heads, given.head_width, given.width)
    sizes = (heads["heads"], heads["head_width"], given.sequence_length)
    if layers is None or windowed is None or not all(sizes):
        raise ConfigurationError("--window and --v-head-width need --layers, --heads, --head-width, --sequence-length")
    if windowed > layers or (given.window_layers and not given.window):
        raise ConfigurationError(
            f"--window-layers {windowed} of --layers {layers} need --window, and at most all layers"
        )
    count, qk_width, length = (int(size) for size in sizes if size)
    kinds = (Layers(count=windowed, keys=given.window), Layers(count=layers - windowed)) if given.window else ()
    return AttentionShape(
        heads=count, qk_width=qk_width, v_width=given.v_head_width or qk_width, sequence_length=length,
        layers=kinds or (Layers(count=layers),), is_causal=given.causal,
    )  # fmt: skip


def _recompute(text: str) -> float | str:
    """``none``, ``full``, ``selective``, or the share of the forward that runs again."""
    words: dict[str, float | str] = {"none": 0.0, "0": 0.0, "full": 1.0, "selective": "selective"}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return parse_fraction(text, name="--recompute")
    except ConfigurationError:
        raise ConfigurationError(
            f"--recompute is {text!r}; allowed are none, full, selective, or a share such as 0.75"
        ) from None


def _judge(facts: AuditFacts, log: Log | None, *, as_json: bool) -> None:
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


def _overrides(given: AuditOptions) -> Overrides:
    by_column = {}
    for text in given.unit or ():
        name, sign, unit = text.rpartition("=")
        if not sign or not name:
            raise ConfigurationError(f"--unit is {text!r}; expected COLUMN=UNIT such as step_time=ms or mfu=percent")
        by_column[name] = unit
    named = {given.tokens_per_s_column: "tokens_per_s", given.step_time_column: "step_s", given.mfu_column: "mfu"}
    return Overrides(
        ignore=tuple(given.ignore_column or ()),
        units=by_column,
        quantities={name: quantity for name, quantity in named.items() if name is not None},
        per_gpu=given.per_gpu,
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
    """``amp_bf16`` is bf16; a name that is not a precision of ours says nothing."""
    text = log.texts.get("precision", "") if log else ""
    return next((p for p in re.split(r"[^a-z0-9]+", text.lower()) if p in PRECISIONS), None)


def _elapsed_s(hours: float | None, days: float | None) -> float | None:
    if hours is not None and days is not None:
        raise ConfigurationError("--hours and --days were both given; give one of them")
    return hours * 3600.0 if hours is not None else days * 86400.0 if days is not None else None


def _peak(given: AuditOptions, precision: str, logged_name: str | None) -> DevicePeak | None:
    """The table's, or the given one. A device that our own log names may be one that no table knows."""
    rate = given.peak_flops_per_s
    if rate is not None:
        if rate < LEAST_PEAK_FLOPS_PER_S:
            raise ConfigurationError(
                f"--peak-flops-per-s is {rate:g} FLOP/s, which no device is as slow as; the unit is FLOP/s: expected "
                "such as 989T or 9.89e14"
            )
        known = find_device(given.gpu) if given.gpu else None
        return override_peak(known, precision=precision, peak_tflops=rate / 1e12, bandwidth_tb_s=None)
    if given.gpu:
        return find_device(given.gpu, precision=precision, instead="--peak-flops-per-s 989T (dense)")
    peak = device_peak(DeviceProperties(name=logged_name, device_type="logged"), warn=False) if logged_name else None
    return peak if peak is not None and peak.flops_per_s(precision) is not None else None


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


def _checked_shape(facts: AuditFacts) -> None:
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
            "model FLOP/s per GPU",
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

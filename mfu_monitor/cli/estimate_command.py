"""``mfu-monitor estimate``: what a training run will take, before there is a model or a GPU."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from mfu_monitor.checks.limits import SUSPICIOUS_NOTE
from mfu_monitor.cli.devices import find_device, override_peak
from mfu_monitor.cli.options import GPU, JSON, PRECISION, active_parameters, add_command, count, quantity, share
from mfu_monitor.cli.units import format_quantity
from mfu_monitor.errors import ConfigurationError
from mfu_monitor.formulas.analytic import AttentionShape, Layers
from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.insights.planning import Plan, format_duration, plan_training, training_flops

__all__ = ["register"]

_SECONDS_PER_DAY = 86400.0
_CONVENTIONS = ("exact", "palm")


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    add_command(app, "estimate", EstimateOptions, _estimate)


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateOptions:
    """What the command line gave."""

    tokens: Annotated[float, quantity("--tokens", "Tokens seen in training: 15T.")]
    params: Annotated[float | None, quantity("--params", "Parameters of a dense model: 70B.", "--parameters")] = None
    active_params: Annotated[
        float | None,
        quantity(
            "--active-params", "Mixture of experts: parameters that work on each token: 37B.", "--active-parameters"
        ),
    ] = None
    gpu: GPU = None
    precision: PRECISION = "bf16"
    peak_tflops: Annotated[
        float | None, quantity("--peak-tflops", "Dense TFLOP/s of one device instead of the table's: 989.")
    ] = None
    mfu: Annotated[float | None, share("--mfu", "Fraction: 0.40 or 40%.")] = None
    gpus: Annotated[int | None, count("--gpus", "How many devices work on it.", "--devices")] = None
    days: Annotated[float | None, quantity("--days", "Deadline in days.")] = None
    price: Annotated[float | None, quantity("--price", "Price of one device for one hour.")] = None
    tokens_done: Annotated[float | None, quantity("--tokens-done", "Already trained; plans only the rest.")] = None
    layers: Annotated[int | None, count("--layers", "For the attention term: layers.")] = None
    width: Annotated[int | None, count("--width", "For the attention term: query heads x head width.")] = None
    sequence_length: Annotated[int | None, count("--sequence-length", "For the attention term: tokens.")] = None
    convention: Annotated[
        str, typer.Option("--convention", help="exact: causal pairs only; palm: attention's full square.")
    ] = "exact"
    as_json: JSON = False


def _estimate(given: EstimateOptions) -> None:
    """FLOPs, GPU-hours, days and cost of a training run; or the devices for a deadline; or the MFU it needs.

    Give --mfu and --gpus for the wall-clock time, --mfu and --days for the number of devices, or --gpus and --days for
    the MFU that would be needed.
    """
    peak = _peak(given.gpu, given.precision, given.peak_tflops)
    attention = _attention(given.layers, given.width, given.sequence_length, given.convention)
    parameters = active_parameters(given.params, given.active_params)
    if parameters is None:
        raise ConfigurationError(
            "give --params (such as 70B), or --active-params for a mixture of experts (such as 37B)"
        )
    plan = plan_training(
        training_flops(parameters, _tokens_left(given.tokens, given.tokens_done), attention),
        peak.flops_per_s(given.precision) or 0.0,
        mfu=given.mfu,
        devices=given.gpus,
        deadline_s=None if given.days is None else given.days * _SECONDS_PER_DAY,
        price_per_device_hour=given.price,
    )
    notes = _notes(plan, peak, attention, asked_for_mfu=given.mfu is None)
    if given.as_json:
        print(json.dumps(_as_dict(plan, peak, given.precision, notes)))
    else:
        _print(plan, peak, given.precision, notes)


def _peak(device: str | None, precision: str, peak_tflops: float | None) -> DevicePeak:
    if peak_tflops is None:
        if device is None:
            raise ConfigurationError('give --gpu (such as "H100 SXM") or --peak-tflops (dense, such as 989.4)')
        return find_device(device, precision=precision, instead="--peak-tflops 989 (dense)")
    known = None if device is None else find_device(device)
    return override_peak(known, precision=precision, peak_tflops=peak_tflops, bandwidth_tb_s=None)


def _tokens_left(tokens: float, done: float | None) -> float:
    if done is not None and done >= tokens:
        raise ConfigurationError(
            f"--tokens-done is {format_quantity(done)} of --tokens {format_quantity(tokens)}; expected fewer"
        )
    return tokens - (done or 0.0)


def _attention(layers: int | None, width: int | None, length: int | None, convention: str) -> float:
    """FLOPs of attention per token; 0 where its shapes were not given."""
    if convention not in _CONVENTIONS:
        raise ConfigurationError(f"--convention is {convention!r}; expected {' or '.join(_CONVENTIONS)}")
    given = {"--layers": layers, "--width": width, "--sequence-length": length}
    missing = [flag for flag, value in given.items() if value is None]
    if len(missing) == len(given):
        return 0.0
    if layers is None or width is None or length is None:
        raise ConfigurationError(
            f"the attention term needs --layers, --width and --sequence-length; missing: {', '.join(missing)}"
        )
    shape = AttentionShape(
        heads=1, qk_width=width, v_width=width, sequence_length=length, layers=(Layers(count=layers),)
    )
    return shape.flops_per_token(convention)


def _notes(plan: Plan, peak: DevicePeak, attention: float, *, asked_for_mfu: bool) -> list[str]:
    notes = [] if attention else ["without the attention term (give --layers, --width and --sequence-length)"]
    if not plan.is_possible:
        notes.append(f"impossible: this needs {plan.mfu:.0%} of the peak; take more devices or more days")
    elif asked_for_mfu and plan.mfu > SUSPICIOUS_NOTE:
        notes.append(f"an MFU of {plan.mfu:.0%} is above what published training runs reach")
    if peak.confidence == "low":
        notes.append("the peak of this device is known with low confidence only")
    return notes


def _as_dict(plan: Plan, peak: DevicePeak, precision: str, notes: list[str]) -> dict[str, Any]:
    return {
        **dataclasses.asdict(plan),
        "wall_clock_days": plan.wall_clock_days,
        "device": peak.device_name,
        "precision": precision,
        "peak_source": peak.source,
        "notes": notes,
    }


def _print(plan: Plan, peak: DevicePeak, precision: str, notes: list[str]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    rows = {
        "model FLOPs": f"{plan.flops:.3g}",
        "peak of one device": f"{plan.peak_flops_per_s / 1e12:,.5g} TFLOP/s {precision} dense, {peak.device_name}",
        "peak from": peak.source,
        "MFU": f"{plan.mfu:.1%}",
        "GPU-hours": f"{plan.device_hours:,.0f} ({format_quantity(plan.device_hours)})",
        "devices": None if plan.devices is None else f"{plan.devices:,}",
        "wall-clock": None if plan.wall_clock_s is None else format_duration(plan.wall_clock_s),
        "cost": None if plan.cost is None else f"{plan.cost:,.0f} ({format_quantity(plan.cost)})",
    }
    for name, text in rows.items():
        if text is not None:
            table.add_row(name, text)
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    for note in notes:
        console.print(f"note: {note}", markup=False)

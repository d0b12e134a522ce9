"""``mfu-monitor estimate``: what a training run will take, before there is a model or a GPU."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from mfu_monitor.cli.devices import find_device, override_peak
from mfu_monitor.cli.units import count_parser, format_quantity, fraction_parser, quantity_parser
from mfu_monitor.errors import ConfigurationError
from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.insights.planning import AttentionShape, Plan, format_duration, plan_training, training_flops

__all__ = ["register"]

_HIGH_MFU = 0.60
"""Dense training above this is rare even in published runs (Llama 3 405B: 0.38 to 0.43, https://arxiv.org/abs/2407.21783,
table 4; PaLM 540B: 0.462, https://arxiv.org/abs/2204.02311, table 3), so a plan that needs more is told so."""

_SECONDS_PER_DAY = 86400.0
_CONVENTIONS = ("exact", "palm")


def _quantity(flag: str, text: str, metavar: str = "N") -> Any:
    return typer.Option(flag, parser=quantity_parser(flag), metavar=metavar, help=text)


def _count(flag: str, text: str) -> Any:
    return typer.Option(flag, parser=count_parser(flag), metavar="N", help=text)


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("estimate")(_estimate)


def _estimate(
    tokens: Annotated[float, _quantity("--tokens", "Tokens seen in training: 15T.")],
    parameters: Annotated[float | None, _quantity("--parameters", "Parameters of a dense model: 70B.")] = None,
    active_parameters: Annotated[
        float | None, _quantity("--active-parameters", "Mixture of experts: parameters that work on each token: 37B.")
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help='Such as "H100 SXM"; see `mfu-monitor peaks`.')] = None,
    precision: Annotated[str, typer.Option("--precision", help="bf16, fp16, fp8, fp32, tf32.")] = "bf16",
    peak_tflops: Annotated[
        float | None, _quantity("--peak-tflops", "Dense TFLOP/s of one device instead of the table's: 989.", "X")
    ] = None,
    mfu: Annotated[
        float | None, typer.Option("--mfu", parser=fraction_parser("--mfu"), metavar="X", help="Fraction: 0.40 or 40%.")
    ] = None,
    devices: Annotated[int | None, _count("--devices", "How many devices work on it.")] = None,
    days: Annotated[float | None, _quantity("--days", "Deadline in days.", "X")] = None,
    price: Annotated[float | None, _quantity("--price", "Price of one device for one hour.", "X")] = None,
    tokens_done: Annotated[float | None, _quantity("--tokens-done", "Already trained; plans only the rest.")] = None,
    layers: Annotated[int | None, _count("--layers", "For the attention term: layers.")] = None,
    width: Annotated[int | None, _count("--width", "For the attention term: query heads x head width.")] = None,
    sequence_length: Annotated[int | None, _count("--sequence-length", "For the attention term: tokens.")] = None,
    convention: Annotated[
        str, typer.Option("--convention", help="exact: causal pairs only; palm: attention's full square.")
    ] = "exact",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """FLOPs, GPU-hours, days and cost of a training run; or the devices for a deadline; or the MFU it needs.

    Give --mfu and --devices for the wall-clock time, --mfu and --days for the number of devices, or --devices and
    --days for the MFU that would be needed.
    """
    peak = _peak(device, precision, peak_tflops)
    attention = _attention(layers, width, sequence_length, convention)
    flops = training_flops(_active(parameters, active_parameters), _tokens_left(tokens, tokens_done), attention)
    plan = plan_training(
        flops,
        peak.flops_per_s(precision) or 0.0,
        mfu=mfu,
        devices=devices,
        deadline_s=None if days is None else days * _SECONDS_PER_DAY,
        price_per_device_hour=price,
    )
    notes = _notes(plan, peak, attention, asked_for_mfu=mfu is None)
    if as_json:
        print(json.dumps(_as_dict(plan, peak, precision, notes)))
    else:
        _print(plan, peak, precision, notes)


def _peak(device: str | None, precision: str, peak_tflops: float | None) -> DevicePeak:
    if peak_tflops is None:
        if device is None:
            raise ConfigurationError('give --device (such as "H100 SXM") or --peak-tflops (dense, such as 989.4)')
        return find_device(device, precision=precision, instead="--peak-tflops 989 (dense)")
    known = None if device is None else find_device(device)
    return override_peak(known, precision=precision, peak_tflops=peak_tflops, bandwidth_tb_s=None)


def _active(parameters: float | None, active_parameters: float | None) -> float:
    if parameters is None and active_parameters is None:
        raise ConfigurationError(
            "give --parameters (such as 70B), or --active-parameters for a mixture of experts (such as 37B)"
        )
    if parameters is not None and active_parameters is not None and active_parameters > parameters:
        raise ConfigurationError(
            f"--active-parameters is {format_quantity(active_parameters)} of --parameters "
            f"{format_quantity(parameters)}; expected at most as many: those that work on each token"
        )
    return active_parameters or parameters or 0.0


def _tokens_left(tokens: float, done: float | None) -> float:
    if done is not None and done >= tokens:
        raise ConfigurationError(
            f"--tokens-done is {format_quantity(done)} of --tokens {format_quantity(tokens)}; expected fewer"
        )
    return tokens - (done or 0.0)


def _attention(layers: int | None, width: int | None, length: int | None, convention: str) -> AttentionShape | None:
    if convention not in _CONVENTIONS:
        raise ConfigurationError(f"--convention is {convention!r}; expected {' or '.join(_CONVENTIONS)}")
    given = {"--layers": layers, "--width": width, "--sequence-length": length}
    missing = [flag for flag, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if layers is None or width is None or length is None:
        raise ConfigurationError(
            f"the attention term needs --layers, --width and --sequence-length; missing: {', '.join(missing)}"
        )
    return AttentionShape(layers=layers, width=width, sequence_length=length, convention=convention)


def _notes(plan: Plan, peak: DevicePeak, attention: AttentionShape | None, *, asked_for_mfu: bool) -> list[str]:
    notes = [] if attention else ["without the attention term (give --layers, --width and --sequence-length)"]
    if not plan.is_possible:
        notes.append(f"impossible: this needs {plan.mfu:.0%} of the peak; take more devices or more days")
    elif asked_for_mfu and plan.mfu > _HIGH_MFU:
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

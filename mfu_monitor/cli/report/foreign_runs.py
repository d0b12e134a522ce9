"""Runs of other tools on our scale: MFU by 6 N D from their rate, beside what they claimed."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from mfu_monitor.checks.limits import HARD_LIMIT
from mfu_monitor.cli.audit.audit_run import LogSeries
from mfu_monitor.cli.audit.log_series import Known, series_of
from mfu_monitor.errors import ConfigurationError
from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.logs import Log, read_log
from mfu_monitor.timing.step_window import StepWindow
from mfu_monitor.utilization import UtilizationReading

__all__ = ["ForeignRun", "Model", "read_foreign"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What the logs of other tools do not hold; it is taken to hold for all of them."""

    parameters: float | None = None
    peak: DevicePeak | None = None
    precision: str = "bf16"
    gpus: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignRun:
    """Its readings, what it claimed, and how it was read."""

    readings: tuple[UtilizationReading, ...]
    format: str
    claimed_mfu: float | None = None
    """The median of its own MFU column."""
    notes: tuple[str, ...] = ()


def read_foreign(path: Path, model: Model) -> ForeignRun:
    """A log of another tool as readings, as far as its columns go.

    Args:
        path: anything that ``read_log`` reads.
        model: parameters and device, for MFU on one scale; without them it stays unknown.

    Raises:
        ConfigurationError: it cannot be read, or holds no rate, time or MFU.
    """
    log = read_log(path)
    gpus = model.gpus or round(log.constant("gpus") or 1)
    parameters = model.parameters or log.constant("parameters")
    peak = model.peak.flops_per_s(model.precision) if model.peak else None
    series = series_of(log, Known(gpus=gpus, peak_flops_per_s=peak, parameters=parameters))
    rates = series.tokens_per_s
    if not rates and series.tokens_per_step:
        rates = tuple(series.tokens_per_step / s for s in series.step_s)
    rows = max(len(rates), len(series.mfu), len(series.step_s))
    if not rows:
        raise ConfigurationError(f"{path} looks like {log.format}, and holds no tokens/s, step time or MFU")
    per_rate = 6 * parameters / (gpus * peak) if parameters and peak else None
    notes = series.notes
    if rates and per_rate and (middle := statistics.median(rates) * per_rate) > HARD_LIMIT:
        notes = (*notes, f"{middle:.1%} by 6 N D is impossible and not shown; check --params, --gpu and --gpus {gpus}")
        per_rate = None
    return ForeignRun(
        readings=tuple(_reading(log, series, rates, i, rows, gpus, per_rate, model) for i in range(rows)),
        format=log.format,
        claimed_mfu=statistics.median(series.mfu) if series.mfu else None,
        notes=notes,
    )


def _reading(
    log: Log, series: LogSeries, rates: tuple[float, ...], i: int, rows: int, gpus: int, per_rate: float | None,
    model: Model,
) -> UtilizationReading:  # fmt: skip
    """One row. Its share of the run's wall time stands for its own, since clocks lie between rows."""
    step = int(series.steps[i]) if i < len(series.steps) else i
    step_s = series.step_s[i] if i < len(series.step_s) else None
    wall_s = (series.elapsed_s or 0.0) / rows
    rate = rates[i] if i < len(rates) else None
    window = StepWindow(
        first_step=step,
        last_step=step,
        steps=1,
        elapsed_s=step_s if step_s is not None else wall_s,
        wall_s=wall_s,
        tokens=round(rate * wall_s / gpus) if rate is not None and wall_s else None,
        world_tokens=round(rate * wall_s) if rate is not None and wall_s else None,
        world_size=gpus,
    )
    return UtilizationReading(
        window=window,
        mfu=rate * per_rate if rate is not None and per_rate is not None else None,
        tokens_per_s=rate,
        device_name=(model.peak.device_name if model.peak else "") or log.texts.get("device_name", ""),
        precision=model.precision if model.peak else None,
        convention="6nd",
        exactness="",  # nothing was counted
    )

"""500 logs with random names, units, scopes and layouts: a figure is right, or the log's notes say what was assumed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mfu_monitor.cli.audit.audit_run import LogSeries
from mfu_monitor.cli.audit.log_series import Known, series_of
from mfu_monitor.logs import read_log

GPUS = (1, 2, 8, 64, 1024)
RATES = {
    # name: (factor of the number written, scope that the writer meant)
    **dict.fromkeys(("tokens_per_s", "tokens/s", "tok/s", "train/tokens_per_second", "Tokens/sec"), (1.0, "either")),
    **dict.fromkeys(("tps", "tokens_per_sec", "perf/tok_per_sec", "TPS", "throughput (tokens/s)"), (1.0, "either")),
    **dict.fromkeys(("tokens/s/gpu", "tokens_per_second_per_gpu", "Tokens/s/device", "TGS"), (1.0, "device")),
    **dict.fromkeys(("throughput/device/tokens_per_sec", "tok/s/GPU", "device/tokens_per_s"), (1.0, "device")),
    **dict.fromkeys(("tokens per GPU per second", "tokens_per_gpu_per_second"), (1.0, "device")),
    **dict.fromkeys(("global_tokens_per_sec", "total tokens/s", "world/tokens_per_s"), (1.0, "world")),
    **dict.fromkeys(("ktok/s", "ktokens/s", "k tokens/s"), (1e-3, "either")),
    **dict.fromkeys(("Mtokens/s",), (1e-6, "either")),
    **dict.fromkeys(("tokens/min", "tokens_per_minute"), (60.0, "either")),
    **dict.fromkeys(("tokens_per_hour",), (3600.0, "either")),
}
TIMES = {
    **dict.fromkeys(("step_time_ms", "time_ms", "iter time (ms)", "elapsed time per iteration (ms)", "ms/step"), 1e3),
    **dict.fromkeys(("step_time_s", "step time (s)", "seconds_per_step", "s/it", "time per step (sec)"), 1.0),
    **dict.fromkeys(("step_time", "iter_time", "batch_time", "time/iteration", "dt"), None),  # either
    **dict.fromkeys(("step_time_us", "step time (us)"), 1e6),
}
MFUS = {
    **dict.fromkeys(("mfu", "MFU", "perf/mfu", "train/device/mfu", "model_flops_utilization"), None),
    **dict.fromkeys(("mfu (%)", "mfu_percent", "mfu_pct", "MFU [%]"), 100.0),
}
FLOPS = {
    **dict.fromkeys(("TFLOP/s/GPU", "tflops_per_gpu", "throughput per GPU (TFLOP/s/GPU)"), (1e-12, "device")),
    **dict.fromkeys(("device/flops_per_sec", "flops_per_gpu"), (1.0, "device")),
    **dict.fromkeys(("tflops", "TFLOPs", "model_tflops", "TFLOP/s"), (1e-12, "either")),
    **dict.fromkeys(("gflops_per_device",), (1e-9, "device")),
    **dict.fromkeys(("flops_per_sec",), (1.0, "either")),
}


@dataclass(frozen=True)
class Made:
    """A log and the truth behind it."""

    text: str
    gpus: int
    columns: tuple[str, ...]
    rate: float
    step_s: float
    mfu: float
    device_flops: float


def csv_of(rows: list[dict[str, str]], by: str = ",") -> str:
    return "\n".join([by.join(rows[0]), *(by.join(row.values()) for row in rows)]) + "\n"


def json_of(rows: list[dict[str, str]]) -> str:
    return "\n".join(json.dumps({k: float(v) if "%" not in v else v for k, v in row.items()}) for row in rows) + "\n"


def console_of(rows: list[dict[str, str]]) -> str:
    return "\n".join(" | ".join(f"{name}: {value}" for name, value in row.items()) for row in rows) + "\n"


LAYOUTS: tuple[Callable[[list[dict[str, str]]], str], ...] = (
    csv_of, lambda rows: csv_of(rows, "\t"), lambda rows: csv_of(rows, ";"), json_of, console_of,
)  # fmt: skip


def made(seed: int) -> Made:
    """A run that is possible: its step time, rate, MFU and FLOP/s as one of its columns each, or not at all."""
    draw = random.Random(seed)
    gpus = draw.choice(GPUS)
    step_s, rate, mfu = 10 ** draw.uniform(-2, 1.5), gpus * 10 ** draw.uniform(2.5, 4.5), draw.uniform(0.05, 0.75)
    flops = mfu * 989.4e12
    written: dict[str, float] = {}
    if draw.random() < 0.7:
        name = draw.choice(list(RATES))
        factor, scope = RATES[name]
        is_device = scope == "device" or (scope == "either" and draw.random() < 0.5)
        written[name] = rate * factor / (gpus if is_device else 1)
    if draw.random() < 0.7:
        name = draw.choice(list(TIMES))
        written[name] = step_s * (TIMES[name] or draw.choice((1.0, 1e3)))
    if draw.random() < 0.7:
        name = draw.choice(list(MFUS))
        written[name] = mfu * (MFUS[name] or draw.choice((1.0, 100.0)))
    if draw.random() < 0.4 or not written:
        name = draw.choice(list(FLOPS))
        factor, scope = FLOPS[name]
        is_device = scope == "device" or draw.random() < 0.5
        written[name] = flops * factor * (1 if is_device else gpus)
    rows = []
    for step in range(8):
        jitter = draw.uniform(0.995, 1.005)
        rows.append({"step": str(10 * step), **{name: f"{value * jitter:.7g}" for name, value in written.items()}})
    return Made(draw.choice(LAYOUTS)(rows), gpus, tuple(written), rate, step_s, mfu, flops)


def silent_factors(truth: Made, series: LogSeries) -> list[str]:
    """Figures that are wrong by more than the jitter, and of which no note speaks."""
    found: dict[str, tuple[tuple[float, ...], float, dict[str, Any]]] = {
        "tokens/s": (series.tokens_per_s, truth.rate, RATES),
        "step time": (series.step_s, truth.step_s, TIMES),
        "MFU": (series.mfu, truth.mfu, MFUS),
        "FLOP/s": (series.device_flops_per_s, truth.device_flops, FLOPS),
    }
    wrong = []
    for what, (values, expected, names) in found.items():
        if not values or 0.98 < sorted(values)[len(values) // 2] / expected < 1.02:
            continue
        columns = [name for name in truth.columns if name in names]
        if not any(repr(name) in note for name in columns for note in series.notes):
            wrong.append(f"{what}: {values[0]:.6g} for {expected:.6g} from {columns}")
    return wrong


@pytest.mark.parametrize("start", range(0, 500, 50))
def test_no_factor_is_silent(start: int, tmp_path: Path) -> None:
    unread = []
    for seed in range(start, start + 50):
        truth = made(seed)
        path = tmp_path / f"{seed}.log"
        path.write_text(truth.text)
        log = read_log(path)
        series = series_of(log, Known(gpus=truth.gpus))
        assert silent_factors(truth, series) == [], (seed, truth.text, series.notes)
        used = {column.name for column in log.columns}
        unread += [name for name in truth.columns if name not in used]
    assert unread == []  # every name that people write is known


@pytest.mark.parametrize("start", range(0, 500, 125))
def test_the_parameters_and_the_peak_settle_what_names_leave_open(start: int, tmp_path: Path) -> None:
    """With MFU in the log, 6 N of the model says of how many GPUs a rate is; a note says so."""
    for seed in range(start, start + 125):
        truth = made(seed)
        n = truth.device_flops * truth.gpus / truth.rate / 6.4
        path = tmp_path / f"{seed}.log"
        path.write_text(truth.text)
        series = series_of(read_log(path), Known(gpus=truth.gpus, peak_flops_per_s=989.4e12, parameters=n))
        assert silent_factors(truth, series) == [], (seed, truth.text, series.notes)

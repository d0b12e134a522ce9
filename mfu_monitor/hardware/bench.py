"""The achievable peak: the best measured product by precision over many shapes, and the streaming bandwidth."""

from __future__ import annotations

import datetime
import json
import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mfu_monitor.errors import ConfigurationError
from mfu_monitor.hardware.detect import device_peak
from mfu_monitor.hardware.matmul_rate import MEASURABLE_PRECISIONS, ProductRate, Shape, copy_rate, product_rate
from mfu_monitor.hardware.measure import (
    as_device,
    measurement,
    measurement_key,
    save_measurement,
)
from mfu_monitor.hardware.nvml import NvmlReading, read_nvml
from mfu_monitor.hardware.precision import literal_precision
from mfu_monitor.hardware.properties import read_properties

__all__ = [
    "BenchReport",
    "PrecisionBench",
    "bench_shapes",
    "default_precisions",
    "present_device",
    "run_bench",
    "write_report",
]

_BANDWIDTH_SECONDS = 1.0
# Squares, and products of transformer layers: 8192 tokens through projections of width 4096 and 8192 and MLPs.
_ACCELERATOR_SHAPES: tuple[Shape, ...] = (
    (1024, 1024, 1024),
    (2048, 2048, 2048),
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (16384, 16384, 16384),
    (8192, 4096, 4096),
    (8192, 4096, 14336),
    (8192, 14336, 4096),
    (8192, 8192, 28672),
    (16384, 8192, 8192),
)
_CPU_SHAPES: tuple[Shape, ...] = (
    (256, 256, 256),
    (512, 512, 512),
    (1024, 1024, 1024),
    (2048, 2048, 2048),
    (512, 768, 3072),
    (2048, 768, 768),
    (2048, 1024, 4096),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionBench:
    """One precision's products; ``rates`` is empty where this device cannot run them."""

    precision: str
    rates: tuple[ProductRate, ...] = ()
    conditions: NvmlReading | None = None
    """Clock, power limit and temperature right after the products, where NVML reports them."""
    table_flops_per_s: float | None = None
    """The dense peak of the table, where it knows the device."""

    @property
    def best(self) -> ProductRate | None:
        """The fastest product."""
        return max(self.rates, key=lambda rate: rate.flops_per_s, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """What a device can really do, and the conditions it was measured under."""

    device: str
    device_name: str
    precisions: tuple[PrecisionBench, ...]
    bytes_per_s: float | None
    torch_version: str
    measured_at: str

    def to_dict(self) -> dict[str, Any]:
        """Plain types for JSON."""
        return {
            "device": self.device,
            "device_name": self.device_name,
            "torch_version": self.torch_version,
            "python_version": platform.python_version(),
            "measured_at": self.measured_at,
            "bytes_per_s": self.bytes_per_s,
            "precisions": {bench.precision: _bench_to_dict(bench) for bench in self.precisions},
        }


def _bench_to_dict(bench: PrecisionBench) -> dict[str, Any]:
    best = bench.best
    products = [
        {"shape_m_k_n": list(rate.shape), "flops_per_s": rate.flops_per_s, "calls": rate.calls} for rate in bench.rates
    ]
    return {
        "flops_per_s": best.flops_per_s if best else None,
        "shape_m_k_n": list(best.shape) if best else None,
        "table_flops_per_s": bench.table_flops_per_s,
        "conditions": bench.conditions.to_dict() if bench.conditions is not None else None,
        "products": products,
    }


def present_device(device: torch.device | str) -> torch.device:
    """A device that is here and computes.

    Raises:
        ConfigurationError: torch does not know it, it is not on this machine, or it is "meta".
    """
    place = as_device(device)
    try:
        torch.empty(1, device=place)
    except Exception as error:  # a build without the backend asserts, a missing index raises
        reason = (str(error).splitlines() or [""])[0]
        raise ConfigurationError(
            f"cannot measure on {str(device)!r}: it is not here ({reason}); example: --gpu cpu"
        ) from error
    if place.type == "meta":
        raise ConfigurationError("cannot measure on 'meta': it computes nothing; example: --gpu cpu")
    return place


def bench_shapes(device_type: str) -> tuple[Shape, ...]:
    """The products that ``mfu-monitor bench`` tries."""
    return _CPU_SHAPES if device_type == "cpu" else _ACCELERATOR_SHAPES


def default_precisions(device: torch.device) -> tuple[str, ...]:
    """What people train in on this device: all of the table's values that can be measured, or fp32 and bf16."""
    peak = device_peak(device, warn=False)
    known = tuple(p for p in MEASURABLE_PRECISIONS if peak is not None and peak.flops_per_s(p) is not None)
    return known or ("fp32", "bf16")


def run_bench(
    device: torch.device | str,
    precisions: Sequence[str] | None = None,
    *,
    seconds: float = 60.0,
    shapes: Sequence[Shape] | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> BenchReport:
    """Measure every shape at every precision within about ``seconds`` in all, and save the best for ``peak="measure"``.

    Args:
        device: A torch device or its string.
        precisions: Precision names; ``default_precisions`` if not given.
        seconds: Time for all products together; each gets the same share.
        shapes: (M, K, N) of the products; ``bench_shapes`` if not given.
        on_progress: Called with a description before each product.

    Raises:
        ConfigurationError: Device, precisions or seconds are wrong.
    """
    place = present_device(device)
    names = tuple(literal_precision(p) for p in precisions or default_precisions(place))
    tried = tuple(shapes or bench_shapes(place.type))
    if not 0 < seconds < math.inf:
        raise ConfigurationError(f"seconds={seconds!r}: expected a finite number above zero; example: --seconds 60")
    share_s = seconds / (len(names) * len(tried))
    known = device_peak(place, warn=False)
    notify = on_progress or (lambda _: None)
    benches = tuple(
        PrecisionBench(
            precision=name,
            rates=_rates(place, name, tried, share_s, notify),
            conditions=read_nvml(place),
            table_flops_per_s=known.flops_per_s(name) if known is not None else None,
        )
        for name in names
    )
    return _report(place, benches)


def _rates(
    device: torch.device, precision: str, shapes: Sequence[Shape], share_s: float, notify: Callable[[str], None]
) -> tuple[ProductRate, ...]:
    rates = []
    for shape in shapes:
        notify(f"{precision} {shape[0]} x {shape[1]} x {shape[2]}")
        rate = product_rate(device, precision, shape, seconds=share_s)
        rates += [rate] if rate is not None else []
    return tuple(rates)


def _report(device: torch.device, benches: tuple[PrecisionBench, ...]) -> BenchReport:
    bytes_per_s = copy_rate(device, seconds=_BANDWIDTH_SECONDS)
    for bench in benches:
        if bench.best is not None:
            saved = measurement(bench.best, bytes_per_s=bytes_per_s, conditions=bench.conditions)
            save_measurement(measurement_key(device, bench.precision), saved)
    properties = read_properties(device)
    return BenchReport(
        device=str(device),
        device_name=properties.name if properties is not None else str(device),
        precisions=benches,
        bytes_per_s=bytes_per_s,
        torch_version=torch.__version__,
        measured_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def write_report(report: BenchReport, path: Path) -> None:
    """Save the report as JSON.

    Raises:
        ConfigurationError: The path cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report.to_dict(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"cannot write the report to {str(path)!r}: {error}; example: --output bench.json"
        ) from error

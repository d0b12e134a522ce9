"""``mfu-monitor roofline``: what one kernel can reach on a device, by shape, before it is written."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from mfu_monitor.cli.devices import find_device, override_peak
from mfu_monitor.cli.kernels import BYTES_PER_ELEMENT, ELEMENTWISE, Kernel, attention, elementwise, matmul
from mfu_monitor.cli.options import GPU, JSON, add_command, count, quantity
from mfu_monitor.errors import ConfigurationError
from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.insights.roofline import RooflinePoint

__all__ = ["register"]


@dataclass(frozen=True, kw_only=True)
class RooflineOptions:
    """The device, by the table or by hand."""

    gpu: GPU = None
    precision: Annotated[
        str, typer.Option("--precision", "--dtype", help=f"One of {', '.join(BYTES_PER_ELEMENT)}.")
    ] = "bf16"
    peak_tflops: Annotated[float | None, quantity("--peak-tflops", "Dense, instead of the table's: 989.")] = None
    bandwidth_tb_s: Annotated[float | None, quantity("--bandwidth-tb-s", "Instead of the table's: 3.35.")] = None
    as_json: JSON = False


@dataclass(frozen=True, kw_only=True)
class MatmulOptions(RooflineOptions):
    """Sizes of (M, K) x (K, N)."""

    m: Annotated[list[int], count("--m", "Rows of the left operand; repeat for several.", "-m")]
    n: Annotated[int, count("--n", "Columns of the right operand.", "-n")]
    k: Annotated[int, count("--k", "The inner size.", "-k")]
    batch: Annotated[int, count("--batch", "Independent products.")] = 1
    output_dtype: Annotated[
        str | None, typer.Option("--output-dtype", help="Default: the operands'; bf16 for fp8.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class AttentionOptions(RooflineOptions):
    """Sizes of one attention call."""

    sequence_length: Annotated[int, count("--sequence-length", "Queries and keys of each head.")]
    head_width: Annotated[int, count("--head-width", "Elements of a head.")] = 128
    heads: Annotated[int, count("--heads", "Query heads.")] = 1
    batch: Annotated[int, count("--batch", "Sequences.")] = 1
    causal: Annotated[bool, typer.Option("--causal", help="Flash attention skips the masked half.")] = False


@dataclass(frozen=True, kw_only=True)
class ElementwiseOptions(RooflineOptions):
    """The size of one elementwise kernel."""

    elements: Annotated[int, count("--elements", "Elements of one tensor.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One line of the table; a group of kernels that run one after the other adds up their times."""

    kernel: str
    arithmetic_intensity: float
    attainable_tflops: float
    bound: str
    ideal_time_us: float
    flops: int
    bytes_accessed: int


def register(app: typer.Typer) -> None:
    """Add the command and its kernels to the application."""
    group = typer.Typer(help="What a kernel can reach on a device: intensity, bound, ideal time.", no_args_is_help=True)
    add_command(group, "ridge", RooflineOptions, _ridge)
    add_command(group, "matmul", MatmulOptions, _matmul)
    add_command(group, "attention", AttentionOptions, _attention)
    for name, kind in ELEMENTWISE.items():
        text = f"{name}: {kind.operations} operations per element ({kind.source})."
        add_command(group, name, ElementwiseOptions, functools.partial(_elementwise, name), help=text)
    app.add_typer(group, name="roofline")


def _ridge(given: RooflineOptions) -> None:
    """The ridge points of a device: FLOP per byte above which a kernel is bound by compute."""
    peak = _peak(given)
    ridges = {p: ridge for p in peak.flops_per_s_by_precision if (ridge := peak.ridge_point(p)) is not None}
    if given.as_json:
        print(json.dumps({"device": peak.device_name, "ridge_points": ridges}))
        return
    table = Table("precision", "peak TFLOP/s", "ridge FLOP/B", box=None, pad_edge=False)
    for precision, ridge in ridges.items():
        table.add_row(precision, f"{peak.flops_per_s_by_precision[precision] / 1e12:,.1f}", f"{ridge:.0f}")
    _console().print(f"{peak.device_name}, {_bandwidth_text(peak)}", markup=False)
    _console().print(table)


def _matmul(given: MatmulOptions) -> None:
    """A matrix product (M, K) x (K, N)."""
    sizes = {"batch": given.batch, "output_dtype": given.output_dtype}
    kernels = [matmul(rows, given.n, given.k, given.precision, **sizes) for rows in given.m]  # type: ignore[arg-type]
    _show({kernel.label: (kernel,) for kernel in kernels}, given)


def _attention(given: AttentionOptions) -> None:
    """Forward attention: flash against scores and weights written to memory."""
    ways = attention(
        given.sequence_length, given.head_width, given.precision,
        heads=given.heads, batch=given.batch, causal=given.causal,
    )  # fmt: skip
    parts = dict(zip(("  scores", "  softmax", "  values"), ways["materialised"], strict=True))
    _show({"flash": ways["flash"], "materialised": ways["materialised"], **{k: (v,) for k, v in parts.items()}}, given)


def _elementwise(name: str, given: ElementwiseOptions) -> None:
    kernel = elementwise(name, given.elements, given.precision)
    _show({kernel.label: (kernel,)}, given)


def _show(groups: dict[str, tuple[Kernel, ...]], given: RooflineOptions) -> None:
    peak, precision = _peak(given), given.precision
    rows = [_row(label, [_point(kernel, peak, precision) for kernel in kernels]) for label, kernels in groups.items()]
    if given.as_json:
        header = {"device": peak.device_name, "dtype": precision, "ridge_point": peak.ridge_point(precision)}
        print(json.dumps({**header, "kernels": [dataclasses.asdict(row) for row in rows]}))
    else:
        _print(rows, peak, precision)


def _peak(given: RooflineOptions) -> DevicePeak:
    tflops, bandwidth = given.peak_tflops, given.bandwidth_tb_s
    if given.precision not in BYTES_PER_ELEMENT:
        raise ConfigurationError(f"--precision is {given.precision!r}; expected one of {', '.join(BYTES_PER_ELEMENT)}")
    if given.gpu is None and (tflops is None or bandwidth is None):
        raise ConfigurationError('give --gpu (such as "H100 SXM"), or both --peak-tflops (dense) and --bandwidth-tb-s')
    known = None
    if given.gpu is not None:
        known = find_device(
            given.gpu,
            precision=None if tflops is not None else given.precision,
            needs_bandwidth=bandwidth is None,
            instead="--peak-tflops (dense) and --bandwidth-tb-s",
        )
    return override_peak(known, precision=given.precision, peak_tflops=tflops, bandwidth_tb_s=bandwidth)


def _point(kernel: Kernel, peak: DevicePeak, dtype: str) -> RooflinePoint:
    vector = peak.flops_per_s("fp64" if dtype == "fp64" else "fp32")
    rate = peak.flops_per_s(dtype)
    return RooflinePoint(
        op=kernel.label,
        hardware_flops=kernel.flops,
        bytes_accessed=kernel.bytes_accessed,
        precision=dtype,
        peak_flops_per_s=rate if kernel.on_matrix_units else vector or rate,
        peak_bytes_per_s=peak.bytes_per_s,
    )


def _row(label: str, points: Iterable[RooflinePoint]) -> _Row:
    group = list(points)
    flops, moved = sum(p.hardware_flops for p in group), sum(p.bytes_accessed for p in group)
    seconds = math.fsum(p.ideal_time_s or 0.0 for p in group)
    in_memory = math.fsum(p.ideal_time_s or 0.0 for p in group if p.bound == "memory")
    return _Row(
        kernel=label,
        arithmetic_intensity=flops / moved,
        attainable_tflops=flops / seconds / 1e12,
        bound="memory" if in_memory > seconds / 2 else "compute",
        ideal_time_us=seconds * 1e6,
        flops=flops,
        bytes_accessed=moved,
    )


def _print(rows: list[_Row], peak: DevicePeak, dtype: str) -> None:
    rate, ridge = peak.flops_per_s(dtype), peak.ridge_point(dtype)
    console = _console()
    if rate is not None and ridge is not None:
        head = (
            f"{peak.device_name}: {dtype} {rate / 1e12:,.1f} TFLOP/s dense, {_bandwidth_text(peak)}, ridge {ridge:.0f}"
        )
        console.print(head, markup=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("kernel", no_wrap=True)
    for title in ("FLOP/B", "TFLOP/s", "bound", "time us"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        cells = (
            f"{row.arithmetic_intensity:.1f}",
            f"{row.attainable_tflops:.1f}",
            row.bound,
            f"{row.ideal_time_us:.1f}",
        )
        table.add_row(row.kernel, *cells)
    console.print(table)


def _bandwidth_text(peak: DevicePeak) -> str:
    return "" if peak.bytes_per_s is None else f"{peak.bytes_per_s / 1e12:.3g} TB/s"


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True)

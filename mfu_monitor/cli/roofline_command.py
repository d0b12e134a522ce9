"""``mfu-monitor roofline``: what one kernel can reach on a device, by shape, before it is written."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from mfu_monitor.cli.devices import find_device, override_peak
from mfu_monitor.cli.kernels import BYTES_PER_ELEMENT, ELEMENTWISE, Kernel, attention, elementwise, matmul
from mfu_monitor.cli.units import count_parser, quantity_parser
from mfu_monitor.errors import ConfigurationError
from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.insights.roofline import RooflinePoint

__all__ = ["register"]


def _count(*flags: str, text: str) -> Any:
    return typer.Option(*flags, parser=count_parser(flags[0]), metavar="N", help=text)


_Device = Annotated[str | None, typer.Option("--device", help='Such as "H100 SXM"; see `mfu-monitor peaks`.')]
_Dtype = Annotated[str, typer.Option("--dtype", help=f"One of {', '.join(BYTES_PER_ELEMENT)}.")]
_PeakTflops = Annotated[
    float | None,
    typer.Option(
        "--peak-tflops",
        parser=quantity_parser("--peak-tflops"),
        metavar="X",
        help="Dense, instead of the table's: 989.",
    ),
]
_Bandwidth = Annotated[
    float | None,
    typer.Option(
        "--bandwidth-tb-s",
        parser=quantity_parser("--bandwidth-tb-s"),
        metavar="X",
        help="Instead of the table's: 3.35.",
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
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
    group.command("ridge")(_ridge)
    group.command("matmul")(_matmul)
    group.command("attention")(_attention)
    for name, kind in ELEMENTWISE.items():
        group.command(name, help=f"{name}: {kind.operations} operations an element ({kind.source}).")(_of(name))
    app.add_typer(group, name="roofline")


def _ridge(
    device: _Device = None,
    peak_tflops: _PeakTflops = None,
    bandwidth_tb_s: _Bandwidth = None,
    dtype: _Dtype = "bf16",
    as_json: _Json = False,
) -> None:
    """The ridge points of a device: FLOP per byte above which a kernel is bound by compute."""
    peak = _peak(device, dtype, peak_tflops, bandwidth_tb_s)
    ridges = {p: ridge for p in peak.flops_per_s_by_precision if (ridge := peak.ridge_point(p)) is not None}
    if as_json:
        print(json.dumps({"device": peak.device_name, "ridge_points": ridges}))
        return
    table = Table("precision", "peak TFLOP/s", "ridge FLOP/B", box=None, pad_edge=False)
    for precision, ridge in ridges.items():
        table.add_row(precision, f"{peak.flops_per_s_by_precision[precision] / 1e12:,.1f}", f"{ridge:.0f}")
    _console().print(f"{peak.device_name}, {_bandwidth_text(peak)}", markup=False)
    _console().print(table)


def _matmul(
    m: Annotated[list[int], _count("--m", "-m", text="Rows of the left operand; repeat for several.")],
    n: Annotated[int, _count("--n", "-n", text="Columns of the right operand.")],
    k: Annotated[int, _count("--k", "-k", text="The inner size.")],
    batch: Annotated[int, _count("--batch", text="Independent products.")] = 1,
    output_dtype: Annotated[
        str | None, typer.Option("--output-dtype", help="Default: the operands'; bf16 for fp8.")
    ] = None,
    device: _Device = None,
    dtype: _Dtype = "bf16",
    peak_tflops: _PeakTflops = None,
    bandwidth_tb_s: _Bandwidth = None,
    as_json: _Json = False,
) -> None:
    """A matrix product (M, K) x (K, N)."""
    kernels = [matmul(rows, n, k, dtype, batch=batch, output_dtype=output_dtype) for rows in m]
    _show({kernel.label: (kernel,) for kernel in kernels}, device, dtype, peak_tflops, bandwidth_tb_s, as_json=as_json)


def _attention(
    sequence_length: Annotated[int, _count("--sequence-length", text="Queries and keys of each head.")],
    head_width: Annotated[int, _count("--head-width", text="Elements of a head.")] = 128,
    heads: Annotated[int, _count("--heads", text="Query heads.")] = 1,
    batch: Annotated[int, _count("--batch", text="Sequences.")] = 1,
    causal: Annotated[bool, typer.Option("--causal", help="Flash attention skips the masked half.")] = False,
    device: _Device = None,
    dtype: _Dtype = "bf16",
    peak_tflops: _PeakTflops = None,
    bandwidth_tb_s: _Bandwidth = None,
    as_json: _Json = False,
) -> None:
    """Forward attention: flash against scores and weights written to memory."""
    ways = attention(sequence_length, head_width, dtype, heads=heads, batch=batch, causal=causal)
    parts = dict(zip(("  scores", "  softmax", "  values"), ways["materialised"], strict=True))
    groups = {"flash": ways["flash"], "materialised": ways["materialised"], **{k: (v,) for k, v in parts.items()}}
    _show(groups, device, dtype, peak_tflops, bandwidth_tb_s, as_json=as_json)


def _of(name: str) -> Callable[..., None]:
    def command(
        elements: Annotated[int, _count("--elements", text="Elements of one tensor.")],
        device: _Device = None,
        dtype: _Dtype = "bf16",
        peak_tflops: _PeakTflops = None,
        bandwidth_tb_s: _Bandwidth = None,
        as_json: _Json = False,
    ) -> None:
        kernel = elementwise(name, elements, dtype)
        _show({kernel.label: (kernel,)}, device, dtype, peak_tflops, bandwidth_tb_s, as_json=as_json)

    return command


def _show(
    groups: dict[str, tuple[Kernel, ...]],
    device: str | None,
    dtype: str,
    peak_tflops: float | None,
    bandwidth_tb_s: float | None,
    *,
    as_json: bool,
) -> None:
    peak = _peak(device, dtype, peak_tflops, bandwidth_tb_s)
    rows = [_row(label, [_point(kernel, peak, dtype) for kernel in kernels]) for label, kernels in groups.items()]
    if as_json:
        header = {"device": peak.device_name, "dtype": dtype, "ridge_point": peak.ridge_point(dtype)}
        print(json.dumps({**header, "kernels": [dataclasses.asdict(row) for row in rows]}))
    else:
        _print(rows, peak, dtype)


def _peak(device: str | None, dtype: str, peak_tflops: float | None, bandwidth_tb_s: float | None) -> DevicePeak:
    if dtype not in BYTES_PER_ELEMENT:
        raise ConfigurationError(f"--dtype is {dtype!r}; expected one of {', '.join(BYTES_PER_ELEMENT)}")
    if device is None and (peak_tflops is None or bandwidth_tb_s is None):
        raise ConfigurationError(
            'give --device (such as "H100 SXM"), or both --peak-tflops (dense) and --bandwidth-tb-s'
        )
    known = None
    if device is not None:
        needed = None if peak_tflops is not None else dtype
        known = find_device(
            device,
            precision=needed,
            needs_bandwidth=bandwidth_tb_s is None,
            instead="--peak-tflops (dense) and --bandwidth-tb-s",
        )
    return override_peak(known, precision=dtype, peak_tflops=peak_tflops, bandwidth_tb_s=bandwidth_tb_s)


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
        figures = (
            f"{row.arithmetic_intensity:.1f}",
            f"{row.attainable_tflops:.1f}",
            row.bound,
            f"{row.ideal_time_us:.1f}",
        )
        table.add_row(row.kernel, *figures)
    console.print(table)


def _bandwidth_text(peak: DevicePeak) -> str:
    return "" if peak.bytes_per_s is None else f"{peak.bytes_per_s / 1e12:.3g} TB/s"


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True)

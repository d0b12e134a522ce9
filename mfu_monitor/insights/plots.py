"""Pictures of one step: the roofline with its operators, the waterfall from peak to MFU, FLOPs by module.

Needs matplotlib (``pip install "mfu-monitor[plots]"``), imported only when a picture is drawn. Figures are made without
pyplot, so nothing of the user's plotting state (backend, open figures) is touched; ``SummaryWriter.add_figure`` takes
them as they are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mfu_monitor.counting.step_record import FlopTotals, StepRecord
from mfu_monitor.errors import ConfigurationError
from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.insights.roofline import OperatorGroup, RooflinePoint, StepRoofline, group_points, step_roofline
from mfu_monitor.insights.waterfall import Waterfall, WaterfallStep

__all__ = ["module_flops_figure", "roofline_figure", "save_figure", "step_figures", "waterfall_figure"]

# Okabe and Ito's palette, distinguishable with every common colour-vision deficiency (https://jfly.uni-koeln.de/color/).
_BLUE, _ORANGE, _GREEN, _RED, _PURPLE, _GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#7F7F7F"
_BOUND_COLOURS = {"compute": _BLUE, "memory": _ORANGE}
_ORIGIN_COLOURS = {"modelled": _BLUE, "measured": _ORANGE}
_KINDS = {
    "model_flops": ("model", _BLUE),
    "recompute_flops": ("recompute", _ORANGE),
    "kernel_recompute_flops": ("kernel recompute", _PURPLE),
    "optimizer_flops": ("optimizer", _GREEN),
    "other_flops": ("other", _GREY),
}
_LONGEST_NAME = 48  # characters beside the bars of modules
_NAMED_DOTS = 8
_LARGEST_DOT = 420.0  # points^2; the area is proportional to the time
_SMALLEST_DOT = 12.0
_LABEL_DECADES = 0.12


def roofline_figure(record: StepRecord, peak: DevicePeak, *, step_time_s: float | None = None) -> Any:
    """The roof of each precision, the step's operators as dots sized by their ideal time.

    Args:
        record: the counted step.
        peak: dense peaks of the device, with its bandwidth.
        step_time_s: measured seconds of one step; adds the whole step as it really ran, below the roof.

    Returns:
        A ``matplotlib.figure.Figure``.

    Raises:
        ConfigurationError: matplotlib is missing, or a peak or the bandwidth is unknown; says which.

    Example:
        >>> save_figure(roofline_figure(record, peak), "roofline.svg")
    """
    roofline = step_roofline(record, peak)
    if roofline.attainable_mfu is None or not roofline.peak_bytes_per_s:
        raise ConfigurationError(f"no roofline can be drawn: {roofline.reason}")
    figure, axes = _figure(width=11.0, height=6.0)
    dots = _dots(roofline)
    limits = _intensity_limits(roofline, dots)
    _draw_roofs(axes, roofline, limits)
    _draw_dots(axes, dots, roofline)
    _draw_without_products(axes, roofline, limits)
    if step_time_s:
        _draw_measured(axes, record, step_time_s)
    axes.set(
        xscale="log", yscale="log", xlim=limits, xlabel="arithmetic intensity (FLOP/byte)",
        ylabel="attainable (TFLOP/s)",
        title=f"{peak.device_name}: attainable MFU {roofline.attainable_mfu:.1%}, ideal step "
        f"{_milliseconds(roofline.ideal_time_s or 0.0)}",
    )  # fmt: skip
    axes.set_ylim(top=2 * axes.get_ylim()[1])
    axes.grid(True, which="major", alpha=0.3)
    _legend_beside(axes)
    return figure


def waterfall_figure(waterfall: Waterfall) -> Any:
    """From 100% of peak down to the measured MFU, one bar a step.

    Raises:
        ConfigurationError: matplotlib is missing, or there is no waterfall; says why.
    """
    if waterfall.mfu is None or waterfall.step_time_s is None:
        raise ConfigurationError(f"no waterfall can be drawn: {waterfall.reason}")
    figure, axes = _figure(width=10.0, height=5.6)
    _draw_bar(axes, 0, 0.0, 1.0, _GREY, "100%")
    level = 1.0
    for row, step in enumerate(waterfall.steps, start=1):
        _draw_bar(axes, row, level - step.share, step.share, _colour_of(step), _points(-step.share))
        level -= step.share
    last = len(waterfall.steps) + 1
    _draw_bar(axes, last, 0.0, waterfall.mfu, _GREEN, f"{waterfall.mfu:.1%}")
    labels = [f"peak ({waterfall.precision}, dense)", *(step.label for step in waterfall.steps), "measured MFU"]
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    _percent_axis(axes, waterfall)
    axes.set_title(f"From peak to MFU: one step takes {_milliseconds(waterfall.step_time_s)}")
    _waterfall_legend(axes)
    return figure


def module_flops_figure(record: StepRecord, *, limit: int = 15) -> Any:
    """FLOPs by module, repeated layers taken together, by what they were for.

    Args:
        record: the counted step.
        limit: bars at most; smaller modules are summed in the last.

    Raises:
        ConfigurationError: matplotlib is missing, or nothing was counted.
    """
    groups = _module_groups(record, limit)
    total = record.hardware_flops
    if not groups or not total:
        raise ConfigurationError("no bars can be drawn: no FLOPs were counted in this step")
    scale, unit = _flops_unit(max(totals.hardware_flops for totals in groups.values()))
    figure, axes = _figure(width=10.0, height=1.6 + 0.34 * len(groups))
    left = [0.0] * len(groups)
    for field, (label, colour) in _KINDS.items():
        values = [getattr(totals, field) / scale for totals in groups.values()]
        if any(values):
            axes.barh(range(len(groups)), values, left=left, color=colour, label=label, height=0.7)
            left = [a + b for a, b in zip(left, values, strict=True)]
    for row, (totals, end) in enumerate(zip(groups.values(), left, strict=True)):
        axes.annotate(f" {totals.hardware_flops / total:.1%}", (end, row), va="center", fontsize=8)
    axes.set_yticks(range(len(groups)), [_shortened(name) for name in groups], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1 * max(left))
    axes.set(xlabel=f"FLOPs of one step ({unit})", title=f"FLOPs by module: {total / scale:,.4g} {unit} a step")
    _legend_below(axes)
    return figure


def step_figures(record: StepRecord, peak: DevicePeak | None, waterfall: Waterfall | None) -> dict[str, Any]:
    """All pictures that can be drawn, by tag for TensorBoard: ``"plots/roofline"``, ``"plots/waterfall"``, ...

    Example:
        >>> for tag, figure in step_figures(record, peak, steps).items():
        ...     writer.add_figure(tag, figure, step)
    """
    figures = {}
    measured = waterfall if waterfall is not None and waterfall.mfu is not None else None
    if peak is not None and step_roofline(record, peak).attainable_mfu is not None:
        step_s = measured.step_time_s if measured else None
        figures["plots/roofline"] = roofline_figure(record, peak, step_time_s=step_s)
    if measured is not None:
        figures["plots/waterfall"] = waterfall_figure(measured)
    if record.hardware_flops:
        figures["plots/module_flops"] = module_flops_figure(record)
    return figures


def save_figure(figure: Any, path: str | Path) -> Path:
    """Write a figure as PNG or SVG, by the suffix of ``path``; parent folders are made.

    Raises:
        ConfigurationError: another suffix.
    """
    target = Path(path)
    if target.suffix.lower() not in (".png", ".svg"):
        raise ConfigurationError(f"cannot save a picture as {target.name!r}; expected a name that ends in .png or .svg")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=120)
    return target


def _figure(*, width: float, height: float) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(
            'pictures need matplotlib, which is not installed: pip install "mfu-monitor[plots]"'
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _dots(roofline: StepRoofline) -> list[OperatorGroup]:
    """Operators with products, those of one kind and shape together, longest first."""
    points = [point for point in roofline.points if point.hardware_flops and point.bytes_accessed]
    groups = group_points(points, lambda point: (point.op, point.shapes, point.precision))
    return sorted(groups.values(), key=lambda group: -(group.ideal_time_s or 0.0))


def _intensity_limits(roofline: StepRoofline, dots: Iterable[OperatorGroup]) -> tuple[float, float]:
    known = [group.arithmetic_intensity for group in dots if group.arithmetic_intensity]
    ridges = [point.ridge_point for point in roofline.points if point.ridge_point]
    lowest = min([0.5, *(value / 4 for value in known), *(ridge / 50 for ridge in ridges)])
    return lowest, max(value * 4 for value in [*known, *ridges])


def _draw_roofs(axes: Any, roofline: StepRoofline, limits: tuple[float, float]) -> None:
    bandwidth = roofline.peak_bytes_per_s or math.nan
    rates = {p.precision: p.peak_flops_per_s for p in roofline.points if p.precision and p.peak_flops_per_s}
    for precision, rate in sorted(rates.items(), key=lambda item: -item[1]):
        ridge = rate / bandwidth
        corners = [(limits[0], limits[0] * bandwidth / 1e12), (ridge, rate / 1e12), (limits[1], rate / 1e12)]
        axes.plot(*zip(*corners, strict=True), color="black", linewidth=1.2, zorder=1)
        axes.annotate(
            f"{precision} {rate / 1e12:,.4g} TFLOP/s, ridge {ridge:,.3g}", (ridge, rate / 1e12), (-4, 5),
            textcoords="offset points", ha="right", fontsize=8,
        )  # fmt: skip
    axes.annotate(
        f"{bandwidth / 1e12:.3g} TB/s", (limits[0] * 6, limits[0] * 6 * bandwidth / 1e12), (-8, 6),
        textcoords="offset points", ha="right", fontsize=8,
    )  # fmt: skip


def _draw_dots(axes: Any, dots: Sequence[OperatorGroup], roofline: StepRoofline) -> None:
    largest = max((_share(group, roofline) for group in dots), default=1.0)
    for rank, group in enumerate(dots):
        share = _share(group, roofline)
        label = f"{rank + 1}  {_describe(group.points[0])}  {share:.1%}" if rank < _NAMED_DOTS else None
        axes.scatter(
            *_place(group), s=_dot_size(share / largest), color=_BOUND_COLOURS.get(group.bound or "", _GREY),
            alpha=0.65, edgecolors="white", linewidths=0.8, zorder=3, label=label,
        )  # fmt: skip
    for level, (where, ranks) in enumerate(_clusters(dots[:_NAMED_DOTS])):
        # Dots crowd along the roof: neighbours share one label, and labels step away from it on levels of their own.
        axes.annotate(
            _ranges([rank + 1 for rank in ranks]), where, (8, -(28 + 16 * (level % 3))), ha="center", fontsize=9,
            textcoords="offset points", arrowprops={"arrowstyle": "-", "linewidth": 0.6, "color": _GREY}, zorder=4,
        )  # fmt: skip


def _clusters(dots: Sequence[OperatorGroup]) -> list[tuple[tuple[float, float], list[int]]]:
    """Places on the chart with the ranks of the dots there; places closer than a label is wide count as one."""
    clusters: list[tuple[tuple[float, float], list[int]]] = []
    for rank, group in enumerate(dots):
        place = _place(group)
        near = next((ranks for where, ranks in clusters if _decades_apart(where, place) < _LABEL_DECADES), None)
        if near is None:
            clusters.append((place, [rank]))
        else:
            near.append(rank)
    return clusters


def _ranges(numbers: Sequence[int]) -> str:
    """1, 2, 3, 5 -> ``"1-3, 5"``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def _place(group: OperatorGroup) -> tuple[float, float]:
    """Where all operators of one kind and shape lie: intensity, and TFLOP/s on the roof."""
    return group.arithmetic_intensity or math.nan, (group.points[0].attainable_flops_per_s or math.nan) / 1e12


def _decades_apart(one: tuple[float, float], other: tuple[float, float]) -> float:
    return max(abs(math.log10(a / b)) for a, b in zip(one, other, strict=True))


def _share(group: OperatorGroup, roofline: StepRoofline) -> float:
    return (group.ideal_time_s or 0.0) / (roofline.ideal_time_s or math.inf)


def _draw_without_products(axes: Any, roofline: StepRoofline, limits: tuple[float, float]) -> None:
    """Elementwise operators and norms count no FLOPs: one diamond at the left stands for all of their time."""
    points = [point for point in roofline.points if not point.hardware_flops and point.bytes_accessed]
    if not points:
        return
    share = _share(OperatorGroup(points=tuple(points)), roofline)
    place = (limits[0] * 1.6, limits[0] * 1.6 * (roofline.peak_bytes_per_s or math.nan) / 1e12)
    axes.scatter(
        *place, s=160.0, marker="D", color=_RED, alpha=0.65, edgecolors="white", zorder=3,
        label=f"no products (elementwise, norms)  {share:.1%}",
    )  # fmt: skip


def _draw_measured(axes: Any, record: StepRecord, step_time_s: float) -> None:
    totals = record.totals
    rate = totals.hardware_flops / step_time_s / 1e12
    axes.scatter(
        totals.hardware_flops / max(1, totals.bytes_accessed), rate, marker="*", s=220, color=_GREEN, zorder=5,
        edgecolors="black", linewidths=0.6, label=f"whole step, measured: {rate:,.3g} TFLOP/s",
    )  # fmt: skip


def _legend_beside(axes: Any) -> None:
    from matplotlib.lines import Line2D

    handles, _ = axes.get_legend_handles_labels()
    colours = [
        Line2D([], [], marker="o", linestyle="", color=colour, label=f"bound by {bound}")
        for bound, colour in _BOUND_COLOURS.items()
    ]
    legend = axes.legend(
        handles=[*colours, *handles], loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8, frameon=False,
        title="operators by share of ideal time", title_fontsize=9, labelspacing=0.9,
    )  # fmt: skip
    for handle in legend.legend_handles[len(colours) :]:
        handle.set_sizes([40.0])


def _dot_size(share_of_largest: float) -> float:
    return max(_SMALLEST_DOT, _LARGEST_DOT * share_of_largest)


def _describe(point: RooflinePoint) -> str:
    name = point.op.removeprefix("aten::").lstrip("_").replace("scaled_dot_product", "sdpa")
    matrices = [shape for shape in point.shapes if len(shape) > 1]
    operands = matrices[:1] if "attention" in point.op else matrices[-2:]  # a query says all; (bias,) A, B
    text = f"{name} {' x '.join('(' + ','.join(map(str, shape)) + ')' for shape in operands)}".strip()
    return text if len(text) <= 44 else f"{text[:43]}…"


def _draw_bar(axes: Any, row: int, start: float, width: float, colour: str, text: str) -> None:
    axes.barh(row, 100 * width, left=100 * start, color=colour, height=0.66)
    end = 100 * max(start, start + width)
    axes.annotate(text, (end, row), (4, 0), textcoords="offset points", va="center", fontsize=9)


def _points(change: float) -> str:
    text = f"{100 * change:+.1f}"
    return "0.0" if text in ("-0.0", "+0.0") else text.replace("-", "−")


def _colour_of(step: WaterfallStep) -> str:
    if step.share < 0:
        return _RED
    return _GREY if step.name == "remainder" else _ORIGIN_COLOURS[step.origin]


def _percent_axis(axes: Any, waterfall: Waterfall) -> None:
    levels, level = [0.0, 1.0, waterfall.mfu or 0.0], 1.0
    for step in waterfall.steps:
        level -= step.share
        levels.append(level)
    low, high = 100 * min(levels), 100 * max(levels)
    axes.set_xlim(low * 1.05, high + 0.09 * (high - low))
    axes.set_xlabel("% of peak (a bar's width: points of it, and % of the step's time)")
    axes.grid(True, axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _waterfall_legend(axes: Any) -> None:
    from matplotlib.patches import Patch

    meanings = {
        "modelled by the roofline": _BLUE,
        "measured": _ORANGE,
        "remainder": _GREY,
        "negative: see its note": _RED,
    }
    shown = {patch.get_facecolor() for patch in axes.patches}
    handles = [Patch(color=colour, label=text) for text, colour in meanings.items()]
    _legend_below(axes, [h for h in handles if h.get_facecolor() in shown])


def _legend_below(axes: Any, handles: Sequence[Any] | None = None) -> None:
    """Under the axis, where no bar and no label can lie."""
    handles = axes.get_legend_handles_labels()[0] if handles is None else handles
    axes.figure.legend(handles=handles, loc="outside lower center", ncols=max(1, len(handles)), frameon=False)


def _module_groups(record: StepRecord, limit: int) -> dict[str, FlopTotals]:
    """Own FLOPs by module, the numbers of repeated layers replaced by a star, largest first."""
    parts: dict[str, list[FlopTotals]] = {}
    for name, totals in record.by_module(inclusive=False).items():
        if totals.hardware_flops:
            parts.setdefault(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) or "(root module)", []).append(totals)
    sums = {_times(name, len(group)): sum(group, start=FlopTotals()) for name, group in parts.items()}
    ordered = dict(sorted(sums.items(), key=lambda item: -item[1].hardware_flops))
    names = list(ordered)
    if len(names) <= limit:
        return ordered
    rest = names[limit - 1 :]
    shown = {name: ordered[name] for name in names[: limit - 1]}
    return {**shown, f"{len(rest)} more": sum((ordered[name] for name in rest), start=FlopTotals())}


def _shortened(name: str) -> str:
    """The two ends of a name that is too long for an axis: which model it is in, and which layer it is."""
    if len(name) <= _LONGEST_NAME:
        return name
    half = _LONGEST_NAME // 2
    return f"{name[: half - 2]}...{name[-half:]}"


def _times(name: str, count: int) -> str:
    return name if count == 1 else f"{name}  ×{count}"


def _flops_unit(largest: float) -> tuple[float, str]:
    units = ((1e18, "EFLOP"), (1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP"))
    return next(((scale, unit) for scale, unit in units if largest >= scale), (1.0, "FLOP"))


def _milliseconds(seconds: float) -> str:
    return (
        f"{seconds:.3g} s"
        if seconds >= 1
        else f"{seconds * 1e3:.3g} ms"
        if seconds >= 1e-3
        else f"{seconds * 1e6:.3g} us"
    )

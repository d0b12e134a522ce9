"""Pictures carry the figures they were drawn from: axes, units, dots on the roof, bars that add up."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path
from typing import Any

import pytest

from mfu_monitor.counting.step_record import FlopTotals, OpRecord, Phase, StepRecord
from mfu_monitor.errors import ConfigurationError
from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.insights.plots import module_flops_figure, roofline_figure, save_figure, step_figures, waterfall_figure
from mfu_monitor.insights.waterfall import Waterfall, waterfall
from mfu_monitor.timing.step_window import StepWindow

pytest.importorskip("matplotlib")

PEAK = DevicePeak(device_name="toy", flops_per_s_by_precision={"bf16": 100e12, "fp32": 10e12}, bytes_per_s=1e12)
WINDOW = StepWindow(first_step=1, last_step=1, steps=1, elapsed_s=10e-3, wall_s=10e-3, data_wait_s=2e-3)


def op(name: str, module: str, precision: str | None = "bf16", phase: Phase = Phase.FORWARD, **totals: int) -> OpRecord:
    shapes = ((8, 16), (16, 32)) if precision else ((8, 16),)
    return OpRecord(
        op=name, module_fqn=module, precision=precision, phase=phase, shapes=shapes, totals=FlopTotals(**totals)
    )


RECORD = StepRecord(
    ops=(
        op("aten::mm", "layers.0.up", model_flops=200 * 10**9, bytes_accessed=10**9),
        op("aten::mm", "layers.1.up", model_flops=200 * 10**9, bytes_accessed=10**9),
        op("aten::bmm", "layers.0.attn", model_flops=10 * 10**9, bytes_accessed=10**9),
        op("aten::mm", "layers.0.up", phase=Phase.RECOMPUTE, recompute_flops=100 * 10**9, bytes_accessed=10**9),
        op("aten::gelu", "layers.0", None, bytes_accessed=10**9),
    )
)
STEPS = waterfall(RECORD, PEAK, WINDOW)


def texts(figure: Any) -> str:
    from matplotlib.text import Text

    return "\n".join(text.get_text() for text in figure.findobj(Text))


def test_the_roofline_has_logarithmic_axes_with_units_and_every_dot_on_the_roof() -> None:
    figure = roofline_figure(RECORD, PEAK)
    (axes,) = figure.axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert axes.get_xlabel() == "arithmetic intensity (FLOP/byte)"
    assert axes.get_ylabel() == "attainable (TFLOP/s)"
    dots = [tuple(dot.get_offsets()[0]) for dot in axes.collections]
    # the forward products together with their rerun: 500 GFLOP on 3 GB; 10 FLOP/byte x 1 TB/s = 10 TFLOP/s
    assert dots[0] == pytest.approx((500 / 3, 100.0))
    assert dots[1] == pytest.approx((10.0, 10.0))
    low, high = axes.get_xlim()
    assert all(low < x < high for x, _ in dots)


def test_dots_are_sized_by_time() -> None:
    figure = roofline_figure(RECORD, PEAK)
    first, second = (dot.get_sizes()[0] for dot in figure.axes[0].collections[:2])
    assert first / second == pytest.approx(5.0)  # 5 ms of products at peak against 1 ms of bytes


def test_the_roofline_names_operators_shares_the_ridge_and_the_measured_step() -> None:
    words = texts(roofline_figure(RECORD, PEAK, step_time_s=10e-3))
    assert "bf16 100 TFLOP/s, ridge 100" in words
    assert "1  mm (8,16) x (16,32)  71.4%" in words  # 5 of 7 ms
    assert "no products (elementwise, norms)  14.3%" in words
    assert "whole step, measured: 51 TFLOP/s" in words  # 510 GFLOP in 10 ms
    assert "attainable MFU 58.6%" in words  # 410 GFLOP of 700 that fit into 7 ms


def test_the_waterfall_falls_from_the_peak_to_the_mfu_without_a_gap() -> None:
    (axes,) = waterfall_figure(STEPS).axes
    bars = axes.patches
    assert len(bars) == len(STEPS.steps) + 2
    assert (bars[0].get_x(), bars[0].get_width()) == (0.0, 100.0)
    level = 100.0
    for bar in bars[1:-1]:
        assert bar.get_x() + bar.get_width() == pytest.approx(level)
        level = bar.get_x()
    assert bars[-1].get_width() == pytest.approx(level)
    assert bars[-1].get_width() == pytest.approx(41.0)  # 410 GFLOP in 10 ms at 100 TFLOP/s


def test_the_waterfall_labels_every_step_with_its_points() -> None:
    words = texts(waterfall_figure(STEPS))
    for label in ("products below the ridge", "recompute", "data wait", "measured remainder", "measured MFU"):
        assert label in words
    assert "−20.0" in words  # 2 of 10 ms of data wait
    assert "% of peak" in words


def test_a_negative_step_is_drawn_upwards_in_a_colour_of_its_own() -> None:
    slow_model = StepRecord(ops=(*RECORD.ops, op("aten::add", "", None, bytes_accessed=9 * 10**9)))
    steps = waterfall(slow_model, PEAK, WINDOW)
    figure = waterfall_figure(steps)
    assert "negative: see its note" in texts(figure)
    remainder = figure.axes[0].patches[-2]
    assert remainder.get_width() < 0
    assert figure.axes[0].get_xlim()[0] < remainder.get_x() + remainder.get_width()


def test_module_bars_take_repeated_layers_together_and_stack_what_they_were_for() -> None:
    (axes,) = module_flops_figure(RECORD).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["layers.*.up  ×2", "layers.*.attn"]
    assert axes.get_xlabel() == "FLOPs of one step (GFLOP)"
    assert [round(bar.get_width()) for bar in axes.patches] == [400, 10, 100, 0]
    assert "98.0%" in texts(axes)  # 500 of 510


def test_small_modules_are_summed_and_nothing_is_lost() -> None:
    ops = tuple(op("aten::mm", f"block_{name}", model_flops=10**9 * (i + 1)) for i, name in enumerate("abcdefgh"))
    (axes,) = module_flops_figure(StepRecord(ops=ops), limit=4).axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["block_h", "block_g", "block_f", "5 more"]
    assert sum(bar.get_width() for bar in axes.patches) == pytest.approx(36.0)


@pytest.mark.parametrize(("suffix", "head"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_pictures_are_written_as_png_and_svg(tmp_path: Path, suffix: str, head: bytes) -> None:
    path = save_figure(waterfall_figure(STEPS), tmp_path / "new folder" / f"waterfall{suffix}")
    assert path.read_bytes().startswith(head)


def test_another_format_is_refused_with_the_two_that_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"expected a name that ends in .png or .svg"):
        save_figure(waterfall_figure(STEPS), tmp_path / "waterfall.docx")


def test_tensorboard_takes_the_figures(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    figures = step_figures(RECORD, PEAK, STEPS)
    assert set(figures) == {"plots/roofline", "plots/waterfall", "plots/module_flops"}
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        for tag, figure in figures.items():
            writer.add_figure(tag, figure, 3)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["images"]) == set(figures)


def test_what_cannot_be_drawn_is_left_out_or_refused_with_the_reason() -> None:
    assert set(step_figures(RECORD, None, None)) == {"plots/module_flops"}
    assert step_figures(StepRecord(), PEAK, Waterfall(reason="no peak")) == {}
    with pytest.raises(ConfigurationError, match="no peak"):
        waterfall_figure(Waterfall(reason="no peak"))
    with pytest.raises(ConfigurationError, match="memory bandwidth of toy is unknown"):
        roofline_figure(RECORD, DevicePeak(device_name="toy", flops_per_s_by_precision={"bf16": 1e12}))
    with pytest.raises(ConfigurationError, match="no FLOPs were counted"):
        module_flops_figure(StepRecord())


def test_without_matplotlib_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def no_matplotlib(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    with pytest.raises(ConfigurationError, match=r"mfu-monitor\[plots\]"):
        module_flops_figure(RECORD)


def test_drawing_leaves_the_users_pyplot_alone() -> None:
    before = "matplotlib.pyplot" in sys.modules
    module_flops_figure(RECORD)
    if before:
        import matplotlib.pyplot as plt

        assert plt.get_fignums() == []
    else:
        assert "matplotlib.pyplot" not in sys.modules


@pytest.mark.parametrize("kind", ["waterfall", "modules"])
def test_no_legend_lies_on_a_bar_and_no_name_outside_the_picture(kind: str) -> None:
    """A measured remainder below zero reaches into every corner, and many modules fill the lower right one."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    if kind == "waterfall":
        figure = waterfall_figure(waterfall(RECORD, PEAK, StepWindow(
            first_step=1, last_step=1, steps=1, elapsed_s=5e-3, wall_s=5e-3, data_wait_s=20e-3)))  # fmt: skip
    else:
        names = [f"model.language_model.a_tower_of_another_kind.part_{i}.self_attention.projection" for i in "abcdefgh"]
        ops = tuple(op("aten::mm", f"{name}.{'x' * 80}.out", model_flops=10**9) for name in names)
        figure = module_flops_figure(StepRecord(ops=ops), limit=4)
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    (axes,), (legend,) = figure.axes, figure.legends
    renderer = canvas.get_renderer()
    assert axes.get_legend() is None
    assert not legend.get_window_extent(renderer).overlaps(axes.get_window_extent(renderer))
    for label in axes.get_yticklabels():
        assert label.get_window_extent(renderer).x0 >= 0
    assert "..." in texts(figure) or kind == "waterfall"

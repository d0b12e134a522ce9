"""Console, TensorBoard, fan-out and null sinks."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from torch.utils.tensorboard import SummaryWriter

from mfu_monitor.sinks import ConsoleSink, Event, TensorBoardSink
from mfu_monitor.timing.step_window import StepWindow
from mfu_monitor.utilization import UtilizationReading


def reading_event(**values: Any) -> Event:
    window = StepWindow(first_step=11, last_step=20, steps=10, elapsed_s=1.6, wall_s=1.6)
    reading = UtilizationReading(window=window, **values)
    metrics = {f"utilization/{name}": values[name] for name in ("mfu", "hfu") if values.get(name) is not None}
    return Event(kind="reading", step=20, metrics=metrics, payload=reading.to_dict())


def printed(event: Event) -> str:
    stream = io.StringIO()
    ConsoleSink(stream).emit(event)
    return stream.getvalue()


def test_console_writes_one_line_a_window_with_percent_and_units() -> None:
    line = printed(reading_event(mfu=0.381, hfu=0.42, tokens_per_s=51_200.0))
    assert line == "mfu-monitor steps 11-20: MFU 38.1%  HFU 42%  51,200 tokens/s  0.16 s/step\n"


def test_console_keeps_three_digits_of_a_small_fraction() -> None:
    assert "MFU 0.0152%" in printed(reading_event(mfu=0.000152))


def test_console_says_why_there_is_no_mfu_and_keeps_the_rest() -> None:
    line = printed(reading_event(reason="no peak for CocoNut 9000; give peak=...", samples_per_s=3.5))
    assert "MFU 0" not in line
    assert "3.5 samples/s" in line
    assert "(no MFU: no peak for CocoNut 9000; give peak=...)" in line


def test_console_marks_a_lower_bound_and_says_nothing_of_an_exact_reading() -> None:
    assert "[lower bound]" in printed(reading_event(mfu=0.1, exactness="lower_bound"))
    assert "[" not in printed(reading_event(mfu=0.1))


def test_console_leaves_long_cards_to_others_but_shows_alerts() -> None:
    assert printed(Event(kind="card", step=1, text="a long table")) == ""
    assert "MFU fell" in printed(Event(kind="alert", step=7, text="MFU fell"))


def test_console_follows_a_redirected_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    ConsoleSink().emit(reading_event(mfu=0.5))
    assert "MFU 50%" in capsys.readouterr().out


def test_tensorboard_writes_scalars_and_text_at_the_events_own_step(tmp_path: Path) -> None:
    writer = SummaryWriter(str(tmp_path))
    sink = TensorBoardSink(writer)
    sink.emit(reading_event(mfu=0.25, hfu=0.5))
    sink.emit(Event(kind="card", step=30, title="end", text="# what ran"))
    sink.close()
    read = EventAccumulator(str(tmp_path)).Reload()
    assert [(s.step, s.value) for s in read.Scalars("utilization/mfu")] == [(20, 0.25)]
    assert [(s.step, s.value) for s in read.Scalars("utilization/hfu")] == [(20, 0.5)]
    text = read.Tensors("mfu_monitor/end/text_summary")[0]
    assert text.step == 30
    assert text.tensor_proto.string_val == [b"# what ran"]


def test_tensorboard_layout_puts_mfu_and_hfu_on_one_chart_and_step_time_on_another(tmp_path: Path) -> None:
    writer = SummaryWriter(str(tmp_path))
    sink = TensorBoardSink(writer)
    sink.emit(reading_event(mfu=0.25))
    sink.emit(reading_event(mfu=0.25))
    sink.close()
    read = EventAccumulator(str(tmp_path)).Reload()
    (written,) = read.Tensors("custom_scalars__config__")
    charts = layout_pb2.Layout.FromString(written.tensor_proto.string_val[0]).category[0].chart
    tags = {chart.title: list(chart.multiline.tag) for chart in charts}
    assert ["utilization/mfu$", "utilization/hfu$"] in tags.values()
    assert any(title.startswith("Step time") and "step_time/total_s$" in names for title, names in tags.items())


def test_tensorboard_shows_the_figures_of_an_event(tmp_path: Path) -> None:
    figure = Figure()
    figure.subplots().plot([0, 1])
    sink = TensorBoardSink(SummaryWriter(str(tmp_path)))
    sink.emit(Event(kind="outlook", step=5, figures={"roofline": figure}))
    sink.close()
    (image,) = EventAccumulator(str(tmp_path)).Reload().Images("roofline")
    assert image.step == 5
    assert image.width > 0


def test_tensorboard_leaves_scalars_and_layout_out_when_told_to(tmp_path: Path) -> None:
    sink = TensorBoardSink(SummaryWriter(str(tmp_path)), scalars=False, layout=False)
    sink.emit(reading_event(mfu=0.25))
    sink.close()
    tags = EventAccumulator(str(tmp_path)).Reload().Tags()
    assert tags["scalars"] == []
    assert tags["tensors"] == []


def test_nothing_printed_commands_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    ConsoleSink().emit(
        Event(kind="alert", step=1, title="alert/drop", text="layer\x1b[2J\x07\x9b fell by 10 \u00b5s\nNext")
    )
    written = capsys.readouterr().out
    assert not {"\x1b", "\x07", "\x9b"} & set(written)
    assert "layer\\x1b[2J" in written
    assert "10 \u00b5s\nNext" in written

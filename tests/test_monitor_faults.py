"""A perfect guest where a fault at a line (`tests/faults`) does not reach: copies, threads, sinks, signals."""

from __future__ import annotations

import copy
import gc
import io
import signal
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import mfu_monitor as mm
from mfu_monitor.errors import ConfigurationError, StageDisabledWarning, Stages, must_pass, text_of, warn

STEPS = 9
pytestmark = pytest.mark.filterwarnings("ignore::mfu_monitor.errors.MFUMonitorWarning")


class _SilentError(Exception):
    """Its own text fails."""

    def __str__(self) -> str:
        raise ValueError("no text")


def toy() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, monitor: mm.Monitor | None) -> None:
    for step in range(STEPS):
        x = torch.randn(2, 4)
        if monitor is None:
            model(x).square().mean().backward()
        else:
            with monitor.step(x):
                with monitor.phase("forward"):
                    loss = model(x).square().mean()
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None and step == 5:
            with monitor.paused("validation"):
                pass
    if monitor is not None:
        monitor.close()


def left_behind() -> list[str]:
    """What is still installed; taken out then, so that the next test finds a clean process."""
    meters = [c for c in gc.callbacks if "GcPauseMeter" in repr(c)]
    left = [*map(repr, _get_current_dispatch_mode_stack()), *map(repr, meters)]
    for meter in meters:
        gc.callbacks.remove(meter)
    return left


def test_the_text_of_a_failure_cannot_fail() -> None:
    assert "_SilentError" in text_of(_SilentError())
    stages = Stages()
    with pytest.warns(StageDisabledWarning, match="_SilentError"):
        stages.fail("x", _SilentError())
    stages.fail("x", _SilentError())
    assert stages.off == {"x"}


class _Limit:
    """A time limit as people write it: a method for a handler, an OSError for an exception."""

    def strike(self, *_: Any) -> None:
        raise TimeoutError("the time is up")


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="this system has no signals to spare")
@pytest.mark.parametrize("handler", [_Limit().strike, lambda signum, frame: _Limit().strike()])
def test_what_a_signal_handler_raises_within_our_code_is_the_users(handler: Any, sink: Any) -> None:
    def tokens(_: Any) -> int:
        signal.raise_signal(signal.SIGUSR1)
        return 1

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        monitor = mm.Monitor(toy()[0], peak=1e12, sinks=[sink], tokens=tokens)
        with pytest.raises(TimeoutError), monitor.step(torch.zeros(2, 4)):
            pass
        monitor.close()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (monitor._stages.off, left_behind()) == (set(), [])
    assert not must_pass(TimeoutError())


def test_a_fault_that_turns_two_stages_off_is_told_once() -> None:
    stages = Stages()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for stage in ("facts", "counting"):
            stages.run(stage, lambda: int("x"))
        stages.run("tokens", lambda: int("y"))
    assert [str(w.message).split("'")[1] for w in caught] == ["facts", "tokens"]
    assert stages.off == {"facts", "counting", "tokens"}


def test_a_hook_for_warnings_that_fails_does_not_reach_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError("the terminal has gone")

    monkeypatch.setattr(warnings, "showwarning", broken)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "warn", broken)
        warn("text", StageDisabledWarning)


def test_close_is_clean_up_whatever_is_off_and_closes_each_sink_once(sink: Any) -> None:
    model, optimizer = toy()
    monitor = mm.Monitor(model, log_every_n_steps=3, peak=1e12, sinks=[sink])
    train(model, optimizer, monitor)
    monitor.close()
    assert sink.closed == 1
    with monitor.step(torch.zeros(2, 4)):
        pass
    monitor._stages.off |= {"monitor", "probes", "timing"}
    monitor.close()
    assert (sink.closed, left_behind()) == (2, [])


def test_a_monitor_that_is_dropped_leaves_no_callback() -> None:
    model, _ = toy()
    monitor = mm.Monitor(model, peak=1e12, console=False)
    with monitor.step(torch.zeros(2, 4)):
        pass
    assert left_behind()
    del monitor
    gc.collect()
    assert left_behind() == []


def test_a_model_that_holds_its_monitor_can_be_copied_and_saved(tmp_path: Path) -> None:
    model, _ = toy()
    model.monitor = mm.Monitor(  # type: ignore[assignment]
        model, peak=1e12, jsonl=tmp_path / "a.jsonl", tokens=lambda batch: 1
    )
    with model.monitor.step(torch.zeros(2, 4)):
        model(torch.zeros(2, 4))
    twin = copy.deepcopy(model)
    torch.save(model, io.BytesIO())
    assert isinstance(twin.monitor, mm.Monitor)
    assert twin.monitor.reading is None
    assert twin.monitor.config.jsonl is None
    model.monitor.close()


def test_two_monitors_around_one_step_and_steps_ended_on_another_thread() -> None:
    model, _ = toy()
    first, second = (mm.Monitor(model, log_every_n_steps=2, peak=1e12, console=False) for _ in range(2))
    for _ in range(6):
        x = torch.randn(2, 4)
        with first.step(x), second.step(x):
            model(x).sum().backward()
    for monitor in (first, second):
        monitor.close()
        assert monitor.totals["steps"] == 6
    late = mm.Monitor(model, log_every_n_steps=2, peak=1e12, console=False)
    for _ in range(4):
        with late.step(torch.randn(2, 4)):
            pass
    late.begin_step(torch.randn(2, 4))
    thread = threading.Thread(target=late.end_step)
    thread.start()
    thread.join()
    late.close()
    assert (late.totals["steps"], left_behind()) == (5, [])


class TestSinks:
    """Where readings go."""

    @pytest.mark.parametrize("sinks", ["runs/x", ["runs/x"], [Path("runs/x")], 3])
    def test_a_path_where_a_sink_is_wanted_is_refused_at_once(self, sinks: Any) -> None:
        with pytest.raises(ConfigurationError, match="is not a sink"):
            mm.Monitor(sinks=sinks)

    def test_a_loop_without_any_sink_prints_a_line_a_window(self, capsys: Any) -> None:
        model, optimizer = toy()
        train(model, optimizer, mm.Monitor(model, log_every_n_steps=3, peak=1e12))
        assert capsys.readouterr().out.count("mfu-monitor steps") == 3

    @pytest.mark.parametrize("options", [{"console": False}, {"jsonl": "a.jsonl"}])
    def test_a_loop_with_a_file_prints_nothing(self, capsys: Any, tmp_path: Path, options: dict[str, Any]) -> None:
        options = {name: tmp_path / value if name == "jsonl" else value for name, value in options.items()}
        model, optimizer = toy()
        train(model, optimizer, mm.Monitor(model, log_every_n_steps=3, peak=1e12, **options))
        assert capsys.readouterr().out == ""

    def test_a_loop_of_ones_own_writes_for_tensorboard(self, tmp_path: Path) -> None:
        accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        model, optimizer = toy()
        train(model, optimizer, mm.Monitor(model, log_every_n_steps=3, peak=1e12, tensorboard=tmp_path / "run"))
        events = accumulator.EventAccumulator(str(tmp_path / "run"))
        events.Reload()
        assert len(events.Scalars("utilization/mfu")) == 3

    @pytest.mark.parametrize("value", [3, "", True])
    def test_a_wrong_folder_for_tensorboard_is_refused(self, value: Any) -> None:
        with pytest.raises(ConfigurationError, match="tensorboard"):
            mm.Monitor(tensorboard=value)


class TestSummary:
    """The whole run."""

    def test_total_and_median_of_windows(self, bench: Any) -> None:
        monitor = bench.monitor(log_every_n_steps=5)
        for seconds in (1.0, 2.0, 4.0):  # a step is 600 FLOPs, the peak 1000 FLOP/s
            bench.run(monitor, 5, seconds=seconds)
        monitor.close()
        summary = monitor.summary
        assert (summary.windows, summary.steps, summary.elapsed_s) == (3, 14, pytest.approx(34.0))  # one was counted
        assert summary.mfu == pytest.approx(14 * 600 / (34.0 * 1000.0))
        assert summary.mfu_median == pytest.approx(0.3)
        assert "24.7% in total, 30% in the median window" in str(summary)

    def test_a_run_that_measured_nothing_says_so_once(self, bench: Any, caplog: Any) -> None:
        monitor = bench.monitor(log_every_n_steps=5)
        bench.run(monitor, 1)
        monitor.close()
        monitor.close()
        assert len([r for r in caplog.records if "no window was measured" in r.message]) == 1
        assert "nothing was measured" in str(monitor.summary)

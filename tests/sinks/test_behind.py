"""Sinks that are slow, full, gone or shared: training goes on, and what can be written is written."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mfu_monitor as mm
from mfu_monitor.cli.report.read_runs import read_runs
from mfu_monitor.errors import MFUMonitorWarning
from mfu_monitor.sinks import Event, JsonlSink, read_jsonl
from mfu_monitor.sinks.behind import WriteBehind
from mfu_monitor.timing.step_window import StepWindow
from mfu_monitor.utilization import UtilizationReading


def emit(sink: JsonlSink, *steps: int) -> list[str]:
    """The warnings meanwhile."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in steps:
            sink.emit(Event(kind="run", step=step))
    return [str(w.message) for w in caught]


def closed(sink: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sink.close()
    return [str(w.message) for w in caught]


def steps_of(path: Path) -> list[int]:
    return [event.step for event in read_jsonl(path).events]


def test_a_deleted_directory_is_made_anew_with_one_warning(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "logs" / "a.jsonl")
    assert emit(sink, 0) == []
    shutil.rmtree(tmp_path / "logs")
    found = emit(sink, 1) + emit(sink, 2) + closed(sink)
    assert len(found) == 1
    assert "deleted or replaced" in found[0]
    assert steps_of(sink.path) == [1, 2]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full disk to offer")
def test_a_full_disk_is_one_warning_and_no_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").symlink_to("/dev/full")
    sink = JsonlSink(tmp_path / "a.jsonl")
    began_s = time.perf_counter()
    found = [text for step in range(50) for text in emit(sink, step)]
    assert time.perf_counter() - began_s < 0.5
    found += closed(sink)
    assert len(found) == 1
    assert "No space left on device" in found[0]


def test_a_disk_that_is_full_for_a_while_loses_nothing_and_cuts_no_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sink, real, room = JsonlSink(tmp_path / "a.jsonl"), os.write, [100]

    def write(descriptor: int, data: bytes) -> int:
        if threading.current_thread().name != "mfu-monitor-sink":
            return real(descriptor, data)
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        sent = real(descriptor, data[: room[0]])
        room[0] -= sent
        return sent

    monkeypatch.setattr(os, "write", write)
    emit(sink, 0, 1, 2)
    room[0] = 10**9
    closed(sink)
    assert steps_of(sink.path) == [0, 1, 2]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_without_a_reader_stops_nothing_and_one_with_a_reader_gets_the_lines(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    began_s = time.perf_counter()
    sink = JsonlSink(tmp_path / "a.jsonl")
    assert len(emit(sink, 0, 1) + closed(sink)) == 1
    assert time.perf_counter() - began_s < 2.0
    reader = os.open(tmp_path / "a.jsonl", os.O_RDONLY | os.O_NONBLOCK)
    assert emit(sink, 2) + closed(sink) == []
    assert json.loads(os.read(reader, 1 << 16))["step"] == 2
    os.close(reader)


def test_what_waits_is_bounded_the_oldest_goes_and_a_stuck_write_ends_with_a_warning() -> None:
    release, written = threading.Event(), []

    def write(item: int) -> None:
        release.wait()
        written.append(item)

    behind = WriteBehind(write, "slow", most_waiting=10)
    for item in range(100):
        behind.put(item)
    with pytest.warns(MFUMonitorWarning, match="slow: 100 events were not written"):
        behind.close(timeout_s=0.05)
    release.set()
    time.sleep(0.05)
    assert written[:1] == [0] or written[:1] == [90]
    assert len(written) <= 11


def test_items_that_wait_at_the_end_of_the_process_are_written(tmp_path: Path) -> None:
    program = (
        "from mfu_monitor.sinks import Event, JsonlSink\n"
        f"sink = JsonlSink({str(tmp_path / 'a.jsonl')!r})\n"
        "sink._behind._is_quick = False\n"
        "for step in range(200): sink.emit(Event(kind='run', step=step))\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    assert steps_of(tmp_path / "a.jsonl") == list(range(200))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_writes_its_own_events_alone(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "a.jsonl")
    emit(sink, 0)
    if not (pid := os.fork()):
        emit(sink, 1)
        sink.close()
        os._exit(0)
    os.waitpid(pid, 0)
    emit(sink, 2)
    sink.close()
    assert steps_of(sink.path) == [0, 1, 2]


class SlowSink:
    """Takes its time."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.kinds, self.closed = seconds, list[str](), 0
        self.on_the_loops_thread = 0

    def emit(self, event: Event) -> None:
        time.sleep(self.seconds)
        self.on_the_loops_thread += threading.current_thread() is threading.main_thread()
        self.kinds.append(event.kind)

    def close(self) -> None:
        self.closed += 1


def test_a_sink_that_is_slow_is_called_behind_training_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mfu_monitor.monitor._SLOW_SINK_S", 0.2)
    slow, model = SlowSink(0.12), nn.Linear(4, 4)
    monitor = mm.Monitor(model, log_every_n_steps=1, peak=1e12, sinks=[slow], alerts=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(12):
            with monitor.step(torch.ones(2, 4)):
                model(torch.ones(2, 4)).sum().backward()
        monitor.close()
    assert slow.on_the_loops_thread == 2
    assert [str(w.message)[:18] for w in caught] == ["The sink SlowSink "]
    assert slow.kinds.count("reading") >= 10
    assert slow.closed == 1


def reading(step: int) -> dict[str, Any]:
    window = StepWindow(first_step=step, last_step=step + 9, steps=10, elapsed_s=2.0, wall_s=2.0, world_size=2)
    return UtilizationReading(window=window, mfu=0.25).to_dict()


def test_ranks_and_runs_that_share_a_file_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    sink = JsonlSink(path)
    for step in (0, 10, 20):
        for rank in (0, 1):
            sink.emit(Event(kind="reading", step=step + 9, payload=reading(step), run_id=f"run{rank}", rank=rank))
    for step in (30, 40):  # rank 0 resumed
        sink.emit(Event(kind="reading", step=step + 9, payload=reading(step), run_id="later", rank=0))
    sink.close()
    runs = read_runs(path)
    assert [(run.name, len(run.readings)) for run in runs] == [("a (rank 0)", 5), ("a (rank 1)", 3)]
    assert [len(part.readings) for part in read_jsonl(path).writers] == [3, 3, 2]
    assert len(read_jsonl(path).of_rank(0).readings) == 5


def test_two_runs_at_once_are_two_runs(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    sink = JsonlSink(path)
    for step in (0, 10, 20):
        for run in "ab":
            sink.emit(Event(kind="reading", step=step + 9, payload=reading(step), run_id=run))
    sink.close()
    assert [(run.name, len(run.readings)) for run in read_runs(path)] == [("a (run 1)", 3), ("a (run 2)", 3)]


def test_every_event_of_a_monitor_says_who_reports_and_no_generator_is_touched(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    monitors = [mm.Monitor(log_every_n_steps=1, jsonl=tmp_path / "a.jsonl") for _ in range(2)]
    for monitor in monitors:
        for _ in range(3):
            with monitor.step(torch.ones(2, 4)):
                pass
        monitor.close()
    assert torch.equal(torch.get_rng_state(), before)
    ids = [{event.run_id for event in part.events} for part in read_jsonl(tmp_path / "a.jsonl").writers]
    assert [len(found) for found in ids] == [1, 1]
    assert ids[0] != ids[1]

"""The meters for what slows a step: each measures its fault, and leaves the process as it was."""

from __future__ import annotations

import dataclasses
import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mfu_monitor.hardware.nvml import NvmlReading
from mfu_monitor.timing.probes import (
    GcPauseMeter,
    TrainingProbes,
    allocation_retries,
    cpu_wait_s_by_thread,
)
from mfu_monitor.timing.step_window import StepWindow

CUDA = torch.device("cuda")


class Ticks:
    """A clock that moves one second at each look."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def test_a_collection_is_timed_from_its_start_to_its_end() -> None:
    meter = GcPauseMeter(Ticks())
    meter.start()
    try:
        before = meter.collections
        gc.collect()
        assert meter.collections == before + 1
        assert meter.seconds == meter.collections * 1.0
    finally:
        meter.stop()


def test_the_callback_is_installed_once_and_removed() -> None:
    before = list(gc.callbacks)
    meter = GcPauseMeter()
    meter.start()
    meter.start()
    assert len(gc.callbacks) == len(before) + 1
    meter.stop()
    meter.stop()
    assert gc.callbacks == before
    gc.collect()
    assert meter.collections == 0 or meter.seconds >= 0.0


def test_no_line_of_python_runs_at_a_collection_so_that_no_interruption_is_lost_there() -> None:
    meter, seen = GcPauseMeter(), []
    meter.start()
    before = meter.collections
    sys.setprofile(lambda frame, event, _: seen.append(frame.f_code.co_filename) if event == "call" else None)
    try:
        gc.collect()
    finally:
        sys.setprofile(None)
        meter.stop()
    assert meter.collections == before + 1
    assert [name for name in seen if "mfu_monitor" in name] == []  # other tools have callbacks of their own


def test_allocation_retries_are_read_for_a_cuda_device_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"num_alloc_retries": 5})
    assert allocation_retries(CUDA) == 5
    assert allocation_retries(torch.device("cpu")) is None
    assert allocation_retries(None) is None


def test_cuda_is_never_initialised_by_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: pytest.fail("initialises CUDA"))
    assert allocation_retries(CUDA) is None


def schedstat(folder: Path, waits_ns: dict[int, int]) -> Path:
    for thread, wait_ns in waits_ns.items():
        (folder / str(thread)).mkdir(parents=True, exist_ok=True)
        (folder / str(thread) / "schedstat").write_text(f"999 {wait_ns} 7\n")
    return folder


def test_the_run_queue_wait_is_the_second_field_in_nanoseconds(tmp_path: Path) -> None:
    schedstat(tmp_path, {11: 2_500_000_000, 12: 0})
    (tmp_path / "13").mkdir()  # a thread that ended meanwhile
    assert cpu_wait_s_by_thread(tmp_path) == {11: 2.5, 12: 0.0}


def test_without_the_files_the_wait_is_unknown(tmp_path: Path) -> None:
    assert cpu_wait_s_by_thread(tmp_path / "none") is None
    assert cpu_wait_s_by_thread(tmp_path) is None


def test_take_gives_the_difference_since_the_last_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = iter([{1: 1.0}, {1: 1.0}, {1: 1.5, 2: 0.8}, {1: 3.5, 2: 0.9}])
    monkeypatch.setattr("mfu_monitor.timing.probes.cpu_wait_s_by_thread", lambda: next(waits))
    probes = TrainingProbes()
    probes.start()
    try:
        assert probes.take()["cpu_wait_s"] == 0.8  # the new thread waited longest
        assert probes.take()["cpu_wait_s"] == 2.0  # 3.5 - 1.5; waits of threads do not add up
    finally:
        probes.stop()


def test_what_was_discarded_is_in_no_window() -> None:
    probes = TrainingProbes(clock=Ticks())
    probes.start()
    try:
        gc.collect()
        probes.discard()
        gc.disable()
        assert probes.take()["gc_pause_s"] == 0.0
        gc.collect()
        assert probes.take()["gc_pause_s"] == 1.0
    finally:
        gc.enable()
        probes.stop()


def test_a_pause_is_left_out_and_what_was_before_it_is_kept() -> None:
    probes = TrainingProbes(clock=Ticks())
    probes.start()
    gc.disable()
    try:
        gc.collect()
        probes.pause()
        gc.collect()
        probes.pause()  # checkpoint saving inside validation
        gc.collect()
        probes.resume()
        gc.collect()
        probes.resume()
        assert probes.take()["gc_pause_s"] == 2.0  # each collection is one tick long; two of them were in the pause
    finally:
        gc.enable()
        probes.stop()


def test_a_window_that_ends_in_a_pause_has_nothing_of_it() -> None:
    probes = TrainingProbes(clock=Ticks())
    probes.start()
    gc.disable()
    try:
        gc.collect()
        probes.pause()
        gc.collect()
        assert probes.take()["gc_pause_s"] == 1.0
        gc.collect()
        probes.resume()
        assert probes.take()["gc_pause_s"] == 0.0
    finally:
        gc.enable()
        probes.stop()


def test_a_pause_leaves_the_waits_of_each_thread_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thread 1 waits 1 s before the pause, 5 s in it, 2 s after it; thread 2 is new in the pause, 3 is new after it."""
    waits = iter([{1: 1.0}, {1: 1.0}, {1: 2.0}, {1: 7.0, 2: 4.0}, {1: 9.0, 2: 4.5, 3: 0.5}])
    monkeypatch.setattr("mfu_monitor.timing.probes.cpu_wait_s_by_thread", lambda: next(waits))
    probes = TrainingProbes()
    probes.discard()
    probes.pause()
    probes.resume()
    assert probes.take()["cpu_wait_s"] == pytest.approx(1.0 + 2.0)


def test_the_fields_are_those_of_a_window() -> None:
    names = {f.name for f in dataclasses.fields(StepWindow)}
    state = NvmlReading(sm_clock_mhz=1410.0, temperature_c=85.0, clock_reasons=("hw_thermal_slowdown", "gpu_idle"))
    probes = TrainingProbes(device=CUDA, read_device=lambda device: state)
    fields = probes.take()
    assert fields.keys() <= names
    assert fields["sm_clock_mhz"] == 1410.0
    assert fields["throttle_reasons"] == ("hw_thermal_slowdown",)


def test_the_driver_is_asked_once_an_interval_and_the_answer_kept() -> None:
    asked: list[Any] = []

    def read(device: torch.device) -> NvmlReading:
        asked.append(device)
        return NvmlReading(sm_clock_mhz=1000.0 + len(asked))

    probes = TrainingProbes(device=CUDA, read_device=read, device_interval_s=2.5, clock=Ticks())
    # Looks at 1, 2, 3, 4 s: asked at 1 and again at 4, the first that is 2.5 s later.
    assert [probes.take()["sm_clock_mhz"] for _ in range(4)] == [1001.0, 1001.0, 1001.0, 1002.0]


def test_a_driver_that_cannot_tell_leaves_the_fields_unknown() -> None:
    assert "sm_clock_mhz" not in TrainingProbes(device=CUDA, read_device=lambda device: None).take()


def test_a_counter_that_was_reset_is_unknown_for_that_window(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([5, 5, 9, 2])
    monkeypatch.setattr("mfu_monitor.timing.probes.allocation_retries", lambda device: next(counts))
    probes = TrainingProbes()
    probes.discard()
    assert probes.take()["allocation_retries"] == 4
    assert "allocation_retries" not in probes.take()

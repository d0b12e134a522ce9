"""Stand-ins for what a test must control: clocks, events of a device, and counters."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import nn

import mfu_monitor as mm
from mfu_monitor.counting.step_record import FlopTotals, OpRecord, Phase, StepRecord

# The same examples in each run, so that a change and not chance decides; `make fuzz` draws others.
settings.register_profile("same", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("free", max_examples=int(os.environ.get("MFU_MONITOR_FUZZ") or 100), deadline=None)
settings.load_profile("free" if os.environ.get("MFU_MONITOR_FUZZ") else "same")


class FakeClock:
    """A clock that moves only when told. Marks are floats, as the host's are."""

    name = "fake"

    def __init__(self, now_s: float = 100.0) -> None:
        self.now_s = now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds

    def mark(self) -> float:
        return self.now_s

    def elapsed_s(self, start: float, end: float) -> float | None:
        return end - start


@dataclass
class FakeDevice:
    """A device that runs behind the host: events recorded on it become ready when the test says so."""

    now_ms: float = 0.0
    reached_ms: float = 0.0
    events: list[FakeEvent] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)

    def advance(self, seconds: float) -> None:
        """Queue work of so many seconds."""
        self.now_ms += seconds * 1e3

    def catch_up(self) -> None:
        """The device reaches everything that is queued."""
        self.reached_ms = self.now_ms

    def event(self) -> FakeEvent:
        self.events.append(FakeEvent(self))
        return self.events[-1]


class FakeEvent:
    """What torch's timing events do, with a note of every call that would wait."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.at_ms: float | None = None

    def record(self, stream: Any = None) -> None:
        self.at_ms = self.device.now_ms

    def query(self) -> bool:
        return self.at_ms is not None and self.at_ms <= self.device.reached_ms

    def elapsed_time(self, end: FakeEvent) -> float:
        if not (self.query() and end.query()):
            raise RuntimeError("both events must be completed before calculating elapsed time")
        assert self.at_ms is not None
        assert end.at_ms is not None
        return end.at_ms - self.at_ms

    def synchronize(self) -> None:
        self.device.waits.append("Event.synchronize")

    def wait(self, stream: Any = None) -> None:
        self.device.waits.append("Event.wait")


_CACHES = itertools.count()


@pytest.fixture(autouse=True)
def _no_measurements_of_this_machine(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured here before must not decide a test: every test begins with a cache of its own, and empty."""
    monkeypatch.setenv("MFU_MONITOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "caches" / str(next(_CACHES))))


@pytest.fixture
def fake_clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def fake_device() -> FakeDevice:
    return FakeDevice()


class FakeCounter:
    """A counter that answers with records made beforehand, and knows whether it is entered."""

    def __init__(self, records: list[Any], log: list[str]) -> None:
        self._records, self._log = records, log
        self.record: Any = None

    def __enter__(self) -> FakeCounter:
        self._log.append("enter")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._log.append("exit" if exc_info[0] is None else "exit with exception")
        self.record = self._records.pop(0) if len(self._records) > 1 else self._records[0]


class FakeCounterFactory:
    """Makes counters; ``log`` tells what happened to them. The last record is given again and again."""

    def __init__(self) -> None:
        self.records: list[Any] = [make_record()]
        self.log: list[str] = []

    def __call__(self, model: Any) -> FakeCounter:
        return FakeCounter(self.records, self.log)


def make_record(
    model_flops: int = 600, *, recompute_flops: int = 100, precision: str | None = "fp32", **fields: Any
) -> StepRecord:
    """A record of a forward and of what backward ran again."""
    totals = FlopTotals(model_flops=model_flops, palm_model_flops=model_flops)
    rerun = FlopTotals(recompute_flops=recompute_flops)
    forward = OpRecord(op="aten::mm", phase=Phase.FORWARD, precision=precision, totals=totals)
    recompute = OpRecord(op="aten::mm", phase=Phase.RECOMPUTE, precision=precision, totals=rerun)
    return StepRecord(ops=(forward, recompute), is_training=True, **fields)


class RecordingSink:
    """Keeps what it is sent."""

    shows_figures = True

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.closed = 0

    def emit(self, event: Any) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.closed += 1

    def of_kind(self, kind: str) -> list[Any]:
        return [event for event in self.events if event.kind == kind]


@pytest.fixture
def counters() -> FakeCounterFactory:
    return FakeCounterFactory()


@pytest.fixture
def record() -> Any:
    """The function that makes records."""
    return make_record


@pytest.fixture
def sink() -> RecordingSink:
    return RecordingSink()


class Bench:
    """A monitor on fake parts, and a loop for it."""

    def __init__(self, clock: Any, counters: Any, sink: Any) -> None:
        self.clock, self.counters, self.sink = clock, counters, sink
        self.compiles = 0

    def monitor(self, model: nn.Module | None = None, **options: Any) -> mm.Monitor:
        defaults = {"log_every_n_steps": 10, "peak": 1000.0, "max_overhead": 0.0}
        return mm.Monitor(
            model,
            sinks=[self.sink],
            clock=options.pop("clock", self.clock),
            host_clock=self.clock,
            counter_factory=self.counters,
            compile_counter=lambda: self.compiles,
            **{**defaults, **options},
        )

    def run(self, monitor: mm.Monitor, steps: int, *, seconds: float = 1.0, batch: Any = None) -> None:
        for _ in range(steps):
            with monitor.step(torch.zeros(2, 8, dtype=torch.long) if batch is None else batch):
                self.clock.advance(seconds)

    def run_to_the_end(self, monitor: mm.Monitor, steps: int) -> None:
        self.run(monitor, steps)
        monitor.pause("x")
        monitor.resume("x")
        monitor.close()


@pytest.fixture
def bench(fake_clock: Any, counters: Any, sink: Any) -> Bench:
    return Bench(fake_clock, counters, sink)

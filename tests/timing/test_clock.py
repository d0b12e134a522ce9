"""Clocks: never a wait, and the right one for a device."""

from __future__ import annotations

from typing import Any

import pytest

from mfu_monitor.timing.clock import CudaEventClock, HostClock, clock_for


def test_the_host_clock_measures_forward() -> None:
    clock = HostClock()
    start = clock.mark()
    assert clock.elapsed_s(start, clock.mark()) >= 0


@pytest.mark.parametrize("device", ["cpu", "meta", None])
def test_work_on_the_host_gets_the_host_clock(device: str | None) -> None:
    assert isinstance(clock_for(device), HostClock)


def test_an_accelerator_whose_events_cannot_be_made_gets_the_host_clock() -> None:
    # This machine's torch has the module of the backend, and no device behind it.
    assert isinstance(clock_for("mps"), HostClock)


def test_an_event_is_read_only_when_both_ends_are_passed(fake_device: Any) -> None:
    clock = CudaEventClock("cuda", event_factory=fake_device.event)
    start = clock.mark()
    fake_device.advance(0.5)
    end = clock.mark()
    assert clock.elapsed_s(start, end) is None
    fake_device.catch_up()
    assert clock.elapsed_s(start, end) == pytest.approx(0.5)
    assert fake_device.waits == []


def test_a_released_event_is_recorded_anew(fake_device: Any) -> None:
    clock = CudaEventClock("cuda", event_factory=fake_device.event)
    first = clock.mark()
    clock.release([first])
    assert clock.mark() is first
    assert len(fake_device.events) == 1

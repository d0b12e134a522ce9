"""Windows: which seconds are in, which are out, and when they are known."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mfu_monitor.timing.clock import CudaEventClock
from mfu_monitor.timing.step_window import StepWindow
from mfu_monitor.timing.window import WindowBuilder

approx: Any = pytest.approx


@pytest.fixture
def builder(fake_clock: Any) -> WindowBuilder:
    return WindowBuilder(clock=fake_clock, host_clock=fake_clock)


def run_step(builder: WindowBuilder, clock: Any, seconds: float, *, step: int = 0, **end: Any) -> None:
    builder.begin_step(step)
    clock.advance(seconds)
    builder.end_step(**end)


def only_window(builder: WindowBuilder) -> StepWindow:
    (window,) = builder.resolved()
    return window


class TestWhatCounts:
    """Steps and the wait for data are in; all else is out and named."""

    def test_validation_is_left_out_of_ten_steps_of_a_second(self, builder: WindowBuilder, fake_clock: Any) -> None:
        for step in range(10):
            run_step(builder, fake_clock, 1.0, step=step)
            if step == 4:
                builder.pause("validation")
                fake_clock.advance(5.0)
                builder.resume("validation")
        builder.close_window()
        window = only_window(builder)
        assert window.elapsed_s == approx(10.0)
        assert window.wall_s == approx(15.0)
        assert window.excluded_s == {"validation": approx(5.0)}
        assert (window.first_step, window.last_step, window.steps) == (0, 9, 10)

    def test_the_wait_for_data_is_counted(self, builder: WindowBuilder, fake_clock: Any) -> None:
        run_step(builder, fake_clock, 0.0)  # the run begins: there is no wait before the first step
        builder.close_window()
        for step in range(10):
            fake_clock.advance(0.5)
            run_step(builder, fake_clock, 1.0, step=step)
        builder.close_window()
        window = builder.resolved()[-1]
        assert window.elapsed_s == approx(15.0)
        assert window.data_wait_s == approx(5.0)

    def test_a_step_that_compiles_is_not_averaged(self, builder: WindowBuilder, fake_clock: Any) -> None:
        run_step(builder, fake_clock, 25.1, excluded="compile")
        for step in range(1, 5):
            run_step(builder, fake_clock, 4.65, step=step)
        builder.close_window()
        window = only_window(builder)
        assert window.elapsed_s / window.steps == approx(4.65)
        assert (window.steps, window.excluded_steps) == (4, 1)
        assert window.excluded_s == {"compile": approx(25.1)}

    def test_the_wait_before_an_excluded_step_goes_with_it(self, builder: WindowBuilder, fake_clock: Any) -> None:
        run_step(builder, fake_clock, 1.0)
        fake_clock.advance(0.5)
        run_step(builder, fake_clock, 3.0, step=1, excluded="counted")
        builder.close_window()
        window = only_window(builder)
        assert window.elapsed_s == approx(1.0)
        assert window.excluded_s == {"counted": approx(3.5)}

    def test_a_pause_inside_an_excluded_step_keeps_its_own_reason(
        self, builder: WindowBuilder, fake_clock: Any
    ) -> None:
        builder.begin_step(0)
        fake_clock.advance(1.0)
        builder.pause("sampling")
        fake_clock.advance(2.0)
        builder.resume("sampling")
        builder.end_step(excluded="counted")
        builder.close_window()
        assert only_window(builder).excluded_s == {"counted": approx(1.0), "sampling": approx(2.0)}

    def test_an_aborted_step_is_no_step(self, builder: WindowBuilder, fake_clock: Any) -> None:
        run_step(builder, fake_clock, 1.0)
        builder.begin_step(1)
        fake_clock.advance(7.0)
        builder.abort_step()
        run_step(builder, fake_clock, 1.0, step=1)
        builder.close_window()
        window = only_window(builder)
        assert (window.steps, window.elapsed_s) == (2, approx(2.0))
        assert window.excluded_s == {"aborted": approx(7.0)}

    def test_a_step_whose_end_never_came_is_aborted_by_the_next(self, builder: WindowBuilder, fake_clock: Any) -> None:
        builder.begin_step(0)
        fake_clock.advance(3.0)
        run_step(builder, fake_clock, 1.0, step=1)
        builder.close_window()
        assert only_window(builder).elapsed_s == approx(1.0)


class TestPauses:
    """Pauses may be nested, forgotten, or unknown."""

    def test_nested_pauses_go_to_the_inner_reason(self, builder: WindowBuilder, fake_clock: Any) -> None:
        run_step(builder, fake_clock, 1.0)
        builder.pause("validation")
        fake_clock.advance(1.0)
        builder.pause("checkpoint")
        fake_clock.advance(2.0)
        builder.resume("checkpoint")
        fake_clock.advance(4.0)
        builder.resume("validation")
        fake_clock.advance(0.25)
        run_step(builder, fake_clock, 1.0)
        builder.close_window()
        window = only_window(builder)
        assert window.excluded_s == {"validation": approx(5.0), "checkpoint": approx(2.0)}
        assert window.elapsed_s == approx(2.25)

    def test_a_pause_that_nobody_ends_ends_with_the_next_step(self, builder: WindowBuilder, fake_clock: Any) -> None:
        run_step(builder, fake_clock, 1.0)
        builder.pause("checkpoint")
        fake_clock.advance(9.0)
        run_step(builder, fake_clock, 1.0, step=1)
        builder.close_window()
        window = only_window(builder)
        assert (window.elapsed_s, window.excluded_s) == (approx(2.0), {"checkpoint": approx(9.0)})

    def test_resuming_what_was_not_paused_changes_nothing(self, builder: WindowBuilder, fake_clock: Any) -> None:
        builder.resume("validation")
        run_step(builder, fake_clock, 1.0)
        builder.resume("validation")
        builder.close_window()
        assert only_window(builder).elapsed_s == approx(1.0)

    def test_time_before_the_first_step_is_in_no_window(self, builder: WindowBuilder, fake_clock: Any) -> None:
        builder.pause("sanity check")
        fake_clock.advance(10.0)
        builder.resume("sanity check")
        fake_clock.advance(10.0)
        run_step(builder, fake_clock, 1.0)
        builder.close_window()
        assert only_window(builder).wall_s == approx(1.0)


class TestPhases:
    """The parts of a step add up to its time; what was never marked is unknown."""

    def test_the_parts_add_up(self, builder: WindowBuilder, fake_clock: Any) -> None:
        run_step(builder, fake_clock, 0.0)
        builder.close_window()
        fake_clock.advance(0.5)
        builder.begin_step(1)
        for phase, seconds in (("forward", 1.0), ("backward", 2.0), ("optimizer", 0.25), ("my_metric", 0.125)):
            builder.mark_phase(phase)
            fake_clock.advance(seconds)
        builder.end_step()
        builder.close_window()
        window = builder.resolved()[-1]
        parts = (window.data_wait_s, window.forward_s, window.backward_s, window.optimizer_s, window.other_s)
        assert parts == tuple(approx(s) for s in (0.5, 1.0, 2.0, 0.25, 0.125))
        assert window.elapsed_s == approx(3.875)
        assert window.user_phase_s == {"my_metric": approx(0.125)}

    def test_without_marks_the_parts_are_unknown(self, builder: WindowBuilder, fake_clock: Any) -> None:
        run_step(builder, fake_clock, 1.0)
        builder.close_window()
        window = only_window(builder)
        assert (window.forward_s, window.backward_s, window.optimizer_s, window.other_s) == (None, None, None, None)
        assert (window.h2d_copy_s, window.between_s) == (None, None)

    def test_a_phase_known_from_before_and_absent_now_is_zero(self, builder: WindowBuilder, fake_clock: Any) -> None:
        for step, phase in enumerate(("optimizer", "forward")):
            builder.begin_step(step)
            builder.mark_phase(phase)
            fake_clock.advance(1.0)
            builder.end_step()
            builder.close_window()
        assert builder.resolved()[-1].optimizer_s == 0.0

    def test_a_phase_marked_in_a_pause_begins_after_it(self, builder: WindowBuilder, fake_clock: Any) -> None:
        builder.begin_step(0)
        builder.pause("sampling")
        builder.mark_phase("backward")
        fake_clock.advance(1.0)
        builder.resume("sampling")
        fake_clock.advance(2.0)
        builder.end_step()
        builder.close_window()
        assert only_window(builder).backward_s == approx(2.0)

    @pytest.mark.parametrize(("in_step", "expected_wait"), [(True, 0.0), (False, 1.0)])
    def test_the_copy_to_the_device_counts_where_it_happens(
        self, builder: WindowBuilder, fake_clock: Any, in_step: bool, expected_wait: float
    ) -> None:
        run_step(builder, fake_clock, 0.0)
        builder.close_window()
        if in_step:
            builder.begin_step(1)
        builder.mark_phase("h2d_copy")
        fake_clock.advance(1.0)
        if not in_step:
            builder.begin_step(1)
        builder.end_step()
        builder.close_window()
        window = builder.resolved()[-1]
        assert (window.h2d_copy_s, window.data_wait_s) == (approx(1.0), approx(expected_wait))

    def test_callbacks_between_steps_are_told_from_waiting(self, builder: WindowBuilder, fake_clock: Any) -> None:
        run_step(builder, fake_clock, 1.0)
        builder.mark_phase("between_steps")
        fake_clock.advance(0.5)
        builder.mark_phase("data_wait")
        fake_clock.advance(0.25)
        run_step(builder, fake_clock, 1.0, step=1)
        builder.close_window()
        window = only_window(builder)
        assert (window.between_s, window.data_wait_s) == (approx(0.5), approx(0.25))
        assert window.elapsed_s == approx(2.75)


class TestEdges:
    """Windows touch: no second is lost or counted twice."""

    def test_the_wait_after_the_last_step_belongs_to_the_next_window(
        self, builder: WindowBuilder, fake_clock: Any
    ) -> None:
        run_step(builder, fake_clock, 1.0)
        fake_clock.advance(3.0)
        builder.close_window()
        run_step(builder, fake_clock, 1.0, step=1)
        builder.close_window()
        first, second = builder.resolved()
        assert (first.elapsed_s, second.elapsed_s) == (approx(1.0), approx(4.0))

    def test_a_window_without_steps_is_none(self, builder: WindowBuilder, fake_clock: Any) -> None:
        builder.close_window()
        run_step(builder, fake_clock, 1.0)
        builder.close_window()
        builder.close_window()
        assert len(builder.resolved()) == 1

    def test_a_partial_window_is_reported_when_training_stops(self, builder: WindowBuilder, fake_clock: Any) -> None:
        run_step(builder, fake_clock, 1.0)
        fake_clock.advance(5.0)
        builder.stop()
        assert only_window(builder).elapsed_s == approx(1.0)

    def test_the_time_between_two_runs_is_in_no_window_and_no_total(
        self, builder: WindowBuilder, fake_clock: Any
    ) -> None:
        run_step(builder, fake_clock, 1.0)
        builder.stop()
        fake_clock.advance(1000.0)
        run_step(builder, fake_clock, 2.0, step=1)
        builder.stop()
        assert [w.wall_s for w in builder.resolved()] == [approx(1.0), approx(2.0)]
        assert builder.wall_s == approx(3.0)

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
    @given(
        actions=st.lists(
            st.sampled_from(["step", "counted", "pause", "resume", "phase", "close", "abort", "begin", "end"]),
            max_size=30,
        )
    )
    def test_every_second_has_exactly_one_place(self, fake_clock: Any, actions: list[str]) -> None:
        builder = WindowBuilder(clock=fake_clock, host_clock=fake_clock)
        do: dict[str, Any] = {
            "step": lambda: run_step(builder, fake_clock, 1.0),
            "counted": lambda: run_step(builder, fake_clock, 1.0, excluded="counted"),
            "pause": lambda: builder.pause("validation"),
            "resume": lambda: builder.resume("validation"),
            "phase": lambda: builder.mark_phase("forward"),
            "close": builder.close_window,
            "abort": builder.abort_step,
            "begin": lambda: builder.begin_step(0),
            "end": builder.end_step,
        }
        for action in actions:
            do[action]()
            fake_clock.advance(1.0)
        builder.stop()
        for window in builder.resolved():
            assert window.elapsed_s + sum(window.excluded_s.values()) == approx(window.wall_s)
            parts = (window.data_wait_s, window.forward_s, window.other_s)
            if window.forward_s is not None:
                assert sum(part or 0.0 for part in parts) == approx(window.elapsed_s)


class TestBackwardClock:
    """A clock that goes backwards spoils its window, with a reason, and no other."""

    def test_it_gives_a_reason_and_no_time(self, builder: WindowBuilder, fake_clock: Any) -> None:
        run_step(builder, fake_clock, 1.0)
        run_step(builder, fake_clock, -0.5, step=1)
        builder.close_window()
        run_step(builder, fake_clock, 1.0, step=2)
        builder.close_window()
        spoilt, good = builder.resolved()
        assert "went backwards by 0.5 s" in str(spoilt.invalid_reason)
        assert (spoilt.elapsed_s, spoilt.data_wait_s) == (0.0, None)
        assert (good.invalid_reason, good.elapsed_s) == (None, approx(1.0))


class TestDeviceClock:
    """Events are read when the device has passed them, never before, and never waited for."""

    @pytest.fixture
    def clock(self, fake_device: Any) -> CudaEventClock:
        return CudaEventClock("cuda", event_factory=fake_device.event)

    def test_a_window_is_held_until_the_device_has_passed_it(
        self, clock: CudaEventClock, fake_device: Any, fake_clock: Any
    ) -> None:
        builder = WindowBuilder(clock=clock, host_clock=fake_clock)
        for step in range(3):
            builder.begin_step(step)
            fake_clock.advance(0.001)
            fake_device.advance(0.02)
            builder.end_step()
        builder.close_window()
        assert builder.resolved() == []
        fake_device.catch_up()
        window = only_window(builder)
        assert window.elapsed_s == approx(0.06)
        assert window.host_elapsed_s == approx(0.003)
        assert window.clock_name == "cuda events"
        assert fake_device.waits == []

    def test_windows_come_in_order_even_if_the_later_one_is_asked_first(
        self, clock: CudaEventClock, fake_device: Any, fake_clock: Any
    ) -> None:
        builder = WindowBuilder(clock=clock, host_clock=fake_clock)
        for step in range(2):
            builder.begin_step(step)
            fake_device.advance(1.0)
            builder.end_step()
            builder.close_window()
        fake_device.reached_ms = 1000.0
        assert [w.first_step for w in builder.resolved()] == [0]
        fake_device.catch_up()
        assert [w.first_step for w in builder.resolved()] == [1]

    def test_events_are_used_again(self, clock: CudaEventClock, fake_device: Any, fake_clock: Any) -> None:
        builder = WindowBuilder(clock=clock, host_clock=fake_clock)
        for step in range(100):
            builder.begin_step(step)
            fake_device.advance(1.0)
            builder.end_step()
            builder.close_window()
            fake_device.catch_up()
            assert len(builder.resolved()) == 1
        assert len(fake_device.events) <= 6

    def test_a_reused_event_does_not_change_an_earlier_window(
        self, clock: CudaEventClock, fake_device: Any, fake_clock: Any
    ) -> None:
        builder = WindowBuilder(clock=clock, host_clock=fake_clock)
        seconds = []
        for step in range(20):
            builder.begin_step(step)
            fake_device.advance(step + 1.0)
            builder.end_step()
            builder.close_window()
            if step % 3 == 2:
                fake_device.catch_up()
            seconds += [w.elapsed_s for w in builder.resolved()]
        fake_device.catch_up()
        seconds += [w.elapsed_s for w in builder.resolved()]
        assert seconds == [approx(step + 1.0) for step in range(20)]

    def test_events_of_a_stopped_run_are_not_read_after_reuse(
        self, clock: CudaEventClock, fake_device: Any, fake_clock: Any
    ) -> None:
        builder = WindowBuilder(clock=clock, host_clock=fake_clock)
        run_seconds = (1.0, 2.0)
        for step, seconds in enumerate(run_seconds):
            fake_device.advance(5.0)
            builder.begin_step(step)
            fake_device.advance(seconds)
            builder.end_step()
            builder.stop()  # the first window is still pending when the second run begins
        fake_device.catch_up()
        assert [w.elapsed_s for w in builder.resolved()] == [approx(s) for s in run_seconds]


def test_a_window_without_a_step_is_no_window(fake_clock: Any) -> None:
    builder = WindowBuilder(clock=fake_clock, host_clock=fake_clock)
    assert not builder.close_window()
    run_step(builder, fake_clock, 1.0)
    assert builder.close_window()
    assert not builder.close_window()
    assert len(builder.resolved()) == 1

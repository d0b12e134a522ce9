"""The timing stage of the monitor: steps in, windows out, each once the clock and the other ranks have answered."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from mfu_monitor.errors import MFUMonitorWarning
from mfu_monitor.guard import Stages, guarded, warn
from mfu_monitor.timing.clock import Clock
from mfu_monitor.timing.ranks import RankExchange, StopAgreement, pack_window, unknown_row, world_fields
from mfu_monitor.timing.step_window import StepWindow
from mfu_monitor.timing.window import WindowBuilder

__all__ = ["RunSoFar", "WindowPipeline", "world_size"]

_DRAIN_POLL_S = 0.005
_STOP_POLL_S = 0.0005
_STOP_WAIT_S = 300.0
"""For the ranks' agreement to stop, as long as for a collective: one rank may save a checkpoint meanwhile."""
_MOST_WINDOWS_IN_FLIGHT = 16
"""Windows that may wait for other ranks; with more of them a rank has gone, or has fewer steps than this one."""


@dataclass(frozen=True, slots=True)
class RunSoFar:
    """The run's sums when a window closed, for the goodput of its reading."""

    model_flops: int | None
    wall_s: float


Complete = tuple[StepWindow, RunSoFar]
"""A window with all that will be known of it."""
PeakOf = Callable[[StepWindow], float | None]
"""The peak FLOP/s of this rank's device for a window, to tell the other ranks; None if not known."""


def world_size() -> int:
    """Ranks of the default group; 1 without one."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


class WindowPipeline:
    """Times the steps, and gives each closed window on when its seconds and the other ranks' figures are known.

    Args:
        stages: where failures are kept.
    """

    def __init__(self, stages: Stages) -> None:
        self.builder: WindowBuilder | None = None
        self.elapsed_s = 0.0
        self._stages = stages
        self._ranks: RankExchange | None = None
        self._stop = StopAgreement()
        self._wants_stop = False
        self._closed: deque[RunSoFar] = deque()
        self._in_flight: deque[Complete] = deque()
        self._complete: list[Complete] = []

    @property
    def wall_s(self) -> float:
        """All time from the first step to the last edge."""
        return 0.0 if self.builder is None else self.builder.wall_s

    @property
    def clock_name(self) -> str | None:
        """The clock in use."""
        return None if self.builder is None else self.builder.clock.name

    @property
    def phase(self) -> str:
        """The phase that time belongs to at present."""
        return "other" if self.builder is None else self.builder.phase

    @property
    def is_paused(self) -> bool:
        """True while time is left out."""
        return self.builder is not None and self.builder.is_paused

    @property
    def has_pending(self) -> bool:
        """True while a closed window was not given on."""
        return bool(self._closed or self._in_flight)

    def start(self, make_clock: Callable[[], Clock], host_clock: Clock | None) -> None:
        """Training begins, on all ranks at once."""
        self._make_builder(make_clock, host_clock)
        self._ranks = self._join_ranks()

    @guarded("timing")
    def _make_builder(self, make_clock: Callable[[], Clock], host_clock: Clock | None) -> None:
        self.builder = WindowBuilder(clock=make_clock(), host_clock=host_clock)

    @guarded("ranks")
    def _join_ranks(self) -> RankExchange | None:
        return RankExchange.join()

    # Steps, phases and pauses: see WindowBuilder.

    @guarded("timing")
    def begin_step(self, step: int) -> None:
        """A training batch begins."""
        if self.builder is not None:
            self.builder.begin_step(step)

    @guarded("timing")
    def end_step(self, excluded: str | None, is_recompile: bool) -> None:
        """A training batch ends."""
        if self.builder is not None:
            self.builder.end_step(excluded=excluded, is_recompile=is_recompile)

    @guarded("timing")
    def abort_step(self) -> None:
        """A training batch was not finished."""
        if self.builder is not None:
            self.builder.abort_step()

    @guarded("timing")
    def mark_phase(self, name: str) -> None:
        """From here on time belongs to this phase."""
        if self.builder is not None:
            self.builder.mark_phase(name)

    @guarded("timing")
    def pause(self, reason: str) -> None:
        """From here on time is left out."""
        if self.builder is not None:
            self.builder.pause(reason)

    @guarded("timing")
    def resume(self, reason: str) -> None:
        """A pause ends."""
        if self.builder is not None:
            self.builder.resume(reason)

    @guarded("timing")
    def end_reporting(self) -> None:
        """The time since the last step went into reporting, and is no wait for data."""
        if self.builder is not None:
            self.builder.end_reporting()

    # Windows.

    def close(self, work: Callable[[], Mapping[str, Any] | None], so_far: Callable[[], RunSoFar]) -> None:
        """Close the window. ``so_far`` is asked once it is closed, so that its wall time is in."""
        self._close_window(work)
        self._closed.append(so_far())
        self._stop.close_window()

    @guarded("timing")
    def _close_window(self, work: Callable[[], Mapping[str, Any] | None]) -> None:
        if self.builder is not None:
            self.builder.close_window(work)

    def advance(self, peak_of: PeakOf) -> list[Complete]:
        """The windows that are complete by now, oldest first. Never waits."""
        for window in self._resolved() or ():
            self._gather(window, self._closed.popleft(), peak_of)
        if "timing" in self._stages.off:
            self._give_up()
        self._take_gathered()
        complete, self._complete = self._complete, []
        return complete

    @guarded("timing")
    def _resolved(self) -> list[StepWindow]:
        return [] if self.builder is None else self.builder.resolved()

    def _give_up(self) -> None:
        # The other ranks still wait for one row a window from this one.
        for _ in self._closed:
            self._send(unknown_row(wants_stop=self._wants_stop))
        self._closed.clear()

    def _gather(self, window: StepWindow, so_far: RunSoFar, peak_of: PeakOf) -> None:
        """Ask the other ranks for their part of the window; in a world of one there is nobody to ask."""
        self.elapsed_s += window.elapsed_s
        if self._ranks is None:
            self._complete.append((_alone(window), so_far))
            return
        self._in_flight.append((window, so_far))
        self._send(pack_window(window, peak_of(window), wants_stop=self._wants_stop))

    @guarded("ranks")
    def _send(self, row: list[int]) -> None:
        if self._ranks is not None:
            self._ranks.send(row)

    def _take_gathered(self) -> None:
        if self._ranks is None:
            return
        for rows in self._received() or ():
            self._stop.take(rows)
            if self._in_flight:  # else the rows are of a window that this rank gave up
                window, so_far = self._in_flight.popleft()
                self._complete.append((self._with_world(window, rows) or window, so_far))
        if "ranks" in self._stages.off:
            self._ranks = None
            self._take_alone()

    @guarded("ranks")
    def _received(self) -> list[list[list[int]]]:
        if len(self._in_flight) > _MOST_WINDOWS_IN_FLIGHT:
            raise TimeoutError(f"{len(self._in_flight)} windows wait for another rank's figures")
        return [] if self._ranks is None else self._ranks.received()

    @guarded("ranks")
    def _with_world(self, window: StepWindow, rows: list[list[int]]) -> StepWindow:
        assert self._ranks is not None
        return replace(window, **world_fields(rows, rank=self._ranks.rank))

    def _take_alone(self) -> None:
        while self._in_flight:
            window, so_far = self._in_flight.popleft()
            self._complete.append((_alone(window), so_far))

    # Stopping together.

    def ask_for_stop(self) -> bool:
        """Ask all ranks to stop, with the next window's row; False where there is no way to ask them."""
        self._wants_stop = True
        return self._ranks is not None

    @property
    def is_stop_due(self) -> bool:
        """True once all ranks are to stop, at the end of the window that was closed last."""
        return self._stop.is_due

    def wait_for_stop(self, peak_of: PeakOf) -> list[Complete]:
        """Wait for rows that could ask for a stop now. They are two windows old, so they have mostly come long ago."""
        complete: list[Complete] = []
        deadline_s = time.perf_counter() + _STOP_WAIT_S
        while self._ranks is not None and self._stop.is_behind:
            self._check_deadline(deadline_s)
            time.sleep(_STOP_POLL_S)
            complete += self.advance(peak_of)
        return complete

    @guarded("ranks")
    def _check_deadline(self, deadline_s: float) -> None:
        if time.perf_counter() > deadline_s:
            raise TimeoutError(f"another rank has sent nothing for {_STOP_WAIT_S:g} s")

    def stop(self, peak_of: PeakOf, *, timeout_s: float) -> list[Complete]:
        """Training has ended: wait for what is on its way, not longer than this; nothing is held up by it."""
        self._stop_builder()
        deadline_s = time.perf_counter() + timeout_s
        complete = self.advance(peak_of)
        while self.has_pending and time.perf_counter() < deadline_s:
            time.sleep(_DRAIN_POLL_S)
            complete += self.advance(peak_of)
        self._take_alone()
        if self._closed:
            lost = len(self._closed)
            message = f"{lost} windows are lost: the device had not finished them {timeout_s:g} s after training ended"
            warn(message, MFUMonitorWarning)
        return complete + self.advance(peak_of)

    @guarded("timing")
    def _stop_builder(self) -> None:
        if self.builder is not None:
            self.builder.stop()


def _alone(window: StepWindow) -> StepWindow:
    """The window without other ranks: the world's sums are its own in a world of one, and unknown in a larger one."""
    size = world_size()
    if size > 1:
        return replace(window, world_size=size)
    return replace(
        window,
        world_model_flops=window.model_flops,
        world_hardware_flops=window.hardware_flops,
        world_tokens=window.tokens,
        world_samples=window.samples,
    )

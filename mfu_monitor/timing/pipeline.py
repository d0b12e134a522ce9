"""Windows on their way: closed, timed once the clock has answered, complete once the other ranks have."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from mfu_monitor.errors import MFUMonitorWarning, Stages, guarded, warn
from mfu_monitor.timing.clock import Clock, HostClock, clock_for
from mfu_monitor.timing.present_ranks import PresentRanks, RollCall
from mfu_monitor.timing.probes import TrainingProbes
from mfu_monitor.timing.ranks import (
    RankExchange,
    StopAgreement,
    call_the_roll,
    join_ranks,
    pack_window,
    sections_of,
    unknown_row,
    world_fields,
)
from mfu_monitor.timing.step_window import ClosedWindow, StepWindow
from mfu_monitor.timing.window import WindowBuilder

__all__ = ["WindowPipeline", "rank", "world_size"]

NOT_ALL = (
    "Not all {} ranks had started the monitor when the first window ended, so readings are of the ranks that take part "
    "(their coverage says how many). Add the monitor on every rank, before the same step."
)
_MOST_WINDOWS_IN_FLIGHT = 16
"""Windows that may wait for other ranks; with more of them a rank has gone, or has fewer steps than this one."""


def world_size() -> int:
    """Ranks of the default group; 1 without one."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def rank() -> int:
    """This process's rank in the default group; 0 without one."""
    return torch.distributed.get_rank() if world_size() > 1 else 0


class WindowPipeline:
    """Keeps the order of closed windows, and sends each one's row to the other ranks. Never waits.

    Args:
        stages: where failures are kept.
    """

    def __init__(self, stages: Stages) -> None:
        self.builder = WindowBuilder(clock=HostClock())
        """Steps, phases and pauses are marked here."""
        self.earlier_wall_s = 0.0
        """Of the run before it was resumed, as ``elapsed_s`` holds its windows."""
        self.elapsed_s = 0.0
        self._stages = stages
        self._roll_call: RollCall | None = None
        self._ranks: RankExchange | PresentRanks | None = None
        self._has_met = False
        self._has_left = False
        self._stop = StopAgreement()
        self._wants_stop = False
        self._closed: deque[tuple[Any, dict[str, Any], float]] = deque()
        self._device: torch.device | None = None
        self._probes: TrainingProbes | None = None
        self._unstopped: weakref.finalize[..., Any] | None = None
        self._in_flight: deque[ClosedWindow] = deque()
        self._sections: list[list[Sequence[int]]] = []
        self._complete: list[ClosedWindow] = []

    @property
    def wall_s(self) -> float:
        """All time from the run's first step to the last edge, earlier parts of a resumed run included."""
        return self.earlier_wall_s + self.builder.wall_s

    @property
    def has_pending(self) -> bool:
        """True while a closed window was not given on."""
        return bool(self._closed or self._in_flight)

    @property
    def has_other_ranks(self) -> bool:
        """True while windows are exchanged with other ranks."""
        return self._ranks is not None

    def start(self, device: torch.device, *, clock: Clock | None = None, host_clock: Clock | None = None) -> None:
        """Training begins, on all ranks at once.

        Args:
            device: that the training computes on: its clock is used.
            clock, host_clock: instead of the device's and the host's.
        """
        self._device = device
        self._make_builder(device, clock, host_clock)
        self._roll_call = self._announce()

    @guarded("timing")
    def _make_builder(self, device: torch.device, clock: Clock | None, host_clock: Clock | None) -> None:
        self.builder = WindowBuilder(clock=clock or clock_for(device), host_clock=host_clock)

    @guarded("ranks")
    def _announce(self) -> RollCall | None:
        return call_the_roll()

    @guarded("ranks")
    def _meet(self) -> None:
        """A window has closed, on all ranks at the same step: the first one is where they meet."""
        if self._roll_call is None:
            return
        if not self._has_met:
            self._has_met = True
            with self.paused("ranks"):
                self._ranks = join_ranks(self._roll_call)
            if isinstance(self._ranks, PresentRanks):
                warn(NOT_ALL.format(self._roll_call.world_size), MFUMonitorWarning)
        elif self._has_left:
            self._has_left = False
            self._roll_call.come_back()
        elif isinstance(self._ranks, RankExchange) and self._ranks.in_flight and self._roll_call.any_left:
            self._ranks = self._ranks.without_those_who_left(self._roll_call)

    @guarded("ranks")
    def leave(self) -> None:
        """Training has ended on this rank: the others need not wait for it."""
        if self._roll_call is not None and self._ranks is not None and not self._has_left:
            self._has_left = True
            self._roll_call.leave(self._ranks.sent)

    # Steps and pauses, of the clock and of the probes.

    def begin_step(self, step: int) -> None:
        """A training batch begins; it ends every pause."""
        if self._probes is None:
            self._start_probes()
        self._probe("resume")
        self._stages.run("timing", self.builder.begin_step, step)

    def pause(self, reason: str) -> None:
        """Leave the time from here on out of the windows."""
        self._stages.run("timing", self.builder.pause, reason)
        self._probe("pause")

    def resume(self, reason: str) -> None:
        """End a pause."""
        self._stages.run("timing", self.builder.resume, reason)
        if not self.builder.is_paused:
            self._probe("resume")

    @contextlib.contextmanager
    def paused(self, reason: str) -> Iterator[None]:
        """``with windows.paused("peak"): ...``"""
        self.pause(reason)
        try:
            yield
        finally:
            self.resume(reason)

    @guarded("probes")
    def _start_probes(self) -> None:
        self._probes = TrainingProbes(device=self._device)
        # A monitor that is dropped without close() leaves nothing behind.
        self._unstopped = weakref.finalize(self, self._probes.stop)
        self._probes.start()

    def _probe(self, action: str) -> Any:
        return None if self._probes is None else self._stages.run("probes", getattr(self._probes, action))

    def discard_probes(self) -> None:
        """What the probes measured since the last window belongs to a step that is left out."""
        self._probe("discard")

    def stop_probes(self) -> None:
        """Leave nothing behind; the next step starts them again."""
        if self._probes is not None:
            self._probes.stop()
            self._probes = None
        if self._unstopped is not None:
            self._unstopped.detach()
            self._unstopped = None

    # Windows.

    def close(self, held: Any) -> None:
        """Close the window.

        Args:
            held: what its steps held; given back by ``timed`` beside its time.
        """
        probed = self._probe("take") or {}
        if self._stages.run("timing", self.builder.close_window) is not False:
            self._closed.append((held, probed, self.wall_s))
            self._stop.close_window()
            self._meet()

    def timed(self) -> list[tuple[StepWindow, Any, float]]:
        """Windows whose time is known by now, oldest first: each with what it held and the run's seconds so far."""
        windows = self._resolved() or ()
        timed = []
        for window in windows:
            held, probed, wall_s = self._closed.popleft()
            timed.append((replace(window, **probed), held, wall_s))
        if "timing" in self._stages.off:
            self._give_up()
        return timed

    @guarded("timing")
    def _resolved(self) -> list[StepWindow]:
        return self.builder.resolved()

    def _give_up(self) -> None:
        # The other ranks still wait for one row a window from this one.
        for _ in self._closed:
            self._send(unknown_row(wants_stop=self._wants_stop))
        self._closed.clear()

    @property
    def takes_section(self) -> bool:
        """Whether fingerprints of counted steps go out with the next window."""
        return self._ranks is not None and self._ranks.takes_section

    def take_sections(self) -> list[list[Sequence[int]]]:
        """Fingerprints that came with the windows since last asked: for each window one section a rank."""
        sections, self._sections = self._sections, []
        return sections

    def gather(self, closed: ClosedWindow, peak_flops_per_s: float | None, section: Sequence[int] = ()) -> None:
        """Ask the other ranks for their part of the window; in a world of one there is nobody to ask.

        Args:
            closed: with all that this rank knows.
            peak_flops_per_s: of this rank's device, for the window's precision.
            section: fingerprints, where ``takes_section`` says so.
        """
        self.elapsed_s += closed.window.elapsed_s
        if self._ranks is None:
            self._complete.append(_alone(closed))
            return
        self._in_flight.append(closed)
        self._send(pack_window(closed.window, peak_flops_per_s, wants_stop=self._wants_stop), section)

    @guarded("ranks")
    def _send(self, row: list[int], section: Sequence[int] = ()) -> None:
        if self._ranks is not None:
            self._ranks.send(row, section)

    def gathered(self) -> list[ClosedWindow]:
        """Windows with all that will be known of them, oldest first."""
        if self._ranks is not None:
            self._take_gathered()
        complete, self._complete = self._complete, []
        return complete

    def _take_gathered(self) -> None:
        for rows in self._received() or ():
            if isinstance(self._ranks, RankExchange):
                self._stop.take(rows.values())
                self._sections.append(sections_of(rows.values()))
            if self._in_flight:  # else the rows are of a window that this rank gave up
                closed = self._in_flight.popleft()
                self._complete.append(self._with_world(closed, rows) or closed)
        if "ranks" in self._stages.off:
            self._ranks = None
            self._take_alone()

    @guarded("ranks")
    def _received(self) -> list[dict[int, list[int]]]:
        if len(self._in_flight) > _MOST_WINDOWS_IN_FLIGHT:
            raise TimeoutError(f"{len(self._in_flight)} windows wait for the metrics of another rank")
        return [] if self._ranks is None else self._ranks.received()

    @guarded("ranks")
    def _with_world(self, closed: ClosedWindow, rows: Mapping[int, list[int]]) -> ClosedWindow:
        return replace(closed, window=replace(closed.window, **world_fields(rows, world_size=world_size())))

    def _take_alone(self) -> None:
        while self._in_flight:
            self._complete.append(_alone(self._in_flight.popleft()))

    # Stopping together.

    def ask_for_stop(self) -> bool:
        """Ask all ranks to stop, with the next window's row; False where there is no way to ask them."""
        self._wants_stop = True
        return isinstance(self._ranks, RankExchange) or (self._roll_call is not None and not self._has_met)

    @property
    def is_stop_due(self) -> bool:
        """True once all ranks are to stop, at the end of the window that was closed last."""
        return self._stop.is_due

    @property
    def is_stop_behind(self) -> bool:
        """True while a row is missing that could ask for a stop now. It is two windows old, so mostly it has come."""
        return isinstance(self._ranks, RankExchange) and self._stop.is_behind

    @guarded("ranks")
    def give_up_ranks(self, waited_s: float) -> None:
        """Another rank has sent nothing for so long: go on alone."""
        raise TimeoutError(f"another rank has sent nothing for {waited_s:g} s")

    def give_up(self, waited_s: float) -> None:
        """Training has ended: what has not come by now is reported without it, or lost."""
        self._take_alone()
        if self._closed and not self._stages.off:  # a failure that was told explains it
            lost = len(self._closed)
            message = f"{lost} windows are lost: the device had not finished them {waited_s:g} s after training ended"
            warn(message, MFUMonitorWarning)


def _alone(closed: ClosedWindow) -> ClosedWindow:
    """The window without other ranks: the world's sums are its own in a world of one, and unknown in a larger one."""
    window, size = closed.window, world_size()
    if size > 1:
        return replace(closed, window=replace(window, world_size=size))
    return replace(
        closed,
        window=replace(
            window,
            world_model_flops=window.model_flops,
            world_hardware_flops=window.hardware_flops,
            world_palm_model_flops=window.palm_model_flops,
            world_tokens=window.tokens,
            world_samples=window.samples,
        ),
    )

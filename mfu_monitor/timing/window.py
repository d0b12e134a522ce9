"""Windows of steps: marks collected while training runs, turned into seconds once the clock has reached them.

The time of a run is one line of edges. Each interval between two edges has a label: a phase of a step, the wait for
data between steps, or a reason for which it is left out. Nothing is added up while steps run; a window that is closed
waits until its last mark is reached, and then every second of it goes to exactly one label.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mfu_monitor.timing.clock import Clock, HostClock, Mark
from mfu_monitor.timing.step_window import StepWindow

__all__ = ["BETWEEN", "DATA_WAIT", "WindowBuilder"]

DATA_WAIT = "data_wait"
BETWEEN = "between"
_STEP = "step"
_H2D_COPY = "h2d_copy"
_H2D_COPY_IN_GAP = "gap:h2d_copy"
_OUT = "-"
"""First character of the label of an interval that is left out; the reason follows."""
_ALIASES = {"transfer": _H2D_COPY, "between_steps": BETWEEN, "other": _STEP}
_STANDARD = frozenset({_STEP, DATA_WAIT, BETWEEN, _H2D_COPY, _H2D_COPY_IN_GAP, "forward", "backward", "optimizer"})


@dataclass(slots=True)
class _Edges:
    """The line of time: interval ``i`` lies between edges ``i`` and ``i + 1`` and has label ``i``."""

    marks: list[Mark] = field(default_factory=list)
    host_s: list[float] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)

    def split(self, at: int) -> tuple[_Edges, _Edges]:
        """The edges up to ``at`` and those from it; both have the edge itself."""
        before = _Edges(self.marks[: at + 1], self.host_s[: at + 1], self.labels[:at])
        return before, _Edges(self.marks[at:], self.host_s[at:], self.labels[at:])


@dataclass(slots=True)
class _Steps:
    """The steps of the window that is open."""

    first: int | None = None
    last: int = 0
    included: int = 0
    excluded: int = 0
    recompiles: int = 0

    def add(self, step: int, excluded: str | None, is_recompile: bool) -> None:
        if self.first is None:
            self.first = step
        self.last = step
        if excluded is None:
            self.included += 1
        else:
            self.excluded += 1
        self.recompiles += is_recompile


@dataclass(slots=True)
class _Pending:
    """A closed window whose last mark may not be reached yet."""

    edges: _Edges
    steps: _Steps


class WindowBuilder:
    """Collects the marks of steps and gives windows. Nothing in it waits, and nothing in it knows tensors.

    Args:
        clock: gives the marks: the host's clock, or a device's events.
        host_clock: the host's clock, for ``wall_s`` and ``host_elapsed_s``.

    Example:
        >>> builder = WindowBuilder(clock=HostClock())
        >>> for step, batch in enumerate(loader):
        ...     builder.begin_step(step)
        ...     train(batch)
        ...     builder.end_step()
        >>> builder.close_window()
        >>> [window.elapsed_s for window in builder.resolved()]
    """

    def __init__(self, *, clock: Clock, host_clock: Clock | None = None) -> None:
        self.clock = clock
        self._mark = clock.mark
        host_is_clock = isinstance(clock, HostClock) if host_clock is None else host_clock is clock
        self._host_now: Callable[[], float] | None = None if host_is_clock else (host_clock or HostClock()).mark
        self._edges = _Edges()
        self._steps = _Steps()
        self._pending: deque[_Pending] = deque()
        self._pauses: list[str] = []
        self._label_under_pause = DATA_WAIT
        self._gap_from = 0
        self._step: int | None = None
        self._closed_wall_s = 0.0
        self._phases_seen: set[str] = set()

    @property
    def wall_s(self) -> float:
        """All time of the run up to the last edge, what is left out included."""
        host_s = self._edges.host_s
        return self._closed_wall_s + (host_s[-1] - host_s[0] if host_s else 0.0)

    @property
    def pending(self) -> int:
        """Closed windows that are not resolved yet."""
        return len(self._pending)

    @property
    def has_steps(self) -> bool:
        """True if a step has ended since the last window was closed."""
        return self._steps.first is not None

    def _cut(self, label: str) -> None:
        mark = self._mark()
        edges = self._edges
        edges.marks.append(mark)
        edges.host_s.append(mark if self._host_now is None else self._host_now())
        edges.labels.append(label)

    def begin_step(self, step: int) -> None:
        """A training batch begins; pauses that were not ended end here."""
        if self._step is not None:
            self.abort_step()
        self._pauses.clear()
        self._step = step
        self._cut(_STEP)

    def end_step(self, *, excluded: str | None = None, is_recompile: bool = False) -> None:
        """The training batch ends.

        Args:
            excluded: leave the step and its wait for data out of the window, for this reason (``"counted"``,
                ``"compile"``); its tokens and FLOPs are the caller's to leave out.
            is_recompile: something was compiled again in it.
        """
        if self._step is None:
            return
        self._close_step(excluded)
        self._steps.add(self._step, excluded, is_recompile)
        self._step = None

    def abort_step(self) -> None:
        """The training batch was not finished: it is not a step, and its time is left out."""
        if self._step is not None:
            self._close_step("aborted")
            self._step = None

    def _close_step(self, excluded: str | None) -> None:
        self._pauses.clear()
        if excluded is not None:
            self._exclude_from(self._gap_from, excluded)
        self._cut(DATA_WAIT)
        self._gap_from = len(self._edges.labels) - 1

    def _exclude_from(self, start: int, reason: str) -> None:
        labels = self._edges.labels
        for i in range(start, len(labels)):
            if not labels[i].startswith(_OUT):
                labels[i] = _OUT + reason

    def mark_phase(self, name: str) -> None:
        """From here on time belongs to this phase, until another is marked or the step ends.

        Args:
            name: ``"forward"``, ``"backward"``, ``"optimizer"``, ``"h2d_copy"``; between steps also ``"data_wait"`` and
                ``"between"``; or a name of one's own.
        """
        if not self._edges.labels:
            return
        name = _ALIASES.get(name, name)
        if name == _H2D_COPY and self._step is None:
            name = _H2D_COPY_IN_GAP
        self._phases_seen.add(name)
        if self._pauses:
            self._label_under_pause = name
        else:
            self._cut(name)

    @property
    def phase(self) -> str:
        """The phase that time belongs to at present."""
        if self._pauses or not self._edges.labels:
            return self._label_under_pause
        return self._edges.labels[-1]

    @property
    def is_paused(self) -> bool:
        """True from the first of the nested pauses to the end of the last."""
        return bool(self._pauses)

    def pause(self, reason: str) -> None:
        """Leave the time from here out of the window (``"validation"``, ``"checkpoint"``); pauses may be nested."""
        if not self._edges.labels:
            return  # before the first step no time is counted
        if not self._pauses:
            self._label_under_pause = self._edges.labels[-1]
        self._pauses.append(reason)
        self._cut(_OUT + reason)

    def resume(self, reason: str) -> None:
        """End a pause. One that is not open, or that a step's begin has ended, is ignored."""
        if reason not in self._pauses:
            return
        del self._pauses[len(self._pauses) - 1 - self._pauses[::-1].index(reason)]
        self._cut(_OUT + self._pauses[-1] if self._pauses else self._label_under_pause)

    def close_window(self) -> bool:
        """Close the window at the end of its last step; the time since then belongs to the next one.

        Returns:
            False where no step has ended since the last window: then there is no window.
        """
        if not self.has_steps:
            return False
        closed, self._edges = self._edges.split(self._gap_from)
        self._closed_wall_s += closed.host_s[-1] - closed.host_s[0]
        self._pending.append(_Pending(closed, self._steps))
        self._gap_from = 0
        self._steps = _Steps()
        return True

    def end_reporting(self) -> None:
        """The time since the last step's end went into reporting, and is not a wait for data."""
        labels = self._edges.labels
        if labels and labels[-1] == DATA_WAIT and self._step is None:
            labels[-1] = BETWEEN
            self._cut(DATA_WAIT)

    def stop(self) -> None:
        """Training has ended: the time until the next step is in no window and in no total."""
        self.abort_step()
        if self.has_steps:
            self.close_window()
        self._release(self._edges.marks[1:])  # the first is the last one of a window that may not be resolved yet
        self._edges, self._gap_from = _Edges(), 0
        self._pauses.clear()

    def resolved(self) -> list[StepWindow]:
        """The closed windows whose marks are all reached by now, oldest first: their time alone. Never waits."""
        windows: list[StepWindow] = []
        while self._pending:
            window = self._resolve(self._pending[0])
            if window is None:
                break
            done = self._pending.popleft()
            self._release(done.edges.marks[:-1])  # the last one is the next window's first
            windows.append(window)
        return windows

    def _resolve(self, pending: _Pending) -> StepWindow | None:
        seconds = _seconds_between(self.clock, pending.edges.marks)
        if seconds is None:
            return None
        times = _window_times(pending.edges, seconds, self._phases_seen)
        assert pending.steps.first is not None
        return StepWindow(
            first_step=pending.steps.first,
            last_step=pending.steps.last,
            steps=pending.steps.included,
            excluded_steps=pending.steps.excluded,
            recompiles=pending.steps.recompiles,
            clock_name=self.clock.name,
            **times,
        )

    def _release(self, marks: Iterable[Mark]) -> None:
        release = getattr(self.clock, "release", None)
        if release is not None:
            release(marks)


def _seconds_between(clock: Clock, marks: list[Mark]) -> list[float] | None:
    """Seconds of every interval, or None while a mark is not reached."""
    if clock.elapsed_s(marks[-1], marks[-1]) is None:  # one question, as long as the device is behind
        return None
    seconds: list[float] = []
    for i in range(len(marks) - 1):
        elapsed_s = clock.elapsed_s(marks[i], marks[i + 1])
        if elapsed_s is None:
            return None
        seconds.append(elapsed_s)
    return seconds


def _window_times(edges: _Edges, seconds: list[float], phases_seen: set[str]) -> dict[str, Any]:
    host_seconds = [edges.host_s[i + 1] - edges.host_s[i] for i in range(len(seconds))]
    backwards_s = min(0.0, *seconds, *host_seconds) if seconds else 0.0
    if backwards_s < 0:
        reason = (
            f"the clock went backwards by {-backwards_s:.6g} s inside the window, so its time is not known; "
            f"a clock was set or replaced during training. The next window is measured from its own start"
        )
        return {"elapsed_s": 0.0, "wall_s": 0.0, "invalid_reason": reason}
    by_label = _sum_by_label(edges.labels, seconds)
    host_by_label = _sum_by_label(edges.labels, host_seconds)
    return {
        "elapsed_s": _included(by_label),
        "host_elapsed_s": _included(host_by_label),
        "wall_s": sum(host_seconds),
        "excluded_s": {label[1:]: s for label, s in by_label.items() if label.startswith(_OUT)},
        **_phase_times(by_label, phases_seen),
    }


def _sum_by_label(labels: list[str], seconds: list[float]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for label, duration_s in zip(labels, seconds, strict=True):
        sums[label] = sums.get(label, 0.0) + duration_s
    return sums


def _included(by_label: Mapping[str, float]) -> float:
    return sum(s for label, s in by_label.items() if not label.startswith(_OUT))


def _phase_times(by_label: Mapping[str, float], phases_seen: set[str]) -> dict[str, Any]:
    """The parts of ``elapsed_s``. A phase that nobody ever marked is unknown, not 0."""

    def seconds(*names: str) -> float | None:
        return sum(by_label.get(n, 0.0) for n in names) if phases_seen.intersection(names) else None

    parts = {f"{name}_s": seconds(name) for name in ("forward", "backward", "optimizer")}
    data_wait_s = by_label.get(DATA_WAIT, 0.0) + by_label.get(_H2D_COPY_IN_GAP, 0.0)
    known_s = data_wait_s + sum(value for value in parts.values() if value is not None)
    is_split = any(value is not None for value in parts.values())
    own = {name: s for name, s in by_label.items() if name not in _STANDARD and not name.startswith(_OUT)}
    return {
        **parts,
        "data_wait_s": data_wait_s,
        "other_s": max(0.0, _included(by_label) - known_s) if is_split else None,
        "between_s": by_label.get(BETWEEN),
        "h2d_copy_s": seconds(_H2D_COPY, _H2D_COPY_IN_GAP),
        "user_phase_s": own,
    }

"""The ``with`` blocks of the monitor."""

from __future__ import annotations

from collections.abc import Hashable
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mfu_monitor.monitor import Monitor

__all__ = ["PauseScope", "PhaseScope", "StepScope"]


class StepScope:
    """``with monitor.step(batch):``"""

    __slots__ = ("_batch", "_extra", "_monitor", "_step")

    def __init__(self, monitor: Monitor, batch: Any, step: int | None, extra: Hashable) -> None:
        self._monitor, self._batch, self._step, self._extra = monitor, batch, step, extra

    def __enter__(self) -> Monitor:
        batch, self._batch = self._batch, None  # the loop decides how long a batch lives
        self._monitor.begin_step(batch, step=self._step, signature_extra=self._extra)
        return self._monitor

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if exc_type is None:
            self._monitor.end_step()
        else:
            self._monitor.abort_step(exc_type, exc, trace)


class PhaseScope:
    """``with monitor.phase("forward"):``; afterwards time belongs to the phase before."""

    __slots__ = ("_before", "_monitor", "_name")

    def __init__(self, monitor: Monitor, name: str) -> None:
        self._monitor, self._name, self._before = monitor, name, "other"

    def __enter__(self) -> None:
        self._before = self._monitor.current_phase
        self._monitor.mark_phase(self._name)

    def __exit__(self, *_: object) -> None:
        self._monitor.mark_phase(self._before)


class PauseScope:
    """``with monitor.paused("validation"):``"""

    __slots__ = ("_monitor", "_reason")

    def __init__(self, monitor: Monitor, reason: str) -> None:
        self._monitor, self._reason = monitor, reason

    def __enter__(self) -> None:
        self._monitor.pause(self._reason)

    def __exit__(self, *_: object) -> None:
        self._monitor.resume(self._reason)

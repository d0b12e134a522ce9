"""Writing behind the training: a thread writes what a bounded queue holds, so that no file can stop a step."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from mfu_monitor.errors import MFUMonitorWarning, text_of, warn
from mfu_monitor.sinks.base import Event, Sink

__all__ = ["BehindSink", "WriteBehind"]

_MOST_WAITING = 1000
_RETRY_S = 1.0
"""Between two tries of what the system refused."""
_QUICK_S = 0.002
"""A write is waited for so long, until the first that takes longer: then an event that was given is on its way to the
disk whatever becomes of this process."""
_CLOSE_S = 5.0
"""Longest wait for a write at the end of training."""

_open: weakref.WeakSet[WriteBehind] = weakref.WeakSet()


class WriteBehind:
    """Gives items to a function on a thread of its own, in order. What cannot be written waits, at most so much of it.

    What the system refuses (a full disk, a directory that is gone, a pipe without a reader) is tried again each second;
    another exception loses its item. Both are told once, by a warning on the caller's thread. Beyond the bound the
    oldest item is dropped. Items that wait at the end of the process are still written.

    Args:
        write: takes one item; called again with the same item after an ``OSError``.
        name: of what is written to, for the warning.
        most_waiting: items that may wait.
        refused: exceptions after which the item is tried again.
        is_quick: wait for the first items, as long as writing takes no time.

    Example:
        >>> behind = WriteBehind(file.write, "runs/mfu.jsonl")
        >>> behind.put("a line"); behind.close()
    """

    def __init__(
        self,
        write: Callable[[Any], object],
        name: str,
        *,
        most_waiting: int = _MOST_WAITING,
        refused: type[Exception] | tuple[()] = OSError,
        is_quick: bool = True,
    ) -> None:
        self._write, self._name = write, name
        self._most_waiting, self._refused, self._is_quick = most_waiting, refused, is_quick
        self._is_told = False
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._items: deque[tuple[int, Any]] = deque()
        self._given = self._done = self._lost = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._trouble: str | None = None

    def put(self, item: Any) -> None:
        """Have one item written. Waits at most a few milliseconds, and not at all once a write took longer."""
        if self._pid != os.getpid():
            self._reset()  # a forked process: what waits is its parent's to write
        with self._changed:
            self._items.append((self._given, item))
            self._given += 1
            while len(self._items) > self._most_waiting:
                self._items.popleft()
                self._lost += 1
            self._start()
            self._changed.notify_all()
            if self._is_quick:
                given = self._given
                self._is_quick = self._changed.wait_for(lambda: self._done >= given, _QUICK_S)
        self._tell()

    def note(self, trouble: str) -> None:
        """Something to tell the user, once, of all that goes wrong; may be called by ``write``."""
        self._trouble = self._trouble or trouble

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Write what waits, for at most so long; a later item starts again."""
        thread = self._thread
        if self._pid != os.getpid() or thread is None:
            return
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        thread.join(timeout_s)
        with self._changed:
            waiting = len(self._items) + self._lost
        if waiting:
            self.note(f"{waiting} events were not written")
        self._tell()
        self._reset()

    def _tell(self) -> None:
        if self._trouble is not None and not self._is_told:
            self._is_told = True
            warn(
                f"{self._name}: {self._trouble}. Training goes on; of what waits meanwhile the last "
                f"{self._most_waiting} events are written as soon as that is possible again. This is not repeated.",
                MFUMonitorWarning,
            )

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            _open.add(self)
            arguments = (self._changed, self._items)
            self._thread = threading.Thread(target=self._run, args=arguments, name="mfu-monitor-sink", daemon=True)
            self._thread.start()

    def _run(self, changed: threading.Condition, items: deque[tuple[int, Any]]) -> None:
        """Works on the queue that it was made for: a ``close`` that did not wait any longer begins another."""
        while True:
            with changed:
                changed.wait_for(lambda: items or self._is_over(changed))
                if not items:
                    return
                number, item = items[0]
            is_refused = self._is_refused(item)
            with changed:
                if is_refused:
                    if self._is_over(changed):
                        return
                    changed.wait(_RETRY_S)
                    continue
                if items and items[0][0] == number:  # else it was dropped meanwhile
                    items.popleft()
                if changed is self._changed:
                    self._done = number + 1
                changed.notify_all()

    def _is_over(self, changed: threading.Condition) -> bool:
        return self._is_closing or changed is not self._changed

    def _is_refused(self, item: Any) -> bool:
        try:
            self._write(item)
        except self._refused as error:
            self.note(
                f"cannot be written ({type(error).__name__}: {getattr(error, 'strerror', None) or text_of(error)})"
            )
            return True
        except Exception as error:  # noqa: BLE001  # the thread must live
            self._lost += 1
            self.note(f"an event could not be written ({type(error).__name__}: {text_of(error)})")
        return False


def _close_all() -> None:
    for behind in list(_open):
        with contextlib.suppress(Exception):
            behind.close()


atexit.register(_close_all)


class BehindSink:
    """A sink that was slow, and is now called from a thread of its own.

    Args:
        sink: called in order, by one thread.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.shows_figures = bool(getattr(sink, "shows_figures", False))
        name = type(sink).__name__
        self._behind = WriteBehind(lambda call: call(), name, most_waiting=100, refused=(), is_quick=False)

    def emit(self, event: Event) -> None:
        """Have the event written."""
        self._behind.put(lambda: self._sink.emit(event))

    def close(self) -> None:
        """Have the sink closed, after what waits."""
        self._behind.put(self._sink.close)
        self._behind.close()

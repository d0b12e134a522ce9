"""Methods wrapped for a while: one wrapper a method whoever asks for it, and what was there before once nobody does.

Two monitors around one step, two callbacks in one trainer, a wrapper of somebody else's above ours: whatever the order
in which they come and go, no layer stays behind.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Wrap"]

_LOCK = threading.RLock()
"""Reentrant: a garbage collection inside may finalise what detaches another wrap."""


class Wrap:
    """Runs ``around(call, *arguments)`` in place of ``owner.name(*arguments)`` between ``attach`` and ``detach``.

    Both may be called again, on any thread, also after an attempt that Ctrl-C cut short. ``around`` calls ``call``,
    which is the original or the next wrap, and gives back what it answers. A call that has begun ends as it began.

    Args:
        owner: an object, whose class and fellows stay untouched; or a class, whose instances come first among the
            arguments. A copy of an object (``copy``, ``pickle``) has its own method and no wrapper.
        name: its method.
        around: takes the call and its arguments; must raise nothing of its own.

    Example:
        >>> wrap = Wrap(trainer, "save_checkpoint", lambda call, *args, **kwargs: call(*args, **kwargs))
        >>> wrap.attach(); wrap.detach()
    """

    def __init__(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        self._owner, self._name, self.around = owner, name, around
        self._seat: _Seat | None = None

    def attach(self) -> None:
        """Stand around the method from now on."""
        with _LOCK:
            self._seat = _seat_at(self._owner, self._name) or _Seat(self._owner, self._name)
            self._seat.put(self)

    def detach(self) -> None:
        """Stand around it no more; without anybody left the method is as it was."""
        with _LOCK:
            for seat in {self._seat, _seat_at(self._owner, self._name)} - {None}:
                seat.leave(self)  # type: ignore[union-attr]
            self._seat = None


def _seat_at(owner: Any, name: str) -> _Seat | None:
    seat = getattr(vars(owner).get(name), "mfu_monitor_seat", None)
    return seat if isinstance(seat, _Seat) and seat.owner is owner else None


class _Seat:
    """A method of one owner: what was there, and who stands around it."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self._name = owner, name
        self._had_own = name in vars(owner)
        self._own = vars(owner).get(name)
        self._original = _original_of(owner, name)
        self._wraps: tuple[Wrap, ...] = ()
        self.call = self._original
        self._wrapper = _function_for(self) if isinstance(owner, type) else _Method(self)

    def put(self, wrap: Wrap) -> None:
        self._set((*(w for w in self._wraps if w is not wrap), wrap))
        if vars(self.owner).get(self._name) is not self._wrapper:
            setattr(self.owner, self._name, self._wrapper)

    def leave(self, wrap: Wrap) -> None:
        self._set(tuple(w for w in self._wraps if w is not wrap))
        # A wrapper that somebody put above ours stays, and ours below it only passes calls on.
        if self._wraps or vars(self.owner).get(self._name) is not self._wrapper:
            return
        if self._had_own:
            setattr(self.owner, self._name, self._own)
        else:
            delattr(self.owner, self._name)

    def _set(self, wraps: tuple[Wrap, ...]) -> None:
        call = self._original
        for wrap in wraps:
            call = functools.partial(wrap.around, call)
        self._wraps, self.call = wraps, call


def _original_of(owner: Any, name: str) -> Callable[..., Any]:
    if not isinstance(owner, type) or name in vars(owner):
        original: Callable[..., Any] = getattr(owner, name)
        return original

    def inherited(instance: Any, *args: Any, **kwargs: Any) -> Any:
        # Looked up with each call: the base's method may be wrapped meanwhile (torch.fx does so while it traces).
        return getattr(super(owner, instance), name)(*args, **kwargs)

    return inherited


def _function_for(seat: _Seat) -> Callable[..., Any]:
    """For a class: a function, so that it binds to instances."""

    @functools.wraps(getattr(seat.owner, seat._name))
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return seat.call(*args, **kwargs)

    wrapper.mfu_monitor_seat = seat  # type: ignore[attr-defined]
    return wrapper


class _Method:
    """For one object: no closure, so that it decides how it is copied."""

    def __init__(self, seat: _Seat) -> None:
        functools.update_wrapper(self, seat._original)
        self.mfu_monitor_seat = seat

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.mfu_monitor_seat.call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # A bound method is copied together with its object: the copy of a trainer must not call the first one's.
        return _itself, (self.mfu_monitor_seat._original,)


def _itself(value: Any) -> Any:
    return value

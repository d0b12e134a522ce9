"""Wrap one method of one object for a while, and take exactly that wrapper away again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

__all__ = ["wrap_method"]


def wrap_method(owner: Any, name: str, around: Callable[..., AbstractContextManager[None]]) -> Callable[[], None]:
    """Run ``owner.name(...)`` inside the context manager that ``around(...)`` makes of the same arguments.

    The wrapper is an attribute of this one object; its class and other objects are untouched. Calls that come after the
    wrapper was taken away (somebody may have kept it) are only passed on. A copy of the owner
    (``copy``, ``pickle``) has its own method and no wrapper.

    Args:
        owner: the object.
        name: its method.
        around: makes the context manager; neither may raise anything of its own.

    Returns:
        A function that takes the wrapper away and brings back what was there. If somebody else has wrapped the method
        since, their wrapper stays.
    """
    original = getattr(owner, name)
    had_own = name in owner.__dict__
    wrapper = _Wrapper(original, around)

    def restore() -> None:
        wrapper.is_active = False
        if owner.__dict__.get(name) is not wrapper:
            return
        if had_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)

    setattr(owner, name, wrapper)
    return restore


class _Wrapper:
    """Calls the original inside a context manager. An object and no closure, so that it decides how it is copied."""

    def __init__(self, original: Callable[..., Any], around: Callable[..., AbstractContextManager[None]]) -> None:
        functools.update_wrapper(self, original)
        self._original, self._around = original, around
        self.is_active = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_active:
            return self._original(*args, **kwargs)
        with self._around(*args, **kwargs):
            return self._original(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # A bound method is copied together with its object: the copy of a trainer must not call the first one's.
        return _itself, (self._original,)


def _itself(value: Any) -> Any:
    return value

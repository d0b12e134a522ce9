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
    wrapper was taken away (somebody may have kept it) are only passed on.

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
    is_active = True

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not is_active:
            return original(*args, **kwargs)
        with around(*args, **kwargs):
            return original(*args, **kwargs)

    def restore() -> None:
        nonlocal is_active
        is_active = False
        if owner.__dict__.get(name) is not wrapper:
            return
        if had_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)

    setattr(owner, name, wrapper)
    return restore

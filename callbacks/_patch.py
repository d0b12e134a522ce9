"""Wrap one method of one object for a while, and take exactly that wrapper away again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from mfu_monitor.internals.patches import Wrap

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

    def inside(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with around(*args, **kwargs):
            return call(*args, **kwargs)

    wrap = Wrap(owner, name, inside)
    wrap.attach()
    return wrap.detach

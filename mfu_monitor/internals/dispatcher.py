"""What the dispatcher knows of its operators: which have a composite kernel, and whether a call would run it.

All of it is read when asked, never at import. Since torch 2.9; where it is missing no operator is decomposed, so the
step stays as it is and composite operators without a formula are reported as not counted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

__all__ = [
    "ModeSeat",
    "is_composite",
    "modes_on_stack",
    "remove_mode",
    "runs_composite",
    "without_dispatch_modes",
]

_WHOLE = (
    "CompositeExplicitAutogradNonFunctional",
    "CompositeExplicitAutograd",
    "CompositeImplicitAutogradNestedTensor",
)
"""Kernels for many devices that come before the composite one."""


@cache
def is_composite(func: Any) -> bool:
    """True for an operator that torch can run as a composition of others."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    return _has_kernel(func, "CompositeImplicitAutograd")


def runs_composite(func: Any, tensors: Iterable[torch.Tensor]) -> bool:
    """True where a call with these tensors runs the composition: nothing else is registered for their device."""
    if not is_composite(func):
        return False
    key = backend_key(tensors)
    if key is None:
        return False
    return not (_has_kernel(func, key) or any(_has_kernel(func, alias) and _serves(alias, key) for alias in _WHOLE))


@cache
def _serves(alias: str, key: str) -> bool:
    keys = torch._C.DispatchKey
    if not hasattr(torch._C, "_dispatch_is_included_in_alias"):
        return True
    return bool(torch._C._dispatch_is_included_in_alias(getattr(keys, key), getattr(keys, alias)))


def backend_key(tensors: Iterable[torch.Tensor]) -> str | None:
    """Name of the key whose kernel a call below autograd runs, ``"CPU"`` or ``"SparseCUDA"``; None if unknown."""
    try:
        below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.Python)
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
        for tensor in tensors:
            keys = keys | (torch._C._dispatch_keys(tensor) & below)
        return str(keys.highestPriorityTypeId().name)
    except (AttributeError, TypeError):
        return None


def _has_kernel(func: Any, key: str) -> bool:
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))
    except (AttributeError, RuntimeError):  # TorchScript operators such as prim::device are not the dispatcher's
        return False


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Leaves the dispatch modes on the stack out for the length of a block; without it (since torch 2.1) they stay."""
    from torch.utils import _python_dispatch

    disable = getattr(_python_dispatch, "_disable_current_modes", None)
    return nullcontext() if disable is None else disable()


class ModeSeat:
    """A dispatch mode's place on the stack of the thread that enters it; it is left by identity, in any order.

    ``TorchDispatchMode.__exit__`` takes off whatever lies on top, and restores flags that all threads share as they
    were on entry, wrongly where modes are not left in the order in which they were entered.

    Args:
        mode: the mode.
    """

    def __init__(self, mode: Any) -> None:
        self._mode = mode
        self._entered: tuple[int, list[Any]] | None = None

    def __enter__(self) -> None:
        """Put the mode on top of this thread's stack."""
        from torch.utils import _python_dispatch as modes

        self._entered = (threading.get_ident(), modes_on_stack())
        modes._push_mode(self._mode)

    def __exit__(self, *exc_info: object) -> None:
        self.leave()

    def leave(self) -> bool:
        """Take the mode off, whatever lies above it; may be called again.

        Returns:
            False where it was not there any more: it is on the stack of another thread, or a mode that was entered
            before it was left meanwhile and took it off in its own place. That one is taken off instead.
        """
        entered, self._entered = self._entered, None
        is_found = remove_mode(self._mode)
        if not is_found and entered is not None and entered[0] == threading.get_ident():
            next(filter(remove_mode, reversed(entered[1])), None)
        return is_found or entered is None


def modes_on_stack() -> list[Any]:
    """The dispatch modes of this thread, the outermost first."""
    from torch.utils import _python_dispatch

    return list(_python_dispatch._get_current_dispatch_mode_stack())


def remove_mode(mode: Any) -> bool:
    """Take exactly this mode off this thread's stack, whatever lies above it; False where it is not there."""
    from torch.utils import _python_dispatch as modes

    if not any(other is mode for other in modes_on_stack()):
        return False
    above: list[Any] = []
    try:
        while not above or above[-1] is not mode:
            above.append(modes._pop_mode())
    finally:  # one line each, so that Ctrl-C finds no mode in nobody's hands
        above[:] = [other for other in above if other is not mode]
        while above:
            modes._push_mode(above.pop())
    return True

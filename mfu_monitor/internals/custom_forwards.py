"""Which frames on the stack are the forward of a ``torch.autograd.Function``, on every torch.

Until torch 2.13 ``Function.apply`` is Python and its frame lies above the forward's; since 2.14 it is C and leaves
none. So the forward's own code is looked up among all functions that exist. Without it, work inside custom functions
and AOT's compiled functions reads as work without gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from types import CodeType, FrameType
from typing import Any

import torch
from torch.autograd.function import Function, FunctionCtx

from mfu_monitor.internals.autograd_state import custom_node_class
from mfu_monitor.internals.facts import fact

__all__ = ["ForwardCodes", "context_of", "functions_made", "is_forward"]


def code_of(function: Any) -> CodeType | None:
    """The code that a call of ``function`` runs first; None for a builtin."""
    function = getattr(function, "func", function)  # functools.partial
    function = getattr(function, "__func__", function)  # bound method
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None


class ForwardCodes:
    """The code objects of all custom forwards, read again when a class came or went."""

    def __init__(self) -> None:
        self._size = -1
        self._made: str | None = None
        self._latest: weakref.ref[type] | None = None
        self._takes_context: dict[CodeType, bool] = {}

    def known(self) -> dict[CodeType, bool]:
        """The codes of all forwards there are now, each to whether every function that runs it gets a context."""
        made = functions_made()
        if made is not None and made == self._made:
            return self._takes_context
        self._made = made
        nodes = self._nodes()
        latest = nodes[-1] if nodes else None
        if nodes is None or len(nodes) != self._size or (self._latest is not None and self._latest() is not latest):
            self._size = -1 if nodes is None else len(nodes)
            self._latest = weakref.ref(latest) if latest is not None else None
            self._takes_context = _codes_of_all(Function, {})
        return self._takes_context

    def refresh(self) -> None:
        """Read all classes again: a forward may have been replaced on a class that exists."""
        self._size, self._made = -1, None

    def look_again(self) -> None:
        """See at the next question whether classes went; that one came is seen at every question."""
        self._made = None

    @staticmethod
    def _nodes() -> list[type] | None:
        base = custom_node_class()
        # torch makes one for each Function, nested subclasses included
        return None if base is None else base.__subclasses__()


@fact("torch.autograd.function.AUTOGRAD_FUNCTION_COUNTER", lost="counting takes longer", decides=False)
def functions_made() -> str | None:
    """Changes with each class of a custom function that is made; None where it is not known."""
    return repr(torch.autograd.function.AUTOGRAD_FUNCTION_COUNTER)  # its next number, without taking it


def is_forward(frame: FrameType, known: Mapping[CodeType, bool]) -> bool:
    """True where a frame is a forward that autograd called: a call by hand has no context of autograd's."""
    takes_context = known.get(frame.f_code)
    return takes_context is not None and (not takes_context or context_of(frame) is not None)


def _codes_of_all(root: Any, found: dict[CodeType, bool]) -> dict[CodeType, bool]:
    """Code to whether every function that runs it gets a context."""
    for function in root.__subclasses__():
        splits = function.setup_context is not Function.setup_context
        for name, takes_context in (("forward", not splits), ("setup_context", True), ("jvp", True)):
            code = code_of(getattr(function, name))
            if code is not None:
                found[code] = takes_context and found.get(code, True)
        _codes_of_all(function, found)
    return found


def context_of(frame: FrameType) -> Any:
    """The ``ctx`` a frame was called with, also where a decorator takes it in ``*args``; None where it has none."""
    code = frame.f_code
    if code.co_argcount:
        first = frame.f_locals.get(code.co_varnames[0])
    elif code.co_flags & 0x04:  # takes *args
        arguments = frame.f_locals.get(code.co_varnames[code.co_kwonlyargcount], ())
        first = arguments[0] if isinstance(arguments, tuple) and arguments else None
    else:
        first = None
    return first if isinstance(first, FunctionCtx) else None

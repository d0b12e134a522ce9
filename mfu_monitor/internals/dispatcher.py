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

from mfu_monitor.internals.dynamo import skipped_by_dynamo, without_dynamo
from mfu_monitor.internals.facts import fact, note_missing

__all__ = [
    "ModeSeat",
    "as_dispatch_mode",
    "is_composite",
    "modes_on_stack",
    "qualified_name",
    "remove_mode",
    "runs_composite",
    "schema_of",
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
    return _is_overload(func) and _has_kernel(func, "CompositeImplicitAutograd")


def runs_composite(func: Any, tensors: Iterable[torch.Tensor]) -> bool:
    """True where a call with these tensors runs the composition: nothing else is registered for their device."""
    if not is_composite(func):
        return False
    key = backend_key(tensors)
    if key is None:
        return False
    return not (_has_kernel(func, key) or any(_has_kernel(func, alias) and _serves(alias, key) for alias in _WHOLE))


@fact("torch._ops.OpOverload", lost="composite operators are reported as not counted", otherwise=False)
def _is_overload(func: Any) -> bool:
    return isinstance(func, torch._ops.OpOverload)


@cache
def _serves(alias: str, key: str) -> bool:
    return _is_included(alias, key)


@fact("torch._C._dispatch_is_included_in_alias", lost="some composite operators are not counted", otherwise=True)
def _is_included(alias: str, key: str) -> bool:
    keys = torch._C.DispatchKey
    return bool(torch._C._dispatch_is_included_in_alias(getattr(keys, key), getattr(keys, alias)))


@fact("torch._C._dispatch_keyset_full_after", lost="composite operators are reported as not counted")
def _keys_below(tensors: tuple[torch.Tensor, ...]) -> Any:
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.Python)
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
    for tensor in tensors:
        keys = keys | (torch._C._dispatch_keys(tensor) & below)
    return keys.highestPriorityTypeId().name


def backend_key(tensors: Iterable[torch.Tensor]) -> str | None:
    """Name of the key whose kernel a call below autograd runs, ``"CPU"`` or ``"SparseCUDA"``; None if unknown."""
    key = _keys_below(tuple(tensors))
    return None if key is None else str(key)


@fact("torch._C._dispatch_has_kernel_for_dispatch_key", lost="composite operators are not counted", otherwise=False)
def _has_kernel(func: Any, key: str) -> bool:
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))
    except RuntimeError:  # TorchScript operators such as prim::device are not the dispatcher's
        return False


@fact("torch.utils._python_dispatch._disable_current_modes", lost="reading a mask is counted as work of the step")
def _modes_off() -> Any:
    from torch.utils import _python_dispatch

    return _python_dispatch._disable_current_modes()


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Leaves the dispatch modes on the stack out for the length of a block; where it is missing they stay."""
    return _modes_off() or nullcontext()


class _NoMode:
    """In the place of torch's dispatch mode where there is none: sees nothing, so that the self-check fails."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None


@fact("torch.utils._python_dispatch.TorchDispatchMode", lost="no operator is seen", otherwise=_NoMode)
def _mode_base() -> type[Any]:
    from torch.utils._python_dispatch import TorchDispatchMode

    return TorchDispatchMode


@cache
def as_dispatch_mode(plain: type) -> type[Any]:
    """The class made a mode: inside it each operator goes to its ``__torch_dispatch__``, which dynamo never traces."""
    dispatch: Any = plain.__torch_dispatch__  # type: ignore[attr-defined]
    made: Any = type(plain.__name__, (plain, _mode_base()), {"__torch_dispatch__": dispatch})
    if skipped_by_dynamo(dispatch):  # in place of the wrapper that torch puts around it since 2.10
        made.__torch_dispatch__ = dispatch
    elif made.__torch_dispatch__ is dispatch:  # twice costs twice
        made.__torch_dispatch__ = without_dynamo(dispatch)
    mode_type: type[Any] = made
    return mode_type


@fact("torch._ops.OpOverload._schema", lost="operators have no names, so that none is counted")
def _read_schema(func: Any) -> Any:
    return func._schema


def schema_of(func: Any) -> Any:
    """Name, arguments and returns of an operator; None for a higher-order operator, which has none."""
    schema = getattr(func, "_schema", None)
    return _read_schema(func) if schema is None and _is_overload(func) else schema


@fact("torch._ops.OpOverloadPacket", lost="formulas can be registered by text alone")
def qualified_name(op: Any) -> str | None:
    """``"mylib::attn"`` of ``torch.ops.mylib.attn``, of an overload and of a custom operator; None for others."""
    if isinstance(op, torch._ops.OpOverloadPacket):
        return str(op._qualified_op_name)
    if isinstance(op, torch._ops.OpOverload):
        return str(op._schema.name)
    if isinstance(op, torch._ops.HigherOrderOperator):
        return f"higher_order::{op.name()}"
    from torch._library.custom_ops import CustomOpDef

    return str(op._qualname) if isinstance(op, CustomOpDef) else None


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
        """Put the mode on top of this thread's stack; where it could not be taken off again it stays out."""
        self._entered = (threading.get_ident(), modes_on_stack())
        _push(self._mode)

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


@fact("torch.utils._python_dispatch._get_current_dispatch_mode_stack", lost="no operator is seen", otherwise=())
def _read_stack() -> Any:
    from torch.utils import _python_dispatch

    return _python_dispatch._get_current_dispatch_mode_stack()


def modes_on_stack() -> list[Any]:
    """The dispatch modes of this thread, the outermost first."""
    return list(_read_stack())


@fact("torch.utils._python_dispatch._push_mode", lost="no operator is seen")
def _push(mode: Any) -> None:
    """Put a mode on the stack, if it can be found there and taken off again."""
    from torch.utils import _python_dispatch as modes

    pop = modes._pop_mode
    modes._push_mode(mode)
    if not any(other is mode for other in modes_on_stack()):
        pop()
        raise AttributeError("a mode that was put on the stack is not there")


@fact("torch.utils._python_dispatch._pop_mode", lost="no operator is seen")
def _pop() -> Any:
    from torch.utils import _python_dispatch

    return _python_dispatch._pop_mode()


def remove_mode(mode: Any) -> bool:
    """Take exactly this mode off this thread's stack, whatever lies above it; False where it is not there."""
    stack = modes_on_stack()
    if not any(other is mode for other in stack):
        return False
    above: list[Any] = []
    try:
        while len(above) < len(stack) and (not above or above[-1] is not mode):
            above.append(_pop())
        if above[-1] is not mode:
            note_missing("torch.utils._python_dispatch._pop_mode")
    finally:  # one line each, so that Ctrl-C finds no mode in nobody's hands
        above[:] = [other for other in above if other is not mode and other is not None]
        while above:
            _push(above.pop())
    return True

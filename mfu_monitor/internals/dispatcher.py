"""What the dispatcher knows of its operators: which have a composite kernel, and whether a call would run it.

All of it is read when asked, never at import. Since torch 2.9; where it is missing no operator is decomposed, so the
step stays as it is and composite operators without a formula are reported as not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

__all__ = ["is_composite", "runs_composite", "without_dispatch_modes"]

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

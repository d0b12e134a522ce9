"""Lets tensor subclasses be constructed under a dispatch mode of ours.

``Subclass(tensor)`` and every other constructor call that ends in ``torch.Tensor.__new__`` makes a plain tensor first,
by an operator, and then gives it the subclass. Under any dispatch mode that operator's result is a Python object
already, and torch (2.9 to 2.14) raises "Creating a new Tensor subclass ... already associated". So for the length of a
counted step ``torch.Tensor.__new__`` runs below our modes; no constructor computes a product. Where others' modes are
on the stack too, the call raises without us as well and is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mfu_monitor.internals.dispatcher import modes_on_stack, without_dispatch_modes
from mfu_monitor.internals.dynamo import without_dynamo

__all__ = ["ConstructorsBelow"]


class ConstructorsBelow:
    """Runs constructors of tensors below the dispatch modes of one type while anybody has it attached.

    Args:
        mode_type: modes that only look; where any other is active, constructors run as they would without this.
    """

    def __init__(self, mode_type: type) -> None:
        self._mode_type = mode_type
        self._users: set[int] = set()
        self._own: Any = None
        self._installed: Any = None

    def attach(self, user: object) -> None:
        """Replace torch's constructor, once for all users."""
        self._users.add(id(user))
        if self._installed is None:
            self._own = torch.Tensor.__dict__.get("__new__")  # some libraries put one of theirs there
            self._installed = self._below(torch.Tensor.__new__)
            torch.Tensor.__new__ = self._installed  # type: ignore[method-assign]

    def detach(self, user: object) -> None:
        """Put back what was there when the last user leaves; may be called again, at any moment."""
        self._users.discard(id(user))
        if self._users or self._installed is None:
            return
        if torch.Tensor.__dict__.get("__new__") is self._installed:
            if self._own is None:
                del torch.Tensor.__new__
            else:
                torch.Tensor.__new__ = self._own  # type: ignore[method-assign]
        self._installed = None

    def _below(self, construct: Callable[..., Any]) -> Callable[..., Any]:
        @without_dynamo
        def construct_below(cls: type, *args: Any, **kwargs: Any) -> Any:
            modes = modes_on_stack()
            if not modes or not all(isinstance(mode, self._mode_type) for mode in modes):
                return construct(cls, *args, **kwargs)
            with without_dispatch_modes():
                return construct(cls, *args, **kwargs)

        return construct_below

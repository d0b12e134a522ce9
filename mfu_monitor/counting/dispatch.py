"""A dispatch mode that passes every operator on and shows it to an observer.

It leaves compiled code alone: see ``ignore_compile_internals``.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol

from mfu_monitor.counting.calls import Operator, operator_of
from mfu_monitor.internals.dispatcher import (
    ModeSeat,
    as_dispatch_mode,
    modes_on_stack,
    remove_mode,
    runs_composite,
)
from mfu_monitor.internals.tensors import tensors_in

__all__ = ["CountingMode", "Observer", "drop_strays"]


class Observer(Protocol):
    """Is shown every operator after it ran."""

    def saw(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """One operator ran with these arguments and gave this output."""

    def failed(self, fault: BaseException) -> None:
        """Looking at an operator raised; must raise nothing but what is the user's (``errors.must_pass``)."""


class CountingMode:
    """Shows an observer what the dispatcher runs, forward, backward and optimizer alike."""

    supports_higher_order_operators = True

    def __new__(cls, observer: Observer) -> CountingMode:
        """A mode of torch's, which is not read before the first one is made."""
        mode: CountingMode = object.__new__(as_dispatch_mode(CountingMode))
        return mode

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer: Observer | None = observer
        self._seat = ModeSeat(self)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs under this mode as it is; an ordinary mode makes dynamo give the frame up for good."""
        return True

    def __enter__(self) -> CountingMode:
        self._seat.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._seat.leave()

    @property
    def is_left(self) -> bool:
        """True once it sees nothing any more."""
        return self._observer is None

    def leave(self) -> bool:
        """See nothing more, and be off this thread's stack; may be called again.

        Returns:
            False where operators were missed: the mode had been taken off, or lies on another thread's stack. There
            it passes calls on, until that thread is asked to ``drop_strays``.
        """
        self._observer = None
        return self._seat.leave()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        observer = self._observer
        if observer is None:
            return func(*args, **kwargs)
        if types and any(_desugars(t) for t in types):
            # DTensor, jagged tensors and the like turn this call into calls on the local parts: count those.
            return NotImplemented
        operator, must_decompose = None, False
        try:
            operator = operator_of(func)
            # Composite operators reach the dispatcher whole in inference mode; their parts are what we count. Where the
            # device has a kernel of its own that one runs as it would without us: the composition rounds otherwise.
            must_decompose = operator.may_decompose and runs_composite(func, tensors_in(args, kwargs))
        except BaseException as fault:  # noqa: BLE001  (the user's step goes on, unless it is told otherwise)
            observer.failed(fault)
        if must_decompose:
            with ModeSeat(self):
                output = func.decompose(*args, **kwargs)
            if output is not NotImplemented:
                return output
        output = func(*args, **kwargs)
        try:
            if operator is not None:
                observer.saw(operator, args, kwargs, output)
        except BaseException as fault:  # noqa: BLE001  (the user's step goes on, unless it is told otherwise)
            observer.failed(fault)
        return output


def drop_strays() -> None:
    """Take off this thread's stack what was left on another thread."""
    for mode in modes_on_stack():
        if isinstance(mode, CountingMode) and mode.is_left:
            remove_mode(mode)


@cache
def _desugars(tensor_type: type) -> bool:
    return hasattr(tensor_type, "__tensor_flatten__")

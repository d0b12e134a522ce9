"""Which parameters need gradients, asked on every step: they decide what backward computes."""

from __future__ import annotations

import operator
from typing import Any

__all__ = ["TrainableParameters"]

_FLAG = operator.attrgetter("requires_grad")
_FLAGS_PER_STEP = 64
"""Flags read on one step: about 2.5 µs (40 ns each on one core at 2-3 GHz), whatever the size of the model."""


class TrainableParameters:
    """A small number for the present pattern of ``requires_grad``; the same pattern has the same number again.

    Up to 64 parameters are all asked on each step. Of a larger model every k-th is asked, with a start that moves:
    freezing a block of k neighbours is seen at once, freezing a single parameter within k steps.

    Args:
        model: a module, or None.

    Example:
        >>> trainable = TrainableParameters(model)
        >>> trainable.pattern()
        0
    """

    def __init__(self, model: Any = None) -> None:
        self._model = model
        self._numbers: dict[tuple[bool, ...], int] = {}
        self._number = 0
        self._turn = 0
        self._parameters: list[Any] = []
        self._groups: list[list[Any]] = []
        self._group_flags: list[tuple[bool, ...]] = []

    def refresh(self) -> None:
        """Read the list of parameters again: modules may have been added or replaced."""
        self._parameters = [] if self._model is None else list(self._model.parameters())
        stride = max(1, -(-len(self._parameters) // _FLAGS_PER_STEP))
        self._groups = [self._parameters[start::stride] for start in range(stride)]
        self._read_all()

    def _read_all(self) -> None:
        flags = tuple(map(_FLAG, self._parameters))
        self._number = self._numbers.setdefault(flags, len(self._numbers))
        self._group_flags = [tuple(map(_FLAG, group)) for group in self._groups]

    def pattern(self) -> int:
        """The number of the present pattern."""
        if not self._groups:  # the first step: before it a strategy may still wrap or move the model
            self.refresh()
        turn = self._turn
        self._turn = turn + 1 if turn + 1 < len(self._groups) else 0
        if tuple(map(_FLAG, self._groups[turn])) != self._group_flags[turn]:
            self._read_all()
        return self._number

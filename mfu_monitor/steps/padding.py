"""Sums over masks and labels, kept on the device and read once they have arrived: nothing waits for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mfu_monitor.counting.late_reads import read_late
from mfu_monitor.steps.batch import IGNORED_LABEL, find_masks

__all__ = ["PaddingCounter"]

_FIELDS = ("tokens_not_padding", "tokens_in_loss")

_Sum = Any
"""An int, a tensor of one element on a device, or None: not known."""


class PaddingCounter:
    """Adds up the tokens that are not padding and those in the loss.

    On the CPU the sums are numbers at once. On an accelerator they are queued as work of the current stream, copied to
    the host without blocking, and read when an event says that they have arrived.

    Args:
        event_factory: makes the event; for tests.

    Example:
        >>> padding = PaddingCounter()
        >>> padding.add(padding.measure(batch))
        >>> read = padding.take()
        >>> read()
        {'tokens_not_padding': 12, 'tokens_in_loss': 6}
    """

    def __init__(self, *, event_factory: Callable[[], Any] | None = None) -> None:
        self._event_factory = event_factory
        self._sums: tuple[_Sum, _Sum] | None = None

    def measure(self, batch: Any) -> tuple[_Sum, _Sum]:
        """The two sums of one batch."""
        mask, labels = find_masks(batch)
        return _count_other_than(mask, 0), _count_other_than(labels, IGNORED_LABEL)

    def add(self, sums: tuple[_Sum, _Sum]) -> None:
        """Add the sums of a step that is in the window."""
        before = self._sums
        self._sums = sums if before is None else (_plus(before[0], sums[0]), _plus(before[1], sums[1]))

    def take(self) -> Callable[[], dict[str, int | None] | None]:
        """End the window: a function that gives its sums, or None while they have not arrived. Starts again."""
        sums, self._sums = self._sums or (None, None), None
        reads = [self._read_later(value) for value in sums]

        def read() -> dict[str, int | None] | None:
            if not all(is_ready() for is_ready, _ in reads):
                return None
            return {name: value() for name, (_, value) in zip(_FIELDS, reads, strict=True)}

        return read

    def _read_later(self, value: _Sum) -> tuple[Callable[[], bool], Callable[[], int | None]]:
        if not isinstance(value, torch.Tensor):
            return (lambda: True), (lambda: value)
        has_come, host = read_late(value, event_factory=self._event_factory)
        return has_come, lambda: int(host)


def _count_other_than(tensor: torch.Tensor | None, ignored: int) -> _Sum:
    if tensor is None:
        return None
    count = torch.count_nonzero(tensor != ignored)  # of booleans, so that autograd has no part in it
    return int(count) if count.device.type == "cpu" else count


def _plus(a: _Sum, b: _Sum) -> _Sum:
    return None if a is None or b is None else a + b

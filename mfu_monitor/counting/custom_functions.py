"""What the backward of a custom ``autograd.Function`` computes that is no gradient, or one that nobody needs.

Forward products that it runs again, with gradients off:

Nothing marks them, so three things are followed. Operands: a repeated product takes an operand that the same operator
took in the same place in a custom forward. Work: with operands that were cast or copied since, or with another
operator, it still has the FLOPs and the sizes of a product of a custom forward. Gradients: what depends on an incoming
gradient is new in backward, also where it meets a weight as an activation did before (the gradient through a tied
weight).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from mfu_monitor.counting.frames import CallSite, graph_tangents
from mfu_monitor.counting.ledger import Entry
from mfu_monitor.counting.step_record import Phase
from mfu_monitor.counting.storages import ByStorage
from mfu_monitor.internals.autograd_state import is_custom_node
from mfu_monitor.internals.tensors import storage_id, tensors_in

__all__ = ["DroppedGradients", "FunctionRepeats"]

Use = tuple[Any, ...]
"""Operator, place among its operands, and the part of the storage that was taken."""
Work = tuple[int, int, tuple[int, ...], bool]
"""FLOPs of a product, elements of its result and of its two factors (what it adds to comes before them or not at all),
and whether both factors are one tensor."""


class FunctionRepeats:
    """Follows operands and gradients through the custom functions of a step."""

    def __init__(self) -> None:
        self._uses: ByStorage[set[Use]] = ByStorage()
        self._gradients: ByStorage[bool] = ByStorage()
        self._work: set[Work] = set()
        self._backward: int | None = None
        self._has_tangents = False

    def enter(self, node: Any) -> None:
        """The engine executes this node: the first operator of a graph of AOT's still sees the graph's gradients."""
        is_new = self._backward != id(node)
        self._backward = id(node)
        if is_new and is_custom_node(node):
            tangents = tensors_in(graph_tangents(depth=2))
            self._has_tangents = bool(tangents)
            self._mark(tangents)

    def saw(self, op: str, site: CallSite, operands: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> bool:
        """An operator ran; True if it is a forward one that a custom backward runs again."""
        if site.in_custom_backward:
            return self._repeats(op, site, operands, outputs)
        if site.function_forwards:
            self._remember(op, operands)
        return False

    def does_equal_work(
        self,
        site: CallSite,
        flops: int,
        operands: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        *,
        has_equal_operand: bool,
    ) -> bool:
        """A product was priced; True where a custom backward does a forward one's work, and no gradient is in it."""
        factors = operands[-2:]
        is_gram = len(factors) == 2 and storage_id(factors[0]) == storage_id(factors[1])
        work = flops, sum(t.numel() for t in outputs), tuple(sorted(t.numel() for t in factors)), is_gram
        if not site.in_custom_backward:
            if site.function_forwards:
                self._work.add(work)
            return False
        knows_gradients = self._has_tangents or bool(tensors_in(site.incoming_gradients))
        is_free = knows_gradients and not self._gradients.first(factors)
        return work in self._work and (is_free or has_equal_operand)

    def _remember(self, op: str, operands: Sequence[torch.Tensor]) -> None:
        for place, tensor in enumerate(operands):
            uses = self._uses.get(tensor)
            if uses is None:
                self._uses.set(tensor, uses := set())
            uses.add(_use(op, place, tensor))

    def _repeats(
        self, op: str, site: CallSite, operands: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> bool:
        self._mark(t for t in site.incoming_gradients if isinstance(t, torch.Tensor))
        read = [t for t in operands if not any(t is result for result in outputs)]
        if self._gradients.first(read) or not any(t.numel() for t in read) or _makes_room(op):
            self._mark(outputs)  # room is mostly made for a kernel that nobody sees to write a gradient there
            return False
        return any(_use(op, i, t) in (self._uses.get(t) or ()) for i, t in enumerate(operands))

    def _mark(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if self._gradients.get(tensor) is None:
                self._gradients.set(tensor, True)


class DroppedGradients:
    """Gradients that a custom backward computes for an input that asks for none: autograd drops them.

    What is made of such a product inside the same backward goes the way of it. One that no operator outside read and
    that nothing holds at the end of the step was dropped.
    """

    def __init__(self) -> None:
        self._products: list[tuple[Entry, int]] = []
        self._inside: ByStorage[frozenset[int]] = ByStorage()
        """By position in the list: the products that a tensor was made of."""
        self._read: set[int] = set()

    def add(self, entry: Entry, node: Any, outputs: Sequence[torch.Tensor]) -> None:
        """A gradient product ran in a custom backward; ``node`` is the engine's."""
        if entry.phase is Phase.BACKWARD and not all(getattr(node, "needs_input_grad", (True,))):
            self._products.append((entry, id(node)))
            self._hold({len(self._products) - 1}, outputs)

    def saw(self, operands: Iterable[torch.Tensor], outputs: Iterable[torch.Tensor], node: Any = None) -> None:
        """An operator ran, views included, or a compiled graph."""
        if not self._products:
            return
        taken = frozenset[int]().union(*(self._inside.get(t) or () for t in operands))
        carried = {product for product in taken if self._products[product][1] == id(node)}
        self._read |= taken - carried
        self._hold(carried, outputs)

    def settle(self) -> None:
        """The step has ended: dropped gradients are work of no model."""
        kept = self._read.union(*self._inside.of_living())
        for product, (entry, _) in enumerate(self._products):
            if product not in kept:
                entry.phase = Phase.OTHER

    def _hold(self, products: set[int], outputs: Iterable[torch.Tensor]) -> None:
        for tensor in outputs if products else ():
            self._inside.set(tensor, frozenset(products) | (self._inside.get(tensor) or frozenset()))


def _use(op: str, place: int, tensor: torch.Tensor) -> Use:
    strides = tensor.stride() if tensor.layout == torch.strided and not tensor.is_nested else ()
    offset = tensor.storage_offset() if strides else 0
    return op, place, offset, tuple(tensor.shape) if not tensor.is_nested else (), strides


def _makes_room(op: str) -> bool:
    return op.rpartition("::")[2].startswith(("empty", "new_empty"))

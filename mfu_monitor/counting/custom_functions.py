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

from mfu_monitor.counting.calls import Call
from mfu_monitor.counting.frames import CallSite, StackReader
from mfu_monitor.counting.ledger import Entry
from mfu_monitor.counting.step_record import Phase
from mfu_monitor.counting.storages import StorageFacts, Storages
from mfu_monitor.internals.autograd_state import is_custom_node
from mfu_monitor.internals.tensors import storage_id, tensors_in

__all__ = ["DroppedGradients", "FunctionRepeats"]

Use = tuple[Any, ...]
"""Operator, place among its operands, and the part of the storage that was taken."""
Work = tuple[int, int, tuple[int, ...], bool]
"""FLOPs of a product, elements of its result and of its two factors (what it adds to comes before them or not at all),
and whether both factors are one tensor."""


class FunctionRepeats:
    """Follows operands and gradients through the custom functions of a step.

    Args:
        storages: of the step.
        stack: of the step.
    """

    def __init__(self, storages: Storages, stack: StackReader) -> None:
        self._storages = storages
        self._stack = stack
        self._work: set[Work] = set()
        self._backward: int | None = None
        self._has_tangents = False

    def enter(self, node: Any) -> None:
        """The engine executes this node: the first operator of a graph of AOT's still sees the graph's gradients."""
        is_new = self._backward != id(node)
        self._backward = id(node)
        if is_new and is_custom_node(node):
            tangents = tensors_in(self._stack.graph_tangents(depth=2))
            self._has_tangents = bool(tangents)
            self._mark(tangents)

    def saw(self, call: Call, site: CallSite) -> bool:
        """An operator ran; True if it is a forward one that a custom backward runs again."""
        if site.in_custom_backward:
            return self._repeats(call, site)
        if site.function_forwards:
            _remember(call)
        return False

    def does_equal_work(self, call: Call, site: CallSite, flops: int, *, has_equal_operand: bool) -> bool:
        """A product was priced; True where a custom backward does a forward one's work, and no gradient is in it."""
        if not (site.in_custom_backward or site.function_forwards):
            return False
        factors = call.operands[-2:]
        is_gram = len(factors) == 2 and storage_id(factors[0]) == storage_id(factors[1])
        work = flops, sum(t.numel() for t in call.outputs), tuple(sorted(t.numel() for t in factors)), is_gram
        if not site.in_custom_backward:
            self._work.add(work)
            return False
        knows_gradients = self._has_tangents or bool(tensors_in(site.incoming_gradients))
        is_free = knows_gradients and not any(facts.is_functions_gradient for facts in call.taken[-2:])
        return work in self._work and (is_free or has_equal_operand)

    def _repeats(self, call: Call, site: CallSite) -> bool:
        self._mark([t for t in site.incoming_gradients if isinstance(t, torch.Tensor)])
        operands = list(zip(call.operands, call.taken, strict=True))
        read = [(t, facts) for t, facts in operands if not any(t is result for result in call.outputs)]
        takes_gradient = any(facts.is_functions_gradient for _, facts in read)
        if takes_gradient or not any(t.numel() for t, _ in read) or call.operator.makes_room:
            for facts in call.given:  # room is mostly made for a kernel that nobody sees to write a gradient there
                facts.is_functions_gradient = True
            return False
        name = call.operator.name
        return any(_use(name, i, t) in (facts.uses or ()) for i, (t, facts) in enumerate(operands))

    def _mark(self, tensors: Sequence[torch.Tensor]) -> None:
        for facts in self._storages.of_all(tensors):
            facts.is_functions_gradient = True


class DroppedGradients:
    """Gradients that a custom backward computes for an input that asks for none: autograd drops them.

    What is made of such a product inside the same backward goes the way of it. One that no operator outside read and
    that nothing holds at the end of the step was dropped.

    Args:
        storages: of the step.
    """

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._products: list[tuple[Entry, int]] = []
        self._read: set[int] = set()

    @property
    def follows_any(self) -> bool:
        """Some product may have been dropped."""
        return bool(self._products)

    def add(self, entry: Entry, call: Call) -> None:
        """A gradient product ran in a custom backward."""
        if entry.phase is Phase.BACKWARD and not all(getattr(call.node, "needs_input_grad", (True,))):
            self._products.append((entry, id(call.node)))
            self._hold({len(self._products) - 1}, call.given)

    def saw(self, taken: Iterable[StorageFacts], given: Iterable[StorageFacts], node: Any = None) -> None:
        """An operator ran, views included, or a compiled graph."""
        if not self._products:
            return
        read = frozenset[int]().union(*(facts.dropped_with or () for facts in taken))
        carried = {product for product in read if self._products[product][1] == id(node)}
        self._read |= read - carried
        self._hold(carried, given)

    def settle(self) -> None:
        """The step has ended: dropped gradients are work of no model."""
        if not self._products:
            return
        kept = self._read.union(*(facts.dropped_with or () for facts in self._storages.of_living()))
        for product, (entry, _) in enumerate(self._products):
            if product not in kept:
                entry.phase = Phase.OTHER

    @staticmethod
    def _hold(products: set[int], given: Iterable[StorageFacts]) -> None:
        for facts in given if products else ():
            facts.dropped_with = frozenset(products) | (facts.dropped_with or frozenset())


def _remember(call: Call) -> None:
    for place, (tensor, facts) in enumerate(zip(call.operands, call.taken, strict=True)):
        if facts.uses is None:
            facts.uses = set()
        facts.uses.add(_use(call.operator.name, place, tensor))


def _use(op: str, place: int, tensor: torch.Tensor) -> Use:
    strides = tensor.stride() if tensor.layout == torch.strided and not tensor.is_nested else ()
    offset = tensor.storage_offset() if strides else 0
    return op, place, offset, tuple(tensor.shape) if not tensor.is_nested else (), strides

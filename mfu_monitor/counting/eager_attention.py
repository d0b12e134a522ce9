"""Recognises attention that the dispatcher sees only in pieces: the math path of scaled_dot_product_attention.

That path decomposes before dispatch into ``bmm``, an added mask, ``_safe_softmax`` and ``bmm``. ``_safe_softmax``
appears nowhere else, so a product whose result flows into it is Q K^T, and the product that takes its result is the one
with V. Both are priced by the attended pairs, as every other backend is; what the dense products compute beyond is
masked work. ``multi_head_attention_forward`` that is asked for its weights runs the same two products around a plain
softmax; there the stack says that it is attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from mfu_monitor.counting.autograd_links import ForwardLink
from mfu_monitor.counting.frames import runs_inside
from mfu_monitor.counting.ledger import Entry
from mfu_monitor.counting.storages import StorageFacts
from mfu_monitor.formulas.attention_cost import UNREADABLE_MASK_NOTE
from mfu_monitor.formulas.attention_masks import attended_pairs_of_scores
from mfu_monitor.formulas.cost import OpCost

if TYPE_CHECKING:
    from mfu_monitor.counting.calls import Call

__all__ = ["FOLLOWED", "MathAttention", "Product", "Weights", "split_by_attended"]

SOFTMAX = "aten::_safe_softmax"
PLAIN_SOFTMAX = "aten::_softmax"
SCORE_STEPS = frozenset({"aten::add", "aten::add_", "aten::where", "aten::masked_fill", "aten::mul", "aten::div"})
"""What may stand between Q K^T and the softmax."""
MASKINGS = SCORE_STEPS - {"aten::mul", "aten::div"}
PROBABILITY_STEPS = frozenset({"aten::native_dropout", "aten::mul", "aten::mul_", "aten::div_", "aten::_to_copy"})
MASK_STEPS = frozenset({"aten::where", "aten::_to_copy", "aten::logical_not"})
FOLLOWED = SCORE_STEPS | PROBABILITY_STEPS | MASK_STEPS | {SOFTMAX, PLAIN_SOFTMAX, "aten::tril"}
"""All operators beside products that may be part of attention."""


@dataclass(slots=True)
class Product:
    """A batched product that may turn out to be part of attention."""

    entry: Entry
    link: ForwardLink
    mask_share: Fraction | None = None
    """Share of attended pairs of a mask that was added, where its layout is known without its contents."""
    is_masked: bool = False


@dataclass(frozen=True, slots=True)
class Weights:
    """Attention probabilities: the share of pairs that they attend to."""

    share: Fraction
    is_of_layer: bool
    """Made by ``multi_head_attention_forward``, which may hand them to its caller: later products are the caller's."""


def split_by_attended(cost: OpCost, attended: Fraction) -> OpCost:
    """Price a dense product by the share of pairs that are attended; the rest is masked work the kernel does anyway."""
    exact = int(cost.flops * attended)
    return OpCost(exact, palm_flops=cost.flops, masked_flops=cost.flops - exact, precision=cost.precision)


class MathAttention:
    """Follows storages from a batched product through mask and softmax to the next product.

    Args:
        note: takes what a reader of the record should know.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note

    def saw_product(self, product: Product, call: Call) -> None:
        """A batched product ran: price it if it takes attention probabilities, else remember its result."""
        weights = _weights(call.taken)
        if weights is not None and (not weights.is_of_layer or runs_inside(functional.multi_head_attention_forward)):
            _price(product, weights.share)
        elif call.given:
            call.given[0].product = product

    def saw_other(self, call: Call) -> None:
        """Any other operator ran: follow the chain from its operands to its outputs."""
        op = call.operator.name
        if op == "aten::tril" and call.operands and call.outputs:
            self._saw_lower_triangle(call)
        elif op == SOFTMAX or (op == PLAIN_SOFTMAX and self._is_of_attention_layer(call)):
            self._saw_softmax(call, is_of_layer=op == PLAIN_SOFTMAX)
        elif op in SCORE_STEPS and (product := _product(call.taken)) is not None:
            for facts in call.given:
                facts.product = product
            if op in MASKINGS:
                product.mask_share, product.is_masked = _lower_triangle(call.taken), True
        elif op in PROBABILITY_STEPS and (weights := _weights(call.taken)) is not None:
            for facts in call.given:
                facts.weights = weights
        elif op in MASK_STEPS and (share := _lower_triangle(call.taken)) is not None:
            for facts in call.given:
                facts.lower_triangle = share

    @staticmethod
    def _is_of_attention_layer(call: Call) -> bool:
        return _product(call.taken) is not None and runs_inside(functional.multi_head_attention_forward)

    def _share_without_contents(self, product: Product | None) -> Fraction:
        if product is not None and product.mask_share is not None:
            return product.mask_share
        if product is not None:
            self._note(UNREADABLE_MASK_NOTE)
        return Fraction(1)

    @staticmethod
    def _saw_lower_triangle(call: Call) -> None:
        diagonal = call.args[1] if len(call.args) > 1 else 0
        share = _lower_triangle_share(call.operands[0])
        if diagonal == 0 and share is not None:
            call.given[0].lower_triangle = share

    def _saw_softmax(self, call: Call, *, is_of_layer: bool) -> None:
        scores, product = call.operands[0], call.taken[0].product
        is_free = product is not None and not product.is_masked and product.entry.op != "aten::baddbmm"
        share = Fraction(1) if is_free else _attended_share(scores)
        if share is None:
            share = self._share_without_contents(product)
        if product is not None:
            _price(product, share)
        call.given[0].weights = Weights(share, is_of_layer)


def _product(taken: Iterable[StorageFacts]) -> Product | None:
    return next((facts.product for facts in taken if facts.product is not None), None)


def _weights(taken: Iterable[StorageFacts]) -> Weights | None:
    return next((facts.weights for facts in taken if facts.weights is not None), None)


def _lower_triangle(taken: Iterable[StorageFacts]) -> Fraction | None:
    return next((facts.lower_triangle for facts in taken if facts.lower_triangle is not None), None)


def _price(product: Product, share: Fraction) -> None:
    product.link.attended = share
    product.entry.cost = split_by_attended(product.entry.cost, share)


def _attended_share(scores: torch.Tensor) -> Fraction | None:
    if scores.is_nested or scores.numel() == 0:
        return None
    pairs = attended_pairs_of_scores(scores)
    return None if pairs is None else Fraction(pairs, scores.numel())


def _lower_triangle_share(square: torch.Tensor) -> Fraction | None:
    if square.dim() < 2 or square.numel() == 0:
        return None
    rows, columns = square.shape[-2:]
    kept = sum(min(row + 1, columns) for row in range(rows))
    return Fraction(kept, rows * columns)

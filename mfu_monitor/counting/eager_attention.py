"""Recognises attention that the dispatcher sees only in pieces: the math path of scaled_dot_product_attention.

That path decomposes before dispatch into ``bmm``, an added mask, ``_safe_softmax`` and ``bmm``. ``_safe_softmax``
appears nowhere else, so a product whose result flows into it is Q K^T, and the product that takes its result is the one
with V. Both are priced by the attended pairs, as every other backend is; what the dense products compute beyond is
masked work. ``multi_head_attention_forward`` that is asked for its weights runs the same two products around a plain
softmax; there the stack says that it is attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

import torch
from torch.nn import functional

from mfu_monitor.counting.autograd_links import ForwardLink
from mfu_monitor.counting.frames import runs_inside
from mfu_monitor.counting.ledger import Entry
from mfu_monitor.counting.storages import ByStorage
from mfu_monitor.formulas.attention_cost import UNREADABLE_MASK_NOTE
from mfu_monitor.formulas.attention_masks import attended_pairs_of_scores
from mfu_monitor.formulas.cost import OpCost

__all__ = ["MathAttention", "split_by_attended"]

T = TypeVar("T")

SOFTMAX = "aten::_safe_softmax"
PLAIN_SOFTMAX = "aten::_softmax"
SCORE_STEPS = frozenset({"aten::add", "aten::add_", "aten::where", "aten::masked_fill", "aten::mul", "aten::div"})
"""What may stand between Q K^T and the softmax."""
MASKINGS = SCORE_STEPS - {"aten::mul", "aten::div"}
PROBABILITY_STEPS = frozenset({"aten::native_dropout", "aten::mul", "aten::mul_", "aten::div_", "aten::_to_copy"})
MASK_STEPS = frozenset({"aten::where", "aten::_to_copy", "aten::logical_not"})


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
        self._products: ByStorage[Product] = ByStorage()
        self._probabilities: ByStorage[Weights] = ByStorage()
        self._lower_triangles: ByStorage[Fraction] = ByStorage()
        """Share of True in masks made by ``ones().tril()``: known also where there is no content (meta tensors)."""

    def saw_product(self, product: Product, operands: Sequence[torch.Tensor], output: torch.Tensor | None) -> None:
        """A batched product ran: price it if it takes attention probabilities, else remember its result."""
        weights = self._probabilities.first(operands)
        if weights is not None and (not weights.is_of_layer or runs_inside(functional.multi_head_attention_forward)):
            _price(product, weights.share)
        elif output is not None:
            self._products.set(output, product)

    def saw_other(
        self, op: str, operands: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], arguments: Sequence[Any] = ()
    ) -> None:
        """Any other operator ran: follow the chain from its operands to its outputs."""
        if op == "aten::tril" and operands and outputs:
            self._saw_lower_triangle(operands[0], outputs[0], arguments)
        elif op == SOFTMAX or (op == PLAIN_SOFTMAX and self._is_of_attention_layer(operands)):
            self._saw_softmax(operands[0], outputs[0], is_of_layer=op == PLAIN_SOFTMAX)
        elif op in SCORE_STEPS and (product := self._products.first(operands)) is not None:
            self._follow(self._products, product, outputs)
            if op in MASKINGS:
                product.mask_share, product.is_masked = self._lower_triangles.first(operands), True
        elif op in PROBABILITY_STEPS and (weights := self._probabilities.first(operands)) is not None:
            self._follow(self._probabilities, weights, outputs)
        elif op in MASK_STEPS and (share := self._lower_triangles.first(operands)) is not None:
            self._follow(self._lower_triangles, share, outputs)

    def _is_of_attention_layer(self, operands: Sequence[torch.Tensor]) -> bool:
        return self._products.first(operands) is not None and runs_inside(functional.multi_head_attention_forward)

    def _share_without_contents(self, product: Product | None) -> Fraction:
        if product is not None and product.mask_share is not None:
            return product.mask_share
        if product is not None:
            self._note(UNREADABLE_MASK_NOTE)
        return Fraction(1)

    @staticmethod
    def _follow(table: ByStorage[T], value: T, outputs: Iterable[torch.Tensor]) -> None:
        for output in outputs:
            table.set(output, value)

    def _saw_lower_triangle(self, square: torch.Tensor, kept: torch.Tensor, arguments: Sequence[Any]) -> None:
        diagonal = arguments[1] if len(arguments) > 1 else 0
        share = _lower_triangle_share(square)
        if diagonal == 0 and share is not None:
            self._lower_triangles.set(kept, share)

    def _saw_softmax(self, scores: torch.Tensor, probabilities: torch.Tensor, *, is_of_layer: bool) -> None:
        product = self._products.get(scores)
        is_free = product is not None and not product.is_masked and product.entry.op != "aten::baddbmm"
        share = Fraction(1) if is_free else _attended_share(scores)
        if share is None:
            share = self._share_without_contents(product)
        if product is not None:
            _price(product, share)
        self._probabilities.set(probabilities, Weights(share, is_of_layer))


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

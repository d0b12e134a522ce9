"""Recognises attention that the dispatcher sees only in pieces: the math path of scaled_dot_product_attention.

That path decomposes before dispatch into ``bmm``, an added mask, ``_safe_softmax`` and ``bmm``. ``_safe_softmax``
appears nowhere else, so a product whose result flows into it is Q K^T, and the product that takes its result is the one
with V. Both are priced by the attended pairs, as every other backend is; what the dense products compute beyond is
masked work.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from mfu_monitor.counting.ledger import Entry
from mfu_monitor.counting.links import ForwardLink
from mfu_monitor.formulas.cost import OpCost
from mfu_monitor.formulas.masks import attended_pairs_of_scores

__all__ = ["MathAttention", "split_by_attended"]

SOFTMAX = "aten::_safe_softmax"
SCORE_STEPS = frozenset({"aten::add", "aten::add_", "aten::where", "aten::masked_fill", "aten::mul", "aten::div"})
"""What may stand between Q K^T and the softmax."""
PROBABILITY_STEPS = frozenset({"aten::native_dropout", "aten::mul", "aten::mul_", "aten::div_", "aten::_to_copy"})
MASK_STEPS = frozenset({"aten::where", "aten::_to_copy", "aten::logical_not"})


@dataclass(slots=True)
class Product:
    """A batched product that may turn out to be part of attention."""

    entry: Entry
    link: ForwardLink


def split_by_attended(cost: OpCost, attended: Fraction) -> OpCost:
    """Price a dense product by the share of pairs that are attended; the rest is masked work the kernel does anyway."""
    exact = int(cost.flops * attended)
    return OpCost(exact, palm_flops=cost.flops, masked_flops=cost.flops - exact, precision=cost.precision)


class MathAttention:
    """Follows storages from a batched product through mask and softmax to the next product.

    Storages are remembered by address and forgotten as soon as another tensor takes the address over.
    """

    def __init__(self) -> None:
        self._products: dict[int, Product] = {}
        self._probabilities: dict[int, Fraction] = {}
        self._lower_triangles: dict[int, Fraction] = {}
        """Share of True in masks made by ``ones().tril()``: known also where there is no content (meta tensors)."""

    def saw_product(self, product: Product, operands: Iterable[Any], output: Any) -> None:
        """A batched product ran: remember its result, and price it if it takes attention probabilities."""
        for operand in operands:
            if isinstance(operand, torch.Tensor) and (share := self._probabilities.get(_address(operand))) is not None:
                _price(product, share)
                return
        if isinstance(output, torch.Tensor):
            self._products[_address(output)] = product

    def saw_other(self, op: str, operands: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Any other operator ran: follow the chain, and forget addresses that were taken over."""
        if not (self._products or self._probabilities or self._lower_triangles or op == "aten::tril"):
            return
        if op == SOFTMAX:
            self._saw_softmax(operands[0], outputs[0])
            return
        inherited = self._inherit(op, operands)
        sources = {_address(t) for t in operands}
        for output in outputs:
            address = _address(output)
            if address in sources:
                continue  # a view, or in place: the same storage goes on
            self._forget(address)
            if inherited is not None:
                table, value = inherited
                table[address] = value

    def _inherit(self, op: str, operands: list[torch.Tensor]) -> tuple[dict[int, Any], Any] | None:
        if op == "aten::tril" and operands:
            return self._lower_triangles, _lower_triangle_share(operands[0])
        steps: tuple[tuple[frozenset[str], dict[int, Any]], ...] = (
            (SCORE_STEPS, self._products),
            (PROBABILITY_STEPS, self._probabilities),
            (MASK_STEPS, self._lower_triangles),
        )
        for names, table in steps:
            if op in names:
                for operand in operands:
                    if (value := table.get(_address(operand))) is not None:
                        self._follow_mask(op, operands)
                        return table, value
        return None

    def _follow_mask(self, op: str, operands: list[torch.Tensor]) -> None:
        """Scores + mask: keep the mask's known share beside the scores, for tensors without content."""
        if op not in ("aten::add", "aten::add_"):
            return
        shares = [s for t in operands if (s := self._lower_triangles.get(_address(t))) is not None]
        product = next((p for t in operands if (p := self._products.get(_address(t))) is not None), None)
        if shares and product is not None:
            product.link.attended = shares[0]

    def _saw_softmax(self, scores: torch.Tensor, probabilities: torch.Tensor) -> None:
        product = self._products.pop(_address(scores), None)
        known = product.link.attended if product is not None else None
        share = _attended_share(scores)
        if share is None:
            share = known if known is not None else Fraction(1)
        if product is not None:
            _price(product, share)
        self._forget(_address(probabilities))
        self._probabilities[_address(probabilities)] = share

    def _forget(self, address: int) -> None:
        self._products.pop(address, None)
        self._probabilities.pop(address, None)
        self._lower_triangles.pop(address, None)


def _price(product: Product, share: Fraction) -> None:
    product.link.attended = share
    product.entry.cost = split_by_attended(product.entry.cost, share)


def _attended_share(scores: torch.Tensor) -> Fraction | None:
    if scores.numel() == 0:
        return None
    pairs = attended_pairs_of_scores(scores)
    return None if pairs is None else Fraction(pairs, scores.numel())


def _lower_triangle_share(square: torch.Tensor) -> Fraction | None:
    if square.dim() < 2 or square.numel() == 0:
        return None
    rows, columns = square.shape[-2:]
    kept = sum(min(row + 1, columns) for row in range(rows))
    return Fraction(kept, rows * columns)


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)

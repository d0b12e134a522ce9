"""Finds attention inside a compiled graph where the math path was decomposed into products and a softmax.

``_safe_softmax`` leaves a trace that no other softmax does: the scores are compared with ``-inf``. From there the
scores and everything elementwise made of them are followed; products that read or make them belong to attention. The
partitioner keeps node names, so the backward graph knows the probabilities of its forward graph by name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from fractions import Fraction

from mfu_monitor.counting.compiled.graph import GraphNode, TextGraph
from mfu_monitor.counting.compiled.values import GraphValues
from mfu_monitor.formulas.attention_masks import attended_pairs_of_scores

__all__ = ["GraphAttention", "find_attention"]

_DROPOUT = ("prims.convert_element_type.default", "aten.div.Scalar", "aten.where.self", "aten.clone.default")
"""What dropout's backward may be made of besides multiplications."""
PRODUCTS = ("aten.bmm", "aten.mm", "aten.baddbmm")

Score = tuple[int, Fraction]
"""Elements of the score tensor, and the share of them that is attended."""


class GraphAttention:
    """Attended shares of a graph's products, and of the score-shaped tensors it hands to its backward graph."""

    def __init__(self) -> None:
        self.shares: dict[str, Fraction] = {}
        """By product."""
        self.scores: dict[str, Score] = {}
        """By name of a score-shaped tensor."""


def find_attention(graph: TextGraph, values: GraphValues, known: dict[str, Score]) -> GraphAttention:
    """Mark the products of decomposed attention.

    Args:
        graph: forward or backward graph.
        values: shapes and contents of this run.
        known: score-shaped tensors of the forward graphs that ran before, by name.
    """
    found = GraphAttention()
    for name in (*graph.placeholders, *graph.nodes):
        if name in known and _elements(values, name) == known[name][0]:
            found.scores[name] = known[name]
    _start_from_safe_softmax(graph, values, found)
    if found.scores:
        _follow(graph, values, found)
    return found


def _start_from_safe_softmax(graph: TextGraph, values: GraphValues, found: GraphAttention) -> None:
    for node in graph.nodes.values():
        if node.target != "aten.eq.Scalar" or not _compares_with_minus_infinity(node):
            continue
        scores = node.inputs[0]
        product, mask = _product_and_mask(graph, scores)
        elements = _elements(values, scores)
        if product is None or not elements:
            continue
        share = _attended_share(values, mask, elements)
        found.scores[scores] = (elements, share)
        found.shares[product] = share


def _compares_with_minus_infinity(node: GraphNode) -> bool:
    return isinstance(node.call, ast.Call) and ast.unparse(node.call.args[-1]) == "-inf"


def _product_and_mask(graph: TextGraph, scores: str) -> tuple[str | None, str | None]:
    """The product that made the scores, and the mask that was added to it."""
    node = graph.nodes.get(scores)
    mask = None
    while node is not None and not node.target.startswith(PRODUCTS):
        if node.target.startswith("aten.add") and len(node.inputs) == 2:
            first, second = node.inputs
            product_side = first if _leads_to_product(graph, first) else second
            mask = second if product_side == first else first
            node = graph.nodes.get(product_side)
        else:
            node = graph.nodes.get(node.inputs[0]) if node.inputs else None
    return (node.name if node is not None else None), mask


def _leads_to_product(graph: TextGraph, name: str) -> bool:
    node = graph.nodes.get(name)
    while node is not None and not node.target.startswith(PRODUCTS):
        node = graph.nodes.get(node.inputs[0]) if len(node.inputs) == 1 else None
    return node is not None


def _attended_share(values: GraphValues, mask: str | None, elements: int) -> Fraction:
    content = values.content(mask) if mask is not None else None
    if content is None or content.numel() == 0:
        return Fraction(1)
    pairs = attended_pairs_of_scores(content)
    return Fraction(1) if pairs is None else Fraction(pairs, content.numel())


def _follow(graph: TextGraph, values: GraphValues, found: GraphAttention) -> None:
    """Spread from scores to everything of their size made of them, until nothing new is found."""
    grew = True
    while grew:
        grew = False
        for node in graph.nodes.values():
            source = next((found.scores[i] for i in node.inputs if i in found.scores), None)
            if node.target.startswith(PRODUCTS):
                grew |= _follow_product(graph, values, found, node, source)
            elif source is not None and node.name not in found.scores and _elements(values, node.name) == source[0]:
                found.scores[node.name] = source
                grew = True


def _follow_product(
    graph: TextGraph, values: GraphValues, found: GraphAttention, node: GraphNode, source: Score | None
) -> bool:
    if node.name in found.shares:
        return False
    if source is not None:
        found.shares[node.name] = source[1]
        return True
    # dO V^T is made beside the probabilities: it is multiplied with them.
    partner = _multiplied_with(graph, values, found, node.name)
    if partner is None:
        return False
    found.shares[node.name] = partner[1]
    found.scores[node.name] = partner
    return True


def _multiplied_with(graph: TextGraph, values: GraphValues, found: GraphAttention, name: str) -> Score | None:
    """The scores that a tensor of their size is multiplied with, also after dropout's mask or a change of dtype."""
    elements = _elements(values, name)
    for consumer in _consumers_through_views(graph, name):
        is_product = consumer.target.startswith("aten.mul")
        partner = next((found.scores[i] for i in consumer.inputs if i in found.scores), None)
        if is_product and partner and partner[0] == elements:
            return partner
        if (is_product or consumer.target in _DROPOUT) and _elements(values, consumer.name) == elements:
            partner = _multiplied_with(graph, values, found, consumer.name)
            if partner is not None:
                return partner
    return None


def _consumers_through_views(graph: TextGraph, name: str) -> Iterator[GraphNode]:
    for node in graph.nodes.values():
        if name in node.inputs:
            if len(node.inputs) == 1 and not node.target.startswith(PRODUCTS):
                yield from _consumers_through_views(graph, node.name)
            yield node


def _elements(values: GraphValues, name: str) -> int | None:
    tensor = values.tensor(name)
    return None if tensor is None else tensor.numel()

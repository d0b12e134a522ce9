"""Which products of a compiled forward have no gradient: the graph keeps no grad mode, its backward graph shows it.

A backward graph returns a gradient for every input of its forward graph, or None. A parameter that asks for gradients
and gets none was used under ``no_grad`` or cut off by ``detach``: work for somebody else, as a teacher's forward is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mfu_monitor.counting.compiled.graph import GraphNode, TextGraph

__all__ = ["GradientPaths", "gradient_paths"]

_SAME_GRADIENT = (
    "aten.add.",
    "aten.permute.",
    "aten.view.",
    "aten.reshape.",
    "aten.sum.",
    # A weight that is used in slices has a gradient that is put together of theirs.
    "aten.cat.",
    "aten.slice_scatter.",
    "aten.constant_pad_nd.",
    "aten.full.",
    "prims.convert_element_type",
)
"""Between a product of the backward graph and the gradient that it is a part of."""
_ADDS_TO_FIRST = ("aten.addmm.", "aten.baddbmm.")
"""Products that the compiler fused with the addition of another part."""


@dataclass(frozen=True, slots=True)
class GradientPaths:
    """What the gradients of a backward graph say of its forward graph."""

    without: frozenset[str]
    """Nodes of the forward graph that read something which asks for gradients, and that no gradient flows back to."""
    unasked: frozenset[str]
    """Nodes of the forward graph that read nothing which asks for gradients: frozen, or under ``no_grad``."""
    shared: frozenset[int]
    """Inputs that more products read than there are products in their gradient: some ran without, not known which."""


def gradient_paths(
    forward: TextGraph, backward: TextGraph, wants_gradient: Sequence[bool], products: Collection[str]
) -> GradientPaths:
    """Follow what asks for gradients and what gets them through the forward graph.

    Args:
        forward: the forward graph.
        backward: its backward graph, whose outputs are the gradients of the forward graph's inputs.
        wants_gradient: whether an input asks for gradients, by position.
        products: names of the products of both graphs.
    """
    asks = {name for name, wants in zip(forward.placeholders, wants_gradient, strict=False) if wants}
    gets = {name for name, output in zip(forward.placeholders, backward.outputs, strict=False) if output is not None}
    denied = asks - gets
    parts = {
        name: (_readers(forward, name, products), _products_in(backward, position, products))
        for position, name in enumerate(forward.placeholders)
        if name in gets
    }
    # All products that read it are in its gradient: what else such a product reads was detached, and not its weight.
    whole = {name for name, (readers, found) in parts.items() if readers == found}
    for node in forward.nodes.values():
        sources = {_through_views(forward, name) for name in node.inputs}
        is_cut = node.name in products and not denied.isdisjoint(sources) and whole.isdisjoint(sources)
        if not asks.isdisjoint(node.inputs):
            asks.add(node.name)
        if not gets.isdisjoint(node.inputs) and not is_cut:
            gets.add(node.name)
    return GradientPaths(
        without=frozenset(asks - gets),
        unasked=frozenset(forward.nodes) - asks,
        shared=frozenset(
            position
            for position, name in enumerate(forward.placeholders)
            if name in parts and parts[name][0] > max(1, parts[name][1])
        ),
    )


def _readers(graph: TextGraph, name: str, products: Collection[str]) -> int:
    """How often products read it: one of a tensor with itself reads it twice, and has two parts in its gradient."""
    nodes = (node for node in graph.nodes.values() if node.name in products)
    return sum(_through_views(graph, i) == name for node in nodes for i in _factors(node))


def _factors(node: GraphNode) -> Sequence[str]:
    """What a product multiplies: what it adds to, a bias, has a gradient without any product."""
    return node.inputs[1:] if node.target.startswith(_ADDS_TO_FIRST) else node.inputs


def _products_in(backward: TextGraph, position: int, products: Collection[str]) -> int:
    """How many products are added up to an input's gradient; 0 where something else makes it."""
    count, pending = 0, [backward.outputs[position]]
    while pending:
        node = backward.nodes.get(pending.pop() or "")
        if node is None or not (node.name in products or node.target.startswith(_SAME_GRADIENT)):
            return 0
        if node.name not in products:
            pending.extend(node.inputs)
            continue
        count += 1
        if node.target.startswith(_ADDS_TO_FIRST):
            pending.append(node.inputs[0])
    return count


def _through_views(graph: TextGraph, name: str) -> str:
    node: GraphNode | None = graph.nodes.get(name)
    while node is not None and len(node.inputs) == 1:
        name = node.inputs[0]
        node = graph.nodes.get(name)
    return name

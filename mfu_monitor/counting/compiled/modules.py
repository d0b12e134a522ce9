"""Says which module a product of a compiled graph belongs to: the text of a graph holds no modules.

A product with a weight belongs to the weight's module. One without (attention) belongs where its operands come from:
forward, Q, K and V are made by layers of the attention module; backward, their gradients go to those layers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from mfu_monitor.counting.compiled.graph import TextGraph
from mfu_monitor.counting.compiled.products import CompiledProduct

__all__ = ["modules_of"]


def modules_of(
    graph: TextGraph,
    products: Sequence[CompiledProduct],
    owners: Mapping[int, str],
    forward_owners: Mapping[int, str],
    forward_nodes: Mapping[str, str],
    *,
    is_backward: bool,
) -> tuple[dict[str, str], dict[str, str]]:
    """Module names by product, and by tensor around the products that have no weight.

    A product that nothing is known of is left out.

    Args:
        graph: the graph that ran.
        products: its products.
        owners: module by position of the graph's inputs, for those that are parameters.
        forward_owners: the same of the forward graph, whose inputs are this backward graph's outputs.
        forward_nodes: the second answer for the forward graph; the two graphs share the names of tensors.
        is_backward: whether it is a backward graph.
    """
    found = {p.name: owner for p in products if (owner := _owner(p, owners, forward_owners)) is not None}
    for product in products:
        if product.name not in found and product.gradient_roots:
            sibling = (p for p in products if p.name in found and p.gradient_roots == product.gradient_roots)
            if (match := next(sibling, None)) is not None:
                found[product.name] = found[match.name]
    without = [p for p in products if p.name not in found]
    if not without:
        return found, {}
    between = _between_layers(graph, without, found, is_backward=is_backward)
    for product in without:
        inputs = graph.nodes[product.name].inputs
        if (known := next((forward_nodes[name] for name in inputs if name in forward_nodes), None)) is not None:
            between[product.name] = known
    return found | between, _nodes_around(graph, between)


def _nodes_around(graph: TextGraph, modules: Mapping[str, str]) -> dict[str, str]:
    """The modules' products, what they read, and what is taken out of their results."""
    around: dict[str, str] = {}
    for node in graph.nodes.values():
        if node.name in modules:
            around |= dict.fromkeys((node.name, *node.inputs), modules[node.name])
        elif node.target == "getitem" and node.inputs[0] in modules:
            around[node.name] = modules[node.inputs[0]]
    return around


def _owner(product: CompiledProduct, owners: Mapping[int, str], forward_owners: Mapping[int, str]) -> str | None:
    """Whose parameter it reads, or whose gradient it computes."""
    read = next((owners[i] for i in reversed(product.input_positions) if i in owners), None)
    if read is None and product.output_position is not None:
        return forward_owners.get(product.output_position)
    return read


def _between_layers(
    graph: TextGraph, without: Sequence[CompiledProduct], found: Mapping[str, str], *, is_backward: bool
) -> dict[str, str]:
    """The module around the layers next to each product: upstream in forward work, downstream in gradients."""
    sources = {name: node.inputs for name, node in graph.nodes.items()}
    consumers: dict[str, list[str]] = {}
    for node in graph.nodes.values():
        for name in node.inputs:
            consumers.setdefault(name, []).append(node.name)
    modules: dict[str, str] = {}
    for product in without:
        links = consumers if is_backward and not product.is_recomputed else sources
        nearest = _nearest(product.name, links, found)
        if nearest:
            modules[product.name] = _common_parent(found[name] for name in nearest)
    return modules


def _nearest(start: str, links: Mapping[str, Collection[str]], wanted: Collection[str]) -> set[str]:
    """The first of ``wanted`` on every way out of ``start``."""
    reached: set[str] = set()
    seen = {start}
    to_visit = [start]
    while to_visit:
        for name in links.get(to_visit.pop(), ()):
            if name in seen:
                continue
            seen.add(name)
            if name in wanted:
                reached.add(name)
            else:
                to_visit.append(name)
    return reached


def _common_parent(names: Iterable[str]) -> str:
    """The innermost module around all of these: ``attn`` for ``attn.q_proj`` and ``attn.k_proj``, or one alone."""
    parents = [name.split(".")[:-1] for name in names]
    common = parents[0]
    for parts in parents[1:]:
        same = 0
        while same < min(len(common), len(parts)) and common[same] == parts[same]:
            same += 1
        common = common[:same]
    return ".".join(common)

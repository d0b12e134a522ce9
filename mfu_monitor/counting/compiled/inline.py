"""Puts subgraphs in the place of their calls, so that a graph with regions compiled once reads like any other.

``torch.compiler.nested_compile_region`` leaves ``invoke_subgraph(self.region, "region", *operands)`` in the graph and
the region as a class beside it, called once for every use.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Mapping
from dataclasses import replace

from mfu_monitor.counting.compiled.graph import GraphNode, GraphParseError, TextGraph, parse_class

__all__ = ["inline_subgraphs"]

CALL = "higher_order.invoke_subgraph"
_FIRST_OPERAND = 2
"""Before the operands come the subgraph and its name."""


def inline_subgraphs(graph: TextGraph) -> TextGraph:
    """The graph with every called region in place; the graph itself where it calls none.

    Raises:
        GraphParseError: a call does not name a region that is there.
    """
    if not any(node.target == CALL for node in graph.nodes.values()):
        return graph
    nodes: dict[str, GraphNode] = {}
    results: dict[str, tuple[str | None, ...]] = {}
    for node in graph.nodes.values():
        if node.target == CALL:
            region = inline_subgraphs(parse_class(_region_of(graph, node)))
            results[node.name] = _put_in_place(node, region, nodes)
        elif node.target == "getitem" and node.inputs[0] in results and isinstance(node.call, ast.Subscript):
            taken = results[node.inputs[0]][ast.literal_eval(node.call.slice)]
            nodes[node.name] = node if taken is None else _alias(node, taken)
        else:
            nodes[node.name] = node
    return replace(graph, nodes=nodes)


def _region_of(graph: TextGraph, node: GraphNode) -> ast.ClassDef:
    attribute = graph.nodes[node.inputs[0]].call if node.inputs and node.inputs[0] in graph.nodes else None
    name = attribute.attr if isinstance(attribute, ast.Attribute) else ""
    if name not in graph.subgraphs:
        raise GraphParseError(f"the compiled graph calls a region {name!r} that its text does not hold")
    return graph.subgraphs[name]


def _put_in_place(node: GraphNode, region: TextGraph, nodes: dict[str, GraphNode]) -> tuple[str | None, ...]:
    """Add a region's nodes under names of their own; says what the call's results are called."""
    assert isinstance(node.call, ast.Call)
    operands = node.call.args[_FIRST_OPERAND:]
    names: dict[str, ast.expr] = dict(zip(region.placeholders, operands, strict=True))
    for inner in region.nodes.values():
        names[inner.name] = ast.Name(f"{node.name}_{inner.name}", ast.Load())
        renamed = ast.fix_missing_locations(_Renamer(names).visit(copy.deepcopy(inner.call)))
        name = f"{node.name}_{inner.name}"
        inputs = tuple(_name_of(names[i]) or i if i in names else i for i in inner.inputs)
        nodes[name] = replace(inner, name=name, call=renamed, inputs=inputs)
    return tuple(None if output is None else _name_of(names.get(output)) for output in region.outputs)


def _alias(node: GraphNode, source: str) -> GraphNode:
    call = ast.parse(f"torch.ops.aten.alias.default({source})", mode="eval").body
    return replace(node, target="aten.alias.default", call=call, inputs=(source,))


def _name_of(expression: ast.expr | None) -> str | None:
    return expression.id if isinstance(expression, ast.Name) else None


class _Renamer(ast.NodeTransformer):
    """Names of the region become names of the graph around it."""

    def __init__(self, names: Mapping[str, ast.expr]) -> None:
        self._names = names

    def visit_Name(self, name: ast.Name) -> ast.expr:
        return self._names.get(name.id, name)

"""Values of arguments in a compiled graph's text:
sizes, literals, tensors by their shapes, and masks by their contents.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mfu_monitor.counting.compiled.graph import GraphNode, TextGraph, evaluate_size
from mfu_monitor.internals.dispatcher import without_dispatch_modes

__all__ = ["GraphValues", "resolve_operator"]

MAX_MATERIALISED_ELEMENTS = 1 << 28
"""No mask above a quarter of a billion elements is computed for its contents; its pairs are then unknown."""
_RANDOM = ("rand", "seed", "bernoulli", "dropout", "multinomial", "uniform", "normal")
_CONSTANTS = {"inf": math.inf, "nan": math.nan, "torch": torch, "device": torch.device}
_UNKNOWN = object()


def resolve_operator(target: str) -> Any:
    """The operator of a dotted target: ``"aten.mm.default"``; None where there is none of that name."""
    found: Any = torch.ops
    for part in target.split("."):
        found = getattr(found, part, None)
        if found is None:
            return None
    return found if callable(found) else None


class GraphValues:
    """What the names of one graph stand for in one run.

    Args:
        graph: the parsed graph.
        sizes: values of its symbols.
        inputs: what it was called with, by placeholder; tensors keep their contents, so masks can be read.
    """

    def __init__(self, graph: TextGraph, sizes: Mapping[str, int], inputs: Mapping[str, Any]) -> None:
        self._graph = graph
        self._sizes = sizes
        self._inputs = inputs
        self._contents: dict[str, Any] = {}

    def argument(self, expression: ast.expr) -> Any:
        """An argument as a formula may see it: tensors made in the graph have shapes only, inputs have contents."""
        return self._evaluate(expression, self._by_shape)

    def tensor(self, name: str) -> torch.Tensor | None:
        """A tensor of this name without contents; None where its shape is not written down."""
        spec = self._graph.spec_of(name)
        return None if spec is None else spec.meta(self._sizes)

    def content(self, name: str) -> torch.Tensor | None:
        """The contents of a tensor that the graph makes from its inputs, such as a mask.

        None where that would draw random numbers, run a product, or take too much memory.
        """
        with without_dispatch_modes(), torch.no_grad():
            value = self._compute(name)
        return value if isinstance(value, torch.Tensor) else None

    def _by_shape(self, name: str) -> Any:
        if name in self._inputs:
            return self._inputs[name]
        if name in self._graph.nodes:
            return self._of_node(self._graph.nodes[name])
        expression = self._graph.placeholders.get(name)
        if isinstance(expression, str):
            return evaluate_size(expression, self._sizes)
        return _CONSTANTS.get(name)

    def _of_node(self, node: GraphNode) -> Any:
        if node.spec is not None:
            return node.spec.meta(self._sizes)
        if node.target == "self":
            return self._subgraph(node.call)
        if node.target in ("getitem", "expression") or node.target.startswith(("aten.sym_", "operator.", "math.")):
            return self._evaluate(node.call, self._by_shape)
        return None

    def _subgraph(self, attribute: ast.expr) -> Callable[..., Any] | None:
        """A mask or score function that was captured beside the graph, as a callable."""
        name = attribute.attr if isinstance(attribute, ast.Attribute) else ""
        definition = self._graph.subgraphs.get(name)
        if definition is None:
            return None
        scope: dict[str, Any] = dict(_CONSTANTS)
        exec(compile(ast.Module([definition], []), "<compiled graph>", "exec"), scope)
        module = scope[definition.name]()
        return module.forward  # type: ignore[no-any-return]

    def _evaluate(self, expression: ast.expr, look_up: Callable[[str], Any]) -> Any:
        names = {n.id for n in ast.walk(expression) if isinstance(n, ast.Name)}
        values = {name: look_up(name) if name not in _CONSTANTS else _CONSTANTS[name] for name in names}
        code = compile(ast.Expression(expression), "<compiled graph>", "eval")
        return eval(code, {"__builtins__": {}}, values)

    def _compute(self, name: str) -> Any:
        if name not in self._contents:
            self._contents[name] = _UNKNOWN  # guards against a cycle
            self._contents[name] = self._compute_node(name)
        return self._contents[name]

    def _compute_node(self, name: str) -> Any:
        if name in self._inputs:
            return self._inputs[name]
        node = self._graph.nodes.get(name)
        if node is None:
            expression = self._graph.placeholders.get(name)
            return evaluate_size(expression, self._sizes) if isinstance(expression, str) else _UNKNOWN
        if not self._may_run(node):
            return _UNKNOWN
        if any(self._compute(source) is _UNKNOWN for source in node.inputs):
            return _UNKNOWN
        return self._evaluate(node.call, self._compute)

    def _may_run(self, node: GraphNode) -> bool:
        if any(word in node.target for word in _RANDOM) or node.target.startswith("higher_order"):
            return False
        if node.spec is None:
            return node.target in ("getitem", "expression")
        sizes = [evaluate_size(size, self._sizes) for size in node.spec.shape]
        return math.prod(sizes) <= MAX_MATERIALISED_ELEMENTS

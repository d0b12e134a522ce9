"""Reads a compiled graph from the text the compiler keeps of it: every node with its operator, arguments and shapes.

Inductor stores the graph it generated code from as readable Python with each tensor's dtype, shape, strides and device,
and stores it in its on-disk cache too. The text is parsed, never run: a graph is known even where it was compiled long
ago.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mfu_monitor.internals.inductor import dtypes_by_abbreviation

__all__ = ["GraphNode", "GraphParseError", "TensorSpec", "TextGraph", "parse_class", "parse_graph", "solve_sizes"]

_SPEC = re.compile(r"^(?P<dtype>\w+)\[(?P<shape>[^\]]*)\](?:\[(?P<stride>[^\]]*)\])?(?P<device>[a-z]+(?::\d+)?)?$")
_SYMBOL = re.compile(r"^Sym\((?P<expression>.*)\)$")
_CLASS_NAME = re.compile(r"^(\s*)class <[^>]*>", re.MULTILINE)
_AROUND_RNG_STATE = {
    "higher_order.run_and_save_rng_state": 0,
    "higher_order.run_with_rng_state": 1,
    "higher_order.graphsafe_run_with_rng_state": 0,
}
"""Operators that run another one, by the position of that one among their arguments (torch/_prims/rng_prims.py)."""
_SIZE_FUNCTIONS: dict[str, Any] = {
    "Max": max,
    "Min": min,
    "FloorDiv": lambda a, b: a // b,
    "CeilDiv": lambda a, b: -(-a // b),
    "CleanDiv": lambda a, b: a // b,
    "Mod": lambda a, b: a % b,
    "PythonMod": lambda a, b: a % b,
    "ModularIndexing": lambda a, b, c: (a // b) % c,
    "Identity": lambda a: a,
    "ToFloat": float,
    "TruncToInt": int,
    "IntTrueDiv": lambda a, b: a / b,
}


class GraphParseError(ValueError):
    """The text is not what this version of the compiler is known to write."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor's annotation; sizes may be expressions of symbols such as ``"s33*2"``."""

    dtype: torch.dtype
    shape: tuple[str, ...]
    stride: tuple[str, ...]
    device_type: str

    def meta(self, sizes: Mapping[str, int]) -> torch.Tensor:
        """A tensor of these sizes without contents.

        Raises:
            KeyError: a symbol of the shape is not in ``sizes``.
        """
        shape = [evaluate_size(size, sizes) for size in self.shape]
        if len(self.stride) != len(self.shape):
            return torch.empty(shape, dtype=self.dtype, device="meta")
        stride = [evaluate_size(size, sizes) for size in self.stride]
        return torch.empty_strided(shape, stride, dtype=self.dtype, device="meta")


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One line of the graph: ``name = target(args)``."""

    name: str
    target: str
    """``"aten.mm.default"``, ``"higher_order.flex_attention"``; ``"getitem"``, ``"self"`` and ``"expression"`` for the
    rest.
    """
    call: ast.expr
    spec: TensorSpec | None
    inputs: tuple[str, ...]
    """Names of the nodes it reads."""
    code: str = ""
    """The line of the user's or of torch's own code that it comes from, as the text's comments say."""


@dataclass(slots=True)
class TextGraph:
    """A graph as its text says it."""

    placeholders: dict[str, TensorSpec | str | None]
    """By name, in order: a tensor's spec, the expression of a symbolic size, or None."""
    nodes: dict[str, GraphNode]
    outputs: tuple[str | None, ...]
    """Names in order; None for an output that is not a tensor of the graph."""
    subgraphs: dict[str, ast.ClassDef] = field(default_factory=dict)
    origins: frozenset[str] | None = None
    """Operators that its fused kernels were made of, before decomposition; None where that is not known."""
    is_all_library: bool = False
    """None of its generated kernels holds a product: each is one call of a library."""

    def depends_on(self, roots: Sequence[str]) -> frozenset[str]:
        """Names of all nodes that depend on one of ``roots``, the roots included."""
        reached = set(roots)
        for node in self.nodes.values():
            if not reached.isdisjoint(node.inputs):
                reached.add(node.name)
        return frozenset(reached)

    def spec_of(self, name: str) -> TensorSpec | None:
        """A tensor's annotation by name; None for sizes, tuples and unknown names."""
        if name in self.nodes:
            return self.nodes[name].spec
        spec = self.placeholders.get(name)
        return spec if isinstance(spec, TensorSpec) else None


def parse_graph(text: str) -> TextGraph:
    """Read a graph from the compiler's text.

    Raises:
        GraphParseError: it is not of the form this version of the compiler is known to write.
    """
    try:
        module = ast.parse(_CLASS_NAME.sub(r"\1class Graph", text))
    except SyntaxError as error:
        raise GraphParseError(f"line {error.lineno} of the compiled graph is not Python: {error.msg}") from error
    classes = [item for item in module.body if isinstance(item, ast.ClassDef)]
    if not classes:
        raise GraphParseError("the compiled graph's text holds no class")
    return _with_code(parse_class(classes[0]), text)


def _with_code(graph: TextGraph, text: str) -> TextGraph:
    """The graph with the line of code that each node comes from."""
    code, by_line = "", {}
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith("#"):
            code = stripped.partition(", code: ")[2]
        by_line[number] = code
    nodes = {name: replace(node, code=by_line.get(node.call.lineno, "")) for name, node in graph.nodes.items()}
    return replace(graph, nodes=nodes)


def parse_class(graph: ast.ClassDef) -> TextGraph:
    """Read the graph, or one of the regions beside it, from its class.

    Raises:
        GraphParseError: it has no ``forward``.
    """
    forward = _forward_of(graph)
    nodes: dict[str, GraphNode] = {}
    outputs: tuple[str | None, ...] = ()
    for statement in forward.body:
        if isinstance(statement, ast.Return):
            outputs = _returned(statement.value)
        elif (node := _node_of(statement)) is not None:
            nodes[node.name] = node
    subgraphs = {c.name: c for c in graph.body if isinstance(c, ast.ClassDef)}
    return TextGraph(_placeholders(forward), nodes, outputs, subgraphs)


def _forward_of(graph: ast.ClassDef) -> ast.FunctionDef:
    for item in graph.body:
        if isinstance(item, ast.FunctionDef) and item.name == "forward":
            return item
    raise GraphParseError(f"class {graph.name} of the compiled graph has no forward")


def _placeholders(forward: ast.FunctionDef) -> dict[str, TensorSpec | str | None]:
    return {argument.arg: _annotation(argument.annotation) for argument in forward.args.args[1:]}


def _annotation(annotation: ast.expr | None) -> TensorSpec | str | None:
    if not (isinstance(annotation, ast.Constant) and isinstance(annotation.value, str)):
        return None
    if symbol := _SYMBOL.match(annotation.value):
        return symbol["expression"]
    dtypes = dtypes_by_abbreviation()
    if (spec := _SPEC.match(annotation.value)) and spec["dtype"] in dtypes:
        sizes = _split_sizes(spec["shape"]), _split_sizes(spec["stride"] or "")
        return TensorSpec(dtypes[spec["dtype"]], *sizes, (spec["device"] or "cpu").split(":")[0])
    return None


def _split_sizes(text: str) -> tuple[str, ...]:
    """Split at commas outside of parentheses: ``"s0, Max(1, s1)"``."""
    parts, depth, current = [], 0, ""
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += character
    return tuple([*parts, current.strip()] if current.strip() else parts)


def _node_of(statement: ast.stmt) -> GraphNode | None:
    """A node from an assignment; None for ``x = None`` (the text frees names that way) and bare statements."""
    target: ast.expr
    annotation: ast.expr | None
    value: ast.expr | None
    if isinstance(statement, ast.AnnAssign):
        target, annotation, value = statement.target, statement.annotation, statement.value
    elif isinstance(statement, ast.Assign):
        target, annotation, value = statement.targets[0], None, statement.value
    else:
        return None
    if not isinstance(target, ast.Name) or value is None:
        return None
    if isinstance(value, ast.Constant) and value.value is None:
        return None
    value = _without_rng_state(value)
    spec = _annotation(annotation)
    return GraphNode(
        target.id, _target_of(value), value, spec if isinstance(spec, TensorSpec) else None, _names_in(value)
    )


def _without_rng_state(value: ast.expr) -> ast.expr:
    """The call inside an operator that saves or restores the random state around it, as recomputed attention needs."""
    if not (isinstance(value, ast.Call) and _target_of(value) in _AROUND_RNG_STATE):
        return value
    inner = value.args[_AROUND_RNG_STATE[_target_of(value)] :]
    keywords = [keyword for keyword in value.keywords if keyword.arg != "rng_state"]
    return ast.copy_location(ast.Call(inner[0], inner[1:], keywords), value)


def _target_of(value: ast.expr) -> str:
    if isinstance(value, ast.Call):
        dotted = ast.unparse(value.func)
        return dotted.removeprefix("torch.ops.")
    if isinstance(value, ast.Subscript):
        return "getitem"
    return "self" if isinstance(value, ast.Attribute) else "expression"


def _returned(value: ast.expr | None) -> tuple[str | None, ...]:
    items = value.elts if isinstance(value, (ast.Tuple, ast.List)) else [value]
    return tuple(item.id if isinstance(item, ast.Name) else None for item in items)


def _names_in(expression: ast.expr) -> tuple[str, ...]:
    skip = {"torch", "device", "self", "inf", "nan", "operator", "math"}
    found = [n.id for n in ast.walk(expression) if isinstance(n, ast.Name) and n.id not in skip]
    return tuple(dict.fromkeys(found))


# --- sizes ---------------------------------------------------------------------------------------------------------


def evaluate_size(expression: str, sizes: Mapping[str, int]) -> int:
    """The value of a size expression for the sizes that ran.

    Raises:
        KeyError: a symbol has no value.
    """
    if expression.lstrip("-").isdigit():
        return int(expression)
    try:
        return int(eval(expression, {"__builtins__": {}}, {**_SIZE_FUNCTIONS, **sizes}))
    except NameError as error:
        raise KeyError(f"no value for the size {expression!r}: {error}") from error


def solve_sizes(graph: TextGraph, inputs: Sequence[Any]) -> dict[str, int]:
    """Values of the graph's symbols, read off the inputs of one run.

    Args:
        graph: a parsed graph.
        inputs: the tensors and integers it was called with, in the order of its placeholders.
    """
    sizes: dict[str, int] = {}
    for spec, value in zip(graph.placeholders.values(), inputs, strict=False):
        if isinstance(spec, str) and isinstance(value, int) and spec.isidentifier():
            sizes[spec] = value
        elif isinstance(spec, TensorSpec) and isinstance(value, torch.Tensor):
            for symbol, size in zip(spec.shape, value.shape, strict=False):
                if symbol.isidentifier():
                    sizes[symbol] = int(size)
    return sizes

"""Prices one run of a compiled graph: its products one by one, everything between them as fused regions."""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch

from mfu_monitor.counting.compiled.agreement import executed_by_library
from mfu_monitor.counting.compiled.attention import Score, find_attention
from mfu_monitor.counting.compiled.graph import GraphNode, TensorSpec, TextGraph, solve_sizes
from mfu_monitor.counting.compiled.rewrites import as_written, decomposed_products, unpadded_share
from mfu_monitor.counting.compiled.values import GraphValues, resolve_operator
from mfu_monitor.counting.eager_attention import split_by_attended
from mfu_monitor.formulas.attention_flex import flex_backward_cost, flex_forward_cost
from mfu_monitor.formulas.cost import OpCost
from mfu_monitor.formulas.registry import bind_call, find_formula, is_ignored, operator_name
from mfu_monitor.formulas.traffic import is_view, tensor_bytes
from mfu_monitor.hardware.precision import matmul_precision
from mfu_monitor.internals.dispatcher import schema_of

__all__ = ["CompiledProduct", "CompiledRun", "count_graph"]

_FLEX: dict[str, Callable[..., OpCost]] = {
    "higher_order::flex_attention": flex_forward_cost,
    "higher_order::flex_attention_backward": flex_backward_cost,
}
_BOTH_GRADIENTS = "transformers::grouped_mm_fallback_backward"
"""Computes the gradients of input and weight whatever is asked for."""
UNREAD_CONTENT = (
    "a compiled graph makes an attention mask or lengths of documents that cannot be read; what attends is not known, "
    "so its call is executed work and no model work"
)
_STRUCTURE = ("getitem", "self", "expression")


@dataclass(frozen=True, slots=True)
class CompiledProduct:
    """One product of a compiled graph."""

    op: str
    cost: OpCost
    shapes: tuple[tuple[int, ...], ...]
    precision: str | None
    bytes_accessed: int
    is_recomputed: bool
    """In a backward graph: it depends on no incoming gradient, so it is a forward product run again."""
    name: str
    input_positions: tuple[int, ...]
    """Graph inputs that its operands are views of; a weight is one of them."""
    gradient_roots: frozenset[str]
    """Tensors made from incoming gradients that it reads; the two gradients of one layer read the same."""
    output_position: int | None
    """Which output of the graph it is, through views: in a backward graph, whose gradient it computes."""


@dataclass(slots=True)
class CompiledRun:
    """What one run of a compiled graph came to."""

    products: list[CompiledProduct] = field(default_factory=list)
    fused_bytes: int = 0
    """Tensors that cross the border between products and fused regions, or the graph's own."""
    unsupported: list[tuple[str, tuple[tuple[int, ...], ...]]] = field(default_factory=list)
    scores: dict[str, Score] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    library_flops: Counter[int] = field(default_factory=Counter)
    """How many of its library calls execute how many FLOPs, of the operators that are compared with what runs."""


def count_graph(
    graph: TextGraph,
    inputs: Sequence[Any],
    *,
    is_backward: bool,
    known_scores: Mapping[str, Score],
    root_gradients: int = 0,
) -> CompiledRun:
    """Price one run of a compiled graph.

    Args:
        graph: the parsed graph.
        inputs: what it was called with; contents are read for masks only.
        is_backward: whether it is a backward graph, whose products without an incoming gradient are recomputed ones.
        known_scores: score tensors of the forward graphs that ran before in this step, by name.
        root_gradients: how many of its first inputs are incoming gradients, where it is a backward graph whose text
            does not call them so.

    Returns:
        Its products, the bytes of its fused regions, and what could not be counted.
    """
    named = dict(zip(graph.placeholders, inputs, strict=False))
    values = GraphValues(graph, solve_sizes(graph, inputs), named)
    attention = find_attention(graph, values, dict(known_scores))
    tangents = graph.depends_on(_incoming_gradients(graph, root_gradients))
    run = CompiledRun(scores=attention.scores)
    decomposed, run.notes = decomposed_products(graph, values)
    priced: set[str] = set()
    for node in graph.nodes.values():
        if node.target in _STRUCTURE or _is_view(node.target):
            continue
        is_fused = node.name in decomposed
        cost = OpCost(decomposed[node.name]) if is_fused else _cost_of(graph, node, values, run)
        if cost is None:
            continue
        if not node.target.startswith("higher_order."):  # without a mask its blocks are made in the graph: all attend
            cost = _less_assumed(cost, run)
        if node.name in attention.shares:
            cost = split_by_attended(cost, attention.shares[node.name])
        cost = _less_padding(cost, unpadded_share(graph, node, values))
        is_recomputed = (is_backward or root_gradients > 0) and node.name not in tangents
        product = _product(graph, node, values, cost, is_recomputed=is_recomputed, tangents=tangents)
        if is_fused:
            rank = len(product.shapes[0])
            product = dataclasses.replace(product, op="aten::bmm" if rank > 2 else "aten::mm", bytes_accessed=0)
        else:
            priced.add(node.name)
            if flops := executed_by_library(product.op, cost):
                run.library_flops[flops] += 1
        run.products.append(product)
    run.fused_bytes = _fused_bytes(graph, values, priced)
    return run


def _incoming_gradients(graph: TextGraph, root_gradients: int) -> list[str]:
    tensors = [name for name, spec in graph.placeholders.items() if isinstance(spec, TensorSpec)]
    return [*tensors[:root_gradients], *(name for name in tensors if name.startswith("tangents"))]


def _less_padding(cost: OpCost, share: Fraction) -> OpCost:
    """What the compiler's padding adds is executed, and no model's."""
    if share == 1:
        return cost
    padding = cost.flops - int(cost.flops * share)
    palm = None if cost.palm_flops is None else int(cost.palm_flops * share)
    return dataclasses.replace(
        cost, flops=cost.flops - padding, palm_flops=palm, masked_flops=cost.masked_flops + padding
    )


def _less_assumed(cost: OpCost, run: CompiledRun) -> OpCost:
    """Without what a formula had to assume: a mask made in the graph has no contents, so no pair is surely attended."""
    if cost.note is None:
        return cost
    run.notes.append(UNREAD_CONTENT)
    return dataclasses.replace(
        cost,
        flops=0,
        palm_flops=cost.flops if cost.palm_flops is None else cost.palm_flops,
        masked_flops=cost.flops + cost.masked_flops,
    )


def _cost_of(graph: TextGraph, node: GraphNode, values: GraphValues, run: CompiledRun) -> OpCost | None:
    """FLOPs of one node; None where it counts none."""
    operator = resolve_operator(node.target)
    if operator is None or not isinstance(node.call, ast.Call):
        run.unsupported.append((node.target, ()))
        return None
    name = operator_name(operator)
    if find_formula(name) is None:
        if not is_ignored(name) and not name.startswith(("prims::", "inductor::")):
            run.unsupported.append((name, _operand_shapes(node, values)))
        return None
    names = [a.name for a in getattr(schema_of(operator), "arguments", ())]
    args = tuple(
        _argument(argument, names[i] if i < len(names) else "", values) for i, argument in enumerate(node.call.args)
    )
    kwargs = {k.arg: _argument(k.value, k.arg, values) for k in node.call.keywords if k.arg is not None}
    call = bind_call(operator, args, kwargs, values.tensor(node.name))
    if "attention" in name and "backward" in name and call.get("grad_input_mask") is None:
        # In eager the autograd node says whose gradients are wanted; here the ones nobody reads are left out.
        wanted = _outputs_read(graph, node)
        call = dataclasses.replace(call, arguments={**call.arguments, "grad_input_mask": wanted})
    if name in _FLEX:
        return _FLEX[name](call, dense_execution=False)
    found = find_formula(name)
    assert found is not None
    cost = found(call)
    if name == _BOTH_GRADIENTS:
        unread = cost.flops // 2 * (2 - sum(_outputs_read(graph, node)[:2]))
        cost = dataclasses.replace(cost, flops=cost.flops - unread, masked_flops=cost.masked_flops + unread)
    return as_written(node, cost)


def _outputs_read(graph: TextGraph, node: GraphNode) -> list[bool]:
    """Which of the first three outputs of a node are taken out of its tuple."""
    taken = {
        ast.unparse(n.call.slice)
        for n in graph.nodes.values()
        if n.target == "getitem" and node.name in n.inputs and isinstance(n.call, ast.Subscript)
    }
    return [str(position) in taken for position in range(3)]


def _argument(expression: ast.expr, name: str, values: GraphValues) -> Any:
    """An argument's value; contents too where they decide the FLOPs: masks and document lengths."""
    decides = any(word in name for word in ("mask", "bias", "seq", "offs")) and name != "output_mask"
    if decides and isinstance(expression, ast.Name) and (content := values.content(expression.id)) is not None:
        return content
    return values.argument(expression)


def _operand_tensors(node: GraphNode, values: GraphValues) -> list[torch.Tensor]:
    return [t for t in (values.tensor(name) for name in node.inputs) if t is not None]


def _operand_shapes(node: GraphNode, values: GraphValues) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(t.shape) for t in _operand_tensors(node, values))


def _product(
    graph: TextGraph,
    node: GraphNode,
    values: GraphValues,
    cost: OpCost,
    *,
    is_recomputed: bool,
    tangents: frozenset[str],
) -> CompiledProduct:
    operands = _operand_tensors(node, values)
    specs = [s for s in (graph.spec_of(name) for name in node.inputs) if s is not None]
    results = _result_tensors(graph, node, values)
    name = operator_name(resolve_operator(node.target))
    return CompiledProduct(
        op=name,
        cost=cost,
        shapes=tuple(tuple(t.shape) for t in operands),
        precision=cost.precision or _precision(name, specs),
        bytes_accessed=sum(map(tensor_bytes, (*operands, *results))),
        is_recomputed=is_recomputed,
        name=node.name,
        input_positions=_input_positions(graph, node),
        gradient_roots=frozenset(r for r in (_through_views(graph, i) for i in node.inputs) if r in tangents),
        output_position=_output_position(graph, node),
    )


def _precision(name: str, specs: Sequence[TensorSpec]) -> str | None:
    floating = [s for s in specs if s.dtype.is_floating_point or s.dtype.is_complex] or list(specs)
    if not floating:
        return None
    return matmul_precision(floating[0].dtype, floating[0].device_type, is_convolution="conv" in name)


def _result_tensors(graph: TextGraph, node: GraphNode, values: GraphValues) -> list[torch.Tensor]:
    """The node's tensor, or those taken out of its tuple."""
    if node.spec is not None:
        tensor = values.tensor(node.name)
        return [tensor] if tensor is not None else []
    taken = [n for n in graph.nodes.values() if n.target == "getitem" and node.name in n.inputs]
    return [t for t in (values.tensor(n.name) for n in taken) if t is not None]


def _input_positions(graph: TextGraph, node: GraphNode) -> tuple[int, ...]:
    positions = {name: index for index, name in enumerate(graph.placeholders)}
    sources = (_through_views(graph, name) for name in node.inputs)
    return tuple(positions[source] for source in sources if source in positions)


def _output_position(graph: TextGraph, node: GraphNode) -> int | None:
    for position, name in enumerate(graph.outputs):
        if name is not None and _through_views(graph, name) == node.name:
            return position
    return None


def _fused_bytes(graph: TextGraph, values: GraphValues, products: set[str]) -> int:
    """Bytes that fused regions move: what they read from inputs and products, what they hand to products and outputs.

    In the precision that lies in memory: a cast inside a region moves nothing, one at its end is what is written.
    """
    quiet = {
        n.name for n in graph.nodes.values()
        if n.name not in products and n.target not in _STRUCTURE and not _is_view(n.target)
    }  # fmt: skip
    reads: set[str] = set()
    writes: set[str] = set()
    for node in graph.nodes.values():
        for source in (_through_views(graph, name, casts=False) for name in node.inputs):
            if node.name in quiet and source not in quiet:
                reads.add(source)
            if node.name in products and source in quiet:
                writes.add(source)
    results = (_through_views(graph, name, casts=False) for name in graph.outputs if name)
    writes |= {source for source in results if source in quiet}
    tensors = [values.tensor(name) for name in (*reads, *writes)]
    return sum(tensor_bytes(t) for t in tensors if t is not None)


def _through_views(graph: TextGraph, name: str, *, casts: bool = True) -> str:
    """The tensor that ``name`` is a view, a part or, if asked for, a cast of."""
    while (node := graph.nodes.get(name)) is not None and node.inputs:
        is_cast = casts and node.target.startswith("prims.convert_element_type")
        if not (is_cast or node.target == "getitem" or _is_view(node.target)):
            break
        name = node.inputs[0]
    return name


@functools.cache
def _is_view(target: str) -> bool:
    """True for views and sizes; ``slice_scatter`` and ``view_copy`` are none, whatever they begin with."""
    operator = resolve_operator(target)
    if operator is None or schema_of(operator) is None:
        return False
    return target.startswith(("aten.sym_", "aten._unsafe_view.")) or is_view(operator)

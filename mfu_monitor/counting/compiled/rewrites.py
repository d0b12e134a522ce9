"""Products that the compiler rewrote: fused to attention, padded, or turned into multiplications and a sum.

Products of attention written by hand may become one attention call (``torch/_inductor/fx_passes/fuse_attention.py``).
Inductor pads products on accelerators (``torch/_inductor/fx_passes/pad_mm.py``): the model needs the unpadded sizes,
the rest is executed all the same. And it runs products with a side of length 1 as elementwise code
(``torch/_inductor/decomposition.py``: ``mm``, ``addmm``, ``bmm``): the mathematics is the same product, so it counts.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction

from mfu_monitor.counting.compiled.graph import GraphNode, TextGraph
from mfu_monitor.counting.compiled.values import GraphValues
from mfu_monitor.formulas.cost import OpCost

__all__ = ["as_written", "decomposed_products", "unpadded_share"]

_FIRST_OPERAND = {"aten.mm.default": 0, "aten.bmm.default": 0, "aten.addmm.default": 1, "aten.baddbmm.default": 1}


def as_written(node: GraphNode, cost: OpCost) -> OpCost:
    """The cost of attention that the compiler made of products written by hand: those products, dense, as in eager.

    A node that a pattern of the compiler put in is named after its overload (``..._default``); one that the user called
    is named after the operator.
    """
    packet = node.target.removesuffix(".default").rpartition(".")[2]
    is_made = node.name.startswith(f"{packet}_default") and "scaled_dot_product" in packet
    if not is_made or cost.palm_flops is None:
        return cost
    executed = cost.flops + cost.masked_flops + cost.kernel_recompute_flops
    rest = executed - cost.palm_flops  # the kernel's own recomputation of the dense products
    return dataclasses.replace(
        cost, flops=cost.palm_flops, palm_flops=None, masked_flops=0, kernel_recompute_flops=max(0, rest)
    )


def unpadded_share(graph: TextGraph, node: GraphNode, values: GraphValues) -> Fraction:
    """The part of a product's FLOPs that its operands had before the compiler padded them; 1 where it did not.

    The compiler pads with zeros at the end of dimensions and cuts its padding off the result. Padding that the user
    wrote is not cut off, or pads one operand only: it stays counted, as in eager.
    """
    first = _FIRST_OPERAND.get(node.target)
    if first is None or not isinstance(node.call, ast.Call) or len(node.call.args) < first + 2:
        return Fraction(1)
    left, right = (a.id if isinstance(a, ast.Name) else "" for a in (node.call.args[first], node.call.args[first + 1]))
    left_sizes, right_sizes = _sizes(values, left), _sizes(values, right)
    if left_sizes is None or right_sizes is None:
        return Fraction(1)
    rows, inner = left_sizes[-2:]
    columns = right_sizes[-1]
    left_padding, right_padding = _padding(graph, left), _padding(graph, right)
    cut = _cut_result(graph, node, values)
    used_rows = rows - left_padding[0] if cut and cut[0] == rows - left_padding[0] else rows
    used_columns = columns - right_padding[1] if cut and cut[1] == columns - right_padding[1] else columns
    used_inner = inner - left_padding[1] if left_padding[1] == right_padding[0] else inner
    return Fraction(used_rows * used_inner * used_columns, max(1, rows * inner * columns))


def _sizes(values: GraphValues, name: str) -> tuple[int, ...] | None:
    tensor = values.tensor(name)
    return None if tensor is None or tensor.dim() < 2 else tuple(tensor.shape)


def _padding(graph: TextGraph, name: str) -> tuple[int, int]:
    """Zeros appended to the last two dimensions: (rows, columns)."""
    node = graph.nodes.get(name)
    swapped = False
    while node is not None and node.target == "aten.permute.default" and _swaps_last_two(node):
        swapped = not swapped
        node = graph.nodes.get(node.inputs[0])
    if node is None or node.target != "aten.constant_pad_nd.default" or not isinstance(node.call, ast.Call):
        return (0, 0)
    try:
        lengths = ast.literal_eval(node.call.args[1])
        value = ast.literal_eval(node.call.args[2]) if len(node.call.args) > 2 else 0
    except ValueError:  # padded by a symbolic length: the compiler pads by known ones only
        return (0, 0)
    if value != 0 or any(lengths[0::2]) or any(lengths[4:]):
        return (0, 0)
    columns, rows = lengths[1], lengths[3] if len(lengths) > 3 else 0
    return (columns, rows) if swapped else (rows, columns)


def _cut_result(graph: TextGraph, node: GraphNode, values: GraphValues) -> tuple[int, int] | None:
    """Sizes of the result after slices have cut it; None where something else reads it whole."""
    sizes = None
    name = node.name
    while True:
        readers = [n for n in graph.nodes.values() if name in n.inputs]
        if len(readers) != 1 or not readers[0].target.startswith("aten.slice"):
            break
        name = readers[0].name
        sizes = _sizes(values, name)
    return None if sizes is None else (sizes[-2], sizes[-1])


# --- products run as elementwise code --------------------------------------------------------------------------------

UNTOLD_PRODUCT = (
    "a compiled graph multiplies where it cannot be told whether the user wrote a matmul or a multiplication; it is "
    "left out"
)
VANISHED_PRODUCT = "a compiled kernel was made of a product of vectors that its graph does not show; it is left out"
_VECTOR_PRODUCTS = frozenset({"mv", "addmv", "dot", "vdot", "addr"})
"""No library call is left of these: each is a multiplication in the graph."""
_WRITTEN_PRODUCT = re.compile(r"@|\b(?:matmul|mm|bmm|mv|dot|vdot|addr|addmm|addmv|baddbmm|addbmm|linear|bilinear)\b")
_WRITTEN_MULTIPLICATION = re.compile(
    r"[\w)\]]\s*\*(?!\*)\s*[\w(]|\b(?:mul_?|multiply|outer|ger|einsum|inner|vecdot|prod|norm|cosine_similarity)\b"
)
_WRITTEN_SWAP = re.compile(
    r"\.[mM]?[TtH]\b|transpose|permute|swapaxes|swapdims|movedim|moveaxis|einsum|rearrange|adjoint"
)

_MULTIPLIES_AND_SUMS = frozenset({"mul", "norm", "softmax", "var", "std", "cdist", "prod", "cumprod", "lerp", "div"})
"""Words of operators that leave multiplications of the same form."""


def decomposed_products(graph: TextGraph, values: GraphValues) -> tuple[dict[str, int], list[str]]:
    """FLOPs of products that were turned into multiplications, by the node that multiplies; notes on what is not known.

    A multiplication that the user wrote looks the same. Two sources tell them apart: the operators that the fused
    kernels were made of, before decomposition, and the line of code that the node comes from.
    """
    found: dict[str, int] = {}
    notes: list[str] = []
    told: set[str] = set()
    for node in graph.nodes.values():
        operands = _factors(node)
        shapes = [t.shape for t in (values.tensor(name) for name in operands) if t is not None]
        result = values.tensor(node.name)
        if len(shapes) != 2 or result is None:
            continue
        possible = _possible_origins(graph, node, shapes)
        verdict = _is_product(graph, node, possible)
        if verdict:
            found[node.name] = 2 * math.prod(result.shape)
        elif verdict is None:
            notes.append(UNTOLD_PRODUCT)
        if verdict is not False:
            told |= possible
    if ((graph.origins or frozenset()) & _VECTOR_PRODUCTS) - told:
        notes.append(VANISHED_PRODUCT)
    return found, notes


def _factors(node: GraphNode) -> list[str]:
    """The two tensors of a multiplication, which may be one and the same; none for any other node."""
    if node.target != "aten.mul.Tensor" or not isinstance(node.call, ast.Call):
        return []
    return [argument.id for argument in node.call.args if isinstance(argument, ast.Name)]


def _is_product(graph: TextGraph, node: GraphNode, possible: frozenset[str]) -> bool | None:
    """Whether a multiplication was a product before decomposition; None where it cannot be told."""
    if not possible or (graph.origins is not None and possible.isdisjoint(graph.origins)):
        return False
    if graph.origins is None:
        return None
    is_product = _WRITTEN_PRODUCT.search(node.code) is not None
    is_multiplication = _WRITTEN_MULTIPLICATION.search(node.code) is not None
    if is_product != is_multiplication:
        return is_product
    if is_product and _swaps_an_operand_of_its_own(graph, node):
        return True
    # The line says both or neither: a call of something whose code is elsewhere.
    return True if graph.origins.isdisjoint(_MULTIPLIES_AND_SUMS) else None


def _swaps_an_operand_of_its_own(graph: TextGraph, node: GraphNode) -> bool:
    """Whether an operand is transposed for this line, whose code does not say so: a matmul's gradient does that."""
    makers = [maker for name in node.inputs if (maker := _maker(graph, name)) is not None]
    is_swapped = any(_swaps_last_two(maker) and maker.code == node.code for maker in makers)
    return is_swapped and _WRITTEN_SWAP.search(node.code) is None


def _maker(graph: TextGraph, name: str) -> GraphNode | None:
    """What made a tensor, casts apart."""
    node = graph.nodes.get(name)
    while node is not None and node.target.startswith("prims.convert_element_type") and node.inputs:
        node = graph.nodes.get(node.inputs[0])
    return node


def _possible_origins(graph: TextGraph, node: GraphNode, shapes: Sequence[Sequence[int]]) -> frozenset[str]:
    """The operators whose decomposition leaves a multiplication of this form."""
    left, right = shapes
    ranks = (len(left), len(right))
    if ranks == (2, 2) and left[-1] == right[0] == 1:
        return frozenset({"mm", "addmm"})
    if ranks == (2, 1) and left[-1] == 1 and not _is_summed(graph, node.name):
        return frozenset({"addr"})
    if ranks == (3, 3) and left[-1] == right[-2] == 1 and left[0] == right[0]:
        return frozenset({"bmm", "baddbmm"})
    makers = [_maker(graph, name) for name in node.inputs]
    is_squeezed = all(maker is not None and maker.target.startswith("aten.squeeze") for maker in makers)
    return _possible_origins_of_sum(list(_sums_over(graph, node.name)), left, right, is_squeezed=is_squeezed)


def _possible_origins_of_sum(
    sums: Sequence[Sequence[int]], left: Sequence[int], right: Sequence[int], *, is_squeezed: bool
) -> frozenset[str]:
    """The same for a multiplication whose only reader is a sum over these dimensions.

    A row by a column drops a dimension of both operands first (``is_squeezed``).
    """
    if len(sums) != 1:
        return frozenset()
    ranks, summed = (len(left), len(right)), list(sums[0])
    if ranks == (1, 1):
        return frozenset({"mm", "addmm", "dot", "vdot"}) if summed == [0] else frozenset()
    if ranks == (2, 1):
        return frozenset({"mv", "addmv"}) if summed == [1] else frozenset()
    if ranks == (2, 2):
        if summed == [1] and tuple(left) == tuple(right):
            return frozenset({"bmm", "baddbmm"}) if is_squeezed else frozenset()
        is_row = left[-1] == 1 and left[0] == right[0]
        return frozenset({"mm", "addmm"}) if summed == [0] and is_row else frozenset()
    is_vector = ranks in ((3, 3), (4, 4)) and (left[-3] == 1 or right[-1] == 1)
    is_expanded = is_vector and left[-1] == right[-3] == 1 and summed == [len(left) - 2]
    return frozenset({"mm", "addmm", "bmm", "baddbmm"}) if is_expanded else frozenset()


def _is_summed(graph: TextGraph, name: str) -> bool:
    return any(_sums_over(graph, name)) and all(_sums_over(graph, name))


def _swaps_last_two(node: GraphNode) -> bool:
    if node.target != "aten.permute.default" or not isinstance(node.call, ast.Call):
        return False
    order = ast.unparse(node.call.args[1])
    return order in ("[1, 0]", "[0, 2, 1]")


def _sums_over(graph: TextGraph, name: str) -> Iterator[list[int]]:
    """Dimensions of every sum that reads a tensor; an empty list for any other reader."""
    for node in graph.nodes.values():
        if name not in node.inputs:
            continue
        if node.target == "aten.sum.default":
            yield [0]  # of a vector; a matrix summed as a whole has no other form to be mistaken for
        elif node.target == "aten.sum.dim_IntList" and isinstance(node.call, ast.Call):
            yield list(ast.literal_eval(node.call.args[1]))
        else:
            yield []

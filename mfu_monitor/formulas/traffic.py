"""Ideal bytes of one operator call: each operand read once, each result written once.

The least that any kernel must move, caches of unlimited size assumed: what the roofline's arithmetic intensity is
defined by (Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", CACM 52(4), 2009).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mfu_monitor.formulas.registry import operator_name
from mfu_monitor.internals.dispatcher import schema_of
from mfu_monitor.internals.tensors import sparse_parts, tensors_in

__all__ = ["Traffic", "bytes_accessed", "is_view", "tensor_bytes", "traffic_of"]

_STRIDED = torch.strided


def bytes_accessed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> int:
    """Bytes that one call must move at least; 0 for views and metadata.

    Args:
        func: the dispatched overload or higher-order operator.
        args: positional arguments as dispatched; lists of tensors and None are fine.
        kwargs: keyword arguments as dispatched.
        output: what the call returned.

    Example:
        >>> x = torch.empty(1024, 1024)  # fp32
        >>> bytes_accessed(torch.ops.aten.add.Tensor, (x, x), {}, x + x)  # x read once, the sum written
        8388608
    """
    return traffic_of(func).moved(args, kwargs, output)


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's distinct elements: an expanded dimension (stride 0) is stored once.

    Sparse and nested tensors count what they store.
    """
    if tensor.layout is _STRIDED and not tensor.is_nested:
        return _distinct_elements(tensor) * tensor.element_size()
    return _composite_bytes(tensor)


# --- how an operator treats its operands, worked out once for each ----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Traffic:
    """Which bytes the calls of one operator move."""

    is_free: bool = False
    names: tuple[str, ...] = ()
    unread: frozenset[str] = frozenset()
    """Arguments that are written only, or of which only the shape matters."""
    mutated: frozenset[str] = frozenset()
    first: frozenset[str] = frozenset()
    """The first argument."""
    output_is_argument: bool = False
    special: Callable[[Mapping[str, Any], Any], int] | None = None

    def moved(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        operands: list[torch.Tensor] | None = None,
        outputs: list[torch.Tensor] | None = None,
    ) -> int:
        """As ``bytes_accessed``; the tensors among arguments and results are given by those who know them."""
        if self.is_free:
            return 0
        if self.special is not None:
            return self.special(_named(self, args, kwargs), output)
        if self.unread or operands is None:
            read, written = _operands(self, args, kwargs)
            total = _distinct_bytes(read) + _distinct_bytes(written)
        else:
            total = _bytes_of(operands)
            if self.mutated and self.mutated == self.first and args and isinstance(args[0], torch.Tensor):
                total += tensor_bytes(operands[0])
            elif self.mutated:
                total += _distinct_bytes(_operands(self, args, kwargs)[1])
        if self.output_is_argument:
            return total
        return total + (_distinct_bytes(output) if outputs is None else _bytes_of(outputs))


@functools.cache
def traffic_of(func: Any) -> Traffic:
    """Which bytes the calls of an operator move."""
    schema = schema_of(func)
    if schema is None:
        return Traffic()
    name = operator_name(func)
    if name in _METADATA or is_view(func):
        return Traffic(is_free=True)
    names = tuple(a.name for a in schema.arguments)
    mutated = frozenset(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    return Traffic(
        names=names,
        unread=_unread(name, schema, mutated),
        mutated=mutated,
        first=frozenset(names[:1]),
        output_is_argument=bool(mutated) and all(r.alias_info is not None for r in schema.returns),
        special=_SPECIAL.get(name),
    )


def is_view(func: Any) -> bool:
    """True where every result is a part or another shape of an argument, so that nothing is moved."""
    if torch.Tag.inplace_view in func.tags:
        return True
    returns = schema_of(func).returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _unread(name: str, schema: Any, mutated: frozenset[str]) -> frozenset[str]:
    is_out = frozenset(a.name for a in schema.arguments if a.is_out) | (mutated & _RESULT_NAMES)
    if name in _WRITES_ONLY:
        return is_out | mutated
    if name in _SHAPE_ONLY:
        return is_out | frozenset({"self"})
    return is_out | _SPARE_COPIES.get(name, frozenset())


_METADATA = frozenset(
    f"aten::{name}"
    for name in (
        "_unsafe_view", "_reshape_alias", "set_", "resize_", "resize_as_", "_resize_output_", "lift_fresh", "lift",
        "detach_", "requires_grad_", "rename_", "is_same_size", "is_pinned", "record_stream", "sym_size", "sym_stride",
        "sym_numel", "sym_storage_offset", "size", "stride", "storage_offset", "numel", "dim",
        "_has_same_storage_numel", "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty",
        "new_empty_strided", "_efficientzerotensor", "_assert_async", "_assert_tensor_metadata", "sym_constrain_range",
        "_fused_sdp_choice", "_nested_view_from_buffer",
    )
) | {"_c10d_functional::wait_tensor", "c10d_functional::wait_tensor", "inductor::_reinterpret_tensor"}  # fmt: skip
"""Nothing is read or written: metadata, memory that is only reserved, waiting."""

_WRITES_ONLY = frozenset(
    f"aten::{name}"
    for name in (
        "copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "exponential_", "geometric_", "log_normal_",
        "cauchy_", "bernoulli_", "_foreach_copy_", "_foreach_zero_",
    )
)  # fmt: skip
"""In-place operators whose target is overwritten unseen."""

_RESULT_NAMES = frozenset({"out", "out_", "dq", "dk", "dv", "dq_", "dk_", "dv_"})
"""Arguments that the caller makes for results without the schema calling them ``out``: overwritten unseen."""

_SPARE_COPIES = {"mkl::_mkl_linear": frozenset({"ORI_W"})}
"""Arguments that hold the same numbers as another one: of a weight and its packed copy one is read."""

_SHAPE_ONLY = frozenset(
    f"aten::{name}"
    for name in (
        "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_zeros", "new_ones",
        "new_full", "nll_loss_backward", "nll_loss2d_backward",
    )
)  # fmt: skip
"""Operators that ask their ``self`` only for its shape."""


# --- operands of an ordinary call -------------------------------------------------------------------------------------


def _operands(rule: Traffic, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    if not rule.names:
        return [*args, *kwargs.values()], []
    read, written = [], []
    for name, value in (*zip(rule.names, args, strict=False), *kwargs.items()):
        if name not in rule.unread:
            read.append(value)
        if name in rule.mutated:
            written.append(value)
    return read, written


def _named(rule: Traffic, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(rule.names, args, strict=False)), **kwargs}


def _distinct_bytes(values: Any) -> int:
    """Bytes of all tensors in a nest of lists; one that occurs twice is moved once."""
    return _bytes_of(tensors_in(values))


def _bytes_of(tensors: list[torch.Tensor]) -> int:
    if len(tensors) > 1 and len(set(map(id, tensors))) < len(tensors):
        tensors = list({id(t): t for t in tensors}.values())
    total = 0
    for tensor in tensors:
        total += tensor.nbytes if tensor.layout is _STRIDED and tensor.is_contiguous() else tensor_bytes(tensor)
    return total


def _distinct_elements(tensor: torch.Tensor) -> int:
    if tensor.is_contiguous():
        return tensor.numel()
    elements, span = 1, 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if isinstance(stride, int) and stride == 0:
            continue
        elements *= size
        span += (size - 1) * stride
    if type(elements) is int and type(span) is int:
        return max(min(elements, span), 0)  # overlapping windows (unfold) store less than they show
    return elements


def _composite_bytes(tensor: torch.Tensor) -> int:
    if tensor.layout is torch.jagged:
        return tensor_bytes(tensor.values())
    if tensor.layout is torch.sparse_coo:
        return sum(tensor_bytes(part) for part in sparse_parts(tensor) or ())
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return sum(tensor_bytes(part) for part in (tensor.values(), tensor.crow_indices(), tensor.col_indices()))
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return sum(tensor_bytes(part) for part in (tensor.values(), tensor.ccol_indices(), tensor.row_indices()))
    return tensor.numel() * tensor.element_size()


# --- look-ups move the rows they take, not the table they take them from ----------------------------------------------


def _look_up(table: str, *indices: str) -> Callable[[Mapping[str, Any], Any], int]:
    """Indices and the rows taken are read, the rows are written; of a table smaller than that, the table is read."""

    def count(arguments: Mapping[str, Any], output: Any) -> int:
        taken = _distinct_bytes(output)
        read = min(taken, tensor_bytes(arguments[table]))
        return read + taken + _distinct_bytes([arguments.get(name) for name in indices])

    return count


def _scatter_rows(values: str, *, adds: bool) -> Callable[[Mapping[str, Any], Any], int]:
    """In place: indices and new values are read, as much is written, and read before that where it is added to."""

    def count(arguments: Mapping[str, Any], output: Any) -> int:
        source = arguments.get(values)
        indices = _distinct_bytes([arguments.get("index"), arguments.get("indices")])
        moved = tensor_bytes(source) if isinstance(source, torch.Tensor) else _rows_by_index(arguments)
        return indices + moved * (3 if adds or arguments.get("accumulate") else 2)

    return count


def _rows_by_index(arguments: Mapping[str, Any]) -> int:
    index = arguments.get("index")
    return index.numel() * int(arguments["self"].element_size()) if isinstance(index, torch.Tensor) else 0


def _embedding_bag(arguments: Mapping[str, Any], output: Any) -> int:
    table, indices = arguments["weight"], arguments["indices"]
    rows: int = indices.numel() * table.shape[-1] * table.element_size()
    extras = [indices, arguments.get("offsets"), arguments.get("per_sample_weights"), output]
    return min(rows, tensor_bytes(table)) + sum(_distinct_bytes(extra) for extra in extras)


def _nll_loss(arguments: Mapping[str, Any], output: Any) -> int:
    """One log-probability for each target is read, not all classes."""
    target = arguments["target"]
    picked: int = target.numel() * arguments["self"].element_size()
    return picked + _distinct_bytes([target, arguments.get("weight")]) + _distinct_bytes(output)


def _one_element(arguments: Mapping[str, Any], output: Any) -> int:
    return int(arguments["self"].element_size())


_SPECIAL: dict[str, Callable[[Mapping[str, Any], Any], int]] = {
    "aten::embedding": _look_up("weight", "indices"),
    "aten::gather": _look_up("self", "index"),
    "aten::index_select": _look_up("self", "index"),
    "aten::index": _look_up("self", "indices"),
    "aten::_unsafe_index": _look_up("self", "indices"),
    "aten::take": _look_up("self", "index"),
    "aten::index_put_": _scatter_rows("values", adds=False),
    "aten::_index_put_impl_": _scatter_rows("values", adds=False),
    "aten::_unsafe_index_put_": _scatter_rows("values", adds=False),
    "aten::index_copy_": _scatter_rows("source", adds=False),
    "aten::index_add_": _scatter_rows("source", adds=True),
    "aten::index_fill_": _scatter_rows("value", adds=False),
    "aten::scatter_": _scatter_rows("src", adds=False),
    "aten::scatter_add_": _scatter_rows("src", adds=True),
    "aten::scatter_reduce_": _scatter_rows("src", adds=True),
    "aten::_embedding_bag": _embedding_bag,
    "aten::_embedding_bag_forward_only": _embedding_bag,
    "aten::nll_loss_forward": _nll_loss,
    "aten::nll_loss2d_forward": _nll_loss,
    "aten::_local_scalar_dense": _one_element,
}

"""The tensors in an operator's arguments or results, and what of a tensor is not public."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from mfu_monitor.internals.facts import fact

__all__ = [
    "collect_tensors",
    "is_fake",
    "map_tensors",
    "sequence_sizes",
    "sparse_parts",
    "storage_address",
    "storage_id",
    "tensors_in",
]


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """Every tensor of nested tuples, lists and dicts, in order."""
    found: list[torch.Tensor] = []
    collect_tensors(values, found)
    return found


def collect_tensors(values: Iterable[Any], found: list[torch.Tensor]) -> None:
    """Add every tensor of nested tuples, lists and dicts to ``found``, in order."""
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            collect_tensors(value, found)
        elif isinstance(value, dict):
            collect_tensors(value.values(), found)


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """``value`` with every tensor of nested tuples, lists and dicts replaced by what ``function`` makes of it."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        items = [map_tensors(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {name: map_tensors(function, item) for name, item in value.items()}
    return value


@fact("torch._subclasses.fake_tensor.is_fake", lost="a fake tensor is taken for one with contents", otherwise=False)
def is_fake(tensor: Any) -> bool:
    """True for a tensor of shapes without contents, also inside wrappers."""
    from torch._subclasses.fake_tensor import is_fake as asked

    return isinstance(tensor, torch.Tensor) and bool(asked(tensor))


@fact("torch.UntypedStorage._cdata", lost="views of a parameter are not known as such, so that it may read as unused")
def storage_address(tensor: torch.Tensor) -> int | None:
    """The same number for all views of one storage; None where a tensor has none, or where it is not known."""
    try:
        address: int = tensor.untyped_storage()._cdata
        return address
    except (NotImplementedError, RuntimeError):  # sparse layouts and some wrapper subclasses have no storage
        return None


def storage_id(tensor: torch.Tensor) -> int:
    """The same number for all views of one storage; the tensor's own where ``storage_address`` gives none."""
    found = storage_address(tensor)
    return id(tensor) if found is None else found


@fact("torch.Tensor._nested_tensor_size", lost="products of strided nested tensors are reported as not counted")
def sequence_sizes(operand: Any) -> list[tuple[int, ...]] | None:
    """Shape of each sequence of a strided nested tensor; they lie on the host, so nothing waits. None if unknown.

    Example:
        >>> sequence_sizes(torch.nested.nested_tensor([torch.zeros(8, 128, 64), torch.zeros(8, 64, 64)]))
        [(8, 128, 64), (8, 64, 64)]
    """
    sizes = [tuple(int(size) for size in row) for row in operand._nested_tensor_size().tolist()]
    if sum(math.prod(row) for row in sizes) != operand.numel():
        raise AttributeError("sizes of the sequences do not make up the tensor")
    return sizes


@fact("torch.Tensor._values", lost="products of COO tensors are reported as not counted")
def sparse_parts(tensor: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Values and indices of a COO tensor, coalesced or not; None if unknown."""
    values, indices = tensor._values(), tensor._indices()
    rank = tensor.sparse_dim()
    if indices.shape != (rank, values.shape[0]) or values.shape[1:] != tensor.shape[rank:]:
        raise AttributeError("values and indices do not make up the tensor")
    return values, indices

"""What is known of storages, for as long as a tensor made of them lives.

All that a counted step follows through memory stands in one place by storage, so that an operator looks up each of its
tensors once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mfu_monitor.internals.facts import unguarded
from mfu_monitor.internals.tensors import storage_address

if TYPE_CHECKING:
    from fractions import Fraction

    from mfu_monitor.counting.eager_attention import Product, Weights

__all__ = ["StorageFacts", "Storages", "storage_of"]

_NOBODY: frozenset[str] = frozenset()


class StorageFacts:
    """What is known of one storage."""

    __slots__ = (
        "dropped_with",
        "got_gradient",
        "is_functions_gradient",
        "is_gradient",
        "is_known",
        "is_made",
        "is_parameter",
        "is_zero_tangent",
        "lower_triangle",
        "parameters",
        "product",
        "reference",
        "room",
        "uses",
        "weights",
        "writes",
    )

    def __init__(self) -> None:
        self.reference: StorageWeakRef | None = None
        """Keeps the address from being given to another storage; None for a tensor without storage."""
        self.parameters = _NOBODY
        """Names of the parameters that lie here, or that were cast to what lies here."""
        self.is_parameter = False
        """Lies here itself, and is no other form."""
        self.is_known = False
        """A seen operator took or gave it."""
        self.is_made = False
        """A seen operator made it anew."""
        self.writes = 0
        """How often seen operators wrote there in place."""
        self.room: str | None = None
        """Made empty by this custom function, and written by nothing that was seen."""
        self.is_gradient = False
        """The engine computed it or started from it, or it was made of such."""
        self.got_gradient = False
        """A parameter whose gradient was accumulated: once updated it is not a gradient itself."""
        self.is_zero_tangent = False
        self.is_functions_gradient = False
        """Depends on what a custom backward was called with."""
        self.uses: set[tuple[object, ...]] | None = None
        """How operators of custom forwards took it."""
        self.dropped_with: frozenset[int] | None = None
        """The gradient products of a custom backward that it was made of."""
        self.product: Product | None = None
        """The batched product whose scores lie here."""
        self.weights: Weights | None = None
        """Attention probabilities lie here."""
        self.lower_triangle: Fraction | None = None
        """Share of True in a mask made by ``ones().tril()``: known also where there is no content (meta tensors)."""


class Storages:
    """Facts by storage.

    Args:
        parameters: names of parameters by the address of their storage, or by their own where they have none.
    """

    def __init__(self, parameters: Mapping[int, str] | None = None) -> None:
        self._known: dict[int, StorageFacts] = {}
        self._parameters = parameters or {}
        self._address_of = storage_address

    def __reduce__(self) -> tuple[type[Storages], tuple[()]]:
        # A copy of a StorageWeakRef frees the same reference a second time: the heap is corrupt from there on.
        return type(self), ()

    def __len__(self) -> int:
        return len(self._known)

    def of(self, tensor: torch.Tensor) -> StorageFacts:
        """What is known of the tensor's storage; forgotten at once where it has none."""
        address = self._address_of(tensor)
        known = None if address is None else self._known.get(address)
        return self._add(tensor, address) if known is None else known

    def known(self, tensor: torch.Tensor) -> StorageFacts | None:
        """What is known of the tensor's storage; None where no operator met it yet, and where it has none."""
        address = self._address_of(tensor)
        return None if address is None else self._known.get(address)

    def of_all(self, tensors: Iterable[torch.Tensor]) -> list[StorageFacts]:
        """The same of several."""
        address_of, known = self._address_of, self._known
        found = []
        for tensor in tensors:
            address = address_of(tensor)
            facts = known.get(address) if address is not None else None
            found.append(self._add(tensor, address) if facts is None else facts)
        return found

    def of_living(self) -> list[StorageFacts]:
        """The facts of storages that some tensor still holds."""
        return [f for f in self._known.values() if f.reference is not None and not f.reference.expired()]

    def _add(self, tensor: torch.Tensor, address: int | None) -> StorageFacts:
        facts = StorageFacts()
        if not self._known:
            self._address_of = unguarded(storage_address, tensor)
        name = self._parameters.get(id(tensor) if address is None else address) if self._parameters else None
        if name is not None:
            facts.parameters, facts.is_parameter = frozenset((name,)), True
        if address is not None and (reference := storage_of(tensor)) is not None:
            facts.reference = reference
            self._known[address] = facts
        return facts


def storage_of(tensor: torch.Tensor) -> StorageWeakRef | None:
    """A weak reference to the tensor's storage; None where it has none."""
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):  # sparse layouts have no storage
        return None

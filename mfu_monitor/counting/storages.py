"""What is known of storages, for as long as a tensor made of them lives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mfu_monitor.internals.tensors import storage_address

__all__ = ["ByStorage", "storage_of"]

T = TypeVar("T")


class ByStorage(Generic[T]):
    """What is known of storages. A weak reference keeps a storage's address from being given to another one."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, T]] = {}

    def __reduce__(self) -> tuple[type[ByStorage[T]], tuple[()]]:
        # A copy of a StorageWeakRef frees the same reference a second time: the heap is corrupt from there on.
        return type(self), ()

    def __bool__(self) -> bool:
        return bool(self._known)

    def set(self, tensor: torch.Tensor, value: T) -> None:
        """Remember a value for the tensor's storage; nothing where the tensor has none."""
        address = storage_address(tensor)
        known = None if address is None else self._known.get(address)
        reference = storage_of(tensor) if known is None else known[0]
        if address is not None and reference is not None:
            self._known[address] = (reference, value)

    def get(self, tensor: torch.Tensor) -> T | None:
        """What is known of the tensor's storage."""
        address = storage_address(tensor) if self._known else None
        found = None if address is None else self._known.get(address)
        return None if found is None else found[1]

    def forget(self, tensor: torch.Tensor) -> None:
        """Know nothing of the tensor's storage any more."""
        address = storage_address(tensor) if self._known else None
        if address is not None:
            self._known.pop(address, None)

    def of_living(self) -> list[T]:
        """What is known of storages that some tensor still holds."""
        return [value for reference, value in self._known.values() if not reference.expired()]

    def first(self, tensors: Iterable[torch.Tensor]) -> T | None:
        """What is known of the first tensor of which anything is."""
        return next((value for t in tensors if (value := self.get(t)) is not None), None)


def storage_of(tensor: torch.Tensor) -> StorageWeakRef | None:
    """A weak reference to the tensor's storage; None where it has none."""
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):  # sparse layouts have no storage
        return None

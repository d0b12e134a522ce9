"""Traces of work that no operator of this thread did: kernels behind the dispatcher, a backward on another thread.

Two traces are sound. A custom function hands out a tensor that no seen operator wrote: it was made by a kernel that
hides (Triton, an extension, numpy). A parameter's gradient appears or changes while no accumulation of it was seen:
another thread ran a backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mfu_monitor.counting.frames import CallSite
from mfu_monitor.counting.storages import ByStorage, storage_of
from mfu_monitor.internals.autograd_state import is_custom_node, next_sequence_nr, sequence_nr
from mfu_monitor.internals.custom_forwards import context_of
from mfu_monitor.internals.traces import function_of_users, may_write, version_of

__all__ = ["HiddenWork"]

OTHER_THREAD = (
    "{count} parameters got gradients in a backward pass that was not seen: another thread ran it. Count on the thread "
    "that calls backward"
)
HIDDEN_KERNEL = (
    "{name} handed out a tensor that no seen operator wrote: a kernel that hides from the dispatcher made it. Give its "
    "module a formula with register_module_formula, or make it an operator (torch.library) with register_flop_formula"
)


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A parameter and its gradient as they were when it was first seen."""

    parameter: torch.Tensor
    storage: Any
    version: int


class HiddenWork:
    """Follows what seen operators wrote in one step.

    Args:
        model: its parameters are looked at from the start; others from their first use on.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._first_node = next_sequence_nr()
        self._leaves: dict[int, _Leaf] = {}
        self._accumulated: set[int] = set()
        self._known: ByStorage[bool] = ByStorage()
        """What a seen operator took or gave."""
        self._made: ByStorage[bool] = ByStorage()
        """What a seen operator made anew."""
        self._writes: ByStorage[int] = ByStorage()
        self._rooms: ByStorage[str] = ByStorage()
        """Made empty by a custom function, and written by nothing that was seen: by the function's name."""
        self._hidden: dict[str, None] = {}
        for parameter in () if model is None else model.parameters():
            self._add_leaf(parameter)

    def saw(self, func: Any, operands: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], node: Any) -> None:
        """An operator ran, views included; ``node`` is what the engine executes, None outside of backward."""
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            self._accumulated.add(id(variable))
        for tensor in operands:
            if node is None and tensor.requires_grad:
                self._add_leaf(tensor)
            self._look_at_result(tensor)
        is_view = bool(getattr(func, "is_view", False))
        if not is_view or variable is not None:
            self._look_for_rooms(func, operands, outputs)
        if not is_view:
            self._note_writes(func, operands, outputs)
        if func.__name__.startswith("lift_fresh"):
            return  # wraps memory that is not torch's: nothing was computed
        for tensor in (*operands, *outputs):
            if self._known.get(tensor) is None:
                self._known.set(tensor, True)

    def saw_room(self, name: str, site: CallSite, outputs: Iterable[torch.Tensor], node: Any) -> None:
        """An operator ran in a custom function; if it makes room only, somebody must write there."""
        if not name.rpartition("::")[2].startswith(("empty", "new_empty")):
            return
        owner = node if site.in_custom_backward else context_of(site.function_forwards[-1])
        if (function := function_of_users(owner)) is not None:
            for output in outputs:
                self._rooms.set(output, function)

    def cover(self, tensors: Iterable[torch.Tensor]) -> None:
        """A formula counted what made these tensors."""
        for tensor in tensors:
            self._known.set(tensor, True)
            self._rooms.forget(tensor)

    def saw_compiled_backward(self, inputs: Iterable[Any]) -> None:
        """Compiled autograd ran a graph, which accumulates gradients of its inputs itself."""
        self._accumulated.update(id(x) for x in inputs if isinstance(x, torch.Tensor))

    def notes(self) -> list[str]:
        """What a reader of the record should know; empty where nothing hides."""
        found = [HIDDEN_KERNEL.format(name=name) for name in self._hidden]
        if count := sum(self._is_unseen(leaf) for key, leaf in self._leaves.items() if key not in self._accumulated):
            found.append(OTHER_THREAD.format(count=count))
        return found

    def _add_leaf(self, parameter: torch.Tensor) -> None:
        if id(parameter) in self._leaves or is_lazy(parameter) or not _is_leaf(parameter):
            return
        if hasattr(type(parameter), "__tensor_flatten__"):
            return
        storage, version = _state(parameter.grad)
        self._leaves[id(parameter)] = _Leaf(parameter, storage, version)

    def _is_unseen(self, leaf: _Leaf) -> bool:
        gradient = leaf.parameter.grad if _is_leaf(leaf.parameter) else None
        storage, version = _state(gradient)
        if gradient is None or storage is None:
            return False
        if leaf.storage is None or storage.cdata != leaf.storage.cdata:
            return self._made.get(gradient) is None
        return version - leaf.version > (self._writes.get(gradient) or 0)

    def _look_at_result(self, tensor: torch.Tensor) -> None:
        try:
            node = tensor.grad_fn
        except RuntimeError:  # a view that was written in place in a way that autograd refuses, should it be asked
            return
        if not is_custom_node(node) or self._known.get(tensor) or tensor.numel() == 0:
            return
        name = function_of_users(node)
        if name is not None and storage_of(tensor) is not None and sequence_nr(node) >= self._first_node:
            self._hidden.setdefault(name)

    def _look_for_rooms(self, func: Any, operands: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        if not self._rooms:
            return
        written = (*_written(func, operands), *outputs)
        for tensor in written:
            self._rooms.forget(tensor)
        for tensor in operands:
            name = self._rooms.get(tensor) if tensor.numel() else None
            if name is not None:
                self._hidden.setdefault(name)

    def _note_writes(self, func: Any, operands: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        written = _written(func, operands)
        raises_versions = not func.__name__.startswith("_foreach")
        for tensor in written if raises_versions else ():
            self._writes.set(tensor, (self._writes.get(tensor) or 0) + 1)
        for tensor in outputs if not written else ():
            self._made.set(tensor, True)


def _is_leaf(tensor: torch.Tensor) -> bool:
    try:
        return tensor.is_leaf
    except RuntimeError:  # a view that was written in place in a way that autograd refuses, should it be asked
        return False


def _written(func: Any, operands: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """What an operator may have written in place."""
    return operands if may_write(func) else ()


def _state(gradient: torch.Tensor | None) -> tuple[Any, int]:
    version = None if gradient is None else version_of(gradient)
    return (None, 0) if gradient is None or version is None else (storage_of(gradient), version)

"""Traces of work that no operator of this thread did: kernels behind the dispatcher, a backward on another thread.

Two traces are sound. A custom function hands out a tensor that no seen operator wrote: it was made by a kernel that
hides (Triton, an extension, numpy). A parameter's gradient appears or changes while no accumulation of it was seen:
another thread ran a backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mfu_monitor.counting.calls import Call
from mfu_monitor.counting.frames import CallSite
from mfu_monitor.counting.storages import StorageFacts, Storages, storage_of
from mfu_monitor.internals.autograd_state import is_custom_node, next_sequence_nr, sequence_nr, variable_of
from mfu_monitor.internals.custom_forwards import context_of
from mfu_monitor.internals.traces import function_of_users, version_of

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
        storages: of the step.
    """

    def __init__(self, model: nn.Module | None, storages: Storages) -> None:
        self._first_node = next_sequence_nr()
        self._storages = storages
        self._leaves: dict[int, _Leaf] = {}
        self._accumulated: set[int] = set()
        self.has_rooms = False
        """Some storage was made empty by a custom function."""
        self._hidden: dict[str, None] = {}
        for parameter in () if model is None else model.parameters():
            self._add_leaf(parameter)

    def saw(self, call: Call) -> None:
        """An operator ran, views included."""
        operator = call.operator
        if call.asks_gradients and call.node is None:
            for tensor in call.operands:
                self.saw_use(tensor)
        if call.takes_unknown:
            for tensor, facts in zip(call.operands, call.taken, strict=True):
                if not facts.is_known:
                    self._look_at_result(tensor, facts)
        if self.has_rooms and (not operator.is_view or variable_of(call.node) is not None):
            self._look_for_rooms(call)
        if not operator.is_view:
            self._note_writes(call)
        if not operator.wraps_memory:
            for facts in call.taken if call.takes_unknown else ():
                facts.is_known = True
            for facts in call.given:
                facts.is_known = True

    def saw_use(self, tensor: torch.Tensor) -> None:
        """An operator outside of backward takes this tensor."""
        if tensor.requires_grad and id(tensor) not in self._leaves:
            self._add_leaf(tensor)

    def saw_accumulation(self, parameter: torch.Tensor) -> None:
        """A gradient of this parameter was accumulated."""
        self._accumulated.add(id(parameter))

    def saw_room(self, call: Call, site: CallSite) -> None:
        """An operator ran in a custom function; if it makes room only, somebody must write there."""
        if not call.operator.makes_room:
            return
        owner = call.node if site.in_custom_backward else context_of(site.function_forwards[-1])
        if (function := function_of_users(owner)) is not None:
            for facts in call.given:
                facts.room = function
                self.has_rooms = True

    def cover(self, tensors: Iterable[torch.Tensor]) -> None:
        """A formula counted what made these tensors."""
        for facts in self._storages.of_all(tensors):
            facts.is_known = True
            facts.room = None

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
        if id(parameter) in self._leaves or not _is_leaf(parameter) or is_lazy(parameter):
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
        facts = self._storages.of(gradient)
        if leaf.storage is None or storage.cdata != leaf.storage.cdata:
            return not facts.is_made
        return version - leaf.version > facts.writes

    def _look_at_result(self, tensor: torch.Tensor, facts: StorageFacts) -> None:
        try:
            node = tensor.grad_fn
        except RuntimeError:  # a view that was written in place in a way that autograd refuses, should it be asked
            return
        if node is None or not is_custom_node(node) or tensor.numel() == 0:
            return
        name = function_of_users(node)
        if name is not None and facts.reference is not None and sequence_nr(node) >= self._first_node:
            self._hidden.setdefault(name)

    def _look_for_rooms(self, call: Call) -> None:
        for facts in (*call.written, *call.given):
            facts.room = None
        for tensor, facts in zip(call.operands, call.taken, strict=True):
            if facts.room is not None and tensor.numel():
                self._hidden.setdefault(facts.room)

    @staticmethod
    def _note_writes(call: Call) -> None:
        if not (call.operator.may_write and call.taken):
            for facts in call.given:
                facts.is_made = True
        elif call.operator.raises_versions:
            for facts in call.taken:
                facts.writes += 1


def _is_leaf(tensor: torch.Tensor) -> bool:
    try:
        return tensor.is_leaf
    except RuntimeError:  # a view that was written in place in a way that autograd refuses, should it be asked
        return False


def _state(gradient: torch.Tensor | None) -> tuple[Any, int]:
    version = None if gradient is None else version_of(gradient)
    return (None, 0) if gradient is None or version is None else (storage_of(gradient), version)

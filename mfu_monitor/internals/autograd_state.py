"""What autograd's engine does now: the pass that runs, its node, and the numbers that tie a node to its forward."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from mfu_monitor.internals.facts import fact

__all__ = [
    "custom_node_class",
    "is_custom_node",
    "next_sequence_nr",
    "running_node",
    "running_pass",
    "sequence_nr",
    "variable_of",
]


@fact("torch._C._current_graph_task_id", lost="backward cannot be told from forward", otherwise=-1)
def running_pass() -> int:
    """Number of the backward pass that runs on this thread; -1 where none runs, and where it is not known."""
    return int(torch._C._current_graph_task_id())


@fact("torch._C._current_autograd_node", lost="gradients are not tied to their forward and parameter")
def running_node() -> Any:
    """The autograd node that the engine executes on this thread; None outside backward, and where it is not known."""
    return torch._C._current_autograd_node()


@fact("torch._C._autograd._get_sequence_nr", lost="gradients are not tied to their forward", otherwise=-1)
def next_sequence_nr() -> int:
    """The number that the next node of this thread gets: each call of a custom function takes one.

    Inside a forward kernel its own node has the number before.
    """
    return int(torch._C._autograd._get_sequence_nr())


@fact("torch.autograd.function.BackwardCFunction", lost="custom functions are not known")
def custom_node_class() -> Any:
    """The class that the nodes of all ``torch.autograd.Function`` derive from; None where it is not known."""
    return torch.autograd.function.BackwardCFunction


def is_custom_node(node: Any) -> bool:
    """True for the node of a ``torch.autograd.Function``, a compiled graph's included; False where it is not known."""
    known = custom_node_class()
    return known is not None and isinstance(node, known)


@cache
def _accumulates(node_type: type) -> bool:
    return hasattr(node_type, "variable")


def variable_of(node: Any) -> torch.Tensor | None:
    """The leaf whose gradient a node accumulates; None for any other node, whatever its user put into it."""
    if not _accumulates(type(node)):  # type: ignore[arg-type]  # a metaclass's __hash__ confuses mypy
        return None
    variable = node.variable
    return variable if isinstance(variable, torch.Tensor) else None


@fact("torch.autograd.graph.Node._sequence_nr", lost="gradients are not tied to their forward", otherwise=-3)
def sequence_nr(node: Any) -> int:
    """The number that a node got when its forward ran; one that no forward has where it is not known."""
    return int(node._sequence_nr())

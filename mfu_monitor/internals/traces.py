"""What torch keeps of tensors and nodes that tells whether something unseen made them."""

from __future__ import annotations

from typing import Any

import torch

from mfu_monitor.internals.autograd_state import is_custom_node
from mfu_monitor.internals.dispatcher import schema_of
from mfu_monitor.internals.facts import fact

__all__ = ["function_of_users", "may_write", "version_of"]


@fact("torch.autograd.function.BackwardCFunction._forward_cls", lost="a custom function may hide a kernel unseen")
def _function_of(node: Any) -> Any:
    return type(node)._forward_cls


def function_of_users(node: Any) -> str | None:
    """Name of the custom function whose node this is; None for torch's own, and for other nodes."""
    function = _function_of(node) if is_custom_node(node) else None
    if function is None or function.__module__.split(".")[0] == "torch":
        return None
    return str(function.__name__)


@fact("torch.Tensor._version", lost="a backward on another thread may stay unseen")
def _read_version(tensor: torch.Tensor) -> int:
    return int(tensor._version)


def version_of(tensor: torch.Tensor) -> int | None:
    """How often a tensor was written in place; None for one made in inference mode, and where it is not known."""
    try:
        return _read_version(tensor)
    except RuntimeError:
        return None


def may_write(func: Any) -> bool:
    """True where an operator writes its operands by its schema, or where the schema does not say."""
    schema = schema_of(func)
    return schema is None or not schema.name.startswith("aten::") or bool(schema.is_mutable)

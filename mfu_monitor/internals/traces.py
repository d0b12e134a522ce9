"""What torch keeps of tensors and nodes that tells whether something unseen made them; since torch 2.9.

Without its class every custom function is taken for torch's own, so none is said to hide a kernel.
"""

from __future__ import annotations

from typing import Any

import torch

from mfu_monitor.internals.dispatcher import schema_of

__all__ = ["function_of_users", "may_write", "version_of"]


def function_of_users(node: Any) -> str | None:
    """Name of the custom function whose node this is; None for torch's own, and for other nodes."""
    function = getattr(type(node), "_forward_cls", None)
    if function is None or function.__module__.split(".")[0] == "torch":
        return None
    return str(function.__name__)


def version_of(tensor: torch.Tensor) -> int | None:
    """How often a tensor was written in place; None for one made in inference mode."""
    try:
        return tensor._version
    except RuntimeError:
        return None


def may_write(func: Any) -> bool:
    """True where an operator writes its operands by its schema, or where the schema does not say."""
    schema = schema_of(func)
    return schema is None or not schema.name.startswith("aten::") or bool(schema.is_mutable)

"""The tensors in an operator's arguments or results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["tensors_in"]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor of nested tuples, lists and dicts, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)

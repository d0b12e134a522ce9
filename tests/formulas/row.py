"""A row of the table of formulas: one call made by hand, and beside it what it costs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["PackedWeight", "Row", "T", "row"]


@dataclass(frozen=True)
class Row:
    """One call of an operator that need not be able to run here: only shapes, dtypes and scalars are looked at."""

    name: str
    flops: int
    moved: int
    """Bytes: every operand read once, every result written once."""
    gives: Any
    arguments: dict[str, Any]
    palm: int | None = None
    masked: int = 0
    redone: int = 0
    precision: str | None = None
    overload: str | None = None
    schema: str | None = None
    """Arguments and returns of an operator of a library that is not installed here."""
    label: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.name}{'.' + self.overload if self.overload else ''}{' ' + self.label if self.label else ''}"


def row(name: str, /, **given: Any) -> Row:
    """A row; what is not a field of it is an argument of the operator."""
    fields = {key: given.pop(key) for key in list(given) if key in Row.__dataclass_fields__}
    return Row(name, arguments=given, **fields)


def T(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:  # noqa: N802  # like the shapes, a letter
    """A tensor without contents."""
    return torch.empty(shape, dtype=dtype, device="meta")


class PackedWeight:
    """Stands in for the packed parameters of a quantised layer.

    They are an object and no tensor: to know their bytes they would have to be unpacked, which copies them. So the
    bytes of such a call leave the weight out.
    """

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def unpack(self) -> tuple[torch.Tensor, None]:
        return T(*self.shape, dtype=torch.int8), None

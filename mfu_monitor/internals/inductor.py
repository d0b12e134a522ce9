"""What inductor keeps of its compiled graphs: their class, their dtypes' short names, and the names of fused kernels.

Since torch 2.9 and before, kernels are named after the operators as they were before decomposition
(``cpp_fused_mv_relu_0``), on the CPU and in Triton. A configuration may turn these names off; then nothing is known and
a multiplication that may be a matmul is left out, which the record says.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import torch

__all__ = ["compiled_graph_class", "dtypes_by_abbreviation", "fused_origins"]

_KERNEL = re.compile(r"\b(?:cpp|triton)\w*?_fused_(\w+?)_\d+\b")
_ORIGINS = re.compile(r"Original ATen: \[([^\]]*)\]")
_OTHER_OPERATORS = re.compile(r"scaled_dot_product|scaled_mm|scaled_grouped_mm|int_mm|grouped_mm")
"""Operators of their own whose names hold the name of another."""


def fused_origins(source: object) -> frozenset[str] | None:
    """Words of the operators that fused kernels were made of; None where the generated code does not name them.

    Args:
        source: the code that inductor generated, or whatever this torch keeps in its place.
    """
    if not isinstance(source, str):
        return None
    names = _KERNEL.findall(source)
    if not names:
        return None
    if "triton_" in source:  # equal kernels share one name there; each call has its own comment
        names += [name.replace("aten.", "_") for name in _ORIGINS.findall(source)]
    words = (re.split(r"[_,\s]+", _OTHER_OPERATORS.sub("", name)) for name in names)
    return frozenset(word for group in words for word in group if word)


def compiled_graph_class() -> Any:
    """The class of what inductor hands out for a compiled graph; None where this torch has no such class.

    Without it compiled graphs are not read: a count of compiled code is a lower bound and says so.
    """
    try:
        from torch._inductor.output_code import CompiledFxGraph
    except ImportError:
        return None
    return CompiledFxGraph


@functools.cache
def dtypes_by_abbreviation() -> dict[str, torch.dtype]:
    """Dtypes by the short names of a graph's text: ``"bf16"``.

    Without them no compiled graph can be parsed: a count of compiled code is a lower bound and says so.
    """
    try:
        from torch.utils._dtype_abbrs import dtype_abbrs
    except ImportError:
        return {}
    return {name: dtype for dtype, name in dtype_abbrs.items()}

"""What inductor keeps of its compiled graphs: their class, their dtypes' short names, and the names of fused kernels.

Since torch 2.9 and before, kernels are named after the operators as they were before decomposition
(``cpp_fused_mv_relu_0``), on the CPU and in Triton. A configuration may turn these names off; then nothing is known and
a multiplication that may be a matmul is left out, which the record says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from mfu_monitor.internals.facts import fact

__all__ = [
    "compiled_graph_class",
    "dtypes_by_abbreviation",
    "fused_origins",
    "generated_code",
    "graph_text",
    "is_backward_graph",
]

_UNREAD = "compiled graphs are not read, so that the count of compiled code is a lower bound"
_NO_DTYPES: Mapping[str, torch.dtype] = {}

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


@fact("torch._inductor.output_code.CompiledFxGraph", lost=_UNREAD, decides=False)
def compiled_graph_class() -> Any:
    """The class of what inductor hands out for a compiled graph; None where this torch has no such class."""
    from torch._inductor.output_code import CompiledFxGraph

    return CompiledFxGraph


@fact("CompiledFxGraph.inductor_post_grad_graph_str", lost=_UNREAD, decides=False)
def graph_text(compiled: Any) -> str | None:
    """The graph as readable Python; None where this torch keeps no text."""
    text: str | None = compiled.inductor_post_grad_graph_str
    return text


@fact("CompiledFxGraph.source_code", lost="a multiplication that may be a matmul is left out", decides=False)
def generated_code(compiled: Any) -> str | None:
    """The code that inductor generated for a graph; None where this torch keeps none."""
    code: str | None = compiled.source_code
    return code


@fact("CompiledFxGraph.fx_kwargs", lost="a backward graph is not told from a forward one", decides=False)
def is_backward_graph(compiled: Any) -> bool | None:
    """Whether a graph is the backward of another; None where this torch does not say."""
    return bool(compiled.fx_kwargs.get("is_backward", False))


@fact("torch.utils._dtype_abbrs.dtype_abbrs", lost=_UNREAD, otherwise=_NO_DTYPES, decides=False)
def dtypes_by_abbreviation() -> Mapping[str, torch.dtype]:
    """Dtypes by the short names of a graph's text: ``"bf16"``; none where this torch does not say."""
    from torch.utils._dtype_abbrs import dtype_abbrs

    return {name: dtype for dtype, name in dtype_abbrs.items()}

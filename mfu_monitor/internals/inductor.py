"""What inductor's generated code tells of the operators that a fused kernel was made of.

Since torch 2.9 and before, kernels are named after the operators as they were before decomposition
(``cpp_fused_mv_relu_0``), on the CPU and in Triton. A configuration may turn these names off; then nothing is known and
a multiplication that may be a matmul is left out, which the record says.
"""

from __future__ import annotations

import re

__all__ = ["fused_origins"]

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

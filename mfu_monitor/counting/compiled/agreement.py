"""Holds a compiled graph's text against what was seen of its run; no compiler is needed for it.

Three things must agree. The library kernels that the dispatcher sees while a graph runs are products of its text. A
graph is a backward graph both by the compiler's word and by its inputs, which are called tangents then. A forward graph
whose backward runs ran with gradients. Where they do not agree something moved in this torch, and the count is a lower
bound.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from mfu_monitor.counting.compiled.graph import TextGraph
from mfu_monitor.formulas.cost import OpCost
from mfu_monitor.formulas.registry import bind_call, find_formula, operator_name

__all__ = [
    "GRADIENT_LOST",
    "KEEPS_LITTLE",
    "KernelCheck",
    "executed_by_library",
    "has_tangents",
    "is_all_library",
    "keeps_little",
]

GRADIENT_LOST = (
    "a compiled graph seemed to run without gradients, and its backward ran; whether its forward is the model's is not "
    "known"
)
KEEPS_LITTLE = (
    "with torch before 2.12 the text of a compiled graph does not name the code that it comes from, and a weight that "
    "is frozen later keeps its gradient's product: products that the compiler rewrote may be missing or another's"
)
_OWN_KERNELS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution", "aten::_int_mm")
"""What inductor hands to a library in one call; attention's kernels count by masks that the text may not show."""
_TEMPLATES = ("triton_tem_", "_gemm_template", "CppMicroGemm", "micro_gemm")
"""How generated code calls products of its own (``torch/_inductor/select_algorithm.py``, ``cpp_gemm_template.py``)."""


def keeps_little(torch_version: str = torch.__version__) -> bool:
    """True for a torch whose graphs do not say which line of code a node comes from: before 2.12."""
    major, minor = (int(part) for part in torch_version.split(".")[:2])
    return (major, minor) < (2, 12)


def has_tangents(graph: TextGraph) -> bool:
    """True for a graph with inputs that AOT named as incoming gradients."""
    return any(name.startswith("tangents") for name in graph.placeholders)


def executed_by_library(op: str, cost: OpCost) -> int:
    """FLOPs of the one library call that a product of a graph becomes; 0 where it is not one of those compared."""
    return cost.flops + cost.masked_flops if op in _OWN_KERNELS else 0


@dataclass(slots=True)
class KernelCheck:
    """One run of a graph: what its text promises, and what the dispatcher saw.

    Args:
        promised: how many products of the text have how many FLOPs.
        is_all_library: no kernel generated for the graph holds a product, so that each product is a library's call.
    """

    promised: Counter[int]
    is_all_library: bool
    seen: Counter[int] = field(default_factory=Counter)

    def saw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """An operator ran inside the graph."""
        name = operator_name(func)
        formula = find_formula(name) if name in _OWN_KERNELS else None
        if formula is not None and (flops := executed_by_library(name, formula(bind_call(func, args, kwargs, output)))):
            self.seen[flops] += 1

    def contradiction(self) -> str | None:
        """What does not agree; None where all does, or where the kernels went past the dispatcher."""
        surplus = self.seen - self.promised
        missing = self.promised - self.seen if self.is_all_library and self.seen else Counter[int]()
        if not surplus and not missing:
            return None
        words = [f"{n} of {flops:,} FLOPs that it does not hold" for flops, n in sorted(surplus.items())]
        words += [f"{n} of {flops:,} FLOPs less than it holds" for flops, n in sorted(missing.items())]
        return f"a compiled graph ran other library kernels than its text says: {', '.join(words)}"


def is_all_library(origins: frozenset[str] | None, source: object) -> bool:
    """Whether generated code shows that none of its kernels holds a product."""
    if origins is None or not isinstance(source, str) or any(word in source for word in _TEMPLATES):
        return False
    return origins.isdisjoint({op.rpartition("::")[2] for op in _OWN_KERNELS} | {"mv", "dot", "matmul", "linear"})

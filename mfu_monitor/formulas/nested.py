"""Products of nested tensors in the strided layout, one product a sequence.

The math path of ``scaled_dot_product_attention`` on nested operands, jagged ones included, runs as ``aten::matmul`` of
strided nested tensors. Their sizes lie in a small host tensor, so nothing waits for a device.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from mfu_monitor.formulas.cost import UncountableCallError
from mfu_monitor.internals.tensors import sequence_sizes

__all__ = ["is_strided_nested", "nested_matmul_flops", "nested_sizes"]


def is_strided_nested(operand: Any) -> bool:
    """True for a nested tensor in the strided layout, whose ``shape`` cannot be asked for."""
    return isinstance(operand, torch.Tensor) and operand.is_nested and operand.layout == torch.strided


def nested_sizes(operand: Any) -> list[tuple[int, ...]]:
    """Shape of each sequence of a strided nested tensor.

    Example:
        >>> nested_sizes(torch.nested.nested_tensor([torch.zeros(8, 128, 64), torch.zeros(8, 64, 64)]))
        [(8, 128, 64), (8, 64, 64)]
    """
    sizes = sequence_sizes(operand)
    if sizes is None:
        raise UncountableCallError("this torch does not give the sizes of a strided nested tensor's sequences")
    return sizes


def nested_matmul_flops(left: Any, right: Any) -> int:
    """FLOPs of ``left @ right`` sequence by sequence: ``2 * batch * M * K * N`` each; one multiply-add is 2.

    Args:
        left: strided nested, each sequence (..., M, K).
        right: strided nested, each sequence (..., K, N); or dense (K, N), shared by all.
    """
    left_sizes = nested_sizes(left)
    right_sizes = nested_sizes(right) if is_strided_nested(right) else [tuple(right.shape)] * len(left_sizes)
    return sum(2 * math.prod(rows) * columns[-1] for rows, columns in zip(left_sizes, right_sizes, strict=True))

"""Rows of products whose operands are sparse, grouped, or in low precision.

A sparse operand costs the values that it stores. Groups split rows, columns or the contraction among them and add
nothing. Scales of low-precision operands are elementwise: 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .case import Case, Workload

aten = torch.ops.aten

# --- sparse by dense --------------------------------------------------------------------------------------------------


def sparse(function: Callable[..., Any], compress: str = "to_sparse_csr", *, requires_grad: bool = True) -> Workload:
    """A function of a sparse (4,6) that stores 5 values, and of a dense (6,7)."""
    matrix = torch.zeros(4, 6)
    matrix[0, 0] = matrix[0, 3] = matrix[1, 2] = matrix[2, 5] = matrix[3, 1] = 1
    return function, (getattr(matrix, compress)(), torch.zeros(6, 7, requires_grad=requires_grad))


def blocks(function: Callable[..., Any]) -> Workload:
    """A function of a (6,6) of which three blocks of (2,2) are stored, and of a dense (6,7)."""
    matrix: torch.Tensor = torch.block_diag(*[torch.ones(2, 2)] * 3)
    return function, (matrix.to_sparse_bsr((2, 2)), torch.zeros(6, 7))


BY_SPARSITY = (
    Case(
        id="sparse-csr",
        description="CSR (4,6) with 5 values by (6,7); the dense side's gradient meets the same values",
        build=lambda: sparse(lambda a, b: a @ b),
        phase="training",
        forward_flops="2 * 5 * 7",
        model_flops="2 * (2 * 5 * 7)",
    ),
    Case(
        id="sparse-csr-vector",
        description="by a vector",
        build=lambda: sparse(lambda a, b: a @ b[:, 0]),
        phase="inference",
        model_flops="2 * 5 * 1",
    ),
    Case(
        id="sparse-coo",
        description="the same in coordinates, by torch.sparse.mm",
        build=lambda: sparse(torch.sparse.mm, "to_sparse"),
        phase="training",
        forward_flops="2 * 5 * 7",
        model_flops="2 * (2 * 5 * 7)",
    ),
    Case(
        id="sparse-coo-operator",
        description="by the operator @",
        build=lambda: sparse(lambda a, b: a @ b, "to_sparse"),
        phase="training",
        forward_flops="2 * 5 * 7",
        model_flops="2 * (2 * 5 * 7)",
    ),
    Case(
        id="sparse-coo-batch",
        description="two of them by bmm",
        build=lambda: sparse(lambda a, b: torch.bmm(torch.stack([a, a]), torch.stack([b, b])), "to_sparse"),
        phase="inference",
        model_flops="2 * 2 * 5 * 7",
    ),
    Case(
        id="sparse-blocks",
        description="BSR: blocks are stored and multiplied whole",
        build=lambda: blocks(lambda a, b: a @ b),
        phase="inference",
        model_flops="2 * 3*2*2 * 7",
    ),
    Case(
        id="sparse-linear",
        description="F.linear with a sparse weight",
        build=lambda: sparse(lambda w, x: F.linear(x.T, w)),
        phase="inference",
        model_flops="2 * 5 * 7",
    ),
    Case(
        id="sparse-sampled",
        description="sampled_addmm: the 4 stored elements of the result, each a sum over 5",
        build=lambda: (
            torch.sparse.sampled_addmm,
            (torch.eye(4).to_sparse_csr(), torch.zeros(4, 5), torch.zeros(5, 4)),
        ),
        phase="inference",
        model_flops="2 * 4 * 5",
    ),
    Case(
        id="sparse-by-sparse",
        description="where two sparse matrices meet, shapes do not say: reported",
        build=lambda: sparse(lambda a, b: a @ b.to_sparse_csr()),
        phase="inference",
        model_flops="0",
        unsupported_ops=("aten::mm",),
    ),
    Case(
        id="semi-structured",
        description="2:4 sparse (128,64), of which half is stored, by (64,64)",
        build=lambda: (
            aten._sparse_semi_structured_mm,
            (
                torch.empty(128, 32, dtype=torch.bfloat16),
                torch.empty(128, 4, dtype=torch.int16),
                torch.empty(64, 64, dtype=torch.bfloat16),
            ),
        ),
        phase="inference",
        model_flops="2 * 128*64 * 64 // 2",
        devices=("meta",),
    ),
)

# --- grouped ----------------------------------------------------------------------------------------------------------


def grouped(left: tuple[int, ...], right: tuple[int, ...], *ends: int) -> Workload:
    """``grouped_mm`` in bf16, times one: the kernel's backward takes no expanded gradient."""
    offsets = torch.tensor(ends, dtype=torch.int32, device="cpu") if ends else None
    operands = tuple(torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for shape in (left, right))

    def experts(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = F.grouped_mm(a, b, offs=offsets)
        return result * 1.0

    return experts, operands


BY_GROUP = (
    Case(
        id="grouped-rows",
        description="512 rows of 64 split among 4 experts of (64,128)",
        build=lambda: grouped((512, 64), (4, 64, 128), 128, 256, 384, 512),
        phase="training",
        forward_flops="2 * 512*128 * 64",
        model_flops="3 * (2 * 512*128 * 64)",
        covers=("C9",),
    ),
    Case(
        id="grouped-rows-uneven",
        description="however they are split, an expert without rows included",
        build=lambda: grouped((512, 64), (4, 64, 128), 16, 16, 480, 512),
        phase="inference",
        model_flops="2 * (16 + 0 + 464 + 32)*128 * 64",
        covers=("C9",),
    ),
    Case(
        id="grouped-batch",
        description="3d by 3d is an ordinary batch",
        build=lambda: grouped((4, 16, 64), (4, 64, 128)),
        phase="training",
        forward_flops="2 * 4*16*128 * 64",
        model_flops="3 * (2 * 4*16*128 * 64)",
        covers=("C9",),
    ),
    Case(
        id="grouped-contraction",
        description="2d by 2d: 512 terms split among 4 results of (64,128), as a weight's gradient is",
        build=lambda: grouped((64, 512), (512, 128), 128, 256, 384, 512),
        phase="training",
        forward_flops="2 * 64*128 * (128 + 128 + 128 + 128)",
        model_flops="3 * (2 * 64*128 * 512)",
        covers=("C9",),
    ),
    Case(
        id="grouped-columns",
        description="3d by 2d: 512 columns split among 4",
        build=lambda: grouped((4, 64, 32), (32, 512), 128, 256, 384, 512),
        phase="training",
        forward_flops="2 * 64*512 * 32",
        model_flops="3 * (2 * 64*512 * 32)",
        covers=("C9",),
    ),
)

# --- low precision ----------------------------------------------------------------------------------------------------


def scaled(function: Callable[..., Any]) -> Workload:
    """A function of fp8 (48,80), of fp8 (80,112) by columns, and of a scale."""
    left, right = (torch.zeros(shape).to(torch.float8_e4m3fn) for shape in ((48, 80), (112, 80)))
    return function, (left, right.t(), torch.ones(()))


def scaled_v2(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    recipe = F.ScalingType.TensorWise
    result: torch.Tensor = F.scaled_mm(a, b, scale, recipe, scale, recipe, output_dtype=torch.bfloat16)
    return result


def quantized(shape: tuple[int, ...], dtype: torch.dtype = torch.quint8) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.zeros(shape), 1.0, 0, dtype)


def quantized_linear() -> Workload:
    def pack_and_multiply(x: torch.Tensor, weight: torch.Tensor) -> Any:
        packed = torch.ops.quantized.linear_prepack(weight, None)
        return torch.ops.quantized.linear(x, packed, 1.0, 0)

    return pack_and_multiply, (quantized((3, 16)), quantized((8, 16), torch.qint8))


def dynamic_linear() -> Workload:
    packed = torch.ops.quantized.linear_prepack(quantized((8, 16), torch.qint8), torch.zeros(8))
    return lambda x: torch.ops.quantized.linear_dynamic(x, packed), (torch.zeros(2, 3, 16),)


def quantized_conv2d() -> Workload:
    weight = quantized((6, 2, 3, 3), torch.qint8)
    packed = torch.ops.quantized.conv2d_prepack(weight, torch.zeros(6), [1, 1], [1, 1], [1, 1], 2)
    return lambda x: torch.ops.quantized.conv2d(x, packed, 1.0, 0), (quantized((2, 4, 8, 8)),)


BY_PRECISION = (
    Case(
        id="int-mm",
        description="int8 (32,64) @ (64,48)",
        build=lambda: (torch._int_mm, tuple(torch.zeros(s, dtype=torch.int8) for s in ((32, 64), (64, 48)))),
        phase="inference",
        model_flops="2 * 32*48 * 64",
        devices=("cpu", "meta"),
    ),
    Case(
        id="scaled-mm",
        description="fp8 (48,80) @ (80,112)",
        build=lambda: scaled(lambda a, b, scale: torch._scaled_mm(a, b, scale, scale, out_dtype=torch.bfloat16)),
        phase="inference",
        model_flops="2 * 48*112 * 80",
        devices=("cpu", "meta"),
        covers=("C9",),
    ),
    Case(
        id="scaled-mm-v2",
        description="the same by torch.nn.functional.scaled_mm",
        build=lambda: scaled(scaled_v2),
        phase="inference",
        model_flops="2 * 48*112 * 80",
        covers=("C9",),
    ),
    Case(
        id="weight-only-int8",
        description="bf16 (3,16) by an int8 weight (32,16)",
        build=lambda: (
            aten._weight_int8pack_mm,
            (
                torch.zeros(3, 16, dtype=torch.bfloat16),
                torch.zeros(32, 16, dtype=torch.int8),
                torch.ones(32, dtype=torch.bfloat16),
            ),
        ),
        phase="inference",
        model_flops="2 * 3*32 * 16",
    ),
    Case(
        id="quantized-linear",
        description="quantized (3,16) by (8,16); packing the weight is a copy",
        build=quantized_linear,
        phase="inference",
        model_flops="2 * 3*8 * 16",
    ),
    Case(
        id="quantized-linear-dynamic",
        description="quantized on the fly, (2,3,16)",
        build=dynamic_linear,
        phase="inference",
        model_flops="2 * 2*3*8 * 16",
    ),
    Case(
        id="quantized-conv2d",
        description="(2,4,8,8) by a prepacked (6,2,3,3) in 2 groups, padding 1",
        build=quantized_conv2d,
        phase="inference",
        model_flops="2 * 2*6*8*8 * (2*3*3)",
    ),
)

CASES: tuple[Case, ...] = (*BY_SPARSITY, *BY_GROUP, *BY_PRECISION)

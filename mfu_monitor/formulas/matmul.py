"""Matrix products: one multiply-add is 2 FLOPs, and a product of complex numbers costs four real ones.

The rule behind most of the formulas: every element of the result is a sum over the contracted dimension, so a product
costs ``2 * numel(result) * contraction``, whatever its rank, batch or broadcasting.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from mfu_monitor.formulas.cost import OpCost, OperatorCall, UncountableCallError, read_integers
from mfu_monitor.formulas.nested import is_strided_nested, nested_matmul_flops
from mfu_monitor.formulas.registry import formula
from mfu_monitor.internals.tensors import sparse_parts

__all__ = ["contraction_flops", "matmul_flops", "sparse_matmul_flops", "trilinear_flops"]

COMPLEX_FACTOR = 4
"""(a + ib)(c + id) is four real products and, added up, four real additions: four multiply-adds."""


def matmul_flops(m: int, k: int, n: int, *, batch: int = 1, is_complex: bool = False) -> int:
    """FLOPs of ``batch`` products ``(m, k) @ (k, n)``.

    Example:
        >>> matmul_flops(48, 80, 112)
        860160
    """
    return contraction_flops(batch * m * n, k, is_complex=is_complex)


def contraction_flops(result_numel: int, contraction: int, *, is_complex: bool = False) -> int:
    """FLOPs of any product whose result has ``result_numel`` elements, each a sum over ``contraction`` terms."""
    return 2 * result_numel * contraction * (COMPLEX_FACTOR if is_complex else 1)


def sparse_matmul_flops(stored_values: int, n: int, *, is_complex: bool = False) -> int:
    """FLOPs of sparse ``(m, k)`` with ``stored_values`` elements times dense ``(k, n)``: each meets n columns."""
    return contraction_flops(stored_values, n, is_complex=is_complex)


# --- dense products ---------------------------------------------------------------------------------------------------


@formula("aten::mm", "aten::_sparse_mm")
def _mm(call: OperatorCall) -> OpCost:
    left = call["self"] if "self" in call.arguments else call["sparse"]
    right = call["mat2"] if "mat2" in call.arguments else call["dense"]
    return OpCost(_matrix_product_flops(left, right))


@formula("aten::addmm", "aten::_addmm_activation", "aten::_sparse_addmm")
def _addmm(call: OperatorCall) -> OpCost:
    return OpCost(_matrix_product_flops(call["mat1"], call["mat2"]))


@formula("aten::bmm")
def _bmm(call: OperatorCall) -> OpCost:
    if is_strided_nested(call["self"]):
        return OpCost(nested_matmul_flops(call["self"], call["mat2"]))
    B, M, K = call["self"].shape
    N, is_complex = call["mat2"].shape[2], _is_complex(call["self"])
    if is_sparse(call["self"]):
        return OpCost(sparse_matmul_flops(stored_values(call["self"]), N, is_complex=is_complex))
    return OpCost(matmul_flops(M, K, N, batch=B, is_complex=is_complex))


@formula("aten::baddbmm", "aten::addbmm")
def _baddbmm(call: OperatorCall) -> OpCost:
    # addbmm sums the batch into one matrix; the products are the same.
    B, M, K = call["batch1"].shape
    return OpCost(matmul_flops(M, K, call["batch2"].shape[2], batch=B, is_complex=_is_complex(call["batch1"])))


@formula("aten::mv")
def _mv(call: OperatorCall) -> OpCost:
    return OpCost(_matrix_product_flops(call["self"], call["vec"]))


@formula("aten::addmv")
def _addmv(call: OperatorCall) -> OpCost:
    return OpCost(_matrix_product_flops(call["mat"], call["vec"]))


@formula("aten::dot", "aten::vdot")
def _dot(call: OperatorCall) -> OpCost:
    return OpCost(contraction_flops(1, call["self"].shape[0], is_complex=_is_complex(call["self"])))


@formula("aten::addr")
def _addr(call: OperatorCall) -> OpCost:
    # A product with K = 1: M*N multiply-adds. (`outer` and `ger` become a broadcast multiplication and count 0.)
    M, N = call["vec1"].shape[0], call["vec2"].shape[0]
    return OpCost(matmul_flops(M, 1, N, is_complex=_is_complex(call["vec1"])))


@formula("aten::linear", "aten::mkldnn_linear")
def _linear(call: OperatorCall) -> OpCost:
    weight = call["weight"]
    input = call["input"] if "input" in call.arguments else call["self"]
    if is_strided_nested(input):
        return OpCost(contraction_flops(input.numel(), weight.shape[0], is_complex=_is_complex(input)))
    if is_sparse(weight):
        rows = input.numel() // input.shape[-1]
        return OpCost(sparse_matmul_flops(stored_values(weight), rows, is_complex=_is_complex(input)))
    return OpCost(contraction_flops(call.result.numel(), input.shape[-1], is_complex=_is_complex(input)))


@formula("aten::matmul")
def _matmul(call: OperatorCall) -> OpCost:
    left, right = call["self"], call["other"]
    if is_strided_nested(left):
        return OpCost(nested_matmul_flops(left, right))
    if is_sparse(left) or is_sparse(right):
        return OpCost(_matrix_product_flops(left, right))
    return OpCost(contraction_flops(call.result.numel(), left.shape[-1], is_complex=_is_complex(left)))


@formula("aten::linear_backward", "aten::mkldnn_linear_backward")
def _linear_backward(call: OperatorCall) -> OpCost:
    # grad_input = grad @ W and grad_weight = grad^T @ x: each of the forward's size.
    contraction = call["weight"].shape[-1]  # nested inputs have no shape to ask
    one = contraction_flops(call["grad_output"].numel(), contraction, is_complex=_is_complex(call["self"]))
    return OpCost(one * sum(bool(wanted) for wanted in call["output_mask"][:2]))


@formula("aten::mkldnn_linear_backward_input")
def _linear_backward_input(call: OperatorCall) -> OpCost:
    return OpCost(contraction_flops(call["grad_output"].numel(), call["input_size"][-1]))


@formula("aten::mkldnn_linear_backward_weights")
def _linear_backward_weights(call: OperatorCall) -> OpCost:
    return OpCost(contraction_flops(call["grad_output"].numel(), call["input"].shape[-1]))


@formula("aten::matmul_backward")
def _matmul_backward(call: OperatorCall) -> OpCost:
    if is_strided_nested(call["self"]):
        forward = nested_matmul_flops(call["self"], call["other"])
        return OpCost(forward * sum(bool(wanted) for wanted in call["mask"]))
    one = contraction_flops(call["grad"].numel(), call["self"].shape[-1], is_complex=_is_complex(call["self"]))
    return OpCost(one * sum(bool(wanted) for wanted in call["mask"]))


@formula("aten::_foreach_mm")
def _foreach_mm(call: OperatorCall) -> OpCost:
    return OpCost(sum(_matrix_product_flops(a, b) for a, b in zip(call["self"], call["mat2"], strict=True)))


@formula("inductor::_mm_plus_mm")
def _mm_plus_mm(call: OperatorCall) -> OpCost:
    return OpCost(_matrix_product_flops(call["a"], call["b"]) + _matrix_product_flops(call["c"], call["d"]))


# Tensor parallelism with products and collectives in one operator (torch/distributed/_symmetric_memory): the product
# that this rank runs, the gathered rows included.
@formula("symm_mem::fused_all_gather_matmul", "symm_mem::fused_all_gather_scaled_matmul")
def _all_gather_matmul(call: OperatorCall) -> OpCost:
    K = call["A"].shape[-1]
    return OpCost(sum(contraction_flops(result.numel(), K) for result in call.output[1]))


@formula("symm_mem::fused_matmul_reduce_scatter", "symm_mem::fused_scaled_matmul_reduce_scatter")
def _matmul_reduce_scatter(call: OperatorCall) -> OpCost:
    rows_times_contraction, N = call["A"].numel(), call["B"].shape[-1]
    return OpCost(contraction_flops(rows_times_contraction, N))


# --- the three-way product of nn.Bilinear -----------------------------------------------------------------------------


def trilinear_flops(
    sizes: tuple[int, ...],
    *,
    expand1: tuple[int, ...],
    expand2: tuple[int, ...],
    expand3: tuple[int, ...],
    sumdim: tuple[int, ...],
    unroll_dim: int = 1,
) -> int:
    """FLOPs of ``aten::_trilinear``: sum over ``sumdim`` of i1 * i2 * i3, as torch runs it.

    Torch loops over ``unroll_dim``, contracts i1 with i2 over the summed dimensions that i3 does not have, and the
    result with i3 over the others; a step that sums over nothing is an elementwise product and counts 0.
    (aten/src/ATen/native/Linear.cpp, ``_trilinear``.)

    Args:
        sizes: the sizes of all dimensions of the unsummed product.
        expand1: dimensions that i1 lacks; ``expand2`` and ``expand3`` for the others.

    Example:
        nn.Bilinear(I, J, O) on B rows: 2*B*O*I*J for x1 with the weight, 2*B*O*J for the result with x2.
    """
    dims = set(range(len(sizes)))
    sum_first = set(sumdim) & set(expand3)
    sum_second = set(sumdim) - sum_first
    in_first = (dims - set(expand1)) | (dims - set(expand2)) | {unroll_dim}
    in_second = (in_first - sum_first) | (dims - set(expand3)) | {unroll_dim}
    first = 2 * _product(sizes[d] for d in in_first) if sum_first else 0
    second = 2 * _product(sizes[d] for d in in_second) if sum_second else 0
    return first + second


@formula("aten::_trilinear")
def _trilinear(call: OperatorCall) -> OpCost:
    expands = [tuple(call[f"expand{i}"]) for i in (1, 2, 3)]
    sizes = _trilinear_sizes([call[f"i{i}"] for i in (1, 2, 3)], expands)
    flops = trilinear_flops(
        sizes,
        expand1=expands[0],
        expand2=expands[1],
        expand3=expands[2],
        sumdim=tuple(call["sumdim"]),
        unroll_dim=call["unroll_dim"],
    )
    return OpCost(flops * (COMPLEX_FACTOR if _is_complex(call["i1"]) else 1))


def _trilinear_sizes(operands: list[torch.Tensor], expands: list[tuple[int, ...]]) -> tuple[int, ...]:
    rank = operands[0].dim() + len(expands[0])
    sizes = [1] * rank
    for operand, expand in zip(operands, expands, strict=True):
        own_dims = [d for d in range(rank) if d not in expand]
        for dim, size in zip(own_dims, operand.shape, strict=True):
            sizes[dim] = max(sizes[dim], size)
    return tuple(sizes)


# --- low precision ----------------------------------------------------------------------------------------------------


@formula("aten::_int_mm")
def _int_mm(call: OperatorCall) -> OpCost:
    return OpCost(_matrix_product_flops(call["self"], call["mat2"]), precision="int8")


@formula("aten::_scaled_mm", "aten::_scaled_mm_v2")
def _scaled_mm(call: OperatorCall) -> OpCost:
    (M, K), N = call["self"].shape, call["mat2"].shape[1]
    return OpCost(matmul_flops(M, K * packed_values(call["self"]), N), precision=_scaled_precision(call["self"]))


@formula("aten::_scaled_addmm")  # since torch 2.15
def _scaled_addmm(call: OperatorCall) -> OpCost:
    left, right = call["mat1"], call["mat2"]
    (M, K), N = left.shape, right.shape[1]
    return OpCost(matmul_flops(M, K * packed_values(left), N), precision=_scaled_precision(left))


@formula("aten::_grouped_mm", "aten::_scaled_grouped_mm", "aten::_scaled_grouped_mm_v2")
def _grouped_mm(call: OperatorCall) -> OpCost:
    left, right, offs = call["self"], call["mat2"], call.get("offs")
    flops = grouped_matmul_flops(
        tuple(left.shape), tuple(right.shape), packed=packed_values(left), used=last_offset(offs)
    )
    return OpCost(flops, precision=_scaled_precision(left))


# transformers' loop over experts where torch has no grouped product; an operator of its own, so its loop is not seen.
@formula("transformers::grouped_mm_fallback")
def _grouped_mm_fallback(call: OperatorCall) -> OpCost:
    input, weight, offs = call["input"], call["weight"], call["offs"]
    return OpCost(grouped_matmul_flops(tuple(input.shape), tuple(weight.shape), used=last_offset(offs)))


@formula("transformers::grouped_mm_fallback_backward")
def _grouped_mm_fallback_backward(call: OperatorCall) -> OpCost:
    return OpCost(2 * _grouped_mm_fallback(call).flops)  # it computes both gradients


def grouped_matmul_flops(
    left: tuple[int, ...], right: tuple[int, ...], *, packed: int = 1, used: int | None = None
) -> int:
    """FLOPs of a grouped product: each row, column or slice of K belongs to one group, so groups add no FLOPs.

    2d x 3d ``(M, K) x (G, K, N)``: rows split among groups; 3d x 2d ``(G, M, K) x (K, N)``: columns split; 2d x 2d
    ``(M, K) x (K, N)``: K split; 3d x 3d: an ordinary batch.

    Args:
        packed: values per stored element along K, 2 for packed fp4.
        used: length of the split dimension up to the last offset, where it is known; rows beyond it are not computed.

    Example:
        >>> grouped_matmul_flops((512, 64), (4, 64, 128))
        8388608
    """
    M, K, N = left[-2], left[-1] * packed, right[-1]
    if len(left) == 3 and len(right) == 3:
        return matmul_flops(M, K, N, batch=left[0])
    if used is None:
        return matmul_flops(M, K, N)
    if len(left) == 2 and len(right) == 3:
        return matmul_flops(used, K, N)
    if len(left) == 3:
        return matmul_flops(M, K, used)
    return matmul_flops(M, used * packed, N)


def last_offset(offs: torch.Tensor | None) -> int | None:
    """The last of the group ends, None where it cannot be read."""
    ends = read_integers(offs[-1:]) if offs is not None else None
    return ends[0] if ends else None


@formula(
    "aten::_weight_int8pack_mm",
    "aten::_weight_int4pack_mm",
    "aten::_weight_int4pack_mm_for_cpu",
    "aten::_weight_int4pack_mm_with_scales_and_zeros",
    "quantized::int4mm_packed_weight_cpu",
)
def _packed_weight_mm(call: OperatorCall) -> OpCost:
    # The weight is unpacked on the fly and the product runs in the precision of the activations, (M, K).
    return OpCost(contraction_flops(call.result.numel(), call["self"].shape[-1]))


@formula("aten::_dyn_quant_matmul_4bit")
def _dyn_quant_matmul(call: OperatorCall) -> OpCost:
    return OpCost(contraction_flops(call.result.numel(), call["in_features"]), precision="int8")


@formula("aten::_mixed_dtypes_linear")
def _mixed_dtypes_linear(call: OperatorCall) -> OpCost:
    return OpCost(contraction_flops(call.result.numel(), call["input"].shape[-1]))


@formula(
    "mkldnn::_linear_pointwise",
    "mkl::_mkl_linear",
    "quantized::linear_dynamic_fp16",
    "quantized::linear_relu_dynamic_fp16",
    "quantized::linear_dynamic_fp16_unpacked_weight",
)
def _prepacked_linear(call: OperatorCall) -> OpCost:
    return OpCost(contraction_flops(call.result.numel(), call["X"].shape[-1]))


@formula("onednn::linear_dynamic_fp16", "onednn::linear_relu_dynamic_fp16")
def _onednn_fp16_linear(call: OperatorCall) -> OpCost:
    return OpCost(contraction_flops(call.result.numel(), call["x"].shape[-1]))


@formula(
    "quantized::linear",
    "quantized::linear_relu",
    "quantized::linear_leaky_relu",
    "quantized::linear_tanh",
    "quantized::linear_dynamic",
    "quantized::linear_relu_dynamic",
    "quantized::linear_with_input_q_dq_qweight_dq_output_fp32",
    "quantized::linear_with_input_q_dq_qweight_dq_relu_output_fp32",
    "_quantized::linear",
    "_quantized::linear_dynamic",
)
def _quantized_linear(call: OperatorCall) -> OpCost:
    return OpCost(contraction_flops(call.result.numel(), call["X"].shape[-1]), precision="int8")


@formula("onednn::qlinear_pointwise")
def _onednn_quantized_linear(call: OperatorCall) -> OpCost:
    return OpCost(contraction_flops(call.result.numel(), call["qx"].shape[-1]), precision="int8")


@formula("quantized::matmul")
def _quantized_matmul(call: OperatorCall) -> OpCost:
    return OpCost(contraction_flops(call.result.numel(), call["qa"].shape[-1]), precision="int8")


# bitsandbytes registers its kernels as operators (bitsandbytes/_ops.py): int8 A (.., K) with int8 B (N, K), and
# floating A (.., K) with a packed weight of logical shape (N, K).
@formula("bitsandbytes::int8_linear_matmul", "bitsandbytes::int8_scaled_mm")
def _bitsandbytes_int8(call: OperatorCall) -> OpCost:
    return OpCost(contraction_flops(call.result.numel(), call["A"].shape[-1]), precision="int8")


@formula("bitsandbytes::int8_mixed_scaled_mm", "bitsandbytes::gemv_4bit", "bitsandbytes::gemm_4bit")
def _bitsandbytes_mixed(call: OperatorCall) -> OpCost:
    return OpCost(contraction_flops(call.result.numel(), call["A"].shape[-1]))


# --- sparse -----------------------------------------------------------------------------------------------------------


@formula("aten::_sparse_semi_structured_linear")
def _semi_structured_linear(call: OperatorCall) -> OpCost:
    # The weight holds the kept half of each row, (O, I/2): a sparse product costs its stored values.
    return OpCost(contraction_flops(call.result.numel(), call["weight"].shape[-1]))


@formula("aten::_sparse_semi_structured_mm", "aten::_sparse_semi_structured_addmm")
def _semi_structured_mm(call: OperatorCall) -> OpCost:
    return OpCost(contraction_flops(call.result.numel(), call["mat1"].shape[-1]))


@formula("aten::_cslt_sparse_mm")
def _cslt_sparse_mm(call: OperatorCall) -> OpCost:
    # 2:4 sparsity keeps two of four along K, the rows of the dense operand.
    return OpCost(contraction_flops(call.result.numel(), call["dense_B"].shape[0] // 2))


@formula("aten::hspmm")
def _hspmm(call: OperatorCall) -> OpCost:
    return OpCost(_matrix_product_flops(call["mat1"], call["mat2"]))


@formula("aten::sparse_sampled_addmm")
def _sampled_addmm(call: OperatorCall) -> OpCost:
    # Only the entries that the sparse `self` has are computed, each a dot product over K.
    K = call["mat1"].shape[-1]
    return OpCost(sparse_matmul_flops(stored_values(call["self"]), K, is_complex=_is_complex(call["mat1"])))


@formula("aten::_sparse_mm_reduce_impl")
def _sparse_mm_reduce(call: OperatorCall) -> OpCost:
    return OpCost(_matrix_product_flops(call["self"], call["other"]))


@formula("aten::_sparse_mm_reduce_impl_backward")
def _sparse_mm_reduce_backward(call: OperatorCall) -> OpCost:
    one = sparse_matmul_flops(stored_values(call["self"]), call["grad_out"].shape[-1])
    return OpCost(one * sum(bool(wanted) for wanted in call["output_mask"]))


# --- distances and grids ---------------------------------------------------------------------------------------------

CDIST_MM_ROWS = 25
"""From this many rows on, ``cdist`` uses a product by default (aten/src/ATen/native/Distance.cpp, ``cdist_impl``)."""


@formula("aten::_cdist_forward")
def _cdist(call: OperatorCall) -> OpCost:
    P, R = call["x1"].shape[-2], call["x2"].shape[-2]
    mode = call["compute_mode"] or 0  # 0: a product for many rows, 1: always, 2: never
    by_product = call["p"] == 2 and (mode == 1 or (mode == 0 and (P > CDIST_MM_ROWS or R > CDIST_MM_ROWS)))
    if not by_product:
        return OpCost(0)
    return OpCost(_distance_flops(call))


@formula("aten::_euclidean_dist")
def _euclidean_dist(call: OperatorCall) -> OpCost:
    return OpCost(_distance_flops(call))


def _distance_flops(call: OperatorCall) -> int:
    # |x|^2 - 2 x.y + |y|^2 as one product: the two norms are two more columns.
    return contraction_flops(call.result.numel(), call["x1"].shape[-1] + 2)


@formula("aten::affine_grid_generator", "aten::cudnn_affine_grid_generator")
def _affine_grid(call: OperatorCall) -> OpCost:
    # Homogeneous base points, (points, d+1), by the transposed map, (d+1, d): a sum over d+1 for every coordinate.
    return OpCost(contraction_flops(call.result.numel(), call.result.shape[-1] + 1))


@formula("aten::cudnn_affine_grid_generator_backward")
def _affine_grid_backward(call: OperatorCall) -> OpCost:
    return OpCost(contraction_flops(call["grad"].numel(), call["grad"].shape[-1] + 1))


# --- operands ---------------------------------------------------------------------------------------------------------


def _matrix_product_flops(left: Any, right: Any) -> int:
    """FLOPs of a matrix by a matrix or a vector, either of them sparse."""
    is_complex = _is_complex(left)
    N = right.shape[1] if right.dim() > 1 else 1
    if is_sparse(left) and is_sparse(right):
        raise UncountableCallError(
            "a product of two sparse matrices: its FLOPs depend on where their entries meet, which shapes do not say"
        )
    if is_sparse(left):
        return sparse_matmul_flops(stored_values(left), N, is_complex=is_complex)
    if is_sparse(right):
        return sparse_matmul_flops(stored_values(right), left.shape[0], is_complex=is_complex)
    return matmul_flops(left.shape[0], left.shape[1], N, is_complex=is_complex)


def is_sparse(tensor: torch.Tensor) -> bool:
    """True for COO, CSR, CSC, BSR and BSC layouts and for 2:4 semi-structured tensors."""
    return tensor.layout in _SPARSE_LAYOUTS or isinstance(tensor, torch.sparse.SparseSemiStructuredTensor)


_SPARSE_LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def stored_values(tensor: torch.Tensor) -> int:
    """Elements that a sparse tensor keeps; whole blocks for BSR and BSC, one half for 2:4 sparsity."""
    if isinstance(tensor, torch.sparse.SparseSemiStructuredTensor):
        return tensor.numel() // 2
    if tensor.layout is torch.sparse_coo:
        parts = sparse_parts(tensor)
        if parts is None:
            raise UncountableCallError("this torch does not give how many values a COO tensor keeps")
        return parts[0].numel() // math.prod(parts[0].shape[1:])
    return tensor.values().numel()


def packed_values(tensor: torch.Tensor) -> int:
    """Values in one stored element: 2 for packed fp4, whose shape is (M, K/2)."""
    return 2 if tensor.dtype == getattr(torch, "float4_e2m1fn_x2", None) else 1


def _scaled_precision(tensor: torch.Tensor) -> str | None:
    return "fp4" if packed_values(tensor) == 2 else None


def _is_complex(tensor: torch.Tensor) -> bool:
    return bool(tensor.dtype.is_complex)


def _product(factors: Any) -> int:
    result = 1
    for factor in factors:
        result *= factor
    return result

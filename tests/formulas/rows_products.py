"""Rows of matrix products, dense, packed, quantised and sparse; M, K, N are 3, 5, 7 where nothing else is said."""

from __future__ import annotations

import warnings

import torch

from .row import PackedWeight, Row, T, row

I8, U8, I32, I64 = torch.int8, torch.uint8, torch.int32, torch.int64
HALF, BF16, FP8 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
FP4 = getattr(torch, "float4_e2m1fn_x2", None)

ONE = 2 * 3 * 5 * 7
"""(3, 5) @ (5, 7)."""
READ = 3 * 5 + 5 * 7
WRITTEN = 3 * 7


def scalar() -> torch.Tensor:
    return T()


def eye(layout: str = "csr") -> torch.Tensor:
    """Six stored values of 36."""
    with warnings.catch_warnings():  # sparse layouts call themselves a beta
        warnings.simplefilter("ignore")
        return torch.eye(6).to_sparse_csr() if layout == "csr" else torch.eye(6).to_sparse()


EYE_CSR = 6 * 4 + 7 * 8 + 6 * 8  # values, row ends, columns
EYE_COO = 6 * 4 + 2 * 6 * 8

DENSE = (
    row("aten::mm", self=T(3, 5), mat2=T(5, 7), gives=T(3, 7), flops=ONE, moved=4 * (READ + WRITTEN)),
    row("aten::mm", label="complex", self=T(3, 5, dtype=torch.complex64), mat2=T(5, 7, dtype=torch.complex64),
        gives=T(3, 7, dtype=torch.complex64), flops=4 * ONE, moved=8 * (READ + WRITTEN)),
    row("aten::mm", label="sparse on the right", self=T(5, 6), mat2=eye(), gives=T(5, 6), flops=2 * 6 * 5,
        moved=4 * (30 + 30) + EYE_CSR),
    row("aten::mm", label="sparse on the left", self=eye("coo"), mat2=T(6, 5), gives=T(6, 5), flops=2 * 6 * 5,
        moved=4 * (30 + 30) + EYE_COO),
    row("aten::_sparse_mm", sparse=eye(), dense=T(6, 5), gives=T(6, 5), flops=2 * 6 * 5, moved=EYE_CSR + 4 * 60),
    row("aten::addmm", self=T(3, 7), mat1=T(3, 5), mat2=T(5, 7), gives=T(3, 7), flops=ONE,
        moved=4 * (21 + READ + WRITTEN)),
    row("aten::addmm", label="a bias", self=T(7), mat1=T(3, 5), mat2=T(5, 7), gives=T(3, 7), flops=ONE,
        moved=4 * (7 + READ + WRITTEN)),
    row("aten::_addmm_activation", self=T(7), mat1=T(3, 5), mat2=T(5, 7), gives=T(3, 7), flops=ONE,
        moved=4 * (7 + READ + WRITTEN)),
    row("aten::_sparse_addmm", self=T(6, 5), mat1=eye(), mat2=T(6, 5), gives=T(6, 5), flops=2 * 6 * 5,
        moved=4 * 90 + EYE_CSR),
    row("aten::bmm", self=T(4, 3, 5), mat2=T(4, 5, 7), gives=T(4, 3, 7), flops=4 * ONE,
        moved=4 * 4 * (READ + WRITTEN)),
    row("aten::baddbmm", self=T(4, 3, 7), batch1=T(4, 3, 5), batch2=T(4, 5, 7), gives=T(4, 3, 7), flops=4 * ONE,
        moved=4 * 4 * (21 + READ + WRITTEN)),
    row("aten::addbmm", self=T(3, 7), batch1=T(4, 3, 5), batch2=T(4, 5, 7), gives=T(3, 7), flops=4 * ONE,
        moved=4 * (21 + 4 * READ + WRITTEN)),
    row("aten::mv", self=T(3, 5), vec=T(5), gives=T(3), flops=2 * 3 * 5, moved=4 * (15 + 5 + 3)),
    row("aten::addmv", self=T(3), mat=T(3, 5), vec=T(5), gives=T(3), flops=2 * 3 * 5, moved=4 * (3 + 15 + 5 + 3)),
    row("aten::dot", self=T(5), tensor=T(5), gives=T(), flops=2 * 5, moved=4 * (5 + 5 + 1)),
    row("aten::vdot", self=T(5), other=T(5), gives=T(), flops=2 * 5, moved=4 * (5 + 5 + 1)),
    row("aten::vdot", label="complex", self=T(5, dtype=torch.complex64), other=T(5, dtype=torch.complex64),
        gives=T(dtype=torch.complex64), flops=4 * 2 * 5, moved=8 * (5 + 5 + 1)),
    row("aten::addr", self=T(3, 5), vec1=T(3), vec2=T(5), gives=T(3, 5), flops=2 * 3 * 5, moved=4 * (15 + 3 + 5 + 15)),
    row("aten::linear", input=T(2, 3, 5), weight=T(7, 5), bias=T(7), gives=T(2, 3, 7), flops=2 * ONE,
        moved=4 * (30 + 35 + 7 + 42)),
    row("aten::linear", label="one row", input=T(5), weight=T(7, 5), gives=T(7), flops=2 * 5 * 7,
        moved=4 * (5 + 35 + 7)),
    row("aten::linear", label="a sparse weight", input=T(4, 6), weight=eye(), gives=T(4, 6), flops=2 * 6 * 4,
        moved=4 * (24 + 24) + EYE_CSR),
    row("aten::mkldnn_linear", self=T(2, 3, 5), weight=T(7, 5), bias=T(7), gives=T(2, 3, 7), flops=2 * ONE,
        moved=4 * (30 + 35 + 7 + 42)),
    row("aten::matmul", self=T(2, 1, 3, 5), other=T(4, 5, 7), gives=T(2, 4, 3, 7), flops=8 * ONE,
        moved=4 * (30 + 140 + 168)),
    row("aten::matmul", label="two vectors", self=T(5), other=T(5), gives=T(), flops=2 * 5, moved=4 * (5 + 5 + 1)),
    row("aten::matmul", label="sparse", self=eye(), other=T(6, 5), gives=T(6, 5), flops=2 * 6 * 5,
        moved=EYE_CSR + 4 * (30 + 30)),
    row("aten::_foreach_mm", self=[T(3, 5), T(2, 4)], mat2=[T(5, 7), T(4, 6)], gives=[T(3, 7), T(2, 6)],
        flops=ONE + 2 * 2 * 4 * 6, moved=4 * (READ + WRITTEN + 8 + 24 + 12)),
    row("inductor::_mm_plus_mm", a=T(3, 5), b=T(5, 7), c=T(3, 4), d=T(4, 7), out=T(3, 7), gives=T(3, 7),
        flops=ONE + 2 * 3 * 4 * 7, moved=4 * (READ + 12 + 28 + WRITTEN)),  # the given result is written, not read
)  # fmt: skip


def linear_gradients(name: str) -> list[Row]:
    """All gradients, and each alone: a bias costs no product."""
    operands = {"self": lambda: T(2, 3, 5), "grad_output": lambda: T(2, 3, 7), "weight": lambda: T(7, 5)}
    read = 30 + 42 + 35
    return [
        row(name, label="all", **{key: make() for key, make in operands.items()}, output_mask=[True, True, True],
            gives=(T(2, 3, 5), T(7, 5), T(7)), flops=2 * 2 * ONE, moved=4 * (read + 30 + 35 + 7)),
        row(name, label="the input's alone", **{key: make() for key, make in operands.items()},
            output_mask=[True, False, False], gives=(T(2, 3, 5), None, None), flops=2 * ONE, moved=4 * (read + 30)),
        row(name, label="the weight's alone", **{key: make() for key, make in operands.items()},
            output_mask=[False, True, False], gives=(None, T(7, 5), None), flops=2 * ONE, moved=4 * (read + 35)),
        row(name, label="the bias's alone", **{key: make() for key, make in operands.items()},
            output_mask=[False, False, True], gives=(None, None, T(7)), flops=0, moved=4 * (read + 7)),
    ]  # fmt: skip


GRADIENTS = (
    *linear_gradients("aten::linear_backward"),
    *linear_gradients("aten::mkldnn_linear_backward"),
    row("aten::mkldnn_linear_backward_input", input_size=[2, 3, 5], grad_output=T(2, 3, 7), weight=T(7, 5),
        gives=T(2, 3, 5), flops=2 * ONE, moved=4 * (42 + 35 + 30)),
    row("aten::mkldnn_linear_backward_weights", grad_output=T(2, 3, 7), input=T(2, 3, 5), weight=T(7, 5),
        bias_defined=True, gives=(T(7, 5), T(7)), flops=2 * ONE, moved=4 * (42 + 30 + 35 + 35 + 7)),
    row("aten::matmul_backward", grad=T(4, 3, 7), self=T(4, 3, 5), other=T(4, 5, 7), mask=[True, True],
        gives=(T(4, 3, 5), T(4, 5, 7)), flops=2 * 4 * ONE, moved=4 * 4 * (21 + READ + READ)),
    row("aten::matmul_backward", label="one", grad=T(4, 3, 7), self=T(4, 3, 5), other=T(4, 5, 7), mask=[False, True],
        gives=(None, T(4, 5, 7)), flops=4 * ONE, moved=4 * 4 * (21 + READ + 35)),
)  # fmt: skip

# Four ranks: 8 rows here, 32 gathered; and 32 rows here of which 8 stay.
COLLECTIVE = (
    row("symm_mem::fused_all_gather_matmul", A=T(8, 64), Bs=[T(64, 16), T(64, 24)], gather_dim=0, group_name="0",
        gives=(T(32, 64), [T(32, 16), T(32, 24)]), flops=2 * 32 * 64 * (16 + 24),
        moved=4 * (8 * 64 + 64 * 40 + 32 * 64 + 32 * 40)),
    row("symm_mem::fused_all_gather_scaled_matmul", A=T(8, 64, dtype=FP8),
        Bs=[T(64, 16, dtype=FP8), T(64, 24, dtype=FP8)], A_scale=T(8, 1), B_scales=[T(1, 16), T(1, 24)], gather_dim=0,
        group_name="0", gives=(T(32, 64, dtype=FP8), [T(32, 16, dtype=BF16), T(32, 24, dtype=BF16)]),
        flops=2 * 32 * 64 * (16 + 24), moved=8 * 64 + 64 * 40 + 4 * (8 + 40) + 32 * 64 + 2 * 32 * 40),
    row("symm_mem::fused_matmul_reduce_scatter", A=T(32, 16), B=T(16, 64), reduce_op="sum", scatter_dim=0,
        group_name="0", gives=T(8, 64), flops=2 * 32 * 16 * 64, moved=4 * (32 * 16 + 16 * 64 + 8 * 64)),
    row("symm_mem::fused_scaled_matmul_reduce_scatter", A=T(2, 16, 16, dtype=FP8), B=T(16, 64, dtype=FP8),
        A_scale=T(2, 16, 1), B_scale=T(1, 64), reduce_op="sum", orig_scatter_dim=1, scatter_dim_after_maybe_reshape=1,
        group_name="0", gives=T(2, 4, 64, dtype=BF16), flops=2 * (2 * 16) * 16 * 64,
        moved=512 + 1024 + 4 * (32 + 64) + 2 * 512),
)  # fmt: skip

# nn.Bilinear(3, 4, 5) on 7 rows, dimensions (rows, out, in1, in2): x1 with the weight, the result with x2.
BILINEAR = (
    row("aten::_trilinear", i1=T(7, 3), i2=T(5, 3, 4), i3=T(7, 4), expand1=[1, 3], expand2=[0], expand3=[1, 2],
        sumdim=[2, 3], gives=T(7, 5), flops=2 * 7 * 5 * 3 * 4 + 2 * 7 * 5 * 4, moved=4 * (21 + 60 + 28 + 35)),
)  # fmt: skip

SCALES = 2 * 4  # two fp32 numbers
LOW_PRECISION = (
    row("aten::_int_mm", self=T(17, 16, dtype=I8), mat2=T(16, 24, dtype=I8), gives=T(17, 24, dtype=I32),
        flops=2 * 17 * 16 * 24, precision="int8", moved=17 * 16 + 16 * 24 + 4 * 17 * 24),
    row("aten::_scaled_mm", self=T(48, 80, dtype=FP8), mat2=T(80, 112, dtype=FP8), scale_a=scalar(),
        scale_b=scalar(), gives=T(48, 112, dtype=BF16), flops=2 * 48 * 80 * 112,
        moved=48 * 80 + 80 * 112 + SCALES + 2 * 48 * 112),
    row("aten::_scaled_mm_v2", self=T(48, 80, dtype=FP8), mat2=T(80, 112, dtype=FP8), scale_a=[scalar()],
        scale_b=[scalar()], gives=T(48, 112, dtype=BF16), flops=2 * 48 * 80 * 112,
        moved=48 * 80 + 80 * 112 + SCALES + 2 * 48 * 112),
    row("aten::_scaled_addmm", self=T(48, 112), mat1=T(48, 80, dtype=FP8), mat2=T(80, 112, dtype=FP8),
        scale_a=scalar(), scale_b=scalar(), gives=T(48, 112), flops=2 * 48 * 80 * 112,
        moved=4 * 48 * 112 + 48 * 80 + 80 * 112 + SCALES + 4 * 48 * 112),
    row("aten::_grouped_mm", self=T(512, 64, dtype=BF16), mat2=T(4, 64, 128, dtype=BF16),
        offs=torch.tensor([100, 130, 300, 512], dtype=I32), gives=T(512, 128, dtype=BF16), flops=2 * 512 * 64 * 128,
        moved=2 * (512 * 64 + 4 * 64 * 128 + 512 * 128) + 4 * 4),
    row("aten::_grouped_mm", label="rows of no expert", self=T(512, 64, dtype=BF16), mat2=T(4, 64, 128, dtype=BF16),
        offs=torch.tensor([100, 130, 300, 401], dtype=I32), gives=T(512, 128, dtype=BF16), flops=2 * 401 * 64 * 128,
        moved=2 * (512 * 64 + 4 * 64 * 128 + 512 * 128) + 4 * 4),
    row("aten::_grouped_mm", label="K in uneven parts", self=T(16, 512, dtype=BF16), mat2=T(512, 32, dtype=BF16),
        offs=torch.tensor([5, 448], dtype=I32), gives=T(2, 16, 32, dtype=BF16), flops=2 * 16 * 448 * 32,
        moved=2 * (16 * 512 + 512 * 32 + 2 * 16 * 32) + 2 * 4),
    row("aten::_scaled_grouped_mm", self=T(512, 64, dtype=FP8), mat2=T(4, 64, 128, dtype=FP8), scale_a=T(512),
        scale_b=T(4, 128), offs=torch.tensor([100, 130, 300, 512], dtype=I32), gives=T(512, 128, dtype=BF16),
        flops=2 * 512 * 64 * 128, moved=512 * 64 + 4 * 64 * 128 + 4 * (512 + 512 + 4) + 2 * 512 * 128),
    row("aten::_scaled_grouped_mm_v2", label="columns in uneven parts", self=T(4, 16, 64, dtype=FP8),
        mat2=T(64, 512, dtype=FP8), scale_a=[T(4, 16)], scale_b=[T(512)],
        offs=torch.tensor([7, 130, 300, 480], dtype=I32), gives=T(16, 512, dtype=BF16), flops=2 * 16 * 64 * 480,
        moved=4 * 16 * 64 + 64 * 512 + 4 * (64 + 512 + 4) + 2 * 16 * 512),
    row("transformers::grouped_mm_fallback", schema="(Tensor input, Tensor weight, Tensor offs) -> Tensor",
        input=T(512, 64), weight=T(4, 64, 128), offs=torch.tensor([100, 130, 300, 512]), gives=T(512, 128),
        flops=2 * 512 * 64 * 128, moved=4 * (512 * 64 + 4 * 64 * 128 + 512 * 128) + 4 * 8),
    row("transformers::grouped_mm_fallback_backward",
        schema="(Tensor grad_output, Tensor input, Tensor weight, Tensor offs) -> (Tensor, Tensor)",
        grad_output=T(512, 128), input=T(512, 64), weight=T(4, 64, 128), offs=torch.tensor([100, 130, 300, 512]),
        gives=(T(512, 64), T(4, 64, 128)), flops=2 * 2 * 512 * 64 * 128,
        moved=4 * (512 * 128 + 2 * (512 * 64 + 4 * 64 * 128)) + 4 * 8),
)  # fmt: skip

if FP4 is not None:  # two values an element along K
    LOW_PRECISION += tuple(
        row(name, label="fp4", self=T(48, 40, dtype=FP4), mat2=T(40, 112, dtype=FP4), scale_a=scale(),
            scale_b=scale(), gives=T(48, 112, dtype=BF16), flops=2 * 48 * 80 * 112, precision="fp4",
            moved=48 * 40 + 40 * 112 + SCALES + 2 * 48 * 112)
        for name, scale in (("aten::_scaled_mm", scalar), ("aten::_scaled_mm_v2", lambda: [scalar()]))
    )  # fmt: skip

# Activations (3, 64) by a packed weight of 128 columns: it is unpacked on the fly.
FLOPS = 2 * 3 * 64 * 128
SCALE_ZERO = 2 * 128 * 2 * 2  # two groups of 32 along K, a scale and a zero of bf16 for each column
PACKED = (
    row("aten::_weight_int8pack_mm", self=T(3, 64, dtype=BF16), mat2=T(128, 64, dtype=I8), scales=T(128, dtype=BF16),
        gives=T(3, 128, dtype=BF16), flops=FLOPS, moved=2 * 3 * 64 + 128 * 64 + 2 * 128 + 2 * 3 * 128),
    row("aten::_weight_int4pack_mm", self=T(3, 64, dtype=BF16), mat2=T(16, 2, 32, 1, dtype=I32), qGroupSize=32,
        qScaleAndZeros=T(2, 128, 2, dtype=BF16), gives=T(3, 128, dtype=BF16), flops=FLOPS,
        moved=2 * 3 * 64 + 64 * 128 // 2 + SCALE_ZERO + 2 * 3 * 128),
    row("aten::_weight_int4pack_mm_for_cpu", self=T(3, 64, dtype=BF16), mat2=T(128, 32, dtype=U8), qGroupSize=32,
        qScaleAndZeros=T(2, 128, 2, dtype=BF16), gives=T(3, 128, dtype=BF16), flops=FLOPS,
        moved=2 * 3 * 64 + 64 * 128 // 2 + SCALE_ZERO + 2 * 3 * 128),
    row("aten::_weight_int4pack_mm_with_scales_and_zeros", self=T(3, 64, dtype=BF16), mat2=T(128, 32, dtype=U8),
        qGroupSize=32, qScale=T(2, 128, dtype=BF16), qZeros=T(2, 128, dtype=BF16), gives=T(3, 128, dtype=BF16),
        flops=FLOPS, moved=2 * 3 * 64 + 64 * 128 // 2 + SCALE_ZERO + 2 * 3 * 128),
    row("quantized::int4mm_packed_weight_cpu", self=T(3, 64, dtype=BF16), mat2=T(128, 32, dtype=U8),
        qGroupSize=T(1, dtype=I64), qScaleAndZeros=T(2, 128, 2, dtype=BF16), gives=T(3, 128, dtype=BF16), flops=FLOPS,
        moved=2 * 3 * 64 + 64 * 128 // 2 + 8 + SCALE_ZERO + 2 * 3 * 128),
    row("aten::_dyn_quant_matmul_4bit", inp=T(3, 64), packed_weights=T(4096 + 512, dtype=U8), block_size=64,
        in_features=64, out_features=128, gives=T(3, 128), flops=FLOPS, precision="int8",
        moved=4 * 3 * 64 + 4096 + 512 + 4 * 3 * 128),
    row("aten::_mixed_dtypes_linear", input=T(3, 64, dtype=HALF), weight=T(64, 128, dtype=I8),
        scale=T(128, dtype=HALF), gives=T(3, 128, dtype=HALF), flops=FLOPS,
        moved=2 * 3 * 64 + 64 * 128 + 2 * 128 + 2 * 3 * 128),
    row("bitsandbytes::int8_linear_matmul", A=T(3, 64, dtype=I8), B=T(128, 64, dtype=I8), gives=T(3, 128, dtype=I32),
        flops=FLOPS, precision="int8", moved=3 * 64 + 128 * 64 + 4 * 3 * 128),
    row("bitsandbytes::int8_scaled_mm", A=T(3, 64, dtype=I8), B=T(128, 64, dtype=I8), row_stats=T(3), col_stats=T(128),
        gives=T(3, 128, dtype=HALF), flops=FLOPS, precision="int8",
        moved=3 * 64 + 128 * 64 + 4 * (3 + 128) + 2 * 3 * 128),
    row("bitsandbytes::int8_mixed_scaled_mm", A=T(3, 64, dtype=HALF), CA=T(3, 64, dtype=I8), CB=T(128, 64, dtype=I8),
        SCA=T(3), SCB=T(128), gives=(T(3, 128, dtype=HALF), None), flops=FLOPS,
        moved=2 * 3 * 64 + 3 * 64 + 128 * 64 + 4 * (3 + 128) + 2 * 3 * 128),
    row("bitsandbytes::gemv_4bit", A=T(1, 64, dtype=HALF), B=T(64 * 128 // 2, 1, dtype=U8), shapeB=[128, 64],
        absmax=T(128), code=T(16), gives=T(1, 128, dtype=HALF), flops=2 * 64 * 128,
        moved=2 * 64 + 64 * 128 // 2 + 4 * (128 + 16) + 2 * 128),
    row("bitsandbytes::gemm_4bit", A=T(3, 64, dtype=HALF), B=T(64 * 128 // 2, 1, dtype=U8), shapeB=[128, 64],
        absmax=T(128), code=T(16), gives=T(3, 128, dtype=HALF), flops=FLOPS,
        moved=2 * 3 * 64 + 64 * 128 // 2 + 4 * (128 + 16) + 2 * 3 * 128),
)  # fmt: skip

ONEDNN = {"w_scale": T(7), "w_zero_point": T(7, dtype=I32), "bias": T(7)}
PREPACKED = (
    row("mkldnn::_linear_pointwise", X=T(2, 3, 5), W=T(7, 5), B=T(7), gives=T(2, 3, 7), flops=2 * ONE,
        moved=4 * (30 + 35 + 7 + 42)),
    row("mkldnn::_linear_pointwise", overload="binary", X=T(2, 3, 5), other=T(2, 3, 7), W=T(7, 5), B=T(7),
        gives=T(2, 3, 7), flops=2 * ONE, moved=4 * (30 + 42 + 35 + 7 + 42)),
    row("mkl::_mkl_linear", X=T(3, 5), MKL_W=T(35), ORI_W=T(7, 5), B=T(7), batch_size=3, gives=T(3, 7), flops=ONE,
        moved=4 * (15 + 35 + 7 + 21)),  # of the weight and its packed copy one is read
    row("quantized::linear_dynamic_fp16_unpacked_weight", X=T(3, 5), weight=T(7, 5), bias=T(7), gives=T(3, 7),
        flops=ONE, moved=4 * (15 + 35 + 7 + 21)),
    *(
        row(f"quantized::{name}", X=T(3, 5), W_prepack=PackedWeight(7, 5), gives=T(3, 7), flops=ONE,
            moved=4 * (15 + 21))
        for name in ("linear_dynamic_fp16", "linear_relu_dynamic_fp16")
    ),
    *(
        row(f"onednn::{name}", x=T(3, 5), w=T(5, 7, dtype=HALF), bias=T(7), gives=T(3, 7), flops=ONE,
            moved=4 * (15 + 7 + 21) + 2 * 35)
        for name in ("linear_dynamic_fp16", "linear_relu_dynamic_fp16")
    ),
    *(
        row(name, X=T(2, 3, 5, dtype=U8), W_prepack=PackedWeight(7, 5), gives=T(2, 3, 7, dtype=U8), flops=2 * ONE,
            precision="int8", moved=30 + 42)
        for name in ("quantized::linear", "quantized::linear_relu", "quantized::linear_leaky_relu",
                     "quantized::linear_tanh", "_quantized::linear")
    ),
    *(
        row(name, X=T(3, 5), W_prepack=PackedWeight(7, 5), gives=T(3, 7), flops=ONE, precision="int8",
            moved=4 * (15 + 21))
        for name in ("quantized::linear_dynamic", "quantized::linear_relu_dynamic", "_quantized::linear_dynamic",
                     "quantized::linear_with_input_q_dq_qweight_dq_output_fp32",
                     "quantized::linear_with_input_q_dq_qweight_dq_relu_output_fp32")
    ),
    row("onednn::qlinear_pointwise", qx=T(3, 5, dtype=U8), qw=T(7, 5, dtype=I8), **ONEDNN, gives=T(3, 7, dtype=U8),
        flops=ONE, precision="int8", moved=15 + 35 + 4 * 3 * 7 + 21),
    row("onednn::qlinear_pointwise", overload="binary", qx=T(3, 5, dtype=U8), qw=T(7, 5, dtype=I8), **ONEDNN,
        other=T(3, 7, dtype=U8), gives=T(3, 7, dtype=U8), flops=ONE, precision="int8",
        moved=15 + 35 + 4 * 3 * 7 + 21 + 21),
    row("quantized::matmul", qa=T(4, 3, 5, dtype=U8), qb=T(4, 5, 7, dtype=U8), gives=T(4, 3, 7, dtype=U8),
        flops=4 * ONE, precision="int8", moved=4 * (READ + WRITTEN)),
)  # fmt: skip

# A (32, 64) matrix of which 2:4 sparsity keeps (32, 32), with 4 bits of position for each group of four.
KEPT = 2 * 32 * 32 * 10
SPARSE = (
    row("aten::_sparse_semi_structured_linear", input=T(10, 64, dtype=HALF), weight=T(32, 32, dtype=HALF),
        meta=T(32, 4, dtype=torch.int16), gives=T(10, 32, dtype=HALF), flops=KEPT,
        moved=2 * (10 * 64 + 32 * 32 + 32 * 4 + 10 * 32)),
    row("aten::_sparse_semi_structured_mm", mat1=T(32, 32, dtype=HALF), mat1_meta=T(32, 4, dtype=torch.int16),
        mat2=T(64, 10, dtype=HALF), gives=T(32, 10, dtype=HALF), flops=KEPT,
        moved=2 * (32 * 32 + 32 * 4 + 64 * 10 + 32 * 10)),
    row("aten::_sparse_semi_structured_addmm", input=T(32, dtype=HALF), mat1=T(32, 32, dtype=HALF),
        mat1_meta=T(32, 4, dtype=torch.int16), mat2=T(64, 10, dtype=HALF), gives=T(32, 10, dtype=HALF), flops=KEPT,
        moved=2 * (32 + 32 * 32 + 32 * 4 + 64 * 10 + 32 * 10)),
    *(
        row("aten::_cslt_sparse_mm", label=label, compressed_A=T(32 * 32 + 32 * 4, dtype=HALF),
            dense_B=T(64, 10, dtype=HALF), transpose_result=label != "", gives=T(*shape, dtype=HALF), flops=KEPT,
            moved=2 * (32 * 32 + 32 * 4 + 64 * 10 + 32 * 10))
        for label, shape in (("", (32, 10)), ("transposed", (10, 32)))
    ),
    row("aten::hspmm", mat1=eye("coo"), mat2=T(6, 5),
        gives=torch.ones(6, 5).to_sparse(1), flops=2 * 6 * 5,
        moved=EYE_COO + 4 * 30 + (4 * 30 + 8 * 6)),
    row("aten::sparse_sampled_addmm", self=eye(), mat1=T(6, 5), mat2=T(5, 6), gives=eye(), flops=2 * 6 * 5,
        moved=EYE_CSR + 4 * 60 + EYE_CSR),
    row("aten::_sparse_mm_reduce_impl", self=eye(), other=T(6, 5), reduce="sum", gives=(T(6, 5), T(0, dtype=I64)),
        flops=2 * 6 * 5, moved=EYE_CSR + 4 * 60),
    *(
        row("aten::_sparse_mm_reduce_impl_backward", label=str(mask), self=eye(), grad_out=T(6, 5), weight=T(6, 5),
            reduce="sum", arg_out=T(0, dtype=I64), output_mask=mask, gives=gives, flops=sum(mask) * 2 * 6 * 5,
            moved=EYE_CSR + 4 * 60 + written)
        for mask, gives, written in (([True, True], (eye(), T(6, 5)), EYE_CSR + 4 * 30),
                                     ([False, True], (None, T(6, 5)), 4 * 30))
    ),
)  # fmt: skip


def distances(rows: int, columns: int, *, p: float = 2.0, mode: int | None = None, flops: int) -> Row:
    """``cdist`` of (rows, 4) and (columns, 4): by a product it has the two norms as two more columns."""
    return row("aten::_cdist_forward", label=f"{rows}x{columns} p={p} mode={mode}", x1=T(rows, 4), x2=T(columns, 4),
               p=p, compute_mode=mode, gives=T(rows, columns), flops=flops,
               moved=4 * (4 * rows + 4 * columns + rows * columns))  # fmt: skip


DISTANCES = (
    distances(30, 40, flops=2 * 30 * 40 * (4 + 2)),
    distances(30, 40, mode=0, flops=2 * 30 * 40 * (4 + 2)),
    distances(26, 3, flops=2 * 26 * 3 * (4 + 2)),
    distances(3, 26, flops=2 * 26 * 3 * (4 + 2)),
    distances(25, 25, flops=0),  # a product from more than 25 rows on
    distances(3, 5, mode=1, flops=2 * 3 * 5 * (4 + 2)),
    distances(30, 40, mode=2, flops=0),
    distances(30, 40, p=1.0, flops=0),
    row("aten::_euclidean_dist", x1=T(3, 4), x2=T(5, 4), gives=T(3, 5), flops=2 * 3 * 5 * (4 + 2),
        moved=4 * (12 + 20 + 15)),
    row("aten::affine_grid_generator", theta=T(2, 2, 3), size=[2, 3, 4, 5], align_corners=False, gives=T(2, 4, 5, 2),
        flops=2 * (2 * 4 * 5 * 2) * 3, moved=4 * (12 + 80)),
    row("aten::affine_grid_generator", label="volumes", theta=T(2, 3, 4), size=[2, 3, 4, 5, 6], align_corners=False,
        gives=T(2, 4, 5, 6, 3), flops=2 * (2 * 4 * 5 * 6 * 3) * 4, moved=4 * (24 + 720)),
    row("aten::cudnn_affine_grid_generator", theta=T(2, 2, 3), N=2, C=3, H=4, W=5, gives=T(2, 4, 5, 2),
        flops=2 * (2 * 4 * 5 * 2) * 3, moved=4 * (12 + 80)),
    row("aten::cudnn_affine_grid_generator_backward", grad=T(2, 4, 5, 2), N=2, C=3, H=4, W=5, gives=T(2, 2, 3),
        flops=2 * (2 * 4 * 5 * 2) * 3, moved=4 * (80 + 12)),
)  # fmt: skip

ROWS = (*DENSE, *GRADIENTS, *COLLECTIVE, *BILINEAR, *LOW_PRECISION, *PACKED, *PREPACKED, *SPARSE, *DISTANCES)

"""Rows of convolutions of every backend, in one to three dimensions, forward and backward, plain and quantised.

Taps of 3 in each dimension with a padding of 1 keep the size: 8 channels become 16. The transposed ones take 4 channels
to 6 with taps of 4, a stride of 2 and a padding of 1.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .row import PackedWeight, Row, T, row

I8, U8, I32 = torch.int8, torch.uint8, torch.int32

SPATIAL = {1: (10,), 2: (10, 10), 3: (4, 5, 6)}
POINTS = {1: 10, 2: 100, 3: 120}
TAPS = {1: 3, 2: 9, 3: 27}


def x(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return T(2, 8, *SPATIAL[rank], dtype=dtype)


def y(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return T(2, 16, *SPATIAL[rank], dtype=dtype)


def w(rank: int, per_group: int) -> torch.Tensor:
    return T(16, per_group, *(3,) * rank)


def flops(rank: int, per_group: int) -> int:
    """Each of 2 x 16 x points outputs is a sum over the taps and one group's input channels."""
    return 2 * (2 * 16 * POINTS[rank]) * (per_group * TAPS[rank])


def read(rank: int, per_group: int) -> int:
    return 2 * 8 * POINTS[rank] + 16 * per_group * TAPS[rank]


def written(rank: int) -> int:
    return 2 * 16 * POINTS[rank]


def forward(name: str, rank: int, per_group: int, *, input_name: str = "self", bias: bool = True, **more: Any) -> Row:
    extra = {"bias": T(16)} if bias else {}
    extra |= more
    moved = read(rank, per_group) + written(rank) + 16 * bias + (written(rank) if "z" in more else 0)
    return row(name, label=f"{rank}d, {8 // per_group} groups", **{input_name: x(rank)}, weight=w(rank, per_group),
               **extra, gives=y(rank), flops=flops(rank, per_group), moved=4 * moved)  # fmt: skip


PLAIN = {"stride": [1], "padding": [1], "dilation": [1], "transposed": False, "output_padding": [0]}
FORWARDS = (
    *(
        forward(name, rank, 8 // groups, input_name="input", **PLAIN, groups=groups)
        for name in ("aten::convolution", "aten::_convolution", "aten::convolution_overrideable")
        for rank in (1, 2, 3)
        for groups in (1, 2)
    ),
    *(
        forward(f"aten::{name}", rank, 4, groups=2)
        for name in ("miopen_convolution", "mkldnn_convolution", "_mps_convolution", "cudnn_convolution_relu",
                     "miopen_convolution_relu")
        for rank in (1, 2, 3)
    ),
    *(forward("aten::cudnn_convolution", rank, 4, bias=False, groups=2) for rank in (1, 2, 3)),
    *(forward(f"aten::{name}", 2, 4, z=y(2), groups=2)
      for name in ("cudnn_convolution_add_relu", "miopen_convolution_add_relu")),
    forward("aten::miopen_depthwise_convolution", 2, 1, groups=8),
    forward("aten::_conv_depthwise2d", 2, 1),
    forward("aten::conv_depthwise3d", 3, 1),
    forward("aten::slow_conv3d_forward", 3, 8),
    forward("aten::slow_conv_dilated2d", 2, 8),
    forward("aten::slow_conv_dilated3d", 3, 8),
    forward("aten::_nnpack_spatial_convolution", 2, 8, input_name="input"),
    forward("aten::_slow_conv2d_forward", 2, 8),
    # the same with its weight flattened
    row("aten::_slow_conv2d_forward", label="flat", self=x(2), weight=T(16, 8 * 9), gives=y(2), flops=flops(2, 8),
        moved=4 * (read(2, 8) + written(2))),
    row("aten::convolution", label="complex", input=T(1, 2, 6, dtype=torch.complex64),
        weight=T(3, 2, 3, dtype=torch.complex64), **PLAIN, groups=1, gives=T(1, 3, 4, dtype=torch.complex64),
        flops=4 * 2 * (3 * 4) * (2 * 3), moved=8 * (12 + 18 + 12)),
    # time x batch x channel
    row("aten::conv_tbc", self=T(10, 2, 8), weight=T(3, 8, 16), bias=T(16), pad=1, gives=T(10, 2, 16),
        flops=2 * (10 * 2 * 16) * (8 * 3), moved=4 * (160 + 384 + 16 + 320)),
)  # fmt: skip

# Each of 2 x 4 x points inputs is spread over the taps and one group's output channels.
T_SPATIAL = {1: ((8,), (16,)), 2: ((8, 8), (16, 16)), 3: ((3, 4, 5), (6, 8, 10))}
T_POINTS = {1: (8, 16), 2: (64, 256), 3: (60, 480)}


def t_flops(rank: int, per_group: int) -> int:
    return 2 * (2 * 4 * T_POINTS[rank][0]) * (per_group * 4**rank)


def t_moved(rank: int, per_group: int) -> int:
    return 2 * 4 * T_POINTS[rank][0] + 4 * per_group * 4**rank + 2 * 6 * T_POINTS[rank][1]


def t_operands(rank: int, per_group: int, input_name: str = "self") -> dict[str, Any]:
    before, after = T_SPATIAL[rank]
    return {
        input_name: T(2, 4, *before),
        "weight": T(4, per_group, *(4,) * rank),
        "gives": T(2, 6, *after),
        "label": f"transposed {rank}d, {6 // per_group} groups",
        "flops": t_flops(rank, per_group),
    }


TRANSPOSED = (
    *(
        row(name, **t_operands(rank, 6 // groups, "input"), **{**PLAIN, "transposed": True, "stride": [2]},
            groups=groups, moved=4 * t_moved(rank, 6 // groups))
        for name in ("aten::convolution", "aten::_convolution", "aten::convolution_overrideable")
        for rank in (1, 2, 3)
        for groups in (1, 2)
    ),
    *(
        row(f"aten::{name}", **t_operands(rank, 3), groups=2, moved=4 * t_moved(rank, 3))
        for name in ("cudnn_convolution_transpose", "miopen_convolution_transpose", "_mps_convolution_transpose")
        for rank in (1, 2, 3)
    ),
    row("aten::slow_conv_transpose2d", **t_operands(2, 6), bias=T(6), moved=4 * (t_moved(2, 6) + 6)),
    row("aten::slow_conv_transpose3d", **t_operands(3, 6), bias=T(6), moved=4 * (t_moved(3, 6) + 6)),
)  # fmt: skip

FUSED = (
    row("mkldnn::_convolution_pointwise", X=x(2), W=w(2, 4), B=T(16), groups=2, gives=y(2), flops=flops(2, 4),
        moved=4 * (read(2, 4) + 16 + written(2))),
    row("mkldnn::_convolution_pointwise", overload="binary", X=x(2), other=y(2), W=w(2, 4), B=T(16), groups=2,
        gives=y(2), flops=flops(2, 4), moved=4 * (read(2, 4) + 16 + 2 * written(2))),
    row("mkldnn::_convolution_pointwise_", overload="binary", other=(accumulated := y(2)), X=x(2), W=w(2, 4), B=T(16),
        groups=2, gives=accumulated, flops=flops(2, 4), moved=4 * (read(2, 4) + 16 + 2 * written(2))),
    # prepacked, its channels swapped: (C_out / groups, C_in)
    row("mkldnn::_convolution_transpose_pointwise", X=T(2, 4, 8, 8), W=T(3, 4, 4, 4), B=T(6), groups=2,
        gives=T(2, 6, 16, 16), flops=t_flops(2, 3), moved=4 * (t_moved(2, 3) + 6)),
    row("torchvision::deform_conv2d", input=x(2), weight=w(2, 8), offset=T(2, 18, 10, 10), mask=T(2, 9, 10, 10),
        bias=T(16), gives=y(2), flops=flops(2, 8), moved=4 * (read(2, 8) + 3600 + 1800 + 16 + written(2))),
    row("torchvision::_deform_conv2d_backward", grad=y(2), input=x(2), weight=w(2, 8), offset=T(2, 18, 10, 10),
        mask=T(2, 9, 10, 10), bias=T(16),
        gives=(x(2), w(2, 8), T(2, 18, 10, 10), T(2, 9, 10, 10), T(16)), flops=2 * flops(2, 8),
        moved=4 * (written(2) + 2 * (read(2, 8) + 3600 + 1800 + 16))),
)  # fmt: skip

# --- gradients: of the input, the weight and the bias, which costs no product -----------------------------------------

MASKS = ([True, True, True], [True, False, False], [False, True, False], [False, True, True], [False, False, True])


def backward(name: str, rank: int, per_group: int, mask: list[bool], *, input_name: str = "input", **more: Any) -> Row:
    results = (x(rank), w(rank, per_group), T(16))
    sizes = (2 * 8 * POINTS[rank], 16 * per_group * TAPS[rank], 16)
    kept = tuple(result if wanted else None for result, wanted in zip(results, mask, strict=True))
    asked = sum(size for size, wanted in zip(sizes, mask, strict=True) if wanted)
    return row(name, label=f"{rank}d, {8 // per_group} groups, {mask}", grad_output=y(rank), **{input_name: x(rank)},
               weight=w(rank, per_group), **more, output_mask=mask, gives=kept,
               flops=(mask[0] + mask[1]) * flops(rank, per_group),
               moved=4 * (written(rank) + read(rank, per_group) + asked))  # fmt: skip


def t_backward(name: str, rank: int, per_group: int, mask: list[bool], input_name: str, **more: Any) -> Row:
    operands = t_operands(rank, per_group, input_name)
    grad, given = operands.pop("gives"), operands.pop("label")
    before = T_SPATIAL[rank][0]
    results = (T(2, 4, *before), T(4, per_group, *(4,) * rank), T(6))
    kept = tuple(result if wanted else None for result, wanted in zip(results, mask, strict=False))
    asked = sum(result.numel() for result in kept if result is not None)
    operands["flops"] = (mask[0] + mask[1]) * t_flops(rank, per_group)
    return row(name, label=f"{given}, {mask}", **operands, grad_output=grad, **more, output_mask=mask, gives=kept,
               moved=4 * (t_moved(rank, per_group) + asked))  # fmt: skip


BACKWARDS = (
    *(
        backward(name, rank, 8 // groups, mask, **PLAIN, groups=groups)
        for name in ("aten::convolution_backward", "aten::convolution_backward_overrideable")
        for rank, groups in ((1, 2), (2, 1), (2, 2), (3, 2))
        for mask in MASKS
    ),
    *(
        t_backward(name, rank, 3, mask, "input", **{**PLAIN, "transposed": True}, groups=2)
        for name in ("aten::convolution_backward", "aten::convolution_backward_overrideable")
        for rank in (1, 2, 3)
        for mask in MASKS[:3]
    ),
    *(backward("aten::_slow_conv2d_backward", 2, 8, mask, input_name="self", overload="output_mask") for mask in MASKS),
    *(backward("aten::mps_convolution_backward", rank, 4, mask, input_name="self", groups=2)
      for rank in (1, 2, 3) for mask in MASKS),
    *(t_backward("aten::mps_convolution_transpose_backward", 2, 3, mask[:2], "self", groups=2) for mask in MASKS[:4]),
    row("aten::_slow_conv2d_backward", overload="grad_input", grad_output=y(2), self=x(2), weight=w(2, 8),
        grad_input=(grads := (x(2), w(2, 8), T(16)))[0], grad_weight=grads[1], grad_bias=grads[2], gives=grads,
        flops=2 * flops(2, 8), moved=4 * (written(2) + 2 * read(2, 8) + 16)),
)  # fmt: skip

# --- quantised: 8 bits in and out, the weight in an object ------------------------------------------------------------


def packed(rank: int) -> PackedWeight:
    """One dimension is packed as two, with a height of 1."""
    return PackedWeight(16, 4, *((1, 3) if rank == 1 else (3,) * rank))


def quantised(name: str, rank: int, argument: str = "packed_weight", **more: Any) -> Row:
    accumulated = written(rank) if "qaccum" in more else 0
    return row(name, qx=x(rank, U8), **{argument: packed(rank)}, **more, gives=y(rank, U8), flops=flops(rank, 4),
               precision="int8", moved=2 * 8 * POINTS[rank] + written(rank) + accumulated)  # fmt: skip


def t_quantised(name: str, rank: int) -> Row:
    before, after = T_SPATIAL[rank]
    weight = PackedWeight(4, 3, *((1, 4) if rank == 1 else (4,) * rank))
    return row(name, qx=T(2, 4, *before, dtype=U8), packed_weight=weight, gives=T(2, 6, *after, dtype=U8),
               flops=t_flops(rank, 3), precision="int8",
               moved=2 * 4 * T_POINTS[rank][0] + 2 * 6 * T_POINTS[rank][1])  # fmt: skip


def onednn(name: str, rank: int, shape: tuple[int, ...], **more: Any) -> Row:
    return row(name, label=str(shape), qx=x(rank, U8), qw=T(*shape, dtype=I8), w_scale=T(16),
               w_zero_point=T(16, dtype=I32), bias=T(16), **more, gives=y(rank, U8), flops=flops(rank, 4),
               precision="int8",
               moved=2 * 8 * POINTS[rank] + math.prod(shape) + 3 * 4 * 16 + written(rank))  # fmt: skip


QUANTISED: tuple[Row, ...] = (
    *(quantised(f"quantized::conv1d{suffix}", 1) for suffix in ("", "_relu", "_dynamic")),
    *(quantised(f"quantized::conv{rank}d{suffix}", rank, "weight") for rank in (2, 3) for suffix in ("", "_relu")),
    *(
        quantised(f"quantized::conv{rank}d{suffix}", rank, overload="new")
        for rank in (2, 3)
        for suffix in ("", "_relu")
    ),
    *(quantised(f"quantized::conv{rank}d_dynamic", rank) for rank in (2, 3)),
    *(quantised(f"_quantized::conv{rank}d{suffix}", rank) for rank in (2, 3) for suffix in ("", "_relu")),
    *(quantised(f"quantized::conv2d_add{suffix}", 2, qaccum=y(2, U8)) for suffix in ("", "_relu")),
    *(
        t_quantised(f"quantized::conv_transpose{rank}d{suffix}", rank)
        for rank in (1, 2, 3)
        for suffix in ("", "_dynamic")
    ),
    *(t_quantised(f"_quantized::conv_transpose{rank}d", rank) for rank in (1, 2)),
    onednn("onednn::qconv_pointwise", 2, (16, 4, 3, 3), groups=2),
    onednn("onednn::qconv_pointwise", 2, (2, 8, 4, 3, 3), groups=2),  # prepacked by groups
    onednn("onednn::qconv1d_pointwise", 1, (16, 4, 3), groups=2),
    onednn("onednn::qconv1d_pointwise", 1, (2, 8, 4, 3), groups=2),
    onednn("onednn::qconv2d_pointwise", 2, (16, 4, 3, 3), groups=2),
    onednn("onednn::qconv2d_pointwise", 2, (2, 8, 4, 3, 3), groups=2),
    onednn("onednn::qconv3d_pointwise", 3, (16, 4, 3, 3, 3), groups=2),
)  # fmt: skip

ROWS = (*FORWARDS, *TRANSPOSED, *FUSED, *BACKWARDS, *QUANTISED)

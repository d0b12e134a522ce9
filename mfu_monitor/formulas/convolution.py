"""Convolutions: forward, backward, grouped, depthwise, dilated, transposed, quantised, in one to three dimensions.

A convolution is a sum over the kernel's taps and one group's input channels for every output element; stride, padding
and dilation only decide how many output elements there are. Taps that fall on padding count, as the field counts them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mfu_monitor.formulas.cost import OpCost, OperatorCall
from mfu_monitor.formulas.matmul import COMPLEX_FACTOR
from mfu_monitor.formulas.registry import formula

__all__ = ["conv_flops", "conv_transpose_flops"]


def conv_flops(output_shape: Sequence[int], weight_shape: Sequence[int], *, is_complex: bool = False) -> int:
    """FLOPs of a forward convolution: each output element is a sum over C_in/groups channels and all taps.

    Args:
        output_shape: (N, C_out, *spatial) or without N.
        weight_shape: (C_out, C_in/groups, *kernel).

    Example:
        Conv2d(8, 16, 3, padding=1) on (2, 8, 10, 10): 2 * (2*16*10*10) * (8*3*3) = 460,800.
    """
    return 2 * math.prod(output_shape) * math.prod(weight_shape[1:]) * (COMPLEX_FACTOR if is_complex else 1)


def conv_transpose_flops(input_shape: Sequence[int], weight_shape: Sequence[int], *, is_complex: bool = False) -> int:
    """FLOPs of a transposed convolution: each input element is spread over C_out/groups channels and all taps.

    Args:
        input_shape: (N, C_in, *spatial) or without N.
        weight_shape: (C_in, C_out/groups, *kernel).

    Example:
        ConvTranspose2d(4, 6, 4, stride=2, padding=1) on (2, 4, 8, 8): 2 * (2*4*8*8) * (6*4*4) = 98,304.
    """
    return 2 * math.prod(input_shape) * math.prod(weight_shape[1:]) * (COMPLEX_FACTOR if is_complex else 1)


# --- forward ----------------------------------------------------------------------------------------------------------


@formula("aten::convolution", "aten::_convolution", "aten::convolution_overrideable")
def _convolution(call: OperatorCall) -> OpCost:
    input, weight = call["input"], call["weight"]
    return OpCost(_one_pass(input.shape, call.result.shape, weight, transposed=call["transposed"]))


@formula(
    "aten::cudnn_convolution",
    "aten::cudnn_convolution_relu",
    "aten::cudnn_convolution_add_relu",
    "aten::miopen_convolution",
    "aten::miopen_depthwise_convolution",
    "aten::miopen_convolution_relu",
    "aten::miopen_convolution_add_relu",
    "aten::mkldnn_convolution",
    "aten::_mps_convolution",
    "aten::_conv_depthwise2d",
    "aten::conv_depthwise3d",
    "aten::slow_conv3d_forward",
    "aten::slow_conv_dilated2d",
    "aten::slow_conv_dilated3d",
    "aten::_nnpack_spatial_convolution",
)
def _backend_convolution(call: OperatorCall) -> OpCost:
    weight = call["weight"]
    return OpCost(conv_flops(call.result.shape, weight.shape, is_complex=weight.dtype.is_complex))


@formula("aten::_slow_conv2d_forward")
def _slow_conv2d(call: OperatorCall) -> OpCost:
    # The weight may come flattened to (C_out, C_in*kh*kw): the elements for one output channel are the same.
    return OpCost(conv_flops(call.result.shape, call["weight"].shape))


@formula(
    "aten::cudnn_convolution_transpose",
    "aten::miopen_convolution_transpose",
    "aten::_mps_convolution_transpose",
    "aten::slow_conv_transpose2d",
    "aten::slow_conv_transpose3d",
)
def _backend_conv_transpose(call: OperatorCall) -> OpCost:
    weight = call["weight"]
    return OpCost(conv_transpose_flops(call["self"].shape, weight.shape, is_complex=weight.dtype.is_complex))


@formula("aten::conv_tbc")
def _conv_tbc(call: OperatorCall) -> OpCost:
    # Time x batch x channel with the weight (taps, C_in, C_out): a sum over taps and C_in for every output element.
    taps, C_in, _ = call["weight"].shape
    return OpCost(2 * call.result.numel() * taps * C_in)


@formula("mkldnn::_convolution_pointwise", "mkldnn::_convolution_pointwise_")
def _fused_convolution(call: OperatorCall) -> OpCost:
    return OpCost(conv_flops(call.result.shape, call["W"].shape))


@formula("mkldnn::_convolution_transpose_pointwise")
def _fused_conv_transpose(call: OperatorCall) -> OpCost:
    # A prepacked weight may have its two channel dimensions swapped; the output's channels cannot be mistaken.
    input, weight, C_out = call["X"], call["W"], call.result.shape[-weight_spatial_rank(call["W"]) - 1]
    return OpCost(conv_transpose_flops(input.shape, (1, C_out // call["groups"], *weight.shape[2:])))


def weight_spatial_rank(weight: Any) -> int:
    """1, 2 or 3: how many dimensions the kernel has beside its two of channels."""
    return len(weight.shape) - 2


# --- backward ---------------------------------------------------------------------------------------------------------


@formula("aten::convolution_backward", "aten::convolution_backward_overrideable")
def _convolution_backward(call: OperatorCall) -> OpCost:
    # grad_input is the adjoint convolution with the same weight, grad_weight correlates input and grad_output: both
    # multiply the same (input element, tap, output element) triples as the forward. The bias gradient is a sum: 0.
    forward = _one_pass(call["input"].shape, call["grad_output"].shape, call["weight"], transposed=call["transposed"])
    return OpCost(forward * _gradients_asked(call["output_mask"]))


@formula("aten::_slow_conv2d_backward")
def _slow_conv2d_backward(call: OperatorCall) -> OpCost:
    mask = call.get("output_mask") or [call.get("grad_input") is not None, call.get("grad_weight") is not None]
    return OpCost(conv_flops(call["grad_output"].shape, call["weight"].shape) * _gradients_asked(mask))


@formula("aten::mps_convolution_backward")
def _mps_convolution_backward(call: OperatorCall) -> OpCost:
    return OpCost(conv_flops(call["grad_output"].shape, call["weight"].shape) * _gradients_asked(call["output_mask"]))


@formula("aten::mps_convolution_transpose_backward")
def _mps_conv_transpose_backward(call: OperatorCall) -> OpCost:
    forward = conv_transpose_flops(call["self"].shape, call["weight"].shape)
    return OpCost(forward * _gradients_asked(call["output_mask"]))


def _one_pass(input_shape: Sequence[int], output_shape: Sequence[int], weight: Any, *, transposed: bool) -> int:
    is_complex = weight.dtype.is_complex
    if transposed:
        return conv_transpose_flops(input_shape, weight.shape, is_complex=is_complex)
    return conv_flops(output_shape, weight.shape, is_complex=is_complex)


def _gradients_asked(output_mask: Sequence[bool]) -> int:
    """Of (grad_input, grad_weight, grad_bias) how many of the first two are wanted."""
    return sum(bool(wanted) for wanted in output_mask[:2])


# torchvision's deformable convolution is a product over sampled columns; its backward makes the columns' gradient (for
# input, offset and mask) by one product and the weight's by another.
@formula("torchvision::deform_conv2d")
def _deform_conv(call: OperatorCall) -> OpCost:
    return OpCost(conv_flops(call.result.shape, call["weight"].shape))


@formula("torchvision::_deform_conv2d_backward")
def _deform_conv_backward(call: OperatorCall) -> OpCost:
    return OpCost(2 * conv_flops(call["grad"].shape, call["weight"].shape))


# --- quantised --------------------------------------------------------------------------------------------------------


@formula(
    *(
        f"{namespace}::conv{rank}d{suffix}"
        for namespace, rank, suffix in (
            *(("quantized", rank, suffix) for rank in (1, 2, 3) for suffix in ("", "_relu", "_dynamic")),
            *(("_quantized", rank, suffix) for rank in (2, 3) for suffix in ("", "_relu")),
            ("quantized", 2, "_add"),
            ("quantized", 2, "_add_relu"),
        )
    )
)
def _quantized_convolution(call: OperatorCall) -> OpCost:
    return OpCost(conv_flops(call.result.shape, _packed_weight_shape(call)), precision="int8")


@formula(
    *(f"quantized::conv_transpose{rank}d{suffix}" for rank in (1, 2, 3) for suffix in ("", "_dynamic")),
    *(f"_quantized::conv_transpose{rank}d" for rank in (1, 2)),
)
def _quantized_conv_transpose(call: OperatorCall) -> OpCost:
    return OpCost(conv_transpose_flops(call["qx"].shape, _packed_weight_shape(call)), precision="int8")


def _packed_weight_shape(call: OperatorCall) -> Sequence[int]:
    """Shape of the packed weight; one dimension is packed with a kernel height of 1, which adds no product."""
    packed = call["packed_weight"] if "packed_weight" in call.arguments else call["weight"]
    weight, _ = packed.unpack()
    return tuple(weight.shape)


@formula("onednn::qconv_pointwise", *(f"onednn::qconv{rank}d_pointwise" for rank in (1, 2, 3)))
def _onednn_quantized_convolution(call: OperatorCall) -> OpCost:
    # Prepacked weights keep the logical (C_out, C_in/groups, *kernel), or (groups, C_out/groups, C_in/groups, *kernel).
    weight = call["qw"]
    per_output = (
        math.prod(weight.shape[1:]) if len(weight.shape) == len(call.result.shape) else math.prod(weight.shape[2:])
    )
    return OpCost(conv_flops(call.result.shape, (1, per_output)), precision="int8")

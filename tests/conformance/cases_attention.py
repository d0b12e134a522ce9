"""Rows of scaled_dot_product_attention.

``P`` attended pairs of width D: one product is 2 P D, a forward two of them, a backward four.

A fused kernel's backward runs a fifth product; a kernel skips by a causal flag and runs a mask tensor dense; the math
path runs everything dense and keeps its probabilities.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .case import Case, Workload


def sdpa(*shapes: tuple[int, ...], trained: str = "qkv", dtype: torch.dtype | None = None, **kwargs: Any) -> Workload:
    """``scaled_dot_product_attention`` on operands of the given shapes: one for all, or one each for Q, K and V."""
    each = shapes * 3 if len(shapes) == 1 else shapes
    operands = tuple(
        torch.zeros(shape, dtype=dtype, requires_grad=name in trained) for name, shape in zip("qkv", each, strict=True)
    )

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        made = {name: value() if callable(value) else value for name, value in kwargs.items()}
        attended: torch.Tensor = F.scaled_dot_product_attention(query, key, value, **made)
        return attended

    return attention, operands


def causal_mask(S: int) -> torch.Tensor:
    return torch.ones(S, S, dtype=torch.bool).tril()


def additive(mask: torch.Tensor, hidden: float) -> torch.Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, hidden)


def padding(*lengths: int, longest: int) -> torch.Tensor:
    """True where a key is real: (B, 1, 1, Sk)."""
    return (torch.arange(longest) < torch.tensor(lengths)[:, None])[:, None, None, :]


def window_mask(S: int, W: int) -> torch.Tensor:
    return torch.ones(S, S, dtype=torch.bool).tril().triu(1 - W)


def per_head_mask() -> torch.Tensor:
    """Head 0 sees everything, head 1 the causal half."""
    return torch.stack([torch.ones(16, 16, dtype=torch.bool), causal_mask(16)])[None]


def document_mask(*lengths: int) -> torch.Tensor:
    blocks: torch.Tensor = torch.block_diag(*(torch.ones(length, length) for length in lengths))
    return blocks.bool()


def math_kernel() -> Any:
    return sdpa_kernel(SDPBackend.MATH)


def flash_kernel() -> Any:
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION)


def bf16_autocast() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


# --- scaled_dot_product_attention by flags ----------------------------------------------------------------------------

BY_FLAGS = (
    Case(
        id="sdpa-dense",
        description="SDPA on CPU, q=k=v (1,12,64,64)",
        build=lambda: sdpa((1, 12, 64, 64)),
        phase="training",
        forward_flops="2 * (2 * 12 * 64*64 * 64)",
        model_flops="6 * (2 * 12 * 64*64 * 64)",
        hardware_flops="7 * (2 * 12 * 64*64 * 64)",
        devices=("cpu", "meta"),
        covers=("C1",),
    ),
    Case(
        id="sdpa-dense-inference",
        description="the same without gradients",
        build=lambda: sdpa((1, 12, 64, 64)),
        phase="inference",
        model_flops="2 * (2 * 12 * 64*64 * 64)",
        hardware_flops="2 * (2 * 12 * 64*64 * 64)",
        devices=("cpu", "meta"),
        covers=("C1",),
    ),
    Case(
        id="sdpa-causal",
        description="is_causal: half the square and half the diagonal",
        build=lambda: sdpa((1, 12, 64, 64), is_causal=True),
        phase="training",
        forward_flops="2 * (2 * 12 * triangle(64) * 64)",
        model_flops="6 * (2 * 12 * triangle(64) * 64)",
        hardware_flops="7 * (2 * 12 * triangle(64) * 64)",
        palm_flops="6 * (2 * 12 * 64*64 * 64)",
        devices=("cpu", "meta"),
        covers=("C4",),
    ),
    Case(
        id="sdpa-causal-inference",
        description="is_causal without gradients",
        build=lambda: sdpa((1, 12, 64, 64), is_causal=True),
        phase="inference",
        model_flops="2 * (2 * 12 * triangle(64) * 64)",
        hardware_flops="2 * (2 * 12 * triangle(64) * 64)",
        palm_flops="2 * (2 * 12 * 64*64 * 64)",
        devices=("cpu", "meta"),
        covers=("C4",),
    ),
    Case(
        id="sdpa-gqa",
        description="8 query heads, 2 key-value heads: query heads decide",
        build=lambda: sdpa((1, 8, 256, 64), (1, 2, 256, 64), (1, 2, 256, 64), enable_gqa=True),
        phase="training",
        forward_flops="2 * (2 * 8 * 256*256 * 64)",
        model_flops="6 * (2 * 8 * 256*256 * 64)",
        hardware_flops="7 * (2 * 8 * 256*256 * 64)",
        covers=("C3",),
    ),
    Case(
        id="sdpa-gqa-causal",
        description="grouped queries under is_causal",
        build=lambda: sdpa((1, 8, 256, 64), (1, 2, 256, 64), (1, 2, 256, 64), enable_gqa=True, is_causal=True),
        phase="training",
        forward_flops="2 * (2 * 8 * triangle(256) * 64)",
        model_flops="6 * (2 * 8 * triangle(256) * 64)",
        hardware_flops="7 * (2 * 8 * triangle(256) * 64)",
        palm_flops="6 * (2 * 8 * 256*256 * 64)",
        covers=("C3", "C4"),
    ),
    Case(
        id="sdpa-mqa",
        description="multi-query: one key-value head for 8",
        build=lambda: sdpa((2, 8, 64, 32), (2, 1, 64, 32), (2, 1, 64, 32), enable_gqa=True),
        phase="training",
        forward_flops="2 * (2 * 2*8 * 64*64 * 32)",
        model_flops="6 * (2 * 2*8 * 64*64 * 32)",
        hardware_flops="7 * (2 * 2*8 * 64*64 * 32)",
        covers=("C3",),
    ),
    Case(
        id="sdpa-gqa-math",
        description="grouped queries on the math path",
        build=lambda: sdpa((1, 8, 256, 64), (1, 2, 256, 64), (1, 2, 256, 64), enable_gqa=True),
        phase="training",
        context=math_kernel,
        forward_flops="2 * (2 * 8 * 256*256 * 64)",
        model_flops="6 * (2 * 8 * 256*256 * 64)",
        hardware_flops="6 * (2 * 8 * 256*256 * 64)",
        covers=("C3", "C4"),
    ),
    Case(
        id="sdpa-mla",
        description="latent attention: Q and K 192 wide, V 128 wide (falls to the math path on CPU)",
        build=lambda: sdpa((2, 4, 32, 192), (2, 4, 32, 192), (2, 4, 32, 128)),
        phase="training",
        forward_flops="2 * 2*4 * 32*32 * (192 + 128)",
        model_flops="3 * (2 * 2*4 * 32*32 * (192 + 128))",
        hardware_flops="3 * (2 * 2*4 * 32*32 * (192 + 128))",
    ),
    Case(
        id="sdpa-mla-causal",
        description="latent attention under is_causal: the math path runs the square",
        build=lambda: sdpa((2, 4, 32, 192), (2, 4, 32, 192), (2, 4, 32, 128), is_causal=True),
        phase="training",
        forward_flops="2 * 2*4 * triangle(32) * (192 + 128)",
        model_flops="3 * (2 * 2*4 * triangle(32) * (192 + 128))",
        hardware_flops="3 * (2 * 2*4 * 32*32 * (192 + 128))",
        palm_flops="3 * (2 * 2*4 * 32*32 * (192 + 128))",
        covers=("C4",),
    ),
    Case(
        id="sdpa-cross",
        description="cross attention: 16 queries, 48 keys",
        build=lambda: sdpa((2, 4, 16, 32), (2, 4, 48, 32), (2, 4, 48, 32)),
        phase="training",
        forward_flops="2 * (2 * 2*4 * 16*48 * 32)",
        model_flops="6 * (2 * 2*4 * 16*48 * 32)",
        hardware_flops="7 * (2 * 2*4 * 16*48 * 32)",
        devices=("cpu", "meta"),
    ),
    Case(
        id="sdpa-causal-rectangle",
        description="is_causal with 16 queries and 48 keys starts top-left",
        build=lambda: sdpa((2, 4, 16, 32), (2, 4, 48, 32), (2, 4, 48, 32), is_causal=True),
        phase="training",
        forward_flops="2 * (2 * 2*4 * triangle(16) * 32)",
        model_flops="6 * (2 * 2*4 * triangle(16) * 32)",
        hardware_flops="7 * (2 * 2*4 * triangle(16) * 32)",
        palm_flops="6 * (2 * 2*4 * 16*48 * 32)",
    ),
    Case(
        id="sdpa-causal-more-queries",
        description="is_causal with 48 queries and 16 keys: rows past the 16th see all keys",
        build=lambda: sdpa((2, 4, 48, 32), (2, 4, 16, 32), (2, 4, 16, 32), is_causal=True),
        phase="inference",
        model_flops="2 * (2 * 2*4 * (triangle(16) + 32*16) * 32)",
        hardware_flops="2 * (2 * 2*4 * (triangle(16) + 32*16) * 32)",
        palm_flops="2 * (2 * 2*4 * 48*16 * 32)",
    ),
    Case(
        id="sdpa-decode",
        description="one new token against a cache of 128 keys",
        build=lambda: sdpa((4, 8, 1, 64), (4, 8, 128, 64), (4, 8, 128, 64)),
        phase="inference",
        model_flops="2 * (2 * 4*8 * 1*128 * 64)",
        hardware_flops="2 * (2 * 4*8 * 1*128 * 64)",
        devices=("cpu", "meta"),
    ),
    Case(
        id="sdpa-bf16",
        description="bfloat16 operands",
        build=lambda: sdpa((1, 4, 64, 32), dtype=torch.bfloat16, is_causal=True),
        phase="training",
        forward_flops="2 * (2 * 4 * triangle(64) * 32)",
        model_flops="6 * (2 * 4 * triangle(64) * 32)",
        hardware_flops="7 * (2 * 4 * triangle(64) * 32)",
        palm_flops="6 * (2 * 4 * 64*64 * 32)",
    ),
    Case(
        id="sdpa-autocast",
        description="float32 operands under bfloat16 autocast",
        build=lambda: sdpa((1, 4, 64, 32)),
        phase="training",
        context=bf16_autocast,
        forward_flops="2 * (2 * 4 * 64*64 * 32)",
        model_flops="6 * (2 * 4 * 64*64 * 32)",
        hardware_flops="7 * (2 * 4 * 64*64 * 32)",
    ),
    Case(
        id="sdpa-three-dimensions",
        description="operands without a head dimension: (5,32,16)",
        build=lambda: sdpa((5, 32, 16)),
        phase="inference",
        model_flops="2 * (2 * 5 * 32*32 * 16)",
        hardware_flops="2 * (2 * 5 * 32*32 * 16)",
    ),
    Case(
        id="sdpa-scale",
        description="a softmax scale of one's own changes nothing",
        build=lambda: sdpa((1, 4, 64, 32), scale=0.5),
        phase="inference",
        model_flops="2 * (2 * 4 * 64*64 * 32)",
        hardware_flops="2 * (2 * 4 * 64*64 * 32)",
    ),
)

# --- the same call on other kernels -----------------------------------------------------------------------------------

BY_KERNEL = (
    Case(
        id="sdpa-math-dense",
        description="dense, forced to the math path: no product is run twice",
        build=lambda: sdpa((1, 12, 64, 64)),
        phase="training",
        context=math_kernel,
        forward_flops="2 * (2 * 12 * 64*64 * 64)",
        model_flops="6 * (2 * 12 * 64*64 * 64)",
        hardware_flops="6 * (2 * 12 * 64*64 * 64)",
        devices=("cpu", "meta"),
        covers=("C4",),
    ),
    Case(
        id="sdpa-math-causal",
        description="causal, forced to the math path: the square runs, the triangle is model work",
        build=lambda: sdpa((1, 12, 64, 64), is_causal=True),
        phase="training",
        context=math_kernel,
        forward_flops="2 * (2 * 12 * triangle(64) * 64)",
        model_flops="6 * (2 * 12 * triangle(64) * 64)",
        hardware_flops="6 * (2 * 12 * 64*64 * 64)",
        palm_flops="6 * (2 * 12 * 64*64 * 64)",
        devices=("cpu", "meta"),
        covers=("C4",),
    ),
    Case(
        id="sdpa-math-mask",
        description="a boolean mask on the math path",
        build=lambda: sdpa((2, 3, 32, 16), attn_mask=lambda: causal_mask(32)),
        phase="training",
        context=math_kernel,
        forward_flops="2 * (2 * 2*3 * triangle(32) * 16)",
        model_flops="6 * (2 * 2*3 * triangle(32) * 16)",
        hardware_flops="6 * (2 * 2*3 * 32*32 * 16)",
        palm_flops="6 * (2 * 2*3 * 32*32 * 16)",
        covers=("C4",),
    ),
    Case(
        id="sdpa-math-finfo-min",
        description="a finfo.min mask on the math path",
        build=lambda: sdpa((2, 3, 32, 16), attn_mask=lambda: additive(causal_mask(32), torch.finfo(torch.float32).min)),
        phase="training",
        context=math_kernel,
        forward_flops="2 * (2 * 2*3 * triangle(32) * 16)",
        model_flops="6 * (2 * 2*3 * triangle(32) * 16)",
        hardware_flops="6 * (2 * 2*3 * 32*32 * 16)",
        palm_flops="6 * (2 * 2*3 * 32*32 * 16)",
        covers=("C4",),
    ),
    Case(
        id="sdpa-flash-dense",
        description="dense, forced to CPU flash",
        build=lambda: sdpa((1, 12, 64, 64)),
        phase="training",
        context=flash_kernel,
        forward_flops="2 * (2 * 12 * 64*64 * 64)",
        model_flops="6 * (2 * 12 * 64*64 * 64)",
        hardware_flops="7 * (2 * 12 * 64*64 * 64)",
        covers=("C4",),
    ),
    Case(
        id="sdpa-flash-causal",
        description="causal, forced to CPU flash",
        build=lambda: sdpa((1, 12, 64, 64), is_causal=True),
        phase="training",
        context=flash_kernel,
        forward_flops="2 * (2 * 12 * triangle(64) * 64)",
        model_flops="6 * (2 * 12 * triangle(64) * 64)",
        hardware_flops="7 * (2 * 12 * triangle(64) * 64)",
        palm_flops="6 * (2 * 12 * 64*64 * 64)",
        covers=("C4",),
    ),
    Case(
        id="sdpa-dropout",
        description="dropout takes the math path on CPU",
        build=lambda: sdpa((1, 4, 32, 16), dropout_p=0.1, is_causal=True),
        phase="training",
        forward_flops="2 * (2 * 4 * triangle(32) * 16)",
        model_flops="6 * (2 * 4 * triangle(32) * 16)",
        hardware_flops="6 * (2 * 4 * 32*32 * 16)",
        palm_flops="6 * (2 * 4 * 32*32 * 16)",
        covers=("C4",),
    ),
    Case(
        id="sdpa-float64",
        description="float64 operands",
        build=lambda: sdpa((1, 4, 32, 16), dtype=torch.float64),
        phase="training",
        forward_flops="2 * (2 * 4 * 32*32 * 16)",
        model_flops="6 * (2 * 4 * 32*32 * 16)",
        hardware_flops="7 * (2 * 4 * 32*32 * 16)",
    ),
)

# --- masks by content -------------------------------------------------------------------------------------------------

BY_MASK = (
    Case(
        id="mask-bool-causal",
        description="the causal mask as a boolean tensor: model as with the flag, hardware dense",
        build=lambda: sdpa((2, 3, 32, 16), attn_mask=lambda: causal_mask(32)),
        phase="training",
        forward_flops="2 * (2 * 2*3 * triangle(32) * 16)",
        model_flops="6 * (2 * 2*3 * triangle(32) * 16)",
        hardware_flops="7 * (2 * 2*3 * 32*32 * 16)",
        palm_flops="6 * (2 * 2*3 * 32*32 * 16)",
    ),
    Case(
        id="mask-minus-infinity",
        description="the causal mask as additive -inf",
        build=lambda: sdpa((2, 3, 32, 16), attn_mask=lambda: additive(causal_mask(32), float("-inf"))),
        phase="training",
        forward_flops="2 * (2 * 2*3 * triangle(32) * 16)",
        model_flops="6 * (2 * 2*3 * triangle(32) * 16)",
        hardware_flops="7 * (2 * 2*3 * 32*32 * 16)",
        palm_flops="6 * (2 * 2*3 * 32*32 * 16)",
    ),
    Case(
        id="mask-finfo-min",
        description="the causal mask as additive finfo.min",
        build=lambda: sdpa((2, 3, 32, 16), attn_mask=lambda: additive(causal_mask(32), torch.finfo(torch.float32).min)),
        phase="training",
        forward_flops="2 * (2 * 2*3 * triangle(32) * 16)",
        model_flops="6 * (2 * 2*3 * triangle(32) * 16)",
        hardware_flops="7 * (2 * 2*3 * 32*32 * 16)",
        palm_flops="6 * (2 * 2*3 * 32*32 * 16)",
    ),
    Case(
        id="mask-padding",
        description="padded keys, (B,1,1,Sk): sequences of 32 and 20 keys",
        build=lambda: sdpa((2, 3, 32, 16), attn_mask=lambda: padding(32, 20, longest=32)),
        phase="training",
        forward_flops="2 * (2 * 3 * (32*32 + 32*20) * 16)",
        model_flops="6 * (2 * 3 * (32*32 + 32*20) * 16)",
        hardware_flops="7 * (2 * 2*3 * 32*32 * 16)",
        palm_flops="6 * (2 * 2*3 * 32*32 * 16)",
    ),
    Case(
        id="mask-padding-and-causal",
        description="padding and causal in one mask: 20 rows of a triangle, then 12 rows of 20",
        build=lambda: sdpa((2, 3, 32, 16), attn_mask=lambda: padding(32, 20, longest=32) & causal_mask(32)),
        phase="training",
        forward_flops="2 * (2 * 3 * (triangle(32) + triangle(20) + 12*20) * 16)",
        model_flops="6 * (2 * 3 * (triangle(32) + triangle(20) + 12*20) * 16)",
        hardware_flops="7 * (2 * 2*3 * 32*32 * 16)",
        palm_flops="6 * (2 * 2*3 * 32*32 * 16)",
    ),
    Case(
        id="mask-per-head",
        description="a mask that differs by head, (1,H,Sq,Sk)",
        build=lambda: sdpa((3, 2, 16, 8), attn_mask=per_head_mask),
        phase="training",
        forward_flops="2 * (2 * 3 * (16*16 + triangle(16)) * 8)",
        model_flops="6 * (2 * 3 * (16*16 + triangle(16)) * 8)",
        hardware_flops="7 * (2 * 3*2 * 16*16 * 8)",
        palm_flops="6 * (2 * 3*2 * 16*16 * 8)",
    ),
    Case(
        id="mask-window",
        description="a causal window of 8 keys: W S - W (W-1) / 2 pairs",
        build=lambda: sdpa((1, 2, 64, 16), attn_mask=lambda: window_mask(64, 8)),
        phase="training",
        forward_flops="2 * (2 * 2 * window(64, 8) * 16)",
        model_flops="6 * (2 * 2 * window(64, 8) * 16)",
        hardware_flops="7 * (2 * 2 * 64*64 * 16)",
        palm_flops="6 * (2 * 2 * 64*64 * 16)",
    ),
    Case(
        id="mask-documents",
        description="packed documents of 40, 20 and 4 tokens as a block-diagonal mask",
        build=lambda: sdpa((1, 2, 64, 16), attn_mask=lambda: document_mask(40, 20, 4)),
        phase="training",
        forward_flops="2 * (2 * 2 * (40*40 + 20*20 + 4*4) * 16)",
        model_flops="6 * (2 * 2 * (40*40 + 20*20 + 4*4) * 16)",
        hardware_flops="7 * (2 * 2 * 64*64 * 16)",
        palm_flops="6 * (2 * 2 * 64*64 * 16)",
        covers=("C22",),
    ),
    Case(
        id="mask-bias-is-no-mask",
        description="an additive bias (ALiBi) attends everywhere",
        build=lambda: sdpa((1, 2, 32, 16), attn_mask=lambda: -torch.arange(32.0).repeat(32, 1)),
        phase="training",
        forward_flops="2 * (2 * 2 * 32*32 * 16)",
        model_flops="6 * (2 * 2 * 32*32 * 16)",
        hardware_flops="7 * (2 * 2 * 32*32 * 16)",
    ),
    Case(
        id="mask-empty-rows",
        description="rows that attend to nothing count nothing",
        build=lambda: sdpa((1, 2, 32, 16), attn_mask=lambda: (torch.arange(32) < 20)[:, None].expand(32, 32)),
        phase="inference",
        model_flops="2 * (2 * 2 * 20*32 * 16)",
        hardware_flops="2 * (2 * 2 * 32*32 * 16)",
        palm_flops="2 * (2 * 2 * 32*32 * 16)",
    ),
)

# --- gradients that nobody needs --------------------------------------------------------------------------------------

BY_GRADIENT = (
    Case(
        id="frozen-memory",
        description="only the query is trained: dA and dQ, two products; the fused kernel runs all five",
        build=lambda: sdpa((1, 2, 32, 16), trained="q"),
        phase="training",
        forward_flops="2 * (2 * 2 * 32*32 * 16)",
        model_flops="4 * (2 * 2 * 32*32 * 16)",
        hardware_flops="7 * (2 * 2 * 32*32 * 16)",
    ),
    Case(
        id="frozen-memory-math",
        description="the same on the math path, which runs only what is needed",
        build=lambda: sdpa((1, 2, 32, 16), trained="q"),
        phase="training",
        context=math_kernel,
        forward_flops="2 * (2 * 2 * 32*32 * 16)",
        model_flops="4 * (2 * 2 * 32*32 * 16)",
        hardware_flops="4 * (2 * 2 * 32*32 * 16)",
    ),
    Case(
        id="frozen-query-and-key",
        description="only the value is trained: dV alone",
        build=lambda: sdpa((1, 2, 32, 16), trained="v"),
        phase="training",
        forward_flops="2 * (2 * 2 * 32*32 * 16)",
        model_flops="3 * (2 * 2 * 32*32 * 16)",
        hardware_flops="7 * (2 * 2 * 32*32 * 16)",
    ),
)

CASES: tuple[Case, ...] = (*BY_FLAGS, *BY_KERNEL, *BY_MASK, *BY_GRADIENT)

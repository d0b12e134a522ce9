"""Rows of attention kernels called directly, flex_attention, nested tensors and whole attention layers.

``P`` attended pairs of width D: one product is 2 P D, a forward two of them, a backward four; a fused kernel's backward
runs a fifth.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, flex_attention

from .case import Case, Workload

with contextlib.suppress(ImportError):  # since torch 2.10
    import torch.nn.attention.varlen


aten = torch.ops.aten


def ends(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths, device="cpu").cumsum(0).tolist()], dtype=torch.int32, device="cpu")


# --- low-level kernels by direct calls, in their own layouts ----------------------------------------------------------


def flash(*shape: int, is_causal: bool = False, documents: tuple[int, ...] = (), **window: int) -> Workload:
    """``aten::_flash_attention_forward`` on (B, S, H, D), or packed (T, H, D)."""
    operand = torch.zeros(shape)
    cu = ends(*documents) if documents else None
    longest = max(documents) if documents else shape[-3]

    def forward(q: torch.Tensor) -> Any:
        return aten._flash_attention_forward(q, q, q, cu, cu, longest, longest, 0.0, is_causal, False, **window)

    return forward, (operand,)


def flash_backward(*shape: int, is_causal: bool = False) -> Workload:
    """``aten::_flash_attention_backward`` alone, on (B, S, H, D)."""
    B, S, H, _ = shape
    operand, logsumexp, seed = torch.zeros(shape), torch.zeros(B, H, S), torch.zeros(2, dtype=torch.int64)
    cu = torch.zeros(0, dtype=torch.int32)

    def backward(q: torch.Tensor) -> Any:
        return aten._flash_attention_backward(q, q, q, q, q, logsumexp, cu, cu, S, S, 0.0, is_causal, seed, seed)

    return backward, (operand,)


def efficient(*shape: int, mask_type: int = 0, window: int | None = None, keys: int | None = None) -> Workload:
    """``aten::_efficient_attention_forward`` on (B, S, H, D)."""
    query = torch.zeros(shape)
    key = query if keys is None else torch.zeros(shape[0], keys, *shape[2:])

    def forward(q: torch.Tensor, k: torch.Tensor) -> Any:
        return aten._efficient_attention_forward(
            q, k, k, None, None, None, None, None, 0.0, mask_type, True, window_size=window
        )

    return forward, (query, key)


def efficient_backward(*shape: int, needed: tuple[bool, bool, bool] = (True, True, True)) -> Workload:
    """``aten::_scaled_dot_product_efficient_attention_backward`` alone, on (B, H, S, D)."""
    B, H, S, _ = shape
    operand, logsumexp, seed = torch.zeros(shape), torch.zeros(B, H, S), torch.zeros(1, dtype=torch.int64)

    def backward(q: torch.Tensor) -> Any:
        return aten._scaled_dot_product_efficient_attention_backward(
            q, q, q, q, None, q, logsumexp, seed, seed, 0.0, [*needed, False], False
        )

    return backward, (operand,)


def varlen(tokens: int, heads: int, width: int, *documents: int, window: tuple[int, int] = (-1, -1)) -> Workload:
    """``torch.nn.attention.varlen.varlen_attn`` on packed (T, H, D)."""
    cu = ends(*documents)

    def forward(q: torch.Tensor) -> Any:
        longest = max(documents)
        return torch.nn.attention.varlen.varlen_attn(q, q, q, cu, cu, longest, longest, window_size=window)

    return forward, (torch.zeros(tokens, heads, width),)


BY_OPERATOR = (
    Case(
        id="flash-bshd",
        description="_flash_attention_forward, (B,S,H,D) = (2,1024,16,64)",
        build=lambda: flash(2, 1024, 16, 64),
        phase="inference",
        model_flops="2 * (2 * 2*16 * 1024*1024 * 64)",
        hardware_flops="2 * (2 * 2*16 * 1024*1024 * 64)",
        devices=("meta",),
        covers=("C2",),
    ),
    Case(
        id="flash-bshd-backward",
        description="_flash_attention_backward: four products, and a fifth inside the kernel",
        build=lambda: flash_backward(2, 1024, 16, 64),
        phase="inference",
        model_flops="4 * (2 * 2*16 * 1024*1024 * 64)",
        hardware_flops="5 * (2 * 2*16 * 1024*1024 * 64)",
        devices=("meta",),
        covers=("C2",),
    ),
    Case(
        id="flash-bshd-causal-backward",
        description="the same, causal",
        build=lambda: flash_backward(2, 1024, 16, 64, is_causal=True),
        phase="inference",
        model_flops="4 * (2 * 2*16 * triangle(1024) * 64)",
        hardware_flops="5 * (2 * 2*16 * triangle(1024) * 64)",
        palm_flops="4 * (2 * 2*16 * 1024*1024 * 64)",
        devices=("meta",),
        covers=("C2",),
    ),
    Case(
        id="flash-window",
        description="a sliding window of 256 keys",
        build=lambda: flash(2, 1024, 16, 64, is_causal=True, window_size_left=255, window_size_right=0),
        phase="inference",
        model_flops="2 * (2 * 2*16 * window(1024, 256) * 64)",
        hardware_flops="2 * (2 * 2*16 * window(1024, 256) * 64)",
        palm_flops="2 * (2 * 2*16 * 1024*1024 * 64)",
        devices=("meta",),
    ),
    Case(
        id="flash-varlen",
        description="documents of 128 and 64 tokens, packed; padded they would cost 67,108,864",
        build=lambda: flash(192, 8, 64, documents=(128, 64)),
        phase="inference",
        model_flops="2 * (2 * 8 * (128*128 + 64*64) * 64)",
        hardware_flops="2 * (2 * 8 * (128*128 + 64*64) * 64)",
        devices=("meta",),
        covers=("C6",),
    ),
    Case(
        id="flash-varlen-causal",
        description="the same, causal within each document",
        build=lambda: flash(192, 8, 64, documents=(128, 64), is_causal=True),
        phase="inference",
        model_flops="2 * (2 * 8 * (triangle(128) + triangle(64)) * 64)",
        hardware_flops="2 * (2 * 8 * (triangle(128) + triangle(64)) * 64)",
        palm_flops="2 * (2 * 8 * (128*128 + 64*64) * 64)",
        devices=("meta",),
        covers=("C6",),
    ),
    Case(
        id="flash-packed-quarter",
        description="8192 tokens as 4 documents of 2048: a quarter of the square",
        build=lambda: flash(8192, 1, 64, documents=(2048,) * 4),
        phase="inference",
        model_flops="2 * (2 * 8192*8192 * 64) // 4",
        hardware_flops="2 * (2 * 4 * 2048*2048 * 64)",
        devices=("meta",),
        covers=("C22",),
    ),
    Case(
        id="varlen-attn",
        description="torch.nn.attention.varlen on documents of 128 and 64 tokens",
        build=lambda: varlen(192, 8, 64, 128, 64),
        phase="inference",
        model_flops="2 * (2 * 8 * (128*128 + 64*64) * 64)",
        hardware_flops="2 * (2 * 8 * (128*128 + 64*64) * 64)",
        devices=("meta",),
        covers=("C6",),
    ),
    Case(
        id="varlen-attn-causal",
        description="the same with window_size=(-1, 0), which is causal",
        build=lambda: varlen(192, 8, 64, 128, 64, window=(-1, 0)),
        phase="inference",
        model_flops="2 * (2 * 8 * (triangle(128) + triangle(64)) * 64)",
        hardware_flops="2 * (2 * 8 * (triangle(128) + triangle(64)) * 64)",
        palm_flops="2 * (2 * 8 * (128*128 + 64*64) * 64)",
        devices=("meta",),
        covers=("C6",),
    ),
    Case(
        id="efficient-bmhk",
        description="_efficient_attention_forward, (B,S,H,D) = (2,1024,16,64)",
        build=lambda: efficient(2, 1024, 16, 64),
        phase="inference",
        model_flops="2 * (2 * 2*16 * 1024*1024 * 64)",
        hardware_flops="2 * (2 * 2*16 * 1024*1024 * 64)",
        devices=("meta",),
        covers=("C2",),
    ),
    Case(
        id="efficient-top-left",
        description="custom_mask_type 1 with 16 queries and 48 keys",
        build=lambda: efficient(1, 16, 4, 32, mask_type=1, keys=48),
        phase="inference",
        model_flops="2 * (2 * 4 * triangle(16) * 32)",
        hardware_flops="2 * (2 * 4 * triangle(16) * 32)",
        palm_flops="2 * (2 * 4 * 16*48 * 32)",
        devices=("meta",),
    ),
    Case(
        id="efficient-bottom-right",
        description="custom_mask_type 2 with 16 queries and 48 keys: 32 keys for every query, then a triangle",
        build=lambda: efficient(1, 16, 4, 32, mask_type=2, keys=48),
        phase="inference",
        model_flops="2 * (2 * 4 * (16*32 + triangle(16)) * 32)",
        hardware_flops="2 * (2 * 4 * (16*32 + triangle(16)) * 32)",
        palm_flops="2 * (2 * 4 * 16*48 * 32)",
        devices=("meta",),
    ),
    Case(
        id="efficient-window",
        description="custom_mask_type 1 with window_size 8",
        build=lambda: efficient(1, 64, 4, 32, mask_type=1, window=8),
        phase="inference",
        model_flops="2 * (2 * 4 * window(64, 8) * 32)",
        hardware_flops="2 * (2 * 4 * window(64, 8) * 32)",
        palm_flops="2 * (2 * 4 * 64*64 * 32)",
        devices=("meta",),
    ),
    Case(
        id="efficient-backward",
        description="_scaled_dot_product_efficient_attention_backward",
        build=lambda: efficient_backward(2, 16, 1024, 64),
        phase="inference",
        model_flops="4 * (2 * 2*16 * 1024*1024 * 64)",
        hardware_flops="5 * (2 * 2*16 * 1024*1024 * 64)",
        devices=("meta",),
        covers=("C2",),
    ),
    Case(
        id="efficient-backward-query-only",
        description="its grad_input_mask asks for dQ only: dA and dQ",
        build=lambda: efficient_backward(2, 16, 128, 64, needed=(True, False, False)),
        phase="inference",
        model_flops="2 * (2 * 2*16 * 128*128 * 64)",
        hardware_flops="5 * (2 * 2*16 * 128*128 * 64)",
        devices=("meta",),
    ),
)

# --- flex_attention ---------------------------------------------------------------------------------------------------


def flex(
    H: int, S: int, D: int, mask_mod: Callable[..., Any] | None = None, key_heads: int | None = None, **kwargs: Any
) -> Workload:
    block_mask: BlockMask | None = None
    if mask_mod is not None:
        block_mask = create_block_mask(mask_mod, None, None, S, S, device="cpu")
    query, key = torch.zeros(1, H, S, D), torch.zeros(1, key_heads or H, S, D)

    def attention(q: torch.Tensor, k: torch.Tensor) -> Any:
        return flex_attention(q, k, k, block_mask=block_mask, **kwargs)

    return attention, (query, key)


def is_causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def is_near(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q - k < 24


def same_document(*lengths: int) -> Callable[..., Any]:
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return lambda b, h, q, k: ids[q] == ids[k]


def doubled(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score * 2


BY_BLOCK_MASK = (
    Case(
        id="flex-dense",
        description="flex_attention B=1, H=2, S=128, D=16 without a mask",
        build=lambda: flex(2, 128, 16),
        phase="inference",
        model_flops="2 * (2 * 2 * 128*128 * 16)",
        hardware_flops="2 * (2 * 2 * 128*128 * 16)",
        covers=("C5",),
    ),
    Case(
        id="flex-causal",
        description="a causal block mask: 8,256 exact pairs; uncompiled, the square runs",
        build=lambda: flex(2, 128, 16, is_causal),
        phase="inference",
        model_flops="2 * (2 * 2 * 8256 * 16)",
        hardware_flops="2 * (2 * 2 * 128*128 * 16)",
        palm_flops="2 * (2 * 2 * 128*128 * 16)",
        covers=("C5",),
    ),
    Case(
        id="flex-score-mod",
        description="a score_mod is elementwise and free",
        build=lambda: flex(2, 128, 16, score_mod=doubled),
        phase="inference",
        model_flops="2 * (2 * 2 * 128*128 * 16)",
        hardware_flops="2 * (2 * 2 * 128*128 * 16)",
        covers=("C5",),
    ),
    Case(
        id="flex-window",
        description="a causal window of 24 keys over 200 tokens, blocks of 128 cut at the end",
        build=lambda: flex(2, 200, 16, and_masks(is_causal, is_near)),
        phase="inference",
        model_flops="2 * (2 * 2 * window(200, 24) * 16)",
        hardware_flops="2 * (2 * 2 * 200*200 * 16)",
        palm_flops="2 * (2 * 2 * 200*200 * 16)",
        covers=("C5",),
    ),
    Case(
        id="flex-documents",
        description="causal within documents of 100, 60 and 40 tokens",
        build=lambda: flex(2, 200, 16, and_masks(is_causal, same_document(100, 60, 40))),
        phase="inference",
        model_flops="2 * (2 * 2 * (triangle(100) + triangle(60) + triangle(40)) * 16)",
        hardware_flops="2 * (2 * 2 * 200*200 * 16)",
        palm_flops="2 * (2 * 2 * 200*200 * 16)",
        covers=("C5", "C22"),
    ),
    Case(
        id="flex-gqa",
        description="8 query heads share 2 key-value heads",
        build=lambda: flex(8, 128, 16, is_causal, key_heads=2, enable_gqa=True),
        phase="inference",
        model_flops="2 * (2 * 8 * triangle(128) * 16)",
        hardware_flops="2 * (2 * 8 * 128*128 * 16)",
        palm_flops="2 * (2 * 8 * 128*128 * 16)",
        covers=("C3", "C5"),
    ),
)

# --- nested tensors ---------------------------------------------------------------------------------------------------


def nested(layout: torch.layout, requires_grad: bool) -> Workload:
    """Sequences of 128 and 64 tokens, H=8, D=64."""
    shapes = [(length, 8, 64) if layout == torch.jagged else (8, length, 64) for length in (128, 64)]
    operand = torch.nested.nested_tensor(
        [torch.zeros(shape) for shape in shapes], layout=layout, requires_grad=requires_grad
    )

    def attention(x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(1, 2) if layout == torch.jagged else x
        return F.scaled_dot_product_attention(x, x, x)

    return attention, (operand,)


BY_SEQUENCE = (
    Case(
        id="nested-jagged-inference",
        description="a jagged nested tensor of 128 and 64 tokens",
        build=lambda: nested(torch.jagged, requires_grad=False),
        phase="inference",
        model_flops="2 * (2 * 8 * (128*128 + 64*64) * 64)",
        hardware_flops="2 * (2 * 8 * (128*128 + 64*64) * 64)",
        covers=("C6",),
    ),
    Case(
        id="nested-jagged",
        description="the same in training; the math path keeps its probabilities",
        build=lambda: nested(torch.jagged, requires_grad=True),
        phase="training",
        forward_flops="2 * (2 * 8 * (128*128 + 64*64) * 64)",
        model_flops="6 * (2 * 8 * (128*128 + 64*64) * 64)",
        hardware_flops="6 * (2 * 8 * (128*128 + 64*64) * 64)",
        covers=("C6",),
    ),
    Case(
        id="nested-strided-inference",
        description="the same in the strided layout",
        build=lambda: nested(torch.strided, requires_grad=False),
        phase="inference",
        model_flops="2 * (2 * 8 * (128*128 + 64*64) * 64)",
        hardware_flops="2 * (2 * 8 * (128*128 + 64*64) * 64)",
        covers=("C6",),
    ),
)

# --- whole attention layers -------------------------------------------------------------------------------------------


def multi_head(
    width: int, heads: int, *shape: int, train: bool, requires_grad: bool = False, **kwargs: Any
) -> Workload:
    module = nn.MultiheadAttention(width, heads, batch_first=True).train(train)
    x = torch.zeros(*shape, width, requires_grad=requires_grad)
    return _SelfAttention(module, kwargs), (x,)


class _SelfAttention(nn.Module):
    """Calls a MultiheadAttention on one tensor; masks are made when it is called."""

    def __init__(self, attention: nn.MultiheadAttention, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.attention = attention
        self._kwargs = kwargs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = {name: value() if callable(value) else value for name, value in self._kwargs.items()}
        attended: torch.Tensor = self.attention(x, x, x, **made)[0]
        return attended


def encoder_layer(*shape: int, train: bool, requires_grad: bool = False, dropout: float = 0.0) -> Workload:
    module = nn.TransformerEncoderLayer(448, 4, 448, dropout=dropout, batch_first=True).train(train)
    return module, (torch.zeros(*shape, 448, requires_grad=requires_grad),)


def hidden_keys() -> torch.Tensor:
    """True hides, as MultiheadAttention has it: the last 2 of 6 keys of the second sequence."""
    return torch.tensor([[False] * 6, [False] * 4 + [True] * 2])


def hidden_future() -> torch.Tensor:
    return torch.ones(6, 6, dtype=torch.bool).triu(1)


_PROJECTIONS_448 = "4 * (2 * 300 * 448*448)"
_ATTENTION_448 = "2 * (2 * 4 * 300*300 * 112)"
_FEED_FORWARD_448 = "2 * (2 * 300 * 448*448)"

BY_LAYER = (
    Case(
        id="mha-fast-path",
        description="nn.MultiheadAttention(448, 4), S=300, eval without gradients: one fused operator",
        build=lambda: multi_head(448, 4, 1, 300, train=False),
        phase="inference",
        model_flops=f"{_PROJECTIONS_448} + {_ATTENTION_448}",
        hardware_flops=f"{_PROJECTIONS_448} + {_ATTENTION_448}",
        covers=("C10",),
    ),
    Case(
        id="mha-fast-path-no-weights",
        description="the same with need_weights=False",
        build=lambda: multi_head(448, 4, 1, 300, train=False, need_weights=False),
        phase="inference",
        model_flops=f"{_PROJECTIONS_448} + {_ATTENTION_448}",
        hardware_flops=f"{_PROJECTIONS_448} + {_ATTENTION_448}",
        covers=("C10",),
    ),
    Case(
        id="mha-train-input-without-gradient",
        description="training on data: no gradient of the input, so the input projection costs twice, not three times",
        build=lambda: multi_head(448, 4, 1, 300, train=True),
        phase="training",
        forward_flops=f"{_PROJECTIONS_448} + {_ATTENTION_448}",
        model_flops=f"3 * ({_PROJECTIONS_448} + {_ATTENTION_448}) - 3 * (2 * 300 * 448*448)",
        hardware_flops=f"3 * ({_PROJECTIONS_448} + {_ATTENTION_448}) - 3 * (2 * 300 * 448*448)",
        covers=("C10",),
    ),
    Case(
        id="mha-train",
        description="training inside a network: all of it three times; weights are wanted, so nothing is fused",
        build=lambda: multi_head(448, 4, 1, 300, train=True, requires_grad=True),
        phase="training",
        forward_flops=f"{_PROJECTIONS_448} + {_ATTENTION_448}",
        model_flops=f"3 * ({_PROJECTIONS_448} + {_ATTENTION_448})",
        hardware_flops=f"3 * ({_PROJECTIONS_448} + {_ATTENTION_448})",
        covers=("C10",),
    ),
    Case(
        id="mha-train-fused",
        description="with need_weights=False the flash kernel runs Q K^T once more",
        build=lambda: multi_head(448, 4, 1, 300, train=True, requires_grad=True, need_weights=False),
        phase="training",
        forward_flops=f"{_PROJECTIONS_448} + {_ATTENTION_448}",
        model_flops=f"3 * ({_PROJECTIONS_448} + {_ATTENTION_448})",
        hardware_flops=f"3 * ({_PROJECTIONS_448} + {_ATTENTION_448}) + 2 * 4 * 300*300 * 112",
        covers=("C10",),
    ),
    Case(
        id="mha-padding",
        description="a key padding mask on the fast path: by content for the model, dense for the hardware",
        build=lambda: multi_head(16, 4, 2, 6, train=False, key_padding_mask=hidden_keys),
        phase="inference",
        model_flops="4 * (2 * 12 * 16*16) + 2 * (2 * 4 * (6*6 + 6*4) * 4)",
        hardware_flops="4 * (2 * 12 * 16*16) + 2 * (2 * 4 * 2*6*6 * 4)",
        palm_flops="4 * (2 * 12 * 16*16) + 2 * (2 * 4 * 2*6*6 * 4)",
        covers=("C10",),
    ),
    Case(
        id="mha-attention-mask",
        description="an attention mask on the fast path",
        build=lambda: multi_head(16, 4, 2, 6, train=False, attn_mask=hidden_future),
        phase="inference",
        model_flops="4 * (2 * 12 * 16*16) + 2 * (2 * 4 * 2*triangle(6) * 4)",
        hardware_flops="4 * (2 * 12 * 16*16) + 2 * (2 * 4 * 2*6*6 * 4)",
        palm_flops="4 * (2 * 12 * 16*16) + 2 * (2 * 4 * 2*6*6 * 4)",
        covers=("C10",),
    ),
    Case(
        id="encoder-layer-fast-path",
        description="nn.TransformerEncoderLayer(448, 4, 448), S=300, eval without gradients: one fused operator",
        build=lambda: encoder_layer(1, 300, train=False),
        phase="inference",
        model_flops=f"{_PROJECTIONS_448} + {_ATTENTION_448} + {_FEED_FORWARD_448}",
        hardware_flops=f"{_PROJECTIONS_448} + {_ATTENTION_448} + {_FEED_FORWARD_448}",
        covers=("C10",),
    ),
    Case(
        id="encoder-layer-train",
        description="the same in training inside a network",
        build=lambda: encoder_layer(1, 300, train=True, requires_grad=True),
        phase="training",
        forward_flops=f"{_PROJECTIONS_448} + {_ATTENTION_448} + {_FEED_FORWARD_448}",
        model_flops=f"3 * ({_PROJECTIONS_448} + {_ATTENTION_448} + {_FEED_FORWARD_448})",
        hardware_flops=f"3 * ({_PROJECTIONS_448} + {_ATTENTION_448} + {_FEED_FORWARD_448}) + 2 * 4 * 300*300 * 112",
        covers=("C10",),
    ),
    Case(
        id="encoder-layer-eval-with-gradients",
        description="eval mode with gradients takes the slow path and counts the same",
        build=lambda: encoder_layer(1, 300, train=False, requires_grad=True),
        phase="training",
        forward_flops=f"{_PROJECTIONS_448} + {_ATTENTION_448} + {_FEED_FORWARD_448}",
        model_flops=f"3 * ({_PROJECTIONS_448} + {_ATTENTION_448} + {_FEED_FORWARD_448})",
        hardware_flops=f"3 * ({_PROJECTIONS_448} + {_ATTENTION_448} + {_FEED_FORWARD_448}) + 2 * 4 * 300*300 * 112",
        covers=("C10",),
    ),
)

_ALL = (*BY_OPERATOR, *BY_BLOCK_MASK, *BY_SEQUENCE, *BY_LAYER)
_HAS_VARLEN = hasattr(torch.nn.attention, "varlen")
CASES: tuple[Case, ...] = tuple(case for case in _ALL if _HAS_VARLEN or not case.id.startswith("varlen-attn"))

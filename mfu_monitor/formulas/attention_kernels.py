"""PyTorch's scaled-dot-product kernels on (B, H, S, D) operands, forward and backward.

Which kernel runs decides the hardware FLOPs only, never the model FLOPs:

- a causal flag lets a fused kernel skip, so it executes what is attended; the math kernels run the full square;
- a mask tensor is run dense by every kernel, and read for what it attends;
- every fused backward computes ``Q K^T`` once more, CPU flash included (it keeps the log-sum-exp, not the
  probabilities).

``is_causal`` starts its diagonal top-left, except in CUDA's flash kernel, which starts it bottom-right as flash-attn
>= 2.1 does; ``scaled_dot_product_attention`` never gives that kernel a causal call with ``Sq != Sk``. Nested operands
in the strided layout are counted sequence by sequence. The names are those that
``torch._C._dispatch_get_all_op_names()`` of torch 2.13 lists.
"""

from __future__ import annotations

import itertools
import math

from torch import Tensor

from mfu_monitor.formulas import attention_flex, attention_layers, attention_packed  # noqa: F401  # they register their formulas
from mfu_monitor.formulas.attention_cost import (
    UNREADABLE_MASK_NOTE,
    AttentionWork,
    Band,
    argument,
    backward_cost,
    forward_cost,
    logical_width,
    masked_pairs,
    needed_gradients,
)
from mfu_monitor.formulas.cost import OpCost, OperatorCall
from mfu_monitor.formulas.nested import nested_sizes
from mfu_monitor.formulas.registry import formula

__all__ = ["dense_attention_work"]


@formula(
    "aten::scaled_dot_product_attention",  # seen whole in inference mode
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
)
def _fused_forward(call: OperatorCall) -> OpCost:
    return forward_cost(_work(call))


@formula(
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    "aten::_scaled_dot_product_efficient_attention_backward",
    "aten::_scaled_dot_product_cudnn_attention_backward",
    "aten::_scaled_dot_product_fused_attention_overrideable_backward",
)
def _fused_backward(call: OperatorCall) -> OpCost:
    return backward_cost(_work(call), needs_grad=needed_gradients(call))


@formula("aten::_scaled_dot_product_flash_attention")
def _cuda_flash_forward(call: OperatorCall) -> OpCost:
    return forward_cost(_work(call, bottom_right=True, is_padded=True))


@formula("aten::_scaled_dot_product_flash_attention_backward")
def _cuda_flash_backward(call: OperatorCall) -> OpCost:
    return backward_cost(_work(call, bottom_right=True, is_padded=True), needs_grad=needed_gradients(call))


@formula(
    "aten::_scaled_dot_product_attention_math",
    "aten::_scaled_dot_product_attention_math_for_mps",
    "aten::_triton_scaled_dot_attention",
)
def _dense_forward(call: OperatorCall) -> OpCost:
    return forward_cost(_work(call, skips_masked=False))


def _work(
    call: OperatorCall, *, bottom_right: bool = False, is_padded: bool = False, skips_masked: bool = True
) -> AttentionWork:
    query, key, value = (argument(call, name, name[0]) for name in ("query", "key", "value"))
    return dense_attention_work(
        query,
        key,
        value,
        mask=argument(call, "attn_mask", "attn_bias"),
        band=Band(high=0 if call.get("is_causal") else None, alignment="bottom_right" if bottom_right else "top_left"),
        padded_scale=call.get("scale") if is_padded else None,
        skips_masked=skips_masked,
    )


def dense_attention_work(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    band: Band | None = None,
    padded_scale: float | None = None,
    skips_masked: bool = True,
) -> AttentionWork:
    """Pairs of one call on (..., H, S, D) operands; leading dimensions broadcast, query heads decide.

    Args:
        query: (..., Hq, Sq, Dqk), or nested in the strided layout, (B; Hq, Sq_i, Dqk).
        key: (..., Hkv, Sk, Dqk).
        value: (..., Hkv, Sk, Dv).
        mask: boolean or additive, broadcastable to (B, Hq, Sq, Sk); None or empty is none.
        band: what flags leave of the square.
        padded_scale: the softmax scale, where head widths may have been padded before this call.
        skips_masked: True where the kernel skips by its flags.
    """
    band = band or Band()
    if query.is_nested:
        return _nested_work(query, key, value, band)
    batch, heads = _batch_and_heads(query, key)
    q_len, k_len = query.shape[-2], key.shape[-2]
    square = batch * heads * q_len * k_len
    banded = batch * heads * band.pairs(q_len, k_len)
    mask = mask if mask is not None and mask.dim() > 0 and (mask.numel() > 0 or square == 0) else None
    found = masked_pairs(_as_4d(mask), batch=batch, heads=heads, q_len=q_len, k_len=k_len, band=band)
    return AttentionWork(
        pairs=banded if found is None else found,
        executed_pairs=banded if skips_masked else square,
        palm_pairs=square,
        qk_width=logical_width(query.shape[-1], padded_scale),
        v_width=logical_width(value.shape[-1], padded_scale),
        kernel_qk_width=query.shape[-1],
        kernel_v_width=value.shape[-1],
        note=UNREADABLE_MASK_NOTE if found is None else None,
    )


def _batch_and_heads(query: Tensor, key: Tensor) -> tuple[int, int]:
    """Leading dimensions broadcast as one batch; the head counts divide each other (GQA) or one of them is 1."""
    q_leading, k_leading = query.shape[:-2], key.shape[:-2]
    heads = max(q_leading[-1] if q_leading else 1, k_leading[-1] if k_leading else 1)
    sizes = itertools.zip_longest(reversed(q_leading[:-1]), reversed(k_leading[:-1]), fillvalue=1)
    return math.prod(k_size if q_size == 1 else q_size for q_size, k_size in sizes), heads


def _as_4d(mask: Tensor | None) -> Tensor | None:
    """A mask whose extra leading dimensions are folded into the batch: (..., H, Sq, Sk) -> (B, H, Sq, Sk)."""
    if mask is None or mask.dim() <= 4:
        return mask
    return mask.flatten(0, -4)


def _nested_work(query: Tensor, key: Tensor, value: Tensor, band: Band) -> AttentionWork:
    """Strided nested operands: sizes lie in a small host tensor, one row (H, S_i, D) a sequence."""
    q_sizes, k_sizes, v_sizes = (nested_sizes(operand) for operand in (query, key, value))
    pairs = sum(q[0] * band.pairs(q[1], k[1]) for q, k in zip(q_sizes, k_sizes, strict=True))
    square = sum(q[0] * q[1] * k[1] for q, k in zip(q_sizes, k_sizes, strict=True))
    return AttentionWork(
        pairs=pairs,
        executed_pairs=pairs,
        palm_pairs=square,
        qk_width=q_sizes[0][2] if q_sizes else 0,
        v_width=v_sizes[0][2] if v_sizes else 0,
    )

"""From one attention call to its cost: what is attended, what the kernel runs all the same, what it runs again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mfu_monitor.formulas.attention_dense import (
    Alignment,
    attention_backward_flops,
    attention_forward_flops,
    attention_recompute_flops,
    band_pairs,
)
from mfu_monitor.formulas.attention_masks import attended_pairs
from mfu_monitor.formulas.cost import OpCost, OperatorCall
from mfu_monitor.internals.autograd_state import running_node

__all__ = [
    "UNREADABLE_MASK_NOTE",
    "AttentionWork",
    "Band",
    "argument",
    "backward_cost",
    "forward_cost",
    "logical_width",
    "masked_pairs",
    "needed_gradients",
]

UNREADABLE_MASK_NOTE = "an attention mask could not be read (meta or fake tensor); its call is counted as if unmasked"

_HEAD_WIDTH_MULTIPLE = 8
"""SDPA and flash-attn pad head widths to a multiple of 8 before they call a flash kernel
(torch/aten/src/ATen/native/transformers/attention.cpp, ``pad_last_dim<8>``; flash_attn_interface.py)."""

_NODES_WITH_QKV_FIRST = (
    "ScaledDotProduct",
    "FlashAttention",
    "EfficientAttention",
    "CudnnAttention",
    "FlashAttnFunc",
    "FlashAttnVarlenFunc",
    "FlexAttention",
    "GeneratedBackwardFor_torch_attn__varlen",
)
"""Autograd nodes of attention calls whose first three inputs are Q, K and V, by how their names begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWork:
    """Query-key pairs of one call, summed over sequences and query heads, and the head widths."""

    pairs: int
    """Attended: what the mathematics needs."""
    executed_pairs: int
    """What the kernel computes: equals ``pairs`` where it skips by a flag, more where a mask comes as a tensor."""
    palm_pairs: int
    """The full square of every sequence (of every document, where documents are packed)."""
    qk_width: int
    v_width: int
    kernel_qk_width: int | None = None
    """Where operands are padded: the width that the kernel computes; else None."""
    kernel_v_width: int | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Band:
    """The part of the score matrix that flags leave: ``low <= j - i <= high`` from a corner's diagonal."""

    low: int | None = None
    high: int | None = None
    alignment: Alignment = "top_left"

    def offset(self, q_len: int, k_len: int) -> int:
        """Column of the diagonal in row 0."""
        return k_len - q_len if self.alignment == "bottom_right" else 0

    def pairs(self, q_len: int, k_len: int) -> int:
        """Pairs of one head that the band holds."""
        shift = self.offset(q_len, k_len)
        low = None if self.low is None else self.low + shift
        high = None if self.high is None else self.high + shift
        return band_pairs(q_len, k_len, low=low, high=high)


def forward_cost(work: AttentionWork) -> OpCost:
    """Cost of the forward: two products."""
    flops = _forward(work.pairs, work.qk_width, work.v_width)
    palm_flops = _forward(work.palm_pairs, work.qk_width, work.v_width)
    executed = _forward(work.executed_pairs, _kernel_qk_width(work), _kernel_v_width(work))
    return _cost(flops, palm_flops, executed, 0, work.note)


def backward_cost(
    work: AttentionWork,
    *,
    needs_grad: Sequence[bool] = (True, True, True),
    recomputed_qk_products: int = 1,
    recomputed_v_products: int = 0,
) -> OpCost:
    """Cost of the backward: four products, and what the kernel computes again.

    Args:
        work: pairs and widths.
        needs_grad: which of Q, K, V need a gradient; a fused kernel computes all of them whatever is needed.
        recomputed_qk_products: how often the kernel computes ``Q K^T`` again: 1 for flash, efficient and cuDNN, 0 where
            the probabilities were kept.
        recomputed_v_products: how often it computes ``dO V^T`` beyond the once that the gradient needs.
    """
    executed = 2 * _forward(work.executed_pairs, _kernel_qk_width(work), _kernel_v_width(work))
    recompute = recomputed_qk_products * attention_recompute_flops(
        batch=1, q_heads=1, pairs=work.executed_pairs, qk_width=_kernel_qk_width(work)
    )
    recompute += recomputed_v_products * attention_recompute_flops(
        batch=1, q_heads=1, pairs=work.executed_pairs, qk_width=_kernel_v_width(work)
    )
    flops = _backward(work.pairs, work, needs_grad)
    return _cost(flops, _backward(work.palm_pairs, work, needs_grad), executed, recompute, work.note)


def masked_pairs(mask: Tensor | None, *, batch: int, heads: int, q_len: int, k_len: int, band: Band) -> int | None:
    """Pairs over all sequences and heads that a mask and a band of flags leave together; None if unreadable.

    A band that is limited on both sides beside a mask tensor does not occur in any kernel; its lower limit is ignored.
    """
    if mask is None:
        return batch * heads * band.pairs(q_len, k_len)
    return attended_pairs(
        mask,
        batch=batch,
        heads=heads,
        q_len=q_len,
        k_len=k_len,
        is_causal=band.high is not None,
        diagonal=band.offset(q_len, k_len) + (band.high or 0),
    )


def argument(call: OperatorCall, *names: str, default: Any = None) -> Any:
    """The first of several argument names that the call has with a value: versions and libraries differ in names."""
    for name in names:
        if (value := call.get(name)) is not None:
            return value
    return default


def needed_gradients(call: OperatorCall) -> tuple[bool, bool, bool]:
    """Which of Q, K and V need a gradient in this backward call.

    Some operators say so themselves (``grad_input_mask``). For the others the autograd node that runs them knows: an
    input without a next node needs none. Where neither is known, all three are taken to need one.
    """
    mask = call.get("grad_input_mask")
    if mask is None:
        mask = _gradients_of_current_node()
    q, k, v = (bool(needed) for needed in mask[:3])
    return q, k, v


def _gradients_of_current_node() -> Sequence[bool]:
    node = running_node()
    if node is None or not node.name().lstrip("_").startswith(_NODES_WITH_QKV_FIRST):
        return (True, True, True)
    edges = [following is not None for following, _ in node.next_functions[:3]]
    return edges if len(edges) == 3 and any(edges) else (True, True, True)


def logical_width(padded_width: int, scale: float | None) -> int:
    """Head width before padding, derived from the scale that the caller took from it: ``1 / sqrt(width)``.

    The kernels are called with padded operands and the unpadded width's scale; without this, model FLOPs would depend
    on the backend. A scale that is not of this form leaves the width as it is.

    Example:
        >>> logical_width(24, 20 ** -0.5), logical_width(24, None), logical_width(64, 0.1)
        (20, 24, 64)
    """
    if not scale or padded_width % _HEAD_WIDTH_MULTIPLE:
        return padded_width
    width = round(scale**-2)
    is_exact = abs(scale**-2 - width) < 1e-4 * width
    return width if is_exact and padded_width - _HEAD_WIDTH_MULTIPLE < width <= padded_width else padded_width


def _forward(pairs: int, qk_width: int, v_width: int) -> int:
    return attention_forward_flops(batch=1, q_heads=1, pairs=pairs, qk_width=qk_width, v_width=v_width)


def _backward(pairs: int, work: AttentionWork, needs_grad: Sequence[bool]) -> int:
    """Four products, less those whose result no input needs: dV for V; dA with dQ for Q and dK for K."""
    q, k, v = needs_grad[:3]
    if q and k and v:
        return attention_backward_flops(batch=1, q_heads=1, pairs=pairs, qk_width=work.qk_width, v_width=work.v_width)
    return 2 * pairs * (work.qk_width * (q + k) + work.v_width * (v + (q or k)))


def _kernel_qk_width(work: AttentionWork) -> int:
    return work.qk_width if work.kernel_qk_width is None else work.kernel_qk_width


def _kernel_v_width(work: AttentionWork) -> int:
    return work.v_width if work.kernel_v_width is None else work.kernel_v_width


def _cost(flops: int, palm_flops: int, executed: int, recompute: int, note: str | None) -> OpCost:
    return OpCost(
        flops,
        palm_flops=None if palm_flops == flops else palm_flops,
        masked_flops=executed - flops,
        kernel_recompute_flops=recompute,
        note=note,
    )

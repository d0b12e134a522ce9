"""Attention by shapes alone: attended query-key pairs, and the products over them. One multiply-add is 2 FLOPs.

With ``P`` attended pairs per query head, scores ``Q K^T`` cost ``2 P Dqk`` and the output ``A V`` costs ``2 P Dv``.
Backward is four products over the same pairs: ``dV = A^T dO`` and ``dA = dO V^T`` (``Dv`` wide), ``dQ = dS K`` and
``dK = dS^T Q`` (``Dqk`` wide), so twice the forward. A kernel that does not keep ``A`` computes ``Q K^T`` once more:
the fifth product of FlashAttention's backward (https://arxiv.org/abs/2205.14135, algorithm 4), which is hardware work
and not model work. Softmax, scaling, biases and dropout are elementwise and count 0. Query heads decide: shared
key-value heads (GQA, MQA) save memory, not products.

Every mask of the causal or window kind is a band ``low <= j - i <= high`` in the (query i, key j) plane, and every band
is the difference of two "on or below a diagonal" counts, so one closed form serves them all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

__all__ = [
    "Alignment",
    "attention_backward_flops",
    "attention_forward_flops",
    "attention_recompute_flops",
    "band_pairs",
    "causal_pairs",
    "chunked_pairs",
    "document_pairs",
    "window_pairs",
]

Alignment = Literal["top_left", "bottom_right"]
"""Which corner of a ``Sq != Sk`` score matrix the causal diagonal starts from. ``is_causal`` of PyTorch's
``scaled_dot_product_attention`` is top-left; flash-attn >= 2.1 is bottom-right
(https://github.com/Dao-AILab/flash-attention, "2.1: Change behavior of causal flag")."""


def attention_forward_flops(*, batch: int, q_heads: int, pairs: int, qk_width: int, v_width: int) -> int:
    """FLOPs of ``softmax(Q K^T) V``: two products over the attended pairs.

    Args:
        batch: sequences.
        q_heads: query heads (not key-value heads).
        pairs: attended query-key pairs of one head of one sequence.
        qk_width: width of a query or key head.
        v_width: width of a value head; may differ (MLA).

    Example:
        >>> attention_forward_flops(batch=1, q_heads=12, pairs=64 * 64, qk_width=64, v_width=64)
        12582912
    """
    return 2 * batch * q_heads * pairs * (qk_width + v_width)


def attention_backward_flops(*, batch: int, q_heads: int, pairs: int, qk_width: int, v_width: int) -> int:
    """FLOPs of the gradients of Q, K and V: four products, twice the forward; no recomputation."""
    return 2 * attention_forward_flops(batch=batch, q_heads=q_heads, pairs=pairs, qk_width=qk_width, v_width=v_width)


def attention_recompute_flops(*, batch: int, q_heads: int, pairs: int, qk_width: int) -> int:
    """FLOPs of the ``Q K^T`` that a backward kernel computes again because the probabilities were not kept."""
    return 2 * batch * q_heads * pairs * qk_width


def causal_pairs(q_len: int, k_len: int, *, alignment: Alignment = "top_left") -> int:
    """Pairs with ``j <= i``, the diagonal from the top-left or the bottom-right corner; ``S(S+1)/2`` when square.

    Example:
        >>> causal_pairs(128, 128), causal_pairs(2, 5), causal_pairs(2, 5, alignment="bottom_right")
        (8256, 3, 9)
    """
    return _pairs_up_to_diagonal(q_len, k_len, _offset(q_len, k_len, alignment))


def window_pairs(
    q_len: int,
    k_len: int,
    *,
    left: int | None = None,
    right: int | None = None,
    alignment: Alignment = "bottom_right",
) -> int:
    """Pairs with ``-left <= j - (i + offset) <= right``; None on a side means no limit there.

    A causal window that keeps W keys, the query's own included, is ``left=W-1, right=0``: ``W*S - W(W-1)/2`` pairs
    for ``W <= S``.

    Example:
        >>> window_pairs(8, 8, left=2, right=0)  # W = 3: 3*8 - 3*2/2
        21
    """
    offset = _offset(q_len, k_len, alignment)
    low = None if left is None else offset - left
    high = None if right is None else offset + right
    return band_pairs(q_len, k_len, low=low, high=high)


def band_pairs(q_len: int, k_len: int, *, low: int | None = None, high: int | None = None) -> int:
    """Pairs with ``low <= j - i <= high``; None means no limit. An empty band has 0 pairs."""
    upper = q_len * k_len if high is None else _pairs_up_to_diagonal(q_len, k_len, high)
    lower = 0 if low is None else _pairs_up_to_diagonal(q_len, k_len, low - 1)
    return max(0, upper - lower)


def chunked_pairs(length: int, chunk: int, *, is_causal: bool = True) -> int:
    """Pairs when a sequence is cut into chunks that attend only within themselves (Llama 4's chunked attention).

    Args:
        length: tokens of the sequence.
        chunk: tokens of a chunk; the last one may be shorter.
        is_causal: within a chunk, ``j <= i`` only.
    """
    whole, rest = divmod(length, chunk)
    return document_pairs([(chunk, chunk)] * whole + [(rest, rest)], high=0 if is_causal else None)


def document_pairs(
    lengths: Iterable[tuple[int, int]],
    *,
    low: int | None = None,
    high: int | None = None,
    alignment: Alignment = "top_left",
) -> int:
    """Sum over packed documents of ``(query length, key length)``, each with its own band of offsets ``j - i``.

    Args:
        lengths: one pair a document; attention never crosses documents.
        low: smallest offset kept, from the document's own diagonal; None means no limit.
        high: largest offset kept; 0 is causal.
        alignment: the corner that the diagonal of each document starts from.

    Example:
        >>> document_pairs([(128, 128), (64, 64)])  # 128^2 + 64^2
        20480
    """
    total = 0
    for q_len, k_len in lengths:
        offset = _offset(q_len, k_len, alignment)
        total += band_pairs(
            q_len,
            k_len,
            low=None if low is None else low + offset,
            high=None if high is None else high + offset,
        )
    return total


def _offset(q_len: int, k_len: int, alignment: Alignment) -> int:
    return k_len - q_len if alignment == "bottom_right" else 0


def _pairs_up_to_diagonal(q_len: int, k_len: int, diagonal: int) -> int:
    """Pairs with ``j - i <= diagonal``: row i holds ``clamp(i + diagonal + 1, 0, Sk)``, summed over the rows."""
    return _clamped_sum(diagonal + q_len, k_len) - _clamped_sum(diagonal, k_len)


def _clamped_sum(last: int, ceiling: int) -> int:
    """``sum(min(m, ceiling) for m in 1..last)``: a triangle, then a rectangle of height ``ceiling``."""
    if last <= 0:
        return 0
    ramp = min(last, ceiling)
    return ramp * (ramp + 1) // 2 + (last - ramp) * ceiling

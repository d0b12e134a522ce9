"""Closed forms of attended pairs against boolean matrices, and attention products against loops over products."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfu_monitor.formulas.attention_dense import (
    attention_backward_flops,
    attention_forward_flops,
    attention_recompute_flops,
    band_pairs,
    causal_pairs,
    chunked_pairs,
    document_pairs,
    window_pairs,
)

LENGTH = st.integers(0, 24)
LIMIT = st.none() | st.integers(0, 30)
ALIGNMENT = st.sampled_from(["top_left", "bottom_right"])


def offsets(q_len: int, k_len: int, alignment: str = "top_left") -> np.ndarray:
    """Matrix of ``j - i``, each measured from the diagonal that starts in the given corner."""
    shift = k_len - q_len if alignment == "bottom_right" else 0
    return np.arange(k_len)[None, :] - (np.arange(q_len)[:, None] + shift)


def count_band(offset: np.ndarray, low: int | None, high: int | None) -> int:
    keep = np.ones_like(offset, dtype=bool)
    if low is not None:
        keep &= offset >= low
    if high is not None:
        keep &= offset <= high
    return int(keep.sum())


@given(LENGTH, LENGTH, ALIGNMENT)
def test_causal_pairs_are_the_true_entries_of_the_mask(q_len: int, k_len: int, alignment: Any) -> None:
    expected = count_band(offsets(q_len, k_len, alignment), None, 0)
    assert causal_pairs(q_len, k_len, alignment=alignment) == expected


@given(LENGTH, LENGTH, LIMIT, LIMIT, ALIGNMENT)
def test_window_pairs_are_the_true_entries_of_the_mask(
    q_len: int, k_len: int, left: int | None, right: int | None, alignment: Any
) -> None:
    expected = count_band(offsets(q_len, k_len, alignment), None if left is None else -left, right)
    assert window_pairs(q_len, k_len, left=left, right=right, alignment=alignment) == expected


@given(LENGTH, LENGTH, st.none() | st.integers(-30, 30), st.none() | st.integers(-30, 30))
def test_band_pairs_are_the_true_entries_also_when_the_band_is_empty_or_outside(
    q_len: int, k_len: int, low: int | None, high: int | None
) -> None:
    assert band_pairs(q_len, k_len, low=low, high=high) == count_band(offsets(q_len, k_len), low, high)


@given(st.integers(0, 40), st.integers(1, 50), st.booleans())
def test_chunked_pairs_stay_within_their_chunk(length: int, chunk: int, is_causal: bool) -> None:
    rows, columns = np.arange(length)[:, None], np.arange(length)[None, :]
    keep = rows // chunk == columns // chunk
    if is_causal:
        keep &= columns <= rows
    assert chunked_pairs(length, chunk, is_causal=is_causal) == keep.sum()


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=5), LIMIT, st.booleans(), ALIGNMENT)
def test_document_pairs_are_a_block_diagonal_mask(
    lengths: Any, left: int | None, is_causal: bool, alignment: Any
) -> None:
    q_documents = np.repeat(np.arange(len(lengths)), [q for q, _ in lengths])
    k_documents = np.repeat(np.arange(len(lengths)), [k for _, k in lengths])
    keep = q_documents[:, None] == k_documents[None, :]
    local = np.zeros_like(keep, dtype=int)
    q_start = k_start = 0
    for q_len, k_len in lengths:
        local[q_start : q_start + q_len, k_start : k_start + k_len] = offsets(q_len, k_len, alignment)
        q_start, k_start = q_start + q_len, k_start + k_len
    if left is not None:
        keep = keep & (local >= -left)
    if is_causal:
        keep = keep & (local <= 0)
    found = document_pairs(
        lengths, low=None if left is None else -left, high=0 if is_causal else None, alignment=alignment
    )
    assert found == keep.sum()


@pytest.mark.parametrize("S", [1, 2, 128, 8192])
def test_a_square_causal_mask_is_a_triangle(S: int) -> None:
    assert causal_pairs(S, S) == causal_pairs(S, S, alignment="bottom_right") == S * (S + 1) // 2


@pytest.mark.parametrize(("S", "W"), [(8, 3), (8, 8), (4096, 1024), (1, 1)])
def test_a_causal_window_is_a_strip_without_its_missing_corner(S: int, W: int) -> None:
    assert window_pairs(S, S, left=W - 1, right=0) == W * S - W * (W - 1) // 2


def test_a_window_wider_than_the_sequence_is_plain_causal() -> None:
    assert window_pairs(8, 8, left=100, right=0) == 8 * 9 // 2


@pytest.mark.parametrize(
    ("q_len", "k_len", "top_left", "bottom_right"),
    [
        (2, 5, 1 + 2, 4 + 5),
        (1, 5, 1, 5),  # decoding with a cache: one query sees every key
        (5, 2, 1 + 2 + 2 + 2 + 2, 0 + 0 + 0 + 1 + 2),
        (0, 5, 0, 0),
        (5, 0, 0, 0),
    ],
)
def test_the_two_corners_differ_when_queries_and_keys_do(
    q_len: int, k_len: int, top_left: int, bottom_right: int
) -> None:
    assert causal_pairs(q_len, k_len) == top_left
    assert causal_pairs(q_len, k_len, alignment="bottom_right") == bottom_right


def test_four_packed_documents_are_a_quarter_of_the_square() -> None:
    packed = document_pairs([(2048, 2048)] * 4)
    assert packed == 4 * 2048**2
    assert packed * 4 == 8192 * 8192


def test_forward_is_two_products_and_backward_four() -> None:
    B, H, P, Dqk, Dv = 2, 3, 11, 192, 128
    scores, output = 2 * B * H * P * Dqk, 2 * B * H * P * Dv
    widths = {"qk_width": Dqk, "v_width": Dv}
    assert attention_forward_flops(batch=B, q_heads=H, pairs=P, **widths) == scores + output
    grad_v, grad_probabilities = output, output
    grad_q, grad_k = scores, scores
    expected = grad_v + grad_probabilities + grad_q + grad_k
    assert attention_backward_flops(batch=B, q_heads=H, pairs=P, **widths) == expected
    assert attention_recompute_flops(batch=B, q_heads=H, pairs=P, qk_width=Dqk) == scores


def test_the_flash_kernel_of_one_small_head_set_trains_at_seven_products() -> None:
    B, H, S, D = 1, 12, 64, 64
    product = 2 * B * H * S * S * D
    shape = {"batch": B, "q_heads": H, "pairs": S * S, "qk_width": D}
    forward = attention_forward_flops(**shape, v_width=D)
    backward = attention_backward_flops(**shape, v_width=D)
    assert forward == 2 * product == 12_582_912
    assert forward + backward == 6 * product == 37_748_736
    assert forward + backward + attention_recompute_flops(**shape) == 7 * product == 44_040_192

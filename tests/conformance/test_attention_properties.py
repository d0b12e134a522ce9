"""Attention under random masks: every kernel's model FLOPs are those of a boolean mask counted entry by entry."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

from mfu_monitor.counting.counter import FlopCounter
from mfu_monitor.counting.step_record import StepRecord

KERNELS = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]


def train(kernel: SDPBackend, B: int, H: int, q_len: int, k_len: int, D: int, **kwargs: Any) -> StepRecord:
    query = torch.zeros(B, H, q_len, D, requires_grad=True)
    key, value = (torch.zeros(B, H, k_len, D, requires_grad=True) for _ in range(2))
    with sdpa_kernel(kernel), FlopCounter() as counter:
        F.scaled_dot_product_attention(query, key, value, **kwargs).sum().backward()
    return counter.record


@st.composite
def masks(draw: st.DrawFn) -> torch.Tensor:
    """A causal, window, document, padding or arbitrary mask, by head or shared, as booleans."""
    S = draw(st.integers(1, 12))
    rows, columns = torch.arange(S)[:, None], torch.arange(S)[None, :]
    kind = draw(st.sampled_from(["causal", "window", "documents", "padding", "arbitrary"]))
    if kind == "causal":
        mask = columns <= rows
    elif kind == "window":
        mask = (columns <= rows) & (rows - columns < draw(st.integers(1, S)))
    elif kind == "documents":
        ids = torch.tensor(sorted(draw(st.lists(st.integers(0, 3), min_size=S, max_size=S))))
        mask = ids[:, None] == ids[None, :]
    elif kind == "padding":
        mask = (columns < draw(st.integers(1, S))).expand(S, S)
    else:
        mask = torch.tensor(draw(st.lists(st.booleans(), min_size=S * S, max_size=S * S))).reshape(S, S)
    return mask


@settings(max_examples=25, deadline=None)
@given(mask=masks(), B=st.integers(1, 2), H=st.integers(1, 3), is_additive=st.booleans())
def test_any_mask_counts_its_true_entries_on_every_kernel(
    mask: torch.Tensor, B: int, H: int, is_additive: bool
) -> None:
    S, D = len(mask), 8
    given_mask = torch.zeros(S, S).masked_fill(~mask, float("-inf")) if is_additive else mask
    product, square = 2 * B * H * int(mask.sum()) * D, 2 * B * H * S * S * D
    math_path, flash = (train(kernel, B, H, S, S, D, attn_mask=given_mask) for kernel in KERNELS)
    assert math_path.model_flops == flash.model_flops == 6 * product
    assert math_path.palm_model_flops == flash.palm_model_flops == 6 * square
    assert math_path.hardware_flops == 6 * square
    assert flash.hardware_flops == 7 * square


@settings(max_examples=15, deadline=None)
@given(q_len=st.integers(1, 12), k_len=st.integers(1, 12), is_causal=st.booleans())
def test_flags_count_the_same_pairs_on_every_kernel(q_len: int, k_len: int, is_causal: bool) -> None:
    kept = torch.ones(q_len, k_len).tril() if is_causal else torch.ones(q_len, k_len)
    product = 2 * 2 * int(kept.sum()) * 4
    for kernel in KERNELS:
        assert train(kernel, 1, 2, q_len, k_len, 4, is_causal=is_causal).model_flops == 6 * product


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_sequence_twice_as_long_costs_two_sequences_and_their_cross_pairs(
    kernel: SDPBackend, is_causal: bool
) -> None:
    S, D, heads = 24, 8, 3
    one, two = (train(kernel, 1, heads, length, length, D, is_causal=is_causal).model_flops for length in (S, 2 * S))
    cross_pairs = S * S if is_causal else 2 * S * S
    assert two - 2 * one == 6 * (2 * heads * cross_pairs * D)

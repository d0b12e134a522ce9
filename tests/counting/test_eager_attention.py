"""Attention in eager: masks by what they hide, and products of the weights that a layer gives back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import mfu_monitor as mm

B, H, S, D = 2, 2, 16, 8
KEPT = 6
"""Keys that the second sequence keeps."""
PAIRS = H * (S * S + S * KEPT)


def count(step: Any) -> mm.StepRecord:
    with mm.FlopCounter() as counter:
        step()
    assert not counter.record.is_lower_bound, counter.record.notes
    return counter.record


def padding(value: float, dtype: torch.dtype) -> torch.Tensor:
    mask = torch.zeros(B, 1, 1, S, dtype=dtype)
    mask[1, ..., KEPT:] = value
    return mask


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], ids=lambda b: b.name)
@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        *((value, torch.float32) for value in (float("-inf"), torch.finfo(torch.float32).min, -1e9, -1e8, -1e5, -1e4)),
        *((value, torch.float16) for value in (-65504.0, -1e4)),
        *((value, torch.bfloat16) for value in (-1e9, -65504.0, -1e4)),
    ],
    ids=str,
)
def test_an_additive_mask_counts_by_the_pairs_it_leaves(value: float, dtype: torch.dtype, backend: Any) -> None:
    query = torch.ones(B, H, S, D, dtype=dtype, requires_grad=True)
    with sdpa_kernel(backend):
        record = count(
            lambda: scaled_dot_product_attention(query, query, query, padding(value, dtype)).sum().backward()
        )
    assert record.model_flops == 6 * 2 * PAIRS * D


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], ids=lambda b: b.name)
def test_a_bias_hides_nothing(backend: Any) -> None:
    """ALiBi with the steepest slope of eight heads, 0.5 for each position."""
    position = torch.arange(S)
    bias = -0.5 * (position[:, None] - position).abs().float()
    query = torch.ones(B, H, S, D)
    with sdpa_kernel(backend):
        assert (
            count(lambda: scaled_dot_product_attention(query, query, query, bias)).model_flops == 4 * B * H * S * S * D
        )


def test_scores_far_below_zero_hide_nothing_where_no_mask_is_given() -> None:
    query = torch.full((B, H, S, D), 1e2)
    with sdpa_kernel(SDPBackend.MATH):
        record = count(lambda: scaled_dot_product_attention(query, -query, query))
    assert record.model_flops == 4 * B * H * S * S * D


LENGTH, WIDTH, HEADS = 6, 8, 2
CAUSAL = LENGTH * (LENGTH + 1) // 2
PROJECTIONS = 4 * (2 * 2 * LENGTH * WIDTH * WIDTH)
SQUARE_OF_WEIGHTS = 2 * HEADS * (2 * LENGTH**3)
"""W @ W of 2 sequences: a product of the user's own, dense."""


def attend(layer: nn.MultiheadAttention, x: torch.Tensor) -> Any:
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
    return layer(x, x, x, attn_mask=mask, average_attn_weights=False)


def test_products_of_returned_weights_are_the_users_own() -> None:
    layer, x = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), torch.ones(2, LENGTH, WIDTH)

    def step() -> None:
        _, weights = attend(layer, x)
        weights @ weights

    with torch.no_grad():
        record = count(step)
    assert record.model_flops == PROJECTIONS + 2 * 2 * (2 * CAUSAL * WIDTH) + SQUARE_OF_WEIGHTS


def test_products_of_returned_weights_cost_their_gradients_dense() -> None:
    layer, x = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), torch.ones(2, LENGTH, WIDTH)

    def step() -> None:
        output, weights = attend(layer, x)
        (output.sum() + (weights @ weights).sum()).backward()

    # The projection of q, k and v is of data: three quarters of the projections have no gradient of their input.
    projections = 3 * PROJECTIONS - 3 * PROJECTIONS // 4
    assert count(step).model_flops == projections + 3 * (2 * 2 * (2 * CAUSAL * WIDTH) + SQUARE_OF_WEIGHTS)


def test_products_of_the_weights_with_dropout_are_the_users_own() -> None:
    layer, x = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.5, batch_first=True), torch.ones(2, LENGTH, WIDTH)

    def step() -> None:
        _, weights = attend(layer, x)
        weights @ x[:, None]

    with torch.no_grad():
        record = count(step)
    by_user = 2 * HEADS * (2 * LENGTH * LENGTH * WIDTH)
    assert record.model_flops == PROJECTIONS + 2 * 2 * (2 * CAUSAL * WIDTH) + by_user

"""Attended pairs read from masks, against a boolean matrix built in the test."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from mfu_monitor.formulas import attention_masks as masks
from mfu_monitor.formulas.attention_masks import attended_pairs, attended_pairs_of_scores, has_content

B, H, SQ, SK = 2, 3, 5, 7
BROADCAST_SHAPES = [
    (SK,),
    (1, 1),
    (SQ, SK),
    (SQ, 1),
    (1, SQ, SK),
    (B, 1, 1, SK),
    (1, H, SQ, SK),
    (B, H, SQ, SK),
    (B, 1, SQ, 1),
]


def random_bool(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.6


def as_float(mask: torch.Tensor, hidden: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, hidden)


def counted(mask: torch.Tensor, *, is_causal: bool = False) -> int | None:
    return attended_pairs(mask, batch=B, heads=H, q_len=SQ, k_len=SK, is_causal=is_causal)


@pytest.mark.parametrize("shape", BROADCAST_SHAPES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_every_broadcast_shape_counts_as_its_expanded_matrix(shape: tuple[int, ...], is_causal: bool) -> None:
    mask = random_bool(shape)
    expanded = mask.expand(B, H, SQ, SK)
    if is_causal:
        expanded = expanded & torch.ones(SQ, SK, dtype=torch.bool).tril()
    assert counted(mask, is_causal=is_causal) == expanded.sum().item()


@pytest.mark.parametrize(
    ("hidden", "dtype"),
    [
        (float("-inf"), torch.float32),
        (torch.finfo(torch.float32).min, torch.float32),
        (torch.finfo(torch.bfloat16).min, torch.bfloat16),
        (torch.finfo(torch.float16).min, torch.float16),
        (-1e9, torch.float32),
        (-1e8, torch.float32),
        (-1e4, torch.float32),
        (-1e4, torch.float16),
        (-1e4, torch.bfloat16),
        (float("-inf"), torch.float64),
    ],
)
def test_every_way_to_write_a_masked_pair_is_read_as_masked(hidden: float, dtype: torch.dtype) -> None:
    mask = random_bool((B, 1, SQ, SK))
    assert counted(as_float(mask, hidden, dtype)) == H * mask.sum().item()


def test_a_bias_is_not_a_mask() -> None:
    distance = torch.arange(SQ)[:, None] - torch.arange(SK)[None, :]
    assert counted(-0.5 * distance.abs().float() * 1024) == B * H * SQ * SK


def test_a_bias_that_leaves_a_weight_of_zero_hides_the_pair() -> None:
    """ALiBi over tens of thousands of positions: -8192 and below, where exp() is 0 in every precision."""
    distance = torch.arange(SQ)[:, None] - torch.arange(SK)[None, :]
    assert counted(-0.5 * distance.abs().float() * 8192) == B * H * sum(
        abs(i - j) < 2 for i in range(SQ) for j in range(SK)
    )


def test_fully_masked_rows_attend_nothing() -> None:
    mask = torch.ones(SQ, SK, dtype=torch.bool)
    mask[2] = False
    assert counted(mask) == B * H * (SQ - 1) * SK
    assert counted(torch.zeros(1, 1, dtype=torch.bool)) == 0


def test_an_expanded_mask_is_read_once_and_counts_in_full() -> None:
    mask = random_bool((1, 1, SQ, SK)).expand(B, H, SQ, SK)
    assert masks._without_repeats(mask).shape == (1, 1, SQ, SK)
    assert counted(mask) == mask.sum().item()


def test_masks_without_contents_are_unknown_and_not_zero() -> None:
    assert counted(torch.ones(SQ, SK, device="meta")) is None
    with FakeTensorMode():
        assert counted(torch.ones(SQ, SK)) is None
        assert attended_pairs_of_scores(torch.ones(2, 2)) is None
    assert attended_pairs_of_scores(torch.ones(2, 2, device="meta")) is None
    assert has_content(torch.ones(1))


def test_what_is_no_mask_is_unknown() -> None:
    assert counted(torch.ones(SQ + 1, SK, dtype=torch.bool)) is None
    assert counted(torch.ones(1, 1, 1, SQ, SK, dtype=torch.bool)) is None
    assert counted(torch.ones(SQ, SK, dtype=torch.int64)) is None


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(*[st.integers(0, 4)] * 2, *[st.integers(0, 9)] * 2),
    chunk=st.integers(1, 40),
    is_causal=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_chunk_size_never_changes_the_count(shape: tuple[int, ...], chunk: int, is_causal: bool, seed: int) -> None:
    mask = random_bool(shape, seed)
    expected = mask & torch.ones(shape[-2:], dtype=torch.bool).tril() if is_causal else mask
    batch, heads, q_len, k_len = shape
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "CHUNK_ELEMENTS", chunk)
        found = attended_pairs(mask, batch=batch, heads=heads, q_len=q_len, k_len=k_len, is_causal=is_causal)
        assert found == expected.sum().item()
        assert attended_pairs_of_scores(as_float(mask, float("-inf"))) == mask.sum().item()


def test_no_chunk_is_larger_than_the_limit_unless_a_row_is() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "CHUNK_ELEMENTS", 20)
        sizes = [chunk.numel() for chunk, _ in masks._chunks(torch.zeros(3, 2, 6, 7))]
    assert max(sizes) <= 20
    assert sum(sizes) == 3 * 2 * 6 * 7


def test_scores_keep_what_masks_hide_apart_after_the_addition() -> None:
    mask = random_bool((2, 4, 6, 6))
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        added = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(1)).to(dtype) * 8
        scores = added + as_float(mask, torch.finfo(dtype).min, dtype)
        assert attended_pairs_of_scores(scores) == mask.sum().item()


def test_scores_that_are_nan_still_count_as_work() -> None:
    assert attended_pairs_of_scores(torch.full((3, 3), float("nan"))) == 9


def test_reading_draws_no_random_numbers_and_leaves_no_graph() -> None:
    state = torch.get_rng_state()
    bias = torch.zeros(SQ, SK, requires_grad=True)
    assert counted(bias) == B * H * SQ * SK
    assert torch.equal(torch.get_rng_state(), state)
    assert bias._version == 0

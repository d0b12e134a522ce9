"""Attention that the compiler decomposes because of its dropout: each of its six products is counted by its mask."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

import mfu_monitor as mm
from mfu_monitor.counting.compiled.watch import guards_notice_modes

pytestmark = pytest.mark.skipif(
    guards_notice_modes(), reason="before torch 2.10 counted steps of compiled code run in eager"
)
BATCH, TOKENS, WIDTH, HEADS = 2, 16, 32, 4


class SelfAttention(nn.Module):
    def __init__(self, mask: Tensor | None, dropout: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.mask, self.dropout = mask, dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(BATCH, TOKENS, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        is_causal = self.mask is None
        out: Tensor = nnf.scaled_dot_product_attention(q, k, v, self.mask, self.dropout, is_causal=is_causal)
        return out.sum()


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


WINDOW = 4
CAUSAL_PAIRS = TOKENS * (TOKENS + 1) // 2
WINDOW_PAIRS = TOKENS * WINDOW - WINDOW * (WINDOW - 1) // 2


def _window() -> Tensor:
    distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    return (distance >= 0) & (distance < WINDOW)


@pytest.mark.parametrize("dropout", [0.1, 0.5])
@pytest.mark.parametrize(
    ("mask", "pairs"),
    [(lambda: None, CAUSAL_PAIRS), (_window, WINDOW_PAIRS), (lambda: torch.ones(TOKENS, TOKENS), TOKENS * TOKENS)],
    ids=["causal", "window", "additive, nothing hidden"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_six_products_follow_the_mask(
    mask: Callable[[], Tensor | None], pairs: int, dropout: float, dtype: torch.dtype
) -> None:
    given = mask()
    if given is not None and given.is_floating_point():
        given = given.to(dtype)
    model = SelfAttention(given, dropout).to(dtype)
    x = torch.randn(BATCH, TOKENS, WIDTH, dtype=dtype)
    compiled = torch.compile(model)
    compiled(x).backward()
    with mm.FlopCounter(model) as counter:
        compiled(x).backward()
    projections = 2 * (2 * BATCH * TOKENS * WIDTH * 3 * WIDTH)
    product = 2 * BATCH * HEADS * pairs * (WIDTH // HEADS)
    assert not counter.record.is_lower_bound
    assert counter.record.model_flops == projections + 6 * product

"""Closed forms against the figures that their sources print, and N by logical shapes."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from mfu_monitor.formulas.analytic import (
    chinchilla_training_flops,
    embedding_parameters,
    logical_numel,
    non_embedding_parameters,
    palm_flops_per_token,
)


def test_6nd_of_the_usual_example() -> None:
    assert chinchilla_training_flops(70 * 10**9, 15 * 10**12) == 63 * 10**23  # 6.3e24


def test_gpt3_as_its_paper_prints_it() -> None:
    # Brown et al. 2020, table D.1: 174.6e9 parameters, 300e9 tokens, 3.14e23 FLOPs
    assert round(chinchilla_training_flops(174_600 * 10**6, 300 * 10**9) / 1e23, 2) == 3.14


def test_palm_adds_the_full_square_of_attention() -> None:
    L, H, Q, T = 118, 48, 256, 2048
    attention = 12 * L * H * Q * T
    assert palm_flops_per_token(540, layers=L, heads=H, head_width=Q, sequence_length=T) == 6 * 540 + attention
    # a layer's scores and values: 2 products of 2*T*(H*Q) each, three times for training
    assert attention == L * 3 * 2 * (2 * T * H * Q)


class Tiny(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, 8), nn.Embedding(16, 8)
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 50, bias=False)
        if tied:
            self.head.weight = self.tokens.weight


def test_look_ups_are_left_out_of_n() -> None:
    model = Tiny(tied=False)
    assert non_embedding_parameters(model) == (8 * 8 + 8) + 8 * 50
    assert embedding_parameters(model) == 50 * 8 + 16 * 8


def test_tying_the_head_changes_neither_n_nor_the_products() -> None:
    assert non_embedding_parameters(Tiny(tied=True)) == non_embedding_parameters(Tiny(tied=False))
    assert embedding_parameters(Tiny(tied=True)) == 16 * 8


def test_a_module_used_twice_counts_once() -> None:
    shared = nn.Linear(4, 4, bias=False)
    assert non_embedding_parameters(nn.Sequential(shared, shared)) == 16


def test_a_packed_weight_counts_as_the_weight_it_stands_for() -> None:
    packed = nn.Parameter(torch.zeros(64 * 32 // 2, 1, dtype=torch.uint8), requires_grad=False)
    state = SimpleNamespace(shape=torch.Size([64, 32]))  # as bitsandbytes keeps it
    setattr(packed, "quant_state", state)  # noqa: B010  (typed code has no such attribute)
    assert logical_numel(packed) == 64 * 32
    assert logical_numel(torch.zeros(3, 5)) == 15


def test_meta_parameters_count_without_memory() -> None:
    with torch.device("meta"):
        assert non_embedding_parameters(nn.Linear(100_000, 100_000, bias=False)) == 10**10

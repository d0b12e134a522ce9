"""Training on batches of ever new sizes: after a few counts every window is exact, or says that it is not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mfu_monitor as mm

D, HEADS, VOCABULARY = 32, 4, 64


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, *, is_causal: bool = False) -> torch.Tensor:
        (B, T, _), S = x.shape, memory.shape[1]
        q = self.q(x).view(B, T, HEADS, -1).transpose(1, 2)
        k, v = self.kv(memory).view(B, S, 2, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        return self.out(y.transpose(1, 2).reshape(B, T, D))


def attention_flops(B: int, T: int, S: int, *, is_causal: bool = False) -> int:
    """Forward: four projections, and two products of every attended pair of a query and a key."""
    pairs = T * (T + 1) // 2 if is_causal else T * S
    return 2 * B * D * D * (T + 2 * S + T) + 2 * 2 * B * pairs * D


class CausalLM(nn.Module):
    """Embedding, two blocks with a matmul of 4 D, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, D), nn.Linear(D, VOCABULARY)
        self.attention = nn.ModuleList(Attention() for _ in range(2))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D)) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for attention, mlp in zip(self.attention, self.mlp, strict=True):
            x = x + attention(x, x, is_causal=True)
            x = x + mlp(x)
        return self.head(x)


def causal_lm(rng: random.Random) -> tuple[Any, int]:
    B, S = rng.randint(1, 8), rng.randint(8, 96)
    forward = (
        2 * attention_flops(B, S, S, is_causal=True) + 2 * (2 * 2 * B * S * D * 4 * D) + 2 * B * S * D * VOCABULARY
    )
    return torch.zeros(
        B, S, dtype=torch.long
    ), 3 * forward  # the embedding takes no gradient: backward is twice forward


class TwoLengths(nn.Module):
    """An encoder layer over S tokens and a decoder layer over T, self- and cross-attention in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, D), nn.Linear(D, VOCABULARY)
        self.encoder, self.decoder, self.cross = Attention(), Attention(), Attention()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        memory, y = self.embedding(input_ids), self.embedding(labels)
        memory = memory + self.encoder(memory, memory)
        y = y + self.decoder(y, y, is_causal=True)
        return self.head(y + self.cross(y, memory))


def two_lengths(rng: random.Random) -> tuple[Any, int]:
    B, S, T = rng.randint(1, 6), rng.randint(8, 60), rng.randint(4, 40)
    forward = attention_flops(B, S, S) + attention_flops(B, T, T, is_causal=True) + attention_flops(B, T, S)
    forward += 2 * B * T * D * VOCABULARY
    batch = {"input_ids": torch.zeros(B, S, dtype=torch.long), "labels": torch.zeros(B, T, dtype=torch.long)}
    return batch, 3 * forward


class ViT(nn.Module):
    """Patches of 8 x 8, a class token, one attention layer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.attention = nn.Conv2d(3, D, 8, stride=8), Attention()
        self.token, self.head = nn.Parameter(torch.zeros(1, 1, D)), nn.Linear(D, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        return self.head((x + self.attention(x, x))[:, 0])


def vit_flops(B: int, H: int, W: int) -> int:
    n = (H // 8) * (W // 8) + 1
    patches = 2 * B * (n - 1) * D * 3 * 64
    return 2 * patches + 3 * (attention_flops(B, n, n) + 2 * B * D * 10)  # no gradient of the images


def vit_square(rng: random.Random) -> tuple[Any, int]:
    B, H = rng.randint(1, 6), 8 * rng.randint(2, 8)
    return (torch.zeros(B, 3, H, H), torch.zeros(B, dtype=torch.long)), vit_flops(B, H, H)


def vit_oblong(rng: random.Random) -> tuple[Any, int]:
    B, H, W = rng.randint(1, 6), 8 * rng.randint(2, 6), 8 * rng.randint(2, 6)
    return (torch.zeros(B, 3, H, W), torch.zeros(B, dtype=torch.long)), vit_flops(B, H, W)


class Convolutions(nn.Module):
    """Two strided convolutions and a residual one, pooled: a ResNet's pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(3, 8, 7, stride=2, padding=3), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.residual, self.head = nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.down(self.stem(images).relu()).relu()
        return self.head((x + self.residual(x)).mean((2, 3)))


def convolution_flops(B: int, H: int) -> int:
    half = (H + 1) // 2  # floor((H + 2 * 3 - 7) / 2) + 1
    quarter = (half + 1) // 2
    stem = 2 * B * half * half * 8 * 3 * 49
    rest = 2 * B * quarter * quarter * 16 * 9 * (8 + 16) + 2 * B * 16 * 10
    return 2 * stem + 3 * rest


def convolutions(rng: random.Random) -> tuple[Any, int]:
    B, H = rng.randint(1, 4), 32 * rng.randint(1, 4)
    return (torch.zeros(B, 3, H, H), torch.zeros(B, dtype=torch.long)), convolution_flops(B, H)


def odd_images(rng: random.Random) -> tuple[Any, int]:
    B, H = rng.randint(1, 4), rng.randint(20, 90)
    return (torch.zeros(B, 3, H, H), torch.zeros(B, dtype=torch.long)), convolution_flops(B, H)


class Speech(nn.Module):
    """Whisper's pieces: 64 frames through two convolutions and an encoder, a decoder of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(8, D, 3, padding=1), nn.Conv1d(D, D, 3, stride=2, padding=1)
        self.embedding, self.head = nn.Embedding(VOCABULARY, D), nn.Linear(D, VOCABULARY, bias=False)
        self.encoder, self.decoder, self.cross = Attention(), Attention(), Attention()

    def forward(self, input_features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(input_features)).transpose(1, 2)
        x, y = x + self.encoder(x, x), self.embedding(labels)
        y = y + self.decoder(y, y, is_causal=True)
        return self.head(y + self.cross(y, x))


def speech(rng: random.Random) -> tuple[Any, int]:
    B, T = rng.randint(1, 4), rng.randint(4, 40)
    first, second = 2 * B * 64 * D * 8 * 3, 2 * B * 32 * D * D * 3
    rest = attention_flops(B, 32, 32) + attention_flops(B, T, T, is_causal=True) + attention_flops(B, T, 32)
    rest += 2 * B * T * D * VOCABULARY
    batch = {"input_features": torch.zeros(B, 8, 64), "labels": torch.zeros(B, T, dtype=torch.long)}
    return batch, 2 * first + 3 * (second + rest)


class Experts(nn.Module):
    """Four experts with a capacity of 1.25 shares of the tokens, rounded up."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, D)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids).flatten(0, 1)
        capacity = -(-len(x) * 5 // 16)
        padded = F.pad(x, (0, 0, 0, 4 * capacity - len(x)))
        return sum(expert(part) for expert, part in zip(self.experts, padded.split(capacity), strict=True))  # type: ignore[return-value]


def experts(rng: random.Random) -> tuple[Any, int]:
    B, S = rng.randint(1, 8), rng.randint(8, 96)
    return torch.zeros(B, S, dtype=torch.long), 3 * 4 * 2 * -(-B * S * 5 // 16) * D * D


def trained(
    model: nn.Module, draws: Callable[[random.Random], tuple[Any, int]], steps: int, **options: Any
) -> Iterator[Any]:
    """Trains, and yields (reading, model FLOPs of its steps) of each window; the last is (None, those of the run)."""
    optimizer = torch.optim.AdamW(model.parameters())
    rng, expected, flops = random.Random(0), 0, []
    monitor = mm.Monitor(model, log_every_n_steps=20, peak=1e12, console=False, **options)
    seen = None
    for _ in range(steps):
        batch, step_flops = draws(rng)
        with monitor.step(batch):
            inputs = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, tuple) else (batch,)
            model(*inputs).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        expected += step_flops
        flops.append(step_flops)
        if monitor.reading is not seen:
            seen = monitor.reading
            yield seen, flops
    monitor.close()
    yield monitor, expected


FOLLOW = [
    (CausalLM, causal_lm),
    (TwoLengths, two_lengths),
    (ViT, vit_square),
    (ViT, vit_oblong),
    (Convolutions, convolutions),
    (Speech, speech),
]


@pytest.mark.parametrize(("model", "draws"), FOLLOW, ids=lambda value: value.__name__)
def test_batches_of_new_sizes_are_exact_once_their_law_is_known(model: type[nn.Module], draws: Any) -> None:
    *windows, (monitor, expected) = trained(model(), draws, 200)
    labels = [reading.exactness for reading, _ in windows]
    assert set(labels[len(labels) // 2 :]) == {"exact"}
    assert monitor.totals["model_flops"] == expected
    assert sum(1 for _ in monitor.records) < 40


@pytest.mark.parametrize(("model", "draws"), [(Convolutions, odd_images), (Experts, experts)], ids=lambda v: v.__name__)
def test_where_sizes_are_rounded_up_nothing_is_called_exact(model: type[nn.Module], draws: Any) -> None:
    *windows, (monitor, expected) = trained(model(), draws, 120)
    assert {reading.exactness for reading, _ in windows} == {"sampled"}
    assert monitor.totals["model_flops"] != expected
    assert monitor.totals["model_flops"] == pytest.approx(expected, rel=0.1)


def test_600_random_lengths_add_up_to_the_closed_form() -> None:
    *windows, (monitor, expected) = trained(CausalLM(), causal_lm, 600)
    assert monitor.totals["model_flops"] == expected
    assert [reading.exactness for reading, _ in windows][5:] == ["exact"] * len(windows[5:])

"""Counting changes no bit: outputs, gradients, weights, optimizer state and random state with every step counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mfu_monitor.counting.compiled.watch import guards_notice_modes

from .bits import WATCHERS, compare, differences, left_behind

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTH = 16


class Shuffle(nn.Module):
    """Channels in groups, shuffled: another operator with a composite kernel beside its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.channel_shuffle(x.view(-1, WIDTH, 1, 1), 4).reshape(x.shape)


class Rows(nn.Module):
    """An activation of pictures, on rows."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x[None, :, :, None])[0, :, :, 0]


class Attend(nn.Module):
    """Attention of the rows to themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, dropout=0.1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x, x, x)[0]


SPECIAL: dict[str, Callable[[], nn.Module]] = {
    "Threshold": lambda: nn.Threshold(0.1, 0.5),
    "Softmax2d": lambda: Rows(nn.Softmax2d()),
    "MultiheadAttention": Attend,
    "GLU": lambda: nn.Sequential(nn.GLU(dim=-1), nn.Linear(WIDTH // 2, WIDTH)),
    "Softmin": lambda: nn.Softmin(dim=-1),
    "Softmax": lambda: nn.Softmax(dim=-1),
    "LogSoftmax": lambda: nn.LogSoftmax(dim=-1),
}
ACTIVATIONS = {name: SPECIAL.get(name, getattr(nn, name)) for name in nn.modules.activation.__all__}
OTHERS: dict[str, Callable[[], nn.Module]] = {
    "channel_shuffle": Shuffle,
    "dropout": lambda: nn.Dropout(0.3),
    "alpha dropout": lambda: nn.AlphaDropout(0.3),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "RMS norm": lambda: nn.RMSNorm(WIDTH),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "group norm": lambda: nn.GroupNorm(2, WIDTH),
}


def net(activation: Callable[[], nn.Module], dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), activation(), nn.Linear(WIDTH, WIDTH), activation())
    return model.to(dtype), torch.randn(6, WIDTH).to(dtype)


def train(model: nn.Module, x: Any) -> Any:
    y = model(x)
    y.float().square().sum().backward()
    return y


def infer(model: nn.Module, x: Any) -> Any:
    with torch.inference_mode():
        return model(x)


def train_checkpointed(model: nn.Module, x: Any) -> Any:
    return train(lambda v: checkpoint(model, v, use_reentrant=False), x)  # type: ignore[arg-type]


def train_checkpointed_reentrant(model: nn.Module, x: Any) -> Any:
    return train(lambda v: checkpoint(model, v, use_reentrant=True), x.requires_grad_())  # type: ignore[arg-type]


def train_accumulated(model: nn.Module, x: Any) -> Any:
    return [train(model, x), train(model, 2 * x)]


def train_under_autocast(model: nn.Module, x: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(x)
    y.float().square().sum().backward()
    return y


STEPS = (train, infer, train_checkpointed, train_checkpointed_reentrant, train_accumulated)


NOT_ON_CPU = {("RReLU", torch.float16)}
"""What torch has no CPU kernel for."""
RUNS = [(name, dtype) for name in (*ACTIVATIONS, *OTHERS) for dtype in DTYPES if (name, dtype) not in NOT_ON_CPU]


@pytest.mark.parametrize("watcher", WATCHERS)
@pytest.mark.parametrize(("name", "dtype"), RUNS, ids=str)
def test_counting_changes_no_bit_of_any_activation(name: str, dtype: torch.dtype, watcher: str) -> None:
    make = {**ACTIVATIONS, **OTHERS}[name]
    # torch's own RReLU saves its noise before it draws it: recomputed, two runs without us differ already.
    for step in (s for s in STEPS if (name, s) != ("RReLU", train_checkpointed)):
        compare(lambda: net(make, dtype), step, watcher)


@pytest.mark.parametrize("watcher", WATCHERS)
@pytest.mark.parametrize("name", [*ACTIVATIONS, *OTHERS])
def test_counting_changes_no_bit_under_autocast(name: str, watcher: str) -> None:
    compare(lambda: net({**ACTIVATIONS, **OTHERS}[name], torch.float32), train_under_autocast, watcher)


def test_every_activation_of_torch_is_in_the_table() -> None:
    assert set(nn.modules.activation.__all__) <= ACTIVATIONS.keys()
    assert {"SiLU", "Mish", "GELU", "RReLU", "MultiheadAttention"} <= ACTIVATIONS.keys()


def test_one_bit_in_a_gradient_and_one_random_number_are_noticed() -> None:
    def nudged(model: nn.Module, x: Any) -> Any:
        y = train(model, x)
        gradient = next(model.parameters()).grad
        assert gradient is not None
        gradient.view(torch.int32)[0, 0] ^= 1
        return y

    def drew(model: nn.Module, x: Any) -> Any:
        torch.rand(1)
        return train(model, x)

    def make() -> tuple[nn.Module, torch.Tensor]:
        return net(nn.ReLU, torch.float32)

    plain = left_behind(make, train, None)
    assert list(differences(plain, left_behind(make, train, None))) == []
    assert any("gradients 0: 1 of 4" in words for words in differences(plain, left_behind(make, nudged, None)))
    assert any("random state" in words for words in differences(plain, left_behind(make, drew, None)))


@pytest.mark.slow
@pytest.mark.skipif(
    guards_notice_modes(),
    reason="before torch 2.10 counted steps of compiled code run in eager, which rounds otherwise",
)
@pytest.mark.parametrize("watcher", WATCHERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["SiLU", "Mish", "MultiheadAttention"])
def test_counting_changes_no_bit_of_a_compiled_model(name: str, dtype: torch.dtype, watcher: str) -> None:
    def make() -> tuple[nn.Module, Any]:
        model, x = net(ACTIVATIONS[name], dtype)
        return torch.compile(model), x  # type: ignore[return-value]

    compare(make, train, watcher, steps=3)

"""Tiny training steps whose FLOPs are known by hand: how this torch's counts are labelled, as one line of JSON."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mfu_monitor as mm

T, D, HIDDEN = 8, 16, 32
FORWARD = 2 * T * D * HIDDEN * 2
"""Two linear layers over T rows: T x D x HIDDEN and back, 2 FLOPs a multiply-add."""
TRAINED = 3 * FORWARD - 2 * T * D * HIDDEN
"""Backward is two products a layer; the first layer's input needs no gradient."""


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(D, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, D))


def label(step: Callable[[], Any], model: nn.Module, flops: int) -> str:
    """How the count of one step is labelled, beside what is true."""
    with mm.FlopCounter(model) as counter:
        step()
    record = counter.record
    if record.model_flops == flops and not record.is_lower_bound:
        return "exact"
    share = f"{record.model_flops / flops:.0%} of it"
    if record.is_lower_bound and record.model_flops <= flops:
        return f"lower bound ({share})"
    return f"WRONG ({share}, called {'a lower bound' if record.is_lower_bound else 'exact'})"


def eager() -> str:
    model, x = mlp(), torch.randn(T, D)
    return label(lambda: model(x).sum().backward(), model, TRAINED)


def compiled() -> str:
    model, x = mlp(), torch.randn(T, D)
    run: Any = torch.compile(model)
    for _ in range(2):
        run(x).sum().backward()
    return label(lambda: run(x).sum().backward(), model, TRAINED)


def checkpointed(reentrant: bool) -> str:
    model, x = mlp(), torch.randn(T, D, requires_grad=True)
    step = lambda: checkpoint(model, x, use_reentrant=reentrant).sum().backward()  # noqa: E731
    return label(step, model, 3 * FORWARD)


def attention() -> str:
    H, S, W = 2, 8, 4
    q, k, v = (torch.randn(1, H, S, W, requires_grad=True) for _ in range(3))
    pairs = H * S * (S + 1) // 2
    step = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()  # noqa: E731
    return label(step, nn.Identity(), 3 * 2 * 2 * pairs * W)


def custom_function() -> str:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, w = ctx.saved_tensors
            return g @ w.t(), x.t() @ g

    x, w = torch.randn(T, D, requires_grad=True), torch.randn(D, HIDDEN, requires_grad=True)
    return label(lambda: Product.apply(x, w).sum().backward(), nn.Identity(), 3 * 2 * T * D * HIDDEN)


def frozen() -> str:
    model, x = mlp(), torch.randn(T, D)
    model[0].requires_grad_(False)
    # The last layer's weight alone: its input's gradient leads nowhere.
    return label(lambda: model(x).sum().backward(), model, FORWARD + 2 * T * D * HIDDEN)


PROBES: dict[str, Callable[[], str]] = {
    "eager": eager,
    "frozen weight": frozen,
    "checkpoint": lambda: checkpointed(False),
    "reentrant checkpoint": lambda: checkpointed(True),
    "causal attention": attention,
    "custom function": custom_function,
    "compiled": compiled,
}


def main() -> None:
    """Print the labels; a probe that raises says so."""
    labels = {}
    for name, probe in PROBES.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                labels[name] = probe()
            except Exception as error:  # noqa: BLE001  # what fails is the answer
                labels[name] = f"fails: {type(error).__name__}"
    print(json.dumps(labels))


if __name__ == "__main__":
    main()

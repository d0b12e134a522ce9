"""Rows of how modules are put together: loops, sharing, tying, parametrizations, and hooks that compute.

A Linear(I, O) on T rows costs f = 2 T I O; its weight's gradient another f, its input's, where it is wanted, a third.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations

from .case import Case, Workload


def rows(*shape: int, requires_grad: bool = False) -> torch.Tensor:
    return torch.zeros(shape, requires_grad=requires_grad)


class Stack(nn.Module):
    """Layers in a ModuleList, called in a loop as often as told."""

    def __init__(self, *layers: nn.Module, times: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            for layer in self.layers:
                x = layer(x)
        return x


class Aliased(nn.Module):
    """One layer under two names, called by both."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(x))
        return result


class LanguageModel(nn.Module):
    """An embedding (11, 5) and an output layer, tied or not."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.head = nn.Linear(5, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embedding(ids))
        return logits


class Experts(nn.Module):
    """A gate and four experts of (8, 16), (16, 8); each token goes to the expert of its number modulo 3."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, y = self.gate(x).softmax(-1), torch.zeros_like(x)
        chosen = torch.arange(len(x)) % 3
        for i, expert in enumerate(self.experts):
            tokens = (chosen == i).nonzero().squeeze(-1)
            if len(tokens):
                y = y.index_add(0, tokens, expert(x[tokens]) * weights[tokens, i, None])
        return y


def reparametrized(register: Callable[[nn.Module], nn.Module], inputs: int, outputs: int) -> Workload:
    return register(nn.Linear(inputs, outputs)), (rows(3, inputs),)


def hooked(attach: Callable[[nn.Linear], Any], *, requires_grad: bool = False) -> Workload:
    """Linear(5, 5) on 3 rows with a hook."""
    layer = nn.Linear(5, 5)
    attach(layer)
    return layer, (rows(3, 5, requires_grad=requires_grad),)


def mixes_rows(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output @ output.t() @ output


def turns_gradients(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
    return (grad_output[0] @ torch.eye(5, device=grad_output[0].device),)


def turns_gradient_of_output(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    output.register_hook(lambda grad: grad @ torch.eye(5, device=grad.device))
    return output


def watches_gradients(layer: nn.Linear) -> None:
    """A monitor of gradients: the Gram matrix of each, once it is accumulated."""

    def watch(weight: torch.Tensor) -> None:
        assert weight.grad is not None
        weight.grad @ weight.grad.t()

    layer.weight.register_post_accumulate_grad_hook(watch)


EVERYWHERE = ("cpu", "meta")

# --- how modules are put together -------------------------------------------------------------------------------------

BY_STRUCTURE = (
    Case(
        id="module-list",
        description="three layers in a loop",
        build=lambda: (Stack(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)), (rows(4, 6),)),
        phase="training",
        forward_flops="2 * 4 * (6*8 + 8*8 + 8*2)",
        model_flops="3 * (2 * 4 * (6*8 + 8*8 + 8*2)) - 2 * 4 * 6*8",
        devices=EVERYWHERE,
    ),
    Case(
        id="one-layer-three-times",
        description="a shared layer counts at each call",
        build=lambda: (Stack(nn.Linear(6, 6), times=3), (rows(4, 6),)),
        phase="training",
        forward_flops="3 * (2 * 4 * 6*6)",
        model_flops="3 * 3 * (2 * 4 * 6*6) - 2 * 4 * 6*6",
        devices=EVERYWHERE,
    ),
    Case(
        id="aliased-module",
        description="one layer under two names, called by both",
        build=lambda: (Aliased(), (rows(4, 6),)),
        phase="training",
        forward_flops="2 * (2 * 4 * 6*6)",
        model_flops="2 * 3 * (2 * 4 * 6*6) - 2 * 4 * 6*6",
        devices=EVERYWHERE,
    ),
    Case(
        id="untied",
        description="a language model's output layer; the embedding counts 0",
        build=lambda: (LanguageModel(tied=False), (torch.zeros(3, dtype=torch.long),)),
        phase="training",
        forward_flops="2 * 3 * 5*11",
        model_flops="3 * (2 * 3 * 5*11)",
        devices=EVERYWHERE,
    ),
    Case(
        id="tied",
        description="tied to the embedding it counts the same",
        build=lambda: (LanguageModel(tied=True), (torch.zeros(3, dtype=torch.long),)),
        phase="training",
        forward_flops="2 * 3 * 5*11",
        model_flops="3 * (2 * 3 * 5*11)",
        devices=EVERYWHERE,
    ),
    Case(
        id="experts",
        description="ten tokens on the experts they choose: 4, 3 and 3; the fourth runs nothing",
        build=lambda: (Experts(), (rows(10, 8, requires_grad=True),)),
        phase="training",
        forward_flops="2 * 10 * 8*4 + 2 * (4 + 3 + 3 + 0) * (8*16 + 16*8)",
        model_flops="3 * (2 * 10 * 8*4 + 2 * (4 + 3 + 3 + 0) * (8*16 + 16*8))",
    ),
)

# --- parametrizations -------------------------------------------------------------------------------------------------

BY_PARAMETRIZATION = (
    Case(
        id="weight-norm",
        description="the norm is elementwise",
        build=lambda: reparametrized(parametrizations.weight_norm, 5, 7),
        phase="training",
        forward_flops="2 * 3 * 5*7",
        model_flops="2 * (2 * 3 * 5*7)",
        devices=EVERYWHERE,
    ),
    Case(
        id="orthogonal-cayley",
        description="a solve counts 0; base Q is a product, and so are dQ and the solve's gradient",
        build=lambda: reparametrized(
            lambda layer: parametrizations.orthogonal(layer, orthogonal_map="cayley"),
            *(6, 6),
        ),
        phase="training",
        forward_flops="2 * 3 * 6*6 + 2 * 6*6 * 6",
        model_flops="2 * (2 * 3 * 6*6) + 3 * (2 * 6*6 * 6)",
    ),
    Case(
        id="orthogonal-matrix-exp",
        description="the matrix exponential has no formula: reported, forward and backward",
        build=lambda: reparametrized(
            lambda layer: parametrizations.orthogonal(layer, orthogonal_map="matrix_exp"),
            *(6, 6),
        ),
        phase="training",
        forward_flops="2 * 3 * 6*6 + 2 * 6*6 * 6",
        model_flops="2 * (2 * 3 * 6*6) + 2 * (2 * 6*6 * 6)",
        unsupported_ops=("aten::linalg_matrix_exp", "aten::linalg_matrix_exp"),
    ),
    Case(
        id="spectral-norm",
        description="the power iteration's two products have no gradient: other; sigma = u (W v) has",
        build=lambda: reparametrized(parametrizations.spectral_norm, 5, 7),
        phase="training",
        forward_flops="2 * 3 * 5*7 + 2 * 7*5 + 2 * 7",
        model_flops="2 * (2 * 3 * 5*7) + 2 * 7*5 + 2 * 7",
        hardware_flops="2 * (2 * 3 * 5*7) + 2 * 7*5 + 2 * 7 + 2 * (2 * 7*5)",
    ),
)

# --- hooks that compute -----------------------------------------------------------------------------------------------

BY_HOOK = (
    Case(
        id="forward-hook",
        description="y y^T y in a forward hook: part of the model",
        build=lambda: hooked(lambda layer: layer.register_forward_hook(mixes_rows)),
        phase="training",
        forward_flops="2 * 3 * 5*5 + 2 * 3*3 * 5 + 2 * 3*5 * 3",
        model_flops="2 * (2 * 3 * 5*5) + 3 * (2 * 3*3 * 5 + 2 * 3*5 * 3)",
        devices=EVERYWHERE,
    ),
    Case(
        id="tensor-hook",
        description="a product with the gradient of an output: what a hook computes is no model work",
        build=lambda: hooked(lambda layer: layer.register_forward_hook(turns_gradient_of_output)),
        phase="training",
        forward_flops="2 * 3 * 5*5",
        model_flops="2 * (2 * 3 * 5*5)",
        hardware_flops="2 * (2 * 3 * 5*5) + 2 * 3*5 * 5",
        devices=EVERYWHERE,
    ),
    Case(
        id="backward-hook",
        description="a product with the gradient of a module's input, which it replaces: no model work either",
        build=lambda: hooked(lambda layer: layer.register_full_backward_hook(turns_gradients), requires_grad=True),
        phase="training",
        forward_flops="2 * 3 * 5*5",
        model_flops="3 * (2 * 3 * 5*5)",
        hardware_flops="3 * (2 * 3 * 5*5) + 2 * 3*5 * 5",
        devices=EVERYWHERE,
    ),
    Case(
        id="accumulated-gradient-hook",
        description="G G^T of the weight's gradient once it is there",
        build=lambda: hooked(watches_gradients),
        phase="training",
        forward_flops="2 * 3 * 5*5",
        model_flops="2 * (2 * 3 * 5*5)",
        hardware_flops="2 * (2 * 3 * 5*5) + 2 * 5*5 * 5",
        devices=EVERYWHERE,
    ),
)

CASES: tuple[Case, ...] = (*BY_STRUCTURE, *BY_PARAMETRIZATION, *BY_HOOK)

"""Rows of whole training steps: which gradients are wanted, custom operators, transforms, optimizers.

A Linear(I, O) on T rows costs f = 2 T I O; its weight's gradient another f, its input's, where it is wanted, a third.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, jacrev, jvp, vmap

from mfu_monitor.formulas.registry import register_flop_formula, unregister_flop_formula

from .case import Case, Workload


def linears(*widths: int, bias: bool = True) -> nn.Sequential:
    """Linear layers of these widths with GELUs between."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs, bias=bias), nn.GELU()]
    return nn.Sequential(*layers[:-1])


def step(function: Callable[..., Any], *inputs: Any) -> Workload:
    """A function that is the whole step."""
    return function, inputs


def data(*shape: int, requires_grad: bool = False) -> torch.Tensor:
    return torch.zeros(shape, requires_grad=requires_grad)


class Run(nn.Module):
    """A function over named parts, as a module whose names the count can use."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self._function = function
        self.parts = nn.ModuleDict(parts)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self._function(self.parts, *inputs)


EVERYWHERE = ("cpu", "meta")

# --- which gradients are wanted ---------------------------------------------------------------------------------------


def two_linears(frozen: tuple[int, ...] = ()) -> Workload:
    model = linears(512, 512, 512)
    for i in frozen:
        model[2 * i].requires_grad_(False)
    return model, (data(64, 512),)


def lora() -> Workload:
    frozen = nn.Linear(1024, 1024, bias=False).requires_grad_(False)
    parts = {"frozen": frozen, "a": nn.Linear(1024, 8, bias=False), "b": nn.Linear(8, 1024, bias=False)}
    return Run(lambda p, x: p["frozen"](x) + p["b"](p["a"](x)), **parts), (data(128, 1024, requires_grad=True),)


def distilled(parts: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        target = parts["teacher"](x)
    return F.mse_loss(parts["student"](x), target)


BY_GRADIENT = (
    Case(
        id="mlp-on-data",
        description="two Linear(512, 512), 64 rows of data: the first layer has no input gradient",
        build=two_linears,
        phase="training",
        forward_flops="2 * (2 * 64 * 512*512)",
        model_flops="(2 + 3) * (2 * 64 * 512*512)",
        devices=EVERYWHERE,
        covers=("C14",),
    ),
    Case(
        id="mlp-first-layer-frozen",
        description="the first layer frozen: its forward only, and no gradient reaches it",
        build=lambda: two_linears(frozen=(0,)),
        phase="training",
        forward_flops="2 * (2 * 64 * 512*512)",
        model_flops="(1 + 2) * (2 * 64 * 512*512)",
        devices=EVERYWHERE,
        covers=("C14",),
    ),
    Case(
        id="mlp-last-layer-frozen",
        description="the last layer frozen: gradients pass through it",
        build=lambda: two_linears(frozen=(1,)),
        phase="training",
        forward_flops="2 * (2 * 64 * 512*512)",
        model_flops="(2 + 2) * (2 * 64 * 512*512)",
        devices=EVERYWHERE,
        covers=("C14",),
    ),
    Case(
        id="lora",
        description="frozen Linear(1024, 1024) with an adapter of rank 8, 128 tokens inside a network",
        build=lora,
        phase="training",
        forward_flops="2 * 128 * (1024*1024 + 1024*8 + 8*1024)",
        model_flops="2 * (2 * 128 * 1024*1024) + 3 * (2 * 128 * (1024*8 + 8*1024))",
        devices=EVERYWHERE,
        covers=("C13",),
    ),
    Case(
        id="detached",
        description="an encoder cut off by detach: forward only, and with gradients on, so it is model work",
        build=lambda: (
            Run(lambda p, x: p["head"](p["encoder"](x).detach()), encoder=nn.Linear(16, 16), head=nn.Linear(16, 4)),
            (data(8, 16),),
        ),
        phase="training",
        forward_flops="2 * 8 * 16*16 + 2 * 8 * 16*4",
        model_flops="2 * 8 * 16*16 + 2 * (2 * 8 * 16*4)",
        devices=EVERYWHERE,
    ),
    Case(
        id="teacher",
        description="a teacher under no_grad is no model work of this step",
        build=lambda: (
            Run(distilled, teacher=linears(16, 32, 4), student=nn.Linear(16, 4)),
            (data(8, 16),),
        ),
        phase="training",
        model_flops="2 * (2 * 8 * 16*4)",
        hardware_flops="2 * (2 * 8 * 16*4) + 2 * 8 * (16*32 + 32*4)",
        devices=EVERYWHERE,
    ),
)

# --- custom operators -------------------------------------------------------------------------------------------------


@torch.library.custom_op("conformance::known_product", mutates_args=())
def known_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


@torch.library.custom_op("conformance::unknown_product", mutates_args=())
def unknown_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


@contextmanager
def formula_of_known_product() -> Iterator[None]:
    def flops(a: tuple[int, ...], b: tuple[int, ...]) -> int:
        return 2 * a[0] * a[1] * b[1]

    register_flop_formula(known_product)(flops)
    try:
        yield
    finally:
        unregister_flop_formula(known_product)


BY_CUSTOM_OPERATOR = (
    Case(
        id="custom-op-with-a-formula",
        description="a custom operator that multiplies (8,8) by (8,8), counted by its formula and not by its inside",
        build=lambda: (known_product, (data(8, 8), data(8, 8))),
        phase="inference",
        model_flops="2 * 8*8 * 8",
        context=formula_of_known_product,
        covers=("C12",),
    ),
    Case(
        id="custom-op-without-a-formula",
        description="the same without: reported",
        build=lambda: (unknown_product, (data(8, 8), data(8, 8))),
        phase="inference",
        model_flops="0",
        unsupported_ops=("conformance::unknown_product",),
        covers=("C12",),
    ),
)

# --- transforms and several gradients ---------------------------------------------------------------------------------


def gradient_penalty(first: nn.Module, second: nn.Module, x: torch.Tensor) -> None:
    score = second(torch.tanh(first(x))).sum()
    (slope,) = torch.autograd.grad(score, x, create_graph=True)
    (score + (slope.norm() - 1) ** 2).backward()


def gradient_of_a_gradient(layer: nn.Module, x: torch.Tensor) -> None:
    (slope,) = torch.autograd.grad(layer(x).pow(2).sum(), x, create_graph=True)
    slope.pow(2).sum().backward()


def two_losses(trunk: nn.Module, head: nn.Module, other: nn.Module, x: torch.Tensor) -> None:
    features = trunk(x)
    head(features).sum().backward(retain_graph=True)
    other(features).sum().backward()


BY_TRANSFORM = (
    Case(
        id="autograd-grad",
        description="autograd.grad for the weight alone",
        build=lambda: step(
            lambda w, x: torch.autograd.grad((x @ w).sum(), w), data(5, 7, requires_grad=True), data(3, 5)
        ),
        phase="step",
        model_flops="2 * (2 * 3 * 5*7)",
    ),
    Case(
        id="func-grad",
        description="torch.func.grad of a Linear's loss",
        build=lambda: step(lambda w, x: grad(lambda w: (x @ w).pow(2).sum())(w), data(5, 7), data(3, 5)),
        phase="step",
        model_flops="2 * (2 * 3 * 5*7)",
        devices=EVERYWHERE,
    ),
    Case(
        id="func-functional-call",
        description="functional_call trains given parameters",
        build=lambda: step(
            lambda m, x: functional_call(m, dict(m.named_parameters()), (x,)).sum().backward(),
            *(nn.Linear(5, 7), data(3, 5)),
        ),
        phase="step",
        model_flops="2 * (2 * 3 * 5*7)",
        devices=EVERYWHERE,
    ),
    Case(
        id="func-vmap",
        description="vmap of a vector by a matrix over 3 rows",
        build=lambda: (lambda w, x: vmap(lambda row: row @ w)(x), (data(5, 7), data(3, 5))),
        phase="inference",
        model_flops="2 * 3 * 5*7",
        devices=EVERYWHERE,
    ),
    Case(
        id="func-per-sample-gradients",
        description="vmap of grad: a weight's gradient for each of 3 rows, together as much as one",
        build=lambda: step(
            lambda w, x: vmap(grad(lambda w, row: (row @ w).pow(2).sum()), in_dims=(None, 0))(w, x),
            *(data(5, 7), data(3, 5)),
        ),
        phase="step",
        model_flops="2 * 3 * 5*7 + 3 * (2 * 5*7 * 1)",
        devices=EVERYWHERE,
    ),
    Case(
        id="func-jvp",
        description="jvp with tangents of both operands: x w, dx w, x dw",
        build=lambda: step(lambda x, w: jvp(torch.mm, (x, w), (x, w)), data(3, 5), data(5, 7)),
        phase="step",
        model_flops="3 * (2 * 3 * 5*7)",
        devices=EVERYWHERE,
    ),
    Case(
        id="func-jacrev",
        description="jacrev of a row by a matrix: the row, then 7 cotangents at once",
        build=lambda: step(lambda w, x: jacrev(lambda row: row @ w)(x), data(5, 7), data(5)),
        phase="step",
        model_flops="2 * 1 * 5*7 + 2 * 7 * 7*5",
        devices=EVERYWHERE,
    ),
    Case(
        id="double-backward",
        description="a gradient of a gradient: y; dx; then that product's two gradients, and y's two",
        build=lambda: step(gradient_of_a_gradient, nn.Linear(5, 7), data(3, 5, requires_grad=True)),
        phase="step",
        model_flops="(1 + 1 + 2 + 2) * (2 * 3 * 5*7)",
        devices=EVERYWHERE,
        covers=("C18",),
    ),
    Case(
        id="gradient-penalty",
        description="Linear(5,7)-tanh-Linear(7,1): forward, dx, then dx's gradients and the score's",
        build=lambda: step(
            gradient_penalty,
            *(nn.Linear(5, 7, bias=False), nn.Linear(7, 1, bias=False), data(3, 5, requires_grad=True)),
        ),
        phase="step",
        model_flops="(2 + 2 + 2) * (2 * 3 * 5*7) + (2 + 1 + 2) * (2 * 3 * 7*1)",
        devices=EVERYWHERE,
        covers=("C18",),
    ),
    Case(
        id="two-losses",
        description="two backwards through one trunk: its weight's gradient is computed twice",
        build=lambda: step(two_losses, nn.Linear(5, 7), nn.Linear(7, 2), nn.Linear(7, 3), data(3, 5)),
        phase="step",
        model_flops="(1 + 2) * (2 * 3 * 5*7) + 3 * (2 * 3 * 7*2) + 3 * (2 * 3 * 7*3)",
        devices=EVERYWHERE,
    ),
)

# --- steps and optimizers ---------------------------------------------------------------------------------------------


class Shampoo(torch.optim.Optimizer):
    """Shampoo's products: both statistics of a matrix's gradient, and the gradient between them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            left, right = p.grad @ p.grad.t(), p.grad.t() @ p.grad
            p.sub_(left @ p.grad @ right, alpha=0.1)


def optimized(make: Callable[[Any], torch.optim.Optimizer], inputs: int, outputs: int, rows: int) -> Workload:
    """One step of a Linear without bias on data."""
    layer = nn.Linear(inputs, outputs, bias=False)
    optimizer = make(layer.parameters())

    def train(x: torch.Tensor) -> None:
        layer(x).sum().backward()
        optimizer.step()

    return step(train, data(rows, inputs))


def batches(*sizes: int) -> Workload:
    """Micro-batches through Linear(5, 7), then one step of the optimizer."""
    layer = nn.Linear(5, 7)
    optimizer = torch.optim.AdamW(layer.parameters())

    def train() -> None:
        for size in sizes:
            layer(data(size, 5)).sum().backward()
        optimizer.step()

    return step(train)


def steps_of_a_linear(steps: int) -> Workload:
    """Steps of a Linear(8, 4) on 4 rows of data."""
    layer = nn.Linear(8, 4)

    def train(x: torch.Tensor) -> None:
        for _ in range(steps):
            layer(x).sum().backward()

    return step(train, data(4, 8))


def adversarial() -> Workload:
    """A generator Linear(4, 6) and a critic Linear(6, 1), each with an optimizer of its own."""
    generator, critic = nn.Linear(4, 6), nn.Linear(6, 1)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (generator, critic)]

    def train(z: torch.Tensor, real: torch.Tensor) -> None:
        (critic(generator(z).detach()).sum() - critic(real).sum()).backward()
        optimizers[1].step()
        critic(generator(z)).sum().backward()
        optimizers[0].step()

    return step(train, data(3, 4), data(3, 6))


BY_STEP = (
    Case(
        id="500-steps",
        description="500 steps of a Linear(8, 4) on 4 rows",
        build=lambda: steps_of_a_linear(500),
        phase="step",
        model_flops="500 * 2 * (2 * 4 * 8*4)",
        covers=("C20",),
    ),
    Case(
        id="gradient-accumulation",
        description="four micro-batches of 3 rows, then AdamW: elementwise",
        build=lambda: batches(3, 3, 3, 3),
        phase="step",
        model_flops="4 * 2 * (2 * 3 * 5*7)",
    ),
    Case(
        id="last-short-batch",
        description="batches of 8, 8 and 3",
        build=lambda: batches(8, 8, 3),
        phase="step",
        model_flops="2 * (2 * (8 + 8 + 3) * 5*7)",
    ),
    Case(
        id="two-optimizers",
        description="the critic on fake and real data, then the generator through the critic",
        build=adversarial,
        phase="step",
        model_flops="(1 + 2) * (2 * 3 * 4*6) + (2 + 2 + 3) * (2 * 3 * 6*1)",
    ),
    Case(
        id="optimizer-muon",
        description="(4,8), five Newton-Schulz steps: X X^T, its square, and their product with X",
        build=lambda: optimized(lambda p: torch.optim.Muon(p), 8, 4, 3),
        phase="step",
        model_flops="2 * (2 * 3 * 8*4)",
        hardware_flops="2 * (2 * 3 * 8*4) + 5 * (2 * 4*4 * 8 + 2 * 4*4 * 4 + 2 * 4*8 * 4)",
        optimizer_flops="5 * (2 * 4*4 * 8 + 2 * 4*4 * 4 + 2 * 4*8 * 4)",
    ),
    Case(
        id="optimizer-shampoo",
        description="G G^T, G^T G, and G between the two",
        build=lambda: optimized(Shampoo, 8, 4, 3),
        phase="step",
        model_flops="2 * (2 * 3 * 8*4)",
        hardware_flops="2 * (2 * 3 * 8*4) + (2 * 4*4 * 8 + 2 * 8*8 * 4 + 2 * 4*8 * 4 + 2 * 4*8 * 8)",
        optimizer_flops="2 * 4*4 * 8 + 2 * 8*8 * 4 + 2 * 4*8 * 4 + 2 * 4*8 * 8",
    ),
)

CASES: tuple[Case, ...] = (*BY_GRADIENT, *BY_CUSTOM_OPERATOR, *BY_TRANSFORM, *BY_STEP)

"""Small training steps made at random, run by torch and read by an interpreter that knows nothing but shapes.

A program is a list of statements on matrices of ``rows`` x D. ``expected`` walks it with a flag for each value (does it
need a gradient?), then walks back from the loss; what it adds up are the products of the chain rule, written by hand.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

D = 8
"""Width of all values and weights."""


@dataclass
class Program:
    """What one training step runs: value 0 is the batch, each statement that makes a value appends it."""

    rows: int
    needs: list[bool]
    """Whether each weight needs a gradient."""
    input_needs: bool
    statements: list[tuple[Any, ...]]
    steps: int = 1
    """Forwards and backwards in the region: micro-batches."""
    autocast: bool = False


@dataclass
class Flops:
    model: int = 0
    recompute: int = 0
    other: int = 0


# --- making one ----------------------------------------------------------------------------------------------------


def make(seed: int, *, is_compiled: bool = False) -> Program:
    """A program by its seed; for the compiler one without Python that it would leave out or break at."""
    rng = random.Random(seed)
    weights = rng.randint(1, 4)
    kinds = ["linear"] * 4 + ["gelu", "add", "attend", "detach", "no_grad", "checkpoint"]
    if not is_compiled:
        kinds += ["reentrant", "function", "rebuilding", "hook", "linear", "nested", "set_grad_enabled", "free"]
    program = Program(
        rows=rng.randint(2, 6),
        needs=[rng.random() < 0.75 for _ in range(weights)],
        input_needs=rng.random() < 0.4,
        statements=[],
        steps=1 if is_compiled else rng.choice([1, 1, 1, 2]),
        autocast=not is_compiled and rng.random() < 0.2,
    )
    expressions: list[Any] = ["batch"]
    products: set[Any] = set()
    for _ in range(rng.randint(2, 9)):
        kind, x, w = rng.choice(kinds), rng.randrange(len(expressions)), rng.randrange(weights)
        statement: tuple[Any, ...]
        if kind in ("no_grad", "checkpoint", "reentrant", "set_grad_enabled", "nested"):
            inner = tuple(rng.randrange(weights) for _ in range(rng.randint(1, 3)))
            statement = (kind, x, inner)
        elif kind in ("add", "attend"):
            statement = (kind, x, rng.randrange(len(expressions)))
        else:
            statement = (kind, x, w)
        expression, made = _expression(statement, expressions)
        # The compiler computes equal products once.
        if is_compiled and not products.isdisjoint(made):
            continue
        products |= made
        program.statements.append(statement)
        if kind != "hook":
            expressions.append(expression)
    return program


def _expression(statement: tuple[Any, ...], known: list[Any]) -> tuple[Any, set[Any]]:
    """What a statement computes, equal for equal values, and the products in it."""
    kind, x, argument = statement
    value = known[x]
    if kind == "detach":
        return value, set()
    if kind in ("add", "attend"):
        pair = (kind, *sorted((value, known[argument]), key=repr))
        return pair, {pair} if kind == "attend" else set()
    if isinstance(argument, tuple):
        made = set()
        for w in argument:
            made.add(("product", value, w))
            value = ("sigmoid", ("product", value, w))
        return value, made
    if kind == "gelu":
        return ("gelu", value), set()
    return ("product", value, argument), {("product", value, argument)}


# --- running it ----------------------------------------------------------------------------------------------------


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, rebuilds: bool) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        ctx.rebuilds = rebuilds
        return (x @ weight.to(x.dtype).t()).tanh()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        # An approximation of tanh's gradient where nothing is computed again: the arithmetic does not matter here.
        y = (x @ weight.to(x.dtype).t()).tanh() if ctx.rebuilds else torch.zeros_like(gradient)
        gradient = (gradient * (1 - y * y)).to(x.dtype)
        dx = gradient @ weight.to(x.dtype) if ctx.needs_input_grad[0] else None
        dw = (gradient.t() @ x).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return dx, dw, None


def _chain(x: torch.Tensor, layers: Any, inner: tuple[int, ...]) -> torch.Tensor:
    for w in inner:
        x = layers[w](x).sigmoid()  # saves its result: a checkpoint has to run all of the region again
    return x


def forward(program: Program, layers: Any, batch: torch.Tensor) -> torch.Tensor:
    """The loss: every value that no statement took, summed up."""
    return _forward(program, layers, batch, _run_without_gradients)


def forward_with_gradients(program: Program, layers: Any, batch: torch.Tensor) -> torch.Tensor:
    """The same of a program that never turns gradients off, and whose code does not name that either."""
    return _forward(program, layers, batch, _run)


def _forward(program: Program, layers: Any, batch: torch.Tensor, run: Any) -> torch.Tensor:
    values, taken = [batch], set()
    for kind, x, *rest in program.statements:
        value, argument = values[x], rest[0]
        taken.add(x)
        if kind in ("add", "attend"):
            taken.add(argument)
        if kind == "hook":
            if value.requires_grad:
                value.register_hook(_product_of_gradient)
            taken.discard(x)
        else:
            values.append(run(kind, value, values, layers, argument))
    losses = [v.float().sum() for i, v in enumerate(values) if i not in taken]
    return torch.stack(losses).sum()


def _product_of_gradient(gradient: torch.Tensor) -> None:
    (gradient.t() @ gradient).sum()


def _run(kind: str, x: torch.Tensor, values: list[torch.Tensor], layers: Any, argument: Any) -> torch.Tensor:
    runs: dict[str, Callable[[], torch.Tensor]] = {
        "linear": lambda: layers[argument](x),
        "free": lambda: torch.einsum("ij,kj->ik", x, layers[argument].weight.to(x.dtype)),
        "gelu": lambda: F.gelu(x),
        "add": lambda: x + values[argument],
        "attend": lambda: (x @ values[argument].to(x.dtype).t()).softmax(-1).to(x.dtype) @ values[argument].to(x.dtype),
        "detach": lambda: x.detach(),
        "function": lambda: _Linear.apply(x, layers[argument].weight, False),
        "rebuilding": lambda: _Linear.apply(x, layers[argument].weight, True),
        "checkpoint": lambda: checkpoint(_chain, x, layers, argument, use_reentrant=False),
        "reentrant": lambda: checkpoint(_chain, x, layers, argument, use_reentrant=True),
        "nested": lambda: checkpoint(lambda v: _chain(v, layers, argument).sigmoid(), x, use_reentrant=False),
    }
    return runs[kind]()


def _run_without_gradients(kind: str, x: torch.Tensor, values: list[torch.Tensor], layers: Any, argument: Any) -> Any:
    if kind in ("no_grad", "set_grad_enabled"):
        with torch.no_grad() if kind == "no_grad" else torch.set_grad_enabled(False):
            return _chain(x, layers, argument)
    return _run(kind, x, values, layers, argument)


def layers_of(program: Program) -> nn.ModuleList:
    layers = nn.ModuleList(nn.Linear(D, D, bias=False) for _ in program.needs)
    for layer, needs in zip(layers, program.needs, strict=True):
        layer.weight.requires_grad_(needs)
    return layers


def train(program: Program, layers: Any, run_forward: Any = forward) -> None:
    for _ in range(program.steps):
        batch = torch.randn(program.rows, D, requires_grad=program.input_needs)
        with torch.autocast("cpu", torch.bfloat16) if program.autocast else nullcontext():
            loss = run_forward(program, layers, batch)
        if loss.requires_grad:
            loss.backward()


# --- reading it ----------------------------------------------------------------------------------------------------


@dataclass
class _Value:
    needs: bool
    made_by: Callable[[], None] = lambda: None
    """Adds up the products of its own gradient step, and passes the gradient on."""
    hooks: int = 0
    is_reached: bool = False
    inputs: tuple[_Value, ...] = field(default=())


def expected(program: Program) -> Flops:
    """The FLOPs of the step, by the chain rule and nothing else."""
    f = 2 * program.rows * D * D
    pairs = 2 * program.rows * program.rows * D
    flops = Flops()
    values = [_Value(program.input_needs)]
    taken: set[int] = set()
    for kind, x, *rest in program.statements:
        value, argument = values[x], rest[0]
        taken.add(x)
        if kind == "hook":
            value.hooks += value.needs
            taken.discard(x)
            continue
        if kind in ("add", "attend"):
            taken.add(argument)
            values.append(_read_pair(kind, value, values[argument], flops, pairs))
        elif kind in ("gelu", "detach"):
            values.append(_Value(value.needs and kind == "gelu", inputs=(value,)))
        elif kind in ("linear", "free", "function", "rebuilding"):
            values.append(_read_linear(value, program.needs[argument], flops, f, rebuilds=kind == "rebuilding"))
        else:
            values.append(_read_region(kind, value, [program.needs[w] for w in argument], flops, f))
    sinks = [v for i, v in enumerate(values) if i not in taken]
    has_backward = any(v.needs for v in sinks)
    for sink in sinks:
        sink.is_reached = sink.needs
    for value in reversed(values):
        if value.is_reached:
            flops.other += value.hooks * 2 * D * D * program.rows
            for source in value.inputs:
                source.is_reached |= source.needs
            value.made_by()
    if not has_backward:
        flops = Flops(model=flops.model + flops.other)
    return Flops(flops.model * program.steps, flops.recompute * program.steps, flops.other * program.steps)


def _read_linear(x: _Value, weight_needs: bool, flops: Flops, f: int, *, rebuilds: bool) -> _Value:
    flops.model += f

    def backward() -> None:
        flops.model += f * (x.needs + weight_needs)
        flops.recompute += f * rebuilds

    return _Value(x.needs or weight_needs, backward, inputs=(x,))


def _read_pair(kind: str, x: _Value, y: _Value, flops: Flops, pairs: int) -> _Value:
    needs = x.needs or y.needs
    if kind == "add":
        return _Value(needs, inputs=(x, y))
    flops.model += 2 * pairs

    def backward() -> None:
        # Scores x y^T and their weights times y: y takes part in both.
        flops.model += pairs * (x.needs + y.needs) + pairs * (needs + y.needs)

    return _Value(needs, backward, inputs=(x, y))


def _read_region(kind: str, x: _Value, weights: list[bool], flops: Flops, f: int) -> _Value:
    if kind in ("no_grad", "set_grad_enabled"):
        flops.other += f * len(weights)
        return _Value(False, inputs=(x,))
    flops.model += f * len(weights)
    # A reentrant checkpoint takes part in autograd through its input alone.
    needs = x.needs if kind == "reentrant" else x.needs or any(weights)

    def backward() -> None:
        flops.recompute += f * len(weights)
        carried = x.needs
        for weight_needs in weights:
            flops.model += f * (carried + weight_needs)
            carried = carried or weight_needs

    return _Value(needs, backward, inputs=(x,))

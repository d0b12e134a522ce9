"""What custom functions run again or for nobody, and inner backward passes of regions that run again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mfu_monitor as mm

ROWS, WIDTH = 16, 32
F = 2 * ROWS * WIDTH * WIDTH
"""FLOPs of one product of 16 rows with a 32 x 32 weight."""


def count(step: Callable[[], Any], model: nn.Module | None = None) -> mm.StepRecord:
    with mm.FlopCounter(model) as counter:
        step()
    assert not counter.record.is_lower_bound
    return counter.record


def parts(record: mm.StepRecord) -> tuple[int, int, int]:
    return record.model_flops, record.recompute_flops, record.other_flops


def weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)


def rerunning(product: Callable[[Tensor, Tensor], Tensor]) -> type[torch.autograd.Function]:
    """relu(product(x, w)) that keeps no activation: the product runs again in backward."""

    class Rerunning(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return torch.relu(product(x, w))

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            x, w = ctx.saved_tensors
            gradient = gradient * (product(x, w) > 0)
            return gradient @ w.t(), x.t() @ gradient

    return Rerunning


@pytest.mark.parametrize(
    "product",
    [
        lambda x, w: x @ w,
        lambda x, w: (x.bfloat16() @ w.bfloat16()).float(),
        lambda x, w: nnf.layer_norm(x, (WIDTH,)) @ (w * 2),
        lambda x, w: x.clone() @ w.clone(),
        lambda x, w: torch.einsum("ri,io->ro", x.double(), w.double()).float(),
        lambda x, w: nnf.linear(x * 1, w.t().contiguous()),
        lambda x, w: torch.addmm(torch.zeros(WIDTH), x + 0, w + 0),
    ],
    ids=["saved", "cast", "made again", "copied", "einsum", "linear", "addmm"],
)
def test_a_product_that_a_custom_backward_runs_again_is_recompute(product: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, w = torch.randn(ROWS, WIDTH, requires_grad=True), weight()
    record = count(lambda: rerunning(product).apply(x, w).sum().backward())
    assert parts(record) == (3 * F, F, 0)


def test_another_operator_the_second_time_is_recompute() -> None:
    turns = iter([lambda x, w: x @ w, lambda x, w: nnf.linear(x * 1, w.t().contiguous())])
    x, w = torch.randn(ROWS, WIDTH, requires_grad=True), weight()
    record = count(lambda: rerunning(lambda x, w: next(turns)(x, w)).apply(x, w).sum().backward())
    assert parts(record) == (3 * F, F, 0)


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = ctx.saved_tensors
        p = (q @ k.transpose(-1, -2)).softmax(-1)
        dp = gradient @ v.transpose(-1, -2)
        ds = p * (dp - (dp * p).sum(-1, keepdim=True))
        return ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ gradient


def test_attention_of_permuted_heads_runs_its_scores_again() -> None:
    q, k, v = (torch.randn(2, 16, 32, requires_grad=True) for _ in range(3))

    def heads(x: Tensor) -> Tensor:
        return x.view(2, 16, 4, 8).transpose(1, 2)

    product = 2 * 2 * 4 * 16 * 16 * 8
    record = count(lambda: Attention.apply(heads(q), heads(k), heads(v)).sum().backward())
    assert parts(record) == (6 * product, product, 0)


class GramPenalty(torch.autograd.Function):
    """Per-sample norms of the weight's gradient by Gram matrices, as ghost clipping takes them; rows equal width."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        scale = ((x @ x.t()) * (gradient @ gradient.t())).sum().sqrt()
        return gradient @ w.t(), x.t() @ gradient / scale


def test_gram_matrices_are_no_recompute_also_where_their_sizes_are_those_of_the_product() -> None:
    x, w = torch.randn(WIDTH, WIDTH, requires_grad=True), weight()
    record = count(lambda: GramPenalty.apply(x, w).sum().backward())
    assert record.recompute_flops == 0
    assert record.hardware_flops == 5 * (2 * WIDTH * WIDTH * WIDTH)


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return (gradient @ w.t()).to(x.dtype), x.t() @ gradient


class TwoLayers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        hidden = x @ a
        ctx.save_for_backward(x, hidden, a, b)
        return hidden @ b

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, hidden, a, b = ctx.saved_tensors
        hidden_gradient = gradient @ b.t()
        return hidden_gradient @ a.t(), x.t() @ hidden_gradient, hidden.t() @ gradient


def _keep(loss: Tensor, weights: list[nn.Parameter]) -> None:
    loss.backward()


def _forget(loss: Tensor, weights: list[nn.Parameter]) -> None:
    loss.backward()
    for w in weights:
        w.grad = None


def _step(loss: Tensor, weights: list[nn.Parameter]) -> None:
    optimizer = torch.optim.SGD(weights, lr=0.1)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _ask(loss: Tensor, weights: list[nn.Parameter]) -> None:
    gradients = torch.autograd.grad(loss, weights, allow_unused=True)
    for w, gradient in zip(weights, gradients, strict=True):
        w.grad = gradient


@pytest.mark.parametrize("train", [_keep, _forget, _step, _ask])
@pytest.mark.parametrize(
    ("forward", "model", "dropped"),
    [
        (lambda x, w, v, frozen: Linear.apply(x, w), 2, 1),
        (lambda x, w, v, frozen: Linear.apply(Linear.apply(x, w), v), 5, 1),
        (lambda x, w, v, frozen: Linear.apply(Linear.apply(x, w), frozen), 4, 2),
        (lambda x, w, v, frozen: TwoLayers.apply(x, w, v), 5, 1),
        (lambda x, w, v, frozen: Linear.apply(x, w) + Linear.apply(x, w), 4, 2),
        # Two forwards, the gradient through the frozen weight, and that of the Linear's own weight.
        (lambda x, w, v, frozen: Linear.apply(torch.tanh(nnf.linear(x, w)), frozen), 4, 1),
    ],
    ids=["on data", "two layers", "frozen head", "in one function", "weight used twice", "frozen head on a Linear"],
)
def test_gradients_that_autograd_drops_are_no_model_work(
    forward: Callable[..., Tensor], model: int, dropped: int, train: Callable[..., None]
) -> None:
    x, w, v = torch.randn(ROWS, WIDTH), weight(), weight()
    used = [w, v]
    frozen = torch.randn(WIDTH, WIDTH)
    record = count(lambda: train(forward(x, w, v, frozen).sum(), used))
    assert parts(record) == (model * F, 0, dropped * F)


def _inner(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    loss = nnf.linear(torch.tanh(nnf.linear(x, a)), b).pow(2).sum()
    gradients = torch.autograd.grad(loss, [a, b], create_graph=True)
    return a - 0.01 * gradients[0], b - 0.01 * gradients[1]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("steps", [1, 2])
def test_an_inner_backward_of_a_checkpointed_region_is_recomputed_with_it(steps: int, use_reentrant: bool) -> None:
    x, a, b = torch.randn(ROWS, WIDTH), weight(), weight()

    def maml(checkpointed: bool) -> None:
        weights: Any = (a, b)
        for _ in range(steps):
            weights = (
                checkpoint(_inner, x, *weights, use_reentrant=use_reentrant) if checkpointed else _inner(x, *weights)
            )
        nnf.linear(torch.tanh(nnf.linear(x, weights[0])), weights[1]).pow(2).sum().backward()

    if use_reentrant:
        # Its first forward runs without gradients, where no inner backward can run: torch itself refuses.
        with pytest.raises(RuntimeError):
            maml(checkpointed=True)
        return
    plain = count(lambda: maml(checkpointed=False))
    record = count(lambda: maml(checkpointed=True))
    # A step: forwards 2 and inner gradients 3 (none of the data's), all five with gradients of their own.
    assert record.model_flops == plain.model_flops
    assert record.recompute_flops == steps * (2 + 3 + 1) * F
    assert record.other_flops == 0


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_checkpointed_attention_of_an_aot_backend(backend: str) -> None:
    class SelfAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return (self.q(x) @ self.k(x).t()).softmax(-1) @ self.v(x)

    torch._dynamo.reset()
    model, x = SelfAttention(), torch.randn(ROWS, WIDTH, requires_grad=True)
    step = torch.compile(lambda x: checkpoint(model, x, use_reentrant=False).sum(), backend=backend)
    step(x).backward()
    with mm.FlopCounter(model) as counter:
        step(x).backward()
    attention = 2 * ROWS * ROWS * WIDTH
    assert counter.record.model_flops == 9 * F + 6 * attention
    assert counter.record.recompute_flops == 3 * F + attention


@pytest.mark.parametrize("constant", ["weight", "input", "both moving"])
def test_a_product_with_a_tangent_that_nobody_gave_is_other_work(constant: str) -> None:
    x, w = torch.randn(ROWS, WIDTH), torch.randn(WIDTH, WIDTH)

    def step() -> None:
        if constant == "weight":
            torch.func.jvp(lambda x: x @ w, (x,), (x,))
        elif constant == "input":
            torch.func.jvp(lambda w: x @ w, (w,), (w,))
        else:
            torch.func.jvp(lambda x, w: x @ w, (x, w), (x, w))

    record = count(step)
    moving = 2 if constant == "both moving" else 1
    assert record.model_flops == F + moving * F
    assert record.hardware_flops == 3 * F

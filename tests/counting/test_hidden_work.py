"""Work that leaves traces only: a backward on another thread, and kernels that hide in a custom function."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import Function

import mfu_monitor as mm

F = 2 * 16 * 32 * 32


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 32, bias=False), nn.Tanh(), nn.Linear(32, 32, bias=False))


def count(step: Callable[[], Any], model: nn.Module | None = None) -> mm.StepRecord:
    with mm.FlopCounter(model) as counter:
        step()
    return counter.record


def elsewhere(call: Callable[[], Any]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call).result()


# --- other threads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("knows_model", [True, False])
def test_a_backward_on_another_thread_is_a_bound(knows_model: bool) -> None:
    model, x = network(), torch.ones(16, 32)
    record = count(lambda: elsewhere(model(x).sum().backward), model if knows_model else None)
    assert record.is_lower_bound
    assert record.model_flops <= 5 * F
    assert any("another thread" in note for note in record.notes)


def test_a_whole_step_on_another_thread_is_a_bound() -> None:
    model, x = network(), torch.ones(16, 32)
    assert count(lambda: elsewhere(lambda: model(x).sum().backward()), model).is_lower_bound


@pytest.mark.parametrize("to_none", [True, False])
def test_a_gradient_that_another_thread_adds_to_is_a_bound(to_none: bool) -> None:
    model, x = network(), torch.ones(16, 32)
    model(x).sum().backward()

    def step() -> None:
        model.zero_grad(set_to_none=to_none)
        elsewhere(model(x).sum().backward)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    assert count(step, model).is_lower_bound


def test_one_of_two_backwards_on_another_thread_is_a_bound() -> None:
    model, other, x = network(), network(), torch.ones(16, 32)

    def step() -> None:
        model(x).sum().backward()
        elsewhere(other(x).sum().backward)

    assert count(step, nn.ModuleList([model, other])).is_lower_bound


def unused_zeroed(model: nn.Module, x: torch.Tensor) -> None:
    """The second layer has a gradient of an earlier step, which is zeroed and clipped."""
    model.zero_grad(set_to_none=False)
    model[0](x).sum().backward()  # type: ignore[index]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def assigned(model: nn.Module, x: torch.Tensor) -> None:
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(model(x).sum(), parameters), strict=True):
        parameter.grad = gradient


def computed(model: nn.Module, x: torch.Tensor) -> None:
    """An evolution strategy: gradients without autograd."""
    with torch.no_grad():
        score = model(x).mean()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) * score


@pytest.mark.parametrize("step", [unused_zeroed, assigned, computed])
def test_gradients_that_were_seen_to_come_about_are_no_bound(step: Callable[..., None]) -> None:
    model, x = network(), torch.ones(16, 32)
    model(x).sum().backward()
    record = count(lambda: step(model, x), model)
    assert not record.is_lower_bound, record.notes


# --- hidden kernels ---------------------------------------------------------------------------------------------------


class Scores(Function):
    """q k^T by numpy, forward and backward, into tensors made empty or around numpy's own memory."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(q, k)
        scores = torch.empty(16, 16)
        scores.numpy()[:] = q.detach().numpy() @ k.detach().numpy().T
        return scores

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k = ctx.saved_tensors
        return tuple(torch.from_numpy(a) for a in (grad.numpy() @ k.numpy(), grad.numpy().T @ q.numpy()))


class ScoresAround(Scores):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(q, k)
        return torch.from_numpy(q.detach().numpy() @ k.detach().numpy().T)


class SeenForward(Function):
    """A seen forward whose backward hides."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(q, k)
        return q @ k.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k = ctx.saved_tensors
        for_q, for_k = torch.empty_like(q), torch.empty_like(k)
        for_q.numpy()[:] = grad.numpy() @ k.numpy()
        for_k.numpy()[:] = grad.numpy().T @ q.numpy()
        return for_q, for_k


@pytest.mark.parametrize("function", [Scores, ScoresAround, SeenForward], ids=lambda f: f.__name__)
def test_a_hidden_kernel_between_two_layers_is_a_bound(function: Any) -> None:
    query, key = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
    x = torch.ones(16, 32)
    record = count(lambda: function.apply(query(x), key(x)).sum().backward(), nn.ModuleList([query, key]))
    assert record.is_lower_bound
    assert any(function.__name__ in note for note in record.notes)


@torch.library.custom_op("hidden_work::scores", mutates_args=())
def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(q.numpy() @ k.numpy().T)


def test_a_hidden_kernel_in_an_operator_is_reported_by_name() -> None:
    query, key, x = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False), torch.ones(16, 32)
    record = count(lambda: scores(query(x).detach(), key(x).detach()))
    assert [op.op for op in record.unsupported_ops] == ["hidden_work::scores"]


class Reversed(Function):
    """Gives its input back; turns the gradient round."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return -grad


class Filled(Function):
    """Makes room and fills it by operators that are seen."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        room = torch.empty_like(x)
        torch.mul(x, 2, out=room)
        return room

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(grad).copy_(grad).mul_(2)


@pytest.mark.parametrize("function", [Reversed, Filled], ids=lambda f: f.__name__)
def test_a_function_of_seen_operators_hides_nothing(function: Any) -> None:
    first, second, x = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False), torch.ones(16, 32)
    record = count(lambda: second(function.apply(first(x))).sum().backward(), nn.ModuleList([first, second]))
    assert not record.is_lower_bound, record.notes
    assert record.model_flops == 5 * F


def test_a_function_that_ran_before_the_count_is_not_its_concern() -> None:
    weight = torch.ones(16, 16, requires_grad=True)
    loss = Scores.apply(torch.ones(16, 32, requires_grad=True), torch.ones(16, 32)).sum() + (weight @ weight).sum()
    hidden = ScoresAround.apply(torch.ones(16, 32, requires_grad=True), torch.ones(16, 32))
    record = count(lambda: (loss.detach(), hidden.sum()))
    assert not record.is_lower_bound, record.notes


def test_a_formula_covers_what_hides_in_its_module() -> None:
    class Hiding(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor) -> Any:
            return Scores.apply(q, k)

    mm.register_module_formula(Hiding)(lambda module, q, k: 2 * q[0] * q[1] * k[0])
    query, key, hiding = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False), Hiding()
    x = torch.ones(16, 32)
    model = nn.ModuleList([query, key, hiding])
    record = count(lambda: hiding(query(x), key(x)).sum().backward(), model)
    assert not record.is_lower_bound, record.notes

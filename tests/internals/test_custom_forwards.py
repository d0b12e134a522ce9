"""The forward of a custom function is known without a frame of ``Function.apply``, which torch 2.14 no longer has."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mfu_monitor as mm
from mfu_monitor.internals.custom_forwards import ForwardCodes, context_of, is_forward

F = 2 * 16 * 32 * 32


def seen_from() -> FrameType:
    return sys._getframe(1)


def passes_on(function: Callable[..., Any]) -> Callable[..., Any]:
    """One decorator on forward and backward alike, as Triton kernels carry it."""

    @wraps(function)
    def inner(*args: Any) -> Any:
        return function(*args)

    return inner


def make_function(style: str) -> type[torch.autograd.Function]:
    """A product as a custom function; the class is new, and made as late as a test asks."""

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x

    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    def bare(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.t()

    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    if style == "setup_context":
        parts = {"forward": bare, "setup_context": setup_context, "backward": backward}
    elif style == "custom_fwd":
        parts = {
            "forward": torch.amp.custom_fwd(forward, device_type="cpu"),
            "backward": torch.amp.custom_bwd(backward, device_type="cpu"),
        }
    elif style == "decorated":
        parts = {"forward": passes_on(forward), "backward": passes_on(backward)}
    else:
        parts = {"forward": forward, "backward": backward}
    made = type("Product", (torch.autograd.Function,), {k: staticmethod(v) for k, v in parts.items()})
    return type("Inherited", (made,), {}) if style == "inherited" else made


STYLES = ("context", "setup_context", "custom_fwd", "decorated", "inherited")


@pytest.mark.parametrize("style", STYLES)
def test_a_forward_in_a_training_step_is_model_work(style: str) -> None:
    weight, x = nn.Parameter(torch.randn(32, 32)), torch.randn(16, 32, requires_grad=True)
    with mm.FlopCounter() as counter:
        make_function(style).apply(x, weight).sum().backward()
    assert (counter.record.model_flops, counter.record.hardware_flops) == (3 * F, 3 * F)


@pytest.mark.parametrize("style", STYLES)
def test_a_teacher_made_of_nothing_but_the_function_is_other_work(style: str) -> None:
    product = make_function(style)
    weight, teacher = nn.Parameter(torch.randn(32, 32)), nn.Parameter(torch.randn(32, 32))
    x = torch.randn(16, 32, requires_grad=True)
    with mm.FlopCounter() as counter:
        student = product.apply(x, weight)
        with torch.no_grad():
            target = product.apply(x, teacher)
        (student - target).sum().backward()
    assert (counter.record.model_flops, counter.record.other_flops) == (3 * F, F)


@pytest.mark.parametrize("style", STYLES)
def test_a_function_right_after_a_block_without_gradient_is_model_work(style: str) -> None:
    product = make_function(style)
    weight, teacher = nn.Parameter(torch.randn(32, 32)), nn.Parameter(torch.randn(32, 32))
    x = torch.randn(16, 32, requires_grad=True)
    with mm.FlopCounter() as counter:
        with torch.no_grad():
            target = x @ teacher
        (product.apply(x, weight) - target).sum().backward()
    assert (counter.record.model_flops, counter.record.other_flops) == (3 * F, F)


def test_each_call_of_one_function_has_the_grad_mode_it_was_called_in() -> None:
    product = make_function("setup_context")
    weight, teacher = nn.Parameter(torch.randn(32, 32)), nn.Parameter(torch.randn(32, 32))
    x = torch.randn(16, 32, requires_grad=True)
    with mm.FlopCounter() as counter:
        with torch.no_grad():
            target = product.apply(product.apply(x, teacher), teacher)
        student = product.apply(product.apply(x, weight), weight)
        (student - target).sum().backward()
    assert (counter.record.model_flops, counter.record.other_flops) == (6 * F, 2 * F)


@pytest.mark.parametrize("teaches", [False, True])
def test_a_forward_without_context_that_returns_a_view_has_its_callers_grad_mode(teaches: bool) -> None:
    class Viewed(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor, weight: Tensor) -> Tensor:
            return torch.relu(x @ weight.t()).view(4, 4, 32)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            gradient = gradient.reshape(16, 32)
            return gradient @ weight, gradient.t() @ x

    weight, x = nn.Parameter(torch.randn(32, 32)), torch.randn(16, 32, requires_grad=True)
    with mm.FlopCounter() as counter:
        with torch.set_grad_enabled(not teaches):
            first = Viewed.apply(x, weight)
        (first.reshape(16, 32) + x).sum().backward()
    assert (counter.record.model_flops, counter.record.other_flops) == ((0, F) if teaches else (3 * F, 0))


def test_a_forward_called_by_hand_is_no_custom_forward() -> None:
    frames: list[FrameType] = []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            frames.append(seen_from())
            return x.clone()

    codes = ForwardCodes()
    Spy.apply(torch.ones(1))
    Spy.forward(object(), torch.ones(1))
    assert [is_forward(frame, codes.known()) for frame in frames] == [True, False]


def test_the_context_is_found_behind_a_decorator_and_absent_in_a_plain_call() -> None:
    def plain(x: Tensor) -> FrameType:
        return sys._getframe()

    def variadic(*args: Any) -> FrameType:
        return sys._getframe()

    context = torch.autograd.function.FunctionCtx()
    assert context_of(plain(torch.ones(1))) is None
    assert context_of(variadic()) is None
    assert context_of(variadic(context, 1)) is context

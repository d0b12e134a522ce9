"""What a counted step keeps from one operator to the next is never older than what it stands for."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import mfu_monitor as mm
from mfu_monitor.counting import frames
from mfu_monitor.formulas.registry import unregister_flop_formula

F = 2 * 4 * 8 * 8
"""FLOPs of (4, 8) @ (8, 8)."""


@pytest.fixture
def without_formula() -> Iterator[None]:
    yield
    unregister_flop_formula("aten::tanh")


def multiply(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if ctx is not None:
        ctx.save_for_backward(x, weight)
    return x @ weight


def test_a_function_made_of_code_that_ran_before_in_the_step_is_a_custom_function() -> None:
    x, weight = torch.ones(4, 8), torch.ones(8, 8, requires_grad=True)
    with mm.FlopCounter() as counter:
        multiply(None, x, weight.detach())
        made = type(
            "Made",
            (torch.autograd.Function,),
            {
                "forward": staticmethod(multiply),
                "backward": staticmethod(lambda ctx, grad: (None, ctx.saved_tensors[0].t() @ grad)),
            },
        )
        made.apply(x, weight).sum().backward()  # type: ignore[attr-defined]
    # The plain call had gradients on; the function's forward and its weight's gradient.
    assert (counter.record.model_flops, counter.record.other_flops) == (3 * F, 0)


def test_a_formula_given_within_the_step_holds_from_there_on(without_formula: None) -> None:
    x = torch.ones(4, 8)
    with mm.FlopCounter() as counter:
        x.tanh()
        mm.register_flop_formula("aten::tanh")(lambda x, *, out_shape: 10 * x.numel())
        x.tanh()
        unregister_flop_formula("aten::tanh")
        x.tanh()
    assert counter.record.model_flops == 10 * 4 * 8


def test_products_around_and_within_an_optimizers_step_keep_their_phases() -> None:
    model = nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.ones(4, 8)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        return loss

    with mm.FlopCounter(model) as counter:
        for _ in range(2):
            optimizer.step(closure)
            model(x).sum().backward()
    # Each of the four passes: the forward and the weight's gradient.
    assert counter.record.by_phase()["forward"].model_flops == 4 * F
    assert counter.record.by_phase()["backward"].model_flops == 4 * F
    assert counter.record.hardware_flops == 8 * F
    assert any(op.phase == "optimizer" and op.op == "aten::lerp_" for op in counter.record.ops)


@pytest.mark.parametrize("is_retained", [False, True])
def test_after_the_step_nothing_of_it_is_held(is_retained: bool) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    counter = mm.FlopCounter(model)
    with counter:
        root = torch.ones(4, 8)
        out = model(torch.ones(4, 8))
        out.backward(root, retain_graph=is_retained)
        optimizer.step()
    held = [weakref.ref(t) for t in (root, out, model.weight.grad) if t is not None]
    model.weight.grad = None
    del root, out
    gc.collect()
    assert [ref() for ref in held] == [None] * 3


def test_a_devices_backward_thread_finds_the_call_that_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []

    def in_backward(gradient: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=lambda: found.append(frames._blocked_engine()))
        thread.start()
        thread.join()
        return gradient

    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(in_backward)
    y.sum().backward()
    assert found[0].f_code is torch.autograd.graph._engine_run_backward.__code__
    assert gc.isenabled()
    monkeypatch.setattr(sys, "_current_frames", lambda: pytest.fail("the thread asked is the one that walks"))
    assert frames._blocked_engine() is None

"""A fault of ours in a counted step makes the record unknown: never a figure above the truth, never an exception."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mfu_monitor as mm
from mfu_monitor.counting import autograd_links, coverage, custom_functions, frames, observer
from mfu_monitor.formulas.registry import unregister_module_formula

PLACES: dict[str, tuple[Any, str]] = {
    "call site": (frames.CallSite, "outside_checkpoint"),
    "walk up the stack": (frames.StackReader, "read"),
    "forward link": (autograd_links.SequenceLinks, "add"),
    "backward link": (autograd_links.SequenceLinks, "of_node"),
    "accumulated gradient": (coverage.ParameterCoverage, "saw_gradient"),
    "custom functions": (custom_functions.FunctionRepeats, "saw"),
}


def fails_once(call: int, function: Callable[..., Any]) -> Callable[..., Any]:
    calls = 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise KeyError("injected")
        return function(*args, **kwargs)

    return failing


@pytest.fixture(autouse=True)
def proved_counter() -> None:
    """The counter's self-check runs once a process: without the injected fault."""
    with mm.FlopCounter():
        torch.ones(2, 2) @ torch.ones(2, 2)


def gradients_of_a_step(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    model(torch.ones(4, 8)).pow(2).sum().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("call", [1, 3])
@pytest.mark.parametrize("place", PLACES)
def test_a_fault_leaves_nothing_known_and_the_gradients_as_they_are(
    place: str, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    expected = gradients_of_a_step(model)
    owner, name = PLACES[place]
    monkeypatch.setattr(owner, name, fails_once(call, getattr(owner, name)))
    with mm.FlopCounter(model) as counter:
        gradients = gradients_of_a_step(model)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
    assert (counter.record.ops, counter.record.is_lower_bound) == ((), True)
    assert any("injected" in note for note in counter.record.notes)
    assert isinstance(counter.fault, KeyError)


def test_a_monitor_warns_once_of_a_fault_and_knows_no_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(8, 8)
    monkeypatch.setattr(autograd_links.SequenceLinks, "add", fails_once(1, autograd_links.SequenceLinks.add))
    monitor = mm.Monitor(model, log_every_n_steps=2, peak=1e12)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(8):
            with monitor.step(torch.ones(4, 8)):
                gradients_of_a_step(model)
    assert sum("injected" in str(w.message) for w in caught) == 1
    assert monitor.reading is None or monitor.reading.mfu is None


@pytest.mark.parametrize(
    ("holder", "name"),
    [
        (observer.StepObserver, "saw"),
        (observer.StepObserver, "_saw_opaque_module"),
        (observer.StepObserver, "_price_opaque_backward"),
    ],
)
def test_what_raises_before_its_own_guard_reaches_nobody(holder: type, name: str, monkeypatch: Any) -> None:
    class Doubled(nn.Linear):
        pass

    class MuteError(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    def raises(*_: Any, **__: Any) -> None:
        raise MuteError

    mm.register_module_formula(Doubled)(lambda module, *shapes, out_shape: 10)
    try:
        monkeypatch.setattr(holder, name, raises)
        model = nn.Sequential(Doubled(3, 4), nn.Linear(4, 2))
        with mm.FlopCounter(model) as counter:
            model(torch.ones(5, 3)).sum().backward()
    finally:
        unregister_module_formula(Doubled)
    assert all(p.grad is not None for p in model.parameters())
    assert counter.record.is_lower_bound
    assert any("counting failed" in note for note in counter.record.notes)

"""Frozen work in compiled code: a teacher under ``no_grad`` and a frozen part of the model make the same graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mfu_monitor as mm
from mfu_monitor.internals.dynamo import compiled_call_grad_mode, compiled_frame

ROWS, D = 16, 32
F = 2 * ROWS * D * D
"""FLOPs of one Linear(D, D) forward."""


def linear(*, frozen: bool = False) -> nn.Linear:
    return nn.Linear(D, D, bias=False).requires_grad_(not frozen)


class Distilled(nn.Module):
    """A student of one layer behind a frozen one, and a frozen teacher whose forward runs without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.frozen, self.teacher = linear(), linear(frozen=True), nn.Sequential(linear(frozen=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.student(self.frozen(x)) - self.taught(x)).pow(2).sum()

    def taught(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.teacher(x)


class Decorated(Distilled):
    @torch.no_grad()
    def taught(self, x: torch.Tensor) -> torch.Tensor:
        return self.teacher(x)


class Indirect(Distilled):
    def taught(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(False):
            return self.ask(x)

    def ask(self, x: torch.Tensor) -> torch.Tensor:
        return self.teacher(x)


class Teacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear(frozen=True)

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class DecoratedForward(Distilled):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = Teacher()  # type: ignore[assignment]

    def taught(self, x: torch.Tensor) -> torch.Tensor:
        return self.teacher(x)


class HalfFrozen(nn.Module):
    """A frozen layer below a trained one; what turns gradients off is never called by ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.above = linear(frozen=True), linear()

    @torch.no_grad()
    def reset(self) -> None:
        self.below(torch.ones(1, D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.above(self.below(x)).sum()


def counted(run: Callable[[], None], model: nn.Module, **options: Any) -> mm.StepRecord:
    torch.compiler.reset()
    run()
    with mm.FlopCounter(model, **options) as counter:
        run()
    return counter.record


@pytest.mark.parametrize("kind", [Distilled, Decorated, Indirect, DecoratedForward])
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_a_frozen_teacher_in_a_compiled_forward_is_never_called_exact(kind: type[nn.Module], backend: str) -> None:
    model, x = kind(), torch.randn(ROWS, D)
    compiled = torch.compile(model, backend=backend)
    record = counted(lambda: compiled(x).backward(), model)
    # Model: forward of the frozen layer, forward and weight gradient of the student.
    assert record.is_lower_bound
    assert record.model_flops <= 3 * F
    assert record.hardware_flops == 4 * F
    assert any("count_no_grad_as_model=True makes this exact" in note for note in record.notes)
    if backend == "inductor":
        assert record.model_flops == 3 * F
        assert record.by_module()["teacher"].other_flops == F


@pytest.mark.parametrize("backend", ["inductor", "aot_eager", "eager"])
def test_what_counts_without_gradient_as_model_has_no_doubt(backend: str) -> None:
    model, x = Distilled(), torch.randn(ROWS, D)
    compiled = torch.compile(model, backend=backend)
    record = counted(lambda: compiled(x).backward(), model, count_no_grad_as_model=True)
    assert (record.model_flops, record.other_flops, record.is_lower_bound) == (4 * F, 0, False)


@pytest.mark.parametrize("backend", ["inductor", "aot_eager", "eager"])
def test_a_frozen_layer_is_model_work_where_no_code_that_runs_turns_gradients_off(backend: str) -> None:
    model, x = HalfFrozen(), torch.randn(ROWS, D)
    compiled = torch.compile(model, backend=backend)
    record = counted(lambda: compiled(x).backward(), model)
    assert (record.model_flops, record.other_flops, record.is_lower_bound) == (3 * F, 0, False)


@pytest.mark.parametrize("is_off", [True, False])
@pytest.mark.parametrize("backend", ["inductor", "aot_eager", "eager"])
def test_a_frozen_encoder_compiled_by_itself_has_the_mode_it_is_called_in(backend: str, is_off: bool) -> None:
    encoder, head, x = linear(frozen=True), linear(), torch.randn(ROWS, D)
    compiled = torch.compile(encoder, backend=backend)

    def run() -> None:
        with torch.set_grad_enabled(not is_off):
            y = compiled(x)
        head(y).sum().backward()

    record = counted(run, nn.ModuleList([encoder, head]))
    assert (record.model_flops, record.other_flops) == ((2 * F, F) if is_off else (3 * F, 0))
    assert not record.is_lower_bound


def test_without_a_frame_of_dynamos_nothing_frozen_is_called_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mfu_monitor.counting.compiled.runs.compiled_frame", lambda frame: None)
    model, x = HalfFrozen(), torch.randn(ROWS, D)
    compiled = torch.compile(model)
    record = counted(lambda: compiled(x).backward(), model)
    assert record.is_lower_bound
    assert (record.model_flops, record.other_flops) == (2 * F, F)


def test_without_the_wrappers_variable_a_frozen_graph_is_never_called_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mfu_monitor.counting.phase.compiled_call_grad_mode", lambda frame: None)
    encoder, head, x = linear(frozen=True), linear(), torch.randn(ROWS, D)
    compiled = torch.compile(encoder)
    record = counted(lambda: head(compiled(x)).sum().backward(), nn.ModuleList([encoder, head]))
    assert record.is_lower_bound
    assert (record.model_flops, record.other_flops) == (2 * F, F)


def test_outside_of_compiled_code_there_is_no_frame_of_dynamos() -> None:
    import sys

    assert compiled_frame(sys._getframe()) is None
    assert compiled_call_grad_mode(sys._getframe()) is True
    with torch.no_grad():
        assert compiled_call_grad_mode(sys._getframe()) is False


def test_a_weight_whose_input_was_detached_is_trained_in_compiled_code() -> None:
    """x asks for a gradient and gets none; W reads it twice, and its gradient has two parts."""
    model, x = linear(), torch.randn(ROWS, D, requires_grad=True)

    def loss(x: torch.Tensor) -> torch.Tensor:
        y = x.detach()
        return model(y).sum() + model(y + y).sum()

    compiled = torch.compile(loss)
    record = counted(lambda: compiled(x).backward(), model)
    assert (record.model_flops, record.other_flops, record.is_lower_bound) == (2 * F + 2 * F, 0, False)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return None, None


@pytest.mark.parametrize("is_off", [True, False])
@pytest.mark.parametrize("comes_after", [True, False])
def test_a_custom_function_that_nothing_asks_a_gradient_of_may_be_a_teacher(is_off: bool, comes_after: bool) -> None:
    head, x, weight = linear(), torch.randn(ROWS, D), torch.randn(D, D)
    with mm.FlopCounter(head) as counter:
        with torch.set_grad_enabled(comes_after):
            x = x + 1
        with torch.set_grad_enabled(not is_off):
            y = _Product.apply(x, weight)
        head(y).sum().backward()
    record = counter.record
    assert record.is_lower_bound
    assert (record.model_flops, record.other_flops) == (2 * F, F)
    assert any("custom function" in note for note in record.notes)


def test_without_a_backward_pass_no_grad_mode_matters() -> None:
    x, weight = torch.randn(ROWS, D), torch.randn(D, D)
    with mm.FlopCounter() as counter:
        _Product.apply(x, weight)
    assert (counter.record.model_flops, counter.record.is_lower_bound) == (F, False)

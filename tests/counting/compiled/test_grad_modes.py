"""Grad mode inside a compiled graph: work that no gradient flows back to is not the model's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import mfu_monitor as mm
from mfu_monitor.counting.compiled.watch import guards_notice_modes

pytestmark = pytest.mark.skipif(
    guards_notice_modes(), reason="before torch 2.10 counted steps of compiled code run in eager"
)
F = 2 * 16 * 32 * 32
"""One Linear(32, 32) without bias on 16 rows."""


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _tower() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 32, bias=False), nn.GELU(), nn.Linear(32, 32, bias=False))


@torch.no_grad()
def _taught(teacher: nn.Module, x: Tensor) -> Tensor:
    answer: Tensor = teacher(x)
    return answer


def _by_block(teacher: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        answer: Tensor = teacher(x)
    return answer


def _by_set_grad_enabled(teacher: nn.Module, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(False):
        answer: Tensor = teacher(x)
    return answer


class Distillation(nn.Module):
    def __init__(self, teach: Callable[[nn.Module, Tensor], Tensor], *, on_hidden: bool = False) -> None:
        super().__init__()
        self.student, self.teacher = _tower(), _tower()
        self.teach, self.on_hidden = teach, on_hidden

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.student(x)
        taught = self.teach(self.teacher, answer if self.on_hidden else x)
        return (answer - taught).pow(2).sum()


def _count_compiled(model: nn.Module) -> mm.StepRecord:
    x = torch.randn(16, 32)
    compiled = torch.compile(model)
    compiled(x).backward()
    with mm.FlopCounter(model) as counter:
        compiled(x).backward()
    return counter.record


@pytest.mark.parametrize("teach", [_taught, _by_block, _by_set_grad_enabled])
@pytest.mark.parametrize("on_hidden", [False, True])
def test_teacher_without_gradient_in_a_compiled_forward_is_other_work(
    teach: Callable[[nn.Module, Tensor], Tensor], on_hidden: bool
) -> None:
    record = _count_compiled(Distillation(teach, on_hidden=on_hidden))
    # The student: two forward products, two weight gradients, one input gradient; x asks for none.
    assert (record.model_flops, record.other_flops, record.hardware_flops) == (5 * F, 2 * F, 7 * F)
    assert not record.is_lower_bound


class SelfDistillation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            taught = self.tower(x * 2)
        return (self.tower(x) - taught).pow(2).sum()


def test_weight_used_with_and_without_gradient_never_says_more_than_the_truth() -> None:
    record = _count_compiled(SelfDistillation())
    assert record.hardware_flops == 3 * F  # two forwards and one weight gradient
    assert record.model_flops <= 2 * F
    assert record.is_lower_bound
    assert any("more often than its gradient has parts" in note for note in record.notes)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).relu()).pow(2).sum()


def test_weight_used_twice_with_gradient_stays_exact() -> None:
    record = _count_compiled(Twice())
    assert (record.model_flops, record.hardware_flops) == (5 * F, 5 * F)
    assert not record.is_lower_bound


class SharedBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.second.bias = self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()).pow(2).sum()


def test_bias_used_by_two_layers_is_no_weight_that_lost_its_gradient() -> None:
    record = _count_compiled(SharedBias())
    assert (record.model_flops, record.hardware_flops) == (5 * F, 5 * F)
    assert record.notes == ()
    assert not record.is_lower_bound

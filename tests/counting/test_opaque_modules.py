"""Opaque layers in a counted step: stand-in classes under the names of their libraries, with kernels nobody can see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mfu_monitor.counting.counter import FlopCounter
from mfu_monitor.counting.step_record import StepRecord
from mfu_monitor.formulas.registry import register_module_formula, unregister_module_formula

F_LINEAR = 2 * 12 * 8 * 8  # 3*4 rows, (8, 8)


class HiddenProduct(torch.autograd.Function):
    """Stands for a kernel that is launched past the dispatcher: it only makes room for its results."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x.new_zeros(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return tuple(torch.zeros_like(t) for t in ctx.saved_tensors)


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.in_features = self.out_features = 8
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> Any:
        return HiddenProduct.apply(x, self.weight)  # type: ignore[no-untyped-call]


class HiddenAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        return v.new_zeros(*v.shape[:2], v.shape[2] * v.shape[3])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return tuple(torch.zeros_like(t) for t in ctx.saved_tensors)


class DotProductAttention(nn.Module):
    qkv_format = "bshd"

    def __init__(self, attn_mask_type: str) -> None:
        super().__init__()
        self.attn_mask_type = attn_mask_type

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return HiddenAttention.apply(q, k, v)  # type: ignore[no-untyped-call]


Linear.__module__ = "transformer_engine.pytorch.module.linear"
DotProductAttention.__module__ = "transformer_engine.pytorch.attention"


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(Linear(), nn.ReLU(), Linear())


def rows(*, requires_grad: bool = True) -> torch.Tensor:
    return torch.randn(3, 4, 8, requires_grad=requires_grad)


def count(model: nn.Module | None, run: Callable[[], Any]) -> StepRecord:
    with FlopCounter(model) as counter:
        run()
    return counter.record


def test_a_hidden_linear_trains_at_three_forwards_in_its_own_module(model: nn.Module) -> None:
    record = count(model, lambda: model(rows()).sum().backward())
    assert record.model_flops == record.hardware_flops == 6 * F_LINEAR
    assert record.by_module()["2"].model_flops == 3 * F_LINEAR
    assert not record.is_lower_bound
    assert not any(module._forward_hooks for module in model.modules())


def test_data_and_frozen_weights_need_no_gradient(model: nn.Module) -> None:
    record = count(model, lambda: model(rows(requires_grad=False)).sum().backward())
    assert record.model_flops == 5 * F_LINEAR
    model.get_submodule("0").requires_grad_(False)
    record = count(model, lambda: model(rows(requires_grad=False)).sum().backward())
    assert record.model_flops == (1 + 2) * F_LINEAR


def test_each_backward_that_runs_through_a_call_is_counted(model: nn.Module) -> None:
    def twice() -> None:
        loss = model(rows()).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    assert count(model, twice).model_flops == (2 + 4 + 4) * F_LINEAR


def test_a_forward_that_is_cut_off_has_no_backward(model: nn.Module) -> None:
    other = nn.Linear(8, 2)

    def generator_in_the_step_of_its_critic() -> None:
        other(model(rows()).detach()).sum().backward()

    record = count(model, generator_in_the_step_of_its_critic)
    assert record.model_flops == 2 * F_LINEAR + 2 * (2 * 12 * 8 * 2)


def test_a_graph_of_gradients_can_be_made_through_it(model: nn.Module) -> None:
    x = rows()
    record = count(model, lambda: torch.autograd.grad(model(x).sum(), x, create_graph=True))
    assert record.model_flops == 6 * F_LINEAR


@pytest.mark.parametrize(("use_reentrant", "rerun"), [(True, 2), (False, 1)])
def test_checkpointing_reruns_it_as_recompute(model: nn.Module, use_reentrant: bool, rerun: int) -> None:
    record = count(model, lambda: checkpoint(model, rows(), use_reentrant=use_reentrant).sum().backward())
    assert record.model_flops == 6 * F_LINEAR
    assert record.recompute_flops == rerun * F_LINEAR


def test_a_formula_of_a_module_covers_the_opaque_modules_inside(model: nn.Module) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> Any:
            return self.inner(x)

    @register_module_formula(Block)
    def _block(module: Any, x: torch.Size) -> int:
        return 2 * (2 * x.numel() * 8)

    block = Block()
    try:
        record = count(block, lambda: block(rows()).sum().backward())
    finally:
        unregister_module_formula(Block)
    assert record.model_flops == 3 * 2 * F_LINEAR


def test_hidden_causal_attention_counts_its_triangle_forward_and_backward() -> None:
    attention = DotProductAttention("causal")
    q, k, v = (torch.randn(3, 6, 2, 4, requires_grad=True) for _ in range(3))
    record = count(attention, lambda: attention(q, k, v).sum().backward())
    assert record.model_flops == 3 * (4 * 3 * 2 * (6 * 7 // 2) * 4)
    assert record.palm_model_flops == 3 * (4 * 3 * 2 * 6 * 6 * 4)


def test_a_call_that_its_formula_cannot_count_is_reported_with_its_module() -> None:
    model = nn.ModuleDict({"attention": DotProductAttention("padding_causal")})
    q, k, v = (torch.randn(3, 6, 2, 4, requires_grad=True) for _ in range(3))
    record = count(model, lambda: model["attention"](q, k, v).sum().backward())
    assert [(op.op, op.module_fqn) for op in record.unsupported_ops] == [("module::DotProductAttention", "attention")]
    assert record.is_lower_bound
    assert "attn_mask_type='padding_causal'" in record.notes[0]
    assert "register_module_formula" in record.notes[0]


def test_an_opaque_module_outside_of_the_counted_model_is_not_passed_over_in_silence(model: nn.Module) -> None:
    record = count(None, lambda: model(rows()).sum().backward())
    assert record.is_lower_bound
    assert "not part of the counted model" in record.notes[0]
    assert "FlopCounter(model)" in record.notes[0]

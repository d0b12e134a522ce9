"""A counted step constructs tensor subclasses as the step does without it, and leaves torch as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils._python_dispatch import TorchDispatchMode

import mfu_monitor as mm


class Bare(torch.Tensor):
    pass


class WithInit(torch.Tensor):
    def __init__(self, variant: int, rows: int, columns: int) -> None:
        self.variant = variant


class WithNew(torch.Tensor):
    def __new__(cls, data: Tensor, label: str) -> WithNew:
        made = super().__new__(cls, data)
        made.label = label  # type: ignore[attr-defined]
        return made


class Other(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


DATA = torch.arange(6.0).reshape(2, 3)
CONSTRUCTORS: dict[str, Callable[[], Tensor]] = {
    "tensor": lambda: Bare(DATA),
    "tensor that needs a gradient": lambda: Bare(DATA.clone().requires_grad_()),
    "list": lambda: Bare([1.0, 2.0]),
    "sizes": lambda: Bare(2, 3).zero_(),
    "nothing": lambda: Bare(),
    "storage": lambda: Bare(DATA.untyped_storage()),
    "own __init__": lambda: WithInit(1, 2, 3).zero_(),
    "own __new__": lambda: WithNew(DATA, "label"),
    "another subclass": lambda: Bare(WithNew(DATA, "label")),
    "plain from a subclass": lambda: torch.Tensor(Bare(DATA)),
    "as_subclass": lambda: DATA.as_subclass(Bare),
    "parameter": lambda: nn.Parameter(Bare(DATA)),
    "lower right bias": lambda: causal_lower_right(4, 8),
    "upper left bias": lambda: causal_upper_left(8, 8),
}


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_a_constructor_gives_the_same_in_a_counted_step(name: str) -> None:
    expected = CONSTRUCTORS[name]()
    with mm.FlopCounter() as counter:
        made = CONSTRUCTORS[name]()
    assert type(made) is type(expected)
    assert (made.requires_grad, made.shape, made.dtype) == (expected.requires_grad, expected.shape, expected.dtype)
    if "bias" not in name:
        assert made.tolist() == expected.tolist()
    assert counter.record.hardware_flops == 0


def test_attention_with_a_bias_made_in_the_step_counts_its_attended_pairs() -> None:
    query, key = torch.randn(1, 2, 4, 8, requires_grad=True), torch.randn(1, 2, 8, 8)
    with mm.FlopCounter() as counter:
        F.scaled_dot_product_attention(query, key, key, attn_mask=causal_lower_right(4, 8)).sum().backward()
    attended = 5 + 6 + 7 + 8  # 4 queries at the end of 8 keys
    assert counter.record.by_phase()["forward"].model_flops == 2 * 2 * 2 * attended * 8


def test_the_operators_of_a_subclass_made_in_the_step_are_counted() -> None:
    weight = nn.Parameter(torch.randn(3, 5))
    with mm.FlopCounter() as counter:
        (Bare(DATA) @ weight).sum().backward()
    assert (counter.record.model_flops, counter.record.is_lower_bound) == (2 * 2 * (2 * 3 * 5), False)


def test_a_monitored_loop_that_constructs_subclasses_trains_as_without_monitor() -> None:
    def train(monitor: mm.Monitor | None) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            if monitor is None:
                loss = model(Bare(DATA)).pow(2).sum()
                loss.backward()
            else:
                with monitor.step(DATA):
                    loss = model(Bare(DATA)).pow(2).sum()
                    loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    assert train(mm.Monitor(nn.Linear(3, 3), log_every_n_steps=2)) == train(None)


def test_torchs_constructor_is_left_as_it_was() -> None:
    with pytest.raises(ZeroDivisionError), mm.FlopCounter(), mm.FlopCounter():
        raise ZeroDivisionError
    assert "__new__" not in torch.Tensor.__dict__
    assert type(Bare(DATA)) is Bare


def test_a_constructor_that_somebody_replaced_is_called_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.Tensor.__new__

    def doubled(cls: type, *args: Any) -> Any:
        return plain(cls, *args) * 2  # type: ignore[call-overload]

    monkeypatch.setattr(torch.Tensor, "__new__", doubled)
    with mm.FlopCounter():
        made = Bare(DATA)
    assert made.tolist() == (DATA * 2).tolist()
    assert torch.Tensor.__new__ is doubled


def test_under_a_mode_of_the_users_own_a_constructor_fails_as_it_does_without_us() -> None:
    with Other(), pytest.raises(RuntimeError, match="already associated"):
        Bare(DATA)
    with Other(), mm.FlopCounter(), pytest.raises(RuntimeError, match="already associated"):
        Bare(DATA)

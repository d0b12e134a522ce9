"""Formulas of the user's that raise or give no number: one warning that names them, and a lower bound."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mfu_monitor as mm
from mfu_monitor.errors import UncountedWorkWarning
from mfu_monitor.formulas.cost import OpCost
from mfu_monitor.formulas.registry import unregister_flop_formula, unregister_module_formula

KNOWN = 2 * (2 * 4 * 16 * 8) + 2 * 4 * 16 * 8
"""Linear(16, 8) on 4 rows inside a network: forward and both gradients."""


class Raises:
    def __init__(self, error: Exception) -> None:
        self.error = error


WRONG: list[Any] = [
    *(None, "x", float("nan"), float("inf"), -5, 1.5, True, [], NotImplemented, torch.tensor(5), torch.ones(3)),
    *(Raises(RuntimeError("f")), Raises(KeyError("k")), Raises(StopIteration()), Raises(AssertionError())),
    *(OpCost(None), OpCost(-5), OpCost(float("nan")), OpCost(8, masked_flops=-1)),  # type: ignore[arg-type]
]


def formula(gives: Any) -> Callable[..., Any]:
    def flops(*shapes: Any) -> Any:
        if isinstance(gives, Raises):
            raise gives.error
        return gives

    return flops


class Wrapped(nn.Linear):
    """Has a formula of its own."""


@torch.library.custom_op("user_formulas::product", mutates_args=())
def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    unregister_flop_formula(product)
    unregister_module_formula(Wrapped)


def warned(step: Callable[[], Any], model: nn.Module | None = None) -> tuple[mm.StepRecord, list[str]]:
    """The record of the last of three counts, and what was warned of in all."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            with mm.FlopCounter(model) as counter:
                step()
    return counter.record, [str(w.message) for w in caught if w.category is UncountedWorkWarning]


@pytest.mark.parametrize("gives", WRONG, ids=lambda gives: repr(getattr(gives, "error", gives)))
def test_a_module_formula_without_a_number_is_named_once(gives: Any) -> None:
    mm.register_module_formula(Wrapped)(formula(gives))
    model, x = nn.Sequential(Wrapped(8, 16), nn.Linear(16, 8)), torch.ones(4, 8)
    record, messages = warned(lambda: model(x).sum().backward(), model)
    assert record.is_lower_bound
    assert record.model_flops == KNOWN
    assert len(messages) == 1
    assert "test_user_formulas.Wrapped" in messages[0]
    assert "formula.<locals>.flops" in messages[0]
    assert "lower bound" in messages[0]


@pytest.mark.parametrize("gives", WRONG, ids=lambda gives: repr(getattr(gives, "error", gives)))
def test_an_operator_formula_without_a_number_is_named_once(gives: Any) -> None:
    mm.register_flop_formula(product)(formula(gives))
    record, messages = warned(lambda: product(torch.ones(4, 8), torch.ones(8, 2)))
    assert record.is_lower_bound
    assert record.model_flops == 0
    assert len(messages) == 1
    assert "user_formulas::product" in messages[0]


@pytest.mark.parametrize("gives", [1024, 1024.0, np.int64(1024), OpCost(1024)], ids=repr)
def test_whole_numbers_of_any_kind_are_taken(gives: Any) -> None:
    mm.register_flop_formula(product)(formula(gives))
    record, messages = warned(lambda: product(torch.ones(8, 8), torch.ones(8, 8)))
    assert not record.is_lower_bound
    assert record.model_flops == 2 * 8 * 8 * 8
    assert messages == []


def test_warnings_made_errors_do_not_reach_the_step() -> None:
    mm.register_flop_formula(product)(formula(None))
    with warnings.catch_warnings(), mm.FlopCounter() as counter:
        warnings.simplefilter("error")
        product(torch.ones(4, 8), torch.ones(8, 2))
    assert counter.record.is_lower_bound

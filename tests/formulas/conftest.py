"""Runs a piece of torch under a bare dispatch mode and prices every operator by the formulas alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mfu_monitor.formulas  # noqa: F401  (registers every formula)
from mfu_monitor.formulas.cost import OpCost
from mfu_monitor.formulas.registry import bind_call, find_formula, operator_name
from mfu_monitor.formulas.traffic import bytes_accessed


class PricedCall(NamedTuple):
    """One dispatched operator; ``cost`` is None where there is no formula."""

    name: str
    cost: OpCost | None
    bytes_accessed: int

    @property
    def flops(self) -> int:
        return self.cost.flops if self.cost is not None else 0


class PricingMode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[PricedCall] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        name = operator_name(func)
        found = find_formula(name)
        cost = found(bind_call(func, args, kwargs, output)) if found is not None else None
        self.calls.append(PricedCall(name, cost, bytes_accessed(func, args, kwargs, output)))
        return output


Price = Callable[[Callable[[], Any]], list[PricedCall]]


@pytest.fixture(scope="session")
def price() -> Price:
    """``price(run)`` gives every operator that ``run()`` dispatched, with its cost."""

    def run_priced(run: Callable[[], Any]) -> list[PricedCall]:
        mode = PricingMode()
        with mode:
            run()
        return mode.calls

    return run_priced


@pytest.fixture(scope="session")
def flops_of(price: Price) -> Callable[[Callable[[], Any]], int]:
    """``flops_of(run)`` is the sum of model FLOPs of what ``run()`` dispatched."""
    return lambda run: sum(call.flops for call in price(run))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)

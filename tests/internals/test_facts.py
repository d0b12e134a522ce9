"""A private name that a torch has no more: it is named in one warning, and no count is called exact."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mfu_monitor as mm
from mfu_monitor.errors import UncountedWorkWarning
from mfu_monitor.internals import facts, stack
from mfu_monitor.internals.dispatcher import backend_key, is_composite, qualified_name
from mfu_monitor.internals.dynamo import indexing_by_tensors
from mfu_monitor.internals.tensors import is_fake, sequence_sizes, sparse_parts

ADD = torch.ops.aten.add.Tensor
ONES = torch.ones(2, 2)

MISSING: dict[str, Callable[[], Any] | None] = {
    "torch._C._current_graph_task_id": None,
    "torch._C._current_autograd_node": None,
    "torch._C._autograd._get_sequence_nr": None,
    "torch._ops.OpOverload": lambda: is_composite(ADD),
    "torch._C._dispatch_has_kernel_for_dispatch_key": lambda: is_composite(ADD),
    "torch._C._dispatch_keyset_full_after": lambda: backend_key([ONES]),
    "torch.utils._python_dispatch._disable_current_modes": None,
    "torch._subclasses.fake_tensor.is_fake": lambda: is_fake(ONES),
    "torch._ops.OpOverloadPacket": lambda: qualified_name(torch.ops.aten.mm),
    "torch._dynamo._trace_wrapped_higher_order_op": indexing_by_tensors,
}
"""What asks for it beside a plain training step, by fact."""

CODE: tuple[tuple[str, Any, str], ...] = (
    ("torch.nn.Module._call_impl", torch.nn.Module, "_call_impl"),
    ("torch.autograd.graph._engine_run_backward", torch.autograd.graph, "_engine_run_backward"),
    ("torch.optim.Optimizer.profile_hook_step", torch.optim.Optimizer, "profile_hook_step"),
)
"""Functions that torch itself calls: missing is tried by taking away their code."""

BY_ARGUMENT: dict[str, Callable[[], Any]] = {
    "torch.Tensor._nested_tensor_size": lambda: sequence_sizes(object()),
    "torch.Tensor._values": lambda: sparse_parts(object()),
}
"""Methods of C's own classes cannot be deleted: an object without them is asked."""


def records_and_warnings() -> tuple[list[mm.StepRecord], list[str]]:
    model = nn.Linear(5, 7)
    records = []
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        for _ in range(2):
            with mm.FlopCounter(model) as counter:
                model(torch.ones(3, 5)).sum().backward()
            records.append(counter.record)
    return records, [str(w.message) for w in given if issubclass(w.category, UncountedWorkWarning)]


def assert_named_and_not_exact(name: str) -> None:
    records, given = records_and_warnings()
    assert all(record.is_lower_bound for record in records)
    assert len(given) == 1
    assert f"{name} is missing, so that {facts.FACTS[name].lost}" in given[0]


@pytest.mark.parametrize("name", sorted(MISSING))
def test_a_missing_name_is_named_once_and_no_record_is_exact(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = MISSING[name]
    holder, _, attribute = name.rpartition(".")
    with monkeypatch.context() as patched:
        if attribute == "_trace_wrapped_higher_order_op":
            patched.setitem(sys.modules, name, None)
        else:
            patched.delattr(f"{holder}.{attribute}")
        if ask is not None:
            ask()
        assert_named_and_not_exact(name)


@pytest.mark.parametrize(("name", "holder", "attribute"), CODE)
def test_a_function_without_code_is_named_once(name: str, holder: Any, attribute: str, monkeypatch: Any) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(holder, attribute, object())
        stack.known_codes()
    assert_named_and_not_exact(name)


@pytest.mark.parametrize("name", sorted(BY_ARGUMENT))
def test_a_missing_method_is_named_once_and_no_record_is_exact(name: str) -> None:
    assert BY_ARGUMENT[name]() is None
    assert_named_and_not_exact(name)


def test_nothing_is_missing_on_this_torch() -> None:
    records, given = records_and_warnings()
    assert facts.missing_facts() == ()
    assert given == []
    assert not any(record.is_lower_bound for record in records)

"""Every registered formula against a call made by hand, with the arithmetic beside it: FLOPs and bytes."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import mfu_monitor.formulas  # noqa: F401  # registers every formula
from mfu_monitor.formulas.registry import bind_call, find_formula, registered_names
from mfu_monitor.formulas.traffic import bytes_accessed

from . import rows_attention, rows_convolution, rows_products, rows_recurrent
from .row import Row

with contextlib.suppress(ImportError):  # since torch 2.10; registers torch_attn::_varlen_attn
    import torch.nn.attention.varlen

ROWS = (*rows_products.ROWS, *rows_convolution.ROWS, *rows_recurrent.ROWS, *rows_attention.ROWS)


class StandIn:
    """An operator that this torch does not have, by its name and, where it is known, its schema."""

    tags: tuple[torch.Tag, ...] = ()

    def __init__(self, row: Row) -> None:
        self._name = row.name.removeprefix("higher_order::")
        self._schema = torch._C.parse_schema(f"{row.name}{row.schema}") if row.schema is not None else None

    def name(self) -> str:
        return self._name


def overloads_of(name: str) -> Any:
    namespace, _, bare = name.partition("::")
    return getattr(getattr(torch.ops, namespace), bare, None) if namespace != "higher_order" else None


def operator_of(row: Row) -> Any:
    packet = overloads_of(row.name)
    wanted = row.overload or "default"
    if packet is not None and wanted in packet.overloads():
        return getattr(packet, wanted)
    if row.overload is not None and packet is not None:
        pytest.skip(f"this torch's {row.name} has no overload {row.overload}")
    return StandIn(row)


def price(func: Any, row: Row, arguments: dict[str, Any], gives: Any) -> tuple[Any, ...]:
    found = find_formula(row.name)
    assert found is not None
    cost = found(bind_call(func, (), arguments, gives))
    moved = bytes_accessed(func, (), arguments, gives)
    return cost.flops, cost.palm_flops, cost.masked_flops, cost.kernel_recompute_flops, cost.precision, moved


def stated(row: Row) -> tuple[Any, ...]:
    return row.flops, row.palm, row.masked, row.redone, row.precision, row.moved


def test_every_registered_operator_has_a_row() -> None:
    ours = {name for name in registered_names() if not name.startswith("mfu_")}  # those that other tests register
    assert ours - {row.name for row in ROWS} == set()
    assert {row.name for row in ROWS} - ours == set()


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_call_costs_what_its_row_says(row: Row) -> None:
    assert price(operator_of(row), row, row.arguments, row.gives) == stated(row)


@pytest.mark.parametrize("row", [row for row in ROWS if overloads_of(row.name) is not None], ids=str)
def test_a_row_calls_its_operator_by_the_operator_s_own_arguments(row: Row) -> None:
    schema = operator_of(row)._schema
    if schema is None:
        pytest.skip("the default overload has no row")
    names = {argument.name for argument in schema.arguments}
    assert set(row.arguments) <= names
    operands = {a.name for a in schema.arguments if str(a.type) in ("Tensor", "List[Tensor]")}
    assert operands - set(row.arguments) == set(), "operands that the row leaves out"


def with_out(row: Row) -> tuple[Any, dict[str, Any]] | None:
    """The overload that writes into given tensors, if there is one, with the row's results given to it."""
    packet = overloads_of(row.name)
    if packet is None or row.overload is not None or "out" not in packet.overloads():
        return None
    func = packet.out
    names = [argument.name for argument in func._schema.arguments if argument.is_out]
    results = row.gives if isinstance(row.gives, tuple) else (row.gives,)
    known = {argument.name for argument in func._schema.arguments}
    if len(names) != len(results) or None in results or not set(row.arguments) <= known:
        return None
    return func, {**row.arguments, **dict(zip(names, results, strict=True))}


OUT_ROWS = [(row, found) for row in ROWS if (found := with_out(row)) is not None]


@pytest.mark.parametrize(("row", "found"), OUT_ROWS, ids=[str(row) for row, _ in OUT_ROWS])
def test_a_call_into_given_tensors_costs_the_same(row: Row, found: tuple[Any, dict[str, Any]]) -> None:
    func, arguments = found
    assert price(func, row, arguments, row.gives) == stated(row)


IN_PLACE_ROWS = [
    row
    for row in ROWS
    if row.overload is None
    and (packet := overloads_of(f"{row.name}_")) is not None
    and "default" in packet.overloads()
    and row.arguments["self"].shape == row.gives.shape
]


@pytest.mark.parametrize("row", IN_PLACE_ROWS, ids=str)
def test_a_call_in_place_costs_the_same(row: Row) -> None:
    func = overloads_of(f"{row.name}_").default
    assert find_formula(f"{row.name}_") is find_formula(row.name)
    assert price(func, row, row.arguments, row.arguments["self"]) == stated(row)


def test_out_and_in_place_forms_are_among_the_rows() -> None:
    assert len(OUT_ROWS) > 60
    assert {row.name.removeprefix("aten::") for row in IN_PLACE_ROWS} == {"addmm", "addmv", "addr", "addbmm", "baddbmm"}


def test_ranks_groups_and_uneven_parts_are_among_the_rows() -> None:
    ranks = {row.arguments["weight"].dim() - 2 for row in ROWS if row.name == "aten::convolution"}
    assert ranks == {1, 2, 3}
    assert {row.arguments["groups"] for row in ROWS if row.name == "aten::convolution"} == {1, 2}
    assert any("seqused_k" in row.arguments for row in ROWS)
    assert any("attention_chunk" in row.arguments for row in ROWS)

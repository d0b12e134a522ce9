"""Bytes of one call: each operand read once, each result written once; expected values are elements times width."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mfu_monitor.formulas.traffic import bytes_accessed, tensor_bytes, traffic_of
from mfu_monitor.internals.tensors import tensors_in

Price = Callable[[Callable[[], Any]], list[Any]]
FP32, BF16, INT64 = 4, 2, 8


def bytes_of(price: Price, run: Callable[[], Any], name: str) -> int:
    calls = [call for call in price(run) if call.name == name]
    assert calls, f"{name} did not run"
    return sum(int(call.bytes_accessed) for call in calls)  # some torch versions run detach twice


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


@pytest.mark.parametrize(
    ("name", "run", "expected"),
    [
        ("aten::add", lambda: zeros(6, 4) + zeros(6, 4), 3 * 24 * FP32),
        ("aten::mul", lambda: zeros(6, 4) * 2.0, 2 * 24 * FP32),
        ("aten::mm", lambda: zeros(3, 5) @ zeros(5, 7), (15 + 35 + 21) * FP32),
        (
            "aten::mm",
            lambda: torch.mm(zeros(3, 5), zeros(5, 7), out=zeros(3, 7)),
            (15 + 35 + 21) * FP32,  # the out argument is written, not read
        ),
        ("aten::addmm", lambda: torch.addmm(zeros(7), zeros(3, 5), zeros(5, 7)), (7 + 15 + 35 + 21) * FP32),
        ("aten::convolution", lambda: F.conv1d(zeros(1, 2, 8), zeros(3, 2, 3)), (16 + 18 + 18) * FP32),
        ("aten::gelu", lambda: F.gelu(zeros(8, dtype=torch.bfloat16)), 2 * 8 * BF16),
        ("aten::sum", lambda: zeros(6, 4).sum(), (24 + 1) * FP32),
        ("aten::cat", lambda: torch.cat([zeros(2, 3), zeros(4, 3)]), 2 * 18 * FP32),
        ("aten::_to_copy", lambda: zeros(8).to(torch.bfloat16), 8 * FP32 + 8 * BF16),
        ("aten::native_layer_norm", lambda: F.layer_norm(zeros(2, 8), (8,)), (16 + 16 + 2 + 2) * FP32),
        ("aten::clone", lambda: zeros(6).clone(), 2 * 6 * FP32),
    ],
)
def test_operands_are_read_once_and_results_written_once(
    name: str, run: Callable[[], Any], expected: int, price: Price
) -> None:
    assert bytes_of(price, run, name) == expected


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("aten::view", lambda: zeros(6, 4).view(24)),
        ("aten::t", lambda: zeros(6, 4).t()),
        ("aten::slice", lambda: zeros(6, 4)[1:3]),
        ("aten::expand", lambda: zeros(1, 4).expand(6, 4)),
        ("aten::split", lambda: zeros(6, 4).split(2)),
        ("aten::unbind", lambda: zeros(6, 4).unbind()),
        ("aten::detach", lambda: zeros(6).detach()),
        ("aten::_unsafe_view", lambda: torch.ops.aten._unsafe_view(zeros(6, 4), [24])),
        ("aten::empty_like", lambda: torch.empty_like(zeros(6))),
        ("aten::unsqueeze_", lambda: zeros(6).unsqueeze_(0)),
    ],
)
def test_views_and_metadata_move_nothing(name: str, run: Callable[[], Any], price: Price) -> None:
    assert bytes_of(price, run, name) == 0


@pytest.mark.parametrize(
    ("name", "run", "expected"),
    [
        ("aten::add_", lambda: zeros(6).add_(zeros(6)), 3 * 6 * FP32),  # read both, write one
        ("aten::relu_", lambda: zeros(6).relu_(), 2 * 6 * FP32),
        ("aten::copy_", lambda: zeros(6).copy_(zeros(6)), 2 * 6 * FP32),  # the target is not read
        ("aten::zero_", lambda: zeros(6).zero_(), 6 * FP32),
        ("aten::zeros_like", lambda: torch.zeros_like(zeros(6)), 6 * FP32),
        ("aten::_foreach_add_", lambda: torch._foreach_add_([zeros(6), zeros(3)], [zeros(6), zeros(3)]), 3 * 9 * FP32),
        ("aten::_foreach_mul", lambda: torch._foreach_mul([zeros(6), zeros(3)], 2.0), 2 * 9 * FP32),
    ],
)
def test_in_place_targets_are_read_and_written_unless_overwritten(
    name: str, run: Callable[[], Any], expected: int, price: Price
) -> None:
    assert bytes_of(price, run, name) == expected


def test_look_ups_move_the_rows_they_take(price: Price) -> None:
    table, index = zeros(1000, 8), torch.zeros(5, dtype=torch.int64)
    rows = 5 * 8 * FP32
    for name, run in (
        ("aten::embedding", lambda: F.embedding(index, table)),
        ("aten::index_select", lambda: table.index_select(0, index)),
        ("aten::index", lambda: table[index]),
    ):
        assert bytes_of(price, run, name) == 5 * INT64 + 2 * rows, name
    columns = torch.zeros(1000, 1, dtype=torch.int64)
    assert bytes_of(price, lambda: table.gather(1, columns), "aten::gather") == 1000 * INT64 + 2 * 1000 * FP32


def test_a_table_smaller_than_what_is_taken_is_read_once(price: Price) -> None:
    table, index = zeros(2, 8), torch.zeros(50, dtype=torch.int64)
    assert bytes_of(price, lambda: table[index], "aten::index") == 50 * INT64 + 2 * 8 * FP32 + 50 * 8 * FP32


def test_scattering_touches_the_rows_it_writes(price: Price) -> None:
    table, index, rows = zeros(1000, 8), torch.zeros(5, dtype=torch.int64), zeros(5, 8)
    moved = 5 * 8 * FP32
    assert bytes_of(price, lambda: table.index_copy_(0, index, rows), "aten::index_copy_") == 5 * INT64 + 2 * moved
    assert bytes_of(price, lambda: table.index_add_(0, index, rows), "aten::index_add_") == 5 * INT64 + 3 * moved


def test_a_loss_reads_one_probability_for_each_target(price: Price) -> None:
    scores, target = zeros(6, 1000), torch.zeros(6, dtype=torch.int64)
    results = 2 * FP32  # the loss and the total weight
    assert bytes_of(price, lambda: F.nll_loss(scores, target), "aten::nll_loss_forward") == (
        6 * FP32 + 6 * INT64 + results
    )


def test_expanded_dimensions_are_stored_once() -> None:
    assert tensor_bytes(zeros(1, 4).expand(100, 4)) == 4 * FP32
    assert tensor_bytes(torch.zeros(()).expand(10, 10)) == FP32
    assert tensor_bytes(zeros(10).unfold(0, 4, 1)) == 10 * FP32  # overlapping windows
    assert tensor_bytes(zeros(6, 4).t()) == 24 * FP32
    assert tensor_bytes(zeros(0, 4)) == 0


def test_the_same_tensor_twice_is_read_once(price: Price) -> None:
    x = zeros(6)
    assert bytes_of(price, lambda: x * x, "aten::mul") == 2 * 6 * FP32


def test_sparse_tensors_count_what_they_store() -> None:
    eye = torch.eye(6)
    assert tensor_bytes(eye.to_sparse()) == 6 * FP32 + 2 * 6 * INT64
    assert tensor_bytes(eye.to_sparse_csr()) == 6 * FP32 + 7 * INT64 + 6 * INT64


def test_jagged_tensors_count_their_values() -> None:
    nested = torch.nested.nested_tensor([zeros(3, 4), zeros(5, 4)], layout=torch.jagged)
    assert tensor_bytes(nested) == 8 * 4 * FP32


def test_meta_tensors_move_what_real_ones_would() -> None:
    x = torch.empty(1024, 1024, device="meta")
    assert bytes_accessed(torch.ops.aten.add.Tensor, (x, x.clone()), {}, x + x) == 3 * 1024 * 1024 * FP32


def test_operators_without_schema_count_operands_and_results() -> None:
    x = zeros(6)
    func = torch.ops.higher_order.flex_attention
    assert bytes_accessed(func, (x, (zeros(3), None)), {"scale": 1.0}, (zeros(2),)) == (6 + 3 + 2) * FP32


def test_optional_results_may_be_missing() -> None:
    x, w = zeros(1, 2, 8), zeros(3, 2, 3)
    grad = zeros(1, 3, 6)
    func = torch.ops.aten.convolution_backward.default
    args = (grad, x, w, [3], [1], [0], [1], False, [0], 1, [False, True, False])
    assert bytes_accessed(func, args, {}, (None, zeros(3, 2, 3), None)) == (18 + 16 + 18 + 18) * FP32


def test_pricing_a_call_takes_microseconds() -> None:
    x = zeros(6, 4)
    out = x + x
    start = time.perf_counter()
    for _ in range(1000):
        bytes_accessed(torch.ops.aten.add.Tensor, (x, x), {}, out)
    assert (time.perf_counter() - start) / 1000 < 200e-6  # it runs on every operator of a counted step


ADD, ADD_, COPY_, MM_OUT = (
    torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor, torch.ops.aten.copy_.default, torch.ops.aten.mm.out,
)  # fmt: skip
SQUARE = zeros(6, 6)


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "expected"),
    [
        (ADD, (zeros(6, 4), zeros(6, 4)), {}, 3 * 24 * FP32),
        (ADD, (SQUARE, SQUARE), {}, 2 * 36 * FP32),
        (ADD_, (zeros(6, 4), zeros(4)), {}, (24 + 4 + 24) * FP32),
        (ADD_, (), {"self": zeros(6, 4), "other": zeros(4)}, (24 + 4 + 24) * FP32),
        (COPY_, (zeros(6, 4), zeros(4)), {}, (4 + 24) * FP32),
        (MM_OUT, (zeros(3, 5), zeros(5, 7)), {"out": zeros(3, 7)}, (15 + 35 + 21) * FP32),
        (lambda query, *rest: query + 1, (zeros(6, 4), None, (zeros(4),)), {}, (24 + 4 + 24) * FP32),  # has no schema
        (ADD, (zeros(6, 4).t(), zeros(4, 1).expand(4, 6)), {}, (24 + 4 + 24) * FP32),
    ],
)
def test_bytes_are_the_same_where_the_tensors_are_known_already(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], expected: int
) -> None:
    output = func(*args, **kwargs)
    operands, outputs = tensors_in(args, kwargs), tensors_in(output)
    assert bytes_accessed(func, args, kwargs, output) == expected
    assert traffic_of(func).moved(args, kwargs, output, operands, outputs) == expected

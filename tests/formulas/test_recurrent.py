"""Recurrent layers: every matrix meets every row once, forward; backward by what needs a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mfu_monitor.formulas.cost import OpCost
from mfu_monitor.formulas.recurrent import RecurrentLayer, recurrent_backward_flops, recurrent_forward_flops
from mfu_monitor.formulas.registry import bind_call, find_formula

FlopsOf = Callable[[Callable[[], Any]], int]
I, H, T, B = 64, 128, 4, 10  # noqa: E741
ROWS = T * B
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def layer_forward(gates: int, inputs: int, rows: int = ROWS) -> int:
    return 2 * rows * (gates * H * inputs + gates * H * H)


@pytest.mark.parametrize("kind", GATES)
def test_forward_of_every_cell_on_the_cpu(kind: str, flops_of: FlopsOf) -> None:
    module = getattr(nn, kind)(I, H)
    expected = layer_forward(GATES[kind], I)
    assert flops_of(lambda: module(torch.zeros(T, B, I))) == expected
    if kind == "LSTM":
        assert expected == 7_864_320
    with torch.inference_mode():
        assert flops_of(lambda: module(torch.zeros(T, B, I))) == expected


@pytest.mark.parametrize("kind", GATES)
def test_two_bidirectional_layers(kind: str, flops_of: FlopsOf) -> None:
    module, gates = getattr(nn, kind)(I, H, num_layers=2, bidirectional=True), GATES[kind]
    expected = 2 * layer_forward(gates, I) + 2 * layer_forward(gates, 2 * H)
    assert flops_of(lambda: module(torch.zeros(T, B, I))) == expected


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("input_grad", [False, True])
def test_backward_leaves_out_what_needs_no_gradient_on_every_path(
    kind: str, input_grad: bool, flops_of: FlopsOf
) -> None:
    # LSTM runs as one oneDNN operator, GRU and RNN as single products: the same rule gives both.
    gates, module = GATES[kind], getattr(nn, kind)(I, H)
    x = torch.zeros(T, B, I, requires_grad=input_grad)
    forward = layer_forward(gates, I)
    weights = forward
    recurrence = 2 * (ROWS - B) * gates * H * H  # the initial state needs no gradient
    inputs = 2 * ROWS * gates * H * I if input_grad else 0
    assert flops_of(lambda: module(x)[0].sum().backward()) == forward + weights + recurrence + inputs


def test_what_the_kernel_computes_beyond_that_is_hardware_work(price: Callable[..., Any]) -> None:
    module = nn.LSTM(I, H)
    calls = price(lambda: module(torch.zeros(T, B, I))[0].sum().backward())
    (backward,) = [call.cost for call in calls if call.name == "aten::mkldnn_rnn_layer_backward"]
    assert backward.flops + backward.masked_flops == 2 * layer_forward(4, I)
    assert backward.masked_flops == 2 * ROWS * 4 * H * I + 2 * B * 4 * H * H


def test_a_frozen_recurrent_weight_saves_its_gradient(flops_of: FlopsOf) -> None:
    module = nn.LSTM(I, H)
    full = flops_of(lambda: module(torch.zeros(T, B, I))[0].sum().backward())
    module.weight_hh_l0.requires_grad_(False)
    frozen = flops_of(lambda: module(torch.zeros(T, B, I))[0].sum().backward())
    assert full - frozen == 2 * ROWS * 4 * H * H


def test_packed_sequences_count_their_own_lengths(flops_of: FlopsOf) -> None:
    module = nn.LSTM(I, H)
    packed = nn.utils.rnn.pack_sequence([torch.zeros(5, I), torch.zeros(3, I), torch.zeros(1, I)])
    assert flops_of(lambda: module(packed)) == layer_forward(4, I, rows=5 + 3 + 1)


def test_cells_are_counted_by_their_products(flops_of: FlopsOf) -> None:
    cell = nn.LSTMCell(I, H)
    assert flops_of(lambda: cell(torch.zeros(B, I))) == layer_forward(4, I, rows=B)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_projection_shrinks_the_state_and_adds_its_own_product(flops_of: FlopsOf) -> None:
    P = 32
    module = nn.LSTM(I, H, proj_size=P)
    expected = 2 * ROWS * (4 * H * I + 4 * H * P + P * H)
    assert flops_of(lambda: module(torch.zeros(T, B, I))) == expected


# --- cuDNN: priced from its arguments, as no such kernel runs here ----------------------------------------------------


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta")


def lstm_weights(inputs: int, *, projection: int = 0) -> list[torch.Tensor]:
    state = projection or H
    weights = [meta(4 * H, inputs), meta(4 * H, state), meta(4 * H), meta(4 * H)]
    return [*weights, meta(projection, H)] if projection else weights


def cudnn_forward(x: torch.Tensor, weights: list[torch.Tensor], batch_sizes: list[int]) -> OpCost:
    func = torch.ops.aten._cudnn_rnn.default
    args = (x, weights, 4, None, meta(1, B, H), meta(1, B, H), 2, H, 0, 1, False, 0.0, True, False, batch_sizes, None)
    found = find_formula("aten::_cudnn_rnn")
    assert found is not None
    return found(bind_call(func, args, {}, None))


def cudnn_backward(weights: list[torch.Tensor], *, mask: list[bool], bidirectional: bool = False) -> OpCost:
    func, x, y = torch.ops.aten._cudnn_rnn_backward.default, meta(T, B, I), meta(T, B, H)
    args = (x, weights, 4, meta(1), meta(1, B, H), meta(1, B, H), y, y, None, None, 2, H, 0, 1, False, 0.0, True)
    rest: tuple[Any, ...] = (bidirectional, [], None, meta(1), mask)
    found = find_formula("aten::_cudnn_rnn_backward")
    assert found is not None
    return found(bind_call(func, (*args, *rest), {}, None))


def test_cudnn_forward_equals_the_cpu_one() -> None:
    assert cudnn_forward(meta(T, B, I), lstm_weights(I), []).flops == 7_864_320
    assert cudnn_forward(meta(9, I), lstm_weights(I), [3, 2, 2, 1, 1]).flops == layer_forward(4, I, rows=9)


def test_cudnn_projected_layers_keep_their_matrices_apart() -> None:
    weights = [*lstm_weights(I, projection=32), *lstm_weights(32, projection=32)]
    first, second = 4 * H * I + 4 * H * 32 + 32 * H, 4 * H * 32 + 4 * H * 32 + 32 * H
    assert cudnn_forward(meta(T, B, I), weights, []).flops == 2 * ROWS * (first + second)


@pytest.mark.parametrize("state_grad", [False, True])
@pytest.mark.parametrize("weight_grad", [False, True])
@pytest.mark.parametrize("input_grad", [False, True])
def test_cudnn_backward_follows_its_output_mask(input_grad: bool, weight_grad: bool, state_grad: bool) -> None:
    cost = cudnn_backward(lstm_weights(I), mask=[input_grad, state_grad, False, weight_grad])
    inputs, hidden = 4 * H * I, 4 * H * H
    model = 2 * ROWS * inputs * input_grad + 2 * (ROWS - B * (not state_grad)) * hidden
    model += 2 * ROWS * (inputs + hidden) * weight_grad
    assert cost.flops == model
    assert cost.flops + cost.masked_flops == (1 + weight_grad) * 7_864_320


def test_both_directions_of_the_first_layer_see_the_input() -> None:
    both = [RecurrentLayer(4 * H * I, 4 * H * H)] * 2
    model = recurrent_backward_flops(
        both, rows=ROWS, sequences=B, first_layer_directions=2, input_needs_gradient=False, weights_need_gradient=False
    )
    assert model == 2 * ROWS * 2 * (4 * H * H)
    assert recurrent_forward_flops(both, rows=ROWS) == 2 * 7_864_320

"""Recurrent layers (RNN, LSTM, GRU; stacked, bidirectional, projected, packed) on every backend that runs them whole.

A row is one time step of one sequence. Every weight matrix of a layer and direction meets every row once, so the
forward costs ``2 * rows * (elements of all matrices)``; the gates' arithmetic is elementwise and counts 0. Cells that
torch decomposes (GRU and RNN on a CPU) are counted by the products they become.

Backward runs the same products twice, once for the data and once for the weights, except that the first layer's input
may need no gradient, and neither may the initial state, whose product belongs to each sequence's first row. The kernels
compute those all the same: that is hardware work, not model work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mfu_monitor.formulas.cost import OpCost, OperatorCall
from mfu_monitor.formulas.registry import formula
from mfu_monitor.internals.autograd_state import running_node

__all__ = ["RecurrentLayer", "recurrent_backward_flops", "recurrent_forward_flops"]


@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    """Matrix sizes of one layer in one direction."""

    input_elements: int
    """gates * hidden * input: the matrix that meets the layer's input."""
    hidden_elements: int
    """gates * hidden * state: the matrix that meets the previous state."""
    projection_elements: int = 0
    """projection * hidden for an LSTM with ``proj_size``."""

    @property
    def elements(self) -> int:
        """Of all matrices: multiply-adds of one row."""
        return self.input_elements + self.hidden_elements + self.projection_elements


def recurrent_forward_flops(layers: Sequence[RecurrentLayer], *, rows: int) -> int:
    """FLOPs of a forward over ``rows`` = time steps x sequences (the sum of the lengths if packed).

    Example:
        LSTM(64, 128) on 4 steps of 10 sequences: 2 * 40 * (4*128*64 + 4*128*128) = 7,864,320.
    """
    return 2 * rows * sum(layer.elements for layer in layers)


def recurrent_backward_flops(
    layers: Sequence[RecurrentLayer],
    *,
    rows: int,
    sequences: int,
    first_layer_directions: int = 1,
    input_needs_gradient: bool = True,
    state_needs_gradient: bool = True,
    weights_need_gradient: bool = True,
) -> int:
    """FLOPs that the gradients need.

    Args:
        layers: the first ``first_layer_directions`` of them see the input itself, the others a layer's output.
        rows: time steps x sequences.
        sequences: how many there are: each has one first row, whose state is the initial one.
        first_layer_directions: 2 if bidirectional.
        input_needs_gradient: False leaves out the product of the first layer's input matrix.
        state_needs_gradient: False leaves out the product of the hidden matrices for each sequence's first row.
        weights_need_gradient: False leaves out the weights' half.
    """
    forward = recurrent_forward_flops(layers, rows=rows)
    data = forward
    if not input_needs_gradient:
        data -= 2 * rows * sum(layer.input_elements for layer in layers[:first_layer_directions])
    if not state_needs_gradient:
        data -= 2 * sequences * sum(layer.hidden_elements for layer in layers)
    return data + (forward if weights_need_gradient else 0)


# --- oneDNN: one operator a layer and direction -----------------------------------------------------------------------


@formula("aten::mkldnn_rnn_layer")
def _onednn_layer(call: OperatorCall) -> OpCost:
    layer = RecurrentLayer(call["weight0"].numel(), call["weight1"].numel())
    return OpCost(recurrent_forward_flops([layer], rows=_rows(call["input"])))


@formula("aten::mkldnn_rnn_layer_backward")
def _onednn_layer_backward(call: OperatorCall) -> OpCost:
    # (input, weight_ih, weight_hh, bias, bias, hx, cx); the operator has no output mask, its autograd node knows.
    needed = _gradients_needed("MkldnnRnnLayerBackward0", 7)
    layer = RecurrentLayer(call["weight1"].numel(), call["weight2"].numel())
    rows, sequences = _rows(call["input"]), call["input"].shape[1]
    data = recurrent_backward_flops(
        [layer],
        rows=rows,
        sequences=sequences,
        input_needs_gradient=needed[0],
        state_needs_gradient=needed[5],
        weights_need_gradient=False,
    )
    weights = 2 * rows * (layer.input_elements * needed[1] + layer.hidden_elements * needed[2])
    executed = 2 * recurrent_forward_flops([layer], rows=rows)
    return OpCost(data + weights, masked_flops=executed - data - weights)


def _gradients_needed(node_name: str, inputs: int) -> Sequence[bool]:
    """Which inputs of the running backward node need a gradient; all of them where no such node runs."""
    node: Any = running_node()
    if node is None or node.name() != node_name or len(node.next_functions) != inputs:
        return [True] * inputs
    return [function is not None for function, _ in node.next_functions]


# --- cuDNN and MIOpen: one operator for all layers --------------------------------------------------------------------


@formula("aten::_cudnn_rnn", "aten::miopen_rnn")
def _fused_rnn(call: OperatorCall) -> OpCost:
    return OpCost(recurrent_forward_flops(_layers(call["weight"]), rows=_rows(call["input"])))


@formula("aten::_cudnn_rnn_backward", "aten::miopen_rnn_backward")
def _fused_rnn_backward(call: OperatorCall) -> OpCost:
    wants_input, wants_state, _, wants_weights = call["output_mask"]
    layers, rows = _layers(call["weight"]), _rows(call["input"])
    model = recurrent_backward_flops(
        layers,
        rows=rows,
        sequences=call["hx"].shape[1],
        first_layer_directions=2 if call["bidirectional"] else 1,
        input_needs_gradient=wants_input,
        state_needs_gradient=wants_state,
        weights_need_gradient=wants_weights,
    )
    executed = recurrent_forward_flops(layers, rows=rows) * (2 if wants_weights else 1)
    return OpCost(model, masked_flops=executed - model)


# --- the composite operators, seen whole in inference mode ------------------------------------------------------------


@formula("aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu")
def _composite_rnn(call: OperatorCall) -> OpCost:
    sequence = call["input"] if "input" in call.arguments else call["data"]
    return OpCost(recurrent_forward_flops(_layers(call["params"]), rows=_rows(sequence)))


@formula("aten::_lstm_mps")
def _mps_lstm(call: OperatorCall) -> OpCost:
    return OpCost(recurrent_forward_flops(_layers(call["params"]), rows=_rows(call["input"])))


@formula("aten::lstm_mps_backward")
def _mps_lstm_backward(call: OperatorCall) -> OpCost:
    return OpCost(2 * recurrent_forward_flops(_layers(call["params"]), rows=_rows(call["input"])))


def _rows(sequence: torch.Tensor) -> int:
    """Time steps x sequences of (T, B, I) or (B, T, I); packed sequences come as (rows, I)."""
    return sequence.numel() // sequence.shape[-1]


def _layers(weights: Sequence[torch.Tensor]) -> list[RecurrentLayer]:
    """Layers and directions of a flat list w_ih, w_hh, [b_ih, b_hh], [w_hr], ...

    A projection ends its layer; it differs from the next input matrix by its rows, fewer than the gates' ones.
    """
    matrices = [weight for weight in weights if weight.dim() == 2]
    gate_rows = matrices[0].shape[0]
    layers: list[list[int]] = []
    for matrix in matrices:
        is_projection = matrix.shape[0] != gate_rows
        if not layers or (not is_projection and len(layers[-1]) >= 2):
            layers.append([])
        layers[-1].append(matrix.numel())
    return [RecurrentLayer(*elements) for elements in layers]

"""Rows of recurrent layers: 5 time steps of 3 sequences, 7 wide, hidden width 11."""

from __future__ import annotations

from typing import Any

import torch

from .row import Row, T, row

STEPS, SEQUENCES, WIDTH, HIDDEN = 5, 3, 7, 11
CELLS = STEPS * SEQUENCES


def weights(gates: int, inputs: int, hidden: int = HIDDEN) -> list[torch.Tensor]:
    """Of one layer and direction, with its two biases."""
    return [T(gates * hidden, inputs), T(gates * hidden, hidden), T(gates * hidden), T(gates * hidden)]


def matrices(gates: int, inputs: int, hidden: int = HIDDEN) -> int:
    return gates * hidden * inputs + gates * hidden * hidden


def elements(tensors: Any) -> int:
    return sum(tensor.numel() for tensor in tensors)


# --- oneDNN: one layer, one direction ---------------------------------------------------------------------------------

LSTM = matrices(4, WIDTH)  # 4 * 11 * 7 + 4 * 11 * 11
STATE = SEQUENCES * HIDDEN
OUTPUT = CELLS * HIDDEN
LAYER = 4 * HIDDEN * (WIDTH + HIDDEN + 1 + 1)

ONEDNN = (
    row("aten::mkldnn_rnn_layer", input=T(5, 3, 7), weight0=T(44, 7), weight1=T(44, 11), weight2=T(44),
        weight3=T(44), hx_=T(3, 11), cx_=T(3, 11), gives=(T(5, 3, 11), T(3, 11), T(3, 11), T(100)),
        flops=2 * CELLS * LSTM, moved=4 * (5 * 3 * 7 + LAYER + 2 * STATE + OUTPUT + 2 * STATE + 100)),
    # without a node that says otherwise, every gradient is needed
    row("aten::mkldnn_rnn_layer_backward", input=T(5, 3, 7), weight1=T(44, 7), weight2=T(44, 11), weight3=T(44),
        weight4=T(44), hx_=T(3, 11), cx_tmp=T(3, 11), output=T(5, 3, 11), hy_=T(3, 11), cy_=T(3, 11),
        grad_output=T(5, 3, 11), workspace=T(100),
        gives=(T(5, 3, 7), T(44, 7), T(44, 11), T(44), T(44), T(3, 11), T(3, 11)), flops=2 * 2 * CELLS * LSTM,
        moved=4 * ((105 + LAYER + 4 * STATE + 2 * OUTPUT + 100) + (105 + LAYER + 2 * STATE))),
)  # fmt: skip

# --- cuDNN and MIOpen: all layers and directions ----------------------------------------------------------------------

# Two layers in both directions: the second sees 2 * 11.
FIRST, SECOND = matrices(4, WIDTH), matrices(4, 2 * HIDDEN)
DEEP = 2 * FIRST + 2 * SECOND
BIASES = 4 * 2 * 4 * HIDDEN


def deep_weights() -> list[torch.Tensor]:
    return [*weights(4, 7), *weights(4, 7), *weights(4, 22), *weights(4, 22)]


def deep_backward(name: str, wants_input: bool, wants_state: bool, wants_weights: bool) -> Row:
    model = 2 * CELLS * DEEP * (1 + wants_weights)
    model -= 0 if wants_input else 2 * CELLS * 2 * (4 * HIDDEN * WIDTH)  # both directions of the first layer
    model -= 0 if wants_state else 2 * SEQUENCES * 4 * (4 * HIDDEN * HIDDEN)  # the first row of 2 layers x 2 directions
    state, out = 4 * STATE, CELLS * 2 * HIDDEN
    gives = (
        T(5, 3, 7) if wants_input else None,
        T(4, 3, 11) if wants_state else None,
        T(4, 3, 11) if wants_state else None,
        deep_weights() if wants_weights else [],
    )
    read = 105 + DEEP + BIASES + (DEEP + BIASES) + 2 * state + 2 * out + 50
    asked = 105 * wants_input + 2 * state * wants_state + (DEEP + BIASES) * wants_weights
    return row(name, label=f"input {wants_input}, state {wants_state}, weights {wants_weights}", input=T(5, 3, 7),
               weight=deep_weights(), weight_buf=T(DEEP + BIASES), hx=T(4, 3, 11), cx=T(4, 3, 11), output=T(5, 3, 22),
               grad_output=T(5, 3, 22), bidirectional=True, reserve=T(50),
               output_mask=[wants_input, wants_state, wants_state, wants_weights], gives=gives, flops=model,
               masked=2 * CELLS * DEEP * (1 + wants_weights) - model, moved=4 * (read + asked))  # fmt: skip


def fused(name: str, *, gates: int, mode: int, packed: bool = False) -> Row:
    """Packed: 9 steps of 3 sequences of unequal lengths."""
    cells = 9 if packed else CELLS
    rows_given = (9,) if packed else (STEPS, SEQUENCES)
    one = matrices(gates, WIDTH)
    return row(name, label=f"{gates} gates, packed {packed}", input=T(*rows_given, WIDTH), weight=weights(gates, WIDTH),
               weight_stride0=4, hx=T(1, 3, 11), mode=mode, bidirectional=False,
               gives=(T(*rows_given, HIDDEN), T(1, 3, 11), T(0), T(0), T(20)), flops=2 * cells * one,
               moved=4 * (cells * 7 + one + 2 * gates * HIDDEN + STATE + cells * HIDDEN + STATE + 20))  # fmt: skip


FUSED = (
    *(
        row(name, label="2 layers, both directions", input=T(5, 3, 7), weight=deep_weights(), hx=T(4, 3, 11),
            cx=T(4, 3, 11), bidirectional=True, gives=(T(5, 3, 22), T(4, 3, 11), T(4, 3, 11), T(0), T(0)),
            flops=2 * CELLS * DEEP, moved=4 * (105 + DEEP + BIASES + 8 * STATE + CELLS * 22 + 8 * STATE))
        for name in ("aten::_cudnn_rnn", "aten::miopen_rnn")
    ),
    *(
        deep_backward(name, wants_input, wants_state, wants_weights)
        for name in ("aten::_cudnn_rnn_backward", "aten::miopen_rnn_backward")
        for wants_input in (True, False)
        for wants_state in (True, False)
        for wants_weights in (True, False)
    ),
    fused("aten::_cudnn_rnn", gates=3, mode=3),
    fused("aten::_cudnn_rnn", gates=1, mode=0),
    fused("aten::_cudnn_rnn", gates=4, mode=2, packed=True),
    fused("aten::miopen_rnn", gates=3, mode=3),
)  # fmt: skip

# --- whole operators --------------------------------------------------------------------------------------------------


def whole(name: str, gates: int, *, packed: bool) -> Row:
    one, cells = matrices(gates, WIDTH), 9 if packed else CELLS
    shape = (9,) if packed else (STEPS, SEQUENCES)
    states = 2 if name == "aten::lstm" else 1
    hx: Any = [T(1, 3, 11), T(1, 3, 11)] if states == 2 else T(1, 3, 11)
    given = {"data": T(*shape, 7), "batch_sizes": T(5, dtype=torch.int64)} if packed else {"input": T(*shape, 7)}
    read = cells * 7 + states * STATE + one + 2 * gates * HIDDEN
    return row(name, overload="data" if packed else "input", **given, hx=hx, params=weights(gates, WIDTH),
               gives=(T(*shape, 11), *(T(1, 3, 11) for _ in range(states))), flops=2 * cells * one,
               moved=4 * (read + cells * HIDDEN + states * STATE) + (5 * 8 if packed else 0))  # fmt: skip


MPS_READ = 105 + 2 * STATE + LAYER
WHOLE = (
    *(
        whole(f"aten::{name}", gates, packed=packed)
        for name, gates in (("lstm", 4), ("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1))
        for packed in (False, True)
    ),
    row("aten::_lstm_mps", input=T(5, 3, 7), hx=[T(1, 3, 11), T(1, 3, 11)], params=weights(4, 7),
        gives=(T(5, 3, 11), T(1, 3, 11), T(1, 3, 11), T(30), T(30), T(30)), flops=2 * CELLS * LSTM,
        moved=4 * (MPS_READ + OUTPUT + 2 * STATE + 90)),
    row("aten::lstm_mps_backward", grad_y=T(5, 3, 11), z_state=T(30), cell_state_fwd=T(30), input=T(5, 3, 7),
        layersOutputs=T(30), hx=[T(1, 3, 11), T(1, 3, 11)], params=weights(4, 7),
        gives=(T(5, 3, 7), weights(4, 7), [T(1, 3, 11), T(1, 3, 11)]), flops=2 * 2 * CELLS * LSTM,
        moved=4 * (OUTPUT + 90 + 2 * MPS_READ)),
)  # fmt: skip

ROWS = (*ONEDNN, *FUSED, *WHOLE)

"""Rows of recurrent layers and cells.

A row is one time step of one sequence; it meets every matrix of a layer and direction once, and gates are elementwise.
Training costs three times that, less the gradient of the input where none is wanted, and less the gradient of the
initial state: the state's matrices meet each sequence's first row without it. oneDNN's kernel runs those all the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from .case import Case, Workload


def recurrent(make: Callable[[], nn.Module], *shape: int, requires_grad: bool = True) -> Workload:
    """A recurrent layer on zeros (T, B, I), or (B, I) for a cell."""
    return make(), (torch.zeros(shape, requires_grad=requires_grad),)


class Packed(nn.Module):
    """A layer whose output is packed; gives its data."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, batch: PackedSequence) -> torch.Tensor:
        data: torch.Tensor = self.layer(batch)[0].data
        return data


def packed(make: Callable[[], nn.Module], *lengths: int, width: int) -> Workload:
    """A layer on packed sequences of the given lengths."""
    return Packed(make()), (pack_sequence([torch.zeros(length, width) for length in lengths]),)


CASES: tuple[Case, ...] = (
    Case(
        id="lstm-inference",
        description="LSTM(64, 128) on (4,10,64): four gates on input and state",
        build=lambda: recurrent(lambda: nn.LSTM(64, 128), 4, 10, 64),
        phase="inference",
        model_flops="2 * 4*10 * 4*128*(64 + 128)",
        covers=("C11",),
    ),
    Case(
        id="lstm",
        description="in training, inside a network",
        build=lambda: recurrent(lambda: nn.LSTM(64, 128), 4, 10, 64),
        phase="training",
        forward_flops="2 * 4*10 * 4*128*(64 + 128)",
        model_flops="3 * (2 * 4*10 * 4*128*(64 + 128)) - 2 * 10 * 4*128*128",
        hardware_flops="3 * (2 * 4*10 * 4*128*(64 + 128))",
        covers=("C11",),
    ),
    Case(
        id="lstm-on-data",
        description="data needs no gradient",
        build=lambda: recurrent(lambda: nn.LSTM(64, 128), 4, 10, 64, requires_grad=False),
        phase="training",
        forward_flops="2 * 4*10 * 4*128*(64 + 128)",
        model_flops="3 * (2 * 4*10 * 4*128*(64 + 128)) - 2 * 4*10 * 4*128*64 - 2 * 10 * 4*128*128",
        hardware_flops="3 * (2 * 4*10 * 4*128*(64 + 128))",
        covers=("C11",),
    ),
    Case(
        id="lstm-bidirectional",
        description="both directions",
        build=lambda: recurrent(lambda: nn.LSTM(8, 16, bidirectional=True), 5, 2, 8),
        phase="training",
        forward_flops="2 * (2 * 5*2 * 4*16*(8 + 16))",
        model_flops="2 * (3 * (2 * 5*2 * 4*16*(8 + 16)) - 2 * 2 * 4*16*16)",
        hardware_flops="2 * (3 * (2 * 5*2 * 4*16*(8 + 16)))",
    ),
    Case(
        id="lstm-two-layers",
        description="the second layer's input is the first one's state",
        build=lambda: recurrent(lambda: nn.LSTM(8, 16, num_layers=2), 5, 2, 8),
        phase="training",
        forward_flops="2 * 5*2 * 4*16*(8 + 16) + 2 * 5*2 * 4*16*(16 + 16)",
        model_flops="3 * (2 * 5*2 * 4*16*(8 + 16) + 2 * 5*2 * 4*16*(16 + 16)) - 2 * (2 * 2 * 4*16*16)",
        hardware_flops="3 * (2 * 5*2 * 4*16*(8 + 16) + 2 * 5*2 * 4*16*(16 + 16))",
    ),
    Case(
        id="lstm-projected",
        description="proj_size=4: a state of 4, and a projection (4,16); decomposed, so only what is wanted runs",
        build=lambda: recurrent(lambda: nn.LSTM(8, 16, proj_size=4), 5, 2, 8),
        phase="training",
        forward_flops="2 * 5*2 * (4*16*(8 + 4) + 4*16)",
        model_flops="3 * (2 * 5*2 * (4*16*(8 + 4) + 4*16)) - 2 * 2 * 4*16*4",
    ),
    Case(
        id="lstm-packed",
        description="lengths 5 and 3, packed: 8 rows, 2 sequences; data without gradient",
        build=lambda: packed(lambda: nn.LSTM(8, 16), 5, 3, width=8),
        phase="training",
        forward_flops="2 * (5 + 3) * 4*16*(8 + 16)",
        model_flops="3 * (2 * (5 + 3) * 4*16*(8 + 16)) - 2 * (5 + 3) * 4*16*8 - 2 * 2 * 4*16*16",
    ),
    Case(
        id="gru",
        description="GRU(8, 16) on (5,2,8): three gates",
        build=lambda: recurrent(lambda: nn.GRU(8, 16), 5, 2, 8),
        phase="training",
        forward_flops="2 * 5*2 * 3*16*(8 + 16)",
        model_flops="3 * (2 * 5*2 * 3*16*(8 + 16)) - 2 * 2 * 3*16*16",
    ),
    Case(
        id="gru-batch-first",
        description="the same with batch_first and without a bias",
        build=lambda: recurrent(lambda: nn.GRU(8, 16, batch_first=True, bias=False), 2, 5, 8),
        phase="training",
        forward_flops="2 * 5*2 * 3*16*(8 + 16)",
        model_flops="3 * (2 * 5*2 * 3*16*(8 + 16)) - 2 * 2 * 3*16*16",
    ),
    Case(
        id="gru-two-layers-bidirectional",
        description="the second layer sees both directions of the first: 32 wide",
        build=lambda: recurrent(lambda: nn.GRU(8, 16, num_layers=2, bidirectional=True), 5, 2, 8),
        phase="training",
        forward_flops="2 * (2 * 5*2 * 3*16*(8 + 16) + 2 * 5*2 * 3*16*(32 + 16))",
        model_flops="3 * 2 * (2 * 5*2 * 3*16*(8 + 16) + 2 * 5*2 * 3*16*(32 + 16)) - 4 * (2 * 2 * 3*16*16)",
    ),
    Case(
        id="gru-packed",
        description="lengths 5 and 3, packed, in inference",
        build=lambda: packed(lambda: nn.GRU(8, 16), 5, 3, width=8),
        phase="inference",
        model_flops="2 * (5 + 3) * 3*16*(8 + 16)",
    ),
    Case(
        id="rnn",
        description="RNN(8, 16): one matrix on the input, one on the state",
        build=lambda: recurrent(lambda: nn.RNN(8, 16), 5, 2, 8),
        phase="training",
        forward_flops="2 * 5*2 * 16*(8 + 16)",
        model_flops="3 * (2 * 5*2 * 16*(8 + 16)) - 2 * 2 * 16*16",
    ),
    Case(
        id="lstm-cell",
        description="LSTMCell(8, 16) on (2,8): the initial state needs no gradient",
        build=lambda: recurrent(lambda: nn.LSTMCell(8, 16), 2, 8),
        phase="training",
        forward_flops="2 * 2 * 4*16*(8 + 16)",
        model_flops="3 * (2 * 2 * 4*16*(8 + 16)) - 2 * 2 * 4*16*16",
        devices=("cpu", "meta"),
    ),
    Case(
        id="gru-cell",
        description="GRUCell(8, 16)",
        build=lambda: recurrent(lambda: nn.GRUCell(8, 16), 2, 8),
        phase="training",
        forward_flops="2 * 2 * 3*16*(8 + 16)",
        model_flops="3 * (2 * 2 * 3*16*(8 + 16)) - 2 * 2 * 3*16*16",
        devices=("cpu", "meta"),
    ),
    Case(
        id="rnn-cell",
        description="RNNCell(8, 16)",
        build=lambda: recurrent(lambda: nn.RNNCell(8, 16), 2, 8),
        phase="training",
        forward_flops="2 * 2 * 16*(8 + 16)",
        model_flops="3 * (2 * 2 * 16*(8 + 16)) - 2 * 2 * 16*16",
        devices=("cpu", "meta"),
    ),
)

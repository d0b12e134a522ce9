"""Convolutions against arithmetic on shapes and against a loop over outputs and taps."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mfu_monitor.formulas.convolution import conv_flops, conv_transpose_flops
from mfu_monitor.formulas.registry import bind_call, find_formula

FlopsOf = Callable[[Callable[[], Any]], int]


def train(module: nn.Module, *shape: int, device: str = "cpu", input_grad: bool = True) -> Callable[[], None]:
    module = module.to(device)
    x = torch.zeros(*shape, device=device, requires_grad=input_grad)
    return lambda: module(x).sum().backward()


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("groups", "expected"), [(1, 1_382_400), (2, 691_200), (8, 172_800)])
def test_grouped_convolution_forward_and_backward(groups: int, expected: int, device: str, flops_of: FlopsOf) -> None:
    # forward 2 * (2*16*10*10 outputs) * (8/groups * 3*3 terms); three times that with both gradients
    assert expected == 3 * 2 * (2 * 16 * 10 * 10) * (8 // groups * 9)
    assert flops_of(train(nn.Conv2d(8, 16, 3, padding=1, groups=groups), 2, 8, 10, 10, device=device)) == expected


def test_each_gradient_that_is_asked_for_costs_one_forward(flops_of: FlopsOf) -> None:
    forward = 2 * (2 * 16 * 10 * 10) * (8 * 9)
    first_layer = nn.Conv2d(8, 16, 3, padding=1)
    assert flops_of(train(first_layer, 2, 8, 10, 10, input_grad=False)) == 2 * forward
    frozen = nn.Conv2d(8, 16, 3, padding=1).requires_grad_(False)
    assert flops_of(train(frozen, 2, 8, 10, 10)) == 2 * forward
    only_bias = nn.Conv2d(8, 16, 3, padding=1)
    only_bias.weight.requires_grad_(False)
    assert flops_of(train(only_bias, 2, 8, 10, 10, input_grad=False)) == forward


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("module", "shape", "expected"),
    [
        (nn.ConvTranspose2d(4, 6, 4, stride=2, padding=1), (2, 4, 8, 8), 98_304),  # 2 * 512 inputs * 6*4*4
        (
            nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1, output_padding=1, groups=4),
            (2, 4, 8, 8),
            9_216,  # 2 * 512 inputs * 1*3*3
        ),
        (nn.ConvTranspose2d(32, 1, 3), (1, 32, 1, 1), 576),  # 2 * 32 inputs * 1*3*3
    ],
)
def test_transposed_convolution_spreads_each_input(
    module: nn.Module, shape: tuple[int, ...], expected: int, device: str, flops_of: FlopsOf
) -> None:
    module = module.to_empty(device=device)
    assert flops_of(lambda: module(torch.zeros(*shape, device=device))) == expected
    assert flops_of(train(module, *shape, device=device)) == 3 * expected


@pytest.mark.parametrize(
    ("module", "shape", "forward"),
    [
        (nn.Conv1d(3, 5, 4, stride=2), (2, 3, 10), 2 * (2 * 5 * 4) * (3 * 4)),  # length (10-4)/2+1 = 4
        (nn.Conv1d(6, 6, 3, padding=1, groups=6), (2, 6, 8), 2 * (2 * 6 * 8) * 3),  # depthwise
        (nn.Conv2d(3, 5, (3, 1), dilation=(2, 1)), (1, 3, 9, 7), 2 * (5 * 5 * 7) * (3 * 3)),  # height 9-4 = 5
        (nn.Conv2d(4, 8, 3, padding=1, groups=4), (1, 4, 6, 6), 2 * (8 * 36) * 9),  # depthwise, multiplier 2
        (nn.Conv2d(3, 4, 3, padding="same", padding_mode="reflect"), (1, 3, 6, 6), 2 * (4 * 36) * 27),
        (nn.Conv3d(2, 3, 2), (1, 2, 4, 4, 4), 2 * (3 * 27) * (2 * 8)),
        (nn.ConvTranspose1d(3, 5, 4, stride=2), (2, 3, 6), 2 * (2 * 3 * 6) * (5 * 4)),
        (nn.ConvTranspose3d(2, 3, 2), (1, 2, 3, 3, 3), 2 * (2 * 27) * (3 * 8)),
        (nn.Conv2d(3, 5, 1), (3, 4, 4), 2 * (5 * 16) * 3),  # no batch dimension
    ],
)
def test_one_to_three_dimensions(module: nn.Module, shape: tuple[int, ...], forward: int, flops_of: FlopsOf) -> None:
    assert flops_of(train(module, *shape)) == 3 * forward


def test_conv_tbc_sums_over_taps_and_channels(flops_of: FlopsOf) -> None:
    # time 5, batch 2, channels 3 -> 4, three taps, padding 1
    assert flops_of(lambda: torch.conv_tbc(torch.zeros(5, 2, 3), torch.zeros(3, 3, 4), torch.zeros(4), 1)) == 2 * (
        5 * 2 * 4
    ) * (3 * 3)


def priced(func: Any, *args: Any, output: Any, **kwargs: Any) -> tuple[int, str | None]:
    call = bind_call(func, args, kwargs, output)
    found = find_formula(call.name)
    assert found is not None
    cost = found(call)
    return cost.flops, cost.precision


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, device="meta", dtype=dtype)


def test_backend_operators_agree_with_the_general_one() -> None:
    x, w, y = meta(2, 8, 10, 10), meta(16, 4, 3, 3), meta(2, 16, 10, 10)
    expected = 2 * (2 * 16 * 100) * (4 * 9)
    aten = torch.ops.aten
    one, two = [1, 1], [1, 1]
    for func, args in (
        (aten.convolution.default, (x, w, None, one, one, two, False, [0, 0], 2)),
        (aten.cudnn_convolution.default, (x, w, one, one, two, 2, False, False, True)),
        (aten.cudnn_convolution_relu.default, (x, w, None, one, one, two, 2)),
        (aten.miopen_convolution.default, (x, w, None, one, one, two, 2, False, False)),
        (aten.mkldnn_convolution.default, (x, w, None, one, one, two, 2)),
        (torch.ops.mkldnn._convolution_pointwise.default, (x, w, None, one, one, two, 2, "relu", [], "")),
    ):
        assert priced(func, *args, output=y) == (expected, None), func


def test_transposed_backend_operators_agree() -> None:
    x, w, y = meta(2, 4, 8, 8), meta(4, 6, 4, 4), meta(2, 6, 16, 16)
    aten, one, two = torch.ops.aten, [1, 1], [2, 2]
    for func, args in (
        (aten.convolution.default, (x, w, None, two, one, one, True, [0, 0], 1)),
        (aten.cudnn_convolution_transpose.default, (x, w, one, [0, 0], two, one, 1, False, False, True)),
        (
            torch.ops.mkldnn._convolution_transpose_pointwise.default,
            (x, w, None, one, [0, 0], two, one, 1, "none", [], ""),
        ),
    ):
        assert priced(func, *args, output=y) == (98_304, None), func


def test_complex_convolution_costs_four_times_the_real_one() -> None:
    x, w = meta(1, 2, 6, dtype=torch.complex64), meta(3, 2, 3, dtype=torch.complex64)
    y = meta(1, 3, 4, dtype=torch.complex64)
    args = (x, w, None, [1], [0], [1], False, [0], 1)
    assert priced(torch.ops.aten.convolution.default, *args, output=y) == (4 * 2 * (3 * 4) * (2 * 3), None)


class PackedWeight:
    """Stands in for the packed parameters of a quantised convolution."""

    def unpack(self) -> tuple[torch.Tensor, None]:
        return meta(16, 8, 3, 3), None


def test_quantised_convolution_reads_its_packed_weight() -> None:
    x, y = meta(2, 8, 10, 10), meta(2, 16, 10, 10)
    flops = priced(torch.ops.quantized.conv2d.new, x, PackedWeight(), 1.0, 0, output=y)
    assert flops == (2 * (2 * 16 * 100) * (8 * 9), "int8")


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 2),
    groups=st.integers(1, 3),
    in_per_group=st.integers(1, 3),
    out_per_group=st.integers(1, 3),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    size=st.tuples(st.integers(5, 7), st.integers(5, 7)),
)
def test_any_convolution_equals_a_loop_over_its_outputs_and_taps(
    batch: int,
    groups: int,
    in_per_group: int,
    out_per_group: int,
    kernel: tuple[int, int],
    stride: int,
    padding: int,
    dilation: int,
    size: tuple[int, int],
    flops_of: FlopsOf,
) -> None:
    conv = nn.Conv2d(
        groups * in_per_group,
        groups * out_per_group,
        kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        device="meta",
    )
    starts = [
        range(0, extent + 2 * padding - dilation * (taps - 1), stride)
        for extent, taps in zip(size, kernel, strict=True)
    ]
    outputs = itertools.product(range(batch), range(groups * out_per_group), *starts)
    multiply_adds = sum(in_per_group * kernel[0] * kernel[1] for _ in outputs)
    x = torch.zeros(batch, groups * in_per_group, *size, device="meta")
    assert flops_of(lambda: conv(x)) == 2 * multiply_adds


def test_transposing_swaps_the_roles_of_input_and_output() -> None:
    # the gradient of a convolution is the transposed one: the same products
    assert conv_transpose_flops((2, 16, 10, 10), (16, 8, 3, 3)) == conv_flops((2, 16, 10, 10), (16, 8, 3, 3))

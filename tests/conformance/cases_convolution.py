"""Rows of convolutions.

Every output element is a sum over one group's input channels and all taps; of a transposed one, every input element is
spread over one group's output channels and all taps. Stride, padding and dilation only decide how many output elements
there are; taps on padding count. Each gradient multiplies the same triples, so training costs three times the forward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from .case import Case, Workload


def conv(make: Callable[[], nn.Module], *shape: int, requires_grad: bool = True) -> Workload:
    """A convolution on zeros of the given shape."""
    return make(), (torch.zeros(shape, requires_grad=requires_grad),)


def complex_conv(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(F.conv2d(x, weight))


EVERYWHERE = ("cpu", "meta")

CASES: tuple[Case, ...] = (
    Case(
        id="conv1d",
        description="Conv1d(4, 6, 3) on (2,4,10): 8 positions are left",
        build=lambda: conv(lambda: nn.Conv1d(4, 6, 3), 2, 4, 10),
        phase="training",
        forward_flops="2 * 2*6*8 * (4*3)",
        model_flops="3 * (2 * 2*6*8 * (4*3))",
        devices=EVERYWHERE,
    ),
    Case(
        id="conv2d",
        description="Conv2d(8, 16, 3, padding=1) on (2,8,10,10)",
        build=lambda: conv(lambda: nn.Conv2d(8, 16, 3, padding=1), 2, 8, 10, 10),
        phase="training",
        forward_flops="2 * 2*16*10*10 * (8*3*3)",
        model_flops="3 * (2 * 2*16*10*10 * (8*3*3))",
        devices=EVERYWHERE,
        covers=("C7",),
    ),
    Case(
        id="conv2d-groups",
        description="the same in 2 groups: each output sees 4 channels",
        build=lambda: conv(lambda: nn.Conv2d(8, 16, 3, padding=1, groups=2), 2, 8, 10, 10),
        phase="training",
        forward_flops="2 * 2*16*10*10 * (4*3*3)",
        model_flops="3 * (2 * 2*16*10*10 * (4*3*3))",
        devices=EVERYWHERE,
        covers=("C7",),
    ),
    Case(
        id="conv2d-depthwise",
        description="the same in 8 groups: one channel each",
        build=lambda: conv(lambda: nn.Conv2d(8, 16, 3, padding=1, groups=8), 2, 8, 10, 10),
        phase="training",
        forward_flops="2 * 2*16*10*10 * (1*3*3)",
        model_flops="3 * (2 * 2*16*10*10 * (1*3*3))",
        devices=EVERYWHERE,
        covers=("C7",),
    ),
    Case(
        id="conv2d-on-data",
        description="a network's first convolution: images need no gradient",
        build=lambda: conv(lambda: nn.Conv2d(3, 16, 7, stride=2, padding=3), 2, 3, 32, 32, requires_grad=False),
        phase="training",
        forward_flops="2 * 2*16*16*16 * (3*7*7)",
        model_flops="2 * (2 * 2*16*16*16 * (3*7*7))",
        devices=EVERYWHERE,
    ),
    Case(
        id="conv2d-frozen",
        description="frozen inside a network: only the input's gradient",
        build=lambda: conv(lambda: nn.Conv2d(4, 6, 3).requires_grad_(False), 2, 4, 8, 8),
        phase="training",
        forward_flops="2 * 2*6*6*6 * (4*3*3)",
        model_flops="2 * (2 * 2*6*6*6 * (4*3*3))",
        devices=EVERYWHERE,
    ),
    Case(
        id="conv2d-stride-and-dilation",
        description="stride 2 and dilation 2: a 3x3 kernel spans 5, so 11 wide leaves (11 - 5) // 2 + 1 = 4",
        build=lambda: conv(lambda: nn.Conv2d(4, 6, 3, stride=2, dilation=2), 2, 4, 11, 11),
        phase="training",
        forward_flops="2 * 2*6*4*4 * (4*3*3)",
        model_flops="3 * (2 * 2*6*4*4 * (4*3*3))",
        devices=EVERYWHERE,
    ),
    Case(
        id="conv2d-rectangular",
        description="a (1,5) kernel with stride (2,1) on (2,4,8,9): 4 by 5 positions",
        build=lambda: conv(lambda: nn.Conv2d(4, 6, (1, 5), stride=(2, 1)), 2, 4, 8, 9),
        phase="training",
        forward_flops="2 * 2*6*4*5 * (4*1*5)",
        model_flops="3 * (2 * 2*6*4*5 * (4*1*5))",
        devices=EVERYWHERE,
    ),
    Case(
        id="conv2d-pointwise",
        description="1x1: a Linear at every position",
        build=lambda: conv(lambda: nn.Conv2d(8, 16, 1), 2, 8, 5, 5),
        phase="training",
        forward_flops="2 * 2*5*5 * 8*16",
        model_flops="3 * (2 * 2*5*5 * 8*16)",
        devices=EVERYWHERE,
    ),
    Case(
        id="conv2d-same",
        description='padding="same" with an even kernel pads one side more',
        build=lambda: conv(lambda: nn.Conv2d(4, 6, 4, padding="same"), 2, 4, 8, 8),
        phase="training",
        forward_flops="2 * 2*6*8*8 * (4*4*4)",
        model_flops="3 * (2 * 2*6*8*8 * (4*4*4))",
        devices=EVERYWHERE,
    ),
    Case(
        id="conv2d-circular",
        description="circular padding is a copy before",
        build=lambda: conv(lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), 2, 4, 8, 8),
        phase="training",
        forward_flops="2 * 2*6*8*8 * (4*3*3)",
        model_flops="3 * (2 * 2*6*8*8 * (4*3*3))",
        devices=EVERYWHERE,
    ),
    Case(
        id="conv2d-without-a-batch",
        description="(4,8,8)",
        build=lambda: conv(lambda: nn.Conv2d(4, 6, 3), 4, 8, 8),
        phase="training",
        forward_flops="2 * 6*6*6 * (4*3*3)",
        model_flops="3 * (2 * 6*6*6 * (4*3*3))",
        devices=EVERYWHERE,
    ),
    Case(
        id="conv2d-empty-batch",
        description="(0,4,8,8)",
        build=lambda: conv(lambda: nn.Conv2d(4, 6, 3), 0, 4, 8, 8),
        phase="training",
        forward_flops="2 * 0*6*6*6 * (4*3*3)",
        model_flops="3 * (2 * 0*6*6*6 * (4*3*3))",
    ),
    Case(
        id="conv2d-unfolded",
        description="unfold and a product: im2col counts 0, the product as the convolution",
        build=lambda: (
            lambda x, w: w.flatten(1) @ F.unfold(x, 3),
            (torch.zeros(2, 4, 8, 8, requires_grad=True), torch.zeros(6, 4, 3, 3, requires_grad=True)),
        ),
        phase="training",
        forward_flops="2 * 2*6*6*6 * (4*3*3)",
        model_flops="3 * (2 * 2*6*6*6 * (4*3*3))",
        devices=EVERYWHERE,
    ),
    Case(
        id="conv2d-complex",
        description="torch runs three real convolutions for a complex one, and that is what counts",
        build=lambda: (
            complex_conv,
            tuple(
                torch.zeros(shape, dtype=torch.complex64, requires_grad=True) for shape in ((2, 3, 8, 8), (4, 3, 3, 3))
            ),
        ),
        phase="training",
        forward_flops="3 * 2 * 2*4*6*6 * (3*3*3)",
        model_flops="3 * (3 * 2 * 2*4*6*6 * (3*3*3))",
    ),
    Case(
        id="conv3d",
        description="Conv3d(2, 4, 3, padding=1) on (1,2,4,5,6)",
        build=lambda: conv(lambda: nn.Conv3d(2, 4, 3, padding=1), 1, 2, 4, 5, 6),
        phase="training",
        forward_flops="2 * 4*4*5*6 * (2*3*3*3)",
        model_flops="3 * (2 * 4*4*5*6 * (2*3*3*3))",
        devices=EVERYWHERE,
    ),
    Case(
        id="conv3d-depthwise",
        description="in 4 groups",
        build=lambda: conv(lambda: nn.Conv3d(4, 4, 3, groups=4), 1, 4, 4, 5, 6),
        phase="training",
        forward_flops="2 * 4*2*3*4 * (1*3*3*3)",
        model_flops="3 * (2 * 4*2*3*4 * (1*3*3*3))",
        devices=EVERYWHERE,
    ),
    Case(
        id="conv-transpose1d",
        description="ConvTranspose1d(4, 6, 3, stride=2) on (2,4,10): 10 positions are spread",
        build=lambda: conv(lambda: nn.ConvTranspose1d(4, 6, 3, stride=2), 2, 4, 10),
        phase="training",
        forward_flops="2 * 2*4*10 * (6*3)",
        model_flops="3 * (2 * 2*4*10 * (6*3))",
        devices=EVERYWHERE,
    ),
    Case(
        id="conv-transpose2d",
        description="ConvTranspose2d(4, 6, 4, stride=2, padding=1) on (2,4,8,8)",
        build=lambda: conv(lambda: nn.ConvTranspose2d(4, 6, 4, stride=2, padding=1), 2, 4, 8, 8),
        phase="training",
        forward_flops="2 * 2*4*8*8 * (6*4*4)",
        model_flops="3 * (2 * 2*4*8*8 * (6*4*4))",
        devices=EVERYWHERE,
        covers=("C8",),
    ),
    Case(
        id="conv-transpose2d-depthwise",
        description="ConvTranspose2d(4, 4, 3, stride=2, padding=1, output_padding=1, groups=4) on (2,4,8,8)",
        build=lambda: conv(
            lambda: nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1, output_padding=1, groups=4), 2, 4, 8, 8
        ),
        phase="training",
        forward_flops="2 * 2*4*8*8 * (1*3*3)",
        model_flops="3 * (2 * 2*4*8*8 * (1*3*3))",
        devices=EVERYWHERE,
        covers=("C8",),
    ),
    Case(
        id="conv-transpose2d-one-pixel",
        description="ConvTranspose2d(32, 1, 3) on (1,32,1,1)",
        build=lambda: conv(lambda: nn.ConvTranspose2d(32, 1, 3), 1, 32, 1, 1),
        phase="training",
        forward_flops="2 * 32 * (1*3*3)",
        model_flops="3 * (2 * 32 * (1*3*3))",
        devices=EVERYWHERE,
        covers=("C8",),
    ),
    Case(
        id="conv-transpose3d-groups",
        description="ConvTranspose3d(4, 6, 3, stride=2, output_padding=1, groups=2, dilation=2) on (1,4,3,3,3)",
        build=lambda: conv(
            lambda: nn.ConvTranspose3d(4, 6, 3, stride=2, output_padding=1, groups=2, dilation=2), 1, 4, 3, 3, 3
        ),
        phase="training",
        forward_flops="2 * 4*3*3*3 * (3*3*3*3)",
        model_flops="3 * (2 * 4*3*3*3 * (3*3*3*3))",
        devices=EVERYWHERE,
    ),
)

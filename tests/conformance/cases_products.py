"""Rows of dense matrix products.

An element of the result that is a sum over K terms costs 2 K. The gradient of each operand is a product of the same
multiply-adds, so a product whose two operands are trained costs three times its forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .case import Case, Workload


def product(
    function: Callable[..., Any],
    *shapes: tuple[int, ...],
    trained: tuple[int, ...] | None = None,
    dtype: torch.dtype | None = None,
) -> Workload:
    """A function of zeros of the given shapes; all need a gradient, or those whose positions are in ``trained``."""
    positions = range(len(shapes)) if trained is None else trained
    return function, tuple(torch.zeros(s, dtype=dtype, requires_grad=i in positions) for i, s in enumerate(shapes))


def einsum(equation: str, *shapes: tuple[int, ...], dtype: torch.dtype | None = None) -> Workload:
    def contraction(*operands: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.einsum(equation, *operands)
        return torch.view_as_real(result) if result.is_complex() else result

    return product(contraction, *shapes, dtype=dtype)


def layer(make: Callable[[], nn.Module], *shape: int, requires_grad: bool = True) -> Workload:
    """A module on zeros."""
    return make(), (torch.zeros(shape, requires_grad=requires_grad),)


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(11, 5)
        self.bags = nn.EmbeddingBag(11, 5)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rows(ids), self.bags(ids)


def left_to_right() -> Any:
    """Einsum contracts from the left, also where opt_einsum is installed and would choose another order."""
    return torch.backends.opt_einsum.flags(enabled=False)


def complex_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(a @ b)


EVERYWHERE = ("cpu", "meta")

# --- matrices, vectors, batches ---------------------------------------------------------------------------------------

BY_OPERATOR = (
    Case(
        id="mm",
        description="(3,5) @ (5,7): 3*7 sums over 5",
        build=lambda: product(torch.mm, (3, 5), (5, 7)),
        phase="training",
        forward_flops="2 * 3*7 * 5",
        model_flops="3 * (2 * 3*7 * 5)",
        devices=EVERYWHERE,
    ),
    Case(
        id="mm-one-operand",
        description="only the right operand is trained: one gradient",
        build=lambda: product(torch.mm, (3, 5), (5, 7), trained=(1,)),
        phase="training",
        forward_flops="2 * 3*7 * 5",
        model_flops="2 * (2 * 3*7 * 5)",
        devices=EVERYWHERE,
    ),
    Case(
        id="mm-float64",
        description="the precision does not change the count",
        build=lambda: product(torch.mm, (3, 5), (5, 7), dtype=torch.float64),
        phase="training",
        forward_flops="2 * 3*7 * 5",
        model_flops="3 * (2 * 3*7 * 5)",
        devices=EVERYWHERE,
    ),
    Case(
        id="mm-no-rows",
        description="an empty batch costs nothing, the weight's gradient of zeros included",
        build=lambda: product(torch.mm, (0, 5), (5, 7)),
        phase="training",
        forward_flops="2 * 0*7 * 5",
        model_flops="3 * (2 * 0*7 * 5)",
        devices=EVERYWHERE,
    ),
    Case(
        id="mm-no-contraction",
        description="(3,0) @ (0,7) is zeros",
        build=lambda: product(torch.mm, (3, 0), (0, 7)),
        phase="training",
        forward_flops="2 * 3*7 * 0",
        model_flops="3 * (2 * 3*7 * 0)",
        devices=EVERYWHERE,
    ),
    Case(
        id="addmm-in-place",
        description="addmm_: the addition counts 0",
        build=lambda: product(torch.Tensor.addmm_, (3, 7), (3, 5), (5, 7)),
        phase="inference",
        model_flops="2 * 3*7 * 5",
        devices=EVERYWHERE,
    ),
    Case(
        id="addmm-activation",
        description="_addmm_activation, fused with a ReLU",
        build=lambda: product(torch._addmm_activation, (7,), (3, 5), (5, 7)),
        phase="inference",
        model_flops="2 * 3*7 * 5",
        devices=EVERYWHERE,
    ),
    Case(
        id="mv",
        description="(3,5) @ (5): the vector's gradient is a product, the matrix's an outer one without sums: 0",
        build=lambda: product(torch.mv, (3, 5), (5,)),
        phase="training",
        forward_flops="2 * 3 * 5",
        model_flops="2 * 3*5 + 2 * 5*3",
        devices=EVERYWHERE,
    ),
    Case(
        id="addmv",
        description="the same with an addition",
        build=lambda: product(torch.addmv, (3,), (3, 5), (5,)),
        phase="training",
        forward_flops="2 * 3 * 5",
        model_flops="2 * 3*5 + 2 * 5*3",
        devices=EVERYWHERE,
    ),
    Case(
        id="dot",
        description="one sum over 5; its gradients scale a vector: 0",
        build=lambda: product(torch.dot, (5,), (5,)),
        phase="training",
        forward_flops="2 * 5",
        model_flops="2 * 5",
        devices=EVERYWHERE,
    ),
    Case(
        id="vdot-complex",
        description="a complex multiply-add is four real ones",
        build=lambda: product(torch.vdot, (5,), (5,), dtype=torch.complex64),
        phase="inference",
        model_flops="4 * 2 * 5",
        devices=EVERYWHERE,
    ),
    Case(
        id="addr",
        description="a multiply-add for each of 3*5 elements; backward multiplies by either vector",
        build=lambda: product(torch.addr, (3, 5), (3,), (5,)),
        phase="training",
        forward_flops="2 * 3*5",
        model_flops="2 * 3*5 + 2 * 3*5 + 2 * 5*3",
    ),
    Case(
        id="outer-and-kron",
        description="no sums at all, so no products",
        build=lambda: product(lambda a, b: (torch.outer(a, b), torch.kron(a, b)), (3,), (4,)),
        phase="inference",
        model_flops="0",
        devices=EVERYWHERE,
    ),
    Case(
        id="bmm",
        description="4 products of (3,5) @ (5,7)",
        build=lambda: product(torch.bmm, (4, 3, 5), (4, 5, 7)),
        phase="training",
        forward_flops="2 * 4*3*7 * 5",
        model_flops="3 * (2 * 4*3*7 * 5)",
        devices=EVERYWHERE,
    ),
    Case(
        id="bmm-no-batch",
        description="a batch of none",
        build=lambda: product(torch.bmm, (0, 3, 5), (0, 5, 7)),
        phase="training",
        forward_flops="2 * 0*3*7 * 5",
        model_flops="3 * (2 * 0*3*7 * 5)",
        devices=EVERYWHERE,
    ),
    Case(
        id="baddbmm",
        description="the same onto a bias",
        build=lambda: product(torch.baddbmm, (4, 3, 7), (4, 3, 5), (4, 5, 7)),
        phase="training",
        forward_flops="2 * 4*3*7 * 5",
        model_flops="3 * (2 * 4*3*7 * 5)",
        devices=EVERYWHERE,
    ),
    Case(
        id="addbmm",
        description="four products added up to one matrix",
        build=lambda: product(torch.addbmm, (3, 7), (4, 3, 5), (4, 5, 7)),
        phase="training",
        forward_flops="2 * 4*3*7 * 5",
        model_flops="3 * (2 * 4*3*7 * 5)",
        devices=EVERYWHERE,
    ),
    Case(
        id="matmul-broadcast",
        description="(2,1,3,5) @ (4,5,7): the batch is 2*4, in both gradients too",
        build=lambda: product(torch.matmul, (2, 1, 3, 5), (4, 5, 7)),
        phase="training",
        forward_flops="2 * 2*4*3*7 * 5",
        model_flops="3 * (2 * 2*4*3*7 * 5)",
        devices=EVERYWHERE,
    ),
    Case(
        id="matmul-vector-left",
        description="(5) @ (5,7) runs as a matrix of one row: both gradients are products",
        build=lambda: product(torch.matmul, (5,), (5, 7)),
        phase="training",
        forward_flops="2 * 1*7 * 5",
        model_flops="3 * (2 * 1*7 * 5)",
        devices=EVERYWHERE,
    ),
    Case(
        id="inner",
        description="(3,5) with (7,5) over the last dimension",
        build=lambda: product(torch.inner, (3, 5), (7, 5)),
        phase="training",
        forward_flops="2 * 3*7 * 5",
        model_flops="3 * (2 * 3*7 * 5)",
        devices=EVERYWHERE,
    ),
    Case(
        id="tensordot",
        description="(2,3,5) with (3,5,7) over two dimensions: sums over 3*5",
        build=lambda: product(lambda a, b: torch.tensordot(a, b, dims=2), (2, 3, 5), (3, 5, 7)),
        phase="training",
        forward_flops="2 * 2*7 * 3*5",
        model_flops="3 * (2 * 2*7 * 3*5)",
        devices=EVERYWHERE,
    ),
    Case(
        id="chain-of-three",
        description="(10,100)(100,5)(5,50) from the left, the cheaper way: 7,500 multiply-adds, not 75,000",
        build=lambda: product(lambda *m: torch.linalg.multi_dot(m), (10, 100), (100, 5), (5, 50)),
        phase="training",
        forward_flops="2 * 10*100*5 + 2 * 10*5*50",
        model_flops="3 * (2 * 10*100*5 + 2 * 10*5*50)",
        devices=EVERYWHERE,
    ),
    Case(
        id="chain-of-three-from-the-right",
        description="(50,5)(5,100)(100,10): the same from the right",
        build=lambda: product(torch.chain_matmul, (50, 5), (5, 100), (100, 10)),
        phase="inference",
        model_flops="2 * 5*100*10 + 2 * 50*5*10",
        devices=EVERYWHERE,
    ),
    Case(
        id="chain-of-four",
        description="(8,2)(2,9)(9,3)(3,7): cheapest as A((BC)D)",
        build=lambda: product(lambda *m: torch.linalg.multi_dot(m), (8, 2), (2, 9), (9, 3), (3, 7)),
        phase="inference",
        model_flops="2 * 2*9*3 + 2 * 2*3*7 + 2 * 8*2*7",
        devices=EVERYWHERE,
    ),
    Case(
        id="matrix-power",
        description="A^5 as A^2, A^4, A^4 A: three products",
        build=lambda: product(lambda a: torch.linalg.matrix_power(a, 5), (4, 4)),
        phase="inference",
        model_flops="3 * (2 * 4*4 * 4)",
        devices=EVERYWHERE,
    ),
    Case(
        id="covariance",
        description="4 variables, 10 observations: X X^T",
        build=lambda: product(torch.cov, (4, 10)),
        phase="inference",
        model_flops="2 * 4*4 * 10",
    ),
    Case(
        id="cdist-by-product",
        description="32 by 40 points of 8: |x|^2 - 2xy + |y|^2 as one product with two more columns",
        build=lambda: product(torch.cdist, (32, 8), (40, 8)),
        phase="inference",
        model_flops="2 * 32*40 * (8 + 2)",
    ),
    Case(
        id="cdist-by-product-training",
        description="each side's gradient is the 32 by 40 ratios times the other side's points",
        build=lambda: product(torch.cdist, (32, 8), (40, 8)),
        phase="training",
        forward_flops="2 * 32*40 * (8 + 2)",
        model_flops="2 * 32*40 * (8 + 2) + 2 * 32*8 * 40 + 2 * 40*8 * 32",
    ),
    Case(
        id="cdist-few-points",
        description="at most 25 points on either side: distances one by one, no product",
        build=lambda: product(torch.cdist, (3, 8), (4, 8)),
        phase="training",
        forward_flops="0",
        model_flops="0",
    ),
)

# --- einsum -----------------------------------------------------------------------------------------------------------

BY_EINSUM = (
    Case(
        id="einsum-matmul",
        description="bij,bjk->bik",
        build=lambda: einsum("bij,bjk->bik", (4, 3, 5), (4, 5, 7)),
        phase="training",
        forward_flops="2 * 4*3*7 * 5",
        model_flops="3 * (2 * 4*3*7 * 5)",
        devices=EVERYWHERE,
    ),
    Case(
        id="einsum-heads",
        description="bqhd,bkhd->bhqk: attention scores by hand",
        build=lambda: einsum("bqhd,bkhd->bhqk", (2, 6, 4, 8), (2, 9, 4, 8)),
        phase="training",
        forward_flops="2 * 2*4*6*9 * 8",
        model_flops="3 * (2 * 2*4*6*9 * 8)",
        devices=EVERYWHERE,
    ),
    Case(
        id="einsum-two-sums",
        description="bij,ijk->bk: sums over i and j",
        build=lambda: einsum("bij,ijk->bk", (2, 3, 5), (3, 5, 7)),
        phase="training",
        forward_flops="2 * 2*7 * 3*5",
        model_flops="3 * (2 * 2*7 * 3*5)",
        devices=EVERYWHERE,
    ),
    Case(
        id="einsum-ellipsis",
        description="...ij,...jk->...ik with one batch dimension broadcast",
        build=lambda: einsum("...ij,...jk->...ik", (2, 4, 3, 5), (4, 5, 7)),
        phase="inference",
        model_flops="2 * 2*4*3*7 * 5",
        devices=EVERYWHERE,
    ),
    Case(
        id="einsum-three-left-to-right",
        description="ij,jk,kl->il from the left: (2,3)(3,4) then (2,4)(4,5)",
        build=lambda: einsum("ij,jk,kl->il", (2, 3), (3, 4), (4, 5)),
        phase="training",
        forward_flops="2 * 2*4 * 3 + 2 * 2*5 * 4",
        model_flops="3 * (2 * 2*4 * 3 + 2 * 2*5 * 4)",
        context=left_to_right,
    ),
    Case(
        id="einsum-contraction-order",
        description="(A B) v and A (B v): the same result, 48 or 30 multiply-adds",
        build=lambda: product(
            lambda a, b, v: (
                torch.einsum("ik,k->i", torch.einsum("ij,jk->ik", a, b), v),
                torch.einsum("ij,j->i", a, torch.einsum("jk,k->j", b, v)),
            ),
            *((2, 5), (5, 4), (4,)),
        ),
        phase="inference",
        model_flops="(2 * 2*4 * 5 + 2 * 2 * 4) + (2 * 5 * 4 + 2 * 2 * 5)",
        devices=EVERYWHERE,
    ),
    Case(
        id="einsum-bilinear",
        description="bi,oij,bj->bo: x W, then the sum with y for each output",
        build=lambda: einsum("bi,oij,bj->bo", (3, 5), (7, 5, 6), (3, 6)),
        phase="inference",
        model_flops="2 * 3*7*6 * 5 + 2 * 3*7 * 6",
        context=left_to_right,
    ),
    Case(
        id="einsum-without-a-contraction",
        description="trace, diagonal, transpose, outer and elementwise products: nothing is summed by a product",
        build=lambda: product(
            lambda a, v: [
                torch.einsum(equation, *operands)
                for equation, operands in {
                    "ii->": (a,),
                    "ij->ji": (a,),
                    "ij->i": (a,),
                    "i,j->ij": (v, v),
                    "ij,ij->ij": (a, a),
                    "ii,i->i": (a, v),
                }.items()
            ],
            *((3, 3), (3,)),
        ),
        phase="inference",
        model_flops="0",
        devices=EVERYWHERE,
    ),
    Case(
        id="einsum-frobenius",
        description="ij,ij->: one sum over all elements",
        build=lambda: einsum("ij,ij->", (3, 4), (3, 4)),
        phase="inference",
        model_flops="2 * 3*4",
        devices=EVERYWHERE,
    ),
    Case(
        id="einsum-summed-beforehand",
        description="ijq,jk->ik: q is summed before the product, elementwise",
        build=lambda: einsum("ijq,jk->ik", (3, 4, 9), (4, 5)),
        phase="inference",
        model_flops="2 * 3*5 * 4",
        devices=EVERYWHERE,
    ),
)

# --- complex numbers: four real multiply-adds each --------------------------------------------------------------------

BY_COMPLEX = (
    Case(
        id="mm-complex",
        description="(3,5) @ (5,7) in complex64",
        build=lambda: product(complex_mm, (3, 5), (5, 7), dtype=torch.complex64),
        phase="training",
        forward_flops="4 * 2 * 3*7 * 5",
        model_flops="3 * (4 * 2 * 3*7 * 5)",
        devices=EVERYWHERE,
    ),
    Case(
        id="bmm-complex",
        description="4 of them in complex128",
        build=lambda: product(complex_mm, (4, 3, 5), (4, 5, 7), dtype=torch.complex128),
        phase="training",
        forward_flops="4 * 2 * 4*3*7 * 5",
        model_flops="3 * (4 * 2 * 4*3*7 * 5)",
        devices=EVERYWHERE,
    ),
    Case(
        id="einsum-complex",
        description="bixy,ioxy->boxy: the mixing of modes of a Fourier neural operator",
        build=lambda: einsum("bixy,ioxy->boxy", (2, 3, 4, 4), (3, 5, 4, 4), dtype=torch.complex64),
        phase="training",
        forward_flops="4 * 2 * 2*5*4*4 * 3",
        model_flops="3 * (4 * 2 * 2*5*4*4 * 3)",
        devices=EVERYWHERE,
    ),
)

# --- layers -----------------------------------------------------------------------------------------------------------

BY_LAYER = (
    Case(
        id="linear-bias",
        description="nn.Linear(5, 7) on 3 rows: the bias and its gradient are sums, 0",
        build=lambda: layer(lambda: nn.Linear(5, 7), 3, 5),
        phase="training",
        forward_flops="2 * 3 * 5*7",
        model_flops="3 * (2 * 3 * 5*7)",
        devices=EVERYWHERE,
    ),
    Case(
        id="linear-no-bias",
        description="without a bias the same",
        build=lambda: layer(lambda: nn.Linear(5, 7, bias=False), 3, 5),
        phase="training",
        forward_flops="2 * 3 * 5*7",
        model_flops="3 * (2 * 3 * 5*7)",
        devices=EVERYWHERE,
    ),
    Case(
        id="linear-vector",
        description="one row without a batch dimension",
        build=lambda: layer(lambda: nn.Linear(5, 7), 5),
        phase="training",
        forward_flops="2 * 1 * 5*7",
        model_flops="3 * (2 * 1 * 5*7)",
        devices=EVERYWHERE,
    ),
    Case(
        id="linear-tokens",
        description="(2,3,5): 2*3 rows",
        build=lambda: layer(lambda: nn.Linear(5, 7), 2, 3, 5),
        phase="training",
        forward_flops="2 * 2*3 * 5*7",
        model_flops="3 * (2 * 2*3 * 5*7)",
        devices=EVERYWHERE,
    ),
    Case(
        id="linear-on-data",
        description="data needs no gradient: forward and the weight's gradient",
        build=lambda: layer(lambda: nn.Linear(5, 7), 2, 3, 5, requires_grad=False),
        phase="training",
        forward_flops="2 * 2*3 * 5*7",
        model_flops="2 * (2 * 2*3 * 5*7)",
        devices=EVERYWHERE,
    ),
    Case(
        id="linear-complex",
        description="in complex64, seen through its real part",
        build=lambda: product(lambda x, w: F.linear(x, w).real, (3, 5), (7, 5), dtype=torch.complex64),
        phase="training",
        forward_flops="4 * 2 * 3 * 5*7",
        model_flops="3 * (4 * 2 * 3 * 5*7)",
    ),
    Case(
        id="linear-autocast",
        description="under autocast the casts count 0",
        build=lambda: layer(lambda: nn.Linear(5, 7), 3, 5),
        phase="training",
        forward_flops="2 * 3 * 5*7",
        model_flops="3 * (2 * 3 * 5*7)",
        context=lambda: torch.autocast("cpu", torch.bfloat16),
    ),
    Case(
        id="linear-inference-mode",
        description="nn.Linear(100, 100) under inference_mode, 1 token",
        build=lambda: layer(lambda: nn.Linear(100, 100), 1, 100, requires_grad=False),
        phase="inference",
        model_flops="2 * 1 * 100*100",
        context=torch.inference_mode,
        devices=EVERYWHERE,
        covers=("C19",),
    ),
    Case(
        id="bilinear",
        description="nn.Bilinear(5, 6, 7) on 3 rows: x W, then with y; torch contracts one output at a time",
        build=lambda: (nn.Bilinear(5, 6, 7), (torch.zeros(3, 5), torch.zeros(3, 6))),
        phase="inference",
        model_flops="2 * 3*7*5*6 + 2 * 3*7*6",
        devices=EVERYWHERE,
    ),
    Case(
        id="bilinear-training",
        description="dW is one product; dx is g W, then with y; dy is x W again, then with g",
        build=lambda: (
            nn.Bilinear(5, 6, 7),
            (torch.zeros(3, 5, requires_grad=True), torch.zeros(3, 6, requires_grad=True)),
        ),
        phase="training",
        forward_flops="2 * 3*7*5*6 + 2 * 3*7*6",
        model_flops="(2 * 3*7*5*6 + 2 * 3*7*6) + 2 * 3*7*5*6 + 2 * (2 * 3*7*5*6) + (2 * 3*7*5*6 + 2 * 3*7*6)",
        devices=EVERYWHERE,
    ),
    Case(
        id="norms-activations-pooling",
        description="layer, batch and RMS norms, GELU, softmax, dropout, pooling: 0",
        build=lambda: (
            nn.Sequential(
                *(nn.BatchNorm1d(4), nn.LayerNorm(8), nn.RMSNorm(8), nn.GELU()),
                *(nn.Softmax(-1), nn.Dropout(0.1), nn.MaxPool1d(2)),
            ),
            (torch.zeros(2, 4, 8, requires_grad=True),),
        ),
        phase="training",
        forward_flops="0",
        model_flops="0",
        devices=EVERYWHERE,
    ),
    Case(
        id="embeddings",
        description="look-ups are no products, forward and backward",
        build=lambda: (Embeddings(), (torch.zeros(2, 3, dtype=torch.long),)),
        phase="training",
        forward_flops="0",
        model_flops="0",
    ),
    Case(
        id="fft",
        description="Fourier transforms are left out by name",
        build=lambda: product(lambda x: torch.fft.irfft(torch.fft.rfft(x)), (4, 16)),
        phase="training",
        forward_flops="0",
        model_flops="0",
        devices=EVERYWHERE,
    ),
)

CASES: tuple[Case, ...] = (*BY_OPERATOR, *BY_EINSUM, *BY_COMPLEX, *BY_LAYER)

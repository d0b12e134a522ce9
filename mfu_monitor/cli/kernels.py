"""FLOPs and ideal bytes of single kernels by shape, for ``mfu-monitor roofline``: pure arithmetic.

Counts of whole training steps leave elementwise work out (only products count there). A lesson about one kernel has to
say how many operations it does, so they are listed here: an addition, a multiplication, a comparison, a division and a
call of exp, tanh or erf are one operation each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mfu_monitor.errors import ConfigurationError

__all__ = ["BYTES_PER_ELEMENT", "ELEMENTWISE", "Elementwise", "Kernel", "attention", "elementwise", "matmul"]

BYTES_PER_ELEMENT = {
    "fp64": 8.0, "fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5,
}  # fmt: skip
"""TF32 is stored as fp32 (NVIDIA, "TensorFloat-32 in the A100 GPU accelerates AI training", 2020)."""

_RESULT_OF = {"fp8": "bf16", "fp4": "bf16", "int8": "fp32"}
"""What a product of narrow operands is written as by default: bf16 (torch._scaled_mm), int32 (torch._int_mm)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel: its FLOPs and the bytes it must move."""

    label: str
    flops: int
    bytes_accessed: int
    on_matrix_units: bool = True
    """False: elementwise work runs on the vector units, whose peak is that of fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elementwise:
    """Operations for each element, and how many tensors of that size are read and written."""

    operations: int
    reads: int
    writes: int
    source: str


ELEMENTWISE = {
    "add": Elementwise(operations=1, reads=2, writes=1, source="a + b"),
    "mul": Elementwise(operations=1, reads=2, writes=1, source="a * b"),
    "relu": Elementwise(operations=1, reads=1, writes=1, source="max(x, 0)"),
    # 0.5 x (1 + tanh(x (c + c a x^2))): x^2, * ca, + c, * x, tanh, + 1, * x, * 0.5
    "gelu": Elementwise(
        operations=8, reads=1, writes=1, source="tanh form, Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415"
    ),
    # x / (1 + exp(-x)): negate, exp, + 1, divide
    "silu": Elementwise(
        operations=4, reads=1, writes=1, source="x * sigmoid(x), Elfwing et al. 2017, https://arxiv.org/abs/1702.03118"
    ),
    # compare for the maximum, subtract it, exp, add to the sum, divide
    "softmax": Elementwise(
        operations=5,
        reads=1,
        writes=1,
        source="with the maximum subtracted, https://arxiv.org/abs/1805.02867, section 2",
    ),
    # add to the mean, subtract it, square, add to the variance, * 1/std, * weight, + bias
    "layernorm": Elementwise(
        operations=7, reads=1, writes=1, source="Ba, Kiros, Hinton 2016, https://arxiv.org/abs/1607.06450"
    ),
    # square, add to the sum, * 1/rms, * weight
    "rmsnorm": Elementwise(
        operations=4, reads=1, writes=1, source="Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467"
    ),
}
"""Weights and biases of a norm are one row against many and left out of the bytes."""


def matmul(m: int, n: int, k: int, dtype: str, *, batch: int = 1, output_dtype: str | None = None) -> Kernel:
    """(M, K) times (K, N): 2MNK FLOPs; both operands read once, the result written once.

    Example:
        >>> matmul(4096, 4096, 4096, "bf16").flops
        137438953472
    """
    into = output_dtype or _RESULT_OF.get(dtype, dtype)
    moved = batch * ((m * k + k * n) * _bytes(dtype) + m * n * _bytes(into))
    label = f"{m} x {k} @ {k} x {n}" if batch == 1 else f"{batch} x ({m} x {k} @ {k} x {n})"
    return Kernel(label=label, flops=2 * batch * m * n * k, bytes_accessed=math.ceil(moved))


def elementwise(name: str, elements: int, dtype: str) -> Kernel:
    """An elementwise operator or a norm over ``elements`` elements.

    Example:
        >>> elementwise("add", 16_777_216, "bf16").bytes_accessed
        100663296
    """
    kind = ELEMENTWISE[name]
    return Kernel(
        label=f"{name} of {elements:,}",
        flops=kind.operations * elements,
        bytes_accessed=math.ceil((kind.reads + kind.writes) * elements * _bytes(dtype)),
        on_matrix_units=False,
    )


def attention(
    sequence_length: int, head_width: int, dtype: str, *, heads: int = 1, batch: int = 1, causal: bool = False
) -> dict[str, tuple[Kernel, ...]]:
    """Forward attention two ways: one flash kernel, and three kernels that write scores and weights to memory.

    The flash kernel moves q, k, v and the result only (Dao et al. 2022, https://arxiv.org/abs/2205.14135) and skips
    masked blocks; the other computes the full square, and moves it four times: scores written and read, weights written
    and read.
    """
    s, d, rows = sequence_length, head_width, heads * batch
    pairs = s * (s + 1) // 2 if causal else s * s
    qkvo = math.ceil(4 * rows * s * d * _bytes(dtype))
    flash = Kernel(label="flash", flops=4 * rows * pairs * d, bytes_accessed=qkvo)
    scores = matmul(s, s, d, dtype, batch=rows, output_dtype=dtype)
    values = matmul(s, d, s, dtype, batch=rows, output_dtype=dtype)
    weights = elementwise("softmax", rows * s * s, dtype)
    return {"flash": (flash,), "materialised": (scores, weights, values)}


def _bytes(dtype: str) -> float:
    if dtype not in BYTES_PER_ELEMENT:
        raise ConfigurationError(f"dtype is {dtype!r}; expected one of {', '.join(BYTES_PER_ELEMENT)}")
    return BYTES_PER_ELEMENT[dtype]

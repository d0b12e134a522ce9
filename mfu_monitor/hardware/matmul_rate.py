"""Time matrix products and copies on a device, as a good guest: its own random generator, every setting put back.

For set-up time and the command line only: it waits for the device.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from mfu_monitor.hardware.precision import has_tf32

__all__ = [
    "MEASURABLE_PRECISIONS",
    "ProductRate",
    "Shape",
    "best_product_rate",
    "copy_rate",
    "default_shapes",
    "product_rate",
]

Shape = tuple[int, int, int]
"""M, K, N of a product (M, K) x (K, N)."""

_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
MEASURABLE_PRECISIONS = tuple(_DTYPES)

_CPU_SIZES = (512, 1024, 2048)
_ACCELERATOR_SIZES = (2048, 4096, 8192)
_SEED = (
    20240607  # any fixed number: constant or zero operands draw less power and raise the clock above what training sees
)
_MIN_BATCH_S = 0.02  # calls between two looks at the clock, so that launch and clock cost nothing
_CPU_COPY_BYTES = 2**27  # beyond the caches of most machines, small enough to be there
_ACCELERATOR_COPY_BYTES = 2**29


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductRate:
    """The best rate seen for one product shape."""

    shape: Shape
    flops_per_s: float
    calls: int


def default_shapes(device_type: str) -> tuple[Shape, ...]:
    """Squares from small to large: where the library's best kernel is depends on the part."""
    sizes = _CPU_SIZES if device_type == "cpu" else _ACCELERATOR_SIZES
    return tuple((size, size, size) for size in sizes)


def best_product_rate(
    device: torch.device,
    precision: str,
    *,
    seconds: float,
    shapes: Sequence[Shape] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> ProductRate | None:
    """The best rate over several shapes within a budget of time; None where the device cannot run the product.

    A shape that by the last one's rate would not fit into the rest of the budget is left out.
    """
    rates: list[ProductRate] = []
    deadline_s = clock() + seconds
    left = list(shapes or default_shapes(device.type))
    while left:
        shape, remaining_s = left.pop(0), deadline_s - clock()
        if rates and _product_flops(shape) / rates[-1].flops_per_s * 2 > remaining_s:
            continue
        rate = product_rate(device, precision, shape, seconds=remaining_s / (len(left) + 1), clock=clock)
        rates += [rate] if rate is not None else []
    return max(rates, key=lambda rate: rate.flops_per_s, default=None)


def product_rate(
    device: torch.device,
    precision: str,
    shape: Shape,
    *,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> ProductRate | None:
    """The best rate of one shape; None where this device or torch build cannot run it (no such kernel, no memory)."""
    if precision not in MEASURABLE_PRECISIONS or (precision == "tf32" and not has_tf32(device)):
        return None
    try:
        with _undisturbed(device, precision):
            call = _product(device, precision, shape)
            least_s, calls = _least_seconds(call, lambda: _wait(device), seconds=seconds, clock=clock)
    except (RuntimeError, NotImplementedError, AttributeError, TypeError, ValueError):
        return None
    return ProductRate(shape=shape, flops_per_s=_product_flops(shape) / least_s, calls=calls)


def copy_rate(
    device: torch.device, *, seconds: float = 0.3, clock: Callable[[], float] = time.perf_counter
) -> float | None:
    """Streaming bandwidth in bytes/s by a large copy; a byte read and a byte written count as two, as in STREAM."""
    size = _CPU_COPY_BYTES if device.type == "cpu" else _ACCELERATOR_COPY_BYTES
    try:
        with torch.no_grad():
            source = torch.zeros(size, dtype=torch.uint8, device=device)
            target = torch.zeros_like(source)
            least_s, _ = _least_seconds(
                lambda: target.copy_(source), lambda: _wait(device), seconds=seconds, clock=clock
            )
    except RuntimeError:
        return None
    return 2 * size / least_s


def _product_flops(shape: Shape) -> int:
    m, k, n = shape
    return 2 * m * k * n


def _least_seconds(
    call: Callable[[], object], wait: Callable[[], None], *, seconds: float, clock: Callable[[], float]
) -> tuple[float, int]:
    """Least seconds a call over batches of calls until the budget is spent; at least one batch after the warm-up."""
    deadline_s = clock() + seconds
    call()
    wait()
    once_s = _batch_seconds(call, wait, 1, clock)
    size = max(1, int(_MIN_BATCH_S / max(once_s, 1e-9)))
    least_s, calls = once_s, 1
    while clock() + once_s * size < deadline_s:
        least_s = min(least_s, _batch_seconds(call, wait, size, clock) / size)
        calls += size
    return least_s, calls


def _batch_seconds(
    call: Callable[[], object], wait: Callable[[], None], size: int, clock: Callable[[], float]
) -> float:
    start_s = clock()
    for _ in range(size):
        call()
    wait()
    return max(clock() - start_s, 1e-9)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _product(device: torch.device, precision: str, shape: Shape) -> Callable[[], torch.Tensor]:
    """One product on random operands, ready to be called again and again."""
    m, k, n = shape
    generator = torch.Generator(device=device).manual_seed(_SEED)
    if precision == "int8":
        a, b = (torch.randint(-8, 8, s, generator=generator, device=device, dtype=torch.int8) for s in ((m, k), (k, n)))
        return lambda: torch.ops.aten._int_mm(a, b)
    dtype = _DTYPES[precision]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x, y = (torch.randn(s, generator=generator, device=device, dtype=wide) for s in ((m, k), (n, k)))
    if precision == "fp8":
        one = torch.ones((), device=device, dtype=torch.float32)
        x8, y8 = x.to(dtype), y.to(dtype)
        return lambda: torch.ops.aten._scaled_mm(x8, y8.t(), one, one, out_dtype=torch.bfloat16)
    x, y = x.to(dtype), y.to(dtype)
    out = torch.zeros(m, n, device=device, dtype=dtype)
    return lambda: torch.mm(x, y.t(), out=out)


@contextlib.contextmanager
def _undisturbed(device: torch.device, precision: str) -> Iterator[None]:
    """No gradients, no autocast, and on CUDA float32 as fp32 or tf32 as asked; all of it as before afterwards."""
    autocast_type = device.type if torch.amp.is_autocast_available(device.type) else "cpu"
    with torch.no_grad(), torch.autocast(autocast_type, enabled=False), _fp32_products_as(device, precision):
        yield


@contextlib.contextmanager
def _fp32_products_as(device: torch.device, precision: str) -> Iterator[None]:
    if device.type != "cuda" or precision not in ("fp32", "tf32"):
        yield
        return
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if precision == "tf32" else "ieee"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before

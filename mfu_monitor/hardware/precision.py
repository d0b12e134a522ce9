"""The vocabulary of precisions: what a dtype is called here, and whether float32 means fp32 or tf32 at this moment."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from mfu_monitor.errors import ConfigurationError

__all__ = ["PRECISIONS", "active_precision", "literal_precision", "matmul_precision", "precision_of"]

PRECISIONS = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8")
"""Every precision a peak is kept for, widest first. Peaks of ``int8`` are operations, not FLOPs, per second."""

# Complex products are real products of the component type (four of them for each complex multiply-add).
_BY_DTYPE_NAME = {
    "float64": "fp64",
    "double": "fp64",
    "complex128": "fp64",
    "cdouble": "fp64",
    "float32": "fp32",
    "float": "fp32",
    "complex64": "fp32",
    "cfloat": "fp32",
    "tfloat32": "tf32",
    "float16": "fp16",
    "half": "fp16",
    "complex32": "fp16",
    "chalf": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8",
    "float8_e4m3fnuz": "fp8",
    "float8_e5m2": "fp8",
    "float8_e5m2fnuz": "fp8",
    "float8": "fp8",
    "float4_e2m1fn_x2": "fp4",
    "float4": "fp4",
    "int8": "int8",
    "uint8": "int8",
    "qint8": "int8",
    "quint8": "int8",
}

_TF32_SINCE_COMPUTE_CAPABILITY = (8, 0)  # CUDA C++ programming guide, "Compute Capabilities"
_TF32_GCN_ARCHITECTURES = ("gfx940", "gfx941", "gfx942")  # CDNA3 "XF32"; removed again in CDNA4 (gfx950)


def active_precision(flops_by_precision: Mapping[str, float]) -> str | None:
    """The precision that carries the most FLOPs, the first of equals; None where nothing was counted.

    Example:
        >>> active_precision({"fp32": 3, "bf16": 5})
        'bf16'
    """
    flops = flops_by_precision
    return max(flops, key=lambda name: flops[name]) if any(flops.values()) else None


def precision_of(dtype: torch.dtype | str) -> str | None:
    """The precision of products whose operands have this dtype; None if none is defined (bool, int64, scale formats).

    Pure: float32 is ``"fp32"`` here whatever torch's matmul setting says (see ``matmul_precision``).

    Args:
        dtype: A torch dtype, its name with or without ``torch.``, or a precision name.

    Example:
        >>> precision_of(torch.bfloat16), precision_of("torch.float16"), precision_of("tf32"), precision_of(torch.bool)
        ('bf16', 'fp16', 'tf32', None)
    """
    name = str(dtype).strip().lower().removeprefix("torch.")
    return name if name in PRECISIONS else _BY_DTYPE_NAME.get(name)


def literal_precision(dtype: torch.dtype | str) -> str:
    """As ``precision_of``, for names that a user wrote.

    Raises:
        ConfigurationError: The name is neither a precision nor a dtype of matmuls.
    """
    precision = precision_of(dtype)
    if precision is None:
        raise ConfigurationError(
            f"unknown precision {str(dtype)!r}: allowed are {', '.join(PRECISIONS)} and torch dtypes of products "
            f"(torch.bfloat16, 'bfloat16', torch.float16, ...); example: 'bf16'"
        )
    return precision


def matmul_precision(
    dtype: torch.dtype, device_type: str, *, is_convolution: bool = False, has_tf32: bool | None = None
) -> str | None:
    """The precision in which a product on operands of ``dtype`` runs on a device of this type, at this moment.

    Only float32 (and complex64) on CUDA depend on more than the dtype: they run in TF32 where torch's settings allow it
    (``torch.backends.cuda.matmul`` for matrix products, ``torch.backends.cudnn`` for convolutions, whose default allows
    it) and the part has such a unit. Source: https://docs.pytorch.org/docs/stable/notes/cuda.html, "TensorFloat-32".

    Args:
        dtype: The operands' dtype.
        device_type: ``torch.device.type``: ``"cuda"`` (ROCm too), ``"cpu"``, ...
        is_convolution: The product is a convolution, which obeys cuDNN's switch instead of cuBLAS'.
        has_tf32: Whether the device has TF32 units; None asks the current CUDA device (yes where there is none).

    Returns:
        A name of ``PRECISIONS``, or None where no product precision is defined for the dtype.
    """
    precision = precision_of(dtype)
    if precision != "fp32" or device_type != "cuda":
        return precision
    if not (_convolutions_allow_tf32() if is_convolution else matmuls_allow_tf32()):
        return "fp32"
    return "tf32" if (current_device_has_tf32() if has_tf32 is None else has_tf32) else "fp32"


def matmuls_allow_tf32() -> bool:
    """Whether float32 matrix products on CUDA may run in TF32 now.

    ``fp32_precision`` reflects the older switches too (``set_float32_matmul_precision``, ``allow_tf32``), while reading
    the older ones raises once the newer one was written.
    """
    allowed = getattr(torch.backends.cuda.matmul, "fp32_precision", "none") == "tf32"
    return allowed and not (torch.version.hip and _legacy_switch_forbids_tf32())


def _legacy_switch_forbids_tf32() -> bool:
    """On ROCm the older getter also knows of the HIPBLASLT_ALLOW_TF32 gate."""
    try:
        return not torch.backends.cuda.matmul.allow_tf32
    except RuntimeError:
        return False


def _convolutions_allow_tf32() -> bool:
    convolution = getattr(torch.backends.cudnn, "conv", None)
    if convolution is None:
        return bool(torch.backends.cudnn.allow_tf32)
    return bool(convolution.fp32_precision == "tf32")


def current_device_has_tf32() -> bool:
    """Whether the current CUDA device has TF32 units; True where there is no CUDA device to ask (fakes, meta)."""
    if not torch.cuda.is_available():
        return True
    return _device_has_tf32(torch.cuda.current_device())


def has_tf32(device: torch.device) -> bool:
    """Whether this very device has TF32 units; False on anything but CUDA."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    return _device_has_tf32(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _device_has_tf32(index: int) -> bool:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return str(getattr(properties, "gcnArchName", "")).split(":")[0] in _TF32_GCN_ARCHITECTURES
    return (properties.major, properties.minor) >= _TF32_SINCE_COMPUTE_CAPABILITY

"""Shapes to FLOPs and bytes: one formula an operator, each with its derivation.

Importing the package registers every formula.
"""

from mfu_monitor.formulas import (  # noqa: F401
    attention_flex,
    attention_kernels,
    attention_layers,
    attention_packed,
    convolution,
    matmul,
    recurrent,
    vendor_modules,
)

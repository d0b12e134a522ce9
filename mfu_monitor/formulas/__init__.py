"""Shapes to FLOPs and bytes: one formula an operator, each with its derivation.

Importing the package registers every formula.
"""

import importlib
import importlib.util

for _name in ("matmul", "convolution", "recurrent", "attention_kernels", "opaque"):
    if importlib.util.find_spec(f"{__name__}.{_name}") is not None:
        importlib.import_module(f"{__name__}.{_name}")

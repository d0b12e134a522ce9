"""Modules of other libraries whose products the dispatcher cannot see or cannot price, counted by their logical shapes.

Transformer Engine calls its kernels through a C++ extension, past the dispatcher. bitsandbytes stores packed weights,
whose tensors do not have the shape of the product. Both are found by name, so neither has to be installed.

Sources: ``transformer_engine/pytorch/module/{linear,layernorm_linear,layernorm_mlp,grouped_linear}.py`` and
``attention/dot_product_attention/dot_product_attention.py`` (https://github.com/NVIDIA/TransformerEngine);
``bitsandbytes/nn/modules.py`` (https://github.com/bitsandbytes-foundation/bitsandbytes).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mfu_monitor.formulas.attention_dense import Alignment, attention_forward_flops, band_pairs
from mfu_monitor.formulas.cost import OpCost, UncountableCallError
from mfu_monitor.formulas.matmul import contraction_flops
from mfu_monitor.formulas.registry import own_module_formula

__all__ = ["BITSANDBYTES_LINEARS", "TRANSFORMER_ENGINE_LINEARS"]

_TE = "transformer_engine.pytorch"

# Each class by the name users import and by the module that defines it.
TRANSFORMER_ENGINE_LINEARS = (
    f"{_TE}.Linear",
    f"{_TE}.module.linear.Linear",
    f"{_TE}.LayerNormLinear",
    f"{_TE}.module.layernorm_linear.LayerNormLinear",
    f"{_TE}.GroupedLinear",
    f"{_TE}.module.grouped_linear.GroupedLinear",
)
"""``in_features`` and ``out_features`` are this rank's own under tensor parallelism."""

TRANSFORMER_ENGINE_MLPS = (f"{_TE}.LayerNormMLP", f"{_TE}.module.layernorm_mlp.LayerNormMLP")

TRANSFORMER_ENGINE_ATTENTION = (
    f"{_TE}.DotProductAttention",
    f"{_TE}.attention.DotProductAttention",
    f"{_TE}.attention.dot_product_attention.DotProductAttention",
    f"{_TE}.attention.dot_product_attention.dot_product_attention.DotProductAttention",
)

BITSANDBYTES_LINEARS = tuple(
    f"bitsandbytes.nn.{module}{name}"
    for name in ("Linear8bitLt", "Linear4bit", "LinearFP4", "LinearNF4")
    for module in ("", "modules.")
)


@own_module_formula(*TRANSFORMER_ENGINE_LINEARS)
def _te_linear(module: Any, x: Sequence[int], *_: Any, out_shape: Sequence[int]) -> int:
    # Sequence parallelism gathers the rows before a column-parallel product and scatters them after a row-parallel one:
    # the side that holds all rows says how many there are.
    rows = max(math.prod(x[:-1]), math.prod(out_shape[:-1]))
    return contraction_flops(rows * module.out_features, module.in_features)


@own_module_formula(*TRANSFORMER_ENGINE_MLPS)
def _te_mlp(module: Any, x: Sequence[int], *_: Any) -> int:
    # fc1_weight is (F or 2F if gated, hidden), fc2_weight (hidden, F): each meets every row once.
    gathered = module.tp_size if getattr(module, "sequence_parallel", False) else 1
    elements = math.prod(module.fc1_weight.shape) + math.prod(module.fc2_weight.shape)
    return contraction_flops(elements, math.prod(x[:-1]) * gathered)


@own_module_formula(*BITSANDBYTES_LINEARS)
def _bitsandbytes_linear(module: Any, x: Sequence[int], *_: Any) -> int:
    return contraction_flops(math.prod(x[:-1]) * module.out_features, module.in_features)


@own_module_formula(*TRANSFORMER_ENGINE_ATTENTION, input_gradient_factor=2)
def _te_attention(module: Any, q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any) -> OpCost:
    B, Sq, Hq, Dqk = _batch_sequence_heads_width(module.qkv_format, q)
    Sk, Dv = _batch_sequence_heads_width(module.qkv_format, k)[1], v[-1]
    low, high = _band(module.attn_mask_type, getattr(module, "window_size", None), Sq, Sk)

    def flops(pairs: int) -> int:
        return attention_forward_flops(batch=B, q_heads=Hq, pairs=pairs, qk_width=Dqk, v_width=Dv)

    return OpCost(flops(band_pairs(Sq, Sk, low=low, high=high)), palm_flops=flops(Sq * Sk))


def _batch_sequence_heads_width(qkv_format: str, shape: Sequence[int]) -> tuple[int, int, int, int]:
    if qkv_format == "sbhd":
        S, B, H, D = shape
    elif qkv_format == "bshd":
        B, S, H, D = shape
    else:
        raise UncountableCallError(
            f"DotProductAttention with qkv_format={qkv_format!r}: the lengths of its documents are in the contents of "
            "cu_seqlens, not in shapes. Give the class a formula of your own with register_module_formula."
        )
    return B, S, H, D


def _band(mask_type: str, window: tuple[int, int] | None, q_len: int, k_len: int) -> tuple[int | None, int | None]:
    """Smallest and largest offset j - i that is attended; None means no limit."""
    if "padding" in mask_type or "arbitrary" in mask_type:
        raise UncountableCallError(
            f"DotProductAttention with attn_mask_type={mask_type!r}: which pairs are attended is in the contents of a "
            "mask, not in shapes. Give the class a formula of your own with register_module_formula."
        )
    alignment: Alignment = "bottom_right" if "bottom_right" in mask_type else "top_left"
    offset = k_len - q_len if alignment == "bottom_right" else 0
    left, right = window if window is not None else (-1, -1)  # -1: no limit, by Transformer Engine's convention
    if "causal" in mask_type:
        right = 0
    return (None if left < 0 else offset - left), (None if right < 0 else offset + right)

"""Attention kernels that take packed documents or a (B, S, H, D) layout: PyTorch's own and third-party ones.

Third-party kernels are known by their registered operator names and are never imported. Argument names differ between
libraries and versions, so they are read by every name in use. Schemas:

- PyTorch: ``aten::_flash_attention_*``, ``aten::_efficient_attention_*``, ``aten::_cudnn_attention_*``,
  ``torch_attn::_varlen_attn*``;
- flash-attn 2 and 3: https://github.com/Dao-AILab/flash-attention (``flash_attn/flash_attn_interface.py``,
  ``hopper/flash_attn_interface.py``, ``hopper/flash_api.cpp``);
- xFormers: https://github.com/facebookresearch/xformers (``csrc/attention/attention.cpp``, ``ops/fmha/flash.py``);
- Diffusers' wrapper of flash-attn 3: ``diffusers/models/attention_dispatch.py``;
- the kernels hub: https://huggingface.co/kernels-community/flash-attn2 (``torch-ext/torch_binding.cpp``).

flash-linear-attention is absent on purpose: its products run in Triton kernels behind ``autograd.Function``, without an
operator; the operators that it does register (``fla::fused_*_rwkv7``) are elementwise and cost 0.

Document ends are read (counted steps only). Where they cannot be read, the documents are taken to be as long as
``max_seqlen`` allows, which is exact when all are equally long and an upper bound otherwise, and the cost says so.
By the PaLM convention, packed documents count the square of each document: what they cost unpacked.
Causal and window flags are aligned bottom-right (flash-attn >= 2.1), and kernels skip what they exclude.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

from torch import Tensor

from mfu_monitor.formulas.attention_cost import (
    UNREADABLE_MASK_NOTE,
    AttentionWork,
    Band,
    argument,
    backward_cost,
    forward_cost,
    logical_width,
    masked_pairs,
    needed_gradients,
)
from mfu_monitor.formulas.attention_dense import chunked_pairs
from mfu_monitor.formulas.cost import OpCost, OperatorCall, read_integers
from mfu_monitor.formulas.registry import Formula, formula

__all__ = ["hub_flash_formula"]

UNREADABLE_LENGTHS_NOTE = (
    "document lengths could not be read (meta or fake tensor); documents are taken to be as long as max_seqlen allows"
)

Lengths = list[tuple[int, int]]
"""(query length, key length) of each sequence or document."""


# --- flash kernels: (B, S, H, D), or (T, H, D) with document ends -----------------------------------------------------


@formula(
    "aten::_flash_attention_forward",
    "aten::_flash_attention_forward_no_dropout_inplace",
    "torch_attn::_varlen_attn",
    "torch_attn::_varlen_attn_out",
    "flash_attn::_flash_attn_forward",
    "flash_attn::_flash_attn_varlen_forward",
    "flashattn::_flash_attn_forward",  # the namespace of flash-attn 2.6.4 and its pre-releases
    "flashattn::_flash_attn_varlen_forward",
    "flash_attn_3::fwd",
    "flash_attn_3::_flash_attn_forward",
    "_diffusers_flash_attn_3::_flash_attn_forward",
    "xformers_flash::flash_fwd",
    "xformers_flash3::flash_fwd",
)
def _flash_forward(call: OperatorCall) -> OpCost:
    return forward_cost(_flash_work(call))


@formula(
    "aten::_flash_attention_backward",
    "torch_attn::_varlen_attn_backward",
    "flash_attn::_flash_attn_backward",
    "flash_attn::_flash_attn_varlen_backward",
    "flashattn::_flash_attn_backward",
    "flashattn::_flash_attn_varlen_backward",
    "flash_attn_3::bwd",
    "flash_attn_3::_flash_attn_backward",
    "_diffusers_flash_attn_3::_flash_attn_backward",
    "xformers_flash::flash_bwd",
    "xformers_flash3::flash_bwd",
)
def _flash_backward(call: OperatorCall) -> OpCost:
    return backward_cost(_flash_work(call), needs_grad=needed_gradients(call))


_HUB_KERNEL = re.compile(r"_?(?:vllm_)?flash_attn[234]?(?:_\w+)?::(?:varlen_)?(?P<direction>fwd|bwd)")


def hub_flash_formula(name: str) -> Formula | None:
    """The formula of a flash-attn build from the Hugging Face kernels hub, whose namespace holds the build's hash.

    Example:
        >>> hub_flash_formula("_flash_attn2_9e27194::varlen_fwd") is not None
        True
    """
    found = _HUB_KERNEL.fullmatch(name)
    if found is None:
        return None
    return _flash_forward if found["direction"] == "fwd" else _flash_backward


def _flash_work(call: OperatorCall) -> AttentionWork:
    query, key, value = _operands(call)
    lengths, note = _flash_lengths(call, query, key)
    scale = argument(call, "softmax_scale", "scale")
    pairs = query.shape[-2] * _flash_pairs(call, lengths)
    return AttentionWork(
        pairs=pairs,
        executed_pairs=pairs,
        palm_pairs=query.shape[-2] * _squares(lengths),
        qk_width=logical_width(query.shape[-1], scale),
        v_width=logical_width(value.shape[-1], scale),
        kernel_qk_width=query.shape[-1],
        kernel_v_width=value.shape[-1],
        note=note,
    )


def _flash_pairs(call: OperatorCall, lengths: Lengths) -> int:
    band = _flash_band(call)
    chunk = argument(call, "attention_chunk", default=0)
    if chunk and all(q_len == k_len for q_len, k_len in lengths):
        return sum(chunked_pairs(q_len, chunk, is_causal=band.high == 0) for q_len, _ in lengths)
    return sum(band.pairs(q_len, k_len) for q_len, k_len in lengths)


def _flash_band(call: OperatorCall) -> Band:
    """-1, or any negative number, means no limit; causal is a right limit of 0."""
    window = argument(call, "window_size", default=(None, None))
    left = argument(call, "window_size_left", "window_left", default=window[0])
    right = argument(call, "window_size_right", "window_right", default=window[1])
    if argument(call, "is_causal", "causal", default=False):
        right = 0
    low = None if left is None or left < 0 else -left
    high = None if right is None or right < 0 else right
    return Band(low, high, "bottom_right")


def _flash_lengths(call: OperatorCall, query: Tensor, key: Tensor) -> tuple[Lengths, str | None]:
    q_ends = argument(call, "cum_seq_q", "cu_seq_q", "cu_seqlens_q")
    k_ends = argument(call, "cum_seq_k", "cu_seq_k", "cu_seqlens_k")
    sequences = _sequences(query, q_ends)
    is_paged = argument(call, "block_table", "block_tables", "block_table_", "page_table") is not None
    max_q = argument(call, "max_seqlen_q", "max_q", default=query.shape[-3])
    max_k = argument(call, "max_seqlen_k", "max_k", default=key.shape[-3])
    q_lengths = _side_lengths(query, q_ends, argument(call, "seqused_q", "sequed_q"), sequences, max_q)
    k_lengths = _side_lengths(
        key, k_ends, argument(call, "seqused_k", "seqused_k_", "sequed_k"), sequences, max_k, is_paged=is_paged
    )
    note = UNREADABLE_LENGTHS_NOTE if q_lengths is None or k_lengths is None else None
    q_lengths = q_lengths or _longest_possible(query, sequences, max_q)
    k_lengths = k_lengths or _longest_possible(key, sequences, max_k)
    return list(zip(q_lengths, k_lengths, strict=False)), note


def _sequences(query: Tensor, q_ends: Any) -> int:
    if query.dim() == 3 and q_ends is not None:
        return max(0, int(q_ends.numel()) - 1)
    return int(query.shape[0]) if query.dim() == 4 else 1


def _side_lengths(
    operand: Tensor, ends: Any, used: Any, sequences: int, longest: int, *, is_paged: bool = False
) -> list[int] | None:
    """Lengths of the query or the key side; None where they lie in a tensor that cannot be read."""
    if used is not None:
        return read_integers(used)
    if is_paged:
        return [longest] * sequences
    if operand.dim() == 4 or ends is None:
        return [int(operand.shape[-3])] * sequences
    return _differences(read_integers(ends))


def _longest_possible(operand: Tensor, sequences: int, longest: int) -> list[int]:
    """The tokens in documents of the greatest length allowed, the rest in one more: no split has more pairs."""
    if operand.dim() == 4:
        return [int(operand.shape[-3])] * sequences
    whole, rest = divmod(int(operand.shape[0]), longest) if longest else (0, 0)
    lengths = [longest] * whole + [rest]
    return (lengths + [0] * sequences)[: max(sequences, 1)]


# --- efficient (CUTLASS, CK) kernels: (B, S, H, D), packed in a batch of 1 --------------------------------------------


@formula(
    "aten::_efficient_attention_forward",
    "xformers::efficient_attention_forward_cutlass",
    "xformers::efficient_attention_forward_ck",
    "xformers::efficient_attention_forward_small_k",
)
def _efficient_forward(call: OperatorCall) -> OpCost:
    return forward_cost(_efficient_work(call))


@formula(
    "aten::_efficient_attention_backward",
    "xformers::efficient_attention_backward_cutlass",
    "xformers::efficient_attention_backward_ck",
    "xformers::efficient_attention_backward_small_k",
)
def _efficient_backward(call: OperatorCall) -> OpCost:
    return backward_cost(_efficient_work(call), needs_grad=needed_gradients(call))


def _efficient_work(call: OperatorCall) -> AttentionWork:
    query, key, value = (_as_bshd(operand) for operand in _operands(call))
    lengths, note = _efficient_lengths(call, query, key)
    heads = query.shape[2] * (query.shape[3] if query.dim() == 5 else 1)
    band = _efficient_band(call)
    banded = heads * sum(band.pairs(q_len, k_len) for q_len, k_len in lengths)
    bias = argument(call, "bias", "attn_bias")
    found = banded if bias is None else _biased_pairs(bias, lengths, heads, band)
    return AttentionWork(
        pairs=banded if found is None else found,
        executed_pairs=banded,
        palm_pairs=heads * _squares(lengths),
        qk_width=query.shape[-1],
        v_width=value.shape[-1],
        note=note or (UNREADABLE_MASK_NOTE if found is None else None),
    )


def _biased_pairs(bias: Tensor, lengths: Lengths, heads: int, band: Band) -> int | None:
    """Pairs that a bias leaves of equally long sequences; a bias over packed documents is not taken as a mask."""
    if len(set(lengths)) != 1 or bias.numel() == 0:
        return heads * sum(band.pairs(q_len, k_len) for q_len, k_len in lengths)
    q_len, k_len = lengths[0]
    return masked_pairs(bias, batch=len(lengths), heads=heads, q_len=q_len, k_len=k_len, band=band)


def _efficient_band(call: OperatorCall) -> Band:
    """``custom_mask_type`` 0 is none, 1 causal top-left, 2 causal bottom-right; a window keeps W keys with its own."""
    mask_type = argument(call, "custom_mask_type", default=0)
    window = argument(call, "window_size", default=0)
    if not mask_type:
        return Band()
    return Band(1 - window if window > 0 else None, 0, "top_left" if mask_type == 1 else "bottom_right")


def _efficient_lengths(call: OperatorCall, query: Tensor, key: Tensor) -> tuple[Lengths, str | None]:
    q_ends = argument(call, "cu_seqlens_q", "seqstart_q")
    k_ends = argument(call, "cu_seqlens_k", "seqstart_k", default=q_ends)
    if q_ends is None:
        return [(int(query.shape[1]), int(key.shape[1]))] * int(query.shape[0]), None
    sequences = max(0, int(q_ends.numel()) - 1)
    q_lengths = _differences(read_integers(q_ends))
    used = argument(call, "seqlen_k")  # padded keys: documents start at k_ends and are this long
    k_lengths = _differences(read_integers(k_ends)) if used is None else read_integers(used)
    note = UNREADABLE_LENGTHS_NOTE if q_lengths is None or k_lengths is None else None
    max_q = argument(call, "max_seqlen_q", default=int(query.shape[1]))
    max_k = argument(call, "max_seqlen_k", default=int(key.shape[1]))
    q_lengths = q_lengths or _longest_possible(query[0], sequences, max_q)
    k_lengths = k_lengths or _longest_possible(key[0], sequences, max_k)
    return list(zip(q_lengths, k_lengths, strict=False)), note


def _as_bshd(operand: Tensor) -> Tensor:
    """xFormers also takes (B, S, D) without a head dimension."""
    return operand.unsqueeze(2) if operand.dim() == 3 else operand


# --- cuDNN kernels: (B, H, S, D), or (T, H, D) with document ends -----------------------------------------------------


@formula("aten::_cudnn_attention_forward", "aten::_cudnn_attention_forward_no_dropout_inplace")
def _cudnn_forward(call: OperatorCall) -> OpCost:
    return forward_cost(_cudnn_work(call))


@formula("aten::_cudnn_attention_backward")
def _cudnn_backward(call: OperatorCall) -> OpCost:
    return backward_cost(_cudnn_work(call), needs_grad=needed_gradients(call))


def _cudnn_work(call: OperatorCall) -> AttentionWork:
    """cuDNN aligns a causal diagonal top-left (torch/aten/src/ATen/native/cudnn/MHA.cpp)."""
    query, key, value = _operands(call)
    is_packed = query.dim() == 3
    heads = query.shape[-2] if is_packed else query.shape[1]
    lengths, note = (
        _flash_lengths(call, query, key)
        if is_packed
        else ([(int(query.shape[2]), int(key.shape[2]))] * int(query.shape[0]), None)
    )
    band = Band(high=0 if call.get("is_causal") else None)
    banded = heads * sum(band.pairs(q_len, k_len) for q_len, k_len in lengths)
    bias = argument(call, "attn_bias")
    found = banded if bias is None else _biased_pairs(bias, lengths, heads, band)
    return AttentionWork(
        pairs=banded if found is None else found,
        executed_pairs=banded,
        palm_pairs=heads * _squares(lengths),
        qk_width=query.shape[-1],
        v_width=value.shape[-1],
        note=note or (UNREADABLE_MASK_NOTE if found is None else None),
    )


# --- flash-linear-attention's registered operators --------------------------------------------------------------------


@formula("fla::fused_k_rwkv7", "fla::fused_addcmul_rwkv7", "fla::gate_output_correction_rwkv7")
def _elementwise(call: OperatorCall) -> OpCost:
    return OpCost(0)


# --- shared -----------------------------------------------------------------------------------------------------------


def _operands(call: OperatorCall) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (argument(call, name, name[0]) for name in ("query", "key", "value"))
    return query, key, value


def _squares(lengths: Lengths) -> int:
    return sum(q_len * k_len for q_len, k_len in lengths)


def _differences(ends: list[int] | None) -> list[int] | None:
    if ends is None:
        return None
    return [end - start for start, end in itertools.pairwise(ends)]

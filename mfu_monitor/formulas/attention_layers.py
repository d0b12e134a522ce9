"""The fused inference layers: ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` as one operator each.

For T tokens of width E, queries and keys of one sequence of S_i tokens each:

- input projections ``3 * 2 T E E`` and output projection ``2 T E E``;
- attention over all heads ``2 P (E + E)`` with P attended pairs of one head (heads times head width is E);
- feed-forward ``2 * 2 T E F``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from mfu_monitor.formulas.attention_cost import UNREADABLE_MASK_NOTE, AttentionWork, argument, forward_cost
from mfu_monitor.formulas.attention_masks import attended_pairs
from mfu_monitor.formulas.cost import OpCost, OperatorCall
from mfu_monitor.formulas.nested import nested_sizes
from mfu_monitor.formulas.registry import formula

__all__: list[str] = []

_ATTENTION_MASK, _PADDING_MASK = 0, 1
"""``mask_type`` of the operators: 0 is (S, S), 1 is (B, S), 2 is (B, H, S, S)
(torch/nn/modules/activation.py, ``MultiheadAttention.merge_masks``)."""


@formula("aten::_native_multi_head_attention", "aten::_triton_multi_head_attention")
def _multi_head_attention(call: OperatorCall) -> OpCost:
    q_lengths, k_lengths = _lengths(call["query"]), _lengths(call["key"])
    return _attention_layer(call, q_lengths, k_lengths, heads=call["num_head"])


@formula("aten::_transformer_encoder_layer_fwd")
def _encoder_layer(call: OperatorCall) -> OpCost:
    lengths = _lengths(call["src"])
    attention = _attention_layer(call, lengths, lengths, heads=call["num_heads"])
    hidden_width, width = call["ffn_weight_1"].shape
    return _plus(attention, 2 * 2 * sum(lengths) * width * hidden_width)


def _attention_layer(call: OperatorCall, q_lengths: list[int], k_lengths: list[int], *, heads: int) -> OpCost:
    width = call["embed_dim"]
    work = _layer_work(q_lengths, k_lengths, heads=heads, head_width=width // heads, call=call)
    q_tokens, k_tokens = sum(q_lengths), sum(k_lengths)
    projections = 2 * width * width * (q_tokens + 2 * k_tokens + q_tokens)
    return _plus(forward_cost(work), projections)


def _layer_work(
    q_lengths: list[int], k_lengths: list[int], *, heads: int, head_width: int, call: OperatorCall
) -> AttentionWork:
    square = heads * sum(q_len * k_len for q_len, k_len in zip(q_lengths, k_lengths, strict=True))
    mask = argument(call, "mask")
    shape = (len(q_lengths), heads, max(q_lengths, default=0), max(k_lengths, default=0))
    found = square if mask is None else _attended(mask, call.get("mask_type"), shape)
    return AttentionWork(
        pairs=square if found is None else found,
        executed_pairs=square,
        palm_pairs=square,
        qk_width=head_width,
        v_width=head_width,
        note=UNREADABLE_MASK_NOTE if found is None else None,
    )


def _attended(mask: Tensor, mask_type: int | None, shape: tuple[int, int, int, int]) -> int | None:
    """Pairs that the mask leaves; here, unlike in SDPA, a boolean mask is True where it hides."""
    batch, heads, q_len, k_len = shape
    if mask_type is None and mask.dim() == 2:
        mask_type = _ATTENTION_MASK if tuple(mask.shape) == (q_len, k_len) else _PADDING_MASK
    if mask_type == _PADDING_MASK and mask.dim() == 2:
        mask = mask[:, None, None, :]
    found = attended_pairs(mask, batch=batch, heads=heads, q_len=q_len, k_len=k_len)
    if found is None or mask.is_floating_point():
        return found
    return batch * heads * q_len * k_len - found


def _lengths(operand: Any) -> list[int]:
    """Tokens of each sequence of a (B, S, E) operand, dense or nested (B; S_i, E)."""
    if operand.is_nested:
        return [tokens for tokens, _ in nested_sizes(operand)]
    return [operand.shape[1]] * operand.shape[0]


def _plus(cost: OpCost, flops: int) -> OpCost:
    """The same cost with products beside the attention, which no convention treats differently."""
    palm_flops = None if cost.palm_flops is None else cost.palm_flops + flops
    return dataclasses.replace(cost, flops=cost.flops + flops, palm_flops=palm_flops)

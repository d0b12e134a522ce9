"""flex_attention: attended pairs from the BlockMask and its ``mask_mod``; ``score_mod`` is elementwise and counts 0.

A BlockMask lists, for each block of queries, the full blocks of keys (every pair attended, ``mask_mod`` not applied)
and the partial ones (``mask_mod`` decides pair by pair). So the attended pairs are the area of the full blocks, clipped
at the sequence ends, plus the True entries of ``mask_mod`` over the partial blocks only.

What the hardware runs depends on how the call is executed:

- uncompiled (``math_attention`` and ``sdpa_dense_backward`` of ``torch/_higher_order_ops/flex_attention.py``): the full
  square, and in backward ``Q K^T`` once more: 5 products;
- compiled to the Triton templates of ``torch/_inductor/kernel/flex``: listed blocks as a whole. The backward is one
  kernel with two passes: the first computes ``Q K^T``, ``dO V^T`` and ``dQ``; the second ``K Q^T``, ``dV``, ``V dO^T``
  and ``dK``. That is 7 products, of which 2 of ``Q K^T`` and 1 of ``dO V^T`` are recomputation: ``2 P (2 Dqk + Dv)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mfu_monitor.formulas.attention_cost import AttentionWork, backward_cost, forward_cost, needed_gradients
from mfu_monitor.formulas.attention_masks import CHUNK_ELEMENTS, has_content
from mfu_monitor.formulas.cost import OpCost, OperatorCall
from mfu_monitor.formulas.registry import formula
from mfu_monitor.internals.dynamo import indexing_by_tensors

__all__ = ["FlexPairs", "flex_backward_cost", "flex_forward_cost", "flex_pairs"]

UNREADABLE_BLOCK_MASK_NOTE = (
    "a flex_attention block mask could not be read (meta or fake tensor); its call is counted as if unmasked"
)


@dataclass(frozen=True, slots=True)
class FlexPairs:
    """Query-key pairs of one flex_attention call, over all sequences and query heads."""

    attended: int
    in_blocks: int
    """Pairs of the listed blocks: what a compiled kernel computes."""


@dataclass(frozen=True, slots=True)
class _BlockMask:
    """The tuple that ``BlockMask.as_tuple()`` makes, whose middle has grown with torch's versions."""

    num_blocks: Tensor
    indices: Tensor
    full_num_blocks: Tensor | None
    full_indices: Tensor | None
    q_block: int
    k_block: int
    mask_mod: Callable[..., Tensor]

    @classmethod
    def from_tuple(cls, values: Sequence[Any]) -> _BlockMask:
        """From (q_len, k_len, four of kv, four of q, what later versions added, Q_BLOCK, KV_BLOCK, mask_mod)."""
        num_blocks, indices, full_num_blocks, full_indices = values[2:6]
        return cls(num_blocks, indices, full_num_blocks, full_indices, int(values[-3]), int(values[-2]), values[-1])


@formula("higher_order::flex_attention")
def _flex_attention(call: OperatorCall) -> OpCost:
    """As the dispatcher sees it: uncompiled, so the full square is executed."""
    return flex_forward_cost(call, dense_execution=True)


@formula("higher_order::flex_attention_backward")
def _flex_attention_backward(call: OperatorCall) -> OpCost:
    return flex_backward_cost(call, dense_execution=True)


def flex_forward_cost(call: OperatorCall, *, dense_execution: bool, pairs: FlexPairs | None = None) -> OpCost:
    """Cost of one forward.

    Args:
        call: ``query``, ``key``, ``value`` (B, H, S, D) and ``block_mask`` as the operator takes them.
        dense_execution: True uncompiled; False for a compiled kernel, which runs the listed blocks only.
        pairs: known pairs, where the call's own block mask has no contents (a traced graph); else None.
    """
    return forward_cost(_work(call, dense_execution, pairs))


def flex_backward_cost(call: OperatorCall, *, dense_execution: bool, pairs: FlexPairs | None = None) -> OpCost:
    """Cost of one backward: four products, and one (uncompiled) or three (compiled) recomputed."""
    work = _work(call, dense_execution, pairs)
    recomputed = (1, 0) if dense_execution else (2, 1)
    return backward_cost(
        work,
        needs_grad=needed_gradients(call),
        recomputed_qk_products=recomputed[0],
        recomputed_v_products=recomputed[1],
    )


def _work(call: OperatorCall, dense_execution: bool, pairs: FlexPairs | None) -> AttentionWork:
    query, key, value = call["query"], call["key"], call["value"]
    square = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
    found = pairs or flex_pairs(query, key, call["block_mask"], call.get("mask_mod_other_buffers") or ())
    counted = found or FlexPairs(square, square)
    return AttentionWork(
        pairs=counted.attended,
        executed_pairs=square if dense_execution else counted.in_blocks,
        palm_pairs=square,
        qk_width=query.shape[-1],
        v_width=value.shape[-1],
        note=UNREADABLE_BLOCK_MASK_NOTE if found is None else None,
    )


@torch.no_grad()
def flex_pairs(query: Tensor, key: Tensor, block_mask: Sequence[Any], buffers: Sequence[Any] = ()) -> FlexPairs | None:
    """Attended pairs and pairs in listed blocks; None when the block mask has no contents or cannot be evaluated.

    Args:
        query: (B, H, Sq, D); only its shape and device are used.
        key: (B or 1, Hkv, Sk, D).
        block_mask: ``BlockMask.as_tuple()``; its leading dimensions broadcast over B and H.
        buffers: tensors that ``mask_mod`` takes after ``(b, h, q_idx, kv_idx)``.

    Example:
        >>> causal = create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128, device="cpu")
        >>> flex_pairs(query, query, causal.as_tuple())  # B=1, H=2: 2 * 128 * 129 / 2 pairs
        FlexPairs(attended=16512, in_blocks=32768)
    """
    mask = _BlockMask.from_tuple(block_mask)
    if not _is_readable(mask, buffers):
        return None
    q_len, k_len = query.shape[2], key.shape[2]
    # Where the lists broadcast over sequences or heads, mask_mod is by contract the same for all of them.
    repeats = query.shape[0] * query.shape[1] // max(1, math.prod(mask.num_blocks.shape[:2]))
    full, partial = (_listed_blocks(mask, full=is_full) for is_full in (True, False))
    full_area, partial_area = (_area(blocks, mask, q_len, k_len) for blocks in (full, partial))
    try:
        attended = _attended_in(partial, mask, q_len, k_len, buffers)
    except (IndexError, RuntimeError, TypeError, ValueError):  # a user's function: a count must not raise for it
        return None
    return FlexPairs(repeats * (full_area + attended), repeats * (full_area + partial_area))


def _is_readable(mask: _BlockMask, buffers: Sequence[Any]) -> bool:
    tensors = [mask.num_blocks, mask.indices, mask.full_num_blocks, mask.full_indices, *buffers]
    return all(has_content(tensor) for tensor in tensors if isinstance(tensor, Tensor))


def _listed_blocks(mask: _BlockMask, *, full: bool) -> Tensor:
    """Rows ``(b, h, query block, key block)`` of the listed blocks of one kind."""
    num_blocks, indices = (mask.full_num_blocks, mask.full_indices) if full else (mask.num_blocks, mask.indices)
    if num_blocks is None or indices is None:
        return torch.empty(0, 4, dtype=torch.long, device=mask.num_blocks.device)
    is_listed = torch.arange(indices.shape[-1], device=indices.device) < num_blocks[..., None]
    b, h, q_block, position = is_listed.nonzero(as_tuple=True)
    return torch.stack([b, h, q_block, indices[b, h, q_block, position].long()], dim=1)


def _area(blocks: Tensor, mask: _BlockMask, q_len: int, k_len: int) -> int:
    """Pairs of the blocks, those at the ends clipped to the sequences."""
    rows = (q_len - blocks[:, 2] * mask.q_block).clamp(0, mask.q_block)
    columns = (k_len - blocks[:, 3] * mask.k_block).clamp(0, mask.k_block)
    return int((rows * columns).sum().item())


def _attended_in(blocks: Tensor, mask: _BlockMask, q_len: int, k_len: int, buffers: Sequence[Any]) -> int:
    """True entries of ``mask_mod`` over the blocks, asked strip by strip so that no temporary grows with the blocks."""
    if len(blocks) == 0 or q_len == 0 or k_len == 0:
        return 0
    height, width = min(mask.q_block, q_len), min(mask.k_block, k_len)
    strip = max(1, min(height, CHUNK_ELEMENTS // width))
    ask = _vectorised(mask.mask_mod, len(buffers))
    counts = []
    for part in _strips(blocks, mask.q_block, height, strip).split(max(1, CHUNK_ELEMENTS // (strip * width))):
        rows = part[:, 2, None] + torch.arange(strip, device=part.device)
        columns = part[:, 3, None] * mask.k_block + torch.arange(width, device=part.device)
        is_row, is_column = (rows < part[:, 4, None]) & (rows < q_len), columns < k_len
        # Positions past the ends are asked at the last one, which every buffer has, and left out afterwards.
        kept = ask(part[:, 0], part[:, 1], rows.clamp(max=q_len - 1), columns.clamp(max=k_len - 1), *buffers)
        counts.append((kept & is_row[:, :, None] & is_column[:, None, :]).sum())
    return int(torch.stack(counts).sum().item())


def _strips(blocks: Tensor, q_block: int, height: int, strip: int) -> Tensor:
    """Blocks cut into strips of rows: ``(b, h, first row, key block, end row)``."""
    per_block = -(-height // strip)
    rows = blocks.repeat_interleave(per_block, dim=0)
    first_of_block = rows[:, 2] * q_block
    first = first_of_block + torch.arange(per_block, device=blocks.device).repeat(len(blocks)) * strip
    return torch.stack([rows[:, 0], rows[:, 1], first, rows[:, 3], first_of_block + height], dim=1)


def _vectorised(mask_mod: Callable[..., Tensor], buffers: int) -> Callable[..., Tensor]:
    """``mask_mod`` of scalars as a function of strips: (n), (n), (n, rows), (n, columns) -> (n, rows, columns)."""
    unbatched = (None,) * buffers
    over_columns = torch.vmap(mask_mod, in_dims=(None, None, None, 0, *unbatched))
    over_rows = torch.vmap(over_columns, in_dims=(None, None, 0, None, *unbatched))
    over_strips = torch.vmap(over_rows, in_dims=(0, 0, 0, 0, *unbatched))

    def ask(*arguments: Any) -> Tensor:
        with indexing_by_tensors():
            kept: Tensor = over_strips(*arguments)
        return kept

    return ask

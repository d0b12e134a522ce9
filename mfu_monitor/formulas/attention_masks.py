"""Attended query-key pairs from the content of a mask, because the shapes do not hold the answer.

Contents are read on counted steps only. Reading them draws no random numbers, allocates no temporary above
``CHUNK_ELEMENTS`` elements, and waits for the device once a mask. A tensor without contents (meta, fake, or while a
CUDA graph is being captured) gives None: the pairs are unknown, and the caller counts the full square and says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from mfu_monitor.internals.tensors import is_fake

__all__ = [
    "CHUNK_ELEMENTS",
    "MASKED_BELOW",
    "attended_pairs",
    "attended_pairs_of_scores",
    "has_content",
]

CHUNK_ELEMENTS = 1 << 22
"""Elements looked at at once: 4 Mi, so a temporary of booleans takes 4 MiB whatever the mask's size."""

MASKED_BELOW = -5e3
"""Scores and additive masks at or below this hide the pair: its weight is 0 to the bit beside the scores of training.

Libraries write ``-inf``, ``finfo.min`` (-65504 for fp16), ``-1e9`` or BERT's ``-1e4`` for the same thing; half of the
last leaves room for the score that was added to it. A bias that a model means (ALiBi, relative positions) stays above;
where ALiBi reaches it, thousands of positions away, those weights are 0 to the bit as well.
"""


def has_content(tensor: Tensor) -> bool:
    """True when the elements can be read now: not meta, not fake, and no CUDA graph being captured."""
    if tensor.is_meta or is_fake(tensor):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


@torch.no_grad()
def attended_pairs(
    mask: Tensor, *, batch: int, heads: int, q_len: int, k_len: int, is_causal: bool = False, diagonal: int = 0
) -> int | None:
    """Attended pairs over all sequences and heads, read from a mask.

    Args:
        mask: boolean (True attends) or floating (added to the scores; ``-inf`` and very negative numbers mask),
            broadcastable to ``(batch, heads, q_len, k_len)``.
        batch: sequences.
        heads: query heads.
        q_len: queries.
        k_len: keys.
        is_causal: also require ``j <= i + diagonal``, as the kernel does when it is given both.
        diagonal: 0 for the top-left corner, ``k_len - q_len`` for the bottom-right one.

    Returns:
        The number of pairs, or None when the mask has no contents, or is not a mask by its type or shape.

    Example:
        >>> attended_pairs(torch.ones(4, 4, dtype=torch.bool).tril(), batch=2, heads=3, q_len=4, k_len=4)
        60
    """
    shape = (batch, heads, q_len, k_len)
    if not _is_readable_mask(mask) or not _broadcasts_to(mask.shape, shape):
        return None
    core = _without_repeats(mask.detach().expand(shape))
    if is_causal:
        core = core.expand(*core.shape[:2], q_len, k_len)
    repeats = math.prod(shape) // max(1, core.numel())
    return repeats * _count_attended(core, diagonal if is_causal else None)


@torch.no_grad()
def attended_pairs_of_scores(scores: Tensor) -> int | None:
    """Pairs that a softmax over ``scores`` attends to: the entries that no mask pushed out of reach.

    The math path of ``scaled_dot_product_attention`` runs as separate products; its scores, as they enter the softmax,
    are the only trace of the mask.

    Args:
        scores: floating, any shape, masked entries at ``-inf`` or very negative.

    Returns:
        The number of pairs, or None when the scores have no contents. NaN counts as attended: a diverged run still
        does the work.
    """
    if not scores.is_floating_point() or not has_content(scores):
        return None
    if scores.is_nested:
        return sum(attended_pairs_of_scores(part) or 0 for part in scores.unbind())
    core = _without_repeats(scores.detach())
    return scores.numel() // max(1, core.numel()) * _count_attended(core, None)


def _is_readable_mask(mask: Tensor) -> bool:
    return (mask.dtype == torch.bool or mask.is_floating_point()) and has_content(mask)


def _broadcasts_to(shape: torch.Size, target: tuple[int, ...]) -> bool:
    if len(shape) > len(target):
        return False
    return all(size in (1, wanted) for size, wanted in zip(reversed(shape), reversed(target), strict=False))


def _without_repeats(tensor: Tensor) -> Tensor:
    """The tensor with every broadcast (stride 0) dimension cut to length 1: same contents, each read once."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _count_attended(core: Tensor, diagonal: int | None) -> int:
    if core.numel() == 0:
        return 0
    counts = [
        _attended(chunk, None if diagonal is None else first_row + diagonal).sum() for chunk, first_row in _chunks(core)
    ]
    return int(torch.stack(counts).sum().item())


def _attended(chunk: Tensor, diagonal: int | None) -> Tensor:
    """Booleans of one chunk; a diagonal given makes it causal as well."""
    kept = chunk if chunk.dtype == torch.bool else ~(chunk <= MASKED_BELOW)
    if diagonal is None:
        return kept
    return kept & torch.ones(kept.shape[-2:], dtype=torch.bool, device=kept.device).tril(diagonal)


def _chunks(core: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Views of at most ``CHUNK_ELEMENTS`` elements, each with the number of its first row in its own matrix."""
    if core.dim() < 2:
        core = core.reshape(1, -1)
    slice_elements = max(1, core.numel() // core.shape[0])
    if core.dim() > 2 and slice_elements > CHUNK_ELEMENTS:
        for matrix_or_more in core:
            yield from _chunks(matrix_or_more)
        return
    step = max(1, CHUNK_ELEMENTS // slice_elements)
    for first in range(0, core.shape[0], step):
        yield core[first : first + step], first if core.dim() == 2 else 0

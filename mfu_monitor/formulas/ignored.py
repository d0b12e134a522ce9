"""Operators that count 0 FLOPs by convention, by name."""

from __future__ import annotations

import functools

import torch

__all__ = ["is_ignored"]


@functools.cache
def is_ignored(name: str) -> bool:
    """True for operators that count 0 by convention (elementwise, norms, look-ups, copies)."""
    namespace, _, bare = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), bare, None)
    return packet is not None and any(
        torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads()
    )

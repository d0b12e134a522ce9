"""Whether all ranks come to the same point, agreed through the default store: no collective, so nobody can hang."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from mfu_monitor.internals.facts import fact

__all__ = ["all_ranks_come", "decide_alone", "default_store"]

_POLL_S = 0.01


@fact(
    "torch.distributed.distributed_c10d._get_default_store",
    lost="ranks cannot agree beforehand, and making a group waits for a rank that never comes",
    decides=False,
)
def default_store() -> Any:
    """The store of the default group, in a corner of our own; None where this torch does not give it."""
    store = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore("mfu_monitor", store)  # type: ignore[attr-defined]


def all_ranks_come(store: Any, name: str, *, world_size: int, patience_s: float) -> bool:
    """True on all ranks if all of them call this before one runs out of patience; False on all others.

    The first of two events decides for everybody: the last rank arrives, or one rank gives up. ``compare_set`` lets
    only one of them be written. The store is polled, never waited on: a wait would hold its connection, which torch's
    own watchdogs use as well.

    Args:
        store: any ``torch.distributed`` store that all ranks share.
        name: of this point of the program, the same on all ranks and used once.
        world_size: ranks to wait for.
        patience_s: longest wait of this rank.

    Raises:
        RuntimeError: the store has gone, or cannot compare and set.

    Example:
        >>> all_ranks_come(dist.HashStore(), "start", world_size=1, patience_s=1.0)
        True
    """
    decision = f"{name}/decision"
    if store.check([decision]) and store.get(decision) == b"alone":
        return False
    if store.add(f"{name}/arrived", 1) == world_size:
        return _decide(store, decision, "together")
    give_up_at = time.monotonic() + patience_s
    while not store.check([decision]):
        if time.monotonic() >= give_up_at:
            return _decide(store, decision, "alone")
        time.sleep(_POLL_S)
    return bool(store.get(decision) == b"together")


def decide_alone(store: Any, name: str) -> None:
    """Give up for everybody before waiting, unless all have come already; ``all_ranks_come`` answers False then."""
    _decide(store, f"{name}/decision", "alone")


def _decide(store: Any, key: str, value: str) -> bool:
    return bool(store.compare_set(key, "", value) == b"together")

"""Ties a backward operator to the forward operator that made it, by autograd's sequence numbers and without any hook.

Inside a forward kernel the next sequence number is n, and the autograd node made for that kernel carries n - 1. In
backward the engine names the node it executes. Checked by tests on every torch version we support.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from mfu_monitor.internals.autograd_state import next_sequence_nr, sequence_nr
from mfu_monitor.internals.facts import unguarded

__all__ = ["ForwardLink", "SequenceLinks"]


@dataclass(slots=True)
class ForwardLink:
    """What backward must know of a forward operator."""

    op: str
    module_fqn: str
    outer_module_fqn: str | None
    """The module around the checkpointed region or custom function it ran in."""
    attended: Fraction | None = None
    """Share of attended pairs where the operator turned out to be a product of masked attention."""
    is_opaque: bool = False
    """Ran inside a module that a formula counts as a whole."""
    thread: int = 0


class SequenceLinks:
    """Forward operators by the sequence number of their autograd node."""

    def __init__(self) -> None:
        self._links: dict[int, list[ForwardLink]] = {}
        self._next_number = unguarded(next_sequence_nr)

    def wants_link(self) -> bool:
        """True where the operator that runs now is the first under its number, and so may have made the node."""
        thread = threading.get_ident()
        return all([known.thread != thread for known in self._links.get(self._next_number() - 1, ())])  # noqa: C419

    def add(self, link: ForwardLink) -> ForwardLink:
        """Tie ``link`` to the node of the operator that runs now; the first operator under a number made the node."""
        link.thread = threading.get_ident()
        candidates = self._links.setdefault(self._next_number() - 1, [])
        if not any(known.thread == link.thread for known in candidates):
            candidates.append(link)
        return link

    def of_node(self, node: Any) -> ForwardLink | None:
        """The forward operator of the autograd node that the engine executes now; None where it is not known."""
        candidates = None if node is None else self._links.get(sequence_nr(node))
        return _best_match(candidates, node) if candidates else None


def _best_match(candidates: list[ForwardLink], node: Any) -> ForwardLink:
    """Sequence numbers are per thread: where a device's backward thread made one too, the operator's name decides."""
    if len(candidates) == 1:
        return candidates[0]
    wanted = _letters(node.name().rpartition("::")[2])
    for link in candidates:
        if wanted.startswith(_letters(link.op.rpartition("::")[2])):
            return link
    return candidates[0]


def _letters(name: str) -> str:
    return name.replace("_", "").lower()

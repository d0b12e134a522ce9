"""Work and batches that several ranks share, found by comparing fingerprints of one step on all ranks.

Each rank sends its fingerprints in sections of a fixed size. What all ranks have sent of one step is compared on each
of them alike: equal work is one piece of model work, of which each rank reports its part, so that sums over the world
are exact integers. What the comparison cannot decide is unknown, never guessed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mfu_monitor.counting.fingerprints import NOT_SEEN, SECTION_WORDS, BatchPrint, Place, StepPrints
from mfu_monitor.counting.step_record import OpRecord, Phase, StepRecord

__all__ = ["RankPrints", "RepeatedWork", "Share", "find_shares"]

_HEAD_WORDS = 4
_UNITS_PER_SECTION = (SECTION_WORDS - _HEAD_WORDS) // 2
_MOST_QUEUED = 4
"""Steps whose fingerprints wait to be sent; later ones are not sent, so that all ranks send the same ones."""
_KEPT_STEPS = 8

_NO_PRINT = 0
_NO_BATCH = 1


@dataclass(frozen=True, slots=True)
class Share:
    """How many ranks do this piece of work, and the place of this rank among them; of no batch at all: 0 ranks."""

    ranks: int
    place: int

    def of(self, amount: int) -> int:
        """This rank's part of an amount; the remainder goes to the first ranks."""
        return amount // self.ranks + (self.place < amount % self.ranks) if self.ranks else 0


ALONE = Share(1, 0)


class Doubt:
    """In the place of a share: what ranks took contradicts itself, so no later step can settle it either."""


DOUBT = Doubt()
Verdict = Share | Doubt | None
"""None: this step does not show it."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """One entry on one rank, as it was received."""

    first: int
    rest: int
    is_flat: bool
    is_seen: bool


@dataclass(frozen=True, slots=True)
class RankPrints:
    """What one rank sent of one step."""

    batch: int
    """Fingerprint of its batch; 0 where it is not known, 1 where the step had no batch."""
    units: Mapping[int, _Unit]
    """By module, operator, shapes and number of calls, as one number."""

    @classmethod
    def of(cls, batch: int, words: Iterable[int]) -> RankPrints:
        """From pairs of integers as ``StepPrints.units`` gives them."""
        found = iter(words)
        return cls(batch, {key >> 31: _received(key, content) for key, content in zip(found, found, strict=True)})

    def reads_same_batch(self, other: RankPrints) -> bool | None:
        """Whether two ranks read one batch; None where that is not known."""
        return None if _NO_PRINT in (self.batch, other.batch) else self.batch == other.batch


def _received(key: int, content: int) -> _Unit:
    is_seen = content != NOT_SEEN
    return _Unit(key & (2**31 - 1), content >> 1, bool(content & 1), is_seen)


def find_shares(ranks: Sequence[RankPrints], rank: int) -> dict[int, Verdict]:
    """For each entry of a rank: with how many others it shares that piece of work. Pure.

    None for an entry that was not seen (compiled code), or one whose equal operands hold one value only. In doubt is

    - everything, where ranks read one batch and differ in what a product takes of it though not in its weights: noise
      drawn by each rank makes repeated work look like work of its own, and so may a batch that is split in the step;
    - a module whose forward is repeated and whose backward is not, or the other way round.

    Args:
        ranks: what all ranks sent of one step.
        rank: whose entries.
    """
    mine = ranks[rank]
    shares = {key: _share(key, unit, ranks, rank) for key, unit in mine.units.items()}
    if any(_differs_by_noise(mine, other) for place, other in enumerate(ranks) if place != rank):
        return dict.fromkeys(shares, DOUBT)
    return _without_halves(shares)


def _share(key: int, unit: _Unit, ranks: Sequence[RankPrints], rank: int) -> Share | None:
    same = [place for place, other in enumerate(ranks) if other.units.get(key) == unit]
    if not unit.is_seen or (unit.is_flat and len(same) > 1):
        return None
    return Share(len(same), same.index(rank))


def _differs_by_noise(mine: RankPrints, other: RankPrints) -> bool:
    pairs = [(key, unit, theirs) for key, unit in mine.units.items() if (theirs := other.units.get(key)) is not None]
    same_batch = mine.reads_same_batch(other)
    if same_batch is None:
        same_batch = any(unit == theirs and not unit.is_flat for _, unit, theirs in pairs)
    return same_batch and any(
        unit.rest == theirs.rest and unit.first != theirs.first and unit.rest != 0
        for key, unit, theirs in pairs
        if not _is_backward(key) and unit.is_seen and theirs.is_seen
    )


def _is_backward(key: int) -> bool:
    return bool(key >> 14 & 1)


def _without_halves(shares: dict[int, Share | None]) -> dict[int, Verdict]:
    repeated: dict[tuple[int, bool], bool] = {}
    for key, share in shares.items():
        if share is not None:
            half = (key >> 15, _is_backward(key))
            repeated[half] = repeated.get(half, False) or share.ranks > 1
    doubtful = {
        module for (module, is_backward), is_repeated in repeated.items()
        if repeated.get((module, not is_backward), is_repeated) != is_repeated
    }  # fmt: skip
    return {key: DOUBT if key >> 15 in doubtful else share for key, share in shares.items()}


@dataclass(slots=True)
class _Outgoing:
    step: int
    batch: BatchPrint | None
    has_batch: bool
    prints: StepPrints
    words: list[int] | None = None
    batch_word: int = _NO_PRINT
    sent: int = 0


class RepeatedWork:
    """What this rank sends of its counted steps, and what it has learned of work that other ranks do as well.

    Example:
        >>> repeats = RepeatedWork()
        >>> repeats.join(rank=0)
        >>> repeats.add(0, prints, batch_print(tensors), has_batch=True)
        >>> section = repeats.section()
        >>> repeats.take([section, section_of_rank_1])
        True
        >>> record = repeats.applied(record)
    """

    def __init__(self) -> None:
        self.rank: int | None = None
        """This rank; None in a world of one, where nothing is repeated."""
        self.batch: Share | None = None
        """With whom this rank shares its batches; None while that is not known."""
        self.batch_disagrees = False
        """True once one step said otherwise than another with whom batches are shared."""
        self.duplicates: tuple[int, ...] = ()
        """Ranks that do all the work that this one does, on the same batch."""
        self._queue: deque[_Outgoing] = deque()
        self._places: dict[int, dict[int, Place]] = {}
        self._partial: dict[int, tuple[int, list[int]]] = {}
        self._received: dict[int, dict[int, RankPrints]] = {}
        self._shares: dict[Place, Share | None] = {}
        self._by_kind: dict[tuple[str, Phase, str], Share | None] = {}

    def join(self, *, rank: int) -> None:
        """Training begins in a world of several ranks."""
        self.rank = rank

    def add(self, step: int, prints: StepPrints, batch: BatchPrint | None, *, has_batch: bool) -> None:
        """A step was counted; its fingerprints go out with the next sections."""
        if self.rank is not None and len(self._queue) < _MOST_QUEUED:
            self._queue.append(_Outgoing(step, batch, has_batch, prints))

    def section(self) -> list[int]:
        """The next integers to send, at most ``SECTION_WORDS``; empty while there is nothing to send."""
        if not self._queue or not self._is_read(out := self._queue[0]):
            return []
        assert out.words is not None
        start = out.sent
        part = out.words[2 * start : 2 * (start + _UNITS_PER_SECTION)]
        out.sent += len(part) // 2
        if 2 * out.sent >= len(out.words):
            self._queue.popleft()
        return [out.step + 1, out.batch_word, len(out.words) // 2, start, *part]

    def _is_read(self, out: _Outgoing) -> bool:
        if out.words is not None:
            return True
        units = out.prints.units()
        batch = None if out.batch is None else out.batch()
        if units is None or (out.batch is not None and batch is None):
            return False
        out.words = [word for unit in units.values() for word in unit]
        out.batch_word = _NO_BATCH if not out.has_batch else _NO_PRINT if batch is None else (batch >> 2) + 2
        self._places[out.step] = {key >> 31: place for place, (key, _) in units.items()}
        return True

    def take(self, sections: Sequence[Sequence[int]]) -> bool:
        """What all ranks sent; True where something was learned of it."""
        learned = False
        for rank, section in enumerate(sections):
            if section and section[0] > 0:
                self._take_one(rank, section)
        for step, found in sorted(self._received.items()):
            if len(found) == len(sections):
                del self._received[step]
                self._learn(step, [found[rank] for rank in range(len(sections))])
                learned = True
        for kept in (self._received, self._places):
            while len(kept) > _KEPT_STEPS:
                kept.pop(min(kept))
        return learned

    def _take_one(self, rank: int, section: Sequence[int]) -> None:
        step, batch, total, start = section[0] - 1, *section[1:_HEAD_WORDS]
        step_before, words = self._partial.pop(rank, (step, []))
        if start == 0 or step_before != step:
            words = []
        words.extend(section[_HEAD_WORDS : _HEAD_WORDS + 2 * min(total - start, _UNITS_PER_SECTION)])
        if len(words) < 2 * total:
            self._partial[rank] = (step, words)
        else:
            self._received.setdefault(step, {})[rank] = RankPrints.of(batch, words)

    def _learn(self, step: int, ranks: Sequence[RankPrints]) -> None:
        assert self.rank is not None
        places = self._places.pop(step, {})
        shares = find_shares(ranks, self.rank)
        for key, place in places.items():
            self._note(self._shares, place, shares[key])
            self._note(self._by_kind, place[:3], shares[key])
        self._learn_batch(ranks, shares)

    @staticmethod
    def _note(known: dict, key: object, verdict: Verdict) -> None:  # type: ignore[type-arg]
        """A doubt, or a step that says otherwise than an earlier one, leaves the entry unknown for good."""
        if verdict is not None:
            is_sure = isinstance(verdict, Share) and known.get(key, verdict) == verdict
            known[key] = verdict if is_sure else None

    def _learn_batch(self, ranks: Sequence[RankPrints], shares: Mapping[int, Verdict]) -> None:
        assert self.rank is not None
        mine = ranks[self.rank]
        if any(other.batch == _NO_PRINT for other in ranks):
            return
        same = [rank for rank, other in enumerate(ranks) if other.batch == mine.batch]
        share = Share(0, 0) if mine.batch == _NO_BATCH else Share(len(same), same.index(self.rank))
        self.batch_disagrees |= self.batch is not None and self.batch != share
        self.batch = share
        is_whole = bool(shares) and all(isinstance(s, Share) and s.ranks > 1 for s in shares.values())
        others = [rank for rank in same if rank != self.rank and share.ranks and is_whole]
        self.duplicates = tuple(r for r in others if ranks[r].units == mine.units)

    def applied(self, record: StepRecord) -> StepRecord:
        """The record with this rank's part of the work that others do as well; the rest is ``other_flops``."""
        if self.rank is None:
            return record
        shared = [(op, self._share_of(op)) for op in record.ops]
        return replace(
            record,
            ops=tuple(_part_of(op, share) for op, share in shared),
            repeats_known=all(share is not None for op, share in shared if op.totals.model_flops),
        )

    def _share_of(self, op: OpRecord) -> Share | None:
        place = (op.op, op.phase, op.module_fqn, op.precision, op.shapes)
        if place in self._shares:
            return self._shares[place]
        return self._by_kind.get(place[:3])


def _part_of(op: OpRecord, share: Share | None) -> OpRecord:
    totals = op.totals
    if share is None or share.ranks == 1 or not totals.model_flops:
        return op
    mine = share.of(totals.model_flops)
    repeated = totals.model_flops - mine
    return replace(
        op,
        totals=replace(
            totals,
            model_flops=mine,
            palm_model_flops=share.of(totals.palm_model_flops),
            other_flops=totals.other_flops + repeated,
            repeated_flops=totals.repeated_flops + repeated,
        ),
    )

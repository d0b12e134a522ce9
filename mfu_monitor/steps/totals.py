"""What the steps of a window held: tokens and FLOPs by signature, multiplied out only when the window closes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mfu_monitor.counting.step_record import StepRecord
from mfu_monitor.steps.batch import BatchCounts
from mfu_monitor.steps.size_law import PARTS, Amounts, SizeLaw, amounts_of, split_sizes

__all__ = ["SignatureEntry", "StepLedger"]

KEPT_COUNTS = 8
"""Counts of one signature that its mean is over."""
SETTLED_COUNTS = 4
"""So many equal counts in a row, and older ones that differ are dropped: the work has changed for good (activation
checkpointing switched on). In a loop that alternates this comes by chance once in eight."""

EXACT_COUNTS = 3
"""Equal counts, the third at a random step, from which the steps in between are taken to be equal as well."""
EXACT_BLIND_COUNTS = 8
"""The same where the batch says nothing of the work: no tensor in it, or none that could be read."""

MOST_WAYS = 64
"""Ways in which steps of one signature may run before the rest share one entry (a line search of any length)."""

MOST_SIGNATURES = 4096
"""Signatures remembered; beyond it those that were never counted are forgotten. About a kilobyte each."""

_HARDWARE_PARTS = PARTS[:-2]
_COUNT_FIELDS = ("tokens", "tokens_not_padding", "tokens_in_loss", "samples")
_BY_PRECISION = ("model_flops_by_precision", "hardware_flops_by_precision")


@dataclass(slots=True)
class _Use:
    """Steps of one signature in the window that is open."""

    steps: int = 0
    excluded: int = 0
    own_counts: list[BatchCounts] = field(default_factory=list)
    """Of steps whose tokens do not follow from the signature; the others hold ``SignatureEntry.counts`` each."""
    own_counts_excluded: list[BatchCounts] = field(default_factory=list)


@dataclass(slots=True)
class SignatureEntry:
    """One signature: its counts, and its steps in the open window."""

    counts: BatchCounts = field(default_factory=BatchCounts)
    """What every batch of this shape holds."""
    record: StepRecord | None = None
    whole: StepRecord | None = None
    """The same before other ranks' parts of it were taken out."""
    is_provisional: bool = False
    recent: deque[Amounts] = field(default_factory=lambda: deque(maxlen=KEPT_COUNTS))
    use: _Use = field(default_factory=_Use)
    ran: Hashable = None
    """What its first step was seen to run (its phases, the parameters that needed gradients); None before that."""
    others: dict[Hashable, SignatureEntry] = field(default_factory=dict)
    """Steps of this signature that ran otherwise: a GAN that trains its generator on every fifth batch."""
    searches: int = 0
    """Counts spent on ways of running that were seen and not counted often enough."""
    is_blind: bool = False
    """True if the batch says nothing of the work."""
    equal_counts: int = 0
    """Settled counts in a row, up to now, that were equal."""
    has_ever_varied: bool = False

    latest: SignatureEntry | None = None
    """How its latest step ran; the next one most likely runs likewise."""
    kind: Hashable = None
    """Its signature without the sizes of the batch."""
    sizes: tuple[int, ...] = ()
    elements: int = 0
    """Of all tensors of the batch."""
    law: SizeLaw | None = None
    """What counts of other sizes say of it; None before its first step, which shows how it runs."""

    @property
    def latest_equal_counts(self) -> int:
        """Equal counts of the way in which its latest step ran."""
        return (self.latest or self).equal_counts

    @property
    def label(self) -> str:
        """What is known of steps of this kind: ``"exact"``, ``"presumed"`` or ``"sampled"``."""
        by_law = "sampled" if self.law is None else self.law.label(self.sizes)
        if not self.recent or by_law == "exact":
            return by_law
        if self.has_varied:
            return "sampled"
        needed = EXACT_BLIND_COUNTS if self.is_blind else EXACT_COUNTS
        return "presumed" if self.has_ever_varied or self.equal_counts < needed else "exact"

    @property
    def is_known(self) -> bool:
        """True if a step was counted of each way in which steps of this signature were seen to run."""
        return bool(self.recent) and (not self.others or all(other.recent for other in self.others.values()))

    @property
    def is_unsettled(self) -> bool:
        """True while a count of it, however the step ran, is provisional."""
        if self.is_provisional or not self.others:
            return self.is_provisional
        return any(other.is_provisional for other in self.others.values())

    def share(self, part_of: Callable[[StepRecord], StepRecord]) -> None:
        """It was learned what of this work other ranks do as well: older counts are taken to be shared alike.

        Where they differed only the latest is kept, of which it is known.
        """
        if self.whole is None or self.record is None:
            return
        amounts = amounts_of(part := part_of(self.whole))
        kept = 1 if self.has_varied else len(self.recent)
        self.record = part
        if not self.is_provisional:
            self._teach(part, is_drawn=False)
        self.recent = deque([amounts] * kept, maxlen=KEPT_COUNTS)

    def add_record(
        self, record: StepRecord, *, is_provisional: bool, is_drawn: bool = False, whole: StepRecord | None = None
    ) -> None:
        """Take a count. A provisional one (something compiled in the step) gives way to the next.

        So does one that missed work: its mean with a whole count would be neither a count nor a bound.
        """
        if not is_provisional:
            self._teach(record, is_drawn=is_drawn)
        if self.is_provisional or (self.record is not None and self.record.is_lower_bound != record.is_lower_bound):
            self.has_ever_varied |= not self.is_provisional
            self.recent.clear()
            self.equal_counts = 0
        amounts = amounts_of(record)
        is_equal = bool(self.recent) and amounts == self.recent[-1]
        self.has_ever_varied |= bool(self.recent) and not is_equal
        self.equal_counts = 0 if is_provisional else self.equal_counts + 1 if is_equal else 1
        self.record, self.whole, self.is_provisional = record, whole or record, is_provisional
        self.recent.append(amounts)
        last = list(self.recent)[-SETTLED_COUNTS:]
        if len(last) == SETTLED_COUNTS and all(amounts == last[0] for amounts in last):
            self.recent = deque(last, maxlen=KEPT_COUNTS)

    def _teach(self, record: StepRecord, *, is_drawn: bool) -> None:
        if self.law is not None and record.repeats_known and not record.is_lower_bound:
            self.law.add(self.sizes, record, is_drawn=is_drawn)

    @property
    def has_varied(self) -> bool:
        """True if counts of this signature differ."""
        return any(amounts != self.recent[0] for amounts in self.recent)

    @property
    def spread(self) -> float | None:
        """(max - min) / mean of the model FLOPs counted; None before the first count."""
        flops = [amounts[("model_flops", "")] for amounts in self.recent]
        return (max(flops) - min(flops)) * len(flops) / sum(flops) if sum(flops) else None

    def amounts(self, steps: int) -> dict[tuple[str, str], int] | None:
        """Figures of so many steps, from the mean of the counts (exact integers where they agree) or by the law."""
        if not self.recent or (self.law is not None and self.law.label(self.sizes) == "exact"):
            predicted = None if self.law is None else self.law.amounts(self.sizes)
            return None if predicted is None else {name: steps * amount for name, amount in predicted.items()}
        names = {name for amounts in self.recent for name in amounts}
        n = len(self.recent)
        sums = {name: sum(amounts.get(name, 0) for amounts in self.recent) for name in names}
        return {name: (steps * total + n // 2) // n for name, total in sums.items()}


class StepLedger:
    """Adds up what steps held, one addition a step, for the open window and for the run.

    Example:
        >>> ledger = StepLedger()
        >>> entry = ledger.entry("signature", BatchCounts(tokens=16, samples=2))
        >>> entry.add_record(record, is_provisional=False)
        >>> ledger.add_step(entry, entry.counts, is_excluded=False)
        >>> ledger.take_window()["tokens"]
        16
    """

    def __init__(self) -> None:
        self.entries: dict[Hashable, SignatureEntry] = {}
        self._laws: dict[Hashable, dict[Hashable, SizeLaw]] = {}
        self._touched: list[SignatureEntry] = []
        self._optimizer_steps: int | None = 0
        self._excluded_optimizer_steps = 0
        self._totals: dict[str, int | None] = dict.fromkeys(_TOTALS, 0)
        self.window_record: StepRecord | None = None
        """Of the signature that most model FLOPs of the window taken last belong to; None where none was counted."""

    def entry(self, signature: Hashable, counts: BatchCounts, *, is_blind: bool = False) -> SignatureEntry:
        """The entry of a signature, made on first sight."""
        found = self.entries.get(signature)
        if found is None:
            kind, sizes, elements = split_sizes(signature)
            found = SignatureEntry(counts=counts, is_blind=is_blind, kind=kind, sizes=sizes, elements=elements)
            self.entries[signature] = found
        return found

    def laws(self, entry: SignatureEntry) -> list[SizeLaw]:
        """The laws of the ways in which steps like this one were seen to run, whatever their sizes."""
        return list(self._laws.get(entry.kind, {}).values())

    def _law(self, kind: Hashable, ran: Hashable) -> SizeLaw:
        of_kind = self._laws.setdefault(kind, {})
        if ran not in of_kind and len(of_kind) >= MOST_WAYS:
            ran = "rest"
        return of_kind.setdefault(ran, SizeLaw(is_ended=ran == "rest"))

    def as_ran(self, entry: SignatureEntry, signature: Hashable, ran: Hashable) -> SignatureEntry:
        """The entry of a step that has ended: what it ran is known only now, and may not be what the batch suggested.

        Args:
            entry: of the signature that the step began with.
            signature: that signature.
            ran: anything hashable that is seen of the step without counting it.
        """
        if entry.ran is None:
            entry.ran, entry.law = ran, self._law(entry.kind, ran)
        entry.latest = entry
        if entry.ran == ran:
            return entry
        if ran not in entry.others and len(entry.others) >= MOST_WAYS:
            ran = "rest"
        if ran not in entry.others:
            other = self.entry((signature, ran), entry.counts, is_blind=entry.is_blind or ran == "rest")
            other.law, other.sizes = self._law(entry.kind, ran), entry.sizes
            entry.others[ran] = other
        entry.latest = entry.others[ran]
        return entry.latest

    def add_step(
        self, entry: SignatureEntry, counts: BatchCounts, *, is_excluded: bool, optimizer_step: bool | None = None
    ) -> None:
        """One training batch has ended; an excluded one is in the run's totals and in no window."""
        use = entry.use
        if not (use.steps or use.excluded):
            self._touched.append(entry)
        if is_excluded:
            use.excluded += 1
        else:
            use.steps += 1
        if counts is not entry.counts:
            (use.own_counts_excluded if is_excluded else use.own_counts).append(counts)
        self._add_optimizer_step(optimizer_step, is_excluded)

    def _add_optimizer_step(self, optimizer_step: bool | None, is_excluded: bool) -> None:
        if optimizer_step is None:
            self._optimizer_steps = None
        elif is_excluded:
            self._excluded_optimizer_steps += optimizer_step
        elif self._optimizer_steps is not None:
            self._optimizer_steps += optimizer_step

    @property
    def window_steps(self) -> int:
        """Steps since the last window that are in it."""
        return sum(entry.use.steps for entry in self._touched)

    def take_window(self) -> dict[str, Any]:
        """Close the window: its fields of ``StepWindow`` that are not time. The next one starts empty."""
        included = [(entry, entry.use.steps, entry.use.own_counts) for entry in self._touched if entry.use.steps]
        fields = {
            **self._held(included),
            "optimizer_steps": self._optimizer_steps,
            "repeats_known": all(entry.record is None or entry.record.repeats_known for entry, _, _ in included),
            "is_lower_bound": any(self._is_lower_bound(entry) for entry, _, _ in included),
            "is_sampled": any(entry.label == "sampled" for entry, _, _ in included),
            "counts_label": max((entry.label for entry, _, _ in included), key=_LABELS.index, default=None),
            "flops_spread": max((entry.spread or 0.0 for entry, _, _ in included if entry.recent), default=None),
        }
        self._totals = self.totals
        self.window_record = _record_of(included)
        for entry in self._touched:
            entry.use = _Use()
        self._touched = []
        self._optimizer_steps, self._excluded_optimizer_steps = 0, 0
        self._forget_uncounted()
        return fields

    def _is_lower_bound(self, entry: SignatureEntry) -> bool:
        # An estimate is one wherever a count that it was made from is.
        counted = [entry] if entry.recent else self.entries.values() if entry.label == "sampled" else []
        return any(other.record is not None and other.record.is_lower_bound for other in counted)

    def _forget_uncounted(self) -> None:
        # Batches of ever new lengths: a signature that was never counted holds nothing worth its memory.
        if len(self.entries) > MOST_SIGNATURES:
            self.entries = {signature: entry for signature, entry in self.entries.items() if entry.recent}

    @property
    def totals(self) -> dict[str, int | None]:
        """The run's sums over all training batches, excluded ones too; None where one of them is not known."""
        uses = [
            (entry, entry.use.steps + entry.use.excluded, entry.use.own_counts + entry.use.own_counts_excluded)
            for entry in self._touched
        ]
        optimizer_steps = self._optimizer_steps
        new: dict[str, Any] = {
            **self._held(uses),
            "steps": sum(steps for _, steps, _ in uses),
            "optimizer_steps": None if optimizer_steps is None else optimizer_steps + self._excluded_optimizer_steps,
        }
        return {name: _plus(old, new[name]) for name, old in self._totals.items()} if uses else dict(self._totals)

    def load_totals(self, totals: Mapping[str, int | None]) -> None:
        """Go on from the sums of an earlier run."""
        self._totals = {name: totals.get(name, 0) for name in _TOTALS}

    def _held(self, uses: list[tuple[SignatureEntry, int, list[BatchCounts]]]) -> dict[str, Any]:
        counts = {
            name: _sum_known(part for entry, steps, own in uses for part in _parts_of(name, entry, steps, own))
            for name in _COUNT_FIELDS
        }
        return {**counts, **self._flops(uses)}

    def _flops(self, uses: list[tuple[SignatureEntry, int, list[BatchCounts]]]) -> dict[str, Any]:
        sums: dict[tuple[str, str], int] = {}
        counted: list[SignatureEntry] | None = None
        for entry, steps, own in uses:
            amounts = entry.amounts(steps)
            if amounts is None:
                counted = counted or [other for other in self.entries.values() if other.recent]
                amounts = _estimate(counted, entry, steps, own)
            if amounts is None:
                return dict.fromkeys((*PARTS, "hardware_flops"))
            for name, amount in amounts.items():
                sums[name] = sums.get(name, 0) + amount
        if not uses:
            return dict.fromkeys((*PARTS, "hardware_flops"))
        return _window_fields(sums)


def _record_of(uses: Iterable[tuple[SignatureEntry, int, list[BatchCounts]]]) -> StepRecord | None:
    weights = [(entry.record.model_flops * steps, entry.record) for entry, steps, _ in uses if entry.record is not None]
    return max(weights, key=lambda weight: weight[0])[1] if weights else None


_LABELS = ("exact", "presumed", "sampled")
"""From the best to the worst."""
_TOTALS = ("steps", "optimizer_steps", *_COUNT_FIELDS, *PARTS, "hardware_flops")


def _parts_of(name: str, entry: SignatureEntry, steps: int, own: list[BatchCounts]) -> Iterable[int | None]:
    of_signature = steps - len(own)
    if of_signature:
        value = getattr(entry.counts, name)
        yield None if value is None else value * of_signature
    for counts in own:
        yield getattr(counts, name)


def _sum_known(values: Iterable[int | None]) -> int | None:
    """The sum, or None if nothing or something unknown is in it."""
    known = list(values)
    return sum(v for v in known if v is not None) if known and None not in known else None


def _estimate(
    counted: Sequence[SignatureEntry], entry: SignatureEntry, steps: int, own: list[BatchCounts]
) -> dict[tuple[str, str], int] | None:
    """Figures of a signature that was never counted, by the counted ones' FLOPs per token, element, sample or step."""
    counted = [other for other in counted if other.kind == entry.kind] or counted
    amounts = [amounts for other in counted if (amounts := other.amounts(1)) is not None]
    mine, theirs = _tokens_or_samples("tokens", counted, entry, steps, own)
    if mine is None and counted and counted[0].kind == entry.kind:
        mine, theirs = steps * entry.elements, sum(other.elements for other in counted)
    if not (mine and theirs):
        mine, theirs = _tokens_or_samples("samples", counted, entry, steps, own)
    if mine is not None and theirs:
        return _scaled_sum(amounts, mine, theirs)
    return _scaled_sum(amounts, steps, len(counted)) if counted else None


def _tokens_or_samples(
    name: str, counted: Sequence[SignatureEntry], entry: SignatureEntry, steps: int, own: list[BatchCounts]
) -> tuple[int | None, int | None]:
    mine = _sum_known(_parts_of(name, entry, steps, own))
    theirs = _sum_known(getattr(other.counts, name) for other in counted)
    return (mine, theirs) if theirs else (None, None)


def _plus(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b


def _scaled_sum(
    parts: list[dict[tuple[str, str], int]], numerator: int, denominator: int
) -> dict[tuple[str, str], int]:
    names = {name for part in parts for name in part}
    sums = {name: sum(part.get(name, 0) for part in parts) for name in names}
    return {name: (total * numerator + denominator // 2) // denominator for name, total in sums.items()}


def _window_fields(sums: Mapping[tuple[str, str], int]) -> dict[str, Any]:
    fields: dict[str, Any] = {name: sums.get((name, ""), 0) for name in PARTS}
    # Added up here, so that the identity of the parts holds after rounding means, too.
    fields["hardware_flops"] = sum(fields[name] for name in _HARDWARE_PARTS)
    for group in _BY_PRECISION:
        fields[group] = {precision: v for (name, precision), v in sorted(sums.items()) if name == group}
    return fields

"""FLOPs of batch sizes that were never counted: the law that the counts of other sizes follow, in exact fractions.

FLOPs of a matmul, a convolution or an attention call are polynomials in the sizes of the batch: ``B * S`` in a linear
layer, ``B * S * (S + 1) / 2`` in causal attention, ``B * (H * H / 256 + 1) ** 2`` in a vision transformer. Each row of
a record (operator, phase, module, precision) is fitted by itself, so its polynomial has one to three terms; all
arithmetic is exact, and a law that is off by one FLOP anywhere is none.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from mfu_monitor.counting.step_record import FlopTotals, OpRecord, StepRecord

__all__ = ["PARTS", "Amounts", "SizeLaw", "amounts_of", "split_sizes"]

PARTS = (
    "model_flops",
    "recompute_flops",
    "kernel_recompute_flops",
    "optimizer_flops",
    "other_flops",
    "palm_model_flops",
    "repeated_flops",
)
"""The figures that a window adds up."""

Amounts = Mapping[tuple[str, str], int]
"""Figures by (field of ``StepWindow``, precision or ``""``)."""

TRUSTED_PREDICTIONS = 2
"""Counts that a law has to predict, none of which it was made from, before it stands for a count."""
MOST_POINTS = 8
"""Counts without a law after which none is looked for: the FLOPs do not follow from the sizes."""
_LEAST_POINTS = 3
_MOST_VARIABLES = 3
"""Sizes that vary on their own: batch, source and target length; batch, height and width."""
_LARGEST_EXPONENT = 4
"""Attention over patches of a square image: the fourth power of its side."""

_Sizes = tuple[int, ...]
_Polynomial = dict[_Sizes, Fraction]
"""Coefficients by the exponents of the variables."""


def split_sizes(signature: Hashable) -> tuple[Hashable, _Sizes, int]:
    """A batch's signature without the sizes of its tensors, these sizes in order, and the elements of all tensors.

    Packed (nested) tensors keep theirs: how their documents are cut is in the contents.

    Example:
        >>> split_sizes(batch_signature((torch.zeros(2, 8), torch.zeros(2))))[1:]
        ((2, 8, 2), 18)
    """
    shapes: list[_Sizes] = []
    kind = _without_sizes(signature, shapes)
    return kind, tuple(itertools.chain(*shapes)), sum(map(math.prod, shapes))


def _without_sizes(signature: Hashable, shapes: list[_Sizes]) -> Hashable:
    if not isinstance(signature, tuple) or signature[:1] == ("nested",):
        return signature
    shape = signature[0] if signature else None
    # A tensor's is (shape, dtype, requires_grad), an array's (shape, dtype).
    if isinstance(shape, tuple) and len(signature) > 1 and all(type(size) is int for size in shape):
        shapes.append(shape)
        return (len(shape), *signature[1:])
    return tuple([_without_sizes(part, shapes) for part in signature])


def amounts_of(record: StepRecord) -> Amounts:
    """A record's figures as a window adds them up."""
    totals, by_dtype = record.totals, record.by_dtype()
    return {
        **{(name, ""): getattr(totals, name) for name in PARTS},
        **{("model_flops_by_precision", p): t.model_flops for p, t in by_dtype.items()},
        **{("hardware_flops_by_precision", p): t.hardware_flops for p, t in by_dtype.items()},
    }


class _Bound:
    """The range of one size over the counts, and the step in which its values lie."""

    def __init__(self, sizes: _Sizes) -> None:
        self.least = self.most = sizes[0]
        self.step = 0
        for size in sizes:
            self.add(size)

    def add(self, size: int) -> None:
        self.step = math.gcd(self.step, size - self.least)
        self.least, self.most = min(self.least, size), max(self.most, size)

    def holds(self, size: int) -> bool:
        return self.least <= size <= self.most and (size - self.least) % (self.step or 1) == 0


@dataclass(slots=True)
class SizeLaw:
    """The law of one kind of step, learned from its counts; proved by counts that it predicted.

    It speaks only for sizes between those that were counted and in step with them (if all counted heights were
    multiples of 32, it says nothing of 225). A sliding window, padding to a multiple or the capacity of experts are not
    polynomials, and show only where they are met. One wrong prediction ends it for good.

    Example:
        >>> law.add((8, 128), record, is_drawn=False)
        >>> law.label((8, 96)), law.amounts((8, 96))
        ('exact', {('model_flops', ''): 4718592, ...})
    """

    is_ended: bool = False
    """True once it has been wrong, or none was found: the FLOPs of this kind do not follow from the sizes."""
    _points: dict[_Sizes, StepRecord] = field(default_factory=dict)
    """What it was made from, until it is trusted."""
    _bounds: list[_Bound] = field(default_factory=list)
    """Of each size, over all counts that it was right of."""
    _groups: tuple[tuple[int, ...], ...] = ()
    """Positions that had the same size in every count, a group for each variable; the rest did not vary."""
    _polynomials: dict[tuple[str, str], _Polynomial] | None = None
    _predictions: int = 0
    _is_confirmed: bool = False

    @property
    def is_trusted(self) -> bool:
        """True if it has predicted enough counts."""
        return self._polynomials is not None and self._predictions >= TRUSTED_PREDICTIONS

    def equal_counts(self, sizes: _Sizes) -> int:
        """How many equal counts of these sizes it stands for: 0, 2, or 3 where a step drawn at random confirmed it."""
        if not self.is_trusted or self._values(sizes) is None:
            return 0
        if not all(bound.holds(size) for bound, size in zip(self._bounds, sizes, strict=True)):
            return 0
        return 3 if self._is_confirmed else 2

    def label(self, sizes: _Sizes) -> str:
        """What is known of a step of these sizes: ``"exact"``, ``"presumed"`` or ``"sampled"``."""
        if not self.is_trusted or self._values(sizes) is None:
            return "sampled"
        return "exact" if self.equal_counts(sizes) == 3 else "presumed"

    def amounts(self, sizes: _Sizes) -> Amounts | None:
        """The figures of one step of these sizes; None where the law cannot say."""
        return self._predict(sizes) if self.is_trusted else None

    def add(self, sizes: _Sizes, record: StepRecord, *, is_drawn: bool) -> None:
        """Take a settled count.

        Args:
            sizes: of the batch.
            record: that count.
            is_drawn: whether the step was drawn at random, and not counted as the first of its sizes.
        """
        if self.is_ended or not all(sizes):
            return
        actual, predicted, before = amounts_of(record), self._predict(sizes), self._points.get(sizes)
        if predicted is None:
            if before is not None and amounts_of(before) != actual:
                self._end()
            elif not self.is_trusted:
                self._learn(sizes, record)
        elif predicted == actual:
            self._add_right(sizes, record, is_drawn=is_drawn)
        elif self.is_trusted or before is not None:
            self._end()
        else:
            self._learn(sizes, record)

    def _add_right(self, sizes: _Sizes, record: StepRecord, *, is_drawn: bool) -> None:
        self._is_confirmed |= self.is_trusted and is_drawn
        if sizes in self._points:
            return
        self._predictions += 1
        for bound, size in zip(self._bounds, sizes, strict=True):
            bound.add(size)
        # A law that is trusted is not made anew, and a record of a large model has thousands of rows.
        self._points = {} if self.is_trusted else {**self._points, sizes: record}

    def _learn(self, sizes: _Sizes, record: StepRecord) -> None:
        self._points[sizes] = record
        self._predictions = 0
        self._bounds = [_Bound(column) for column in zip(*self._points, strict=True)]
        self._groups = _groups(list(self._points))
        self._polynomials = self._fit() if len(self._points) >= _LEAST_POINTS else None
        if self._polynomials is None and len(self._points) >= MOST_POINTS:
            self._end()

    def _end(self) -> None:
        self.is_ended = True
        self._points, self._polynomials = {}, None

    def _fit(self) -> dict[tuple[str, str], _Polynomial] | None:
        if not 1 <= len(self._groups) <= _MOST_VARIABLES:
            return None
        points = [values for sizes in self._points if (values := self._values(sizes)) is not None]
        fitter = _Fitter(points)
        polynomials: dict[tuple[str, str], _Polynomial] = {}
        for part, rows in _rows_by_part(list(self._points.values())).items():
            total = polynomials.setdefault(part, {})
            for flops, times in rows.items():
                law = fitter.simplest(flops)
                if law is None:
                    return None
                for exponents, coefficient in law.items():
                    total[exponents] = total.get(exponents, Fraction(0)) + times * coefficient
        return polynomials

    def _values(self, sizes: _Sizes) -> _Sizes | None:
        """The variables' values; None where what never varied differs, or what was always equal does not."""
        if len(sizes) != len(self._bounds):
            return None
        leads = {position: group[0] for group in self._groups for position in group}
        for position, size in enumerate(sizes):
            lead = leads.get(position)
            if size != (self._bounds[position].least if lead is None else sizes[lead]):
                return None
        return tuple([sizes[group[0]] for group in self._groups])

    def _predict(self, sizes: _Sizes) -> Amounts | None:
        values = self._values(sizes)
        if self._polynomials is None or values is None:
            return None
        amounts: dict[tuple[str, str], int] = {}
        for part, polynomial in self._polynomials.items():
            amount = sum((c * _monomial(values, exponents) for exponents, c in polynomial.items()), Fraction(0))
            if amount.denominator != 1 or amount < 0:
                return None
            amounts[part] = int(amount)
        return amounts


def _groups(points: Sequence[_Sizes]) -> tuple[tuple[int, ...], ...]:
    columns: dict[_Sizes, list[int]] = {}
    for position, column in enumerate(zip(*points, strict=True)):
        if len(set(column)) > 1:
            columns.setdefault(column, []).append(position)
    return tuple(tuple(group) for group in columns.values())


def _rows_by_part(records: Sequence[StepRecord]) -> dict[tuple[str, str], Counter[_Sizes]]:
    """For each figure the FLOPs of its rows over the counts, and how many rows have them: layers are alike."""
    by_row: dict[tuple[tuple[str, str], Hashable], list[int]] = {}
    for i, rows in enumerate(_rows(records)):
        for row, op in rows:
            for part, flops in _parts_of_row(op.precision, op.totals):
                by_row.setdefault((part, row), [0] * len(records))[i] += flops
    parts: dict[tuple[str, str], Counter[_Sizes]] = {key: Counter() for r in records for key in amounts_of(r)}
    for (part, _), flops_of_row in by_row.items():
        if any(flops_of_row):
            parts[part][tuple(flops_of_row)] += 1
    return parts


def _rows(records: Sequence[StepRecord]) -> list[list[tuple[Hashable, OpRecord]]]:
    """Operators with the name of their row; those of one module in the order in which they first ran.

    That order tells self-attention from cross-attention in one block. Where calls with equal shapes have merged at some
    sizes (as many queries as keys), all calls of the module are one row.
    """
    grouped: list[dict[Hashable, list[OpRecord]]] = []
    for record in records:
        groups: dict[Hashable, list[OpRecord]] = {}
        for op in record.ops:
            groups.setdefault((op.op, op.phase, op.module_fqn, op.precision), []).append(op)
        grouped.append(groups)
    numbers: dict[Hashable, set[int]] = {}
    for groups in grouped:
        for key, ops in groups.items():
            numbers.setdefault(key, set()).add(len(ops))
    return [
        [((key, i if len(numbers[key]) == 1 else None), op) for key, ops in groups.items() for i, op in enumerate(ops)]
        for groups in grouped
    ]


def _parts_of_row(precision: str | None, totals: FlopTotals) -> list[tuple[tuple[str, str], int]]:
    parts = [((name, ""), getattr(totals, name)) for name in PARTS]
    if precision is not None and totals.hardware_flops:
        parts.append((("model_flops_by_precision", precision), totals.model_flops))
        parts.append((("hardware_flops_by_precision", precision), totals.hardware_flops))
    return parts


def _monomial(values: _Sizes, exponents: _Sizes) -> int:
    return math.prod(v**e for v, e in zip(values, exponents, strict=True))


class _Fitter:
    """Finds the polynomial that FLOPs follow over the same points, row after row."""

    def __init__(self, points: Sequence[_Sizes]) -> None:
        variables = len(points[0])

        def over_points(largest: int) -> dict[_Sizes, _Sizes]:
            exponents = itertools.product(range(largest + 1), repeat=variables)
            return {e: tuple([_monomial(point, e) for point in points]) for e in exponents}

        self._terms = over_points(_LARGEST_EXPONENT)
        self._factors = over_points(2)
        # A product of sizes that repeats at all points but a few shows too little.
        self._inners = {e: xs for e, xs in self._factors.items() if 0 < sum(e) <= 2 and len(set(xs)) >= _LEAST_POINTS}
        self._known: dict[_Sizes, _Polynomial | None] = {}

    def simplest(self, flops: _Sizes) -> _Polynomial | None:
        """The one polynomial with the fewest terms through all points; None without, or where several have so few."""
        if flops not in self._known:
            found = self._one_term(flops) or self._more_terms(flops)
            fewest = min(map(len, found), default=0)
            simple = [polynomial for polynomial in found if len(polynomial) == fewest]
            self._known[flops] = simple[0] if simple and all(other == simple[0] for other in simple) else None
        return self._known[flops]

    def _one_term(self, flops: _Sizes) -> list[_Polynomial]:
        return [
            {exponents: Fraction(flops[0], xs[0])}
            for exponents, xs in self._terms.items()
            if all(f * xs[0] == flops[0] * x for f, x in zip(flops, xs, strict=True))
        ]

    def _more_terms(self, flops: _Sizes) -> list[_Polynomial]:
        """All ``factor * (c0 + c1 * inner + c2 * inner**2)`` through all points, which are more than it needs."""
        found: list[_Polynomial] = []
        for factor, divisors in self._factors.items():
            quotients = [Fraction(f, d) for f, d in zip(flops, divisors, strict=True)]
            for inner, xs in self._inners.items():
                terms = {
                    tuple([a + power * b for a, b in zip(factor, inner, strict=True)]): c
                    for power, c in enumerate(_through(xs, quotients))
                    if c
                }
                if len(terms) > 1:
                    found.append(terms)
        return found


def _through(xs: Sequence[int], ys: Sequence[Fraction]) -> list[Fraction]:
    """Coefficients, lowest first, of the quadratic through all points; empty if there is none or too few show it."""
    points = dict(zip(xs, ys, strict=True))
    if any(points[x] != y for x, y in zip(xs, ys, strict=True)):
        return []
    (x0, y0), (x1, y1), (x2, y2), *others = points.items()
    slope = (y1 - y0) / (x1 - x0)
    bend = ((y2 - y1) / (x2 - x1) - slope) / (x2 - x0)
    if any(y0 + (x - x0) * (slope + (x - x1) * bend) != y for x, y in others) or (bend and not others):
        return []
    return [y0 - slope * x0 + bend * x0 * x1, slope - bend * (x0 + x1), bend]

"""A cause as a hypothesis: what it predicts, and whether figure and independent evidence agree with it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mfu_monitor.checks.case import PLAUSIBLE_MFU, Case, in_band
from mfu_monitor.checks.diagnosis import Diagnosis

__all__ = ["TOLERANCE", "Hypothesis", "judge", "ranked"]

TOLERANCE = 0.03
"""How near a figure must come to a prediction. Users' formulas leave out biases, norms and heads, about a hundredth;
the round ratios that must be told apart (1/3, 1/2, 4/3, 2) lie much further from each other."""

PROVEN, DIRECT, EXACT, RATIO = 4, 3, 2, 1
"""Strength: two inputs are off alike; the wrong input itself was seen; a prediction of this run's own came true; a
round ratio to our count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """One cause, tried on one figure. ``observed`` is the figure in question, ``expected`` what it should be."""

    code: str
    quantity: str
    """What the figure is, with its unit: ``"FLOPs per batch"``."""
    observed: float
    predicted: float
    expected: float
    corrected_mfu: float | None
    """The reading if this cause is put right; None where there is no reading to correct."""
    witness: str | None
    """The evidence beside the ratio, in words; None if there is none: then at most "consistent with"."""
    cause: str
    fix: str
    figures: Mapping[str, object] = field(default_factory=dict)
    strength: int = RATIO
    tolerance: float = TOLERANCE
    highest_mfu: float = PLAUSIBLE_MFU[1]

    @property
    def distance(self) -> float:
        """How far the figure is from the prediction, as the logarithm of their ratio."""
        return abs(math.log(self.observed / self.predicted))

    @property
    def fits(self) -> bool:
        """The prediction came true, the expectation did not, and the corrected reading is plausible."""
        if not all(value > 0 and math.isfinite(value) for value in (self.observed, self.predicted, self.expected)):
            return False
        is_near = math.isclose(self.observed, self.predicted, rel_tol=self.tolerance)
        is_faulty = not math.isclose(self.observed, self.expected, rel_tol=self.tolerance)
        return is_near and is_faulty and in_band(self.corrected_mfu, self.highest_mfu)


def judge(case: Case, hypothesis: Hypothesis) -> Diagnosis | None:
    """Named with a witness; "consistent with" without one, and then only where a figure needs an explanation."""
    if not hypothesis.fits:
        return None
    if hypothesis.witness is None:
        is_wanted = case.is_impossible or case.evidence.reported_mfu is not None
        return _diagnosis(hypothesis, "note") if is_wanted else None
    return _diagnosis(hypothesis, "error" if case.is_impossible and _lowers(case, hypothesis) else "warning")


def _lowers(case: Case, hypothesis: Hypothesis) -> bool:
    """True when putting it right lowers the reading: only then it explains one that is too high."""
    mfu = case.bounded_mfu
    return hypothesis.corrected_mfu is not None and mfu is not None and hypothesis.corrected_mfu < mfu


def _diagnosis(hypothesis: Hypothesis, severity: str) -> Diagnosis:
    h = hypothesis
    corrected = "" if h.corrected_mfu is None else f" Put right, MFU is {100 * h.corrected_mfu:.3g}%."
    cause = h.cause if h.witness else f"Consistent with this, and not proven: {h.cause[0].lower()}{h.cause[1:]}"
    figures = {
        "observed": h.observed,
        "predicted": h.predicted,
        "expected": h.expected,
        "corrected_mfu": h.corrected_mfu,
        "witness": h.witness,
        "strength": h.strength if h.witness else 0,
        "distance": h.distance,
    }
    return Diagnosis(
        code=h.code,
        severity=severity,
        message=f"{h.quantity}: {h.observed:,.5g} seen, {h.expected:,.5g} expected; this fault predicts "
        f"{h.predicted:,.5g}." + (f" Evidence: {h.witness}." if h.witness else "") + corrected,
        evidence={**figures, **h.figures},
        likely_cause=cause,
        fix=h.fix,
    )


def ranked(diagnoses: Iterable[Diagnosis]) -> list[Diagnosis]:
    """The best supported first: by strength, then by how near the prediction came. One diagnosis a code."""
    best: dict[str, Diagnosis] = {}
    for diagnosis in sorted(diagnoses, key=_order):
        best.setdefault(diagnosis.code, diagnosis)
    return list(best.values())


def _order(diagnosis: Diagnosis) -> tuple[float, float]:
    strength, distance = diagnosis.evidence.get("strength", DIRECT), diagnosis.evidence.get("distance", 0.0)
    assert isinstance(strength, int | float)
    assert isinstance(distance, int | float)
    # To a thousandth: what lies nearer than the noise of a count is equal, and the order of the causes decides.
    return (-strength, round(distance, 3))

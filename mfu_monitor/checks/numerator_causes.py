"""Causes that lie in the FLOPs: a user's own figure, or another tool's MFU, against our count of the same steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from mfu_monitor.checks.case import HARD_LIMIT, Case, finite
from mfu_monitor.checks.diagnosis import Diagnosis
from mfu_monitor.checks.hypothesis import EXACT, RATIO, TOLERANCE, Hypothesis, judge

__all__ = [
    "Claim",
    "causal_counted_dense",
    "claims",
    "double_counted",
    "forward_only",
    "macs_as_flops",
    "mfu_by_our_count",
    "palm_ratio",
    "recompute_in_mfu",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A figure under question and what our count says it should be, in the same unit."""

    quantity: str
    observed: float
    expected: float
    corrected_mfu: float | None
    is_ratio_only: bool
    """True for another tool's MFU: any of its inputs may be wrong, so a round ratio proves nothing."""

    def hypothesis(
        self, code: str, factor: float, *, cause: str, fix: str, witness: str | None, strength: int = RATIO
    ) -> Hypothesis:
        """The claim is ``factor`` times what it should be."""
        return Hypothesis(
            code=code,
            quantity=self.quantity,
            observed=self.observed,
            predicted=self.expected * factor,
            expected=self.expected,
            corrected_mfu=self.corrected_mfu,
            witness=witness,
            cause=cause,
            fix=fix,
            strength=strength,
            figures={"factor": factor},
        )


def claims(case: Case) -> Iterator[Claim]:
    """Every figure that can be held against our count: the user's FLOPs, the window's, another tool's MFU."""
    counted, user = case.counted_flops_per_batch, case.evidence.flops_per_batch
    if user and counted:
        yield Claim(
            quantity="flops_per_batch, in FLOPs",
            observed=user,
            expected=counted,
            corrected_mfu=mfu_by_our_count(case, user, counted),
            is_ratio_only=False,
        )
    else:
        yield from _window_against_record(case)
        yield from _reading_against_window(case)
    reported, ours = case.evidence.reported_mfu, case.bounded_mfu
    if reported and ours and ours > 0:
        yield Claim(
            quantity="reported MFU, as a fraction",
            observed=reported,
            expected=ours,
            corrected_mfu=ours,
            is_ratio_only=True,
        )


def mfu_by_our_count(case: Case, user: float, counted: float) -> float | None:
    """The reading with our count. It may hold the user's figure already (honoured if asked), or ours."""
    mfu, exact, computed, window = case.bounded_mfu, case.exact_mfu, case.computed_mfu, case.window_flops_per_batch
    if mfu is None or exact is None:
        return None
    if case.evidence.flops_per_batch_is_used or window is None or computed is None:
        return mfu * counted / user
    holds_user = _near(exact, computed * user / counted)  # our count in the window, the user's in the reading
    return mfu * counted / user if holds_user else mfu


def _near(a: float, b: float) -> bool:
    return abs(a / b - 1) <= TOLERANCE / 2 if b else False


def _reading_against_window(case: Case) -> Iterator[Claim]:
    """A reading that its own window contradicts: another numerator was used."""
    mfu, computed = case.exact_mfu, case.computed_mfu
    if mfu and mfu > 0 and computed and case.is_homogeneous and case.world_size == 1:
        yield Claim(
            quantity="MFU of the reading, as a fraction",
            observed=mfu,
            expected=computed,
            corrected_mfu=computed,
            is_ratio_only=False,
        )


def _window_against_record(case: Case) -> Iterator[Claim]:
    """An impossible window whose FLOPs per batch are not those of the counted step."""
    window, mfu = case.window_flops_per_batch, case.bounded_mfu
    record = float(case.record.model_flops) if case.record is not None else 0.0
    # Batches of other shapes have other FLOPs, so only an impossible reading makes this a question.
    if window and record and mfu is not None and case.is_impossible and not case.window.is_sampled:
        yield Claim(
            quantity="model FLOPs per batch of the window",
            observed=window,
            expected=record,
            corrected_mfu=mfu * record / window,
            is_ratio_only=False,
        )


def _ratio_witness(claim: Claim) -> str | None:
    return None if claim.is_ratio_only else f"our own count of the same steps says {claim.expected:,.5g}"


def macs_as_flops(case: Case) -> Iterator[Diagnosis | None]:
    """Multiply-adds given as FLOPs: half of the count."""
    for claim in claims(case):
        yield judge(
            case,
            claim.hypothesis(
                "macs_as_flops",
                1 / 2,
                witness=_ratio_witness(claim),
                cause="Multiply-adds were counted as one FLOP each (fvcore, thop, ptflops and calflops count so).",
                fix="Multiply by 2: one multiply-add is 2 FLOPs.",
            ),
        )


def forward_only(case: Case) -> Iterator[Diagnosis | None]:
    """The forward's FLOPs for a training step: a third of the count, or exactly what our record says of the forward."""
    factor, from_record = _forward_share(case)
    for claim in claims(case):
        witness = _ratio_witness(claim)
        if witness and from_record:
            witness += f", and its forward alone {claim.expected * factor:,.5g}"
        for share, exact in ((factor, from_record), (1 / 3, False)):
            yield judge(
                case,
                claim.hypothesis(
                    "forward_only",
                    share,
                    witness=witness,
                    strength=EXACT if exact and witness else RATIO,
                    cause="Only the forward pass was counted; the backward pass of a trained layer costs twice that.",
                    fix="Count forward and backward (3x the forward where all is trained), or use mm.FlopCounter.",
                ),
            )


def _forward_share(case: Case) -> tuple[float, bool]:
    if case.record is not None and case.record.is_training and case.record.model_flops:
        forward = case.record.by_phase().get("forward")
        if forward is not None and forward.model_flops:
            return forward.model_flops / case.record.model_flops, True
    return 1 / 3, False


def double_counted(case: Case) -> Iterator[Diagnosis | None]:
    """Twice the count: a factor 2 for multiply-adds applied to FLOPs, or modules counted through their parents too."""
    for claim in claims(case):
        yield judge(
            case,
            claim.hypothesis(
                "double_counted",
                2.0,
                witness=_ratio_witness(claim),
                cause="Everything was counted twice: FLOPs doubled as if they were multiply-adds, or modules added to "
                "their parents.",
                fix="Halve it; add up leaf modules only.",
            ),
        )


def recompute_in_mfu(case: Case) -> Iterator[Diagnosis | None]:
    """Hardware FLOPs in the place of model FLOPs: recomputation counted as useful work (8 N D for 6 N D)."""
    ratio = _hardware_ratio(case)
    if ratio is None:
        return
    for claim in claims(case):
        yield judge(
            case,
            claim.hypothesis(
                "recompute_in_mfu",
                ratio,
                strength=EXACT,
                witness=f"the step recomputes: its hardware FLOPs are {ratio:.4g} times its model FLOPs",
                cause="The figure holds the recomputation of activation checkpointing: it is HFU, not MFU.",
                fix="Leave recomputation out of MFU, and report HFU beside it.",
            ),
        )


def _hardware_ratio(case: Case) -> float | None:
    """Hardware over model FLOPs where activations are recomputed: by our count, else by the reading."""
    for counted in case.counts:
        if counted.recompute_flops and counted.hardware_flops and counted.model_flops:
            return counted.hardware_flops / counted.model_flops
    is_unknown = case.record is None and case.window.recompute_flops is None
    hfu, mfu = case.hfu, case.mfu
    return hfu / mfu if is_unknown and hfu and mfu and 0 < mfu < hfu else None


def causal_counted_dense(case: Case) -> Iterator[Diagnosis | None]:
    """Masked attention counted as its full square (the PaLM convention): what is masked out is never computed."""
    yield _palm_reading(case)
    ratio = palm_ratio(case)
    if ratio is None or ratio <= 1 + TOLERANCE:
        return
    for claim in claims(case):
        yield judge(
            case,
            claim.hypothesis(
                "causal_counted_dense",
                ratio,
                strength=EXACT,
                witness=f"attention is masked: counted as its full square the step has {ratio:.4g} times the FLOPs",
                cause="Causal (or windowed, or packed) attention was counted as its full square.",
                fix="Count attended pairs only: S (S + 1) / 2 for causal attention; convention 'exact' does.",
            ),
        )


def palm_ratio(case: Case) -> float | None:
    """FLOPs by the PaLM convention over the exact ones."""
    for counted in case.counts:
        if counted.model_flops and counted.palm_model_flops:
            return counted.palm_model_flops / counted.model_flops
    palm, exact = finite(case.reading.mfu_palm), case.mfu
    return palm / exact if palm and exact and case.reading.convention != "palm" else None


def _palm_reading(case: Case) -> Diagnosis | None:
    """The reading by the PaLM convention is impossible, and the exact one is not: the convention alone is wrong."""
    exact = case.exact_mfu
    palm = case.mfu if case.reading.convention == "palm" else finite(case.reading.mfu_palm)
    if not (palm and exact) or palm <= 1:
        return None
    hypothesis = Hypothesis(
        code="causal_counted_dense",
        quantity="MFU with attention as its full square, as a fraction",
        observed=palm,
        predicted=palm,
        expected=exact,
        corrected_mfu=exact,
        witness=f"by the attended pairs alone MFU is {100 * exact:.3g}%",
        strength=EXACT,
        cause="Causal (or windowed, or packed) attention counted as its full square holds products that never run.",
        fix="Read the exact convention; the PaLM convention is for comparison with published figures only.",
    )
    diagnosis = judge(case, hypothesis)
    if diagnosis is not None and case.mfu is not None and case.mfu > HARD_LIMIT:
        return dataclasses.replace(diagnosis, severity="error")  # what would be shown is the impossible figure
    return diagnosis

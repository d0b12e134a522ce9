"""Why a reading is wrong: a table of causes, each with what it predicts, tried by one loop on one reading.

A cause is named where a value is what the cause predicts, is not what it should be, leads to a plausible reading when
put right, and a second fact of the run (the witness) agrees. Without a witness it is "consistent with", at most.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from mfu_monitor.checks.diagnosis import Diagnosis
from mfu_monitor.checks.evidence import Case, finite, or_none
from mfu_monitor.checks.limits import HARD_LIMIT, PLAUSIBLE_MFU, SOFT_LIMIT, hard_limit, is_impossible
from mfu_monitor.hardware.precision import active_precision
from mfu_monitor.hardware.table import neighbours, rows_with_rate

__all__ = ["CAUSES", "CAUSE_CODES", "find_causes"]

TOLERANCE = 0.03
"""How near a value must come to a prediction. Users' formulas leave out biases, norms and heads, about a hundredth;
the round ratios that must be distinguished (1/3, 1/2, 4/3, 2) lie much further from each other."""

PROVEN, DIRECT, EXACT, RATIO = 4, 3, 2, 1
"""Strength: two inputs are off alike; the wrong input itself was seen; a prediction of this run's own came true; a
round ratio to our count."""

_PEAK_TOLERANCE = 0.01
"""Datasheets round to three digits: 989 for 989.4, 312, 1979."""
_NO_OTHER_DEVICE = 0.03
"""A peak this near to the right one is that one, rounded: 110 for 112.6 is not the value of a part that has 110."""
_COMMON_RATIOS = (2, 1 / 2, 1 / 3)
"""Counted twice, multiply-adds, forward alone: what a round ratio means as a rule."""
_GROWTH = 2.0
"""A history must at least double before proportional growth means anything."""
_HOST_AHEAD = 0.5
"""A loop that queues work runs ahead of the device by as much as the queue holds, a small part of a window; below half
of the device's time it is the window's own work that the host did not wait for."""
_SLOW_FIRST = 3.0
"""A first step this many times the median is a warm-up: compilation, autotuning, allocation, a cold data cache."""
_WARMUP_SHARE = 0.10
"""Below a tenth of the window's time it does not matter."""
_PROMISES = {
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
    **dict.fromkeys(("16", "fp16", "float16", "half"), "fp16"),
    "fp8": "fp8",
}
"""First words of Lightning's ``precision`` and of dtype names that promise a 16- or 8-bit product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A cause tried on one value: ``observed`` is the value in question, ``expected`` what it should be."""

    quantity: str
    """What the value is, with its unit: ``"FLOPs per batch"``."""
    observed: float
    predicted: float
    expected: float
    corrected_mfu: float | None
    """The reading if this cause is put right; None where there is no reading to correct."""
    witness: str | None = None
    """The evidence beside the ratio, in words; None if there is none: then at most "consistent with"."""
    strength: int = RATIO
    cause: str = ""
    """In place of the table's words, where they depend on the values; so is ``fix``."""
    fix: str = ""
    metrics: Mapping[str, object] = field(default_factory=dict)
    tolerance: float = TOLERANCE
    highest_mfu: float = PLAUSIBLE_MFU[1]
    severity: str | None = None
    """In place of what the reading decides."""

    @property
    def fits(self) -> bool:
        """The prediction came true, the expectation did not, and the corrected reading is plausible."""
        if not all(value > 0 and math.isfinite(value) for value in (self.observed, self.predicted, self.expected)):
            return False
        is_near = math.isclose(self.observed, self.predicted, rel_tol=self.tolerance)
        is_faulty = not math.isclose(self.observed, self.expected, rel_tol=self.tolerance)
        mfu = self.corrected_mfu
        return is_near and is_faulty and (mfu is None or PLAUSIBLE_MFU[0] <= mfu <= self.highest_mfu)


@dataclass(frozen=True, slots=True)
class Cause:
    """A row of the table; a finding that needs no prediction is a diagnosis already."""

    code: str
    attempts: Callable[[Case], Iterable[Attempt | Diagnosis]]
    cause: str = ""
    fix: str = ""


def find_causes(case: Case) -> list[Diagnosis]:
    """What explains the reading, the best supported first: by strength, then by how near the prediction came."""
    found = [d for cause in CAUSES for d in or_none(partial(_diagnoses, case, cause)) or ()]
    best: dict[str, Diagnosis] = {}
    for diagnosis in sorted(found, key=_order):
        best.setdefault(diagnosis.code, diagnosis)
    return list(best.values())


def _diagnoses(case: Case, cause: Cause) -> list[Diagnosis]:
    return [d for attempt in cause.attempts(case) if (d := _judged(case, cause, attempt)) is not None]


def _order(diagnosis: Diagnosis) -> tuple[float, float]:
    strength, distance = diagnosis.evidence.get("strength", DIRECT), diagnosis.evidence.get("distance", 0.0)
    # To a thousandth: what lies nearer than the noise of a count is equal, and the order of the causes decides.
    return (-strength, round(distance, 3))  # type: ignore[operator, call-overload]


def _judged(case: Case, cause: Cause, attempt: Attempt | Diagnosis) -> Diagnosis | None:
    """Named with a witness; "consistent with" without one, and then only where a value needs an explanation."""
    if isinstance(attempt, Diagnosis) or not attempt.fits:
        return attempt if isinstance(attempt, Diagnosis) else None
    mfu, corrected = case.bounded_mfu, attempt.corrected_mfu
    lowers = corrected is not None and mfu is not None and corrected < mfu  # only then it explains one too high
    severity = attempt.severity or ("error" if is_impossible(case) and lowers else "warning")
    if attempt.witness is None:
        if not is_impossible(case) and case.evidence.reported_mfu is None:
            return None
        severity = "note"
    words = attempt.cause or cause.cause
    fields = ("observed", "predicted", "expected", "corrected_mfu", "witness")
    evidence = {name: getattr(attempt, name) for name in fields} | {
        "strength": attempt.strength if attempt.witness else 0,
        "distance": abs(math.log(attempt.observed / attempt.predicted)),
    }
    message = (
        f"{attempt.quantity}: {attempt.observed:,.5g} seen, {attempt.expected:,.5g} expected; this fault predicts "
        f"{attempt.predicted:,.5g}." + (f" Evidence: {attempt.witness}." if attempt.witness else "")
    )
    return Diagnosis(
        code=cause.code,
        severity=severity,
        message=message + ("" if corrected is None else f" Put right, MFU is {100 * corrected:.3g}%."),
        evidence={**evidence, **attempt.metrics},
        likely_cause=words
        if attempt.witness
        else f"Consistent with this, and not proven: {words[0].lower()}{words[1:]}",
        fix=attempt.fix or cause.fix,
    )


# FLOPs: a user's own value, or another tool's MFU, against our count of the same steps.


@dataclass(frozen=True, slots=True)
class Claim:
    """A value under question and what our count says it should be, in the same unit."""

    quantity: str
    observed: float
    expected: float
    corrected_mfu: float | None
    is_ratio_only: bool = False
    """True for another tool's MFU: any of its inputs may be wrong, so a round ratio proves nothing."""

    @property
    def witness(self) -> str | None:
        return None if self.is_ratio_only else f"our own count of the same steps says {self.expected:,.5g}"

    def off_by(
        self, factor: float, strength: int = RATIO, *, witness: str | None, cause: str = "", fix: str = ""
    ) -> Attempt:
        """The claim is ``factor`` times what it should be."""
        return Attempt(
            quantity=self.quantity,
            observed=self.observed,
            predicted=self.expected * factor,
            expected=self.expected,
            corrected_mfu=self.corrected_mfu,
            witness=witness,
            strength=strength,
            cause=cause,
            fix=fix,
            metrics={"factor": factor},
        )


def _claims(case: Case) -> Iterator[Claim]:
    """Every value that can be held against our count: the user's FLOPs, the window's, another tool's MFU."""
    counted, user, mfu = case.counted_flops_per_batch, case.evidence.flops_per_batch, case.exact_mfu
    window, computed, ours = case.window_flops_per_batch, case.computed_mfu, case.bounded_mfu
    record = float(case.record.model_flops) if case.record is not None else 0.0
    if user and counted:
        yield Claim("flops_per_batch, in FLOPs", user, counted, _mfu_by_our_count(case, user, counted))
    else:
        # Batches of other shapes have other FLOPs, so only an impossible reading makes this a question.
        if window and record and ours is not None and is_impossible(case) and not case.window.is_sampled:
            yield Claim("model FLOPs per batch of the window", window, record, ours * record / window)
        # A reading that its own window contradicts: another numerator was used.
        if mfu and mfu > 0 and computed and case.is_homogeneous and case.world_size == 1:
            yield Claim("MFU of the reading, as a fraction", mfu, computed, computed)
    reported = case.evidence.reported_mfu
    if reported and ours and ours > 0:
        yield Claim("reported MFU, as a fraction", reported, ours, ours, is_ratio_only=True)


def _mfu_by_our_count(case: Case, user: float, counted: float) -> float | None:
    """The reading with our count. It may hold the user's value already (honoured if asked), or ours."""
    mfu, exact, computed, window = case.bounded_mfu, case.exact_mfu, case.computed_mfu, case.window_flops_per_batch
    if mfu is None or exact is None:
        return None
    if case.evidence.flops_per_batch_is_used or window is None or computed is None:
        return mfu * counted / user
    by_user = computed * user / counted  # our count in the window, the user's in the reading
    holds_user = by_user != 0 and abs(exact / by_user - 1) <= TOLERANCE / 2
    return mfu * counted / user if holds_user else mfu


def _by_ratio(factor: float) -> Callable[[Case], Iterator[Attempt]]:
    """A round ratio to our count."""
    return lambda case: (claim.off_by(factor, witness=claim.witness) for claim in _claims(case))


def _forward_only(case: Case) -> Iterator[Attempt]:
    record = case.record
    forward = record.by_phase().get("forward") if record is not None and record.is_training else None
    share = forward.model_flops / record.model_flops if record and record.model_flops and forward else 0.0
    for claim in _claims(case):
        if not share or claim.witness is None:
            attempts = [(share, RATIO)] if share else []
            witness = claim.witness
        else:
            attempts = [(share, EXACT)]
            witness = f"{claim.witness}, and its forward alone {claim.expected * share:,.5g}"
        yield from (claim.off_by(*attempt, witness=witness) for attempt in [*attempts, (1 / 3, RATIO)])


def _recompute(case: Case) -> Iterator[Attempt]:
    """Hardware over model FLOPs where activations are recomputed: by our count, else by the reading."""
    counts = (c for c in case.counts if c.recompute_flops and c.hardware_flops and c.model_flops)
    ratio = next((c.hardware_flops / c.model_flops for c in counts), None)  # type: ignore[operator]
    hfu, mfu = case.hfu, case.mfu
    is_unknown = case.record is None and case.window.recompute_flops is None
    if ratio is None and is_unknown and hfu and mfu and 0 < mfu < hfu:
        ratio = hfu / mfu
    if ratio is not None:
        witness = f"the step recomputes: its hardware FLOPs are {ratio:.4g} times its model FLOPs"
        yield from (claim.off_by(ratio, EXACT, witness=witness) for claim in _claims(case))


def _dense_attention(case: Case) -> Iterator[Attempt]:
    yield from _palm_reading(case)
    counts = (c for c in case.counts if c.model_flops and c.palm_model_flops)
    ratio = next((c.palm_model_flops / c.model_flops for c in counts), None)  # type: ignore[operator]
    palm, exact = finite(case.reading.mfu_palm), case.mfu
    if ratio is None and palm and exact and case.reading.convention != "palm":
        ratio = palm / exact
    if ratio is not None and ratio > 1 + TOLERANCE:
        witness = f"attention is masked: counted as its full square the step has {ratio:.4g} times the FLOPs"
        yield from (claim.off_by(ratio, EXACT, witness=witness) for claim in _claims(case))


def _palm_reading(case: Case) -> Iterator[Attempt]:
    """The reading by the PaLM convention is impossible, and the exact one is not: the convention alone is wrong."""
    exact = case.exact_mfu
    palm = case.mfu if case.reading.convention == "palm" else finite(case.reading.mfu_palm)
    if palm and exact and palm > 1:
        yield Attempt(
            quantity="MFU with attention as its full square, as a fraction",
            observed=palm,
            predicted=palm,
            expected=exact,
            corrected_mfu=exact,
            witness=f"by the attended pairs alone MFU is {100 * exact:.3g}%",
            strength=EXACT,
            cause="Causal (or windowed, or packed) attention counted as its full square holds products that never run.",
            fix="Read the exact convention; the PaLM convention is for comparison with published values only.",
            # What would be shown is the impossible value.
            severity="error" if case.mfu is not None and case.mfu > hard_limit(case) else None,
        )


# The set-up: parameters, tokens, ranks, accumulation, steps so far.


def _wrong_n(case: Case) -> Iterator[Attempt]:
    e = case.evidence
    embedding, experts = e.embedding_parameters or 0, e.inactive_expert_parameters or 0
    right = e.parameters - embedding - experts if e.parameters is not None else None
    if not right:
        return
    found = f"{right:,.5g} parameters take part in products for a token"
    all_experts = "N holds every expert; a token passes through a few of them."
    reported, ours = e.reported_mfu, case.bounded_mfu
    if experts and reported and ours and ours > 0:
        yield Attempt(
            quantity="reported MFU, as a fraction",
            observed=reported,
            predicted=ours * (right + experts) / right,
            expected=ours,
            corrected_mfu=ours,
            witness=f"{found}; {right + experts:,.5g} is with all experts",
            cause=all_experts,
            fix=f"Use N = {right:,.5g}: the experts that a token passes through.",
            metrics={"claimed_parameters": right + experts, "product_parameters": right, "variant": "with all experts"},
        )
    variants = (
        ("with the embedding", embedding, "N holds the embedding table, which is looked up, not multiplied."),
        ("with all experts", experts, all_experts),
        (
            "all parameters",
            embedding and experts and embedding + experts,
            "N holds the embedding table and every expert.",
        ),
        (
            "the sum of numel on this rank",
            e.stored_parameters and e.stored_parameters - right,
            "N was summed over tensors as they are stored: shards of this rank only, or packed 4-bit weights.",
        ),
    )
    for observed, strength in _claimed_parameters(case, right):
        for name, excess, cause in variants:
            if excess:
                yield Attempt(
                    quantity="Parameters in 6 N D",
                    observed=observed,
                    predicted=right + excess,
                    expected=right,
                    corrected_mfu=_corrected_by(case, observed / right),
                    witness=f"{found}; {right + excess:,.5g} is {name}",
                    strength=strength,
                    cause=cause,
                    fix=f"Use N = {right:,.5g}: logical shapes, experts that a token passes, no look-up tables.",
                    metrics={"claimed_parameters": observed, "product_parameters": right, "variant": name},
                )


def _claimed_parameters(case: Case, right: float) -> Iterator[tuple[float, int]]:
    """N as it was given, or as it follows from the user's FLOPs of a batch, with and without an attention term."""
    e, window, counted = case.evidence, case.window, case.counted_flops_per_batch
    if e.claimed_parameters:
        yield e.claimed_parameters, DIRECT
    elif e.flops_per_batch and window.tokens and window.steps > 0:
        six_d = 6 * window.tokens / window.steps
        if counted and math.isclose(e.flops_per_batch, counted, rel_tol=TOLERANCE):
            return  # the user's value is right
        # A round ratio has likelier causes than a sum of parameters that happens to lie there: then the nearest wins.
        ratio = e.flops_per_batch / (counted or right * six_d)
        strength = RATIO if _is_common(ratio) else EXACT
        yield e.flops_per_batch / six_d, strength
        attention = (counted or 0) - right * six_d
        if 0 < attention < e.flops_per_batch:
            yield (e.flops_per_batch - attention) / six_d, strength


def _is_common(ratio: float) -> bool:
    return any(math.isclose(ratio, common, rel_tol=TOLERANCE) for common in _COMMON_RATIOS)


def _corrected_by(case: Case, factor: float) -> float | None:
    """The reading divided by how wrong the claim is; one that holds our own count already stands as it is."""
    mfu, exact, computed = case.bounded_mfu, case.exact_mfu, case.computed_mfu
    if mfu is None or exact is None:
        return None
    window, record = case.window_flops_per_batch, case.record
    is_counted = bool(window and record and math.isclose(window, record.model_flops, rel_tol=TOLERANCE))
    holds_our_count = is_counted and computed is not None and math.isclose(exact, computed, rel_tol=0.01)
    return mfu if holds_our_count else mfu / factor


def _wrong_tokens(case: Case) -> Iterator[Attempt]:
    claimed, tokens = case.evidence.claimed_tokens, case.window.tokens
    if not (claimed and tokens):
        return
    for name, wrong, cause in _token_variants(case, float(tokens)):
        yield Attempt(
            quantity="Tokens of this rank's window",
            observed=claimed,
            predicted=wrong,
            expected=float(tokens),
            corrected_mfu=_corrected_by(case, claimed / tokens),
            witness=f"the batches of the window hold {tokens:,} tokens; {wrong:,.5g} is {name}",
            strength=DIRECT,
            cause=cause,
            fix=f"Use the {tokens:,} tokens that the window's steps computed on this rank, padding included.",
            metrics={"claimed_tokens": claimed, "tokens": tokens, "variant": name},
        )


def _token_variants(case: Case, tokens: float) -> list[tuple[str, float, str]]:
    window, accumulate, ranks = case.window, case.accumulate, case.world_size
    accumulated = [
        ("one micro-batch a step", tokens / accumulate, "Tokens of one micro-batch were taken for a whole step's."),
        (
            "every micro-batch as per step",
            tokens * accumulate,
            "A whole step's tokens were counted for each micro-batch.",
        ),
    ]
    world = float(window.world_tokens or tokens * ranks)
    many_ranks = [
        ("all ranks' tokens", world, "The tokens of all ranks were taken for those of one device."),
        ("one rank's share twice over", tokens / ranks, "One device's tokens were divided by the ranks again."),
    ]
    others = (
        (
            "without padding",
            window.tokens_not_padding,
            "Padding was left out; the products ran on it all the same.",
        ),
        ("tokens in the loss", window.tokens_in_loss, "Only tokens that enter the loss were counted."),
        (
            "elements of the inputs",
            case.evidence.input_elements,
            "Pixels (input elements) were counted as tokens.",
        ),
    )
    known = [(name, float(count), cause) for name, count, cause in others if count]
    return [*(accumulated if accumulate > 1 else ()), *(many_ranks if ranks > 1 else ()), *known]


def _world_size(case: Case) -> Iterator[Attempt]:
    ranks = case.world_size
    if ranks <= 1:
        return
    yield from _world_in_reading(case, ranks)
    words = f"the world has {ranks} ranks"
    many = "FLOPs of the global batch were given for one rank's batch."
    few = "FLOPs of one rank's batch were divided by the number of ranks again."
    yield from _scaled(case, ranks, words, many, few)


def _world_in_reading(case: Case, ranks: int) -> Iterator[Attempt]:
    """The reading's own arithmetic: numerator and denominator of different worlds."""
    mfu, computed = case.exact_mfu, case.computed_mfu
    if not mfu or mfu < 0 or computed is None or case.evidence.flops_per_batch is not None or not case.is_homogeneous:
        return
    worlds = ((float(ranks), "all ranks' FLOPs over one device's peak"), (1 / ranks, "one rank's over all"))
    for factor, words in worlds:
        yield Attempt(
            quantity="MFU as a fraction",
            observed=mfu,
            predicted=computed * factor,
            expected=computed,
            corrected_mfu=computed,
            witness=f"the window's own FLOPs, time and {ranks} peaks give {100 * computed:.3g}%",
            strength=DIRECT,
            cause=f"Numerator and denominator belong to different worlds: {words}.",
            fix="Divide the FLOPs of all ranks by the sum of their peaks, or one rank's by its own.",
            metrics={"world_size": ranks},
        )


def _accumulation(case: Case) -> Iterator[Attempt]:
    batches = case.accumulate
    words = f"one optimizer step gathers {batches} batches"
    many = "FLOPs of the whole accumulated step were given for each of its batches."
    few = "FLOPs of one batch were given for the whole accumulated step."
    return _scaled(case, batches, words, many, few) if batches > 1 else iter(())


def _scaled(case: Case, count: int, setting: str, many: str, few: str) -> Iterator[Attempt]:
    """A set-up's factor. Tokens that are off by the same factor prove it; a ratio of 2 or 1/2 has likelier causes."""
    tokens, claimed_tokens = case.window.tokens, case.evidence.claimed_tokens
    token_factor = claimed_tokens / tokens if tokens and claimed_tokens else None
    is_second_input = case.evidence.flops_per_batch is not None  # a reading follows its tokens and proves nothing
    for claim in _claims(case):
        for factor, cause in ((float(count), many), (1 / count, few)):
            is_alike = token_factor is not None and math.isclose(token_factor, factor, rel_tol=TOLERANCE)
            if is_second_input and is_alike:
                yield claim.off_by(factor, PROVEN, witness=f"{setting}, and tokens are off alike", cause=cause)
                continue
            needs_proof = claim.is_ratio_only or token_factor is not None or _is_common(factor)
            yield claim.off_by(factor, witness=None if needs_proof else setting, cause=cause)


def _cumulative(case: Case) -> Iterator[Attempt]:
    """MFU that grows in proportion to the step."""
    yield from _growing_history(case)
    batches = case.window.last_step + 1
    if case.window.steps <= 0 or batches <= case.window.steps:
        return
    words = f"{batches} batches have run since the start, {case.window.steps} in this window"
    for claim in _claims(case):
        yield claim.off_by(batches / case.window.steps, EXACT, witness=None if claim.is_ratio_only else words)


def _growing_history(case: Case) -> Iterator[Attempt]:
    points = [(step, mfu) for step, mfu in case.evidence.mfu_history if step > 0 and mfu > 0]
    last = case.bounded_mfu
    is_later = not points or case.window.last_step > points[-1][0]
    if last is not None and last > 0 and is_later:
        points.append((case.window.last_step, last))
    if len(points) < 3 or points[-1][0] < _GROWTH * points[0][0]:
        return
    slopes = [mfu / (step + 1) for step, mfu in points]
    mean = sum(slopes) / len(slopes)
    if max(slopes) - min(slopes) > 4 * TOLERANCE * mean:
        return
    (_, first_mfu), (step, mfu) = points[0], points[-1]
    yield Attempt(
        quantity=f"MFU at step {step}, as a fraction",
        observed=mfu,
        predicted=mean * (step + 1),
        expected=first_mfu,
        corrected_mfu=mean * case.window.steps if case.window.steps > 0 else None,
        witness=f"over {len(points)} readings MFU grew in proportion to the step",
        strength=DIRECT,
        tolerance=4 * TOLERANCE,
        cause="The numerator is a total since the start; the time is one window's.",
    )


# The denominator: the peak of another convention, precision or device, or a higher clock.


def _peak(case: Case, right: float, predicted: float, **words: object) -> Attempt:
    mfu, used = case.bounded_mfu, case.peak_flops_per_s
    assert used is not None
    fields: dict[str, object] = {
        "tolerance": _PEAK_TOLERANCE,
        "strength": DIRECT,
        "metrics": {"peak_flops_per_s": used, "dense_peak_flops_per_s": right, "precision": case.precision},
        **words,
    }
    return Attempt(
        quantity=f"Peak at {case.precision} of {case.device_name} in FLOP/s",
        observed=used,
        predicted=predicted,
        expected=right,
        corrected_mfu=mfu * used / right if mfu is not None else None,
        **fields,  # type: ignore[arg-type]
    )


def _behind_report(case: Case, right: float, other: float, words: str) -> Iterator[Attempt]:
    """Another tool's MFU whose peak is unknown: the ratio of two peaks fits it, which does not prove it."""
    reported, ours = case.evidence.reported_mfu, case.bounded_mfu
    is_right = case.peak_flops_per_s is not None and math.isclose(case.peak_flops_per_s, right, rel_tol=_PEAK_TOLERANCE)
    if reported and ours and is_right and ours > 0:
        yield Attempt(
            quantity="reported MFU, as a fraction",
            observed=reported,
            predicted=ours * right / other,
            expected=ours,
            corrected_mfu=ours,
            cause=f"The peak behind the report is {words}.",
            fix=f"Look up the peak that the report used; dense it is {right:.4g} FLOP/s here.",
        )


def _sparse_peak(case: Case) -> Iterator[Attempt]:
    """MFU comes out half of what it is."""
    precision, dense, sparse = case.precision or "", case.table_peak_flops_per_s, None
    if case.row and case.share_of_part:
        whole = case.row.sparse_flops_per_s_by_precision().get(precision)
        sparse = None if whole is None else whole * case.share_of_part
    if case.row is None and case.reading.peak_is_dense is False:
        sparse = case.peak_flops_per_s  # whoever gave the peak says so
    if sparse and dense is None:
        dense = sparse / 2  # 2:4 sparsity doubles the rate of every part whose datasheet prints both
    if not (case.peak_flops_per_s and dense and sparse):
        return
    yield from _behind_report(case, dense, sparse, "the datasheet's value for 2:4 structured sparsity")
    if case.peak_was_looked_up:
        words = f"the table gives {dense / 1e12:,.4g} TFLOP/s dense and {sparse / 1e12:,.4g} with 2:4 sparsity"
        fix = f"Use the dense value: peak={dense:.4g}, or leave the peak to the table."
        yield _peak(case, dense, sparse, witness=words, fix=fix)


def _precision_peak(case: Case) -> Iterator[Attempt]:
    right, used, share = case.table_peak_flops_per_s, case.peak_flops_per_s, case.share_of_part
    if not (used and right and share and case.row and case.peak_was_looked_up):
        return
    rates = case.row.flops_per_s_by_precision()
    same = (p for p in rates if p != case.precision and math.isclose(rates[p] * share, used, rel_tol=_PEAK_TOLERANCE))
    if names := " and ".join(same):
        yield _peak(
            case,
            right,
            used,
            # The sparse value of one precision is often the dense one of the next: then the sparse value, which
            # datasheets print in large letters, is the likelier slip.
            strength=EXACT,
            witness=f"{used / 1e12:,.4g} TFLOP/s is the {names} peak here, and the products ran in {case.precision}",
            cause=f"The peak is that of {names}; the products that were counted ran in {case.precision}.",
            fix=f"Use the {case.precision} peak, {right:.4g} FLOP/s, or leave the peak to the table.",
        )


def _device_peak(case: Case) -> Iterator[Attempt]:
    """Another form factor, a whole GPU for a slice of it, a neighbour in name."""
    yield from _neighbour_peak(case)
    used, share, best = case.peak_flops_per_s, case.share_of_part, case.evidence.achievable_flops_per_s
    full = case.row.flops_per_s_by_precision().get(case.precision or "") if case.row else used
    if share and share < 1 and used and full:
        yield _peak(
            case,
            full * share,
            full,
            witness=f"the driver reports {100 * share:.3g}% of the whole part's multiprocessors",
            cause="The peak is that of the whole part; this device is a slice (MIG) or a cut-down version of it.",
            fix=f"Scale the peak by the multiprocessors: {full * share:.4g} FLOP/s.",
        )
    if best and used and best > HARD_LIMIT * used:
        yield _peak(
            case,
            best,
            used,
            highest_mfu=SOFT_LIMIT,  # against a measured product a step can come near 1
            witness=f"the best product measured here runs at {best / 1e12:,.4g} TFLOP/s, above the peak of "
            f"{used / 1e12:,.4g}",
            cause="The peak is lower than what this device was measured to do: it is not this device's peak.",
            fix='Leave the peak to the table, or measure it with peak="measure".',
        )


def _neighbour_peak(case: Case) -> Iterator[Attempt]:
    right, used, precision = case.table_peak_flops_per_s, case.peak_flops_per_s, case.precision or ""
    if not (used and right):
        return
    rows = neighbours(case.row.key) if case.row else ()
    look_alikes = {
        row.name: rate for row in rows if (rate := row.flops_per_s_by_precision().get(precision)) is not None
    }
    for name, rate in look_alikes.items():
        yield from _behind_report(case, right, rate, f"that of {name}")
    if not case.peak_was_looked_up or math.isclose(used, right, rel_tol=_NO_OTHER_DEVICE):
        return
    others = [row.label for row in rows_with_rate(used, precision, tolerance=_PEAK_TOLERANCE)]
    for name, rate in {**dict.fromkeys(others, used), **look_alikes}.items():
        yield _peak(
            case,
            right,
            rate,
            strength=EXACT if name in look_alikes else RATIO,
            witness=f"the driver says {case.device_name}, {right / 1e12:,.4g} TFLOP/s; {rate / 1e12:,.4g} is {name}'s",
            cause=f"The peak is that of {name}, not of {case.device_name}.",
            fix=f"Use {right:.4g} FLOP/s, or leave the peak to the table, which matches the whole device name.",
        )


def _clock_exceeded(case: Case) -> Iterator[Diagnosis]:
    """A reading just above 100%, by as much as the maximum clock is above the datasheet's: a note, never an error."""
    value, ratio = max((v for v in (case.bounded_mfu, case.hfu) if v is not None), default=0.0), case.clock_ratio
    if ratio and SOFT_LIMIT < value <= hard_limit(case) and value <= ratio:
        yield Diagnosis(
            code="nominal_clock_exceeded",
            severity="note",
            message=f"The reading is {100 * value:.1f}%; {case.device_name} runs at up to {100 * ratio:.1f}% of the "
            "clock behind its datasheet's value.",
            evidence={"value": value, "clock_ratio": ratio, "peak_flops_per_s": case.peak_flops_per_s},
            likely_cause="The device ran above the clock that the datasheet's peak is computed from.",
            fix="Nothing to do; lock the clocks to compare runs.",
        )


def _no_autocast(case: Case) -> Iterator[Diagnosis]:
    """The configuration promises 16-bit or 8-bit products and most of the counted FLOPs ran in a wider precision."""
    word = (case.evidence.promised_precision or "").lower().removeprefix("torch.").split("-")[0]
    promised = _PROMISES.get(word) or ("fp8" if "transformer" in word else None)
    flops = case.window.model_flops_by_precision or _flops_by_precision(case)
    total = sum(flops.values())
    wide = sum(count for name, count in flops.items() if name in ("fp64", "fp32", "tf32"))
    if promised is None or not total or wide <= total / 2:
        return
    active = active_precision(flops)
    yield Diagnosis(
        code="autocast_not_active",
        severity="warning",
        message=f"precision={case.evidence.promised_precision!r} promises {promised} products; "
        f"{100 * wide / total:.3g}% of the model FLOPs ran in {active}.",
        evidence={
            "promised_precision": promised,
            "active_precision": active,
            "wide_share": wide / total,
            "model_flops_by_precision": dict(flops),
            "strength": DIRECT,
            "distance": 0.0,
        },
        likely_cause="Autocast is not active where the products run: a custom loop outside the precision plugin, a "
        "module called under autocast(enabled=False), or operands that are cast back to float32.",
        fix=f"Wrap the forward in torch.autocast, or cast the module to {promised}; see the card's table of FLOPs by "
        "precision for the modules.",
    )


def _flops_by_precision(case: Case) -> Mapping[str, int]:
    if case.record is not None:
        return {name: totals.model_flops for name, totals in case.record.by_dtype().items()}
    return {case.reading.precision: 1} if case.reading.precision else {}


# The time: a host's clock around queued work, warm-up in the window, a clock that ran backwards.


def _unsynced_timer(case: Case) -> Iterator[Attempt]:
    """The host's clock stopped when the work was queued, not when it was done: the step looks many times faster."""
    window, device_s, host_s = case.window, case.evidence.device_elapsed_s, case.window.host_elapsed_s
    if device_s is None:
        device_s = window.elapsed_s
    elif host_s is None:
        host_s = window.elapsed_s
    if host_s is None or not 0 < host_s < _HOST_AHEAD * device_s:
        return
    mfu, exact, computed = case.bounded_mfu, case.exact_mfu, case.computed_mfu
    # The seconds that the reading's MFU was made with, by its own FLOPs and peak; the window's where unknown.
    elapsed_s = window.elapsed_s * computed / exact if exact and computed and exact > 0 else window.elapsed_s
    is_host = math.isclose(elapsed_s, host_s, rel_tol=0.05)
    yield Attempt(
        quantity="Seconds of the window by the host's clock",
        observed=host_s,
        predicted=host_s,
        expected=device_s,
        corrected_mfu=mfu * host_s / device_s if mfu is not None and is_host else mfu,
        # A reading that used the device's clock stands, however high: the two clocks are the finding.
        highest_mfu=PLAUSIBLE_MFU[1] if is_host else math.inf,
        severity=None if is_host else "note",
        witness=f"the device's own clock says {device_s:.4g} s for the same steps",
        strength=DIRECT,
        cause="The host only queues the work: its clock stopped before the device had finished."
        + ("" if is_host else " The reading used the device's clock and stands; a host timer would not."),
        metrics={"host_elapsed_s": host_s, "device_elapsed_s": device_s, "steps": window.steps},
    )


def _warmup(case: Case) -> Iterator[Attempt]:
    """The first steps of the window compile or warm up, and pull the average down."""
    steps_s = [s for s in case.evidence.step_times_s if math.isfinite(s)]
    if len(steps_s) < 3 or min(steps_s) <= 0:
        return
    usual_s, total_s = statistics.median(steps_s), sum(steps_s)
    steady_s = usual_s * len(steps_s)
    usual = next((i for i, step_s in enumerate(steps_s) if step_s < _SLOW_FIRST * usual_s), len(steps_s))
    slow = steps_s[:usual]
    if not slow or total_s - steady_s < _WARMUP_SHARE * total_s:
        return
    mfu = case.bounded_mfu
    yield Attempt(
        quantity="Seconds of the window",
        observed=total_s,
        predicted=sum(slow) + usual_s * (len(steps_s) - len(slow)),
        expected=steady_s,
        corrected_mfu=mfu * total_s / steady_s if mfu is not None else None,
        witness=f"the first {len(slow)} of {len(steps_s)} steps took up to {max(slow):.4g} s, the median "
        f"{usual_s:.4g} s",
        strength=DIRECT,
        tolerance=0.10,
        metrics={"median_step_s": usual_s, "first_step_s": steps_s[0], "recompiles": case.window.recompiles},
    )


def _backwards(case: Case) -> Iterator[Diagnosis]:
    """A negative time: a clock that was set while it was read (time.time() under NTP), or marks in the wrong order."""
    evidence, window = case.evidence, case.window
    negative = [s for s in (window.elapsed_s, window.wall_s, *evidence.step_times_s) if s < 0]
    falls = [b - a for a, b in zip(evidence.timestamps_s, evidence.timestamps_s[1:], strict=False) if b < a]
    if negative or falls:
        worst_s, count = min(negative + falls), len(negative) + len(falls)
        yield Diagnosis(
            code="clock_went_backwards",
            severity="error",
            message=f"A time of {worst_s:.4g} s was seen ({count} such); at least 0 was expected.",
            evidence={"worst_s": worst_s, "count": count, "strength": DIRECT, "distance": 0.0},
            likely_cause="The wall clock was set back in the run (NTP, a suspended machine), or two logs were joined.",
            fix="Time with a monotonic clock (time.perf_counter, device events), and leave this window out.",
        )


_SAME_BATCHES = "Give FLOPs, tokens and time of the same batches of one rank."

CAUSES = (
    Cause("clock_went_backwards", _backwards),
    Cause(
        "unsynced_timer",
        _unsynced_timer,
        fix="Time with device events (the default on an accelerator); never time.time() around queued work.",
    ),
    Cause(
        "warmup_in_window",
        _warmup,
        "Compilation, autotuning or a cold start fell into the window and was averaged in.",
        "Leave the first steps out of the window (warm-up), as the monitor does with compile time.",
    ),
    Cause(
        "sparse_peak",
        _sparse_peak,
        "The peak is the datasheet's value for 2:4 structured sparsity, which dense training cannot reach.",
    ),
    Cause("wrong_precision_peak", _precision_peak),
    Cause("wrong_device_peak", _device_peak),
    Cause("autocast_not_active", _no_autocast),
    Cause("wrong_token_count", _wrong_tokens),
    Cause("wrong_N", _wrong_n),
    Cause(
        "recompute_in_mfu",
        _recompute,
        "The value holds the recomputation of activation checkpointing: it is HFU, not MFU.",
        "Leave recomputation out of MFU, and report HFU beside it.",
    ),
    Cause(
        "causal_counted_dense",
        _dense_attention,
        "Causal (or windowed, or packed) attention was counted as its full square.",
        "Count attended pairs only: S (S + 1) / 2 for causal attention; convention 'exact' does.",
    ),
    Cause(
        "macs_as_flops",
        _by_ratio(1 / 2),
        "Multiply-adds were counted as one FLOP each (fvcore, thop, ptflops and calflops count so).",
        "Multiply by 2: one multiply-add is 2 FLOPs.",
    ),
    Cause(
        "forward_only",
        _forward_only,
        "Only the forward pass was counted; the backward pass of a trained layer costs twice that.",
        "Count forward and backward (3x the forward where all is trained), or use mm.FlopCounter.",
    ),
    Cause(
        "double_counted",
        _by_ratio(2.0),
        "Everything was counted twice: FLOPs doubled as if they were multiply-adds, or modules added to their parents.",
        "Halve it; add up leaf modules only.",
    ),
    Cause(
        "cumulative_numerator",
        _cumulative,
        "FLOPs since the start of the run were divided by the time of one window.",
        "Take the difference of the totals at the window's two ends.",
    ),
    Cause("accumulation", _accumulation, fix=_SAME_BATCHES),
    Cause("world_size", _world_size, fix=_SAME_BATCHES),
    Cause("nominal_clock_exceeded", _clock_exceeded),
)
"""In the order in which equally supported causes are given; words that depend on the values are with the attempt."""

CAUSE_CODES = tuple(cause.code for cause in CAUSES)

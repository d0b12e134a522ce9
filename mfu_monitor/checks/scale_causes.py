"""Causes that scale a reading by a factor of the set-up: parameters, tokens, ranks, accumulation, steps so far."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mfu_monitor.checks.case import Case
from mfu_monitor.checks.diagnosis import Diagnosis
from mfu_monitor.checks.hypothesis import DIRECT, EXACT, PROVEN, RATIO, TOLERANCE, Hypothesis, judge
from mfu_monitor.checks.numerator_causes import Claim, claims

__all__ = ["accumulation", "cumulative_numerator", "world_size", "wrong_n", "wrong_token_count"]


_COMMON_RATIOS = (2, 1 / 2, 1 / 3)
"""Counted twice, multiply-adds, forward alone: what a round ratio means as a rule."""


def wrong_n(case: Case) -> Iterator[Diagnosis | None]:
    """The N of 6 N D is not the parameters that take part in products for a token."""
    right = _product_parameters(case)
    if not right:
        return
    yield _experts_behind_report(case, right)
    for observed, strength in _claimed_parameters(case, right):
        for name, wrong, cause in _wrong_parameters(case, right):
            yield judge(
                case,
                Hypothesis(
                    code="wrong_N",
                    quantity="Parameters in 6 N D",
                    observed=observed,
                    predicted=wrong,
                    expected=right,
                    corrected_mfu=_corrected_by(case, observed / right),
                    witness=f"{right:,.5g} parameters take part in products for a token; {wrong:,.5g} is {name}",
                    strength=strength,
                    cause=cause,
                    fix=f"Use N = {right:,.5g}: logical shapes, experts that a token passes, no look-up tables.",
                    figures={"claimed_parameters": observed, "product_parameters": right, "variant": name},
                ),
            )


def _experts_behind_report(case: Case, right: float) -> Diagnosis | None:
    """Another tool's MFU that is ours by just the experts that a token does not pass through."""
    experts, reported, ours = case.evidence.inactive_expert_parameters, case.evidence.reported_mfu, case.bounded_mfu
    if not (experts and reported and ours and ours > 0):
        return None
    return judge(
        case,
        Hypothesis(
            code="wrong_N",
            quantity="reported MFU, as a fraction",
            observed=reported,
            predicted=ours * (right + experts) / right,
            expected=ours,
            corrected_mfu=ours,
            witness=f"{right:,.5g} parameters take part in products for a token; {right + experts:,.5g} is with all "
            "experts",
            cause="N holds every expert; a token passes through a few of them.",
            fix=f"Use N = {right:,.5g}: the experts that a token passes through.",
            figures={"claimed_parameters": right + experts, "product_parameters": right, "variant": "with all experts"},
        ),
    )


def _product_parameters(case: Case) -> float | None:
    e = case.evidence
    if e.parameters is None:
        return None
    return e.parameters - (e.embedding_parameters or 0) - (e.inactive_expert_parameters or 0)


def _claimed_parameters(case: Case, right: float) -> Iterator[tuple[float, int]]:
    """N as it was given, or as it follows from the user's FLOPs of a batch, with and without an attention term."""
    e, window, counted = case.evidence, case.window, case.counted_flops_per_batch
    if e.claimed_parameters:
        yield e.claimed_parameters, DIRECT
    elif e.flops_per_batch and window.tokens and window.steps > 0:
        six_d = 6 * window.tokens / window.steps
        if counted and math.isclose(e.flops_per_batch, counted, rel_tol=TOLERANCE):
            return  # the user's figure is right
        # A round ratio has likelier causes than a sum of parameters that happens to lie there: then the nearest wins.
        ratio = e.flops_per_batch / (counted or right * six_d)
        strength = RATIO if any(math.isclose(ratio, r, rel_tol=TOLERANCE) for r in _COMMON_RATIOS) else EXACT
        yield e.flops_per_batch / six_d, strength
        attention = (counted or 0) - right * six_d
        if 0 < attention < e.flops_per_batch:
            yield (e.flops_per_batch - attention) / six_d, strength


def _wrong_parameters(case: Case, right: float) -> Iterator[tuple[str, float, str]]:
    e = case.evidence
    embedding, experts = e.embedding_parameters or 0, e.inactive_expert_parameters or 0
    if embedding:
        yield (
            "with the embedding",
            right + embedding,
            "N holds the embedding table, which is looked up, not multiplied.",
        )
    if experts:
        yield "with all experts", right + experts, "N holds every expert; a token passes through a few of them."
    if embedding and experts and e.parameters:
        yield "all parameters", e.parameters, "N holds the embedding table and every expert."
    if e.stored_parameters:
        yield (
            "the sum of numel on this rank",
            e.stored_parameters,
            "N was summed over tensors as they are stored: shards of this rank only, or packed 4-bit weights.",
        )


def _corrected_by(case: Case, factor: float) -> float | None:
    """The reading divided by how wrong the claim is; one that holds our own count already stands as it is."""
    mfu, exact, computed = case.bounded_mfu, case.exact_mfu, case.computed_mfu
    if mfu is None or exact is None:
        return None
    window, record = case.window_flops_per_batch, case.record
    is_counted = bool(window and record and math.isclose(window, record.model_flops, rel_tol=TOLERANCE))
    holds_our_count = is_counted and computed is not None and math.isclose(exact, computed, rel_tol=0.01)
    return mfu if holds_our_count else mfu / factor


def wrong_token_count(case: Case) -> Iterator[Diagnosis | None]:
    """Tokens that are not those of the steps that were timed."""
    claimed, tokens = case.evidence.claimed_tokens, case.window.tokens
    if not (claimed and tokens):
        return
    for name, wrong, cause in _wrong_tokens(case, float(tokens)):
        yield judge(
            case,
            Hypothesis(
                code="wrong_token_count",
                quantity="Tokens of this rank's window",
                observed=claimed,
                predicted=wrong,
                expected=float(tokens),
                corrected_mfu=_corrected_by(case, claimed / tokens),
                witness=f"the batches of the window hold {tokens:,} tokens; {wrong:,.5g} is {name}",
                strength=DIRECT,
                cause=cause,
                fix=f"Use the {tokens:,} tokens that the window's steps computed on this rank, padding included.",
                figures={"claimed_tokens": claimed, "tokens": tokens, "variant": name},
            ),
        )


def _wrong_tokens(case: Case, tokens: float) -> Iterator[tuple[str, float, str]]:
    window, accumulate, ranks = case.window, case.accumulate, case.world_size
    if accumulate > 1:
        yield "one micro-batch a step", tokens / accumulate, "Tokens of one micro-batch were taken for a whole step's."
        yield (
            "every micro-batch as a step",
            tokens * accumulate,
            "A whole step's tokens were counted for each micro-batch.",
        )
    if ranks > 1:
        world = float(window.world_tokens or tokens * ranks)
        yield "all ranks' tokens", world, "The tokens of all ranks were taken for those of one device."
        yield "one rank's share twice over", tokens / ranks, "One device's tokens were divided by the ranks again."
    if window.tokens_not_padding:
        yield (
            "without padding",
            float(window.tokens_not_padding),
            "Padding was left out; the products ran on it all the same.",
        )
    if window.tokens_in_loss:
        yield "tokens in the loss", float(window.tokens_in_loss), "Only tokens that enter the loss were counted."
    if case.evidence.input_elements:
        yield "elements of the inputs", case.evidence.input_elements, "Pixels (input elements) were counted as tokens."


def world_size(case: Case) -> Iterator[Diagnosis | None]:
    """The FLOPs of all ranks over one device's peak, or the other way round."""
    ranks = case.world_size
    if ranks <= 1:
        return
    yield from _world_in_reading(case, ranks)
    for claim in claims(case):
        for factor, cause in (
            (float(ranks), "FLOPs of the global batch were given for one rank's batch."),
            (1 / ranks, "FLOPs of one rank's batch were divided by the number of ranks again."),
        ):
            yield judge(case, _factor(case, claim, "world_size", factor, cause, f"the world has {ranks} ranks"))


def _world_in_reading(case: Case, ranks: int) -> Iterator[Diagnosis | None]:
    """The reading's own arithmetic: numerator and denominator of different worlds."""
    mfu, computed = case.exact_mfu, case.computed_mfu
    if not mfu or mfu < 0 or computed is None or case.evidence.flops_per_batch is not None or not case.is_homogeneous:
        return
    for factor, words in (
        (float(ranks), "all ranks' FLOPs over one device's peak"),
        (1 / ranks, "one rank's over all"),
    ):
        yield judge(
            case,
            Hypothesis(
                code="world_size",
                quantity="MFU as a fraction",
                observed=mfu,
                predicted=computed * factor,
                expected=computed,
                corrected_mfu=computed,
                witness=f"the window's own FLOPs, time and {ranks} peaks give {100 * computed:.3g}%",
                strength=DIRECT,
                cause=f"Numerator and denominator belong to different worlds: {words}.",
                fix="Divide the FLOPs of all ranks by the sum of their peaks, or one rank's by its own.",
                figures={"world_size": ranks},
            ),
        )


def accumulation(case: Case) -> Iterator[Diagnosis | None]:
    """FLOPs of an accumulated step taken for one batch, or one batch's for the whole step."""
    batches = case.accumulate
    if batches <= 1:
        return
    for claim in claims(case):
        for factor, cause in (
            (float(batches), "FLOPs of the whole accumulated step were given for each of its batches."),
            (1 / batches, "FLOPs of one batch were given for the whole accumulated step."),
        ):
            words = f"one optimizer step gathers {batches} batches"
            yield judge(case, _factor(case, claim, "accumulation", factor, cause, words))


def _factor(case: Case, claim: Claim, code: str, factor: float, cause: str, setting: str) -> Hypothesis:
    """A set-up's factor. Tokens that are off by the same factor prove it; a ratio of 2 or 1/2 has likelier causes."""
    tokens, claimed_tokens = case.window.tokens, case.evidence.claimed_tokens
    token_factor = claimed_tokens / tokens if tokens and claimed_tokens else None
    is_second_input = case.evidence.flops_per_batch is not None  # a reading follows its tokens and proves nothing
    is_proven = is_second_input and token_factor is not None and math.isclose(token_factor, factor, rel_tol=TOLERANCE)
    is_denied = token_factor is not None and not is_proven
    is_common = any(math.isclose(factor, common, rel_tol=TOLERANCE) for common in _COMMON_RATIOS)
    needs_proof = claim.is_ratio_only or is_denied or is_common
    return claim.hypothesis(
        code,
        factor,
        strength=PROVEN if is_proven else RATIO,
        witness=None
        if needs_proof and not is_proven
        else setting + (", and tokens are off alike" if is_proven else ""),
        cause=cause,
        fix="Give FLOPs, tokens and time of the same batches of one rank.",
    )


def cumulative_numerator(case: Case) -> Iterator[Diagnosis | None]:
    """A total since the start over the time of one window: MFU that grows in proportion to the step."""
    yield _growing_history(case)
    batches = case.window.last_step + 1
    if case.window.steps <= 0 or batches <= case.window.steps:
        return
    for claim in claims(case):
        factor = batches / case.window.steps
        witness = f"{batches} batches have run since the start, {case.window.steps} in this window"
        yield judge(
            case,
            claim.hypothesis(
                "cumulative_numerator",
                factor,
                strength=EXACT,
                witness=None if claim.is_ratio_only else witness,
                cause="FLOPs since the start of the run were divided by the time of one window.",
                fix="Take the difference of the totals at the window's two ends.",
            ),
        )


_GROWTH = 2.0
"""A history must at least double before proportional growth means anything."""


def _growing_history(case: Case) -> Diagnosis | None:
    points = [(step, mfu) for step, mfu in case.evidence.mfu_history if step > 0 and mfu > 0]
    last = case.bounded_mfu
    is_later = not points or case.window.last_step > points[-1][0]
    if last is not None and last > 0 and is_later:
        points.append((case.window.last_step, last))
    if len(points) < 3 or points[-1][0] < _GROWTH * points[0][0]:
        return None
    slopes = [mfu / (step + 1) for step, mfu in points]
    mean = sum(slopes) / len(slopes)
    if max(slopes) - min(slopes) > 4 * TOLERANCE * mean:
        return None
    (_, first_mfu), (step, mfu) = points[0], points[-1]
    hypothesis = Hypothesis(
        code="cumulative_numerator",
        quantity=f"MFU at step {step}, as a fraction",
        observed=mfu,
        predicted=mean * (step + 1),
        expected=first_mfu,
        corrected_mfu=mean * case.window.steps if case.window.steps > 0 else None,
        witness=f"over {len(points)} readings MFU grew in proportion to the step",
        strength=DIRECT,
        tolerance=4 * TOLERANCE,
        cause="The numerator is a total since the start; the time is one window's.",
        fix="Take the difference of the totals at the window's two ends.",
    )
    return judge(case, hypothesis)

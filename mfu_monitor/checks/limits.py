"""The checks: one pure function each, from a case to a diagnosis or None. They say that a reading is wrong, not why."""

from __future__ import annotations

from collections.abc import Callable

from mfu_monitor.checks.diagnosis import Diagnosis
from mfu_monitor.checks.evidence import Case, finite

__all__ = [
    "CHECKS",
    "CHECK_CODES",
    "HARD_LIMIT",
    "PLAUSIBLE_MFU",
    "SOFT_LIMIT",
    "SUSPICIOUS_NOTE",
    "hard_limit",
    "is_impossible",
]

SOFT_LIMIT = 1.00
"""By definition no dense product runs above the peak at the datasheet's clock."""

HARD_LIMIT = 1.05
"""Above it a boost clock does not explain a reading: bare matmuls exceed the datasheet peak by a few hundredths where a
part boosts, and a whole training step stays far below its best matmul, since softmax, norms, the optimizer and waiting
count no FLOPs and take time."""

PLAUSIBLE_MFU = (0.001, 0.80)
"""Where a training step's MFU can lie. Good published runs reach 0.46 (PaLM, https://arxiv.org/abs/2204.02311) to 0.54
(Korthikanti et al., https://arxiv.org/abs/2205.05198); large bare matmuls, about 0.8 of the datasheet, bound what a
step can do. Below a thousandth nothing is impossible, but no correction that leads there convinces."""

SUSPICIOUS_NOTE = 0.60
SUSPICIOUS_WARNING = 0.80
"""Where nothing was measured on the device. Published training runs end near 0.55, large bare products near 0.8 of the
datasheet (see ``PLAUSIBLE_MFU`` and docs/diagnoses.md)."""

LAST_LEVEL_CACHE_BYTES = 256 * 2**20
"""The largest cache before memory among the parts of the table (MI300X Infinity Cache, AMD CDNA 3 white paper): what
fits there need not cross the memory bus."""

_GENERIC_CAUSE = (
    "One of three is wrong: the FLOPs of a step (too many), its time (too short) or the peak (too low, or of another "
    "device or precision)."
)
_GENERIC_FIX = (
    "Compare the peak with `mfu-monitor peaks`, the FLOPs with `mfu-monitor count`, and time the step by the device's "
    "own clock; docs/diagnoses.md shows how."
)


def is_impossible(case: Case) -> bool:
    """True when MFU or HFU is above what clocks can excuse."""
    values = (case.bounded_mfu, finite(case.reading.hfu_weighted) or case.hfu)
    return any(value is not None and value > hard_limit(case) for value in values)


def hard_limit(case: Case) -> float:
    """Above it a reading is impossible: 105%, or the boost margin of a consumer or workstation card by the table.

    A data-center part is held by its power limit, so its highest clock excuses no whole training step above 105%.
    """
    boosts = case.row is not None and case.peak_was_looked_up
    return max(HARD_LIMIT, case.row.boost_margin or 0.0) if case.row is not None and boosts else HARD_LIMIT


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def _rate(value: float) -> str:
    return f"{value / 1e12:,.4g} TFLOP/s"


def ratio_in_words(case: Case) -> str:
    """Numerator and denominator of a reading, both named with their source."""
    known = case.metrics()
    flops = known.get("device_model_flops_per_s")
    numerator = f"{_rate(float(flops))} of model FLOPs per device" if isinstance(flops, float | int) else "model FLOP/s"
    peak, source = case.peak_flops_per_s, known.get("peak_source") or "source unknown"
    denominator = f"a peak of {_rate(peak)}" if peak else "the peak"
    return f"{numerator} over {denominator} ({case.precision or 'precision unknown'}, {case.device_name}; {source})"


def _name_of_bounded(case: Case) -> str:
    """What ``bounded_mfu`` is called: where it is the weighted one, the two values behind it do not give it."""
    if finite(case.reading.mfu_weighted) is None:
        return "MFU"
    plain = "" if case.exact_mfu is None else f", {_percent(case.exact_mfu)} against {case.precision} alone,"
    return f"MFU weighted by precision{plain}"


def _cause_of(case: Case) -> str:
    """A peak that is not from a datasheet is the first suspect."""
    if case.peak_source.startswith("user"):
        return "The peak was given by hand: it is the first to check. " + _GENERIC_CAUSE
    if case.peak_source.startswith("measured"):
        return (
            "The peak was measured, and is not a limit: the device may have been busy or slower then; measure it again."
        )
    return _GENERIC_CAUSE


def _over_peak(case: Case, code: str, name: str, value: float | None) -> Diagnosis | None:
    if value is None or value <= SOFT_LIMIT:
        return None
    limit = hard_limit(case)
    severity = "error" if value > limit else "note"
    ceiling = case.max_clock_ratio
    by_clock = f" By the device's highest clock the ceiling is {_percent(ceiling)}." if ceiling else ""
    verdict = (
        f"more than {_percent(limit)} is impossible, so it is withheld."
        if severity == "error"
        else "slightly above the peak; parts that boost above the datasheet's clock can do that."
    )
    return Diagnosis(
        code=code,
        severity=severity,
        message=f"{name} is {_percent(value)} ({ratio_in_words(case)}); at most 100% was expected: {verdict}{by_clock}",
        evidence={**case.metrics(), "value": value, "hard_limit": limit, "max_clock_ratio": ceiling},
        likely_cause=_cause_of(case)
        if severity == "error"
        else "The clock runs above the one behind the datasheet's value.",
        fix=_GENERIC_FIX if severity == "error" else "Nothing to do; compare runs at the same clocks.",
    )


def mfu_over_peak(case: Case) -> Diagnosis | None:
    """MFU above the peak: an error above 105%, a note from 100%. A weighted reading, where there is one, decides."""
    weighted, mfu = finite(case.reading.mfu_weighted), case.exact_mfu
    if weighted is None or mfu is None:
        return _over_peak(case, "mfu_over_peak", "MFU", mfu)
    if mfu <= SOFT_LIMIT or weighted > SOFT_LIMIT:
        return _over_peak(case, "mfu_over_peak", "MFU", mfu)
    return Diagnosis(
        code="mfu_over_peak",
        severity="note",
        message=f"MFU against the {case.precision} peak alone is {_percent(mfu)}; weighted by precision it is "
        f"{_percent(weighted)}, which physics allows.",
        evidence={**case.metrics(), "mfu_weighted": weighted},
        likely_cause="Part of the FLOPs ran in a precision with a higher peak.",
        fix="Read utilization/mfu_weighted for this run.",
    )


def hfu_over_peak(case: Case) -> Diagnosis | None:
    """HFU above the peak; where precisions are mixed the weighted one is for ``weighted_over_peak``."""
    if finite(case.reading.hfu_weighted) is not None or finite(case.reading.mfu_weighted) is not None:
        return None
    return _over_peak(case, "hfu_over_peak", "HFU", case.hfu)


def weighted_over_peak(case: Case) -> Diagnosis | None:
    """The precision-weighted MFU or HFU above 100%: the reading that physics bounds when precisions are mixed."""
    values = [v for v in (finite(case.reading.mfu_weighted), finite(case.reading.hfu_weighted)) if v is not None]
    return _over_peak(case, "weighted_over_peak", "Utilisation weighted by precision", max(values, default=None))


def hfu_below_mfu(case: Case) -> Diagnosis | None:
    """Hardware FLOPs contain the model's, so HFU below MFU means that the two do not come from the same steps."""
    if case.hfu is None or case.mfu is None or case.reading.convention == "palm":
        return None
    if case.hfu >= case.mfu * (1 - 1e-6):  # rounding of a division
        return None
    return Diagnosis(
        code="hfu_below_mfu",
        severity="error",
        message=f"HFU is {_percent(case.hfu)} and below MFU, {_percent(case.mfu)}; hardware FLOPs contain the model "
        "FLOPs, so HFU is at least MFU.",
        evidence={
            **case.metrics(),
            "hardware_flops": case.window.hardware_flops,
            "model_flops": case.window.model_flops,
        },
        likely_cause="Model FLOPs were taken from a formula or another step, and hardware FLOPs from the count.",
        fix="Take both from the same counted steps, or drop the user-given flops_per_batch.",
    )


def suspicious_mfu(case: Case) -> Diagnosis | None:
    """Below the datasheet peak and above what training reaches: a note or a warning, by the best measured matmul."""
    mfu, peak = case.bounded_mfu, case.peak_flops_per_s
    if mfu is None or mfu > SOFT_LIMIT:
        return None
    best = case.evidence.achievable_flops_per_s
    achievable = best / peak if best and peak else _achievable_of(case, mfu)
    if achievable is None and case.peak_source.startswith("measured"):
        achievable = 1.0  # the peak is the best measured product itself
    warning = achievable if achievable is not None else SUSPICIOUS_WARNING
    note = warning * SUSPICIOUS_NOTE / SUSPICIOUS_WARNING
    if mfu <= note:
        return None
    basis = (
        "the best product measured on this device" if achievable is not None else "what the best bare products reach"
    )
    return Diagnosis(
        code="suspicious_mfu",
        severity="warning" if mfu > warning else "note",
        message=f"{_name_of_bounded(case)} is {_percent(mfu)} ({ratio_in_words(case)}); {basis} is about "
        f"{_percent(warning)} of the peak, "
        f"and whole training steps stay below {_percent(note)} as a rule.",
        evidence={**case.metrics(), "note_above": note, "warning_above": warning, "achievable_fraction": achievable},
        likely_cause="Possible for large products and little else; more often FLOPs counted twice or a peak too low.",
        fix="Compare with `mfu-monitor bench`, which measures the best product of this device.",
    )


def _achievable_of(case: Case, mfu: float) -> float | None:
    """The best measured product as a fraction of the peak, from a reading that was compared with it."""
    share = finite(case.reading.achievable_fraction)
    return mfu / share if share and share > 0 else None


def faster_than_bandwidth(case: Case) -> Diagnosis | None:
    """A step cannot be faster than its weights and gradients, once each, over the memory bandwidth."""
    bandwidth = case.reading.peak_bytes_per_s or (case.peak.bytes_per_s if case.peak else None)
    parts = (case.evidence.parameter_bytes, case.evidence.gradient_bytes)
    bytes_per_step = sum(part or 0 for part in parts) - LAST_LEVEL_CACHE_BYTES
    if not bandwidth or bytes_per_step <= 0 or case.window.steps <= 0 or case.window.elapsed_s <= 0:
        return None
    step_s, least_s = case.window.elapsed_s / case.window.steps, bytes_per_step / bandwidth
    if step_s >= least_s:
        return None
    return Diagnosis(
        code="faster_than_bandwidth",
        severity="error",
        message=f"A step takes {step_s * 1e3:.3g} ms; reading its weights and writing its gradients once takes at "
        f"least {least_s * 1e3:.3g} ms at {bandwidth / 1e12:.3g} TB/s.",
        evidence={
            "step_s": step_s,
            "least_step_s": least_s,
            "bytes_per_step": bytes_per_step,
            "bytes_per_s": bandwidth,
        },
        likely_cause="The clock stopped before the device had finished, or less ran than was counted.",
        fix="Time with the device's own clock (the default on an accelerator), not time.time() around queued work.",
    )


def lower_bound(case: Case) -> Diagnosis | None:
    """Operators ran that could not be counted: the true value is higher."""
    is_bound = case.window.is_lower_bound or "lower_bound" in case.reading.exactness
    if not is_bound and not (case.record is not None and case.record.is_lower_bound):
        return None
    ops = case.record.unsupported_ops if case.record is not None else ()
    parameters = case.record.uncovered_parameters if case.record is not None else ()
    seen = [f"{op.op} in {op.module_fqn or 'the root module'}" for op in ops] + [
        f"parameter {p.name}" for p in parameters
    ]
    return Diagnosis(
        code="lower_bound",
        severity="warning",
        message="MFU is a lower bound: work ran that could not be counted"
        + (f" ({', '.join(seen[:5])}{', ...' if len(seen) > 5 else ''})." if seen else "."),
        evidence={"uncounted": tuple(seen), "mfu": case.mfu},
        likely_cause="Custom kernels or opaque modules without a FLOP formula.",
        fix="Register a formula: @mm.register_flop_formula(op) or @mm.register_module_formula('package.Module').",
    )


def duplicate_data(case: Case) -> Diagnosis | None:
    """Ranks do all of the same work on the same batch: they are paid for and give nothing."""
    others = case.window.duplicate_ranks
    if not others:
        return None
    ranks = f"rank {others[0]}" if len(others) == 1 else f"ranks {', '.join(map(str, others[:5]))}"
    more = f" and {len(others) - 5} more" if len(others) > 5 else ""
    return Diagnosis(
        code="duplicate_data",
        severity="warning",
        message=f"This rank reads the same batch as {ranks}{more} and does all of the same work on it: it counts once.",
        evidence={"duplicate_ranks": tuple(others), "world_size": case.world_size},
        likely_cause="The data loader does not divide the data by ranks: a DistributedSampler is missing, or all ranks "
        "draw their data with one seed.",
        fix="Give the loader a DistributedSampler, or each data-parallel rank a seed of its own; ranks of one "
        "tensor-parallel group must share a batch, and the model must be split between them then.",
    )


def rate_is_none(case: Case) -> Diagnosis | None:
    """There is no MFU: say what is missing. Never 0.0, never infinity."""
    if case.mfu is not None and case.mfu > 0:
        return None
    reason, fix = _missing(case)
    return Diagnosis(
        code="rate_is_none",
        # A value that is not a number (NaN, infinity, below zero) must not be shown; an absent one cannot be.
        severity="warning" if case.reading.mfu is None or case.mfu == 0 else "error",
        message=f"There is no MFU for this window: {case.reading.reason or reason}.",
        evidence={**case.metrics(), "reason": case.reading.reason or reason},
        likely_cause=reason[0].upper() + reason[1:] + ".",
        fix=fix,
    )


def _missing(case: Case) -> tuple[str, str]:
    window = case.window
    if case.reading.mfu is not None and case.mfu is None:
        return "MFU is not a finite number", "Look for a zero time or a zero peak in what made the reading."
    if case.mfu is not None and case.mfu < 0:
        return f"MFU is negative ({case.mfu!r})", "Look for a clock that ran backwards in what made the reading."
    if not window.elapsed_s > 0:
        return (
            f"the window took {window.elapsed_s!r} s",
            "Give a window of at least one step with a clock that advances.",
        )
    if window.world_size < 1:
        return f"the world size is {window.world_size}", "Give a world size of at least 1."
    if not case.peak_flops_per_s:
        return (
            f"no dense peak is known for {case.device_name} at {case.precision or 'this precision'}",
            'Give one with peak=..., in FLOP/s, or measure it with peak="measure".',
        )
    if not window.model_flops:
        return "no product was counted in the window", "Count at least one step; see lower_bound for opaque modules."
    return "the reading carries no MFU", "See the reason that the reading gives."


CHECKS: tuple[Callable[[Case], Diagnosis | None], ...] = (
    weighted_over_peak,
    mfu_over_peak,
    hfu_over_peak,
    hfu_below_mfu,
    faster_than_bandwidth,
    rate_is_none,
    lower_bound,
    duplicate_data,
    suspicious_mfu,
)
CHECK_CODES = tuple(check.__name__ for check in CHECKS)

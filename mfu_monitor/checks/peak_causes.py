"""Causes that lie in the denominator: the peak of another convention, precision or device, or a higher clock."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from mfu_monitor.checks.case import HARD_LIMIT, SOFT_LIMIT, Case
from mfu_monitor.checks.cause_table import devices_with_peak
from mfu_monitor.checks.diagnosis import Diagnosis
from mfu_monitor.checks.hypothesis import DIRECT, EXACT, RATIO, Hypothesis, judge

__all__ = [
    "autocast_not_active",
    "nominal_clock_exceeded",
    "sparse_peak",
    "wrong_device_peak",
    "wrong_precision_peak",
]

_PEAK_TOLERANCE = 0.01
"""Sheets round to three digits: 989 for 989.4, 312, 1979."""

_NO_OTHER_DEVICE = 0.03
"""A peak this near to the right one is that one, rounded: 110 for 112.6 is not the figure of a part that has 110."""


def _corrected(case: Case, right_peak_flops_per_s: float) -> float | None:
    mfu, used = case.bounded_mfu, case.peak_flops_per_s
    return mfu * used / right_peak_flops_per_s if mfu is not None and used else None


def _hypothesis(case: Case, code: str, right: float, predicted: float, **words: object) -> Hypothesis:
    used = case.peak_flops_per_s
    assert used is not None
    fields: dict[str, object] = {
        "tolerance": _PEAK_TOLERANCE,
        "strength": DIRECT,
        "figures": {"peak_flops_per_s": used, "dense_peak_flops_per_s": right, "precision": case.precision},
        **words,
    }
    return Hypothesis(
        code=code,
        quantity=f"Peak at {case.precision} of {case.device_name} in FLOP/s",
        observed=used,
        predicted=predicted,
        expected=right,
        corrected_mfu=_corrected(case, right),
        **fields,  # type: ignore[arg-type]
    )


def sparse_peak(case: Case) -> Iterator[Diagnosis | None]:
    """The sheet's 2:4 sparse figure as the peak of dense products: MFU comes out half of what it is."""
    precision, dense = case.precision or "", case.table_peak_flops_per_s
    sparse = case.evidence.sparse_flops_per_s
    if sparse is None and case.row and precision in case.row.sparse and case.share_of_part:
        sparse = case.row.sparse[precision] * case.share_of_part
    if case.row is None and case.reading.peak_is_dense is False:
        sparse = sparse or case.peak_flops_per_s  # whoever gave the peak says so
    if sparse and dense is None:
        dense = sparse / 2  # 2:4 sparsity doubles the rate of every part whose sheet prints both
    if not (case.peak_flops_per_s and dense and sparse):
        return
    yield _behind_report(case, "sparse_peak", dense, sparse, "the sheet's figure for 2:4 structured sparsity")
    if not case.peak_was_looked_up:
        return
    yield judge(
        case,
        _hypothesis(
            case,
            "sparse_peak",
            right=dense,
            predicted=sparse,
            witness=f"the table gives {dense / 1e12:,.4g} TFLOP/s dense and {sparse / 1e12:,.4g} with 2:4 sparsity",
            cause="The peak is the sheet's figure for 2:4 structured sparsity, which dense training cannot reach.",
            fix=f"Use the dense figure: peak={dense:.4g}, or leave the peak to the table.",
        ),
    )


def wrong_precision_peak(case: Case) -> Iterator[Diagnosis | None]:
    """The device's peak at another precision than the products ran in."""
    right, used, share = case.table_peak_flops_per_s, case.peak_flops_per_s, case.share_of_part
    if not (used and right and share and case.row and case.peak_was_looked_up):
        return
    rates = {name: rate * share for name, rate in case.row.dense.items() if name != case.precision}
    names = " and ".join(name for name, rate in rates.items() if math.isclose(rate, used, rel_tol=_PEAK_TOLERANCE))
    if not names:
        return
    yield judge(
        case,
        _hypothesis(
            case,
            "wrong_precision_peak",
            right=right,
            predicted=used,
            # The sparse figure of one precision is often the dense one of the next: then the sparse figure, which
            # sheets print in large letters, is the likelier slip.
            strength=EXACT,
            witness=f"{used / 1e12:,.4g} TFLOP/s is the {names} peak here, and the products ran in {case.precision}",
            cause=f"The peak is that of {names}; the products that were counted ran in {case.precision}.",
            fix=f"Use the {case.precision} peak, {right:.4g} FLOP/s, or leave the peak to the table.",
        ),
    )


def wrong_device_peak(case: Case) -> Iterator[Diagnosis | None]:
    """The peak of a look-alike: another form factor, a whole GPU for a slice of it, a neighbour in name."""
    yield from _neighbour_peak(case)
    yield _slice_peak(case)
    yield _below_measured(case)


def _behind_report(case: Case, code: str, right: float, other: float, words: str) -> Diagnosis | None:
    """Another tool's MFU whose peak is unknown: the ratio of two peaks fits it, which is no proof."""
    reported, ours = case.evidence.reported_mfu, case.bounded_mfu
    is_right = case.peak_flops_per_s is not None and math.isclose(case.peak_flops_per_s, right, rel_tol=_PEAK_TOLERANCE)
    if not (reported and ours and is_right and ours > 0):
        return None
    return judge(
        case,
        Hypothesis(
            code=code,
            quantity="reported MFU, as a fraction",
            observed=reported,
            predicted=ours * right / other,
            expected=ours,
            corrected_mfu=ours,
            witness=None,
            cause=f"The peak behind the report is {words}.",
            fix=f"Look up the peak that the report used; dense it is {right:.4g} FLOP/s here.",
        ),
    )


def _neighbours(case: Case) -> Mapping[str, float]:
    if case.evidence.neighbour_peaks:
        return case.evidence.neighbour_peaks
    precision = case.precision or ""
    rows = case.row.neighbours if case.row else {}
    return {name: peaks[precision] for name, peaks in rows.items() if precision in peaks}


def _neighbour_peak(case: Case) -> Iterator[Diagnosis | None]:
    right, used = case.table_peak_flops_per_s, case.peak_flops_per_s
    if not (used and right):
        return
    look_alikes = _neighbours(case)
    for name, rate in look_alikes.items():
        yield _behind_report(case, "wrong_device_peak", right, rate, f"that of {name}")
    if not case.peak_was_looked_up or math.isclose(used, right, rel_tol=_NO_OTHER_DEVICE):
        return
    others = devices_with_peak(case.precision or "", used, rel_tol=_PEAK_TOLERANCE)
    for name, rate in {**dict.fromkeys(others, used), **look_alikes}.items():
        yield judge(
            case,
            _hypothesis(
                case,
                "wrong_device_peak",
                right=right,
                predicted=rate,
                strength=EXACT if name in look_alikes else RATIO,
                witness=f"the driver says {case.device_name}, {right / 1e12:,.4g} TFLOP/s; "
                f"{rate / 1e12:,.4g} is {name}'s",
                cause=f"The peak is that of {name}, not of {case.device_name}.",
                fix=f"Use {right:.4g} FLOP/s, or leave the peak to the table, which matches the whole device name.",
            ),
        )


def _slice_peak(case: Case) -> Diagnosis | None:
    """A MIG slice or a cut-down part with the whole product's peak: the driver's count of multiprocessors shows it."""
    share, used = case.share_of_part, case.peak_flops_per_s
    full = case.row.dense.get(case.precision or "") if case.row else used
    if not (share and used and full) or share >= 1:
        return None
    return judge(
        case,
        _hypothesis(
            case,
            "wrong_device_peak",
            right=full * share,
            predicted=full,
            witness=f"the driver reports {100 * share:.3g}% of the whole part's multiprocessors",
            cause="The peak is that of the whole part; this device is a slice (MIG) or a cut-down version of it.",
            fix=f"Scale the peak by the multiprocessors: {full * share:.4g} FLOP/s.",
        ),
    )


def _below_measured(case: Case) -> Diagnosis | None:
    """A product measured on this device is faster than the peak: the peak is another device's, or a slip of the pen."""
    best, used = case.evidence.achievable_flops_per_s, case.peak_flops_per_s
    if not (best and used) or best <= HARD_LIMIT * used:
        return None
    return judge(
        case,
        _hypothesis(
            case,
            "wrong_device_peak",
            right=best,
            predicted=used,
            highest_mfu=SOFT_LIMIT,  # against a measured product a step can come near 1
            witness=f"the best product measured here runs at {best / 1e12:,.4g} TFLOP/s, above the peak of "
            f"{used / 1e12:,.4g}",
            cause="The peak is lower than what this device was measured to do: it is not this device's peak.",
            fix='Leave the peak to the table, or measure it with peak="measure".',
        ),
    )


def nominal_clock_exceeded(case: Case) -> Iterator[Diagnosis | None]:
    """A reading just above 100% that the maximum clock over the sheet's clock accounts for: a note, never an error."""
    values = [v for v in (case.bounded_mfu, case.hfu) if v is not None]
    value, ratio = max(values, default=0.0), case.clock_ratio
    if not (ratio and SOFT_LIMIT < value <= HARD_LIMIT and value <= ratio):
        return
    yield Diagnosis(
        code="nominal_clock_exceeded",
        severity="note",
        message=f"The reading is {100 * value:.1f}%; {case.device_name} runs at up to {100 * ratio:.1f}% of the clock "
        "behind its sheet's figure.",
        evidence={"value": value, "clock_ratio": ratio, "peak_flops_per_s": case.peak_flops_per_s},
        likely_cause="The device ran above the clock that the sheet's peak is computed from.",
        fix="Nothing to do; lock the clocks to compare runs.",
    )


_PROMISES = {
    "bf16": "bf16",
    "bfloat16": "bf16",
    "16": "fp16",
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "fp8": "fp8",
}
"""First words of Lightning's ``precision`` and of dtype names that promise a 16- or 8-bit product."""


def autocast_not_active(case: Case) -> Iterator[Diagnosis | None]:
    """The configuration promises 16-bit or 8-bit products and most of the counted FLOPs ran in a wider precision."""
    promised = _promised(case)
    flops = case.window.model_flops_by_precision or _flops_by_precision(case)
    total = sum(flops.values())
    wide = sum(count for name, count in flops.items() if name in ("fp64", "fp32", "tf32"))
    if promised is None or not total or wide <= total / 2:
        return
    active = max(flops, key=lambda name: flops[name])
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


def _promised(case: Case) -> str | None:
    words = (case.evidence.promised_precision or "").lower().removeprefix("torch.").split("-")
    return _PROMISES.get(words[0]) or ("fp8" if "transformer" in words[0] else None)


def _flops_by_precision(case: Case) -> Mapping[str, int]:
    if case.record is not None:
        return {name: totals.model_flops for name, totals in case.record.by_dtype().items()}
    return {case.reading.precision: 1} if case.reading.precision else {}

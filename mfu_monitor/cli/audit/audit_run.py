"""Audit of a run that was not monitored: facts in, verdict out. Pure; the command line reads logs and calls this.

MFU by two published formulas, both with one multiply-add as 2 FLOPs and the dense peak:
6 N D (Kaplan et al. 2020, https://arxiv.org/abs/2001.08361) and PaLM's 6 N + 12 L H Q T (Chowdhery et al. 2022,
https://arxiv.org/abs/2204.02311, appendix B); and the latter with the attended pairs of causal attention alone.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mfu_monitor.checks import Diagnosis, Evidence, check, withheld
from mfu_monitor.checks.limits import HARD_LIMIT, SUSPICIOUS_NOTE
from mfu_monitor.cli.audit.claims import Basis, Claim, claims_of
from mfu_monitor.errors import ConfigurationError
from mfu_monitor.formulas.analytic import AttentionShape, Layers
from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.timing.step_window import StepWindow
from mfu_monitor.utilization import UtilizationReading

__all__ = ["AuditFacts", "AuditReport", "CannotJudgeError", "LogSeries", "audit_run"]

_SECONDS_PER_HOUR = 3600.0
_MOST = 1e30
"""Beyond any run that was or will be: products of a few such numbers stay finite."""
_FORWARD_SHARE = 1 / 3
"""Of a training step's model FLOPs: 2 of the 6 per parameter and token, 4 of attention's 12."""


class CannotJudgeError(ConfigurationError):
    """The input is in order, and there is nothing in it that could be judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSeries:
    """What a log holds, in the order written; a column that it lacks is empty. Rates are the world's."""

    source: str = ""
    steps: tuple[float, ...] = ()
    tokens_per_s: tuple[float, ...] = ()
    step_s: tuple[float, ...] = ()
    mfu: tuple[float, ...] = ()
    """Reported, as a fraction."""
    timestamps_s: tuple[float, ...] = ()
    readings: tuple[UtilizationReading, ...] = ()
    """Of our own log: each is checked again."""
    tokens_per_s_from: str = ""
    """The column."""
    hfu: tuple[float, ...] = ()
    """Reported."""
    device_flops_per_s: tuple[float, ...] = ()
    """Reported model FLOP/s of one GPU."""
    convention: str = ""
    """By which the tool that wrote the log counts, where that is known."""
    elapsed_s: float | None = None
    """Wall time of the run."""
    tokens_per_step: float | None = None
    understood: tuple[tuple[str, str, str, str], ...] = ()
    """Of each column its name, quantity, unit and scope."""
    notes: tuple[str, ...] = ()
    """What was assumed, left out, or does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFacts:
    """What is known of a run. Everything is optional, as long as something can be judged.

    Example:
        >>> facts = AuditFacts(parameters=70e9, tokens_per_s=3000.0, peak=mm.device_peak("NVIDIA H100 80GB HBM3"))
        >>> audit_run(facts).verdict
        'impossible'
    """

    peak: DevicePeak | None = None
    precision: str = "bf16"
    gpus: int = 1
    parameters: float | None = None
    active_parameters: float | None = None
    """Of a mixture of experts: those that one token passes through."""
    layers: int | None = None
    heads: int | None = None
    """Query heads; grouped-query attention does not lower the FLOPs."""
    head_width: int | None = None
    sequence_length: int | None = None
    is_causal: bool = True
    attention: AttentionShape | None = None
    """In place of the shapes above, where widths or layers differ."""
    precision_shares: Mapping[str, float] = field(default_factory=dict)
    """Shares of the FLOPs by precision, of a run that mixes them; they add up to 1."""
    recompute: float | str | None = None
    """Share of the forward that is run again in backward (1.0: all), or ``"selective"``: attention's core alone."""
    tokens_per_s: float | None = None
    """Of all GPUs together."""
    tokens_per_step: float | None = None
    """Of all GPUs together, a whole optimizer step."""
    step_s: float | None = None
    device_flops_per_s: float | None = None
    """Reported model FLOP/s of one GPU."""
    device_hardware_flops_per_s: float | None = None
    """Reported FLOP/s of one GPU with what was computed again."""
    reported_mfu: float | None = None
    reported_hfu: float | None = None
    reported_peak_flops_per_s: float | None = None
    """The peak that the reported MFU was made with."""
    tokens: float | None = None
    """Trained so far."""
    elapsed_s: float | None = None
    gpu_hours: float | None = None
    price_per_gpu_hour: float | None = None
    accumulate_grad_batches: int | None = None
    series: LogSeries | None = None

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and not 0 <= value <= _MOST:
                raise ConfigurationError(f"AuditFacts({f.name}={value!r}): a number from 0 to {_MOST:g} was expected")
        _positive(self)


def _positive(facts: AuditFacts) -> None:
    """What is divided by must not be zero."""
    for name in ("gpus", "elapsed_s", "step_s", "gpu_hours", "parameters", "tokens_per_s", "reported_peak_flops_per_s"):
        if getattr(facts, name) == 0:
            raise ConfigurationError(
                f"AuditFacts({name}=0): a number above 0 was expected; a time of zero gives no rate. "
                f"Leave it out where it is unknown."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """What the audit found. Fractions are 0..1; unknown is None and ``notes`` say why."""

    verdict: str
    """``"plausible"``, ``"suspicious"``, ``"contradicted"`` (by its own inputs) or ``"impossible"``."""
    mfu: float | None = None
    """The best of the values below: exact, else PaLM's, else 6 N D, else the reported FLOP/s over the peak."""
    mfu_6nd: float | None = None
    mfu_palm: float | None = None
    mfu_exact: float | None = None
    """With attended pairs of causal attention only."""
    hfu: float | None = None
    reported_mfu: float | None = None
    tokens_per_s: float | None = None
    flops_per_token: float | None = None
    device_flops_per_s: float | None = None
    peak_flops_per_s: float | None = None
    peak_source: str = ""
    device_name: str = ""
    precision: str = ""
    gpus: int = 1
    gpu_hours: float | None = None
    cost: float | None = None
    rows: int = 0
    """Rows of the log that were judged."""
    impossible_rows: int = 0
    first_impossible_step: float | None = None
    claims: tuple[Claim, ...] = ()
    """Each claim against what the others imply."""
    understood: tuple[tuple[str, str, str, str], ...] = ()
    """Of each column of the log its name, quantity, unit and scope."""
    diagnoses: tuple[Diagnosis, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_impossible(self) -> bool:
        """True when physics forbids what was computed or what was reported."""
        return self.verdict == "impossible"

    def to_dict(self) -> dict[str, Any]:
        """Plain types for JSON."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {
            **values,
            "claims": [dataclasses.asdict(claim) for claim in self.claims],
            "understood": [
                dict(zip(("column", "quantity", "unit", "scope"), row, strict=True)) for row in self.understood
            ],
            "diagnoses": [d.to_dict() for d in self.diagnoses],
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _FlopsPerToken:
    """FLOPs of a token by each formula; None where the shapes are unknown."""

    six_n: float | None
    palm: float | None
    exact: float | None
    attention_exact: float

    @property
    def best(self) -> float | None:
        return self.exact or self.palm or self.six_n


def audit_run(facts: AuditFacts) -> AuditReport:
    """Judge a run by what is known of it.

    Args:
        facts: numbers, and the log if there is one.

    Returns:
        MFU by each formula that the facts allow, the verdict, the suspected faults, GPU-hours and cost.

    Raises:
        ConfigurationError: the facts hold nothing that can be judged.

    Example:
        PaLM 540B from its published inputs: 0.457 by 6 N D, 0.462 by its own formula.
    """
    per_token = _flops_per_token(facts)
    tokens_per_s = _tokens_per_s(facts)
    mfu_of = _MfuOf(facts, tokens_per_s)
    mfu = mfu_of(per_token.best)
    reported = _reported_mfu(facts)
    if mfu is None and reported is None:
        raise CannotJudgeError(_nothing_to_judge(facts))
    _meant(facts, mfu, reported)
    hfu = _hfu(facts, per_token, mfu)
    diagnoses = _diagnoses(facts, per_token, mfu, hfu, tokens_per_s)
    rows = _row_mfus(facts, per_token)
    impossible = [step for step, value in rows if value > HARD_LIMIT]
    claims = claims_of(_basis(facts, per_token, tokens_per_s, mfu))
    return AuditReport(
        verdict=_verdict(mfu, hfu, reported, diagnoses, impossible, claims),
        mfu=mfu,
        mfu_6nd=mfu_of(per_token.six_n) if tokens_per_s and per_token.six_n else None,
        mfu_palm=mfu_of(per_token.palm) if tokens_per_s and per_token.palm else None,
        mfu_exact=mfu_of(per_token.exact) if tokens_per_s and per_token.exact else None,
        hfu=hfu,
        reported_mfu=reported,
        tokens_per_s=tokens_per_s,
        flops_per_token=per_token.best,
        device_flops_per_s=mfu * _peak(facts) if mfu is not None else None,
        peak_flops_per_s=_peak(facts) or None,
        peak_source=facts.peak.source if facts.peak else "",
        device_name=facts.peak.device_name if facts.peak else "",
        precision=_precision(facts),
        gpus=facts.gpus,
        gpu_hours=_gpu_hours(facts, per_token, tokens_per_s),
        cost=_cost(facts, per_token, tokens_per_s),
        rows=len(rows),
        impossible_rows=len(impossible),
        first_impossible_step=impossible[0] if impossible else None,
        claims=claims,
        understood=facts.series.understood if facts.series else (),
        diagnoses=diagnoses,
        notes=_notes(facts, per_token, tokens_per_s),
    )


def _meant(facts: AuditFacts, mfu: float | None, reported: float | None) -> None:
    """Numbers that nobody means are not judged."""
    n = facts.active_parameters or facts.parameters
    if n is not None and n < 1e4:
        raise CannotJudgeError(f"{n:g} parameters are not a language model; was {n:g}B meant? Give --params {n:g}B")
    if (value := mfu if mfu is not None else reported) is not None and value < _LEAST_MFU:
        raise CannotJudgeError(
            f"an MFU of {value:.2%} is not training on this device: a number is in another unit than it was given in "
            "(tokens/s, parameters, GPUs, the time of a step), or of another run"
        )


_LEAST_MFU = 5e-5
"""0.005%: it prints as 0.0%."""


def _basis(facts: AuditFacts, per_token: _FlopsPerToken, tokens_per_s: float | None, mfu: float | None) -> Basis:
    """What claims are held against."""
    series = facts.series or LogSeries()
    n, active = facts.parameters, facts.active_parameters
    flops = facts.device_flops_per_s
    hours = facts.gpu_hours is not None and facts.elapsed_s is not None
    return Basis(
        gpus=facts.gpus,
        peak=_peak(facts) or None,
        peaks=dict(facts.peak.flops_per_s_by_precision) if facts.peak else {},
        sparse_peaks=dict(facts.peak.sparse_flops_per_s_by_precision) if facts.peak else {},
        precision=_precision(facts),
        flops_per_token={"exact": per_token.exact, "PaLM": per_token.palm, "6ND": per_token.six_n},
        tokens_per_s=tokens_per_s,
        rate_is_of_totals=_has_no_rate(facts),
        hardware_factor=_hardware_factor(facts, per_token),
        inactive_ratio=n / active if n and active and active < n else None,
        mfu=_reported_mfu(facts),
        hfu=facts.reported_hfu if facts.reported_hfu is not None else _middle(series.hfu),
        device_flops_per_s=flops if flops is not None else _middle(series.device_flops_per_s),
        device_hardware_flops_per_s=facts.device_hardware_flops_per_s,
        claimed_peak=facts.reported_peak_flops_per_s,
        tokens=facts.tokens,
        elapsed_s=facts.elapsed_s,
        gpu_hours=facts.gpu_hours if hours or not _has_no_rate(facts) else None,
        convention={"palm": "PaLM", "6nd": "6ND", "exact": "exact"}.get(series.convention, ""),
    )


def _middle(values: tuple[float, ...]) -> float | None:
    return statistics.median(values) if values else None


def _has_no_rate(facts: AuditFacts) -> bool:
    """True where tokens/s are themselves tokens over time."""
    return _tokens_per_s(dataclasses.replace(facts, tokens=None)) is None


def _nothing_to_judge(facts: AuditFacts) -> str:
    """What is missing, for the message."""
    if not _peak(facts):
        seen = "no device" if facts.peak is None else f"no {_precision(facts)} peak of {facts.peak.device_name}"
        return f"{seen} was given, so there is no MFU; give one such as --gpu 'H100 SXM' --precision bf16"
    has_n, has_rate = facts.parameters or facts.active_parameters, _tokens_per_s(facts)
    missing = [] if has_n else ["parameters (--params 70B)"]
    if not has_rate:
        missing.append("a rate (--tokens-per-s 3000, --tokens-per-step and --step-time, or --tokens and --gpu-hours)")
    return (
        f"nothing to judge: {' and '.join(missing)} missing. Or give what was reported: --reported-mfu 46.2% or "
        "--flops-per-s-per-gpu 430T, or a log with such a column"
    )


def _flops_per_token(facts: AuditFacts) -> _FlopsPerToken:
    n, shape = facts.active_parameters or facts.parameters, _attention_shape(facts)
    if n is None:
        return _FlopsPerToken(six_n=None, palm=None, exact=None, attention_exact=0.0)
    if shape is None:
        return _FlopsPerToken(six_n=6 * n, palm=None, exact=None, attention_exact=0.0)
    attended = shape.flops_per_token()
    palm = 6 * n + shape.flops_per_token("palm")
    return _FlopsPerToken(six_n=6 * n, palm=palm, exact=6 * n + attended, attention_exact=attended)


def _attention_shape(facts: AuditFacts) -> AttentionShape | None:
    """As it was given whole, or by its parts."""
    layers, heads, head_width, length = facts.layers, facts.heads, facts.head_width, facts.sequence_length
    if facts.attention is not None:
        return facts.attention
    if layers is None or heads is None or head_width is None or length is None:
        return None
    return AttentionShape(
        heads=heads, qk_width=head_width, v_width=head_width, sequence_length=length,
        layers=(Layers(count=layers),), is_causal=facts.is_causal,
    )  # fmt: skip


def _tokens_per_s(facts: AuditFacts) -> float | None:
    """Given, else by step, else by the log's median, else by what was trained in the time that it took."""
    series = facts.series or LogSeries()
    if facts.tokens_per_s is not None:
        return facts.tokens_per_s
    if facts.tokens_per_step and facts.step_s:
        return facts.tokens_per_step / facts.step_s
    if series.tokens_per_s:
        return statistics.median(series.tokens_per_s)
    if (per_step := facts.tokens_per_step or series.tokens_per_step) and series.step_s:
        return per_step / statistics.median(series.step_s)
    elapsed_s = facts.elapsed_s or (facts.gpu_hours * _SECONDS_PER_HOUR / facts.gpus if facts.gpu_hours else None)
    return facts.tokens / elapsed_s if facts.tokens and elapsed_s else None


def _peak(facts: AuditFacts) -> float:
    """Of one GPU; of a mix of precisions what it allows."""
    if facts.peak is None:
        return 0.0
    if facts.precision_shares:
        return facts.peak.weighted_flops_per_s(facts.precision_shares) or 0.0
    return facts.peak.flops_per_s_by_precision.get(facts.precision) or 0.0


def _precision(facts: AuditFacts) -> str:
    """``"bf16"``, or ``"70% fp8, 30% bf16"``."""
    return ", ".join(f"{share:.0%} {name}" for name, share in facts.precision_shares.items()) or facts.precision


@dataclass(frozen=True, slots=True)
class _MfuOf:
    """FLOPs of a token -> MFU; without tokens/s the reported FLOP/s decide."""

    facts: AuditFacts
    tokens_per_s: float | None

    def __call__(self, flops_per_token: float | None) -> float | None:
        peak = _peak(self.facts)
        if not peak:
            return None
        if flops_per_token is not None and self.tokens_per_s is not None:
            return flops_per_token * self.tokens_per_s / (self.facts.gpus * peak)
        flops = self.facts.device_flops_per_s
        if flops is None and self.facts.series is not None:
            flops = _middle(self.facts.series.device_flops_per_s)
        return flops / peak if flops is not None else None


def _reported_mfu(facts: AuditFacts) -> float | None:
    if facts.reported_mfu is not None:
        return facts.reported_mfu
    series = facts.series
    return _middle(series.mfu) if series else None


def _hfu(facts: AuditFacts, per_token: _FlopsPerToken, mfu: float | None) -> float | None:
    factor = _hardware_factor(facts, per_token)
    return mfu * factor if mfu is not None and factor is not None else None


def _hardware_factor(facts: AuditFacts, per_token: _FlopsPerToken) -> float | None:
    """Hardware over model FLOPs by the share of the forward that runs again; None where nothing was said of it."""
    if facts.recompute is None:
        return None
    if isinstance(facts.recompute, str):
        best = per_token.best
        return 1 + _FORWARD_SHARE * per_token.attention_exact / best if best and per_token.attention_exact else None
    return 1 + _FORWARD_SHARE * facts.recompute


def _gpu_hours(facts: AuditFacts, per_token: _FlopsPerToken, tokens_per_s: float | None) -> float | None:
    """Given, else GPUs x time so far, else what the tokens take at this rate, or at the reported MFU."""
    if facts.gpu_hours is not None:
        return facts.gpu_hours
    seconds = facts.elapsed_s or _log_seconds(facts.series)
    if seconds is None and facts.tokens and tokens_per_s:
        seconds = facts.tokens / tokens_per_s
    if seconds is not None:
        return facts.gpus * seconds / _SECONDS_PER_HOUR
    mfu, peak = _reported_mfu(facts) or _MfuOf(facts, None)(None), _peak(facts)
    if facts.tokens and per_token.best and mfu and peak:
        return facts.tokens * per_token.best / (mfu * peak) / _SECONDS_PER_HOUR
    return None


def _log_seconds(series: LogSeries | None) -> float | None:
    if series is None:
        return None
    if series.elapsed_s is not None:
        return series.elapsed_s
    if len(series.timestamps_s) > 1:
        return max(series.timestamps_s) - min(series.timestamps_s)
    return sum(series.step_s) if series.step_s else None


def _cost(facts: AuditFacts, per_token: _FlopsPerToken, tokens_per_s: float | None) -> float | None:
    hours = _gpu_hours(facts, per_token, tokens_per_s)
    return hours * facts.price_per_gpu_hour if hours is not None and facts.price_per_gpu_hour is not None else None


def _row_mfus(facts: AuditFacts, per_token: _FlopsPerToken) -> list[tuple[float | None, float]]:
    """(step, MFU) of each row of the log: what it reports, and what its own rate gives where it reports none."""
    series = facts.series
    if series is None:
        return []
    values = series.mfu or tuple(m for t in _row_rates(facts) if (m := _MfuOf(facts, t)(per_token.best)) is not None)
    steps = series.steps if len(series.steps) == len(values) else tuple(range(len(values)))
    return list(zip(steps, values, strict=True))


def _row_rates(facts: AuditFacts) -> tuple[float, ...]:
    series = facts.series or LogSeries()
    per_step = facts.tokens_per_step or series.tokens_per_step
    if series.tokens_per_s or not per_step:
        return series.tokens_per_s
    return tuple(per_step / s for s in series.step_s)


def _diagnoses(
    facts: AuditFacts, per_token: _FlopsPerToken, mfu: float | None, hfu: float | None, tokens_per_s: float | None
) -> tuple[Diagnosis, ...]:
    """The checks on our own value, with what was reported as a claim; without one of ours, on what was reported."""
    reported = _reported_mfu(facts)
    reading = _reading(facts, per_token, mfu if mfu is not None else reported, hfu, tokens_per_s)
    diagnoses = _replayed(facts.series)
    diagnoses += list(check(reading, peak=facts.peak, evidence=_evidence(facts, reported if mfu is not None else None)))
    if reported is not None and mfu is not None and facts.reported_peak_flops_per_s:
        diagnoses = [*_reported_peak(facts, reported), *diagnoses]
    if reported is not None and mfu is not None and reported > 1:
        diagnoses.append(_reported_over_peak(reported, mfu))
    distinct: dict[str, Diagnosis] = {}
    for diagnosis in diagnoses:
        distinct.setdefault(diagnosis.code, diagnosis)
    distinct.pop("rate_is_none", None)  # what is missing is said in the notes, or is an error
    return tuple(_named_inputs(d, facts, per_token, tokens_per_s) for d in distinct.values())


def _replayed(series: LogSeries | None) -> list[Diagnosis]:
    """What the readings of our own log give when they are checked again: the first of each code."""
    found: dict[str, Diagnosis] = {}
    for reading in series.readings if series is not None else ():
        for diagnosis in check(reading):
            found.setdefault(diagnosis.code, diagnosis)
    return list(found.values())


def _reading(
    facts: AuditFacts, per_token: _FlopsPerToken, mfu: float | None, hfu: float | None, tokens_per_s: float | None
) -> UtilizationReading:
    """One second of one GPU, as a monitor would have read it."""
    peak = _peak(facts)
    flops = mfu * peak if mfu is not None and peak else None
    palm = flops * per_token.palm / per_token.best if flops and per_token.palm and per_token.best else None
    factor = _hardware_factor(facts, per_token)
    hardware = flops * factor if flops and factor else None
    window = StepWindow(
        first_step=0,
        last_step=0,
        steps=1,
        elapsed_s=1.0,
        wall_s=1.0,
        tokens=round(tokens_per_s / facts.gpus) if tokens_per_s else None,
        model_flops=round(flops) if flops else None,
        model_flops_by_precision={p: round(s * flops) for p, s in facts.precision_shares.items()} if flops else {},
        palm_model_flops=round(palm) if palm else None,
        hardware_flops=round(hardware) if hardware else None,
        recompute_flops=round(hardware - flops) if hardware and flops else None,
        world_size=facts.gpus,
    )
    active = facts.peak.flops_per_s_by_precision.get(facts.precision) if facts.peak and facts.precision_shares else None
    scale = peak / active if active and peak else 1.0
    return UtilizationReading(
        window=window,
        mfu=None if mfu is None else mfu * scale,
        hfu=None if hfu is None else hfu * scale,
        mfu_weighted=mfu if active else None,
        hfu_weighted=hfu if active else None,
        device_name=facts.peak.device_name if facts.peak else "",
        precision=facts.precision,
        peak_flops_per_s=active or peak or None,
        peak_source=facts.peak.source if facts.peak else None,
    )


_HISTORY_POINTS = 50


def _evidence(facts: AuditFacts, reported: float | None) -> Evidence:
    series = facts.series or LogSeries()
    n, active = facts.parameters, facts.active_parameters
    stride = max(1, len(series.mfu) // _HISTORY_POINTS)
    history = zip(series.steps, series.mfu, strict=True) if len(series.steps) == len(series.mfu) else ()
    return Evidence(
        reported_mfu=reported or None,
        parameters=n,
        inactive_expert_parameters=n - active if n and active and active < n else None,
        accumulate_grad_batches=facts.accumulate_grad_batches,
        timestamps_s=series.timestamps_s,
        mfu_history=tuple((round(step), value) for step, value in list(history)[::stride]),
    )


def _reported_peak(facts: AuditFacts, reported: float) -> list[Diagnosis]:
    """The peak behind what was reported, against the table's."""
    used = facts.reported_peak_flops_per_s
    reading = dataclasses.replace(
        _reading(facts, _flops_per_token(facts), reported, None, None),
        peak_flops_per_s=used,
        peak_source="reported",
    )
    window = dataclasses.replace(reading.window, model_flops=None, palm_model_flops=None)
    found = check(dataclasses.replace(reading, window=window), peak=facts.peak)
    return [d for d in found if d.code in ("sparse_peak", "wrong_precision_peak", "wrong_device_peak")]


def _reported_over_peak(reported: float, mfu: float) -> Diagnosis:
    return Diagnosis(
        code="mfu_over_peak",
        severity="error" if reported > HARD_LIMIT else "note",
        message=f"The reported MFU is {100 * reported:.1f}%; at most 100% was expected. By the inputs it is "
        f"{100 * mfu:.1f}%.",
        evidence={"reported_mfu": reported, "mfu": mfu},
        likely_cause=f"The report is {reported / mfu:.3g} times what its inputs give.",
        fix="Compare the FLOPs, the time and the peak behind the report with those printed here.",
    )


def _named_inputs(
    diagnosis: Diagnosis, facts: AuditFacts, per_token: _FlopsPerToken, tokens_per_s: float | None
) -> Diagnosis:
    """An impossible MFU is reported with the inputs that were given; what a clock explains stays as it is."""
    is_impossible = diagnosis.code == "mfu_over_peak" and diagnosis.severity == "error"
    if not is_impossible or "reported_mfu" in diagnosis.evidence or per_token.best is None or tokens_per_s is None:
        return diagnosis
    n, peak = facts.active_parameters or facts.parameters or 0, _peak(facts)
    inputs = (
        f"{n:,.4g} parameters, {tokens_per_s:,.4g} tokens/s on {facts.gpus} GPU{'s' if facts.gpus > 1 else ''}: "
        f"{per_token.best * tokens_per_s / facts.gpus / 1e12:,.4g} TFLOP/s per GPU, over {peak / 1e12:,.4g} TFLOP/s "
        f"{_precision(facts)} dense ({diagnosis.evidence.get('peak_source')})"
    )
    return dataclasses.replace(
        diagnosis,
        message=f"{diagnosis.message.split(' (')[0]} from {inputs}. At most 100% is possible.",
        likely_cause="Tokens/s of more GPUs than were given, tokens/s that were counted wrongly, parameters that one "
        "token does not pass through, or another device or precision.",
        fix="Check that tokens/s and the number of GPUs belong together, and give --active-params for experts.",
    )


def _verdict(
    mfu: float | None,
    hfu: float | None,
    reported: float | None,
    diagnoses: tuple[Diagnosis, ...],
    impossible: list[float | None],
    claims: tuple[Claim, ...],
) -> str:
    if withheld(diagnoses) or impossible or any(v is not None and v > HARD_LIMIT for v in (mfu, hfu, reported)):
        return "impossible"
    if any(claim.is_contradicted for claim in claims):
        return "contradicted"
    is_high = any(v is not None and v > SUSPICIOUS_NOTE for v in (mfu, reported))
    return "suspicious" if is_high or any(d.severity == "warning" for d in diagnoses) else "plausible"


def _notes(facts: AuditFacts, per_token: _FlopsPerToken, tokens_per_s: float | None) -> tuple[str, ...]:
    notes = []
    if per_token.six_n is not None and per_token.palm is None and tokens_per_s is not None:
        notes.append("attention is left out; give --layers, --heads, --head-width and --sequence-length to count it")
    if isinstance(facts.recompute, float | int) and facts.recompute:
        notes.append("HFU by the share of the forward that runs again; what really reruns depends on the checkpointing")
    if facts.peak is not None and facts.peak.confidence == "low":
        notes.append("the peak of this device is known with low confidence only")
    return (*notes, *(facts.series.notes if facts.series else ()))

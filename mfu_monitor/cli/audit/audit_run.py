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
from functools import cached_property
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
    run = _Run(facts)
    run.refuse_what_cannot_be_meant()
    impossible = [step for step, value in run.row_mfus if value > HARD_LIMIT]
    return AuditReport(
        verdict=run.verdict(impossible),
        mfu=run.mfu,
        mfu_6nd=run.mfu_by("6ND"),
        mfu_palm=run.mfu_by("PaLM"),
        mfu_exact=run.mfu_by("exact"),
        hfu=run.hfu,
        reported_mfu=run.reported_mfu,
        tokens_per_s=run.tokens_per_s,
        flops_per_token=run.best,
        device_flops_per_s=run.mfu * run.peak if run.mfu is not None else None,
        peak_flops_per_s=run.peak or None,
        peak_source=facts.peak.source if facts.peak else "",
        device_name=facts.peak.device_name if facts.peak else "",
        precision=run.precision,
        gpus=facts.gpus,
        gpu_hours=run.gpu_hours,
        cost=_product(run.gpu_hours, facts.price_per_gpu_hour),
        rows=len(run.row_mfus),
        impossible_rows=len(impossible),
        first_impossible_step=impossible[0] if impossible else None,
        claims=run.claims,
        understood=run.series.understood,
        diagnoses=run.diagnoses,
        notes=run.notes(),
    )


_LEAST_MFU = 5e-5
"""0.005%: it prints as 0.0%."""
_HISTORY_POINTS = 50


def _middle(values: tuple[float, ...]) -> float | None:
    return statistics.median(values) if values else None


def _product(value: float | None, factor: float | None) -> float | None:
    return value * factor if value is not None and factor is not None else None


class _Run:
    """What follows from the facts, each number computed once. Unknown is None."""

    def __init__(self, facts: AuditFacts) -> None:
        self.facts = facts
        self.series = facts.series or LogSeries()

    # What was given, or follows from it without a formula.

    @property
    def parameters(self) -> float | None:
        """Those that work on a token."""
        return self.facts.active_parameters or self.facts.parameters

    @property
    def precision(self) -> str:
        """``"bf16"``, or ``"70% fp8, 30% bf16"``."""
        shares = self.facts.precision_shares
        return ", ".join(f"{share:.0%} {name}" for name, share in shares.items()) or self.facts.precision

    @cached_property
    def peak(self) -> float:
        """Of one GPU, of a mix of precisions what it allows; 0 where it is unknown."""
        peak, shares = self.facts.peak, self.facts.precision_shares
        if peak is None:
            return 0.0
        rate = peak.weighted_flops_per_s(shares) if shares else peak.flops_per_s_by_precision.get(self.facts.precision)
        return rate or 0.0

    @property
    def reported_mfu(self) -> float | None:
        return self.facts.reported_mfu if self.facts.reported_mfu is not None else _middle(self.series.mfu)

    @property
    def device_flops_per_s(self) -> float | None:
        """As reported."""
        given = self.facts.device_flops_per_s
        return given if given is not None else _middle(self.series.device_flops_per_s)

    @cached_property
    def stated_tokens_per_s(self) -> float | None:
        """Given, else by step, else the log's median."""
        facts, series = self.facts, self.series
        if facts.tokens_per_s is not None:
            return facts.tokens_per_s
        if facts.tokens_per_step and facts.step_s:
            return facts.tokens_per_step / facts.step_s
        if series.tokens_per_s:
            return statistics.median(series.tokens_per_s)
        if (per_step := facts.tokens_per_step or series.tokens_per_step) and series.step_s:
            return per_step / statistics.median(series.step_s)
        return None

    @cached_property
    def tokens_per_s(self) -> float | None:
        """As stated, else by what was trained in the time that it took."""
        facts = self.facts
        elapsed_s = facts.elapsed_s or (facts.gpu_hours * _SECONDS_PER_HOUR / facts.gpus if facts.gpu_hours else None)
        from_totals = facts.tokens / elapsed_s if facts.tokens and elapsed_s else None
        return from_totals if self.stated_tokens_per_s is None else self.stated_tokens_per_s

    # FLOPs and MFU.

    @cached_property
    def attention_flops_per_token(self) -> float:
        """Of the attended pairs; 0 where its shapes are unknown."""
        shape = self.attention
        return shape.flops_per_token() if shape is not None and self.parameters is not None else 0.0

    @cached_property
    def attention(self) -> AttentionShape | None:
        """As it was given whole, or by its parts."""
        facts = self.facts
        layers, heads, width, length = facts.layers, facts.heads, facts.head_width, facts.sequence_length
        if facts.attention is not None:
            return facts.attention
        if layers is None or heads is None or width is None or length is None:
            return None
        return AttentionShape(
            heads=heads, qk_width=width, v_width=width, sequence_length=length, layers=(Layers(count=layers),),
            is_causal=facts.is_causal,
        )  # fmt: skip

    @cached_property
    def flops_per_token(self) -> Mapping[str, float | None]:
        """By convention, the best first; None where the shapes are unknown."""
        n, shape = self.parameters, self.attention
        if n is None:
            return dict.fromkeys(("exact", "PaLM", "6ND"))
        exact, palm = (None, None) if shape is None else (shape.flops_per_token(), shape.flops_per_token("palm"))
        return {
            "exact": None if exact is None else 6 * n + exact,
            "PaLM": None if palm is None else 6 * n + palm,
            "6ND": 6 * n,
        }

    @property
    def best(self) -> float | None:
        """FLOPs of a token by the best convention that can be computed."""
        return next((flops for flops in self.flops_per_token.values() if flops), None)

    def mfu_of(self, tokens_per_s: float | None) -> float | None:
        """MFU at a rate; without one the reported FLOP/s decide."""
        if not self.peak:
            return None
        if self.best is not None and tokens_per_s is not None:
            return self.best * tokens_per_s / (self.facts.gpus * self.peak)
        return self.device_flops_per_s / self.peak if self.device_flops_per_s is not None else None

    def mfu_by(self, convention: str) -> float | None:
        """MFU of the tokens by one convention."""
        flops, rate = self.flops_per_token[convention], self.tokens_per_s
        return flops * rate / (self.facts.gpus * self.peak) if flops and rate and self.peak else None

    @cached_property
    def mfu(self) -> float | None:
        return self.mfu_of(self.tokens_per_s)

    @cached_property
    def hardware_factor(self) -> float | None:
        """Hardware over model FLOPs by the share of the forward that runs again; None where nothing was said of it."""
        recompute = self.facts.recompute
        if recompute is None:
            return None
        if isinstance(recompute, str):
            attention = self.attention_flops_per_token
            return 1 + _FORWARD_SHARE * attention / self.best if self.best and attention else None
        return 1 + _FORWARD_SHARE * recompute

    @property
    def hfu(self) -> float | None:
        return _product(self.mfu, self.hardware_factor)

    # Hours.

    @cached_property
    def gpu_hours(self) -> float | None:
        """Given, else GPUs x time so far, else what the tokens take at this rate, or at the reported MFU."""
        facts = self.facts
        if facts.gpu_hours is not None:
            return facts.gpu_hours
        seconds = facts.elapsed_s or self._log_seconds()
        if seconds is None and facts.tokens and self.tokens_per_s:
            seconds = facts.tokens / self.tokens_per_s
        if seconds is not None:
            return facts.gpus * seconds / _SECONDS_PER_HOUR
        mfu = self.reported_mfu or self.mfu_of(None)
        if facts.tokens and self.best and mfu and self.peak:
            return facts.tokens * self.best / (mfu * self.peak) / _SECONDS_PER_HOUR
        return None

    def _log_seconds(self) -> float | None:
        series = self.series
        if series.elapsed_s is not None:
            return series.elapsed_s
        if len(series.timestamps_s) > 1:
            return max(series.timestamps_s) - min(series.timestamps_s)
        return sum(series.step_s) if series.step_s else None

    @cached_property
    def row_mfus(self) -> list[tuple[float | None, float]]:
        """(step, MFU) of each row of the log: what it reports, and what its own rate gives where it reports none."""
        if self.facts.series is None:
            return []
        series, rates = self.series, self.series.tokens_per_s
        if not rates and (per_step := self.facts.tokens_per_step or series.tokens_per_step):
            rates = tuple(per_step / step_s for step_s in series.step_s)
        values = series.mfu or tuple(mfu for rate in rates if (mfu := self.mfu_of(rate)) is not None)
        steps = series.steps if len(series.steps) == len(values) else tuple(range(len(values)))
        return list(zip(steps, values, strict=True))

    # What cannot be judged.

    def refuse_what_cannot_be_meant(self) -> None:
        """Nothing to judge, or numbers that nobody means."""
        if self.mfu is None and self.reported_mfu is None:
            raise CannotJudgeError(self._nothing_to_judge())
        n, mfu = self.parameters, self.mfu if self.mfu is not None else self.reported_mfu
        if n is not None and n < 1e4:
            raise CannotJudgeError(f"{n:g} parameters are not a language model; was {n:g}B meant? Give --params {n:g}B")
        if mfu is not None and mfu < _LEAST_MFU:
            raise CannotJudgeError(
                f"an MFU of {mfu:.2%} is not training on this device: a number is in another unit than it was given "
                "in (tokens/s, parameters, GPUs, the time of a step), or of another run"
            )

    def _nothing_to_judge(self) -> str:
        """What is missing, for the message."""
        if not self.peak:
            device = self.facts.peak
            seen = "no device" if device is None else f"no {self.precision} peak of {device.device_name}"
            return f"{seen} was given, so there is no MFU; give one such as --gpu 'H100 SXM' --precision bf16"
        missing = [] if self.parameters else ["parameters (--params 70B)"]
        if not self.tokens_per_s:
            missing.append(
                "a rate (--tokens-per-s 3000, --tokens-per-step and --step-time, or --tokens and --gpu-hours)"
            )
        return (
            f"nothing to judge: {' and '.join(missing)} missing. Or give what was reported: --reported-mfu 46.2% or "
            "--flops-per-s-per-gpu 430T, or a log with such a column"
        )

    # Verdict.

    @cached_property
    def claims(self) -> tuple[Claim, ...]:
        """Each claim against what the others imply."""
        facts, series = self.facts, self.series
        peak, has_no_rate = facts.peak, self.stated_tokens_per_s is None
        is_timed = facts.gpu_hours is not None and facts.elapsed_s is not None
        return claims_of(
            Basis(
                gpus=facts.gpus,
                peak=self.peak or None,
                peaks=dict(peak.flops_per_s_by_precision) if peak else {},
                sparse_peaks=dict(peak.sparse_flops_per_s_by_precision) if peak else {},
                precision=self.precision,
                flops_per_token=self.flops_per_token,
                tokens_per_s=self.tokens_per_s,
                rate_is_of_totals=has_no_rate,
                hardware_factor=self.hardware_factor,
                inactive_ratio=facts.parameters / (facts.parameters - inactive)
                if facts.parameters and (inactive := self._inactive_parameters())
                else None,
                mfu=self.reported_mfu,
                hfu=facts.reported_hfu if facts.reported_hfu is not None else _middle(series.hfu),
                device_flops_per_s=self.device_flops_per_s,
                device_hardware_flops_per_s=facts.device_hardware_flops_per_s,
                claimed_peak=facts.reported_peak_flops_per_s,
                tokens=facts.tokens,
                elapsed_s=facts.elapsed_s,
                gpu_hours=facts.gpu_hours if is_timed or not has_no_rate else None,
                convention={"palm": "PaLM", "6nd": "6ND", "exact": "exact"}.get(series.convention, ""),
            )
        )

    def _inactive_parameters(self) -> float | None:
        n, active = self.facts.parameters, self.facts.active_parameters
        return n - active if n and active and active < n else None

    @cached_property
    def diagnoses(self) -> tuple[Diagnosis, ...]:
        """The checks on our own MFU, with what was reported as a claim; without one of ours, on what was reported."""
        mfu, reported = self.mfu, self.reported_mfu
        both = mfu is not None and reported is not None
        found = [d for reading in self.series.readings for d in check(reading)]  # our own log's, checked again
        reading, evidence = (
            self._reading(mfu if mfu is not None else reported),
            self._evidence(is_claim=mfu is not None),
        )
        found += check(reading, peak=self.facts.peak, evidence=evidence)
        if both and self.facts.reported_peak_flops_per_s:
            found = [*self._reported_peak(), *found]
        if mfu is not None and reported is not None and reported > 1:
            found.append(_reported_over_peak(reported, mfu))
        distinct: dict[str, Diagnosis] = {}
        for diagnosis in found:
            distinct.setdefault(diagnosis.code, diagnosis)
        distinct.pop("rate_is_none", None)  # what is missing is said in the notes, or is an error
        return tuple(self._named_inputs(d) for d in distinct.values())

    def _reading(self, mfu: float | None) -> UtilizationReading:
        """One second of one GPU, as a monitor would have read it."""
        facts, peak, factor = self.facts, self.peak, self.hardware_factor
        flops = mfu * peak if mfu is not None and peak else None
        by_palm = self.flops_per_token["PaLM"]
        palm = flops * by_palm / self.best if flops and self.best and by_palm else None
        hardware = flops * factor if flops and factor else None
        window = StepWindow(
            first_step=0,
            last_step=0,
            steps=1,
            elapsed_s=1.0,
            wall_s=1.0,
            tokens=round(self.tokens_per_s / facts.gpus) if self.tokens_per_s else None,
            model_flops=round(flops) if flops else None,
            model_flops_by_precision={p: round(s * flops) for p, s in facts.precision_shares.items()} if flops else {},
            palm_model_flops=round(palm) if palm else None,
            hardware_flops=round(hardware) if hardware else None,
            recompute_flops=round(hardware - flops) if hardware and flops else None,
            world_size=facts.gpus,
        )
        device = facts.peak
        active = device.flops_per_s_by_precision.get(facts.precision) if device and facts.precision_shares else None
        scale = peak / active if active and peak else 1.0
        return UtilizationReading(
            window=window,
            mfu=_product(mfu, scale),
            hfu=_product(self.hfu, scale),
            mfu_weighted=mfu if active else None,
            hfu_weighted=self.hfu if active else None,
            device_name=device.device_name if device else "",
            precision=facts.precision,
            peak_flops_per_s=active or peak or None,
            peak_source=device.source if device else None,
        )

    def _evidence(self, *, is_claim: bool) -> Evidence:
        series, facts = self.series, self.facts
        stride = max(1, len(series.mfu) // _HISTORY_POINTS)
        history = zip(series.steps, series.mfu, strict=True) if len(series.steps) == len(series.mfu) else ()
        return Evidence(
            reported_mfu=(self.reported_mfu or None) if is_claim else None,
            parameters=facts.parameters,
            inactive_expert_parameters=self._inactive_parameters(),
            accumulate_grad_batches=facts.accumulate_grad_batches,
            timestamps_s=series.timestamps_s,
            mfu_history=tuple((round(step), value) for step, value in list(history)[::stride]),
        )

    def _reported_peak(self) -> list[Diagnosis]:
        """The peak behind what was reported, against the table's."""
        reading = self._reading(self.reported_mfu)
        window = dataclasses.replace(
            reading.window,
            model_flops=None,
            palm_model_flops=None,
            hardware_flops=None,
            recompute_flops=None,
            tokens=None,
        )
        used = self.facts.reported_peak_flops_per_s
        shown = dataclasses.replace(reading, window=window, hfu=None, peak_flops_per_s=used, peak_source="reported")
        found = check(shown, peak=self.facts.peak)
        return [d for d in found if d.code in ("sparse_peak", "wrong_precision_peak", "wrong_device_peak")]

    def _named_inputs(self, diagnosis: Diagnosis) -> Diagnosis:
        """An impossible MFU is reported with the inputs that were given; what a clock explains stays as it is."""
        is_impossible = diagnosis.code == "mfu_over_peak" and diagnosis.severity == "error"
        best, rate, gpus = self.best, self.tokens_per_s, self.facts.gpus
        if not is_impossible or "reported_mfu" in diagnosis.evidence or best is None or rate is None:
            return diagnosis
        inputs = (
            f"{self.parameters or 0:,.4g} parameters, {rate:,.4g} tokens/s on {gpus} GPU{'s' if gpus > 1 else ''}: "
            f"{best * rate / gpus / 1e12:,.4g} TFLOP/s per GPU, over {self.peak / 1e12:,.4g} TFLOP/s "
            f"{self.precision} dense ({diagnosis.evidence.get('peak_source')})"
        )
        return dataclasses.replace(
            diagnosis,
            message=f"{diagnosis.message.split(' (')[0]} from {inputs}. At most 100% is possible.",
            likely_cause="Tokens/s of more GPUs than were given, tokens/s that were counted wrongly, parameters that "
            "one token does not pass through, or another device or precision.",
            fix="Check that tokens/s and the number of GPUs belong together, and give --active-params for experts.",
        )

    def verdict(self, impossible_steps: list[float | None]) -> str:
        """The worst that is true of the run."""
        values = [value for value in (self.mfu, self.hfu, self.reported_mfu) if value is not None]
        if withheld(self.diagnoses) or impossible_steps or any(value > HARD_LIMIT for value in values):
            return "impossible"
        if any(claim.is_contradicted for claim in self.claims):
            return "contradicted"
        is_high = any(v is not None and v > SUSPICIOUS_NOTE for v in (self.mfu, self.reported_mfu))
        return "suspicious" if is_high or any(d.severity == "warning" for d in self.diagnoses) else "plausible"

    def notes(self) -> tuple[str, ...]:
        """What was left out or assumed."""
        notes, facts = [], self.facts
        if self.parameters is not None and self.attention is None and self.tokens_per_s is not None:
            notes.append(
                "attention is left out; give --config, or --layers, --heads, --head-width and --sequence-length"
            )
        if isinstance(facts.recompute, float | int) and facts.recompute:
            notes.append(
                "HFU by the share of the forward that runs again; what really reruns depends on the checkpointing"
            )
        if facts.peak is not None and facts.peak.confidence == "low":
            notes.append("the peak of this device is known with low confidence only")
        return (*notes, *self.series.notes)


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

"""Every claim against what the others imply, in each convention; a ratio that one or two causes explain names them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

__all__ = ["Basis", "Claim", "claims_of"]

_AGREES = 0.04
"""Published values have two or three digits, and gaps in a log move its median by as much."""
_EXPLAINS = 0.025
_MOST_ATTENTION = 3.0
"""FLOPs of a token over 6 N in models with long sequences."""
_CONTRADICTS = 1.25
"""Nearer than this an unexplained ratio may be shapes that were not given, rounding, or another window of time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """The claims of a run, and what they are held against. Unknown is None."""

    gpus: int = 1
    peak: float | None = None
    peaks: Mapping[str, float] = field(default_factory=dict)
    """Dense, by precision."""
    sparse_peaks: Mapping[str, float] = field(default_factory=dict)
    precision: str = ""
    flops_per_token: Mapping[str, float | None] = field(default_factory=dict)
    """By convention; None where the shapes are not known."""
    tokens_per_s: float | None = None
    rate_is_of_totals: bool = False
    """Tokens/s are tokens over time, and prove nothing of either."""
    hardware_factor: float | None = None
    """Hardware over model FLOPs."""
    inactive_ratio: float | None = None
    """All parameters over the active ones."""
    mfu: float | None = None
    hfu: float | None = None
    device_flops_per_s: float | None = None
    device_hardware_flops_per_s: float | None = None
    claimed_peak: float | None = None
    tokens: float | None = None
    elapsed_s: float | None = None
    gpu_hours: float | None = None
    convention: str = ""
    """Of the tool that made the claim; empty where it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One claim against one value that the other inputs imply.

    Example:
        >>> claims_of(Basis(mfu=0.41, device_flops_per_s=400e12, peak=989.4e12))[0].implied
        0.404...
    """

    name: str
    claimed: float
    implied: float
    convention: str = ""
    explanation: str = ""
    """Causes that give the ratio; empty where it agrees, or where nothing explains it."""
    is_nearest: bool = True
    """Of the claim's conventions the one that fits best, or the tool's own."""

    @property
    def ratio(self) -> float:
        """Claimed over implied."""
        return self.claimed / self.implied

    @property
    def agrees(self) -> bool:
        """Within what rounding explains."""
        return abs(self.ratio - 1) <= _AGREES

    @property
    def is_contradicted(self) -> bool:
        """Far off, in every convention, and nothing known explains it."""
        off = max(self.ratio, 1 / self.ratio)
        return self.is_nearest and off > _CONTRADICTS and not self.explanation

    def sentence(self) -> str:
        """What is to be said of it."""
        what = f"{self.name} is {self.ratio:.3g} times what its own inputs give"
        by = f" by {self.convention}" if self.convention else ""
        if self.agrees:
            return f"{self.name} agrees with its inputs{by}"
        return f"{what}{by}: {self.explanation}" if self.explanation else f"{what}{by}, and no known cause explains it"


def claims_of(basis: Basis) -> tuple[Claim, ...]:
    """Every claim that something else implies; of its conventions the nearest is marked."""
    found: list[Claim] = []
    for name, claimed, implied in _by_convention(basis):
        rows = [_explained(basis, name, claimed, convention, value) for convention, value in implied.items()]
        nearest = min(rows, key=lambda claim: _distance(claim, basis.convention), default=None)
        found += [dataclasses.replace(claim, is_nearest=claim is nearest) for claim in rows]
    found += [_explained(basis, name, claimed, "", implied) for name, claimed, implied in _plain(basis)]
    return tuple(found)


def _distance(claim: Claim, own: str) -> tuple[bool, bool, bool, float]:
    """Those that agree first, then the tool's own convention, then the explained, then the nearest ratio."""
    return not claim.agrees, claim.convention != own, not claim.explanation, abs(claim.ratio - 1)


def _by_convention(basis: Basis) -> Iterator[tuple[str, float, dict[str, float]]]:
    """Claims of FLOPs: implied by tokens/s and the FLOPs of a token."""
    rates = {
        convention: flops * basis.tokens_per_s / basis.gpus
        for convention, flops in basis.flops_per_token.items()
        if flops and basis.tokens_per_s
    }
    factor, peak = basis.hardware_factor, basis.peak
    if peak and basis.mfu:
        yield "reported MFU", basis.mfu, {c: rate / peak for c, rate in rates.items()}
    if peak and basis.hfu and factor:
        yield "reported HFU", basis.hfu, {c: factor * rate / peak for c, rate in rates.items()}
    if basis.device_flops_per_s:
        yield "reported FLOP/s per GPU", basis.device_flops_per_s, rates
    if basis.device_hardware_flops_per_s and factor:
        yield (
            "reported hardware FLOP/s per GPU",
            basis.device_hardware_flops_per_s,
            {c: factor * r for c, r in rates.items()},
        )


def _plain(basis: Basis) -> Iterator[tuple[str, float, float]]:
    """Claims that need no formula."""
    if basis.mfu and basis.device_flops_per_s and basis.peak:
        yield "reported MFU, by the FLOP/s", basis.mfu, basis.device_flops_per_s / basis.peak
    if basis.hfu and basis.device_hardware_flops_per_s and basis.peak:
        yield "reported HFU, by the hardware FLOP/s", basis.hfu, basis.device_hardware_flops_per_s / basis.peak
    if basis.claimed_peak and basis.peak:
        yield "peak", basis.claimed_peak, basis.peak
    if basis.gpu_hours and basis.elapsed_s:
        yield "GPU-hours, by days and GPUs", basis.gpu_hours, basis.gpus * basis.elapsed_s / 3600
    rate = None if basis.rate_is_of_totals else basis.tokens_per_s
    seconds = basis.elapsed_s or (basis.gpu_hours * 3600 / basis.gpus if basis.gpu_hours else None)
    if rate and basis.tokens and seconds:
        yield "tokens, by their rate and the time", basis.tokens, rate * seconds


# Causes.


@dataclass(frozen=True, slots=True)
class _Factor:
    """What a cause multiplies a claim by. Two causes are tried together where their kinds differ."""

    text: str
    by: float
    kind: str
    """``"peak"``, ``"gpus"``, ``"count"``, or ``"unit"``, which explains alone or not at all."""


def _explained(basis: Basis, name: str, claimed: float, convention: str, implied: float) -> Claim:
    claim = Claim(name=name, claimed=claimed, implied=implied, convention=convention)
    explanation = "" if claim.agrees else _explanation(claim.ratio, list(_causes(basis, name, convention)))
    has_shapes = basis.flops_per_token.get("PaLM") is not None
    if not explanation and convention == "6ND" and not has_shapes and 1 < claim.ratio < _MOST_ATTENTION:
        explanation = "attention, whose shapes were not given, may be the rest"
    return dataclasses.replace(claim, explanation=explanation)


def _explanation(ratio: float, causes: list[_Factor]) -> str:
    """The cause whose factor is nearest, else two of different kinds; others that fit as well are named."""
    single = sorted((abs(ratio / cause.by - 1), cause.text) for cause in causes)
    fits = [text for off, text in single if off <= _EXPLAINS]
    if not fits:
        pairs = [
            p
            for p in itertools.combinations(causes, 2)
            if p[0].kind != p[1].kind and "unit" not in (p[0].kind, p[1].kind)
        ]
        both = sorted((abs(ratio / (one.by * two.by) - 1), f"{one.text} and {two.text}") for one, two in pairs)
        fits = [text for off, text in both if off <= _EXPLAINS / 2]
    more = f" (or {'; or '.join(fits[1:3])})" if len(fits) > 1 else ""
    return f"{fits[0]}{more}" if fits else ""


def _causes(basis: Basis, name: str, convention: str) -> Iterator[_Factor]:
    if "MFU" in name or "HFU" in name or name == "peak":
        yield from _peak_causes(basis, inverse=name == "peak")
    if name == "peak":
        return
    if name.startswith(("GPU-hours", "tokens")):
        yield _Factor("days were given for hours", 24.0, "unit")
        yield _Factor("hours were given for days", 1 / 24, "unit")
        if basis.gpus > 1:
            yield _Factor(f"of one GPU in place of all {basis.gpus}", 1 / basis.gpus, "gpus")
        return
    yield from _count_causes(basis, convention)


_USUAL_PEAKS = {
    "an A100's peak, the default of many scripts": 312e12,
    "an H100's peak": 989.4e12,
    "a V100's peak": 125e12,
}


def _peak_causes(basis: Basis, *, inverse: bool) -> Iterator[_Factor]:
    """Another peak than the dense one at this precision."""
    peak = basis.peak
    others = {f"the {p} peak": v for p, v in basis.peaks.items() if p != basis.precision}
    others |= {f"the sparse {p} peak": v for p, v in basis.sparse_peaks.items()}
    others |= {name: value for name, value in _USUAL_PEAKS.items() if value not in basis.peaks.values()}
    for name, value in others.items():
        if peak and value and abs(value / peak - 1) > _AGREES:
            yield _Factor(f"{name} ({value / 1e12:.5g} TFLOP/s)", value / peak if inverse else peak / value, "peak")


def _count_causes(basis: Basis, convention: str) -> Iterator[_Factor]:
    yield _Factor("multiply-adds counted as one FLOP", 0.5, "count")
    yield _Factor("the forward alone", 1 / 3, "count")
    yield _Factor("recomputation of the whole forward counted in", 4 / 3, "count")
    if basis.hardware_factor and abs(basis.hardware_factor - 4 / 3) > 0.01 and basis.hardware_factor != 1:
        yield _Factor("recomputation counted in", basis.hardware_factor, "count")
    if basis.inactive_ratio:
        yield _Factor("every expert counted, not the active ones", basis.inactive_ratio, "count")
    own = basis.flops_per_token.get(convention)
    for other, flops in basis.flops_per_token.items():
        if other != convention and flops and own and abs(flops / own - 1) > _AGREES:
            yield _Factor(f"the {other} convention", flops / own, "count")
    if basis.gpus > 1:
        yield _Factor(f"all {basis.gpus} GPUs' rate taken for one's", float(basis.gpus), "gpus")
        yield _Factor(f"one GPU's rate taken for all {basis.gpus}", 1 / basis.gpus, "gpus")
    if basis.gpus != 8:
        yield _Factor("a node of 8 GPUs taken for one", 8.0, "gpus")
    yield _Factor("milliseconds read as seconds", 1e-3, "unit")
    yield _Factor("seconds read as milliseconds", 1e3, "unit")
    yield _Factor("a percentage read as a fraction", 100.0, "unit")
    yield _Factor("a fraction read as a percentage", 0.01, "unit")

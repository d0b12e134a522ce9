"""Why the level fell: the incident's windows against the baseline's, factor by factor.

The signal of ``WindowFigures`` is ``model_flops * (1 - padding) / (step_s * peak)``, so the loss ``ln(before / after)``
is a sum of logarithms: slower steps, more padding, fewer model FLOPs for the same work of the device. The part of the
slower steps is then split by seconds. First each *explanation* that was measured for itself (garbage collection,
recompute, clocks, ...) takes what it accounts for from the parts of the step that it can have slowed; what is left of
a part goes by the part's own name, and what no part holds is ``"unknown"``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mfu_monitor.alerts.alert import CauseShare
from mfu_monitor.alerts.figures import WindowFigures

__all__ = ["CAUSES", "attribute_loss", "next_action"]

CAUSES: dict[str, tuple[str, str]] = {
    "data_loading": (
        "waiting for data",
        "raise num_workers or prefetch_factor, keep workers alive (persistent_workers=True), look at the storage",
    ),
    "host_to_device_copy": ("copying batches to the device", "use pin_memory=True and non_blocking copies"),
    "garbage_collection": (
        "Python garbage collection",
        "call gc.freeze() after start-up, or gc.disable() and gc.collect() every few hundred steps on all ranks",
    ),
    "recompilation": (
        "torch.compile recompiling",
        "run with TORCH_LOGS=recompiles to see the failing guard; mark varying sizes dynamic",
    ),
    "recompute": ("activation checkpointing", "checkpoint fewer layers, or save the matrix products selectively"),
    "clock_throttling": ("a lower clock of the device", "look at cooling, the power limit and who shares the machine"),
    "allocator_retries": (
        "the CUDA allocator freeing its cache and retrying",
        "lower the memory in use, or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    ),
    "cpu_contention": (
        "waiting for a CPU that other threads or processes hold",
        "look for other jobs on this machine, and for more worker threads than cores (OMP_NUM_THREADS)",
    ),
    "straggler": ("the slowest rank", "look at that rank's machine: its data, its clock, its neighbours"),
    "padding": ("padding", "group samples of like length, or pack them"),
    "masking": ("fewer model FLOPs in the same work", "look for longer masked parts in the batch"),
    "compute": ("all of the computing alike, with the same FLOPs", "look at clocks, neighbours and kernel selection"),
    "forward": ("the forward pass, with the same FLOPs", "profile one step's forward"),
    "backward": ("the backward pass, with the same FLOPs", "profile one step's backward, communication included"),
    "optimizer": ("the optimizer step", "profile the optimizer: foreach/fused variants, hooks, clipping"),
    "between_steps": ("callbacks and logging between steps", "time your callbacks; log less often"),
    "other": ("the rest of the step (callbacks, logging, zeroing gradients)", "time your callbacks; log less often"),
    "unknown": ("not explained by anything that was measured", "profile a few steps and compare with a good run"),
}
"""Name -> what it is in words, and the next action."""

_PARTS = {
    "data_wait_s": "data_loading",
    "forward_s": "forward",
    "backward_s": "backward",
    "optimizer_s": "optimizer",
    "other_s": "other",
    "compile_s": "recompilation",
}
_PARTS_MEASURED = {
    **_PARTS,
    "gc_pause_s": "garbage_collection",
    "h2d_copy_s": "host_to_device_copy",
    "between_s": "between_steps",
}
_COMPUTE = ("forward_s", "backward_s", "optimizer_s")
_RUNNING = ("data_wait_s", *_COMPUTE, "other_s")

_LEAST_SHARE = 0.02
"""A smaller share is noise of the parts' own timing, and goes to ``"unknown"``."""


@dataclass(frozen=True, slots=True)
class _Claim:
    """Seconds a step that one measured explanation accounts for, and the parts that it can have slowed."""

    cause: CauseShare
    seconds: float
    domain: tuple[str, ...]


def attribute_loss(before: WindowFigures, after: WindowFigures) -> tuple[CauseShare, ...]:
    """What the fall from ``before`` to ``after`` consists of, largest first; the shares add up to 1.

    Less than 2% without a name is left out. Only what got worse is listed; parts that got faster meanwhile are not set
    off against it.

    Args:
        before: mean of the baseline's windows (``mean_figures``).
        after: mean of the incident's windows.

    Returns:
        The causes; empty where nothing got worse.

    Example:
        >>> attribute_loss(before, after)[0].name
        'data_loading'
    """
    loss: dict[str, tuple[CauseShare, float]] = {}
    time_loss = max(0.0, math.log(after.step_s / before.step_s))
    seconds = _explain_seconds(before, after)
    total_s = sum(amount for _, amount in seconds)
    for cause, amount in seconds:
        loss[cause.name] = (cause, time_loss * amount / total_s if total_s > 0 else 0.0)
    for cause, amount in _log_terms(before, after):
        loss[cause.name] = (cause, amount)
    return _normalised(list(loss.values()))


def part_cause(part: str, before: WindowFigures, after: WindowFigures) -> CauseShare:
    """The cause that stands for one part of the step, of whose growth it is all.

    Args:
        part: field of ``WindowFigures``: ``"data_wait_s"``.
        before: the baseline's windows.
        after: the incident's windows.
    """
    cause = _timed(_PARTS_MEASURED[part], getattr(before, part), getattr(after, part), before, after)
    return _with_share(cause, 1.0)


def next_action(name: str) -> str:
    """What to try first for a cause of ``CAUSES``."""
    return CAUSES[name][1]


def _normalised(losses: Sequence[tuple[CauseShare, float]]) -> tuple[CauseShare, ...]:
    total = sum(amount for _, amount in losses)
    if total <= 0:
        return ()
    shares = {cause.name: (cause, amount / total) for cause, amount in losses}
    small = [n for n, (_, share) in shares.items() if 0 < share < _LEAST_SHARE and n != "unknown"]
    rest = sum(shares.pop(name)[1] for name in small)
    unknown, known = shares.pop("unknown", (_cause("unknown", None, None, ""), 0.0))
    if known + rest >= _LEAST_SHARE:
        shares["unknown"] = (unknown, known + rest)
    ranked = sorted(shares.values(), key=lambda item: -item[1])
    return tuple(_with_share(cause, share) for cause, share in ranked if share > 0 or cause.name == "straggler")


def _log_terms(before: WindowFigures, after: WindowFigures) -> list[tuple[CauseShare, float]]:
    """The factors that are not seconds: useful tokens, and model FLOPs in the same hardware work."""
    terms = []
    if _both(before.padding_share, after.padding_share):
        b, a = before.padding_share or 0.0, after.padding_share or 0.0
        terms.append((_cause("padding", b, a, "fraction of tokens"), math.log((1 - b) / (1 - a))))
    if before.model_flops and after.model_flops:
        cause = _cause("masking", before.model_flops, after.model_flops, "model FLOPs/step")
        terms.append((cause, math.log(before.model_flops / after.model_flops)))
    return [(cause, amount) for cause, amount in terms if amount > 0]


def _explain_seconds(before: WindowFigures, after: WindowFigures) -> list[tuple[CauseShare, float]]:
    """Every second that a step got longer, given to a cause."""
    excess = _part_excess(before, after)
    explained = [
        (claim.cause, _take(excess, claim))
        for explain in _EXPLANATIONS
        if (claim := explain(before, after)) is not None
    ]
    explained += _rest_by_part(before, after, excess)
    return explained


def _part_excess(before: WindowFigures, after: WindowFigures) -> dict[str, float]:
    """Seconds a step by which each part grew; what no known part holds is ``""``."""
    growth = {
        part: getattr(after, part) - getattr(before, part)
        for part in _PARTS
        if _both(getattr(before, part), getattr(after, part))
    }
    unplaced = after.step_s - before.step_s - sum(growth.values())
    excess = {part: max(0.0, seconds) for part, seconds in growth.items()}
    least = _LEAST_SHARE * max(after.step_s - before.step_s, 0.0)
    return excess | {"": unplaced if unplaced > least else 0.0}


def _take(excess: dict[str, float], claim: _Claim) -> float:
    """Move up to ``claim.seconds`` out of the parts of its domain, in proportion to what each holds."""
    domain = (*claim.domain, "")  # time that no marked part holds may have been anybody's
    held = sum(excess.get(part, 0.0) for part in domain)
    taken = min(claim.seconds, held)
    if taken <= 0:
        return 0.0
    for part in domain:
        if part in excess:
            excess[part] *= 1 - taken / held
    return taken


def _rest_by_part(
    before: WindowFigures, after: WindowFigures, excess: dict[str, float]
) -> list[tuple[CauseShare, float]]:
    unplaced = excess.pop("", 0.0)
    found = [(_cause("unknown", before.step_s, after.step_s, "s/step"), unplaced)] if unplaced else []
    alike = _grown_alike(before, excess)
    if alike:
        seconds = sum(excess.pop(part) for part in alike)
        b, a = _compute_s(before, alike), _compute_s(after, alike)
        found.append((_timed("compute", b, a, before, after), seconds))
    for part, seconds in excess.items():
        if seconds > 0:
            found.append((_timed(_PARTS[part], getattr(before, part), getattr(after, part), before, after), seconds))
    return found


def _grown_alike(before: WindowFigures, excess: dict[str, float]) -> tuple[str, ...]:
    """Parts that slowed by about the factor by which forward and backward did: none of them is the place to look.

    Empty where forward and backward differ by more than a factor of two.
    """
    growth = {part: excess[part] / getattr(before, part) for part in excess if getattr(before, part)}
    forward, backward = growth.get("forward_s", 0.0), growth.get("backward_s", 0.0)
    if not forward or not 0.5 <= backward / forward <= 2.0:
        return ()
    low, high = 0.5 * min(forward, backward), 2.0 * max(forward, backward)
    return tuple(part for part in (*_COMPUTE, "other_s") if low <= growth.get(part, 0.0) <= high)


# Explanations that were measured for themselves. Each returns its claim, or None without evidence.

_SLACK = 1.5
"""How far the seconds of a modelled explanation (FLOPs, clock, run queue) may differ from the model."""


def _copying(before: WindowFigures, after: WindowFigures) -> _Claim | None:
    return _grown_seconds("host_to_device_copy", "h2d_copy_s", before, after, ("data_wait_s", "other_s"))


def _collecting(before: WindowFigures, after: WindowFigures) -> _Claim | None:
    return _grown_seconds("garbage_collection", "gc_pause_s", before, after, _RUNNING)


def _between(before: WindowFigures, after: WindowFigures) -> _Claim | None:
    return _grown_seconds("between_steps", "between_s", before, after, ("other_s", "data_wait_s"))


def _waiting_for_cpu(before: WindowFigures, after: WindowFigures) -> _Claim | None:
    return _grown_seconds("cpu_contention", "cpu_wait_s", before, after, _RUNNING, slack=_SLACK)


def _recomputing(before: WindowFigures, after: WindowFigures) -> _Claim | None:
    """More recomputed FLOPs, at the seconds per FLOP that the hardware took before."""
    if not before.hardware_flops or not after.hardware_flops:
        return None
    more = (after.recompute_flops or 0.0) - (before.recompute_flops or 0.0)
    if more <= 0.01 * before.hardware_flops:
        return None
    share_before = (before.recompute_flops or 0.0) / before.hardware_flops
    share_after = (after.recompute_flops or 0.0) / after.hardware_flops
    seconds = more * _compute_s(before, _COMPUTE[:2]) / before.hardware_flops
    cause = _cause("recompute", share_before, share_after, "fraction of hardware FLOPs")
    return _Claim(cause, _SLACK * seconds, ("backward_s", "forward_s"))


def _throttling(before: WindowFigures, after: WindowFigures) -> _Claim | None:
    """Seconds of compute times the ratio of the clocks; all of them where only the driver's reasons are known."""
    new = [r for r in after.throttle_reasons or () if r not in (before.throttle_reasons or ())]
    detail = f" ({', '.join(new)}{_degrees(after)})" if new else _degrees(after)
    if before.sm_clock_mhz and after.sm_clock_mhz:
        if after.sm_clock_mhz > 0.98 * before.sm_clock_mhz:
            return None  # clocks wander by a step or two of 15 MHz
        cause = _cause("clock_throttling", before.sm_clock_mhz, after.sm_clock_mhz, "MHz", detail)
        seconds = _compute_s(before, _COMPUTE) * (before.sm_clock_mhz / after.sm_clock_mhz - 1)
        return _Claim(cause, _SLACK * seconds, _COMPUTE)
    return _Claim(_cause("clock_throttling", None, None, "", detail), math.inf, _COMPUTE) if new else None


def _retrying_allocation(before: WindowFigures, after: WindowFigures) -> _Claim | None:
    """Each retry waits for the device and frees the cache; its seconds are not measured, so it takes what is left."""
    if not _both(before.allocation_retries, after.allocation_retries):
        return None
    b, a = before.allocation_retries or 0.0, after.allocation_retries or 0.0
    if a <= b + 1e-3:  # fewer than one more in a thousand steps explains nothing
        return None
    return _Claim(_cause("allocator_retries", b, a, "retries/step"), math.inf, (*_COMPUTE, "other_s"))


def _waiting_for_rank(before: WindowFigures, after: WindowFigures) -> _Claim | None:
    """The other ranks wait in the collective for the slowest, mostly in backward."""
    if after.rank_spread is None or after.slowest_rank is None:
        return None
    more = after.rank_spread - (before.rank_spread or 0.0)
    if more < 0.05:
        return None
    cause = _cause("straggler", before.rank_spread, after.rank_spread, "rank spread", f" (rank {after.slowest_rank})")
    return _Claim(cause, _SLACK * more * after.step_s, _RUNNING)


_EXPLANATIONS: tuple[Callable[[WindowFigures, WindowFigures], _Claim | None], ...] = (
    _collecting,
    _copying,
    _between,
    _recomputing,
    _throttling,
    _waiting_for_cpu,
    _retrying_allocation,
    _waiting_for_rank,
)
"""In this order: what was measured in seconds first, what can only take the rest last."""


def _grown_seconds(
    name: str,
    field: str,
    before: WindowFigures,
    after: WindowFigures,
    domain: tuple[str, ...],
    slack: float = 1.0,
) -> _Claim | None:
    b, a = getattr(before, field), getattr(after, field)
    if not _both(b, a) or a <= b:
        return None
    return _Claim(_timed(name, b, a, before, after), slack * (a - b), domain)


def _compute_s(figures: WindowFigures, parts: Sequence[str]) -> float:
    """Seconds of the given parts; the whole step where no part is known."""
    known = [getattr(figures, part) for part in parts if getattr(figures, part) is not None]
    return sum(known) if known else figures.step_s


def _timed(name: str, b: float, a: float, before: WindowFigures, after: WindowFigures) -> CauseShare:
    share = f" ({b / before.step_s:.0%} -> {a / after.step_s:.0%} of the step)"
    return _cause(name, b, a, "s/step", share)


def _cause(name: str, before: float | None, after: float | None, unit: str, detail: str = "") -> CauseShare:
    return CauseShare(
        name=name, before=before, after=after, unit=unit, share_of_loss=None, description=CAUSES[name][0] + detail
    )


def _with_share(cause: CauseShare, share: float) -> CauseShare:
    return CauseShare(
        name=cause.name,
        before=cause.before,
        after=cause.after,
        unit=cause.unit,
        share_of_loss=share,
        description=cause.description,
    )


def _degrees(figures: WindowFigures) -> str:
    return "" if figures.temperature_c is None else f", {figures.temperature_c:.0f} °C"


def _both(before: float | None, after: float | None) -> bool:
    return before is not None and after is not None

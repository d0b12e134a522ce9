"""All checks and all causes over one reading."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mfu_monitor.checks import numerator_causes, peak_causes, scale_causes, time_causes
from mfu_monitor.checks.case import Case
from mfu_monitor.checks.diagnosis import Diagnosis, Evidence
from mfu_monitor.checks.hypothesis import ranked
from mfu_monitor.checks.limits import CHECKS
from mfu_monitor.counting.step_record import StepRecord
from mfu_monitor.errors import ConfigurationError
from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.utilization import UtilizationReading

__all__ = ["CAUSES", "CAUSE_CODES", "check"]

CAUSES: Mapping[str, Callable[[Case], Iterator[Diagnosis | None]]] = {
    "clock_went_backwards": time_causes.clock_went_backwards,
    "unsynced_timer": time_causes.unsynced_timer,
    "warmup_in_window": time_causes.warmup_in_window,
    "sparse_peak": peak_causes.sparse_peak,
    "wrong_precision_peak": peak_causes.wrong_precision_peak,
    "wrong_device_peak": peak_causes.wrong_device_peak,
    "autocast_not_active": peak_causes.autocast_not_active,
    "wrong_token_count": scale_causes.wrong_token_count,
    "wrong_N": scale_causes.wrong_n,
    "recompute_in_mfu": numerator_causes.recompute_in_mfu,
    "causal_counted_dense": numerator_causes.causal_counted_dense,
    "macs_as_flops": numerator_causes.macs_as_flops,
    "forward_only": numerator_causes.forward_only,
    "double_counted": numerator_causes.double_counted,
    "cumulative_numerator": scale_causes.cumulative_numerator,
    "accumulation": scale_causes.accumulation,
    "world_size": scale_causes.world_size,
    "nominal_clock_exceeded": peak_causes.nominal_clock_exceeded,
}
"""In the order in which equally supported causes are told."""

CAUSE_CODES = tuple(CAUSES)


def check(
    reading: UtilizationReading,
    record: StepRecord | None = None,
    peak: DevicePeak | None = None,
    *,
    evidence: Evidence | None = None,
    **more: Any,
) -> tuple[Diagnosis, ...]:
    """Whether a reading can be right, and if not, why: pure, so a stored reading can be checked again at any time.

    Args:
        reading: what to check; the other arguments only help to find causes.
        record: the counted step behind it.
        peak: the device's peak, for its clocks and bandwidth.
        evidence: claims and witnesses that records do not hold.
        **more: fields of ``Evidence``, for a call in one line.

    Returns:
        Causes that the evidence supports, best supported first; then the checks that failed; then causes that are no
        more than consistent with the figures. Empty for a reading without a flaw.

    Raises:
        ConfigurationError: both ``evidence`` and its fields were given, or a field that it does not have.

    Example:
        >>> mm.check(reading, record, flops_per_batch=1.2e15)[0].code
        'macs_as_flops'
    """
    case = Case.of(reading, record, peak, _evidence(evidence, more))
    causes = ranked(d for cause in CAUSES.values() for d in cause(case) if d is not None)
    named = [d for d in causes if d.severity != "note"]
    checks = [_explained(d, named) for test in CHECKS if (d := test(case)) is not None]
    notes = [d for d in causes if d.severity == "note"]
    return (*named, *checks, *notes)


def _explained(failed: Diagnosis, named: Sequence[Diagnosis]) -> Diagnosis:
    """A failed check tells the cause that was found in the place of the general advice."""
    cause = next((d for d in named if d.severity == "error"), None)
    if cause is None or not failed.code.endswith("over_peak") or failed.severity != "error":
        return failed
    return dataclasses.replace(failed, likely_cause=f"{cause.likely_cause} ({cause.code})", fix=cause.fix)


def _evidence(evidence: Evidence | None, more: Mapping[str, Any]) -> Evidence:
    if evidence is None or not more:
        return evidence or _from_fields(more)
    raise ConfigurationError(
        f"check(evidence=..., {', '.join(more)}=...): give an Evidence record or its fields, not both; for example "
        "check(reading, flops_per_batch=1.2e15)."
    )


def _from_fields(more: Mapping[str, Any]) -> Evidence:
    unknown = [name for name in more if name not in Evidence.__dataclass_fields__]
    if unknown:
        raise ConfigurationError(
            f"check({unknown[0]}=...): no such evidence; allowed are {', '.join(Evidence.__dataclass_fields__)}, for "
            "example check(reading, flops_per_batch=1.2e15)."
        )
    return Evidence(**more)

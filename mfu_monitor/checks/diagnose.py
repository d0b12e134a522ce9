"""All checks and all causes over one reading."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from mfu_monitor.checks.cause_table import find_causes
from mfu_monitor.checks.diagnosis import Diagnosis
from mfu_monitor.checks.evidence import Case, Evidence, or_none
from mfu_monitor.checks.limits import CHECKS
from mfu_monitor.counting.step_record import StepRecord
from mfu_monitor.errors import ConfigurationError
from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.utilization import UtilizationReading

__all__ = ["check"]


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
        Causes that the evidence supports, best supported first; then the checks that failed; then causes that are only
        consistent with the values. Empty for a reading without a flaw.

    Raises:
        ConfigurationError: both ``evidence`` and its fields were given, or a field that it does not have.

    Example:
        >>> mm.check(reading, record, flops_per_batch=1.2e15)[0].code
        'macs_as_flops'
    """
    case = Case.of(reading, record, peak, _evidence(evidence, more))
    causes = find_causes(case)
    named = [d for d in causes if d.severity != "note"]
    checks = [_explained(d, named) for test in CHECKS if (d := or_none(partial(test, case))) is not None]
    notes = [d for d in causes if d.severity == "note"]
    return (*named, *checks, *notes)


def _explained(failed: Diagnosis, named: Sequence[Diagnosis]) -> Diagnosis:
    """A failed check names the cause that was found, in place of the general advice."""
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

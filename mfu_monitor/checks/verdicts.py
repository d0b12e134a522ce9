"""The judging stage of the monitor: a reading that physics forbids is withheld, named once, and acted upon."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mfu_monitor.checks import Diagnosis, Evidence, check, withheld
from mfu_monitor.counting.step_record import StepRecord
from mfu_monitor.errors import ImpossibleReadingWarning, warn
from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.utilization import UtilizationReading

__all__ = ["Verdict", "Verdicts"]

_WITHHELD = ("mfu", "hfu", "mfu_weighted", "hfu_weighted", "mfu_palm", "goodput_mfu", "achievable_fraction")
_REPORTED_ELSEWHERE = ("rate_is_none", "lower_bound")
"""The peak stage warns of an unknown peak, and the card lists what was not counted."""
_HISTORY = 50
"""Earlier readings that the search for a cause may look at."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is shown of a reading, and what is to be reported about it."""

    reading: UtilizationReading
    """The reading itself, or the same without its utilization where that is impossible."""
    diagnoses: tuple[Diagnosis, ...] = ()
    fresh: tuple[Diagnosis, ...] = ()
    """Those that were not reported before."""

    @property
    def is_impossible(self) -> bool:
        """True where the utilization was withheld."""
        return withheld(self.diagnoses)


class Verdicts:
    """Checks readings one after the other and reports each kind of fault once.

    Example:
        >>> verdict = Verdicts().on(reading, record, peak, evidence={"flops_per_batch": 1.2e15})
        >>> verdict.reading.mfu, verdict.is_impossible
    """

    def __init__(self) -> None:
        self._reported: set[tuple[str, str]] = set()
        self._history: list[tuple[int, float]] = []

    def on(
        self,
        reading: UtilizationReading,
        record: StepRecord | None,
        peak: DevicePeak | None,
        *,
        evidence: Mapping[str, Any],
    ) -> Verdict:
        """Judge one reading.

        Args:
            reading: as it was computed.
            record: the counted step behind it.
            peak: the device's peak.
            evidence: fields of ``checks.Evidence`` that the caller knows.
        """
        facts = Evidence(**{"mfu_history": tuple(self._history), **evidence})
        diagnoses = check(reading, record, peak, evidence=facts)
        if reading.mfu is not None:
            self._history = [*self._history[-_HISTORY:], (reading.last_step, reading.mfu)]
        fresh = tuple(d for d in diagnoses if (d.code, d.severity) not in self._reported)
        self._reported |= {(d.code, d.severity) for d in fresh}
        for diagnosis in fresh:
            if diagnosis.severity != "note" and diagnosis.code not in _REPORTED_ELSEWHERE:
                warn(str(diagnosis), ImpossibleReadingWarning)
        shown = _without_utilization(reading, diagnoses) if withheld(diagnoses) else reading
        return Verdict(shown, diagnoses, fresh)


def _without_utilization(reading: UtilizationReading, diagnoses: tuple[Diagnosis, ...]) -> UtilizationReading:
    reason = next(str(d) for d in diagnoses if d.severity == "error")
    return dataclasses.replace(reading, **dict.fromkeys(_WITHHELD), reason=reason)  # type: ignore[arg-type]

"""What a check answers: the diagnosis, and a list of them as markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mfu_monitor.counting.plain_types import PlainTypes

__all__ = ["SEVERITIES", "Diagnosis", "diagnosis_text", "withheld"]

SEVERITIES = ("note", "warning", "error")
"""From the mildest. An error withholds the reading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis(PlainTypes):
    """One violated check or one cause that the evidence supports.

    Example:
        >>> for diagnosis in mm.check(reading):
        ...     print(diagnosis.severity, diagnosis.code, diagnosis.message, diagnosis.fix)
    """

    code: str
    """A word from ``CHECK_CODES`` or ``CAUSE_CODES``; docs/diagnoses.md explains each."""
    severity: str
    """``"note"``, ``"warning"`` or ``"error"``; an error withholds the reading."""
    message: str = ""
    """What was seen and what was expected."""
    evidence: Mapping[str, object] = field(default_factory=dict)
    """The values that support it, by name with their unit."""
    likely_cause: str = ""
    fix: str = ""
    """The next action."""

    def __str__(self) -> str:
        parts = (self.message, self.likely_cause, self.fix)
        return f"[{self.code}] " + " ".join(part for part in parts if part)


def withheld(diagnoses: Iterable[Diagnosis]) -> bool:
    """True when a reading with these diagnoses must not be shown as a result.

    Example:
        >>> if not withheld(mm.check(reading)):
        ...     log({"utilization/mfu": reading.mfu})
    """
    return any(diagnosis.severity == "error" for diagnosis in diagnoses)


_INTERNAL = frozenset({"strength", "distance", "witness"})  # already in the message


def diagnosis_text(diagnoses: Iterable[Diagnosis]) -> str:
    """Markdown: each diagnosis with what was seen, the likely cause, the fix, and its values as a table.

    Args:
        diagnoses: in the order of ``check``, the best supported cause first.

    Returns:
        The text; empty for no diagnosis.

    Example:
        >>> print(diagnosis_text(mm.check(reading)))
    """
    return "\n\n".join(_section(diagnosis) for diagnosis in diagnoses)


def _section(diagnosis: Diagnosis) -> str:
    lines = [
        f"### {diagnosis.severity}: `{diagnosis.code}`",
        "",
        diagnosis.message,
        "",
        f"- **likely cause:** {diagnosis.likely_cause}",
        f"- **fix:** {diagnosis.fix}",
    ]
    return "\n".join([*lines, *_table(diagnosis.evidence)])


def _table(evidence: Mapping[str, object]) -> list[str]:
    shown = {name: value for name, value in evidence.items() if name not in _INTERNAL and value is not None}
    if not shown:
        return []
    rows = [f"| {name} | {_cell(value)} |" for name, value in shown.items()]
    return ["", "| evidence | |", "|---|---:|", *rows]


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.5g}"
    return str(value).replace("|", "\\|")

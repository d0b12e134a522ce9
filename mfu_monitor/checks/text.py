"""Diagnoses as markdown: what TensorBoard's text tab and the console show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mfu_monitor.checks.diagnosis import Diagnosis

__all__ = ["diagnosis_text"]

_INTERNAL = frozenset({"strength", "distance", "witness"})  # told in words already


def diagnosis_text(diagnoses: Iterable[Diagnosis]) -> str:
    """Markdown: each diagnosis with what was seen, the likely cause, the fix, and its figures as a table.

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

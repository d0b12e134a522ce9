"""Readings that physics forbids, and why: one pure function a check, on frozen records."""

from mfu_monitor.checks.cause_table import CAUSE_CODES
from mfu_monitor.checks.diagnose import check
from mfu_monitor.checks.diagnosis import SEVERITIES, Diagnosis, diagnosis_text, withheld
from mfu_monitor.checks.evidence import Evidence
from mfu_monitor.checks.limits import CHECK_CODES

__all__ = [
    "CAUSE_CODES",
    "CHECK_CODES",
    "SEVERITIES",
    "Diagnosis",
    "Evidence",
    "check",
    "diagnosis_text",
    "withheld",
]

"""Readings that physics forbids, and why: one pure function a check, on frozen records."""

from mfu_monitor.checks.check import CAUSE_CODES, check
from mfu_monitor.checks.diagnosis import SEVERITIES, Diagnosis, Evidence, withheld
from mfu_monitor.checks.limits import CHECK_CODES
from mfu_monitor.checks.text import diagnosis_text

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

"""What a check sees and says: the diagnosis, and the evidence that readings and records do not hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mfu_monitor.errors import ConfigurationError

__all__ = ["SEVERITIES", "Diagnosis", "Evidence", "withheld"]

SEVERITIES = ("note", "warning", "error")
"""From the mildest. An error withholds the reading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
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
    """The figures that support it, by name with their unit."""
    likely_cause: str = ""
    fix: str = ""
    """The next action."""

    def __str__(self) -> str:
        parts = (self.message, self.likely_cause, self.fix)
        return f"[{self.code}] " + " ".join(part for part in parts if part)

    def to_dict(self) -> dict[str, Any]:
        """Plain types for JSON."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**values, "evidence": dict(self.evidence)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Diagnosis:
        """The inverse of ``to_dict``; unknown keys of a later version are ignored."""
        names = {f.name for f in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})


def withheld(diagnoses: Iterable[Diagnosis]) -> bool:
    """True when a reading with these diagnoses must not be shown as a result.

    Example:
        >>> if not withheld(mm.check(reading)):
        ...     log({"utilization/mfu": reading.mfu})
    """
    return any(diagnosis.severity == "error" for diagnosis in diagnoses)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What somebody claimed, and what else is known: everything is optional, None is unknown.

    *Claims* are figures under question (the user's own FLOPs, another tool's MFU). *Witnesses* are facts that a cause
    must agree with before it is named.

    Example:
        >>> mm.check(reading, record, evidence=Evidence(flops_per_batch=model.flops_per_batch))

    Raises:
        ConfigurationError: a figure is negative.
    """

    # Claims.
    flops_per_batch: float | None = None
    """FLOPs of one training batch on one rank, as the user's own formula gives them (Lightning's contract)."""
    flops_per_batch_is_used: bool = False
    """True where the window's model FLOPs are the user's and not our count (honoured, because asked to)."""
    reported_mfu: float | None = None
    """MFU of the same window by another tool, as a fraction."""
    claimed_parameters: float | None = None
    """The N that the user's formula (6 N D) used."""
    claimed_tokens: float | None = None
    """Tokens of this rank's window, as another tool or the user counted them."""
    promised_precision: str | None = None
    """What the configuration promises: ``"bf16-mixed"``, ``"16-true"``, ``"bf16"``."""

    # Witnesses on the model and the loop.
    parameters: float | None = None
    """All parameters by their logical shapes, each once."""
    embedding_parameters: float | None = None
    """Those of look-ups only: they take part in no product."""
    inactive_expert_parameters: float | None = None
    """Those of experts that one token does not pass through."""
    stored_parameters: float | None = None
    """Sum of ``numel`` of the tensors as they lie on this rank: a shard's part, packed 4-bit weights as bytes."""
    parameter_bytes: float | None = None
    """Bytes of the weights that one batch must read on this rank."""
    gradient_bytes: float | None = None
    """Bytes of the gradients that one batch must write on this rank."""
    accumulate_grad_batches: int | None = None
    input_elements: float | None = None
    """Elements of this rank's inputs in the window (pixels x channels, for images)."""

    # Witnesses on time.
    step_times_s: tuple[float, ...] = ()
    """Seconds of each step of the window, in order."""
    timestamps_s: tuple[float, ...] = ()
    """Times of readings or steps, in the order in which they were written."""
    mfu_history: tuple[tuple[int, float], ...] = ()
    """(last step, MFU) of earlier readings, oldest first."""
    device_elapsed_s: float | None = None
    """Seconds of the window by the device's own clock, where the window's are the host's."""

    # Witnesses on the device.
    device_name: str | None = None
    """What the driver says the device is, where the reading's name came from elsewhere."""
    sm_count: int | None = None
    """Multiprocessors (compute units) that the driver reports."""
    table_sm_count: int | None = None
    """Multiprocessors of the whole product by the table; looked up where it is None."""
    sparse_flops_per_s: float | None = None
    """The vendor's 2:4 sparse figure at the active precision; looked up where it is None."""
    neighbour_peaks: Mapping[str, float] = field(default_factory=dict)
    """Dense peaks of look-alike devices at the active precision, by name; looked up where it is empty."""
    achievable_flops_per_s: float | None = None
    """The best matrix product measured on this device at the active precision."""
    max_clock_ratio: float | None = None
    """Maximum clock over the clock of the sheet's figure; looked up where it is None."""

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, int | float) and not value >= 0:
                raise ConfigurationError(
                    f"Evidence({f.name}={value!r}): a figure of at least 0 was expected, or None where it is unknown, "
                    f"for example Evidence({f.name}=None)."
                )

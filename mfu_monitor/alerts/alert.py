"""What an alert says: frozen records of plain types."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Alert", "CauseShare"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseShare:
    """One factor of a drop: its value before and after, and its share of the loss (0..1).

    ``name`` is one of ``mfu_monitor.alerts.causes.CAUSES``; ``"unknown"`` is an allowed answer.
    ``share_of_loss`` is None in a ``"change"`` notice, where nothing was lost.
    """

    name: str
    before: float | None
    after: float | None
    unit: str
    share_of_loss: float | None
    description: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain types for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CauseShare:
        """The inverse of ``to_dict``; unknown keys of a later version are ignored."""
        names = {f.name for f in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One notice: ``kind`` is ``"drop"``, ``"floor"``, ``"sag"``, ``"recovery"`` or ``"change"``.

    ``mfu`` and ``baseline`` are the MFU of the incident's windows and of the windows that they are compared with; None
    where the device's peak is not known: detection then follows model FLOP/s. ``causes`` come largest first.
    """

    kind: str
    step: int
    """The training batch at which it was noticed."""
    mfu: float | None
    baseline: float | None
    message: str
    causes: tuple[CauseShare, ...] = ()
    first_step: int | None = None
    """The first training batch of the windows that it speaks of."""
    loss: float | None = None
    """Relative loss of useful work, 0..1: of MFU, of tokens that are not padding, of time not spent compiling."""
    incident: int | None = None
    """Number of the incident, the same in its alert and in its recovery."""

    def to_dict(self) -> dict[str, Any]:
        """Plain types for JSON."""
        return dataclasses.asdict(self) | {"causes": [cause.to_dict() for cause in self.causes]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Alert:
        """The inverse of ``to_dict``; unknown keys of a later version are ignored."""
        names = {f.name for f in dataclasses.fields(cls)} - {"causes"}
        known = {name: value for name, value in values.items() if name in names}
        return cls(causes=tuple(map(CauseShare.from_dict, values.get("causes", ()))), **known)

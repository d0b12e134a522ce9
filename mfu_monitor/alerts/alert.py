"""What an alert says: frozen records of plain types."""

from __future__ import annotations

from dataclasses import dataclass

from mfu_monitor.counting.plain_types import PlainTypes

__all__ = ["Alert", "CauseShare"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseShare(PlainTypes):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert(PlainTypes):
    """``kind`` is ``"drop"``, ``"floor"``, ``"recovery"``, ``"change"`` or, for a gradual decline, ``"sag"``.

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
    level: str = ""
    """What was watched: ``"mfu"``, ``"model_flops_per_s"`` or ``"tokens_per_s"``; of useful work (``loss``)."""
    before: float | None = None
    """Its value in the windows that are compared with."""
    after: float | None = None
    lost_s: float | None = None
    """Seconds lost in the windows that it speaks of; in a recovery those of the whole incident. None: nothing was."""
    next_action: str = ""
    """What to try first."""
    incident: int | None = None
    """Number of the incident, the same in its alert and in its recovery."""

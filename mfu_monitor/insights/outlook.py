"""What the step could reach, where the rest went, and how long the run will take."""

from __future__ import annotations

import dataclasses
import importlib.util
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mfu_monitor.counting.step_record import StepRecord
from mfu_monitor.hardware.device_peak import DevicePeak
from mfu_monitor.insights.advice import advise
from mfu_monitor.insights.planning import RemainingWork, remaining_work
from mfu_monitor.insights.roofline import attainable_mfu
from mfu_monitor.insights.waterfall import Waterfall, waterfall
from mfu_monitor.timing.step_window import StepWindow
from mfu_monitor.utilization import UtilizationReading

__all__ = ["Outlook", "OutlookCard"]

_OWN_SHARE = 0.0005
"""Share of the run's time that the outlook may take on the host; beyond it windows go without a waterfall."""


@dataclass(frozen=True, slots=True)
class OutlookCard:
    """The waterfall of the latest window, as people read it."""

    text: str
    """Markdown: the waterfall, its advice, the time that is left."""
    payload: Mapping[str, Any]
    """The same in plain types."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Pictures by tag."""


class Outlook:
    """Keeps what depends only on the counted step and the peak, and adds what a window says.

    Args:
        total_steps: training batches of the whole run, for the time that is left; None where it is not known.
        price_per_device_hour: for the cost that is left.
    """

    def __init__(self, *, total_steps: int | None = None, price_per_device_hour: float | None = None) -> None:
        self.total_steps = total_steps
        self._price = price_per_device_hour
        self._for: tuple[StepRecord, DevicePeak] | None = None
        self._attainable: float | None = None
        self._latest: Waterfall | None = None
        self._explains: StepRecord | None = None
        self._left: RemainingWork | None = None
        self._spent_s = 0.0

    def attainable(self, record: StepRecord | None, peak: DevicePeak | None) -> float | None:
        """The MFU that the roofline allows for this step, computed once for each count."""
        if record is None or peak is None:
            return None
        if self._for is None or self._for[0] is not record or self._for[1] is not peak:
            self._for = (record, peak)
            self._attainable = attainable_mfu(record, peak)
        return self._attainable

    def metrics(
        self, reading: UtilizationReading, record: StepRecord | None, peak: DevicePeak | None, *, wall_s: float
    ) -> dict[str, float]:
        """``waterfall/*`` and ``remaining/*`` of one window.

        Args:
            reading: of the window; one that was withheld has no waterfall.
            record: the counted step behind it.
            peak: the device's peak.
            wall_s: the run's time so far, against which the outlook's own cost is held.
        """
        found = dict(self._remaining(reading.window))
        if record is not None and reading.mfu is not None and self._spent_s <= _OWN_SHARE * wall_s:
            began_s = time.perf_counter()
            self._latest, self._explains = waterfall(record, peak, reading.window), record
            found |= self._latest.metrics()
            self._spent_s += time.perf_counter() - began_s
        return found

    def _remaining(self, window: StepWindow) -> dict[str, float]:
        if self.total_steps is None or not window.steps:
            return {}
        pace_s = window.wall_s / (window.steps + window.excluded_steps)
        work = remaining_work(
            total_steps=self.total_steps,
            steps_done=window.last_step + 1,
            seconds_per_step=pace_s,
            devices=window.world_size,
            price_per_device_hour=self._price,
        )
        self._left = work
        return {} if work is None else work.metrics()

    def card(self, peak: DevicePeak | None, *, draw: bool) -> OutlookCard | None:
        """The waterfall of the latest window with its advice; None before a window has one.

        Args:
            peak: the device's peak.
            draw: with pictures, where matplotlib is installed.
        """
        if self._latest is None or self._explains is None or self._latest.mfu is None:
            return None
        lines = [advice.text for advice in advise(self._explains, peak, self._latest)]
        advice = "\n".join(f"- {line}" for line in lines)
        text = self._latest.markdown() + (f"\n\n**What would help most**\n\n{advice}" if lines else "")
        if self._left is not None:
            text += f"\n\n**At the present pace**: {self._left.text()}"
        payload = {"waterfall": _plain(self._latest), "advice": lines}
        return OutlookCard(text, payload, self._figures(self._explains, peak) if draw else {})

    def _figures(self, record: StepRecord, peak: DevicePeak | None) -> dict[str, Any]:
        if importlib.util.find_spec("matplotlib") is None:
            return {}
        from mfu_monitor.insights.plots import step_figures

        return step_figures(record, peak, self._latest)


def _plain(steps: Waterfall) -> dict[str, Any]:
    return {"mfu": steps.mfu, "steps": [dataclasses.asdict(step) for step in steps.steps], "notes": list(steps.notes)}

"""A number under every name that another callback monitors, also without a reading: no run ends for want of one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mfu_monitor import metric_names
from mfu_monitor.errors import MFUMonitorWarning, warn
from mfu_monitor.utilization import UtilizationReading, metrics_of

__all__ = ["PROGRESS_METRICS", "MonitoredMetrics"]

PROGRESS_METRICS = ("mfu", "hfu", "tokens_per_s")
_KNOWN = frozenset(
    {
        *PROGRESS_METRICS,
        *metric_names.OF_READING.values(),
        *metric_names.STEP_TIME.values(),
        *metric_names.FLOPS_PER_STEP.values(),
        *metric_names.THROUGHPUT_MONITOR.values(),
        metric_names.OF_MEASURED_PEAK,
    }
)
_WORST = 1e9


class MonitoredMetrics:
    """Keeps ``trainer.callback_metrics`` filled for what monitors it: ``EarlyStopping``, checkpoints, schedulers.

    They end the run where the metric that they monitor is missing. Until there is a reading they find a placeholder:
    a number that every reading beats, and that gets a little better with each batch, so that no patience is used up
    and the newest checkpoint is kept. It is in no logger and no progress bar. A window without the value keeps the
    last one that was valid.

    Example:
        >>> monitored = MonitoredMetrics(trainer)
        >>> monitored.offer(trainer, reading)
    """

    def __init__(self, trainer: Any) -> None:
        self._watchers = [(name, watcher) for watcher in _watchers(trainer) if (name := watcher.monitor) in _KNOWN]
        self._values: dict[str, float] = {}
        self._is_told = False

    def __contains__(self, name: str) -> bool:
        return any(name == watched for watched, _ in self._watchers)

    def offer(self, trainer: Any, reading: UtilizationReading | None) -> None:
        """Give every monitored name its value as of this reading, the last valid one, or a placeholder."""
        if not self._watchers:
            return
        batches = trainer.fit_loop.total_batch_idx + 1  # goes on after a resume, as the watchers' best score does
        missing = self._take(reading)
        for name, watcher in self._watchers:
            value = self._values.get(name)
            trainer.callback_metrics[name] = torch.tensor(
                _placeholder(watcher, batches) if value is None else value, dtype=torch.float64
            )
        if reading is not None and missing and not self._is_told:
            self._is_told = True
            warn(_message(missing[0], reading), MFUMonitorWarning)

    def _take(self, reading: UtilizationReading | None) -> list[str]:
        if reading is None:
            return []
        known = metrics_of(reading) | metrics_of(reading, names="throughput_monitor")
        known |= {name: float(v) for name in PROGRESS_METRICS if (v := getattr(reading, name)) is not None}
        self._values |= known
        return [name for name, _ in self._watchers if name not in known]


def _watchers(trainer: Any) -> Iterator[Any]:
    """Whatever has a ``monitor``: callbacks and the schedulers' configurations."""
    for watcher in (*trainer.callbacks, *getattr(trainer, "lr_scheduler_configs", ())):
        if isinstance(getattr(watcher, "monitor", None), str):
            yield watcher


def _placeholder(watcher: Any, batches: int) -> float:
    divergence = getattr(watcher, "divergence_threshold", None)
    if divergence is not None:
        return float(divergence)  # not beyond it, or training would end
    step = 1.0 + 2.0 * abs(float(getattr(watcher, "min_delta", 0.0) or 0.0))
    distance = max(_WORST * step - batches * step, step)
    return distance if getattr(watcher, "mode", "max") == "min" else -distance


def _message(name: str, reading: UtilizationReading) -> str:
    why = f" ({reading.reason})" if reading.reason else ""
    return (
        f"A callback monitors {name!r}, and the window of steps {reading.first_step}-{reading.last_step} has no such "
        f"value{why}. It sees the last valid value, or a placeholder that every reading beats. Where the device's peak "
        'is unknown, give it in FLOP/s with peak=..., or measure it with peak="measure".'
    )

"""Readings in, alerts out: detection and cause, pure and replayable from JSONL."""

from mfu_monitor.alerts.alert import Alert, CauseShare
from mfu_monitor.alerts.causes import attribute_loss
from mfu_monitor.alerts.detector import AlertDetector
from mfu_monitor.alerts.figures import WindowFigures, figures_of, mean_figures
from mfu_monitor.alerts.thresholds import AlertConfig

__all__ = [
    "Alert",
    "AlertConfig",
    "AlertDetector",
    "CauseShare",
    "WindowFigures",
    "attribute_loss",
    "figures_of",
    "mean_figures",
]
